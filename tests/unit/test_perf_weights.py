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
