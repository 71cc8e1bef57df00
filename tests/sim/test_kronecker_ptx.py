"""Hadamard transforms as Kronecker products, without a GPU: their PTX, thread by thread, gives the exact transform."""

from functools import cache

import pytest
import torch
from codebook_weights import random_weight

from lowbit_attn import kernels
from lowbit_attn.kernels.linear import FIXED_PARTS, linear_key
from lowbit_attn.linear import e8p, hadamard
from lowbit_attn.linear_transforms import kronecker_signs, split_of
from sim.hopper_calls import packed, ptx_of
from sim.linear_calls import arguments, digits_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
HOPPER = "sm_90a"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@cache
def program(scratch, target: str, *what) -> ptx.Program:
    """A kernel of ``linear_key``."""
    return ptx.Program(ptx_of(kernels.trace(linear_key(target, *what)), target, scratch))


def transform(kind: str, size: int, source, scale, out, sums, steps, scratch, reverse=False, target=HOPPER):
    """Run a transform; (out, sums, steps)."""
    split = split_of(size)
    tensors = [source, scale, kronecker_signs(split, kind != "output"), out, sums, steps]
    memory, given = arguments(tensors, [(2, 1), (1, 0), (1, 0), (2, 2 if kind == "digits" else 1), (2, 1), (1, 0)])
    if target == HOPPER:
        memory.begin_early(*((0,) if kind == "digits" else (0, 5)))
    given += packed("i", split.order) + packed("f", size**-0.5)
    way = "wide" if split.is_wide else "kronecker"
    if split.is_wide:
        given.pop(4)  # it has no sums
    code = program(scratch, target, f"{way}-{kind}", "", "float16", split.columns)
    for row in range(len(source)):
        ctas = [ptx.Cta(code, given, memory.memory, (x, row, 0), (split.ctas, len(source), 1))
                for x in range(split.ctas)]
        for cta in ctas:
            cta.cluster = ctas
        ptx.run_grid(ctas[:: -1 if reverse else 1], split.columns, reverse)
    return [memory.tensor(i, tensors[i]) for i in (3, 4, 5)]


def fixed_digits(coefficients, out, sums, steps, norm: float, scratch, target: str):
    """Run the kernel of a long transform's second launch; (out, sums, steps)."""
    tensors = [coefficients, out, sums, steps]
    memory, given = arguments(tensors, [(2, 1), (2, 2), (2, 1), (1, 0)])
    given += packed("f", norm)
    if target == HOPPER:
        memory.begin_early(0)
    code = program(scratch, target, "fixed-digits")
    for row in range(len(coefficients)):
        ptx.run_grid([ptx.Cta(code, given, memory.memory, (i, row, 0), (FIXED_PARTS, len(coefficients), 1))
                      for i in range(FIXED_PARTS)], 512)
    return [memory.tensor(i, tensors[i]) for i in (1, 2, 3)]


@pytest.mark.parametrize("k, rows, target", [
    (1024, 5, HOPPER), (28 * 256, 2, HOPPER), (6140, 1, HOPPER), (64 * 256, 1, HOPPER),
    (36 * 512, 1, HOPPER), (56 * 512, 1, HOPPER), (1024, 5, "sm_80"), (2048, 2, "sm_89"), (56 * 256, 5, "sm_80"),
    (60 * 256 - 4, 1, "sm_89"), (36 * 64, 5, HOPPER), (172 * 64, 1, HOPPER), (28 * 128, 2, "sm_80"),
    (108 * 128, 1, "sm_80")])
def test_digits(k, rows, target, scratch):
    """Digits are the transform in one step a row, their sums add up, and a row that is not finite says so. Without
    clusters they are made by one CTA, or of coefficients in memory."""
    size = hadamard.padded_size(k)
    split = split_of(size)
    x = torch.randn(rows, k).half()
    x[0, 0] = 6e4
    if rows > 2:
        x[1], x[2, k // 2], x[3, k - 1] = 0, torch.nan, -torch.inf
    signs = torch.randn(k).sign() if rows > 1 else torch.randn(k)
    out = torch.full((-(-rows // 4), size // 128, 32, 8), -1, dtype=torch.int32)
    is_long = split.is_wide or target != HOPPER and split.ctas > 1
    sums = torch.full((rows, FIXED_PARTS if is_long else split.ctas, 2), -7, dtype=torch.int32)
    if is_long:
        made, _, _ = transform("coefficients", size, x, signs, torch.full((rows, size), torch.nan), sums,
                               torch.zeros(rows), scratch, target=target)
        out, sums, steps = fixed_digits(made, out, sums, torch.zeros(rows), size**-0.5, scratch, target)
    else:
        out, sums, steps = transform("digits", size, x, signs, out, sums, torch.zeros(rows), scratch,
                                     reverse=k == 28 * 256, target=target)
    exact = hadamard.transform(torch.nn.functional.pad(x.double() * signs, (0, size - k)), transpose=True)
    digits, finite = digits_of(out, rows), x.isfinite().all(1)
    assert torch.equal(steps.isnan(), ~finite)
    assert rows <= 2 or steps[1] == 0 and not digits[1].any()
    assert (digits[finite].abs() <= 32512).all()
    error = digits[finite] * steps[finite, None].double() - exact[finite]
    assert (error.abs() <= 0.5001 * steps[finite, None] + 1e-6 * exact[finite].abs().amax(1, True)).all()
    high = (digits + 128) >> 8
    assert torch.equal(sums[finite].sum(1), torch.stack((high, digits - 256 * high), 2)[finite].sum(1).int())


@pytest.mark.parametrize("n, m, target", [(1024, 2, HOPPER), (28 * 256, 1, HOPPER), (11256, 1, HOPPER),
                                          (44 * 512, 1, HOPPER), (28 * 256, 1, "sm_80"),
                                          (172 * 64, 1, HOPPER), (36 * 64 - 8, 2, HOPPER), (28 * 128, 1, "sm_80")])
def test_output(n, m, target, scratch):
    """H y' of the padded rows' first columns, times the scales, in 16 bits."""
    size = hadamard.padded_size(n)
    y = torch.randn(m, size + 8)
    y[:, size:] = torch.nan
    scale = torch.randn(n)
    out, _, _ = transform("output", size, y, scale, torch.full((m, n), torch.nan).half(), torch.zeros(1, 1, 2).int(),
                          torch.tensor([0.5, 3])[:m], scratch, target=target)
    exact = hadamard.transform(y[:, :size].double())[:, :n] * scale * torch.tensor([[0.5], [3]])[:m]
    torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("k, m, n, ctas, target", [(1024, 1, 20, 1, HOPPER), (3072, 2, 40, 2, HOPPER),
                                                   (4096, 4, 20, 1, HOPPER), (4096, 1, 20, 1, "sm_80")])
def test_product_with_its_transform(k, m, n, ctas, target, scratch):
    """The digits are those of the transform's own kernel, to the bit, and so are steps; y' is their exact product."""
    w, size = random_weight("e8p4", n, k), hadamard.padded_size(k)
    x, signs = torch.randn(m, k).half(), w.planes["in_scale"]
    x[0, 0] = 6e4
    if m > 2:
        x[1], x[2, k // 2] = 0, torch.nan
    split, codes = split_of(size), w.planes["codes"]
    empty = torch.zeros(-(-m // 4), size // 128, 32, 8, dtype=torch.int32)
    if target == HOPPER:
        digits, _, steps = transform("digits", size, x, signs, empty, torch.zeros(m, split.ctas, 2).int(),
                                     torch.zeros(m), scratch)
    else:
        made, _, _ = transform("coefficients", size, x, signs, torch.zeros(m, size), torch.zeros(m, 1, 2).int(),
                               torch.zeros(m), scratch, target=target)
        digits, _, steps = fixed_digits(made, empty, torch.zeros(m, FIXED_PARTS, 2).int(), torch.zeros(m),
                                        size**-0.5, scratch, target)
    finite = x.isfinite().all(1)
    assert torch.equal(steps.isnan(), ~finite)
    out = torch.full((m, len(codes) * 8), torch.nan)
    tensors = [codes.view(torch.int32), x, signs, kronecker_signs(split, True), torch.stack(e8p.tables()).int(),
               w.planes["scales"], out, torch.zeros(m)]
    memory, given = arguments(tensors, [(2, 2), (2, 1), (1, 0), (1, 0), (0, 0), (1, 0), (2, 1), (1, 0)])
    given += packed("i", split.order) + packed("f", size**-0.5)
    code = program(scratch, target, "gemv-vector", "e8p4", "float16", 4)
    ptx.run_grid([ptx.Cta(code, given, memory.memory, (i, 0, 0), (ctas, 1, 1)) for i in range(ctas)], 512)
    found, own_steps = memory.tensor(6, out), memory.tensor(7, tensors[7])
    assert torch.equal(own_steps.view(torch.int32), steps.view(torch.int32))
    numbers, codes_of = digits_of(digits, m).double(), w.spec.unpack(w.planes)
    exact = sum(scale.double() * (numbers @ e8p.grid()[codes_of[..., stage]].flatten(1).double().T)
                for stage, scale in enumerate(w.planes["scales"]))
    room = 3e-7 * numbers.abs().sum(1, keepdim=True) * w.planes["scales"][0]
    assert ((found - exact).abs() <= room)[finite].all()
