"""The Ampere tile path's index arithmetic on the CPU: numpy lanes and registers, driven by the kernel's own helpers.

Shared with the kernel: which 16 bytes a lane copies and loads, which bits become which register, where metadata, 16-bit
rows and merged results sit, and the sizes of each target. Written here from the PTX definitions: m16n8k16, ldmatrix,
movmatrix. All unused memory holds NaN.
"""

import itertools

import numpy as np
import pytest
import torch

from lowbit_attn import kernels, layout, reference
from lowbit_attn.cache import KVCache
from lowbit_attn.formats import FORMATS

pytest.importorskip("tilelang", reason="the helpers live in kernel files that import tilelang")

from lowbit_attn.ampere import config as sizes  # noqa: E402
from lowbit_attn.ampere import dequant, expected, load, merge, mma, softmax  # noqa: E402

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
LENGTHS = (0, 1, 127, 128, 129, 300, 4097)
LOG2_E = 1.4426950408889634
NAN_WORD = 0xFFFFFFFF


def pairs_of(words: np.ndarray) -> np.ndarray:
    """uint32 [...] -> the two fp16 of each, [..., 2]."""
    return np.ascontiguousarray(words).view(np.float16).reshape(*words.shape, 2)


def a_matrix(a: np.ndarray) -> np.ndarray:
    """A registers [32 lanes, 4, 2] -> fp32 [16, 16] (PTX m16n8k16: a1 is row + 8, a2 column + 8)."""
    matrix = np.empty((16, 16), np.float32)
    for r in range(4):
        for e in (0, 1):
            matrix[G + 8 * (r % 2), 2 * T + e + 8 * (r // 2)] = a[:, r, e]
    return matrix


def b_matrix(b: np.ndarray) -> np.ndarray:
    """B registers [32 lanes, 2, 2] -> fp32 [16, 8]."""
    matrix = np.empty((16, 8), np.float32)
    for r in (0, 1):
        for e in (0, 1):
            matrix[2 * T + e + 8 * r, G] = b[:, r, e]
    return matrix


def multiply(a: np.ndarray, b: np.ndarray, acc: np.ndarray, tile: int) -> None:
    product = a_matrix(a) @ b_matrix(b)
    for i in range(4):
        acc[:, 4 * tile + i] += product[G + 8 * (i // 2), 2 * T + i % 2]


def ldmatrix(slot: np.ndarray, access: np.ndarray, transposed: bool) -> np.ndarray:
    """slot uint32 [accesses, 4]; lane 8m + r addresses row r of matrix m -> A registers [32, 4, 2]."""
    rows = pairs_of(slot[access]).reshape(4, 8, 8)
    matrices = rows.transpose(0, 2, 1) if transposed else rows
    return np.stack([matrices[m][G[:, None], 2 * T[:, None] + np.arange(2)] for m in range(4)], 1)


def movmatrix(half: np.ndarray) -> np.ndarray:
    """[32, 2] fp16: an 8x8 matrix by rows -> its transpose."""
    matrix = np.empty((8, 8), np.float16)
    for e in (0, 1):
        matrix[G, 2 * T + e] = half[:, e]
    return matrix.T[G[:, None], 2 * T[:, None] + np.arange(2)]


class Warp:
    """One warp: its ring, its registers, and the steps of the kernel in the kernel's order."""

    def __init__(self, cfg, q_rows: np.ndarray, scale_log2: float):
        self.cfg, self.scale = cfg, np.float32(scale_log2)
        self.ring = np.full((cfg.slots, cfg.slot_accesses, 4), NAN_WORD, np.uint32)
        rows = np.zeros((8, cfg.head_dim), np.float16)
        rows[: len(q_rows)] = q_rows
        channel = 8 * np.arange(cfg.head_dim // 8)[None, :, None] + 2 * T[:, None, None] + np.arange(2)
        self.q = rows[G[:, None, None], channel].reshape(32, -1, 2, 2)  # [lane, step, register, half]
        self.acc_o = np.zeros((32, cfg.head_dim // 4), np.float32)
        self.row_max = np.full((32, 2), softmax.NO_TOKEN, np.float32)
        self.row_sum = np.zeros((32, 2), np.float32)

    def load_piece(self, piece, pool: np.ndarray, record: int, slot: int) -> None:
        self.ring[slot] = NAN_WORD
        for i in range(-(-piece.accesses // 32)):
            lane = LANE[: piece.accesses - 32 * i]
            word = load.lane_word(record, piece.first_unit, lane) + i * load.ROUND_WORDS
            self.ring[slot, i * 32 + lane] = pool.reshape(-1)[word[:, None] + np.arange(4)]

    def load_tokens(self, source: np.ndarray, first: int, live: int, slot: int) -> None:
        """source fp16 [rows, head_dim]."""
        self.ring[slot] = NAN_WORD
        for i in range(self.cfg.tile16_tokens * self.cfg.row_accesses // 32):
            row, access = load.token_place(i, LANE, self.cfg.row_accesses)
            taken = source[first + np.minimum(row, live - 1)[:, None], 8 * access[:, None] + np.arange(8)]
            taken = np.where((row < live)[:, None], taken, np.float16(0))
            place = load.swizzled(row, access, self.cfg.row_accesses)
            self.ring[slot, place] = np.ascontiguousarray(taken).view(np.uint32)

    def metadata(self, side: int, piece, slot: np.ndarray, pair: int):
        """scale, zero: uint32 [32, 4]."""
        if side == sizes.SIDE_K:
            return (slot[piece.meta + dequant.channel_meta_access(pair, z, T, self.cfg.head_dim)] for z in (0, 1))
        even, odd = (slot[piece.meta + dequant.token_meta_access(pair, T, e)] for e in (0, 1))
        scale, zero = np.empty((32, 4), np.uint32), np.empty((32, 4), np.uint32)
        for column_tile in (0, 1):
            for col8 in (0, 1):
                at, of = dequant.channel_half(column_tile, col8) // 2, dequant.token_word(column_tile, col8)
                scale[:, at] = dequant.low_halves(even[:, of], odd[:, of])
                zero[:, at] = dequant.high_halves(even[:, of], odd[:, of])
        return scale, zero

    def packed(self, side: int, slot: int, b: np.ndarray, acc: np.ndarray) -> None:
        piece, memory = self.cfg.pieces[side], self.ring[slot]
        for pair in range(piece.column_pairs):
            scale, zero = (pairs_of(x) for x in self.metadata(side, piece, memory, pair))
            for block, tiles in dequant.pair_loads(pair, piece.rows, piece.bits):
                words = memory[dequant.code_access(block, LANE)]
                for tile in tiles:
                    a = np.empty((32, 4, 2), np.float16)
                    for r, source in enumerate(tile.registers):
                        at = dequant.channel_half(tile.column_tile, r // 2) // 2
                        joined = pairs_of(dequant.masked(words[:, source.word], source) | np.uint32(dequant.MAGIC))
                        step = 2.0**-source.exponent
                        codes = joined * np.float16(step) - np.float16(dequant.MAGIC_VALUE * step)
                        exact = codes.astype(np.float64) * scale[:, at] + zero[:, at]  # one rounding, as in HFMA2
                        a[:, r] = exact.astype(np.float16)
                    multiply(a, b[:, tile.column_tile], acc, tile.row_tile)

    def attend(self, acc_s: np.ndarray) -> np.ndarray:
        """Online softmax of logits [32, 4 * tiles] -> P^T as B operand [32, tiles, 2, 2]."""
        new_max = np.maximum(self.row_max, acc_s.reshape(32, -1, 2).max(1))
        for distance in softmax.ROW_LANES:
            new_max = np.maximum(new_max, new_max[LANE ^ distance])
        rescale = np.exp2(self.row_max - new_max)
        self.row_sum *= rescale
        self.acc_o *= np.tile(rescale, self.acc_o.shape[1] // 2)
        self.row_max = new_max
        p = np.exp2(acc_s - np.tile(new_max, acc_s.shape[1] // 2))
        self.row_sum += p.reshape(32, -1, 2).sum(1)
        half = p.astype(np.float16).reshape(32, -1, 2)
        return np.stack([movmatrix(half[:, i]) for i in range(half.shape[1])], 1).reshape(32, -1, 2, 2)

    def page(self, pool: np.ndarray, record: int, slots: tuple[int, int]) -> None:
        for side, slot in zip((sizes.SIDE_K, sizes.SIDE_V), slots):
            self.load_piece(self.cfg.pieces[side], pool, record, slot)
        acc_s = np.zeros((32, 4 * self.cfg.k.row_tiles), np.float32)
        self.packed(sizes.SIDE_K, slots[0], self.q, acc_s)
        self.packed(sizes.SIDE_V, slots[1], self.attend(acc_s * self.scale), self.acc_o)

    def tokens(self, k: np.ndarray, v: np.ndarray, first: int, live: int) -> None:
        """One tile of 16-bit tokens: rows first .. first + live - 1 of k and v."""
        tiles, accesses = self.cfg.tile16_tokens // 16, self.cfg.row_accesses
        self.load_tokens(k, first, live, 0)
        self.load_tokens(v, first, live, 1)
        acc_s = np.zeros((32, 4 * tiles), np.float32)
        for column_tile in range(self.cfg.head_dim // 16):
            for tile in range(tiles):
                a = ldmatrix(self.ring[0], mma.row_access(LANE, tile, column_tile, accesses), False)
                multiply(a, self.q[:, column_tile], acc_s, tile)
        acc_s *= self.scale
        i = np.arange(4 * tiles)
        acc_s[16 * (i // 4) + 8 * (i % 4 // 2) + G[:, None] >= live] = -np.inf
        p = self.attend(acc_s)
        for tile in range(tiles):
            for channel_tile in range(self.cfg.head_dim // 16):
                a = ldmatrix(self.ring[1], mma.row_access_transposed(LANE, tile, channel_tile, accesses), True)
                multiply(a, p[:, tile], self.acc_o, channel_tile)

    def stash(self) -> np.ndarray:
        """The floats that this warp hands to the merge."""
        for distance in softmax.ROW_LANES:
            self.row_sum = self.row_sum + self.row_sum[LANE ^ distance]
        floats = np.full(self.cfg.warp_floats, np.nan, np.float32)
        stats = sizes.MMA_N * self.cfg.merge_row
        for i in range(self.cfg.head_dim // 4):
            channel = 16 * (i // 4) + 8 * (i % 4 // 2) + G
            floats[merge.merge_at(self.cfg, 2 * T + i % 2, channel)] = self.acc_o[:, i]
        for j in (0, 1):
            floats[stats + 2 * T + j] = self.row_max[:, j]
            floats[stats + sizes.MMA_N + 2 * T + j] = self.row_sum[:, j]
        return floats


def merged(cfg, floats: np.ndarray, ratio: int):
    """[warps, floats] -> o [ratio, head_dim], lse [ratio]."""
    stats, row = sizes.MMA_N * cfg.merge_row, np.arange(ratio)
    top = floats[:, stats + row].max(0)
    weight = np.exp2(floats[:, stats + row] - top)
    total = (weight * floats[:, stats + sizes.MMA_N + row]).sum(0)
    values = floats[:, merge.merge_at(cfg, row[:, None], np.arange(cfg.head_dim))]
    o = (weight[..., None] * values).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = total != 0
        return np.where(seen[:, None], o / total[:, None], 0), np.where(seen, (top + np.log2(total)) / LOG2_E, -np.inf)


def emulate(cfg, cache: KVCache, q: np.ndarray, num_splits: int):
    """o_partial [splits, batch, heads, d] and lse_partial [splits, batch, heads] of q fp16 [batch, heads, d]."""
    batch, heads, head_dim = q.shape
    ratio = heads // cache.num_heads_kv
    units = cache.record.nbytes // layout.RECORD_ALIGN
    pool = np.ascontiguousarray(cache.pool.numpy()).view(np.uint32)
    table, n_sink, n_packed, n_tok = (x.numpy() for x in (cache.table, cache.n_sink, cache.n_qk, cache.n_tok))
    sink_k, sink_v, ring_k, ring_v = (x.numpy() for x in (cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v))
    o = np.full((num_splits, batch, heads, head_dim), np.nan)
    lse = np.full((num_splits, batch, heads), np.nan)
    for split, seq, head in np.ndindex(num_splits, batch, cache.num_heads_kv):
        rows = slice(head * ratio, (head + 1) * ratio)
        warps = [Warp(cfg, q[seq, rows], head_dim**-0.5 * LOG2_E) for _ in range(cfg.warps)]
        pages = n_packed[seq] // layout.PAGE_TOKENS
        for n, page in enumerate(range(pages * split // num_splits, pages * (split + 1) // num_splits)):
            record = (int(table[seq, page]) * cache.num_heads_kv + head) * units
            part = 2 * (n // cfg.warps)
            warps[n % cfg.warps].page(pool, record, (part % cfg.slots, (part + 1) % cfg.slots))
        if split == num_splits - 1:
            size = cfg.tile16_tokens
            residual = n_tok[seq] - n_sink[seq] - n_packed[seq]
            tiles = [(sink_k, sink_v, at, n_sink[seq] - at) for at in range(0, n_sink[seq], size)]
            tiles += [(ring_k, ring_v, (n_packed[seq] + at) % ring_k.shape[2], residual - at)
                      for at in range(0, residual, size)]
            for n, (k, v, first, live) in enumerate(tiles):
                warps[n % cfg.warps].tokens(k[seq, head], v[seq, head], first, live)
        o[split, seq, rows], lse[split, seq, rows] = merged(cfg, np.stack([w.stash() for w in warps]), ratio)
    return torch.from_numpy(o), torch.from_numpy(lse)


def poisoned_cache(head_dim: int, lengths, sinks: int, num_heads_kv: int = 1) -> KVCache:
    """A cache of random sequences whose every unused byte is part of a NaN."""
    pages = sum(n // layout.PAGE_TOKENS for n in lengths) + 2
    cache = KVCache("k4v4", pages, num_heads_kv, head_dim, sinks=sinks, max_batch=len(lengths), max_q_len=4,
                    max_seqlen=max(lengths) + 256)
    cache.pool.fill_(0xFF)
    for store in (cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v):
        store.fill_(float("nan"))
    cache.free_list.copy_(cache.free_list[torch.randperm(pages)])
    for seq, n in enumerate(lengths):
        k, v = torch.randn(2, n, num_heads_kv, head_dim).half()
        cache.prefill(seq, k, v)
        slots = torch.arange(cache.n_qk[seq], max(0, n - sinks)) % cache.ring_k.shape[2]
        dead = torch.ones(cache.ring_k.shape[2], dtype=torch.bool).index_fill(0, slots, False)
        for ring in (cache.ring_k, cache.ring_v):
            ring[seq, :, dead] = float("nan")
    return cache


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("ratio", range(1, 9))
def test_emulated_kernel_matches_reference(head_dim, ratio):
    torch.manual_seed(ratio)
    target = kernels.ARCH_TARGETS["ampere"][ratio % 3]
    cfg = sizes.decode_config(FORMATS["k4v4"], head_dim, "float16", target, "tile", 8)
    cache = poisoned_cache(head_dim, LENGTHS, sinks=(0, 1, 5, 40)[ratio % 4], num_heads_kv=2 if ratio == 2 else 1)
    q = torch.randn(len(LENGTHS), 1, ratio * cache.num_heads_kv, head_dim).half()
    o, lse = emulate(cfg, cache, q[:, 0].numpy(), num_splits=1 + ratio % 3)
    assert not o.isnan().any() and not lse.isnan().any()
    o, lse = reference.merge_states(o[:, :, None], lse[..., None])
    want_o, want_lse = reference.decode(q, cache)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    assert not o[0].any() and bool((lse[0] == -torch.inf).all())  # the empty sequence
    for seq in range(1, len(LENGTHS)):
        error = (o[seq] - want_o[seq]).norm() / want_o[seq].norm()
        assert error <= 2e-3, f"length {LENGTHS[seq]}: {error}"
        assert (lse[seq] - want_lse[seq]).abs().max() <= 1e-3


def test_empty_splits_are_written():
    cfg = sizes.decode_config(FORMATS["k4v4"], 64, "float16", "sm_89", "tile", 8)
    cache = poisoned_cache(64, (300,), sinks=0)
    o, lse = emulate(cfg, cache, torch.randn(1, 1, 64).half().numpy(), num_splits=5)
    assert [bool(x) for x in (lse == -torch.inf).all((1, 2))] == [True, True, False, True, False]
    assert not o[0].any() and not o[3].any()


@pytest.mark.parametrize("bits", (8, 4, 2, 1))
@pytest.mark.parametrize("rows", (64, 128))
def test_every_code_reaches_its_place_once(rows, bits):
    """pair_loads, with the definition of the A registers, inverts layout.code_slot for every width."""
    cols, seen = 64, set()
    if layout.words_per_lane(rows, 32, bits) < layout.BLOCK_WORDS:
        pytest.skip("a pair of column tiles does not fill a 16-byte load")
    for pair in range(cols // 32):
        for block, tiles in dequant.pair_loads(pair, rows, bits):
            for tile in tiles:
                for r, source in enumerate(tile.registers):
                    for e in (0, 1):
                        row, col = 16 * tile.row_tile + 8 * (r % 2), 16 * tile.column_tile + 8 * (r // 2) + e
                        word, lane, byte, slot = layout.code_slot(row + 5, col + 6, rows, bits)  # lane 4 * 5 + 3
                        assert (word, lane) == (4 * block + source.word, 23)
                        assert 8 * byte + bits * slot == source.shift + source.exponent + 16 * e
                        assert source.mask >> source.exponent & 0xFFFF == (1 << bits) - 1
                        assert source.exponent + bits <= 10  # 1024 + code * 2**exponent is exact in fp16
                        seen.add((row, col))
    assert len(seen) == (rows // 8) * (cols // 4)


@pytest.mark.parametrize("row_accesses", (8, 16))
def test_swizzle_is_a_bijection_without_bank_conflicts(row_accesses):
    row, access = np.divmod(np.arange(32 * row_accesses), row_accesses)
    place = load.swizzled(row, access, row_accesses)
    assert sorted(place) == list(range(32 * row_accesses))
    for lanes in np.split(LANE, 4):
        for where in (mma.row_access(LANE, 1, 2, row_accesses), mma.row_access_transposed(LANE, 1, 2, row_accesses)):
            assert len(set(where[lanes] % 8)) == 8


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("target", kernels.ARCH_TARGETS["ampere"])
def test_config_fits_the_target(target, head_dim):
    cfg = sizes.decode_config(FORMATS["k4v4"], head_dim, "float16", target, "tile", 8)
    assert cfg.shared_bytes <= kernels.SMEM_LIMIT_BYTES[target]
    assert cfg.slots >= 2 and cfg.tile16_tokens == 32
    assert cfg.k.accesses * 16 + cfg.v.accesses * 16 == FORMATS["k4v4"].record_bytes(head_dim)
    assert expected.expected_static(cfg)["HMMA"] == head_dim // 16 * 20


@pytest.mark.parametrize("rows", sizes.ROWS)
@pytest.mark.parametrize("target", kernels.ARCH_TARGETS["ampere"])
def test_every_register_format_has_a_configuration(target, rows):
    for k_bits, per_token, v_bits in itertools.product((8, 4, 2, 1), ("", "t"), (8, 4, 2, 1)):
        for head_dim, groups in itertools.product((64, 128), ("", "-g32-vg32", "-g64-vg64-bf16")):
            name = f"k{k_bits}{per_token}v{v_bits}{groups}"
            cfg = sizes.decode_config(FORMATS[name], head_dim, "bfloat16", target, "register", rows)
            assert cfg.shared_bytes <= kernels.SMEM_LIMIT_BYTES[target] and cfg.slots >= 2
            assert cfg.merge_floats <= cfg.warp_floats  # a warp's ring holds its O at the end
            assert cfg.tile16_tokens * cfg.row_accesses <= cfg.slot_accesses
            assert {cfg.k.groups, cfg.v.groups} <= {1, 2, 4}
            assert kernels.checks(kernels.KernelKey("decode", "ampere", target, "bfloat16", head_dim, name, "register",
                                                    rows)).smem_bytes == cfg.shared_bytes


def test_register_counts_are_those_of_the_arithmetic():
    """128 x 128 codes of K and V: 64 tiles each; bias and centring 8 multiplies each; the rest is 16-bit tokens."""
    cfg = sizes.decode_config(FORMATS["k4v4"], 128, "float16", "sm_80", "register", 8)
    assert expected.per_page(cfg)["HMMA"] == 64 + 64 + 8 + 8
    assert expected.per_page(cfg)["LOP3"] == 2 * 128 * 128 // 32 // 2  # two codes a register
    wide = sizes.decode_config(FORMATS["k4v4"], 128, "float16", "sm_80", "register", 16)
    assert expected.per_page(wide)["HMMA"] == 2 * 144
    assert expected.per_page(wide)["LDS"] == expected.per_page(cfg)["LDS"]


@pytest.mark.parametrize("arguments, message", [
    (("k2v4", 128, "float16", "sm_80", "tile", 8), "2-bit K"),
    (("k4tv4", 128, "float16", "sm_80", "tile", 8), "K per token"),
    (("k4v4-g32", 128, "float16", "sm_80", "tile", 8), "4 groups of K"),
    (("k4v4-vg64", 128, "float16", "sm_80", "tile", 8), "2 groups of V"),
    (("k4v4-bf16", 128, "float16", "sm_80", "tile", 8), "in bfloat16"),
    (("k4v4", 128, "bfloat16", "sm_80", "tile", 8), "dtype bfloat16"),
    (("k4v4", 128, "float16", "sm_80", "tile", 16), "16 rows"),
    (("k4v4", 96, "float16", "sm_80", "register", 8), "head_dim: got 96"),
    (("k4v4", 128, "float32", "sm_80", "register", 8), "dtype: got 'float32'"),
    (("k4v4", 128, "float16", "sm_75", "register", 8), "target: got 'sm_75'"),
    (("k4v4", 128, "float16", "sm_80", "integer", 8), "path: got 'integer'"),
    (("k4v4", 128, "float16", "sm_80", "register", 24), "rows: got 24"),
])
def test_unsupported_arguments_are_named(arguments, message):
    name, *rest = arguments
    with pytest.raises(ValueError, match=message):
        sizes.decode_config(FORMATS[name], *rest)
