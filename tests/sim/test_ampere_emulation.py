"""The Ampere tile path's index arithmetic on the CPU: numpy lanes and registers, driven by the kernel's own helpers.

Shared with the kernel: which 16 bytes a thread copies and loads, which bits become which register, where metadata,
16-bit rows and merged results sit, which rows a block has and which positions they see (test_ampere_sizes has more).
Written here from the PTX definitions: m16n8k16, ldmatrix, movmatrix. All unused memory holds NaN.
"""

import numpy as np
import pytest
import torch

from lowbit_attn import kernels, layout, reference
from lowbit_attn.cache import KVCache
from lowbit_attn.formats import FORMATS
from lowbit_attn.registers import LOG2_E

pytest.importorskip("tilelang", reason="the helpers live in kernel files that import tilelang")

from lowbit_attn.ampere import config as sizes  # noqa: E402
from lowbit_attn.ampere import dequant, load, merge, mma, queries, softmax, tokens  # noqa: E402
from lowbit_attn.ampere import pages as walk

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4
REGISTER, HALF = np.arange(4)[:, None], np.arange(2)
# PTX m16n8k16, [lane, register, half]: a1 is row + 8, a2 column + 8; b1 is row + 8; c2 and c3 are row + 8
A_AT = G[:, None, None] + 8 * (REGISTER % 2), 2 * T[:, None, None] + HALF + 8 * (REGISTER // 2)
B_AT = 2 * T[:, None, None] + HALF + 8 * REGISTER[:2], G[:, None, None]
C_AT = G[:, None] + 8 * (np.arange(4) // 2), 2 * T[:, None] + np.arange(4) % 2
LENGTHS = (0, 1, 127, 128, 129, 300, 4097)
NAN_WORD = 0xFFFFFFFF


def pairs_of(words: np.ndarray) -> np.ndarray:
    """uint32 [...] -> the two fp16 of each, [..., 2]."""
    return np.ascontiguousarray(words).view(np.float16).reshape(*words.shape, 2)


def matrix_of(registers: np.ndarray, at: tuple, columns: int) -> np.ndarray:
    """Registers of 32 lanes -> fp32 [16, columns]."""
    matrix = np.empty((16, columns), np.float32)
    matrix[at] = registers
    return matrix


def multiply(a: np.ndarray, b: np.ndarray, acc: np.ndarray, tile: int) -> None:
    """a [32, 4, 2], b [32, 2, 2]."""
    product = matrix_of(a, A_AT, 16) @ matrix_of(b, B_AT, 8)
    acc[:, 4 * tile : 4 * tile + 4] += product[C_AT]


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
    """One warp: its ring (or a copy of the block's), its registers, and the steps of the kernel in its order."""

    def __init__(self, cfg, q_rows: np.ndarray, rows: queries.Rows, scale_log2: float, softcap_log2: float):
        self.cfg, self.scale, self.softcap = cfg, np.float32(scale_log2), np.float32(softcap_log2)
        self.rows = rows
        query = [int(queries.query(rows, row)) for row in range(8)]
        self.ends = rows.end + np.array(query)[2 * T[:, None] + np.arange(2)]  # [lane, row value]
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
        for start, member in self.rounds(piece.accesses):
            word = load.member_word(record, piece.first_unit, member) + start * load.ACCESS_WORDS
            self.ring[slot, start + member] = pool.reshape(-1)[word[:, None] + np.arange(4)]

    def rounds(self, accesses: int):
        """(first access of a round, threads of the ring that copy in it)."""
        threads = self.cfg.ring_threads
        return [(at, np.arange(min(threads, accesses - at))) for at in range(0, accesses, threads)]

    def load_tokens(self, source: np.ndarray, first: int, live: int, slot: int) -> None:
        """source fp16 [rows, head_dim]."""
        self.ring[slot] = NAN_WORD
        for start, member in self.rounds(self.cfg.tile16_tokens * self.cfg.row_accesses):
            row, access = load.token_place(start + member, self.cfg.row_accesses)
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

    def logits(self, acc_s: np.ndarray) -> np.ndarray:
        logits = acc_s * self.scale
        return self.softcap * np.tanh(logits / self.softcap) if self.cfg.softcap else logits

    def masked(self, logits: np.ndarray, begin: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """-inf for the tokens before ``begin`` and from ``stop`` on, both [lane, row value]."""
        i = np.arange(logits.shape[1])
        token, row = softmax.token(self.cfg, i, G[:, None]), softmax.row_value(self.cfg, i)
        return np.where((token >= begin[:, row]) & (token < stop[:, row]), logits, np.float32(-np.inf))

    def page(self, pool: np.ndarray, record: int, slots: tuple[int, int], start: int) -> None:
        """A page whose first token has position ``start``."""
        for side, slot in zip((sizes.SIDE_K, sizes.SIDE_V), slots):
            self.load_piece(self.cfg.pieces[side], pool, record, slot)
        acc_s = np.zeros((32, 4 * self.cfg.k.row_tiles), np.float32)
        self.packed(sizes.SIDE_K, slots[0], self.q, acc_s)
        logits = self.logits(acc_s)
        if self.cfg.window and start < self.rows.last_end - self.rows.window:
            begin = self.ends - self.rows.window - start
            logits = self.masked(logits, begin, np.full_like(begin, layout.PAGE_TOKENS))
        self.packed(sizes.SIDE_V, slots[1], self.attend(logits), self.acc_o)

    def tokens(self, k: np.ndarray, v: np.ndarray, first: int, live: int, start: int, reach: int) -> None:
        """One tile of 16-bit tokens: rows first .. first + live - 1 of k and v, positions ``start`` on."""
        tiles, accesses = self.cfg.tile16_tokens // 16, self.cfg.row_accesses
        self.load_tokens(k, first, live, 0)
        self.load_tokens(v, first, live, 1)
        acc_s = np.zeros((32, 4 * tiles), np.float32)
        for column_tile in range(self.cfg.head_dim // 16):
            for tile in range(tiles):
                a = ldmatrix(self.ring[0], mma.row_access(LANE, tile, column_tile, accesses), False)
                multiply(a, self.q[:, column_tile], acc_s, tile)
        begin = self.ends - reach - start if self.cfg.window else np.zeros_like(self.ends)
        p = self.attend(self.masked(self.logits(acc_s), begin, np.minimum(self.ends - start, live)))
        for tile in range(tiles):
            for channel_tile in range(self.cfg.head_dim // 16):
                a = ldmatrix(self.ring[1], mma.row_access_transposed(LANE, tile, channel_tile, accesses), True)
                multiply(a, p[:, tile], self.acc_o, channel_tile)

    def sum_rows(self) -> None:
        for distance in softmax.ROW_LANES:
            self.row_sum = self.row_sum + self.row_sum[LANE ^ distance]

    def written(self, rows: int):
        """o [rows, head_dim] and lse [rows] of a warp that writes its own rows (merge.write)."""
        self.sum_rows()
        o, lse = np.full((8, self.cfg.head_dim), np.nan), np.full(8, np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            for v, i in np.ndindex(2, self.cfg.head_dim // 8):
                total = self.row_sum[:, v]
                value = np.where(total == 0, 0, self.acc_o[:, 4 * (i // 2) + 2 * (i % 2) + v] / total)
                o[softmax.query_row(self.cfg, v, T), 8 * i + G] = value
                lse[softmax.query_row(self.cfg, v, T)] = np.where(total == 0, -np.inf,
                                                                  (self.row_max[:, v] + np.log2(total)) / LOG2_E)
        return o[:rows], lse[:rows]

    def stash(self) -> np.ndarray:
        """The floats that this warp hands to the merge."""
        self.sum_rows()
        floats = np.full(self.cfg.ring_floats, np.nan, np.float32)
        stats = sizes.MMA_N * self.cfg.merge_row
        for i in range(self.cfg.head_dim // 4):
            channel = 16 * (i // 4) + 8 * (i % 4 // 2) + G
            floats[merge.merge_at(self.cfg, 2 * T + i % 2, channel)] = self.acc_o[:, i]
        for j in (0, 1):
            floats[stats + 2 * T + j] = self.row_max[:, j]
            floats[stats + sizes.MMA_N + 2 * T + j] = self.row_sum[:, j]
        return floats


def merged(cfg, floats: np.ndarray, rows: int):
    """[warps, floats] -> o [rows, head_dim], lse [rows]."""
    stats, row = sizes.MMA_N * cfg.merge_row, np.arange(rows)
    top = floats[:, stats + row].max(0)
    weight = np.exp2(floats[:, stats + row] - top)
    total = (weight * floats[:, stats + sizes.MMA_N + row]).sum(0)
    values = floats[:, merge.merge_at(cfg, row[:, None], np.arange(cfg.head_dim))]
    o = (weight[..., None] * values).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = total != 0
        return np.where(seen[:, None], o / total[:, None], 0), np.where(seen, (top + np.log2(total)) / LOG2_E, -np.inf)


def emulate(cfg, cache: KVCache, q: np.ndarray, num_splits: int, softcap: float = 1.0, window: int = 1 << 30,
            sink_window: int = 1 << 30):
    """o_partial [splits, batch, q_len, heads, d] and lse_partial of q fp16 [batch, q_len, heads, d]."""
    batch, q_len, heads, head_dim = q.shape
    ratio = heads // cache.num_heads_kv
    n_tok = cache.n_tok.numpy()
    o = np.full((num_splits, *q.shape), np.nan)
    lse = np.full((num_splits, *q.shape[:3]), np.nan)
    blocks = -(-ratio * q_len // cfg.rows)
    for split, seq, head, block, group in np.ndindex(num_splits, batch, cache.num_heads_kv, blocks, cfg.row_groups):
        first = block * cfg.rows + group * cfg.warp_rows
        rows = queries.Rows(seq, head * ratio, ratio, first, min(cfg.warp_rows, ratio * q_len - first),
                            int(n_tok[seq]) - q_len + 1, int(n_tok[seq]), window, sink_window)
        if rows.count <= 0:
            continue
        where = [(int(queries.query(rows, r)), int(queries.head(rows, r))) for r in range(rows.count)]
        q_rows = np.stack([q[seq, j, h] for j, h in where])
        warps = [Warp(cfg, q_rows, rows, head_dim**-0.5 * LOG2_E, softcap * LOG2_E) for _ in range(cfg.rings)]
        run_split(cfg, cache, warps, rows, head, split, num_splits)
        part, part_lse = (warps[0].written(rows.count) if cfg.shares_pages
                          else merged(cfg, np.stack([w.stash() for w in warps]), rows.count))
        for r, (j, h) in enumerate(where):
            assert np.isnan(lse[split, seq, j, h])  # written once
            o[split, seq, j, h], lse[split, seq, j, h] = part[r], part_lse[r]
    return torch.from_numpy(o), torch.from_numpy(lse)


def run_split(cfg, cache: KVCache, warps: list, rows: queries.Rows, head: int, split: int, num_splits: int) -> None:
    """The pages and 16-bit tokens of a split, dealt out to the rings."""
    seq, units = rows.seq, cache.record.nbytes // layout.RECORD_ALIGN
    pool = np.ascontiguousarray(cache.pool.numpy()).view(np.uint32)
    n_sink, n_packed, n_tok = (int(x[seq]) for x in (cache.n_sink, cache.n_qk, cache.n_tok))
    pages = n_packed // layout.PAGE_TOKENS
    begin = min(int(queries.first_page(rows, n_sink)), pages) if cfg.window else 0
    stretch = [begin + int(walk.before(cfg, pages - begin, split + i, num_splits)) for i in (0, 1)]
    for n, page in enumerate(range(*stretch)):
        record = (int(cache.table[seq, page]) * cache.num_heads_kv + head) * units
        part = 2 * (n // cfg.rings)
        warps[n % cfg.rings].page(pool, record, (part % cfg.slots, (part + 1) % cfg.slots),
                                  n_sink + page * layout.PAGE_TOKENS)
    if split == num_splits - 1:
        size, residual = cfg.tile16_tokens, n_tok - n_sink - n_packed
        sink_k, sink_v, ring_k, ring_v = (x[seq, head].numpy() for x in (cache.sink_k, cache.sink_v, cache.ring_k,
                                                                        cache.ring_v))
        tiles = [(sink_k, sink_v, at, n_sink - at, at, rows.sink_window) for at in range(0, n_sink, size)]
        tiles += [(ring_k, ring_v, (n_packed + at) % len(ring_k), residual - at, n_sink + n_packed + at, rows.window)
                  for at in range(0, residual, size)]
        for walker, warp in enumerate(warps):
            for n in range(int(tokens.first_tile(cfg, walker)), len(tiles), cfg.rings):
                warp.tokens(*tiles[n])


def poisoned_cache(head_dim: int, lengths, sinks: int, num_heads_kv: int = 1) -> KVCache:
    """A cache of random sequences whose every unused byte is part of a NaN."""
    pages = sum(n // layout.PAGE_TOKENS for n in lengths) + 2
    cache = KVCache("k4v4", pages, num_heads_kv, head_dim, sinks=sinks, max_batch=len(lengths), max_q_len=4,
                    max_seqlen=max(lengths) + 256)
    cache.pool.fill_(0xFF)
    for store in (cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v):
        store.fill_(float("nan"))
    cache.book.free = [cache.book.free[i] for i in torch.randperm(pages).tolist()]
    for seq, n in enumerate(lengths):
        k, v = torch.randn(2, n, num_heads_kv, head_dim).half()
        cache.prefill(seq, k, v)
        slots = torch.arange(cache.n_qk[seq], max(0, n - sinks)) % cache.ring_k.shape[2]
        dead = torch.ones(cache.ring_k.shape[2], dtype=torch.bool).index_fill(0, slots, False)
        for ring in (cache.ring_k, cache.ring_v):
            ring[seq, :, dead] = float("nan")
    return cache


def check(q: torch.Tensor, cache: KVCache, o, lse, options: reference.Attention = reference.PLAIN) -> None:
    """Partial results against the reference."""
    assert not o.isnan().any() and not lse.isnan().any()
    o, lse = reference.merge_states(o, lse.transpose(2, 3))
    want_o, want_lse = reference.decode(q, cache, options)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    for seq in range(len(q)):
        seen = want_lse[seq].isfinite()
        assert not o[seq][~seen.T].any()
        if seen.any():
            error = (o[seq] - want_o[seq]).norm() / want_o[seq].norm()
            assert error <= 2e-3, f"sequence {seq}: {error}"
            assert (lse[seq] - want_lse[seq])[seen].abs().max() <= 1e-3


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("ratio", range(1, 9))
def test_emulated_kernel_matches_reference(head_dim, ratio):
    torch.manual_seed(ratio)
    target = kernels.ARCH_TARGETS["ampere"][ratio % 3]
    cfg = sizes.decode_config(FORMATS["k4v4"], head_dim, "float16", target, "tile", 8)
    cache = poisoned_cache(head_dim, LENGTHS, sinks=(0, 1, 5, 40)[ratio % 4], num_heads_kv=2 if ratio == 2 else 1)
    q = torch.randn(len(LENGTHS), 1, ratio * cache.num_heads_kv, head_dim).half()
    check(q, cache, *emulate(cfg, cache, q.numpy(), num_splits=1 + ratio % 3))


@pytest.mark.parametrize("ratio, q_len", ((1, 4), (2, 3), (3, 4), (8, 2), (5, 4)))
@pytest.mark.parametrize("features", ((), ("window",), ("softcap", "window")))
def test_several_queries_blocks_of_rows_and_masks(ratio, q_len, features):
    """Rows of several queries in blocks of 8; windows that end in a page, at its edge, in the residual, past all."""
    cfg = sizes.decode_config(FORMATS["k4v4"], 64, "float16", "sm_89", "tile", 8, features=features)
    for n, window in enumerate((1, 40, 129, 256, 1000) if features else (None,)):
        torch.manual_seed(n)
        sinks = (0, 5, 40)[n % 3]
        cache = poisoned_cache(64, (0, 2, 127, 300, 520), sinks, num_heads_kv=1 + n % 2)
        q = torch.randn(5, q_len, ratio * cache.num_heads_kv, 64).half()
        options = reference.Attention(softcap=1.5 if "softcap" in features else None, window=window,
                                      keep_sinks=n % 2 == 0 and window is not None)
        limits = {} if window is None else dict(window=window, sink_window=1 << 30 if options.keep_sinks else window)
        o, lse = emulate(cfg, cache, q.numpy(), 2, softcap=options.softcap or 1.0, **limits)
        check(q, cache, o, lse, options)


@pytest.mark.parametrize("head_dim, rows, ratio, q_len", ((96, 8, 3, 2), (256, 8, 5, 1), (256, 64, 5, 4),
                                                          (256, 64, 8, 9)))
def test_other_head_dims_and_row_groups(head_dim, rows, ratio, q_len):
    """The register path's sizes and copies with the tile path's arithmetic; 64 rows: a warp for each 8, one ring."""
    torch.manual_seed(rows)
    cfg = sizes.decode_config(FORMATS["k4v4"], head_dim, "float16", "sm_89", "register", rows, features=("window",))
    cache = poisoned_cache(head_dim, (0, 2, 300, 420), sinks=5)
    q = torch.randn(4, q_len, ratio, head_dim).half()
    o, lse = emulate(cfg, cache, q.numpy(), 2, window=150, sink_window=1 << 30)
    check(q, cache, o, lse, reference.Attention(window=150, keep_sinks=True))


def test_empty_splits_are_written():
    cfg = sizes.decode_config(FORMATS["k4v4"], 64, "float16", "sm_89", "tile", 8)
    cache = poisoned_cache(64, (300,), sinks=0)
    o, lse = emulate(cfg, cache, torch.randn(1, 1, 1, 64).half().numpy(), num_splits=5)
    assert [bool(x) for x in (lse == -torch.inf).all((1, 2, 3))] == [True, True, False, True, False]
    assert not o[0].any() and not o[3].any()
