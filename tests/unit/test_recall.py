"""The recall task: its contexts, what counts as right, and the command that runs it."""

import json
import string

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_models import build  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lowbit_attn import recall as task  # noqa: E402
from lowbit_attn.cli import app  # noqa: E402

PROSE = "".join(f"sentence number {i} of a long and dull report. " for i in range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random Llama with a tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    letters = {c: i for i, c in enumerate(["<unk>", "<eos>", "<pad>", *string.printable[:90]])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>",
                                         unk_token="<unk>").save_pretrained(path)
    build("llama", num_hidden_layers=1, max_position_embeddings=4096).save_pretrained(path)
    return path


def test_contexts_hold_what_is_asked_for():
    made = task.contexts(PROSE, 24)
    assert [len(context.codes) for context in made] == [10, 10, 4]
    for context in made:
        for word, code in context.codes.items():
            assert len(code) == 4 and context.text.count(f"\n{word}: {code}\n") == 1
        head, tail = context.text.split("\n\nThe list of codes:\n")
        lines, after = tail.split("\n\n", 1)
        assert len(lines.splitlines()) == 12 == len({line.split(":")[0] for line in lines.splitlines()})
        assert len(head) == task.BEFORE and len(after) == task.AFTER + 1
    assert task.contexts(PROSE, 24) == made
    for prose, questions, words in ((PROSE, 0, "questions: got 0"), ("short", 1, "text: got 5 characters")):
        with pytest.raises(ValueError, match=words):
            task.contexts(prose, questions)


class Oracle(torch.nn.Module):
    """A model that predicts the code of a known word where its cache says that the prompt holds it."""

    device = torch.device("cpu")

    def __init__(self, known: dict[str, str], tokenizer):
        super().__init__()
        self.known, self.tokenizer = known, tokenizer
        self.config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=1, head_dim=64,
                                               attn_implementation="eager")

    def set_attn_implementation(self, name):
        self.config._attn_implementation = name

    def forward(self, ids, logits_to_keep=0, **cache):
        text = self.tokenizer.decode(ids[0])
        logits = torch.zeros(1, ids.shape[1], 512)
        for word, code in self.known.items():
            if text.startswith(f"\nThe list of codes again:\n{word}:"):
                whole = self.tokenizer(f"\nThe list of codes again:\n{word}: {code}").input_ids
                logits[0, torch.arange(len(whole) - 1), torch.tensor(whole[1:])] = 1
        return type("Output", (), dict(logits=logits))()


class Letters:
    """A tokenizer of single characters."""

    def __call__(self, text, return_tensors=None, add_special_tokens=True):
        ids = [ord(c) for c in text]
        return type("Encoded", (), dict(input_ids=torch.tensor([ids]) if return_tensors else ids))()

    def decode(self, ids):
        return "".join(chr(i) for i in ids)


def test_all_digits_must_be_right(monkeypatch):
    monkeypatch.setattr(task, "new_cache", lambda options, model, tokens: None)  # the oracle reads none
    made, tokenizer = task.contexts(PROSE, 20), Letters()
    codes = {word: code for context in made for word, code in context.codes.items()}
    for wrong in (0, 5, len(codes)):
        known = {word: code if i >= wrong else code[:3] + str((int(code[3]) + 1) % 10)
                 for i, (word, code) in enumerate(codes.items())}
        asked = [(word, code) for context in made for word, code in context.codes.items()]
        want = sum(known[word] == code for word, code in asked)
        score = task.recall(Oracle(known, tokenizer), tokenizer, PROSE, {"16 bit": None}, 20)["16 bit"]
        assert (score.questions, score.right, score.recall) == (20, want, want / 20)
        assert score.tokens == sum(len(context.text) for context in made)


def test_the_command_asks_all_caches(folder, tmp_path):
    """On a random model, which knows nothing: 16 bit and 8 bits agree, and lines are those of the table."""
    text, lines = tmp_path / "text.txt", tmp_path / "lines.jsonl"
    text.write_text(PROSE)
    names = ("k8v8", "k4v2-boost", "lean-low")
    result = CliRunner().invoke(app, ["quality", "--task", "recall", "--model", str(folder), "--text", str(text),
                                      *(part for name in names for part in ("--format", name)), "--sinks", "32",
                                      "--questions", "2", "--jsonl", str(lines)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    read = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["cache"] for line in read] == ["16 bit", *(f"{name}, 32 sinks" for name in names)]
    assert all(line["task"] == "recall" and line["questions"] == 2 and line["tokens"] > 1000 for line in read)
    assert all(name in result.output for name in names)


@pytest.mark.parametrize("options, words", [
    (("--task", "poetry"), "task: got 'poetry', supported: text, recall"),
    (("--task", "recall", "--plot", "x.png"), "plot: got a file beside the task recall"),
    (("--format", "k4tv4+k2v2"), "K per token of 4 bits"), (("--format", "k4v4+k9"), "is not known")])
def test_wrong_options_end_the_command(folder, options, words):
    result = CliRunner().invoke(app, ["quality", "--model", str(folder), *options])
    assert result.exit_code == 2 and words in " ".join(result.output.split())
