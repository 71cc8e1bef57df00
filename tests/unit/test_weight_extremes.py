"""Quantizers of codebook weights at the edges: zeros, magnitudes, and moments that no inputs have."""

import pytest
import torch

from lowbit_attn.linear import NAMES, from_aqlm, from_quip_sharp, linear, quantize, quantize_together

MADE = [name for name in NAMES if name != "aqlm_1x16"]
QUICK = [name for name in MADE if name != "aqlm_2x12"]  # whose k-means of 4,096 entries takes long


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments(k: int) -> torch.Tensor:
    x = randn(4 * k, k, seed=1) * (torch.rand(k, generator=torch.Generator().manual_seed(2)) + 0.1)
    return x.T @ x / len(x)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_zeros_stay_zeros(name, with_moments):
    hessian = moments(64) if with_moments else None
    zero = quantize(torch.zeros(24, 64), name, hessian)
    assert not zero.dequantize().any() and not linear(randn(3, 64), zero).any()
    both = quantize_together([randn(16, 64), torch.zeros(24, 64)], name, hessian)
    assert not both[1].dequantize().any() and error(both[0].dequantize(), randn(16, 64)) < 0.5


@pytest.mark.parametrize("name", [name for name in MADE if name.startswith("aqlm")])
def test_rows_of_zeros_stay_zeros_and_count_nothing(name):
    """Weights of 1e-3 beside zero rows: if those counted as rows of scale 1, the codebooks would be made for them."""
    w = torch.cat((1e-3 * randn(40, 64), torch.zeros(40, 64)))
    got = quantize(w, name, moments(64)).dequantize()
    alone = quantize(w[:40], name, moments(64)).dequantize()
    assert not got[40:].any() and error(got[:40], w[:40]) < error(alone, w[:40]) + 0.05


@pytest.mark.parametrize("scale", [1e-6, 1e-8, 3e-20, 1e-28, 1e5, 1e18, 1e30])
@pytest.mark.parametrize("name", QUICK)
def test_magnitudes_are_kept_or_refused(name, scale):
    w = randn(32, 64)
    usual = error(quantize(w, name).dequantize(), w)
    try:
        found = quantize(w * scale, name).dequantize()
    except ValueError as refused:
        assert str(refused).startswith("w: got values up to ") and f"supported by {name}: up to" in str(refused)
        assert scale == 1e30 or name == "gptvq2" and (scale < 1e-7 or scale > 1e4)
    else:
        assert error(found, w * scale) < 1.02 * usual


def test_rows_of_very_different_sizes_each_keep_their_own():
    w = randn(32, 64) * torch.logspace(-12, 12, 32)[:, None]
    got = quantize(w, "aqlm_2x8").dequantize()
    assert all(error(a, b) < 0.9 for a, b in zip(got[8:], w[8:])) and got.isfinite().all()


@pytest.mark.parametrize("name", QUICK)
def test_scale_of_the_moments_changes_nothing(name):
    w, hessian = randn(16, 32), moments(32)
    want = quantize(w, name, hessian).dequantize()
    for scale in (2.0**-100, 2.0**120):
        assert torch.equal(quantize(w, name, hessian * scale).dequantize(), want)


@pytest.mark.parametrize("name", QUICK)
def test_moments_that_no_inputs_have_are_refused(name):
    w, one = randn(8, 16), torch.eye(16)
    skewed = one.clone()
    skewed[0, 1] = 0.5
    minor = one.clone()
    minor[0, 1] = minor[1, 0] = 3.0
    for hessian, words in ((-one, "-1 on its diagonal"), (one - 1.05 * torch.diag(one[0]), "on its diagonal"),
                           (minor, "negative eigenvalues"), (skewed, "across the diagonal by 0.25"),
                           (torch.ones(16, 16) - one, "diagonal of zeros beside other entries")):
        with pytest.raises(ValueError, match=f"hessian: got .*{words}"):
            quantize(w, name, hessian)
    assert error(quantize(w, name, torch.zeros(16, 16)).dequantize(), w) < 0.5


def test_published_weights_beyond_fp32_are_refused():
    state = {"codes": torch.zeros(4, 2, 2, dtype=torch.int8), "codebooks": torch.full((2, 256, 1, 8), 1e30),
             "scales": torch.full((4, 1, 1, 1), 1e30)}
    with pytest.raises(ValueError, match="codebooks, scales: got weights beyond fp32"):
        from_aqlm(state)
    state = {"Qidxs": torch.zeros(16, 2, dtype=torch.int64), "SU": torch.ones(64), "SV": torch.ones(16),
             "codebook_id": torch.tensor(7)}
    for scale in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="residual_scale: got"):
            from_quip_sharp(state, scale)
    assert not from_quip_sharp(state | {"Wscale": torch.tensor(0.0)}).dequantize().any()
