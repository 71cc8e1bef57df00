"""The programs of examples/, at small size on the CPU: what they print is true of what they did."""

import importlib.util
import re
import string
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from tiny_models import build  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps " * 5


pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # none in what is documented


def main_of(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random Llama with a tokenizer of single characters, and a text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    letters = {c: i for i, c in enumerate(["<unk>", "<eos>", "<pad>", " ", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>",
                                         unk_token="<unk>").save_pretrained(path)
    build("llama").save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def test_every_example_is_in_the_table_and_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(re.findall(r"examples/(\w+)\.py", (EXAMPLES / "README.md").read_text()))
    assert names == set(re.findall(r'main_of\("(\w+)"\)', Path(__file__).read_text()))


def test_cuda_graph_decode(capsys):
    main_of("cuda_graph_decode")(["--context", "250", "--steps", "10"])
    shown = capsys.readouterr().out
    assert "10 steps, called one by one (no GPU here" in shown and "from 250 to 260 tokens" in shown
    error, = re.findall(r"reference by (\S+),", shown)
    assert float(error) < 1e-3
    found = re.search(r"cache: ([\d,]+) bytes, in 16 bit ([\d,]+)", shown)
    low, whole = (int(n.replace(",", "")) for n in found.groups())
    assert low < whole / 2


def test_paged_serving(capsys):
    main_of("paged_serving")(["--prompt", "300", "--requests", "3", "--steps", "20"])
    shown = capsys.readouterr().out
    pages = [int(n) for n in re.findall(r"^ *(\d+) of 64 pages in use", shown, re.M)]
    assert pages[:2] == [2, 2] and pages[-1] == 0, "sharing takes no page, and all come back"
    assert pages[2] >= 2 and 2 <= pages[-2] <= pages[2]
    kept, = map(int, re.findall(r"240 drafts, (\d+) of them were kept", shown))
    lengths = [int(n) for n in re.search(r"of each request: (.*)", shown)[1].split(", ")]
    assert len(lengths) == 3 and sum(lengths) == 3 * 300 + kept


def test_hf_long_document(capsys, folder):
    main_of("hf_long_document")([str(folder), str(folder / "text.txt"), "who sleeps", "--tokens", "6", "--format",
                                 "k8v8"])
    shown = capsys.readouterr().out
    tokens, = re.findall(r"question have (\d+) tokens", shown)
    whole, low = (int(n.replace(",", "")) for n in re.findall(r": ([\d,]+) bytes of KV cache, \d+ tokens in", shown))
    assert int(tokens) >= len(TEXT) and whole > low > whole / 4
    assert re.search(r"^The answers (are the same|differ)\.$", shown, re.M)


def test_quality_check(capsys, folder):
    main_of("quality_check")([str(folder), str(folder / "text.txt"), "--format", "k8v8", "--format", "k1v1",
                              "--sinks", "4", "--tokens", "300"])
    shown = capsys.readouterr().out
    rows = {name: cells.split() for name, cells in re.findall(r"^(16 bit|k8v8|k1v1) +([\d,]+ .*)$", shown, re.M)}
    nbytes = [int(rows[name][0].replace(",", "")) for name in ("16 bit", "k8v8", "k1v1")]
    assert nbytes[0] > nbytes[1] > nbytes[2]
    assert float(rows["k8v8"][2].rstrip("%")) > float(rows["k1v1"][2].rstrip("%"))
    assert re.search(r"^k8v8: perplexity changes by [+-]0\.\d%: hardly", shown, re.M)
