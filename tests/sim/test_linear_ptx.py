"""Kernels of codebook weights without a GPU: their PTX, run thread by thread, gives what the reference computes."""

from functools import cache

import pytest
import torch
from codebook_weights import random_weight

from lowbit_attn import kernels
from lowbit_attn.device.linear.config import TABLE_AT
from lowbit_attn.kernels.linear import linear_key
from lowbit_attn.linear import e8p, hadamard
from lowbit_attn.linear.layouts import ceil_to
from sim.hopper_calls import packed, ptx_of
from sim.linear_calls import arguments, digits_of
from sim.ptx import program as ptx

pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
CTAS = 8  # of a cluster
HOPPER = "sm_90a"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@cache
def program(variant: str, scratch, format: str = "", dtype: str = "float16", rows: int = 0,
            target: str = HOPPER) -> tuple[ptx.Program, int]:
    """(a kernel, the end of its shared memory, which starts at 0)."""
    traced = kernels.trace(linear_key(target, variant, format, dtype, rows))
    before = TABLE_AT if target == HOPPER else 0  # there it starts behind what the driver keeps
    return ptx.Program(ptx_of(traced, target, scratch)), before + traced.entry.smem_bytes


def run(code: tuple[ptx.Program, int], given: list, memory, count: int, threads: int, row: tuple[int, int] = (0, 1),
        reverse: bool = False) -> None:
    """Run a row's CTAs, one cluster; they keep within their shared memory."""
    program, room = code
    ctas = [ptx.Cta(program, given, memory.memory, (i, row[0], 0), (count, row[1], 1)) for i in range(count)]
    for cta in ctas:
        cta.cluster = ctas
    ptx.run_grid(ctas[:: -1 if reverse else 1], threads, reverse)
    assert all((cta.shared.data[room:] == 0xFF).all() for cta in ctas)


def transform(kind: str, source, scale, out, sums, steps, transpose: bool, cluster: bool, scratch, reverse=False,
              target: str = HOPPER):
    """Run a transform; (out, sums, steps)."""
    size = hadamard.padded_size(source.shape[1] if kind != "output" else out.shape[1])
    order = hadamard.base_order(size)
    matrix = hadamard.matrix(order)
    matrix = matrix if transpose else matrix.T
    bits, log2 = (size // order).bit_length() - 1, 3 * cluster
    tensors = [source, scale, matrix.contiguous(), out, sums, steps]
    out_varies = (2, 2) if kind == "digits" else (2, 1)
    memory, given = arguments(tensors, [(2, 1), (1, 0), (2, 1), out_varies, (2, 1), (1, 0)])
    if kind == "output" and target == HOPPER:
        memory.begin_early(0, 5)  # starts while the product ends, which takes the steps from the transform before it
    given += packed("i", bits, log2) + packed("f", size**-0.5)
    code = program(f"hadamard-{kind}", scratch, target=target)
    for row in range(len(source)):
        run(code, given, memory, 1 << log2, 512, (row, len(source)), reverse)
    return [memory.tensor(i, tensors[i]) for i in (3, 4, 5)]


@pytest.mark.parametrize("k, cluster, target", [
    *((k, 0, HOPPER) for k in (1, 7, 36, 130, 576, 1000, 384)), *((k, 1, HOPPER) for k in (3072, 768, 44 * 64)),
    (7, 0, "sm_80"), (576, 0, "sm_89"), (172 * 64, 0, "sm_89")])
def test_digits(k, cluster, target, scratch):
    """Digits are the transform in one step a row, their sums add up, and a row that is not finite says so."""
    m = 5 if k < 600 else 2
    x = torch.randn(m, k).half()
    x[0, 0] = 6e4
    x[1] = 0
    if m > 2:
        x[2, k // 2], x[3, k - 1] = torch.nan, -torch.inf
    signs, size = torch.randn(k).sign(), hadamard.padded_size(k)
    out = torch.full((-(-m // 4), ceil_to(size, 128) // 128, 32, 8), -1, dtype=torch.int32)
    parts = CTAS if cluster else 1
    out, sums, steps = transform("digits", x, signs, out, torch.full((m, parts, 2), -7, dtype=torch.int32),
                                 torch.zeros(m), True, bool(cluster), scratch, reverse=k == 768,
                                 target=target)
    rows = torch.nn.functional.pad(x.float() * signs, (0, size - k))
    exact = hadamard.transform(rows.double(), transpose=True)
    digits, finite = digits_of(out, m), x.isfinite().all(1)
    assert torch.equal(steps.isnan(), ~finite) and steps[1] == 0
    assert (digits[finite].abs() <= 32512).all() and not digits[1].any() and not digits[finite, size:].any()
    error = digits[finite, :size] * steps[finite, None].double() - exact[finite]
    assert (error.abs() <= 0.5001 * steps[finite, None] + 1e-5 * exact[finite].abs().amax(1, True)).all()
    high = (digits + 128) >> 8
    assert torch.equal(sums[finite].sum(1), torch.stack((high, digits - 256 * high), 2)[finite].sum(1).int())


@pytest.mark.parametrize("n, cluster, target", [(3, 0, HOPPER), (36, 0, HOPPER), (520, 0, HOPPER), (512, 1, HOPPER),
                                                (2780, 1, HOPPER), (520, 0, "sm_80")])
def test_output(n, cluster, target, scratch):
    """H y' of the padded rows' first columns, times the scales, in 16 bits."""
    size = hadamard.padded_size(n)
    y = torch.randn(2, ceil_to(size, 8))
    y[:, size:] = torch.nan
    scale = torch.randn(n)
    out, _, _ = transform("output", y, scale, torch.full((2, n), torch.nan).half(), torch.zeros(1, 1, 2).int(),
                          torch.tensor([0.5, 3]), False, bool(cluster), scratch, target=target)
    exact = hadamard.transform(y[:, :size].double())[:, :n] * scale * torch.tensor([[0.5], [3]])
    torch.testing.assert_close(out.double(), exact, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("k, cluster, target", [(7, 0, HOPPER), (576, 0, HOPPER), (768, 1, HOPPER), (576, 0, "sm_80")])
def test_rotated(k, cluster, target, scratch):
    """Coefficients as fp16 in steps of the largest, zeros behind them."""
    x, signs, size = torch.randn(2, k).half(), torch.randn(k).sign(), hadamard.padded_size(k)
    out = torch.full((2, ceil_to(size, 128)), torch.nan).half()
    out, _, steps = transform("rotate", x, signs, out, torch.zeros(1, 1, 2).int(), torch.zeros(2), True, bool(cluster),
                              scratch, target=target)
    exact = hadamard.transform(torch.nn.functional.pad(x.double() * signs, (0, size - k)), transpose=True)
    assert not out[:, size:].any() and (out.abs().amax(1) == 1).all()
    torch.testing.assert_close(out[:, :size].double() * steps[:, None], exact, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("target", [HOPPER, "sm_80"])
def test_dequantized(target, scratch):
    for format, n, k in (("e8p4", 20, 300), ("e8p2", 40, 130)):
        w = random_weight(format, n, k)
        codes = w.planes["codes"]
        out = torch.full((len(codes) * w.spec.row_multiple, codes.shape[1] * 128), torch.nan).half()
        tensors = [codes.view(torch.int32), torch.stack(e8p.tables()).to(torch.int32), w.planes["scales"], out]
        memory, given = arguments(tensors, [(2, 2), (0, 0), (1, 0), (2, 1)])
        run(program("dequantize", scratch, format, "float32", 0, target), given, memory, 2, 1024)
        rows, columns = w.spec.sides(n, k)
        top = w.planes["scales"].abs().amax()
        exact, found = w.spec.lattice(w.planes, n, k) / top, memory.tensor(3, out)[:rows, :columns].float()
        room = 2**-11 * (exact.abs() + 3.75 * (w.planes["scales"] / top).abs().sum())
        assert ((found - exact).abs() <= room).all()
        if format == "e8p2":
            assert torch.equal(found, exact.half().float())  # multiples of 1/4


@pytest.mark.parametrize("format, m, rows, n, k, ctas, target", [
    ("e8p4", 1, 4, 40, 512, 1, HOPPER), ("e8p4", 3, 4, 40, 512, 2, HOPPER), ("e8p4", 4, 4, 300, 2200, 1, HOPPER),
    ("e8p2", 2, 4, 40, 600, 2, HOPPER), ("e8p4", 7, 8, 300, 2200, 1, HOPPER), ("e8p2", 8, 8, 40, 600, 2, HOPPER),
    ("e8p4", 16, 16, 40, 512, 1, HOPPER), ("e8p4", 9, 16, 140, 1100, 1, HOPPER), ("e8p4", 3, 4, 40, 512, 2, "sm_80"),
    ("e8p2", 8, 8, 40, 600, 2, "sm_89"), ("e8p4", 9, 16, 140, 1100, 1, "sm_89")])
def test_products(format, m, rows, n, k, ctas, target, scratch):
    """Integers of digits and codes, to the bit; also when CTAs and phases divide the rows otherwise."""
    w = random_weight(format, n, k)
    codes = w.planes["codes"]
    blocks, chunks = codes.shape[:2]
    digits = torch.randint(-32512, 32513, (4 * -(-m // 4), 128 * chunks))
    digits[:, w.spec.sides(n, k)[1]:] = 0
    high = (digits + 128) >> 8
    pairs = torch.stack((high, digits - 256 * high), 1)  # rows, digit, columns
    packed_digits = pairs.reshape(-1, 4, 2, chunks, 2, 2, 4, 4, 2).permute(0, 3, 1, 2, 6, 4, 8, 5, 7)
    x = packed_digits.to(torch.int8).reshape(-1, chunks, 32, 32).contiguous().view(torch.int32)
    sums = torch.stack((pairs[:m].sum(2), torch.zeros(m, 2, dtype=torch.long)), 1).int()
    out = torch.full((m, blocks * (16 // w.spec.books)), torch.nan)
    tensors = [codes.view(torch.int32), x, sums, torch.stack(e8p.tables()).to(torch.int32), w.planes["scales"],
               out]
    memory, given = arguments(tensors, [(2, 2), (2, 2), (2, 1), (0, 0), (1, 0), (2, 1)])
    if target == HOPPER:
        memory.begin_early(1, 2)
    run(program("gemv", scratch, format, "float32", rows, target), given, memory, ctas, 512)
    found = memory.tensor(5, out)
    codes_of = w.spec.unpack(w.planes)
    exact = sum(scale.double() * (digits[:m].double() @ e8p.grid()[codes_of[..., stage]].flatten(1).double().T)
                for stage, scale in enumerate(w.planes["scales"]))
    assert ((found - exact).abs() <= 3e-7 * (digits[:m].double().abs() @ torch.ones(128 * chunks).double())[:, None]
            * w.planes["scales"][0]).all()


@pytest.mark.parametrize("n, k, ctas, target", [(70, 600, 2, HOPPER), (40, 8, 1, HOPPER), (2100, 500, 1, HOPPER),
                                                (70, 600, 2, "sm_89")])
def test_aqlm_2x8(n, k, ctas, target, scratch):
    """Sums of the table's numbers, group by group of columns, and of all groups."""
    w, x = random_weight("aqlm_2x8", n, k), torch.randn(1, k).half()
    codes = w.planes["codes"].view(torch.int32)
    partial = torch.full((len(codes), 1, codes.shape[1] * 32), torch.nan)
    memory = ptx.GlobalMemory([x, codes, w.planes["codebooks"], partial])
    shapes = (x.shape[1:], codes.shape[:2], (), (partial.shape[0], partial.shape[2]))
    given = [memory.parameter(i, sizes, ()) for i, sizes in enumerate(shapes)]
    given[3] = memory.parameter(3, shapes[3], partial.stride()[:2])
    run(program("gemv", scratch, "aqlm_2x8", "float16", 1, target), given, memory, ctas, 512)
    found = memory.tensor(3, partial)
    exact = x.double() @ w.dequantize().double().T
    torch.testing.assert_close(found.sum(0)[:, :n].double() * w.planes["scales"], exact, atol=1e-4, rtol=1e-5)
    memory, given = arguments([found, w.planes["scales"], torch.full((1, n), torch.nan).half()],
                              [(3, 2), (1, 0), (2, 1)])
    if target == HOPPER:
        memory.begin_early(0)
    run(program("sum", scratch, target=target), given, memory, -(-n // 32), 512)
    torch.testing.assert_close(memory.tensor(2, torch.empty(1, n).half()).double(), exact, atol=0.02, rtol=1e-3)


@pytest.mark.parametrize("m, n, k, ctas, target", [
    (1, 40, 1500, 1, HOPPER), (4, 300, 1000, 3, HOPPER), (3, 20, 2100, 2, HOPPER), (3, 20, 2100, 2, "sm_80"),
    (2, 20, 2100, 1, "sm_89"), (4, 300, 1000, 3, "sm_89")])
def test_gptvq2(m, n, k, ctas, target, scratch):
    """Sums of segments; CTAs begin and end within segments."""
    w, x = random_weight("gptvq2", n, k), torch.randn(m, k).half()
    codes, books = w.planes["codes"].view(torch.int32).flatten(2, 3), w.planes["codebooks"].view(torch.int32)
    rows, columns = codes.shape[0] * 256, codes.shape[1] * 1024
    partial = torch.full((codes.shape[1], m, rows), torch.nan)
    tensors = [torch.nn.functional.pad(x, (0, columns - k)), codes, books.reshape(*codes.shape[:2], 512, 4), partial]
    memory, given = arguments(tensors, [(2, 1), (2, 1), (2, 1), (3, 2)])
    run(program("gemv", scratch, "gptvq2", "float16", 4, target), given, memory, ctas, 512)
    exact = x.double() @ w.dequantize().double().T
    torch.testing.assert_close(memory.tensor(3, partial).sum(0)[:, :n].double(), exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("n, k, ctas, target", [(150, 130, 2, HOPPER), (1300, 30, 1, HOPPER), (150, 130, 2, "sm_80"),
                                                (150, 130, 2, "sm_89"), (1300, 30, 1, "sm_89")])
def test_aqlm_2x12(n, k, ctas, target, scratch):
    """Sums of each CTA's columns."""
    w, x = random_weight("aqlm_2x12", n, k), torch.randn(1, k).half()
    codes = w.planes["codes"]
    partial = torch.full((ctas, 1, codes.shape[1] * 128), torch.nan)
    memory = ptx.GlobalMemory([x, codes, w.planes["codebooks"], partial])
    shapes = (x.shape[1:], codes.shape[:2], (), (partial.shape[0], partial.shape[2]))
    given = [memory.parameter(i, sizes, ()) for i, sizes in enumerate(shapes)]
    given[3] = memory.parameter(3, shapes[3], partial.stride()[:2])
    run(program("gemv", scratch, "aqlm_2x12", "float16", 1, target), given, memory, ctas, 512)
    found = memory.tensor(3, partial).sum(0)[:, :n].double() * w.planes["scales"]
    torch.testing.assert_close(found, x.double() @ w.dequantize().double().T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("format, n, k, target", [
    ("aqlm_2x8", 100, 300, HOPPER), ("aqlm_2x12", 300, 70, HOPPER), ("aqlm_1x16", 9, 30, HOPPER),
    ("gptvq2", 600, 1100, HOPPER), ("aqlm_2x8", 100, 300, "sm_89"), ("aqlm_2x12", 300, 70, "sm_89")])
def test_rows_of_other_formats(format, n, k, target, scratch):
    """Rows of the second and later units of the pack."""
    w, first = random_weight(format, n, k), 1
    unit, columns = w.spec.row_multiple, w.spec.padded(n, k)[1]
    blocks = w.spec.padded(n, k)[0] // unit - first
    codes = w.planes["codes"]
    codes = codes.flatten(2, 3) if format == "gptvq2" else codes
    codes = codes if codes.dtype == torch.int16 else codes.view(torch.int32)
    scales = w.planes.get("scales", torch.ones(1))
    out = torch.full((blocks * unit, columns), torch.nan).half()
    tensors = [codes, w.planes["codebooks"].view(torch.int32).view(-1, 4), scales, out]
    memory, given = arguments(tensors, [(2, 1), (1, 0), (1, 0), (2, 1)])
    given += packed("i", first, blocks)
    threads = kernels.trace(linear_key(target, "dequantize", format, "float16")).entry.threads
    run(program("dequantize", scratch, format, target=target), given, memory, 2, threads)
    found = memory.tensor(3, out)
    assert torch.equal(found[: n - first * unit, :k], w.dequantize()[first * unit :].half())
