"""Formats of codebook weights: Hadamard matrices, the E8P grid, layouts, and products against their definitions."""

import itertools

import pytest
import torch
from codebook_weights import random_weight
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbit_attn.linear import NAMES, VQWeight, e8p, format_named, hadamard, layouts, linear

SHAPES = [(1, 1), (5, 7), (24, 100), (33, 129), (130, 260), (257, 1030)]
ROWS = [*range(1, 18), 64]


@pytest.mark.parametrize("order", [1, 2, 4, 12, 20, 28, 36, 52, 60, 108, 140, 156, 172, 576, 688])
def test_hadamard_matrices_are_orthogonal(order):
    made = hadamard.matrix(order)
    assert made.abs().eq(1).all() and torch.equal(made @ made.T, order * torch.eye(order))


@pytest.mark.parametrize("size, base", [(14336, 28), (28672, 28), (11008, 172), (576, 36), (1536, 12), (192, 12),
                                        (4096, 1), (5120, 20), (13824, 108), (100, 0), (7, 0), (6, 0), (2, 1)])
def test_base_orders(size, base):
    assert hadamard.base_order(size) == base


def test_padded_sizes_are_near():
    for size in itertools.chain(range(1, 400), range(399, 30000, 997)):
        padded = hadamard.padded_size(size)
        assert size <= padded <= max(4, 1.07 * size + 4) and hadamard.base_order(padded)
    with pytest.raises(ValueError, match="size: got 0"):
        hadamard.padded_size(0)


@pytest.mark.parametrize("size", [1, 8, 12, 36, 144, 192, 344, 576])
def test_transform_is_the_matrix(size):
    x = torch.randn(3, size)
    y = hadamard.transform(x)
    torch.testing.assert_close(y, x @ hadamard.matrix(size).T / size**0.5, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hadamard.transform(y, transpose=True), x, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="x: got 7 columns.*next is 8"):
        hadamard.transform(torch.randn(2, 7))


def published_grid() -> torch.Tensor:
    """All codes by the published rule: shuffled signs whose parity is the shift and flips the lowest of them."""
    order, place = [0, 2, 4, 6, 1, 3, 5, 7], [0, 4, 1, 5, 2, 6, 3, 7]
    half_odd = [v for v in itertools.product((0.5, 1.5, 2.5), repeat=8) if sum(a * a for a in v) <= 10]
    twelve = [[int(d) / 2 for d in word] for word in e8p.NORM_12.split()]
    shuffled = torch.tensor(half_odd + twelve)[:, order]
    shuffled[:, 7] *= 1 - 2 * (shuffled.sum(1) % 2)
    made = torch.empty(65536, 8)
    for byte in range(256):
        parity = byte.bit_count() % 2
        signs = byte ^ parity
        sign = torch.tensor([-1.0 if signs >> place[i] & 1 else 1.0 for i in range(8)])
        made[byte::256] = shuffled[:, place] * sign + (0.25 - 0.5 * parity)
    return made


def test_every_e8p_code_is_the_published_one():
    assert torch.equal(e8p.grid(), published_grid())


def test_e8p_grid_by_its_definition():
    """65,536 different points, each 1/4 off a half-odd vector with an even sum, 227 patterns to norm 10, 29 of 12."""
    grid = e8p.grid()
    assert len(grid.unique(dim=0)) == 65536
    shift = torch.where((grid[:, :1] - 0.75) % 1 == 0, 0.25, -0.25)
    base = grid - shift
    assert ((base - 0.5) % 1 == 0).all() and (base.sum(1) % 2 == 0).all()
    norms = e8p.patterns().square().sum(1)
    assert int((norms <= 10).sum()) == 227 and int((norms == 12).sum()) == 29


@pytest.mark.parametrize("scale", [0.01, 0.5, 1.0, 1.6, 3.0])
def test_nearest_point_is_the_nearest(scale):
    x = torch.randn(700, 8) * scale
    points, codes = e8p.nearest(x)
    assert torch.equal(points, e8p.grid()[codes])
    best = torch.cat([torch.cdist(part.double(), e8p.grid().double()).amin(1) for part in x.split(100)])
    torch.testing.assert_close((x - points).norm(dim=1).double(), best, atol=1e-5, rtol=1e-5)


def test_nearest_finds_every_point():
    points, codes = e8p.nearest(e8p.grid())
    assert torch.equal(codes, torch.arange(65536)) and torch.equal(points, e8p.grid())
    assert e8p.nearest(torch.empty(0, 8))[1].shape == (0,)


def test_e8p_bytes_lie_where_kernels_read_them():
    codes = torch.randint(0, 65536, (16, 32, 2))
    packed = layouts.pack_e8p(codes)
    for row, column, stage in itertools.product(range(16), range(32), range(2)):
        g, c, j, t = row % 8, column // 16, column % 16 // 4, column % 4
        at = packed[row // 8, c, 4 * g + t, 4 * j + 2 * stage :][:2]
        assert at.tolist() == [codes[row, column, stage] >> 8, codes[row, column, stage] & 255]
    one = layouts.pack_e8p(codes[..., :1])
    for row, column in itertools.product(range(16), range(32)):
        g, r, c, j, t = row % 8, row // 8, column // 16, column % 16 // 4, column % 4
        assert one[0, c, 4 * g + t, 4 * j + 2 * r :][:2].tolist() == [codes[row, column, 0] >> 8,
                                                                     codes[row, column, 0] & 255]


def test_gptvq_bytes_lie_where_kernels_read_them():
    codes = torch.randint(0, 256, (512, 512, 1))
    packed = layouts.pack_gptvq(codes)
    for _ in range(300):
        row, vector = int(torch.randint(512, ())), int(torch.randint(512, ()))
        tile, slice_ = vector // 64, vector % 64
        lane, byte = 4 * (row % 8) + tile % 4, 2 * (slice_ % 8) + row % 16 // 8
        assert packed[row // 256, tile // 4, row % 256 // 16, slice_ // 8, lane, byte] == codes[row, vector, 0]
    books = torch.randn(2, 8, 256, 4)
    assert torch.equal(layouts.pack_gptvq_books(books)[1, 1, :, 2], books[1, 6])


def test_aqlm_bytes_lie_where_kernels_read_them():
    codes = torch.randint(0, 256, (64, 64, 2))
    packed = layouts.pack_aqlm_2x8(codes)
    for row, vector, book in itertools.product(range(0, 64, 5), range(64), range(2)):
        lane, step = row % 32, (vector - row) % 32
        assert packed[vector // 32, row // 32, step // 8, lane, 2 * (step % 8) + book] == codes[row, vector, book]
    codes = torch.randint(0, 4096, (256, 8, 2))
    words = layouts.pack_aqlm_2x12(codes).long() & 0xFFFFFFFF
    for row, vector in itertools.product(range(0, 256, 7), range(8)):
        lane, r = row % 128 // 4, row % 4
        flat = words[vector // 4, row // 128, :, lane].flatten()[3 * r : 3 * r + 3].tolist()
        bits = flat[0] | flat[1] << 32 | flat[2] << 64
        place = (vector - lane) % 4
        assert [bits >> 24 * place & 4095, bits >> 24 * place + 12 & 4095] == codes[row, vector].tolist()


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(NAMES), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_unpack_undoes_pack(row_tiles, column_tiles, name, seed):
    spec = format_named(name)
    shape = (row_tiles * spec.row_multiple, column_tiles * spec.column_multiple // spec.vec_size, spec.books)
    codes = torch.randint(0, spec.book_size, shape, generator=torch.Generator().manual_seed(seed))
    kind = "e8p" if name.startswith("e8p") else "gptvq" if name == "gptvq2" else name
    arguments = (spec.stages,) if kind == "e8p" else ()
    packed = getattr(layouts, f"pack_{kind}")(codes)
    assert torch.equal(getattr(layouts, f"unpack_{kind}")(packed, *arguments), codes)


def definition(w: VQWeight) -> torch.Tensor:
    """W by the format's formula, from unpacked codes, in fp64."""
    spec, planes = w.spec, w.planes
    if w.format.startswith("e8p"):
        rows, columns = spec.sides(w.n, w.k)
        q = sum(s.double() * e8p.grid().double()[spec.unpack(planes)[..., i]] for i, s in enumerate(planes["scales"]))
        q = q.flatten(1)[:rows, :columns]
        left, right = (hadamard.matrix(size).double() / size**0.5 for size in (rows, columns))
        made = left @ q @ right.T
        return planes["out_scale"].double()[:, None] * made[: w.n, : w.k] * planes["in_scale"].double()
    made = torch.empty(w.n, w.k, dtype=torch.float64)
    if w.format == "gptvq2":
        codes, books = layouts.unpack_gptvq(planes["codes"]), layouts.unpack_gptvq_books(planes["codebooks"])
        for column in range(w.k):
            entries = books[:, column // 256].double()  # [row tiles, 256, 4]
            tile = torch.arange(w.n) // 256
            made[:, column] = entries[tile, codes[: w.n, column // 4, 0], column % 4]
        return made
    codes = getattr(layouts, f"unpack_{w.format}")(planes["codes"])[: w.n]
    for column in range(w.k):
        made[:, column] = sum(planes["codebooks"][b].double()[codes[:, column // 8, b], column % 8]
                              for b in range(spec.books)) * planes["scales"].double()
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_dequantize_and_linear_agree_with_the_definition(name, shape):
    w = random_weight(name, *shape)
    want = definition(w)
    assert w.shape == shape and w.bits_per_weight == 8 * w.nbytes / (shape[0] * shape[1])
    torch.testing.assert_close(w.dequantize().double(), want, atol=2e-5 * float(want.abs().max()), rtol=0)
    for m in (1, 3, 17):
        x = torch.randn(m, w.k)
        y = linear(x, w)
        assert y.shape == (m, w.n) and y.dtype == torch.float32
        exact = x.double() @ want.T
        torch.testing.assert_close(y.double(), exact, atol=2e-5 * float(exact.abs().max() + 1), rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_linear_for_every_number_of_rows(name, dtype):
    """Rows are independent of one another, and y is the exact product rounded to x's dtype."""
    w = random_weight(name, 40, 200)
    x = torch.randn(64, 200).to(dtype)
    want = x.double() @ definition(w).T
    step = {torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    for m in ROWS:
        y = linear(x[:m], w)
        assert y.dtype == dtype and y.shape == (m, 40)
        assert ((y.double() - want[:m]).abs() <= step * want[:m].abs() + 2e-4).all()


@pytest.mark.parametrize("name", NAMES)
def test_extreme_inputs(name):
    w = random_weight(name, 24, 136)
    exact = definition(w)
    x = torch.randn(6, 136)
    x[0] = 0
    x[1, 17] = 1e4
    x[2, 3], x[3, 4], x[4, 5] = torch.nan, torch.inf, -torch.inf
    y = linear(x, w)
    assert not y[0].any() and y[2:5].isnan().all()
    for row in (1, 5):
        want = x[row].double() @ exact.T
        assert (y[row].double() - want).abs().max() <= 1e-5 * x[row].abs().max() * exact.abs().max() * 12
    assert linear(x.half(), w)[2:5].isnan().all()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_of_x_and_out(name):
    w = random_weight(name, 16, 40)
    x = torch.randn(2, 3, 40)
    y = linear(x, w)
    assert y.shape == (2, 3, 16)
    out = torch.empty(2, 3, 16)
    assert linear(x, w, out) is out and torch.equal(out, y)
    assert linear(x[:0], w).shape == (0, 3, 16) and linear(x[0, 0], w).shape == (16,)
    torch.testing.assert_close(linear(x.transpose(0, 1), w), y.transpose(0, 1), atol=1e-5, rtol=1e-5)
    for bad, words in ((torch.empty(2, 3, 15), "out: got torch.float32 \\[2, 3, 15\\]"),
                       (torch.empty(2, 3, 16).half(), "out: got torch.float16")):
        with pytest.raises(ValueError, match=words):
            linear(x, w, bad)


def test_bad_input_is_named():
    w = random_weight("aqlm_2x8", 16, 40)
    for x, words in ((torch.randn(2, 41), r"x: got shape \[2, 41\], supported: \[..., 40\]"),
                     (torch.randn(2, 40).double(), "x: got torch.float64"),
                     (torch.randn(2, 40, device="meta"), "x: got a tensor on meta")):
        with pytest.raises(ValueError, match=words):
            linear(x, w)
    with pytest.raises(NotImplementedError, match="path: got 'kernel', supported on cpu: 'reference'"):
        linear(torch.randn(2, 40), w, path="kernel")
    with pytest.raises(ValueError, match="format: got 'aqlm_3x8', supported: e8p4"):
        VQWeight("aqlm_3x8", 16, 40, {})
    planes = w.planes
    for changed, words in (({"codes": planes["codes"][:, :, :2]}, "codes: got torch.uint8"),
                           ({"scales": planes["scales"].half()}, "scales: got torch.float16"),
                           ({"codebooks": planes["codebooks"].to("meta")}, "codebooks: got a tensor on meta"),
                           ({"extra": planes["scales"]}, "planes: got codebooks, codes, extra, scales")):
        with pytest.raises(ValueError, match=words):
            VQWeight("aqlm_2x8", 16, 40, planes | changed)
    with pytest.raises(ValueError, match="shape: got 0 x 40"):
        VQWeight("aqlm_2x8", 0, 40, planes)
    spec = format_named("aqlm_2x8")
    with pytest.raises(ValueError, match="codes: got values 0 to 256, supported by aqlm_2x8: 0 to 255"):
        spec.pack(torch.tensor([[[0, 256]]]), planes["codebooks"], torch.ones(1), 8)
    with pytest.raises(ValueError, match=r"codes: got shape \[1, 1, 1\]"):
        spec.pack(torch.zeros(1, 1, 1), planes["codebooks"], torch.ones(1), 8)


def test_bits_per_weight_of_large_matrices():
    """What the formats promise at a real layer's size; planes on no device."""
    for name, bits in (("e8p4", 4), ("e8p2", 2), ("gptvq2", 2.25), ("aqlm_2x8", 2), ("aqlm_2x12", 3), ("aqlm_1x16", 2)):
        shapes = format_named(name).shapes(4096, 14336)
        w = VQWeight(name, 4096, 14336, {plane: torch.empty(shape, dtype=dtype, device="meta")
                                         for plane, (shape, dtype) in shapes.items()})
        book = {"aqlm_1x16": 0.15, "aqlm_2x12": 0.025}.get(name, 0.015)
        assert bits <= w.bits_per_weight <= bits + book
        assert w.to("meta").nbytes == w.nbytes
