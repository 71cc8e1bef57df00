"""The order of codes and metadata: inverses, MMA fragments, and the same functions on every kind of value."""

import itertools

import numpy as np
import pytest
import torch

from lowbit_attn import layout
from lowbit_attn.formats import packing

BITS = (8, 4, 2, 1)
DIMS = (32, 64, 96, 128, 256)
# (rows, cols) of K, then of V, for every head_dim that the bit-width allows
MATRICES = [(bits, rows, cols) for bits, d in itertools.product(BITS, DIMS) for rows, cols in ((128, d), (d, 128))
            if rows % (16 * layout.tiles_per_word(bits)) == 0]
matrices = pytest.mark.parametrize("bits, rows, cols", MATRICES)


def grid(rows, cols):
    return np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")


def words_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint32 [words, lanes] of a packed code matrix."""
    packed = packing.pack_codes(torch.from_numpy(codes), bits).numpy()
    count = layout.words_per_lane(*codes.shape, bits)
    word, lane = grid(count, 32)
    return packed.view("<u4")[layout.word_offset(word, lane) // 4]


@matrices
def test_codes_are_a_bijection(bits, rows, cols):
    row, col = grid(rows, cols)
    word, lane, byte, slot = layout.code_slot(row, col, rows, bits)
    place = ((layout.word_offset(word, lane) + byte) * layout.slots_per_byte(bits) + slot).ravel()
    assert np.array_equal(np.sort(place), np.arange(rows * cols))
    assert word.max() + 1 == layout.words_per_lane(rows, cols, bits)
    assert np.array_equal(layout.code_element(word, lane, byte, slot, rows, bits), (row, col))


@matrices
def test_word_offsets_invert(bits, rows, cols):
    offset = np.arange(layout.plane_bytes(rows, cols, bits))
    word, lane, byte = layout.word_at(offset)
    assert np.array_equal(layout.word_offset(word, lane) + byte, offset)
    assert byte.max() == 3 and lane.max() == 31


@matrices
def test_four_words_of_a_lane_are_one_load(bits, rows, cols):
    blocks, lane = grid(layout.words_per_lane(rows, cols, bits) // 4, 32)
    first = layout.word_offset(4 * blocks, lane)
    assert not (first % 16).any()
    for i in range(4):
        assert np.array_equal(layout.word_offset(4 * blocks + i, lane), first + 4 * i)


@matrices
def test_pack_unpack_every_code(bits, rows, cols):
    codes = torch.arange(rows * cols).mul(7).add(torch.randint(1 << bits, (3, 1))).remainder(1 << bits)
    codes = codes.to(torch.uint8).unflatten(-1, (rows, cols))
    assert len(codes.unique()) == 1 << bits
    packed = packing.pack_codes(codes, bits)
    assert packed.shape == (3, layout.plane_bytes(rows, cols, bits))
    assert torch.equal(packing.unpack_codes(packed, rows, cols, bits), codes)


@matrices
def test_pack_puts_each_code_where_code_slot_says(bits, rows, cols):
    """One element at a time, against the scalar functions alone."""
    generator = np.random.default_rng(0)
    for row, col in zip(generator.integers(rows, size=20).tolist(), generator.integers(cols, size=20).tolist()):
        codes = torch.zeros(rows, cols, dtype=torch.uint8)
        codes[row, col] = (1 << bits) - 1
        packed = packing.pack_codes(codes, bits)
        word, lane, byte, slot = layout.code_slot(row, col, rows, bits)
        at = layout.word_offset(word, lane) + byte
        assert packed.nonzero().tolist() == [[at]]
        assert packed[at] == ((1 << bits) - 1) << bits * slot


def half_fragment(lane, i):
    """PTX ISA, m16n8k16 with .f16: row and column of a_i of the A operand."""
    group, thread = lane >> 2, lane % 4
    return group if i < 2 or 4 <= i < 6 else group + 8, thread * 2 + (i & 1) + (0 if i < 4 else 8)


@matrices
def test_one_and_gives_the_half_fragment(bits, rows, cols):
    """AND on the word and on the word >> 8: registers (a0,a1) to (a6,a7), codes at their bits."""
    codes = np.random.default_rng(0).integers(1 << bits, size=(rows, cols)).astype(np.uint8)
    words, n = words_of(codes, bits), layout.tiles_per_word(bits)
    row_tiles = rows // 16
    for tile, lane in itertools.product(range(row_tiles * (cols // 16)), range(32)):
        row0, col0 = tile % row_tiles * 16, tile // row_tiles * 16
        for register in range(4):
            row8, col8 = register % 2, register // 2
            word, slot = (2 * tile + row8, 0) if bits == 8 else (tile // n, row8 + 2 * (tile % n))
            mask = (((1 << bits) - 1) << bits * slot) * 0x00010001
            pair = (int(words[word, lane]) >> 8 * col8) & mask
            for e, half in enumerate((pair & 0xFFFF, pair >> 16)):
                row, col = half_fragment(lane, 2 * register + e)
                assert half == int(codes[row0 + row, col0 + col]) << bits * slot
                assert bits * (slot + 1) <= 11  # a masked code is then an exact fp16 subnormal


def byte_fragment(lane, i):
    """PTX ISA, m16n8k32 with .u8: row and column of a_i of the A operand."""
    group, thread = lane >> 2, lane % 4
    return group if i < 4 or 8 <= i < 12 else group + 8, thread * 4 + (i & 3) + (0 if i < 8 else 16)


@matrices
def test_one_and_gives_the_byte_fragment(bits, rows, cols):
    """AND on the word: register of m16n8k32 whose columns 4t..4t+3 are channels 2t, 2t+8, 2t+1, 2t+9 of a tile."""
    codes = np.random.default_rng(0).integers(1 << bits, size=(rows, cols)).astype(np.uint8)
    words, row_tiles = words_of(codes, bits), rows // 16
    for row_tile, pair, lane in itertools.product(range(row_tiles), range(cols // 32), range(32)):
        for register in range(4):
            tile = (2 * pair + register // 2) * row_tiles + row_tile
            row8, n = register % 2, layout.tiles_per_word(bits)
            word, slot = (2 * tile + row8, 0) if bits == 8 else (tile // n, row8 + 2 * (tile % n))
            masked = int(words[word, lane]) & ((((1 << bits) - 1) << bits * slot) * 0x01010101)
            for i in range(4):
                row, k = byte_fragment(lane, 4 * register + i)
                thread = k % 16 // 4
                col = 32 * pair + k // 16 * 16 + (2 * thread, 2 * thread + 8, 2 * thread + 1, 2 * thread + 9)[k % 4]
                assert (masked >> 8 * i) & 0xFF == int(codes[16 * row_tile + row, col]) << bits * slot


def test_int4_nibbles_are_in_the_order_75316420():
    """From the word's top nibble down: a7 a5 a3 a1 a6 a4 a2 a0, the papers' order."""
    for lane in range(32):
        held = {}
        for i in range(8):
            word, at, byte, slot = layout.code_slot(*half_fragment(lane, i), 128, 4)
            assert (word, at) == (0, lane)
            held[2 * byte + slot] = i
        assert [held[nibble] for nibble in reversed(range(8))] == [7, 5, 3, 1, 6, 4, 2, 0]


# column tiles that must start and end a contiguous run: (rows, bits) -> multiple
RUNS = [(128, 8, 1), (128, 4, 1), (128, 2, 1), (128, 1, 2), (96, 8, 1), (96, 4, 2), (96, 2, 4), (64, 4, 1), (64, 2, 2)]


@pytest.mark.parametrize("rows, bits, step", RUNS)
def test_runs_of_column_tiles_are_contiguous(rows, bits, step):
    cols = 128
    for start, stop in itertools.combinations(range(0, cols // 16 + 1, step), 2):
        row, col = np.meshgrid(np.arange(rows), np.arange(16 * start, 16 * stop), indexing="ij")
        word, lane, byte, _ = layout.code_slot(row, col, rows, bits)
        held = np.unique(layout.word_offset(word, lane) + byte)
        begin = layout.plane_bytes(rows, 16 * start, bits)
        assert np.array_equal(held, begin + np.arange(layout.plane_bytes(rows, 16 * (stop - start), bits)))


def test_half_a_pair_of_1_bit_column_tiles_is_not_contiguous():
    """The multiples above are needed: one column tile of a 1-bit page leaves gaps."""
    row, col = grid(128, 16)
    word, lane, byte, _ = layout.code_slot(row, col, 128, 1)
    held = np.unique(layout.word_offset(word, lane) + byte)
    assert held.max() - held.min() + 1 > len(held)


@pytest.mark.parametrize("head_dim", DIMS)
def test_channel_metadata(head_dim):
    channel = np.arange(head_dim)
    index = layout.channel_meta_index(channel)
    assert np.array_equal(np.sort(index), channel)
    assert np.array_equal(layout.channel_at(index), channel)
    for pair, t in itertools.product(range(head_dim // 32), range(4)):  # a lane's 16 bytes: two k16 steps
        first = [32 * pair + c for c in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
        assert layout.channel_at(np.arange(8) + 8 * (4 * pair + t)).tolist() == first + [c + 16 for c in first]
    offsets = [layout.channel_meta_offset(g, z, c, head_dim) for g in range(4) for z in (0, 1) for c in range(head_dim)]
    assert sorted(offsets) == list(range(0, 4 * 2 * 2 * head_dim, 2))


def test_token_metadata():
    token = np.arange(128)
    index = layout.token_meta_index(token)
    assert np.array_equal(np.sort(index), token)
    assert np.array_equal(layout.token_at(index), token)
    for c, g in itertools.product(range(4), range(8)):  # a lane's 16 bytes: tokens g, g + 8, g + 16, g + 24
        assert layout.token_at(np.arange(4) + 4 * (8 * c + g)).tolist() == [32 * c + 8 * j + g for j in range(4)]
    offsets = [layout.token_meta_offset(g, z, t) for g in range(4) for t in range(128) for z in (0, 1)]
    assert sorted(offsets) == list(range(0, 4 * 128 * 4, 2))


@pytest.mark.parametrize("groups", (1, 2, 4))
@pytest.mark.parametrize("storage", (torch.float16, torch.bfloat16))
def test_metadata_bytes_are_where_the_offsets_say(groups, storage):
    scale, zero = torch.randn(2, groups, 96).to(storage), torch.randn(2, groups, 96).to(storage)
    packed = packing.pack_channel_meta(scale, zero)
    values = packed.view(storage)
    for group, channel in itertools.product(range(groups), (0, 1, 9, 33, 95)):
        assert torch.equal(values[:, layout.channel_meta_offset(group, 0, channel, 96) // 2], scale[:, group, channel])
        assert torch.equal(values[:, layout.channel_meta_offset(group, 1, channel, 96) // 2], zero[:, group, channel])
    assert all(map(torch.equal, packing.unpack_channel_meta(packed, 96, storage), (scale, zero)))

    scale, zero = torch.randn(2, groups, 128).to(storage), torch.randn(2, groups, 128).to(storage)
    packed = packing.pack_token_meta(scale, zero)
    values = packed.view(storage)
    for group, token in itertools.product(range(groups), (0, 1, 9, 33, 127)):
        assert torch.equal(values[:, layout.token_meta_offset(group, 0, token) // 2], scale[:, group, token])
        assert torch.equal(values[:, layout.token_meta_offset(group, 1, token) // 2], zero[:, group, token])
    assert all(map(torch.equal, packing.unpack_token_meta(packed, storage), (scale, zero)))


def probe(x, y, bits):
    """Every index function on two values in 0..31."""
    slot = layout.code_slot(x + 64, y + 32, 128, bits)
    return (*slot, *layout.code_element(x % 8, y, x % 4, 0 * x if bits == 8 else y % (8 // bits), 128, bits),
            layout.word_offset(x, y), *layout.word_at(37 * x + y), layout.channel_meta_index(x),
            layout.channel_at(x), layout.token_meta_index(x + 64), layout.token_at(x + 64),
            layout.channel_meta_offset(y % 4, x % 2, x, 32), layout.token_meta_offset(y % 4, x % 2, x))


PAIRS = [(x, (5 * x + 3) % 32) for x in range(32)]


@pytest.mark.parametrize("bits", BITS)
def test_functions_agree_on_ints_numpy_and_torch(bits):
    want = [probe(x, y, bits) for x, y in PAIRS]
    assert all(isinstance(value, int) for row in want for value in row)
    array = np.array(PAIRS, dtype=np.int32).T
    assert np.array_equal(np.stack(probe(array[0], array[1], bits), 1), want)
    tensor = torch.tensor(PAIRS).T
    assert torch.stack(probe(tensor[0], tensor[1], bits), 1).tolist() == [list(row) for row in want]


@pytest.mark.parametrize("bits", BITS)
def test_functions_trace_in_tilelang(bits):
    T = pytest.importorskip("tilelang.language")
    from tilelang import tvm

    x, y = T.dynamic("x", "int32"), T.dynamic("y", "int32")
    traced, analyzer = probe(x, y, bits), tvm.arith.Analyzer()
    for pair in PAIRS[::5]:
        values = {var: tvm.tirx.IntImm("int32", value) for var, value in zip((x, y), pair)}
        got = [int(analyzer.simplify(tvm.tirx.stmt_functor.substitute(e, values))) for e in traced]
        assert got == list(probe(*pair, bits))


@pytest.mark.parametrize("bits", BITS)
def test_functions_trace_in_cute(bits):
    """Compiled by the DSL for the host, on values known only at run time."""
    cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")
    from cutlass.cute.runtime import from_dlpack

    pairs = torch.tensor(PAIRS, dtype=torch.int32)
    want = torch.tensor([probe(x, y, bits) for x, y in PAIRS], dtype=torch.int32)
    got = torch.full_like(want, -1)

    @cute.jit
    def evaluate(x: cute.Tensor, out: cute.Tensor):
        for i in range(x.shape[0]):
            values = probe(x[i, 0], x[i, 1], bits)
            for j in cutlass.range_constexpr(len(values)):
                out[i, j] = values[j]

    evaluate(from_dlpack(pairs), from_dlpack(got))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name, step", [
    ("tile_of", 16), ("code_slot", 1), ("word_offset", 1), ("channel_meta_index", 1), ("token_meta_index", 1),
    ("channel_meta_offset", 1), ("token_meta_offset", 1),
])
def test_layout_id_follows_the_order(monkeypatch, name, step):
    assert layout._layout_id() == layout.LAYOUT_ID
    original = getattr(layout, name)

    def swapped(first, *rest):
        """The same order with neighbours (by ``step``) of the first argument exchanged."""
        return original(first + step - 2 * step * (first // step % 2), *rest)

    monkeypatch.setattr(layout, name, swapped)
    assert layout._layout_id() != layout.LAYOUT_ID


@pytest.mark.parametrize("bits, rows, head_dim, words", [
    (3, 128, 128, "3 bits"), (4, 128, 48, "multiple of 32"), (4, 128, 0, "multiple of 32"),
    (1, 96, 96, "multiple of 64 rows"), (1, 32, 32, "multiple of 64 rows"),
])
def test_unsupported_matrices_are_refused(bits, rows, head_dim, words):
    with pytest.raises(ValueError, match=f"V: .*{words}"):
        layout.check_codes(rows, head_dim, bits, "V")
