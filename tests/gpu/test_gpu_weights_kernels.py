"""Kernels of codebook weights: products of packed codes, and of chunks in 16 bits, beside exact ones on the CPU."""

from functools import lru_cache

import pytest
import torch
from codebook_weights import random_weight

from lowbit_attn import linear_kernels
from lowbit_attn.kernels.linear import CROSSOVER, MOST_ROWS, ROWS, VECTOR_ROWS
from lowbit_attn.linear import NAMES, VQLinear, VQWeight, hadamard, linear
from lowbit_attn.linear_transforms import machine_of

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (5, 7), (33, 129), (257, 1030), (700, 2800), (1536, 576), (4096, 4096), (512, 14336), (11008, 172),
          (28672, 300), (53248, 40), (40, 53248), (40, 18944), (2304, 3584)]
MACHINES = ("hopper", "ampere", "ampere-sm_89")  # Ampere's kernels run on Hopper too, also in the sizes of sm_89
DTYPES = {torch.float16: 2**-10, torch.bfloat16: 2**-7}  # and how far a value may be off, beside the largest of a row


@pytest.fixture(autouse=True, params=MACHINES)
def machine(request, monkeypatch):
    """What kernels a test runs; skips those that this device does not."""
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", request.param)
    try:
        return machine_of(torch.device("cuda", torch.cuda.current_device()))
    except NotImplementedError as error:
        pytest.skip(str(error))


@lru_cache(1)
def weight(name: str, n: int, k: int) -> tuple[VQWeight, torch.Tensor]:
    """A weight of random codes on the CPU, and what it stands for: small, so that y stays within fp16."""
    w = random_weight(name, n, k)
    for plane in ("codebooks",) * (name == "gptvq2") + ("scales",) * ("scales" in w.planes):
        w.planes[plane].mul_(0.25)
    return w, w.dequantize()


def exact(x: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
    return x.double().cpu() @ dense.double().T


def inputs(k: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(64, k)
    x[0], x[1, 0] = 0, 1e4
    return x.to(dtype)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(name, shape, dtype):
    """Both paths, any number of rows: y is exact to its own rounding, and the same bits again."""
    w, dense = weight(name, *shape)
    x, on_gpu = inputs(w.k, dtype), w.to("cuda")
    right = exact(x, dense)
    room = DTYPES[dtype] * right.abs().amax(1, True) + 1e-5
    # where W is rounded, too, and terms of few columns cancel, what rounding did to each of them does not
    rounded = room.maximum(DTYPES[dtype] * (x.double() ** 2 @ dense.double().T ** 2).sqrt())
    for m in (*range(1, 18), 64):
        y = linear(x[:m].cuda(), on_gpu)
        assert y.dtype == dtype and y.shape == (m, w.n)
        assert ((y.cpu().double() - right[:m]).abs() <= (rounded if m > CROSSOVER.get(name, 0) else room)[:m]).all(), m
        assert torch.equal(y, linear(x[:m].cuda(), on_gpu))
    y = linear(x[:16].cuda(), on_gpu, path="dequantize")
    assert ((y.cpu().double() - right[:16]).abs() <= 1.5 * room[:16]).all()  # W is rounded too


@pytest.mark.parametrize("shape", [(28672, 1024), (1024, 28672), (6144, 5120), (14336, 12288), (18944, 3584),
                                   (4096, 11008), (17408, 27648)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_transforms_of_real_sizes(shape, dtype):
    """Both sides as Kronecker products of several CTAs: the exact product of the lattice between exact transforms."""
    w = random_weight("e8p4", *shape)
    w.planes["scales"].mul_(0.25)
    x, on_gpu = torch.randn(16, w.k).to(dtype), w.to("cuda")
    x[0], x[1, 0] = 0, 1e4
    lattice = w.spec.lattice(on_gpu.planes, w.n, w.k).double()
    middle = hadamard.transform(x.cuda().double() * on_gpu.planes["in_scale"], transpose=True) @ lattice.T
    right = (hadamard.transform(middle) * on_gpu.planes["out_scale"]).cpu()
    room = DTYPES[dtype] * right.abs().amax(1, True) + 1e-5
    alone = torch.cat([linear(row[None], on_gpu) for row in x.cuda()])
    for m in (1, 3, 16):
        y = linear(x[:m].cuda(), on_gpu)
        assert ((y.cpu().double() - right[:m]).abs() <= room[:m]).all(), m
        assert torch.equal(y, alone[:m])
    x[2, w.k // 3], x[3, 0] = torch.nan, torch.inf
    y = linear(x.cuda(), on_gpu)
    assert y[2:4].isnan().all() and torch.equal(y[4:], alone[4:])


@pytest.mark.parametrize("name, n, k", [(name, 40, 300) for name in NAMES] + [("e8p4", 1024, 2048)])
def test_one_small_case(name, n, k):
    """Every kernel of a format once: few enough launches for compute-sanitizer."""
    w = random_weight(name, n, k)
    x, on_gpu = torch.randn(5, k).half(), w.to("cuda")
    right = exact(x, w.dequantize())
    for path in ("kernel", "dequantize")[name not in ROWS :]:
        y = linear(x.cuda(), on_gpu, path=path).cpu().double()
        assert ((y - right).abs() <= 2**-9 * right.abs().amax(1, True) + 1e-5).all()


@pytest.mark.parametrize("name", list(ROWS))
def test_more_rows_than_one_launch_takes(name):
    """As many launches as it takes, each row as if it were alone; the default path changes behind CROSSOVER."""
    w = random_weight(name, 300, 700)
    x, on_gpu = inputs(w.k, torch.float16).cuda(), w.to("cuda")
    x[1, 0] = 1e3  # so that y is within fp16
    y = linear(x, on_gpu, path="kernel")
    right = exact(x, w.dequantize())
    assert ((y.cpu().double() - right).abs() <= 2**-10 * right.abs().amax(1, True) + 1e-5).all()
    for m in (5, 17, 18, 33):
        assert torch.equal(linear(x[:m], on_gpu, path="kernel"), y[:m])
    for m in (CROSSOVER[name], CROSSOVER[name] + 1):
        wanted = "kernel" if m <= CROSSOVER[name] else "dequantize"
        some = x.repeat(2, 1)[:m]
        assert torch.equal(linear(some, on_gpu), linear(some, on_gpu, path=wanted))


def test_rows_of_x_do_not_change_each_other():
    """Row by row or together, by any kernel: the same bits, since sums are exact."""
    on_gpu, x = random_weight("e8p4", 520, 1100).to("cuda"), inputs(1100, torch.float16).cuda()
    alone = torch.cat([linear(row[None], on_gpu) for row in x[:16]])
    for m in (2, 4, 5, 16):
        assert torch.equal(linear(x[:m], on_gpu), alone[:m])


@pytest.mark.parametrize("k", [1024, 2048, 3072, 4096])
@pytest.mark.parametrize("name", ["e8p2", "e8p4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_transform_inside_the_product_gives_the_same_bits(name, k, dtype, machine):
    """Up to VECTOR_ROWS rows of so few columns are transformed by the product itself, where there is room; more are
    not. Where there is none, a row is still the same alone and beside others."""
    w, x = random_weight(name, 1300, k).to("cuda"), inputs(k, dtype).cuda()
    x[2, k // 2], x[3, k - 1] = torch.nan, -torch.inf
    assert "digits" in linear_kernels.launches(x[:8], w)
    many = linear(x[:8], w)
    for m in range(1, VECTOR_ROWS + 1):
        assert ("digits" in linear_kernels.launches(x[:m], w)) != machine.has_vector
        for first in range(0, 8 - m, m):
            y = linear(x[first : first + m], w)
            torch.testing.assert_close(y, many[first : first + m], atol=0, rtol=0, equal_nan=True)
    assert many[2:4].isnan().all() and not many[0].any() and many[4:].isfinite().all()


@pytest.mark.parametrize("ctas", [1, 7, 64])
def test_any_number_of_ctas_gives_the_same_bits(ctas, monkeypatch):
    on_gpu, x = random_weight("e8p4", 1000, 700).to("cuda"), inputs(700, torch.float16)[:16].cuda()
    many = linear(x, on_gpu)
    monkeypatch.setattr(linear_kernels.dispatch, "running_ctas", lambda device, per_sm: ctas)
    assert torch.equal(linear(x, on_gpu), many)


@pytest.mark.parametrize("path", ["kernel", "dequantize"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_finite_is_not_hidden(name, value, path):
    w = random_weight(name, 40, 300).to("cuda")
    if path == "kernel" and name not in ROWS:
        pytest.skip("no kernel multiplies codes of this format")
    x = torch.randn(2, 300).half().cuda()
    x[1, 299] = value
    y = linear(x, w, path=path)
    assert y[1].isnan().all() and y[0].isfinite().all()


@pytest.mark.parametrize("m", [1, 4, 16, 40])
@pytest.mark.parametrize("name", NAMES)
def test_captured_and_compiled(name, m):
    layer = VQLinear.from_weight(random_weight(name, 200, 600), torch.randn(200)).cuda()
    x = torch.randn(m, 600, device="cuda").half()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for _ in range(3):
        x.copy_(torch.randn(m, 600))
        graph.replay()
        assert torch.equal(y, layer(x))


def test_refusals_name_what_is_supported():
    w, x = random_weight("e8p4", 40, 300).to("cuda"), torch.randn(MOST_ROWS + 1, 300, device="cuda").half()
    for bad, words in ((x, f"{len(x)} rows of x, supported: up to {MOST_ROWS}"),
                       (x[:2].float(), "x: torch.float32, supported by kernel of e8p4: float16")):
        with pytest.raises(NotImplementedError, match=words):
            linear(bad, w, path="kernel")
    with pytest.raises(NotImplementedError, match="format aqlm_1x16, supported"):
        linear(x[:2], random_weight("aqlm_1x16", 40, 300).to("cuda"), path="kernel")
    assert linear(x[:0], w).shape == (0, 40)
