"""lm-eval over low-bit caches: a tiny model's answers are those of reading by hand, in chunks, packed pages and all."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("lm_eval")

from tiny_models import build, save_with_letters, tokens  # noqa: E402

from lowbit_attn import extras, quality  # noqa: E402
from lowbit_attn.cli import app  # noqa: E402
from lowbit_attn.evaluation import model as lm  # noqa: E402
from lowbit_attn.evaluation import tasks  # noqa: E402
from lowbit_attn.integrations.hf import CACHE_ARGUMENT  # noqa: E402

K1V1 = dict(format="k1v1", sinks=0)


class Letters:
    """A tokenizer of single characters: "A" + i is token i + 3."""

    bos_token = bos_token_id = None
    eos_token_id, name_or_path = 1, "letters"

    def __call__(self, text: str, add_special_tokens: bool = True):
        return SimpleNamespace(input_ids=[3 + (ord(c) - 65) % 90 for c in text])

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(65 + i - 3) for i in ids)


def text(count: int, first: int = 0) -> str:
    return Letters().decode(tokens(first + count)[0, first:].tolist())


@pytest.fixture(scope="module")
def network():
    return build("llama")


def made(network, **options) -> lm.LowBitLM:
    return lm.LowBitLM(network, tokenizer=Letters(), **options)


def by_hand(network, ids: list[int], options: dict | None, sizes: list[int]) -> torch.Tensor:
    """Logits of every token, read in calls of these sizes."""
    cache, found, start = quality.new_cache(options), [], 0
    quality.use_cache_kind(network, options)
    with torch.no_grad():
        for size in sizes:
            chunk = torch.tensor([ids[start : start + size]])
            found.append(network(chunk, **{CACHE_ARGUMENT: cache}).logits[0])
            start += size
    return torch.cat(found)


def request(*arguments) -> SimpleNamespace:
    return SimpleNamespace(args=arguments)


def test_loglikelihoods_are_those_of_chunks_over_the_cache(network):
    """400 tokens and 20 to score: over 1-bit pages, which one forward call would not read."""
    context, answer, before = text(400), text(20, 400), network.config._attn_implementation
    ids = Letters()(context + answer).input_ids
    target = torch.tensor(ids[400:])
    one, whole, base = made(network, **K1V1), made(network, chunk=0, **K1V1), made(network, format="16")
    got = {name: which.loglikelihood([request(context, answer)], disable_tqdm=True)[0][0]
           for name, which in (("chunks", one), ("whole", whole), ("16", base))}
    for name, options, sizes in (("chunks", K1V1, [128, 128, 128, 35]), ("16", None, [419])):
        rows = by_hand(network, ids[:-1], options, sizes)[399:].log_softmax(-1)
        assert got[name] == pytest.approx(rows.gather(1, target[:, None]).sum().item(), abs=1e-3), name
    assert got["whole"] == pytest.approx(got["16"], abs=0.05), "one call attends to its own tokens in 16 bit"
    assert abs(got["chunks"] - got["16"]) > 1
    assert network.config._attn_implementation == before, "the model attends as before"
    assert one.attended.share == 1 and whole.attended.share == base.attended.share == 0


def test_what_prompts_share_is_read_once_and_changes_nothing(network):
    context = text(300)
    answers = [text(5, 300 + 5 * i) for i in range(3)]
    pairs = [request(context, answer) for answer in answers] + [request(text(200, 40), answers[0])]
    together = made(network, **K1V1).loglikelihood(pairs, disable_tqdm=True)
    apart = [made(network, **K1V1).loglikelihood([pair], disable_tqdm=True)[0] for pair in pairs]
    assert together == apart


def test_generation_is_greedy_over_packed_pages(network):
    """The same tokens as by hand; the text ends where a stop begins, or after max_gen_toks."""
    prompt, one = text(300), made(network, **K1V1)
    ids, sizes, new = Letters()(prompt).input_ids, [128, 128, 44], []
    for _ in range(6):
        new.append(by_hand(network, ids + new, K1V1, sizes + [1] * len(new))[-1].argmax().item())
    want = Letters().decode(new)
    assert 1 not in new, "the tiny model ended by itself: take another text"
    options = dict(until=["never"], max_gen_toks=6, do_sample=False)
    assert one.generate_until([request(prompt, options)]) == [want]
    assert one.attended.tokens == 6 and one.attended.share == 1
    assert one.generate_until([request(prompt, options | dict(until=want[3]))])[0] == want[: want.index(want[3])]
    base = made(network, format="16").generate_until([request(prompt, options)])
    assert base != [want], "1-bit pages say something else"


def test_rolling_loglikelihood_is_of_every_token(network):
    one, sample = made(network, format="k8v8", sinks=0), text(350)
    ids = [1, *Letters()(sample).input_ids]
    rows = by_hand(network, ids[:-1], dict(format="k8v8", sinks=0), [128, 128, 94]).log_softmax(-1)
    want = rows.gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    assert one.loglikelihood_rolling([request(sample)]) == [pytest.approx(want, abs=1e-3)]
    assert one.attended.tokens == 350 and 0.6 < one.attended.share < 0.65  # all but the first 128


@pytest.mark.parametrize("options, message", [
    (dict(batch_size=8), "batch_size: got 8"), (dict(chunk=-1), "chunk: got -1"), (dict(format="k9v9"), "k9v9"),
    (dict(pretrained="/nowhere", tokenizer=None), "pretrained: got '/nowhere', supported: 'demo'"),
    (dict(tokenizer=None), "tokenizer: got none")])
def test_what_is_wrong_is_told(network, options, message):
    with pytest.raises((ValueError, KeyError), match=message):
        lm.LowBitLM(**(dict(pretrained=network, tokenizer=Letters()) | options))


def test_what_exceeds_the_model_is_told_or_cut(network, caplog):
    one, context, answer = made(network, format="k8v8", max_length=100), text(300), text(9, 300)
    cut, = one.loglikelihood([request(context, answer)], disable_tqdm=True)
    assert "prompt: 308 tokens, of which the last 100 are read" in caplog.text
    assert cut == made(network, format="k8v8").loglikelihood([request(context[-92:], answer)], disable_tqdm=True)[0]
    with pytest.raises(ValueError, match="continuation: got 300 tokens, supported: at most max_length, 100"):
        one.loglikelihood([request(answer, context)], disable_tqdm=True)


@pytest.mark.parametrize("options, message", [
    (dict(do_sample=True), "do_sample: got True, supported: greedy"), (dict(penalty=2), "gen_kwargs: got penalty=2"),
    (dict(max_gen_toks=4096), "max_gen_toks: got 4096, supported: fewer than max_length")])
def test_a_search_that_is_not_greedy_is_refused(network, options, message):
    with pytest.raises(ValueError, match=message):
        made(network).generate_until([request(text(10), options)])


def test_recall_scores_what_is_written(network):
    """lm-eval's own evaluator: a model that looks the code up is right, and one that adds a digit is not."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    class Oracle(lm.LowBitLM):
        more = ""

        def generate_until(self, requests, disable_tqdm=False):
            found = []
            for prompt, _ in (one.args for one in requests):
                word = prompt.rsplit("\n", 1)[1]
                found.append(" " + prompt.split(f"\n{word} ")[1].split("\n")[0] + self.more)
            return found

    task = tasks.recall_task(12, "the quick brown fox jumps over the lazy dog " * 40)
    oracle = Oracle(network, tokenizer=Letters())
    for more, want in (("", 1.0), ("5", 0.0)):
        oracle.more = more
        found = lm_eval.simple_evaluate(oracle, tasks=[task], bootstrap_iters=0, log_samples=False,
                                        task_manager=TaskManager(include_defaults=False))
        assert found["results"][tasks.RECALL]["exact_match,none"] == want
        assert found["n-samples"][tasks.RECALL]["effective"] == 12


def test_without_lm_eval_the_remedy_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    answer = CliRunner().invoke(app, ["eval", "--model", str(tmp_path)])
    assert answer.exit_code == 2 and extras.remedy("eval") in answer.output


def test_command(tmp_path):
    lines, tiny_folder = tmp_path / "lines.jsonl", save_with_letters(tmp_path / "model")
    words = ["eval", "--model", str(tiny_folder), "--format", "k1v1", "--sinks", "4", "--limit", "2", "--jsonl",
             str(lines)]
    answer = CliRunner().invoke(app, words, env={"COLUMNS": "160"})
    assert answer.exit_code == 0, answer.output
    assert "never touches a quantized cache" in " ".join(answer.output.split())
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(one["cache"], one["metric"], one["documents"]) for one in found] == [
        ("16 bit", "exact_match", 2), ("k1v1, 4 sinks", "exact_match", 2)]
    assert found[0]["packed"] == 0 and found[1]["packed"] == 1 and found[1]["options"]["sinks"] == 4
    answer = CliRunner().invoke(app, ["eval", "--model", str(tiny_folder), "--task", "no_such_task"])
    assert answer.exit_code == 2 and "task: " in answer.output and "no_such_task" in answer.output
