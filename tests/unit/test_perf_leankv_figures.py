"""perf/leankv_figures.py: its cases, what it counts of attention and of caches, and that a run goes on."""

import json
import sys

import pytest
import torch
import typer
from perf_scripts import PERF, script
from typer.testing import CliRunner

pytest.importorskip("transformers")

from tiny_models import build, tokens  # noqa: E402

from lowbit_attn import quality  # noqa: E402

SHORT = 400  # tokens, of which two blocks leave a window


@pytest.fixture(scope="module")
def figures():
    with script("leankv_figures") as module:
        yield module


@pytest.fixture(scope="module")
def parts(figures):
    return sys.modules["leankv_cases"]


def test_every_case_makes_a_cache(parts):
    made = parts.cases()
    assert {figure for case in made.values() for figure in case.figures} == {"8", "9", "10", "11"}
    assert all(quality.new_cache(case.options) is not None for case in made.values())
    assert made["pruned 20 %, static"].options["policy"].counts(1000) == (800, 800)
    assert made["lean, 20 % pruned"].options["policy"].counts(1000) == (200, 800)
    assert made["k4v2+k4v1, 80 % k4v1"].options["policy"].counts(1000) == (200, 1000)
    assert parts.recall_cases().items() <= made.items()


def test_critical_tokens_are_the_fewest(parts):
    scores = torch.tensor([[0.05, 0.5, 0.15, 0.3], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 7.0, 0.0]])
    assert parts.critical(scores - torch.tensor([[0.001, 0, 0, 0], [0] * 4, [0] * 4])).tolist() == [3, 4, 1]


def test_histograms_are_by_decade(parts):
    found = parts.histogram(torch.tensor([0.0, 1.5e-3, 1.2e-3, 20.0, 1e9]))
    assert len(found) == 70 and sum(found) == 5
    assert (found[0], found[45], found[66], found[69]) == (1, 2, 1, 1)  # 10^-3 is 9 decades up, 20 is 10^1.3


def test_scores_are_means_over_later_queries(parts):
    p = torch.rand(4, 6, 6).tril()
    p /= p.sum(-1, keepdim=True)
    values = torch.randn(2, 6, 64)
    found = parts.of_layer(p, values)
    heads = p.view(2, 2, 6, 6).mean(1)
    want = torch.tensor([[heads[h, i + 1 :, i].mean() for i in range(5)] for h in range(2)])
    assert found["score"] == parts.quantiles(want) and sum(found["scores"]) == 10
    assert found["norm"] == parts.quantiles(values.norm(dim=-1)) and sum(found["norms"]) == 12
    assert found["critical"] == parts.critical(heads.sum(1)).tolist()
    assert found["critical_of_a_query"] == pytest.approx(parts.critical(heads).double().mean(1).tolist(), abs=0.06)


def test_attention_is_the_models_own(parts):
    model, window = build("llama"), tokens(90)[0].tolist()
    found = parts.attention_of(model, window, (1,))
    assert all(len(found[name]) == 2 and len(found[name][0]) == 2 for name in ("critical", "critical_of_a_query"))
    assert list(found["scores"]) == list(found["norms"]) == ["1"] and sum(found["scores"]["1"]) == 2 * 89
    model.set_attn_implementation("eager")
    p = model(torch.tensor([window]), output_attentions=True).attentions
    assert found["critical"][1] == parts.critical(p[1][0].unflatten(0, (2, 3)).mean(1).sum(1)).tolist()


def test_caches_are_read_once_and_say_what_they_store(figures, parts):
    model, window, about = build("llama"), tokens(SHORT)[0].tolist(), {"text": "docs", "window": 0}
    known = parts.cases()
    labels = ("pruned 20 %, static", "lean, 50 % high", "pruned 40 %, random")
    known = {label: known[label] for label in labels}
    lines = {line["label"]: line for line in figures.read_text(model, window, about, set(), known)}
    assert list(lines) == list(labels) and all(line["kl"] > 0 and line["text"] == "docs" for line in lines.values())
    pruned, high, random = lines.values()
    assert pruned["pruned"] == pruned["least_pruned"] == pytest.approx(26 / 128, abs=1e-4)
    assert pruned["bits"] == pytest.approx((1 - 26 / 128) * 8.375, abs=1e-3)
    assert (high["high"], high["low"], high["pruned"]) == (0.5, 0.5, 0)
    assert high["bits"] == pytest.approx((6.375 + 3.375) / 2, abs=1e-3)
    assert random["pruned"] == pytest.approx(51 / 128, abs=1e-4)
    done = {figures.key_of(line | {"task": "text"}) for line in lines.values()}
    assert not list(figures.read_text(model, window, about, done, known))
    other = about | {"text": "gpl"}
    assert next(figures.read_text(model, window, other, done, known))["label"] == labels[0]


def test_another_model_reads_what_it_is_told(figures, parts, tmp_path, monkeypatch):
    """One window of one text over one cache, its lines beside another model's; what is there is not read again."""
    from lowbit_attn.demo import model as models

    path, asked = tmp_path / "lines.jsonl", []
    window = tokens(SHORT)[0].tolist()
    old = {"commit": "a", "model": figures.MODEL, "task": "text", "label": "lean, 50 % high", "text": "code",
           "window": 0}
    path.write_text(json.dumps(old) + "\n")
    reader = type("Reader", (), {"bos_token_id": None, "__call__": lambda self, text: type("I", (), {
        "input_ids": asked.append(text) or window})()})
    monkeypatch.setattr(models, "load", lambda *_: (build("llama"), reader()))
    monkeypatch.setattr(figures, "provenance", lambda: {"commit": "b"})
    words = ["measure", "--gguf", "none", "--model", "M", "--text", "code", "--windows", "1", "--tokens", "400",
             "--label", "lean, 50 % high", "--only", "attention", "--only", "text", "--output", str(path)]
    for _ in range(2):
        answer = CliRunner().invoke(figures.app, words)
        assert answer.exit_code == 0, answer.output
    attention, text = map(json.loads, path.read_text().splitlines()[1:])
    assert attention["task"] == "attention" and list(attention["scores"]) == ["0", "1"]
    assert text["label"] == "lean, 50 % high" and text["tokens"] == 400 and text["kl"] > 0
    assert {attention["model"], text["model"]} == {"M"} and "def median" in asked[0]
    assert figures.table_of(figures.read_lines(str(path), "M"), ("code",)).count("| lean, 50 % high |") == 1
    for option in ("--only", "--text", "--label"):
        answer = CliRunner().invoke(figures.app, ["measure", option, "nobody"], env={"COLUMNS": "160"})
        assert answer.exit_code == 2 and "nobody" in answer.output


def test_lines_become_a_table(figures):
    one = dict(task="text", label="lean, 50 % high", bits=4.8, pruned=0.0, high=0.5, kl=0.002, top1=0.98,
               least_pruned=0.0, most_pruned=0.0)
    lines = [one | {"text": text, "kl": kl} for text, kl in (("docs", 0.001), ("gpl", 0.002), ("code", 0.006))]
    assert figures.table_of(lines[:2]).count("\n") == 1
    assert "| lean, 50 % high | 4.80 | 0.0% | 0% to 0% | 3.00 | 98.0% |" in figures.table_of(lines)
    assert figures.pooled(lines + [lines[0] | {"kl": 0.004}], "lean, 50 % high")["kl"] == pytest.approx(0.004)


def test_lines_of_a_changed_tree_are_measured_again(figures, tmp_path):
    path = tmp_path / "lines.jsonl"
    lines = [{"commit": "a", "model": figures.MODEL}, {"commit": "b+dirty", "model": figures.MODEL},
             {"commit": "c", "model": "M"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["commit"] for line in figures.read_lines(str(path))] == ["a"]
    assert [line["commit"] for line in figures.read_lines(str(path), "M")] == ["c"]
    assert figures.read_lines(str(tmp_path / "none")) == []
    assert (PERF / "leankv_figures.py").is_file()


def test_plots_are_drawn_from_the_lines(figures, tmp_path):
    figures.plot(folder=str(tmp_path))
    drawn = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert drawn.keys() == {"leankv-attention.png", "leankv-quality.png", "leankv-speed.png"}
    assert all(10_000 < size < 100_000 for size in drawn.values())


def test_plots_without_lines_are_named(figures, tmp_path, monkeypatch, capsys):
    (tmp_path / "perf/results").mkdir(parents=True)
    for name in ("leankv_figures", "texts", "e2e", "decode"):
        (tmp_path / f"perf/results/{name}.jsonl").write_text("")
    monkeypatch.setitem(sys.modules["paper_lines"].Lines.newest.__globals__, "ROOT", tmp_path)
    with pytest.raises(typer.Exit):
        figures.plot(folder=str(tmp_path / "plots"))
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "leankv-attention", "leankv-quality", "leankv-speed"]


def test_bytes_at_equal_kl_are_between_neighbours(figures):
    with script("leankv_rows") as rows:
        lines = rows.Lines()
        kl = {name: rows.uniform_kl(lines, name) for name in ("k4v4", "k4v2", "k2v2")}
        assert rows.equal_bits(lines, kl["k4v4"]) == pytest.approx(4.375)
        assert rows.equal_bits(lines, (kl["k4v4"] * kl["k4v2"]) ** 0.5) == pytest.approx((4.375 + 3.375) / 2)
        with pytest.raises(ValueError, match="between those of k8v4 and k2v2"):
            rows.equal_bits(lines, 2 * kl["k2v2"])
