"""Tensors of published AQLM and QuIP# checkpoints: what they decode to, and what is refused."""

import pytest
import torch

from lowbit_attn.linear import e8p, from_aqlm, from_quip_sharp, hadamard, linear


def aqlm_state(books: int, bits: int, n: int = 24, k: int = 80, dtype=torch.float16) -> dict:
    integer = torch.int8 if bits <= 8 else torch.int16
    codes = torch.randint(0, 1 << bits, (n, k // 8, books))
    codes = torch.where(codes >= 1 << bits - 1, codes - (1 << bits), codes)  # stored as signed integers of `bits` bits
    return {"codes": codes.to(integer), "codebooks": torch.randn(books, 1 << bits, 1, 8).to(dtype),
            "scales": (torch.rand(n, 1, 1, 1) + 0.5).to(dtype)}


def aqlm_weights(state: dict) -> torch.Tensor:
    """W by AQLM's formula: the sum of the codebooks' entries, times the row's scale."""
    books, size = state["codebooks"].shape[:2]
    codes = state["codes"].long() % size
    made = sum(state["codebooks"][b, :, 0].double()[codes[..., b]] for b in range(books))
    return made.flatten(1) * state["scales"].double().reshape(-1, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("books, bits, name", [(2, 8, "aqlm_2x8"), (2, 12, "aqlm_2x12"), (1, 16, "aqlm_1x16")])
def test_aqlm(books, bits, name, dtype):
    state = aqlm_state(books, bits, dtype=dtype)
    w = from_aqlm(state)
    assert w.format == name and w.shape == (24, 80)
    torch.testing.assert_close(w.dequantize().double(), aqlm_weights(state), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("books, bits", [(2, 8), (1, 16)])
def test_aqlm_is_what_its_package_computes(books, bits):
    """Needs the package ``aqlm`` (pip install aqlm), whose dequantization runs on a CPU."""
    inference = pytest.importorskip("aqlm.inference_kernels.dequantization")
    state, x = aqlm_state(books, bits, dtype=torch.float32), torch.randn(5, 80)
    want = inference.dequantize_gemm(x, state["codes"], state["codebooks"], state["scales"], None)
    torch.testing.assert_close(linear(x, from_aqlm(state)), want, atol=2e-2, rtol=1e-3)  # codebooks became fp16
    state["codebooks"] = state["codebooks"].half().float()
    want = inference.dequantize_gemm(x, state["codes"], state["codebooks"], state["scales"], None)
    torch.testing.assert_close(linear(x, from_aqlm(state)), want, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-12, 1e-4, 1e20])
def test_aqlm_codebooks_of_bfloat16_keep_their_range(size):
    state = aqlm_state(2, 8, dtype=torch.bfloat16)
    state["codebooks"] = (state["codebooks"].float() * size).bfloat16()
    want = aqlm_weights(state)
    got = from_aqlm(state).dequantize().double()
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def pack_quip(codes: torch.Tensor) -> torch.Tensor:
    """Qidxs of one stage, int64 [n, k/32], bit by bit: codes int [n, k/8]."""
    n, vectors = codes.shape
    packed = torch.zeros(n // 16, vectors // 8, 8, 4, dtype=torch.int64)
    for row in range(n):
        for vector in range(vectors):
            code, place = int(codes[row, vector]), row % 2 + 2 * (vector % 2)
            word = (code >> 8) << 8 * place
            for bit in range(8):
                word |= (code >> bit & 1) << 32 + 4 * bit + place
            word -= 1 << 64 if word >= 1 << 63 else 0
            packed[row // 16, vector // 8, row % 16 // 2, vector % 8 // 2] |= word
    return packed.reshape(n, vectors // 4)


def quip_state(stages: int, n: int = 32, k: int = 192, real: bool = False) -> tuple[dict, torch.Tensor]:
    codes = torch.randint(0, 65536, (n, k // 8, stages))
    state = {"Qidxs": torch.cat([pack_quip(codes[..., s]) for s in range(stages)], 1),
             "SU": torch.randn(k).sign().half(), "SV": torch.randn(n).sign().half(),
             "codebook_id": torch.tensor({1: 7, 2: 17}[stages]), "Wscale": torch.tensor(0.013)}
    if real:  # after fine tuning, with a rescaled layer, and Wscale in SV
        state |= {"SU": torch.randn(k).half(), "SV": torch.randn(n).half(), "scaleWH": torch.rand(k) + 0.5}
        del state["Wscale"]
    return state, codes


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("stages, name", [(1, "e8p2"), (2, "e8p4")])
def test_quip_sharp(stages, name, real):
    """y = SV * H_n (Q (H_k^T (SU * x / scaleWH))) Wscale, as the published layers compute it."""
    state, codes = quip_state(stages, real=real)
    w = from_quip_sharp(state)
    assert w.format == name and w.shape == (32, 192)
    q = sum(e8p.grid().double()[codes[..., s]] / 3.45**s for s in range(stages)).flatten(1)
    x = torch.randn(4, 192, dtype=torch.float64)
    inner = x / state.get("scaleWH", torch.ones(192)).double() * state["SU"].double()
    inner = inner @ (hadamard.matrix(192).double() / 192**0.5)  # H^T x of each row
    want = inner @ q.T @ (hadamard.matrix(32).double() / 32**0.5).T
    want = want * state["SV"].double() * float(state.get("Wscale", 1.0))
    torch.testing.assert_close(linear(x.float(), w).double(), want, atol=1e-4 * float(want.abs().max()), rtol=0)
    torch.testing.assert_close((x @ w.dequantize().double().T), want, atol=1e-4 * float(want.abs().max()), rtol=0)


def test_quip_sharp_residual_scale_of_a_checkpoint():
    state, _ = quip_state(2)
    assert from_quip_sharp(state, residual_scale=2.0).planes["scales"].tolist() == [1.0, 0.5]


def changed(state: dict, **tensors) -> dict:
    return {name: value for name, value in (state | tensors).items() if value is not None}


def test_other_tensors_are_refused():
    state = aqlm_state(2, 8)
    for bad, words in ((changed(state, scales=None), "state: has no scales"),
                       (changed(state, codebooks=torch.zeros(2, 256, 1, 4)), r"codebooks: got shape \[2, 256, 1, 4\]"),
                       (changed(state, codebooks=torch.zeros(3, 256, 1, 8)), r"codebooks: got shape \[3, 256, 1, 8\]"),
                       (changed(state, codes=state["codes"][..., :1]), r"codes: got torch.int8 \[24, 10, 1\]"),
                       (changed(state, scales=torch.ones(3, 1, 1, 1)), "scales: got shape"),
                       (changed(state, scales=torch.full((24, 1, 1, 1), torch.nan)), "scales: got a NaN"),
                       (changed(state, codebooks=torch.full((2, 256, 1, 8), torch.inf)), "codebooks: got a NaN or")):
        with pytest.raises(ValueError, match=words):
            from_aqlm(bad)
    state, _ = quip_state(2)
    for bad, words in ((changed(state, SU=None), "state: has no SU"),
                       (changed(state, codebook_id=torch.tensor(18)), r"codebook_id: got 18, supported: 7 \(e8p2\)"),
                       (changed(state, A=torch.zeros(1)), "state: got low-rank tensors"),
                       (changed(state, Qidxs=state["Qidxs"].to(torch.int16)), "Qidxs: got torch.int16"),
                       (changed(state, Qidxs=state["Qidxs"][:, :6]), r"Qidxs: got torch.int64 \[32, 6\] for 32 x 192"),
                       (changed(state, SV=torch.full((32,), torch.nan)), "SU, SV, Wscale, scaleWH: got a NaN")):
        with pytest.raises(ValueError, match=words):
            from_quip_sharp(bad)
    large = {"Qidxs": torch.zeros(1984, 4, dtype=torch.int64), "SU": torch.ones(64), "SV": torch.ones(1984),
             "codebook_id": torch.tensor(17)}
    with pytest.raises(ValueError, match="SV: got 1984 entries"):
        from_quip_sharp(large)
