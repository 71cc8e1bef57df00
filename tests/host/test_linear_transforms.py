"""How transforms of linear layers are split for the kernels that make them as Kronecker products."""

import pytest
import torch

from lowbit_attn.kernels.linear import FIXED_PARTS, KRONECKER_ROWS, VECTOR_ROWS, linear_keys
from lowbit_attn.linear import hadamard
from lowbit_attn.linear_kernels import even_ctas
from lowbit_attn.linear_transforms import Machine, is_inside, kronecker_signs, parts_of_sums, split_of

HOPPER, A100, ADA = Machine("sm_90a"), Machine("sm_80"), Machine("sm_89")
SPLITS = {4096: (16, 256, 2), 6144: (24, 256, 4), 8192: (32, 256, 4), 14336: (56, 256, 8), 16384: (64, 256, 8),
          28672: (56, 512, 8), 32768: (64, 512, 8), 1024: (4, 256, 1), 5120: (20, 256, 4)}

WIDE_SPLITS = {2304: (36, 64, 5), 3584: (28, 128, 4), 11008: (172, 64, 22), 17408: (68, 256, 9), 18944: (148, 128, 19),
               27648: (108, 256, 14), 53248: (104, 512, 13), 65536: (128, 512, 16), 13824: (108, 128, 14)}


def test_sizes_of_real_layers():
    assert {size: split_of(size) for size in SPLITS} == SPLITS
    assert {size: split_of(size) for size in WIDE_SPLITS} == WIDE_SPLITS
    assert not [size for size in (576, 1536, 512, 896, 4 * 12 * 107, 1 << 18) if split_of(size)]
    for split in filter(None, map(split_of, filter(hadamard.base_order, range(4, 140000, 4)))):
        each = -(-split.order // split.ctas)
        assert each <= KRONECKER_ROWS and (split.ctas - 1) * each < split.order  # every CTA has a row
        assert split.is_wide or split.ctas <= 8  # as a cluster has
        assert hadamard.base_order(split.order * split.columns) in (1, hadamard.base_order(split.order))


def test_parts_of_sums():
    assert [parts_of_sums(HOPPER, m, 28672, 28672) for m in (1, 64, 65)] == [8, 8, 8]
    assert [parts_of_sums(HOPPER, m, 4096, 4096) for m in (1, 63, 64, 65)] == [2, 2, FIXED_PARTS, 1]
    assert [parts_of_sums(HOPPER, m, 11008, 11008) for m in (1, 64, 65)] == [FIXED_PARTS, FIXED_PARTS, 8]
    assert parts_of_sums(HOPPER, 1, 4094, 4096) == 1  # columns that lanes cannot read by fours


@pytest.mark.parametrize("machine", [A100, ADA, Machine("sm_90"), Machine("sm_90", "sm_89")], ids=str)
def test_parts_of_sums_without_clusters(machine):
    """One CTA, or those that make digits of coefficients in memory."""
    assert [parts_of_sums(machine, m, 28672, 28672) for m in (1, 64, 65)] == [FIXED_PARTS] * 3
    assert [parts_of_sums(machine, m, 4096, 4096) for m in (1, 64, 65)] == [FIXED_PARTS, FIXED_PARTS, 1]
    assert [parts_of_sums(machine, m, k, k) for m in (1, 65) for k in (1024, 2048, 576)] == [1] * 6
    assert [parts_of_sums(machine, m, 11008, 11008) for m in (1, 64, 65)] == [FIXED_PARTS, FIXED_PARTS, 1]
    assert parts_of_sums(machine, 1, 4094, 4096) == 1


def test_which_transforms_are_inside_the_product():
    """Few rows, one or two halves of 256 columns, and a scale that is read by 16 bytes before x is there."""
    sizes = [size for size in range(4, 40000, 4) if hadamard.base_order(size)
             and is_inside(HOPPER, 1, size, size, torch.ones(size))]
    assert {1024, 2048, 3072, 4096} <= set(sizes) and max(sizes) == 4096
    assert all(split_of(size).ctas <= 2 and split_of(size).columns == 256 for size in sizes)
    assert is_inside(HOPPER, VECTOR_ROWS, 4096, 4096, torch.ones(4096))
    assert not is_inside(HOPPER, VECTOR_ROWS + 1, 4096, 4096, torch.ones(4096))
    assert not is_inside(HOPPER, 1, 4096, 4096, torch.ones(4097)[1:])
    assert [is_inside(machine, 1, 4096, 4096, torch.ones(4096))
            for machine in (A100, Machine("sm_90"), ADA, Machine("sm_90", "sm_89"))] == [True, True, False, False]


@pytest.mark.parametrize("target", ["sm_90a", "sm_80", "sm_89"])
def test_every_kernel_that_a_call_loads_is_named(target):
    """Transforms of all ways; the product with one inside, where there is room."""
    machine, keys = Machine(target), {(key.variant, key.rows) for key in linear_keys(target)}
    assert machine.has_vector == (("gemv-vector", 4) in keys)
    assert {("kronecker-digits", 512), ("kronecker-coefficients", 256), ("hadamard-rotate", 0), ("sum", 0),
            ("fixed-digits", 0), ("wide-output", 64), ("wide-coefficients", 512)} <= keys


@pytest.mark.parametrize("units", [1, 131, 132, 133, 512, 768, 1024, 3584])
def test_ctas_that_share_units_evenly(units):
    """No more than there are, the largest share no larger, and one CTA less would make it larger."""
    ctas, largest = even_ctas(units, 132), -(-units // 132)
    assert ctas <= min(units, 132) and -(-units // ctas) == largest
    assert ctas == 1 or -(-units // (ctas - 1)) > largest


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("size", [4096, 28672, 36 * 512, 44 * 256, 172 * 64, 36 * 64])
def test_signs_are_the_matrix(size, transpose):
    """Lane 4 g + t of a CTA: rows 8 s + 4 h + t of the matrix, by which a row is multiplied, in its column g."""
    split = split_of(size)
    signs = kronecker_signs(split, transpose)
    if split.is_wide:  # cta, batch, g, t, s, h
        signs = signs.view(split.ctas, -1, 8, 4, 4, 2).permute(0, 2, 3, 1, 4, 5)
    signs = signs.reshape(split.ctas, 8, 4, -1, 2)  # cta, g, t, s, h
    each = KRONECKER_ROWS if split.is_wide else -(-split.order // split.ctas)
    made = signs.permute(3, 4, 2, 0, 1).reshape(-1, split.ctas, KRONECKER_ROWS)
    assert not made[:, :, each:].any()
    made = made[:, :, :each].flatten(1)
    assert not made[split.order:].any() and not made[:, split.order:].any()
    row = torch.randn(1, split.order, dtype=torch.double)
    want = hadamard.transform(row, transpose) * split.order**0.5
    torch.testing.assert_close(row @ made[: split.order, : split.order].double(), want)
