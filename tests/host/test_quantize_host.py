"""Where the quantize kernels' lanes find values and put codes: their own index functions on numpy arrays."""

import numpy as np
import pytest
import torch

pytest.importorskip("tilelang")
from lowbit_attn import layout  # noqa: E402
from lowbit_attn.device import columns, groups, tokens  # noqa: E402
from lowbit_attn.device.quantize_boost import BoostMatrix  # noqa: E402
from lowbit_attn.device.quantize_rows import RowMatrix  # noqa: E402
from lowbit_attn.device.quantize_token import ATOM, STRANDS, TokenMatrix  # noqa: E402
from lowbit_attn.device.step import StepGeometry  # noqa: E402
from lowbit_attn.formats import FORMATS, packing  # noqa: E402

LANE = np.arange(layout.LANES)
HEAD_DIMS = (64, 96, 128, 256)
BITS = (8, 4, 2, 1)


def tile_of(values: np.ndarray, threads: int) -> np.ndarray:
    """What ``load_tokens`` leaves in shared memory of values [rows, head_dim]: [accesses, 8]."""
    row_accesses = values.shape[1] // tokens.ACCESS_HALVES
    tile = np.full((values.shape[0] * row_accesses, tokens.ACCESS_HALVES), -1)
    assert tile.shape[0] % threads == 0
    row, access = tokens.token_place(np.arange(tile.shape[0]), row_accesses)
    tile[tokens.swizzled(row, access, row_accesses)] = values.reshape(values.shape[0], row_accesses, -1)[row, access]
    return tile


def fragment(tile: np.ndarray, place: np.ndarray, transposed: bool) -> np.ndarray:
    """What ldmatrix gives: [4 matrices, lane, 2]; ``place`` [lane] names the rows."""
    matrices = tile[place].reshape(tokens.MATRICES, 8, 8)
    matrices = matrices.transpose(0, 2, 1) if transposed else matrices
    g, t = LANE // 4, LANE % 4
    return np.stack([matrices[:, g, 2 * t + e] for e in range(2)], -1)


def packed(words: np.ndarray, count: int) -> np.ndarray:
    """Words uint32 [words of the plane, lane] -> bytes in the order of the record."""
    plane = np.zeros(4 * count * layout.LANES, np.uint8)
    for word in range(count):
        at = layout.word_offset(word, LANE)
        for byte in range(4):
            plane[at + byte] = words[word] >> 8 * byte & 255
    return plane


def codes_like(rows: int, cols: int, bits: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 1 << bits, (rows, cols))


def added(word, code, shift):
    """How a kernel adds code_bits to a word."""
    return (word + ((groups.ROUND_BITS + code) << shift)) % (1 << 32)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("side", "kv")
def test_rows_pack_as_the_reference(side, bits, head_dim):
    if side == "v" and head_dim % (16 * layout.tiles_per_word(bits)):
        pytest.skip("no such format")
    fmt = FORMATS[f"k{bits}v8" if side == "k" else f"k8v{bits}"]
    m = RowMatrix(getattr(fmt, side).spec(head_dim))
    codes = codes_like(m.rows, m.cols, bits)
    tile = tile_of(codes.T if m.transposed else codes, m.threads)
    words = np.full((m.col_tiles * m.words, layout.LANES), groups.empty_word(bits), np.int64)
    for column_tile in range(m.col_tiles):
        for col8 in range(2):
            pairs = np.concatenate([fragment(tile, m.place(column_tile, col8, i, LANE), m.transposed)
                                    for i in range(0, m.held, tokens.MATRICES)])
            for e in range(2):
                column = 2 * col8 + e
                col = m.column_of(column_tile, LANE % 4, column)
                for held in range(m.held):
                    assert (pairs[held, :, e] == codes[8 * held + LANE // 4, col]).all()
                    word, shift = m.word_and_shift(held, column)
                    at = column_tile * m.words + word
                    words[at] = added(words[at], pairs[held, :, e], shift)
    assert np.array_equal(packed(words, len(words)), packing.pack_codes(torch.from_numpy(codes), bits).numpy())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("bits", BITS)
def test_tokens_pack_as_the_reference(bits, head_dim):
    m = TokenMatrix(FORMATS[f"k{bits}tv8"].k.spec(head_dim))
    codes = codes_like(layout.PAGE_TOKENS, head_dim, bits)
    words = np.full((m.spans * m.col_tiles, layout.LANES), groups.empty_word(bits), np.int64)
    for part in range(m.parts):
        tile = tile_of(codes[part * m.part_rows : (part + 1) * m.part_rows], m.threads)
        for warp in range(m.warps):
            span = part * m.warps + warp
            for slot in range(m.slots):
                pairs = np.concatenate([fragment(tile, m.place(warp, slot, i, LANE), False)
                                        for i in range(0, m.atoms, tokens.MATRICES)])
                for atom in range(m.atoms):
                    for e in range(STRANDS):
                        column = m.column_of(atom, LANE % 4, e)
                        assert (pairs[atom, :, e] == codes[m.row_of(span, slot, LANE // 4), column]).all()
                        at = m.code_word(span, atom * ATOM // layout.TILE)
                        words[at] = added(words[at], pairs[atom, :, e], m.code_shift(slot, atom, e))
    assert np.array_equal(packed(words, len(words)), packing.pack_codes(torch.from_numpy(codes), bits).numpy())


@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_boosted_columns_are_those_of_the_tile(head_dim):
    m = BoostMatrix(FORMATS["kitty"].k.spec(head_dim))
    codes = codes_like(layout.PAGE_TOKENS, head_dim, 8)
    tile = tile_of(codes, m.threads)
    for column_tile in range(head_dim // layout.TILE):
        for c in range(4):
            pairs = np.concatenate([fragment(tile, m.place(column_tile, c // 2, i, LANE), False)
                                    for i in range(0, m.held, tokens.MATRICES)])
            want = codes[:, m.column_of(column_tile, LANE % 4, c)]
            assert (pairs[..., c % 2] == want[8 * np.arange(m.held)[:, None] + LANE // 4, LANE]).all()


@pytest.mark.parametrize("lanes, same", [(groups.ROW_LANES, LANE % 4), (groups.QUAD_LANES, LANE // 4)])
def test_lanes_of_a_group(lanes, same):
    for lane in LANE:
        mask = lanes.first_mask << int(lanes.first_of(lane))
        assert [mask >> other & 1 for other in LANE] == (same == same[lane]).astype(int).tolist()


@pytest.mark.parametrize("column", range(columns.COLUMNS))
def test_owners_of_a_column(column):
    """Those with the bits of the distances 16 and 8 at which a lane keeps the upper half of the columns."""
    owners = columns.owner(column, LANE)
    assert (columns.own_column(owners) == column).all() and columns.is_writer(owners).all()
    assert (owners % 4 == LANE % 4).all()
    assert (2 * (owners >> 4 & 1) + (owners >> 3 & 1) == column).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_bank_conflicts(head_dim):
    """One phase of ldmatrix reads eight consecutive rows at the same access: eight groups of four banks."""
    row_accesses = head_dim // tokens.ACCESS_HALVES
    for first in range(0, layout.PAGE_TOKENS, 8):
        for access in range(row_accesses):
            assert len(set(tokens.swizzled(first + np.arange(8), access, row_accesses) % 8)) == 8


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("count", (32, 64, 128))
@pytest.mark.parametrize("threads", (64, 128, 256, 512))
def test_a_copy_takes_every_access_once_and_keeps_its_place_in_the_row(threads, count, head_dim):
    row_accesses = head_dim // tokens.ACCESS_HALVES
    loaders = tokens.loading_threads(threads, count, row_accesses)
    rounds = count * row_accesses // loaders
    row, access = tokens.token_place(np.arange(rounds)[:, None] * loaders + np.arange(loaders), row_accesses)
    assert sorted((row * row_accesses + access).ravel()) == list(range(count * row_accesses))
    assert (access == access[0]).all() and min(threads, count * row_accesses) / 2 < loaders <= threads


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ("k8v8", "k4v4", "k1v8", "k4tv4", "k1tv8", "kitty-b8"))
def test_a_step_packs_either_side_with_its_threads(name, head_dim):
    """Whole turns of whole warps, and whole rounds of 16-byte accesses; registers of the blocks that fit an SM."""
    step = StepGeometry(FORMATS[name], head_dim, "k", "float16")
    for m in step.matrices:
        packers = min(m.threads, step.threads)
        assert m.threads % packers == 0 and packers % layout.LANES == 0
        assert m.part_rows * m.row_accesses % packers == 0 and m.part_rows * m.row_accesses <= step.tile_accesses
        assert isinstance(m, RowMatrix) or packers == m.threads  # others synchronise within, or have few
    assert step.blocks_per_sm * step.threads * columns.REGISTERS <= columns.SM_REGISTERS
