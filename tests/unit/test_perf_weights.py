"""perf/weights.py: rounding to nearest, and the numbers of a line."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.append(str(Path(__file__).parents[2] / "perf"))
import weights  # noqa: E402

from lowbit_attn import quality  # noqa: E402


def test_round_to_nearest_uses_every_group_s_own_range():
    w = torch.randn(5, 200)
    w[2, 130:] *= 100
    for bits, group in ((2, 64), (4, 128)):
        got = weights.round_to_nearest(w, bits, group)
        for part, want in zip(got.split(group, 1), w.split(group, 1)):
            step = (want.amax(1, True) - want.amin(1, True)) / (2**bits - 1)
            assert ((part - want).abs() <= step / 2 * 1.001).all()
            assert all(len(row.unique()) <= 2**bits for row in part)
    assert torch.equal(weights.round_to_nearest(torch.zeros(2, 8), 4, 8), torch.zeros(2, 8))


def test_a_line_says_what_the_logits_say():
    ids, baseline = torch.randint(0, 50, (1, 200)), torch.randn(200, 50)
    line = weights.line_of(baseline, baseline, ids)
    nll = torch.nn.functional.cross_entropy(baseline[:-1], ids[0, 1:])
    assert line == {"perplexity": pytest.approx(nll.exp().item(), abs=1e-3), "kl": 0, "top1": 1}
    other = baseline + torch.randn(200, 50)
    line = weights.line_of(other, baseline, ids)
    assert line["kl"] == pytest.approx(quality.kl_divergence(baseline, other) / 200, abs=1e-4)
    assert line["top1"] == round(quality.agreement(other.argmax(-1), baseline.argmax(-1)), 4)


@pytest.fixture
def lines(monkeypatch, tmp_path) -> list[dict]:
    """What the commands append while they read a tiny model in place of the demo's."""
    from tiny_models import save_with_letters

    from lowbit_attn.demo import model as models
    from lowbit_attn.demo import scoring

    loaded, appended = models.load_folder(save_with_letters(tmp_path), "cpu"), []
    monkeypatch.setattr(weights, "loaded", lambda threads: loaded)
    monkeypatch.setattr(weights, "append_result", lambda path, line: appended.append(line))
    monkeypatch.setattr(scoring, "help_text", lambda *topics: "the quick brown fox jumps over the lazy dog " * 30)
    return appended


def test_every_case_is_read_over_the_cache(lines):
    weights.whole_model(tokens=300)
    weights.whole_model(tokens=300, cache="k2v2", sinks=16)
    alone, cached = lines[:3], lines[3:]
    assert [line["label"] for line in alone] == [line["label"] for line in cached] == ["16 bit", *weights.ROUNDED]
    assert alone[0]["kl"] == 0 and alone[0]["top1"] == 1 and {line["cache"] for line in alone} == {"16 bit"}
    assert cached[0]["kl"] > 0 and {(line["cache"], line["sinks"], line["codebooks"]) for line in cached} == {
        ("k2v2", 16, None)}
    assert all(x["perplexity"] != y["perplexity"] for x, y in zip(alone, cached))
    assert alone[0]["kl"] < alone[1]["kl"] < alone[2]["kl"]  # 4 bits before 2


def test_every_case_is_asked_over_both_caches(lines, monkeypatch):
    import lowbit_attn.recall as asking

    asked, recall = [], asking.recall

    def counted(model, tokenizer, prose, caches, questions):
        asked.append(model.model.layers[0].self_attn.q_proj.weight.clone())
        scores = recall(model, tokenizer, prose, caches, questions)
        return {name: asking.RecallScore(questions, len(asked), score.tokens, 0) for name, score in scores.items()}

    monkeypatch.setattr(asking, "recall", counted)
    weights.recall(questions=3, cache="k4v4")
    assert [(line["label"], line["cache"], line["right"], line["questions"]) for line in lines] == [
        (label, cache, right + 1, 3) for right, label in enumerate(["16 bit", *weights.ROUNDED])
        for cache in ("16 bit", "k4v4")]
    assert all(line["task"] == "recall" and line["tokens"] > 1000 for line in lines)
    for got, (bits, group) in zip(asked[1:], weights.ROUNDED.values()):
        assert torch.equal(got, weights.round_to_nearest(asked[0], bits, group))


def test_a_line_names_its_codebooks(lines, tmp_path):
    from lowbit_attn import FORMATS
    from lowbit_attn.codebooks import Codebooks, calibrate

    model, _ = weights.loaded(1)
    books = calibrate.calibrate(model, torch.randint(3, 29, (1100,)), FORMATS["kcq4vcq2"], name="tiny")
    books.save(tmp_path / "books.safetensors")
    weights.whole_model(tokens=300, cache="kcq4vcq2", codebooks=str(tmp_path / "books.safetensors"), rounded=False)
    assert [line["codebooks"] for line in lines] == [
        {"hash": Codebooks.load(tmp_path / "books.safetensors").hash[:16], "model": "tiny"}]
    assert lines[0]["kl"] > 0


def test_codebooks_need_a_cache():
    for options in (dict(codebooks="file"), dict(sinks=32)):
        with pytest.raises(weights.typer.BadParameter, match="none is named"):
            weights.whole_model(**options)
