"""The register path on the CPU: numpy lanes and registers, driven by ``registers`` and ``layout``.

What the decode kernels of the register path must compute, step by step: record bytes -> words -> A registers (fp16
subnormals) -> m16n8k16 -> accumulators, with one rounding to 16 bit where an operand is made and fp32 elsewhere. One
``Warp`` owns its pages, its running softmax and its accumulators. m16n8k16 and movmatrix are written from the PTX
definitions; a product of 16 terms is exact, its sum with the accumulator goes to fp32 once, by ``ROUNDING``.
"""

import numpy as np
import torch

from lowbit_attn import layout, reference, registers, subnormals
from lowbit_attn.cache import KVCache
from lowbit_attn.formats import Kind
from lowbit_attn.registers import LOG2_E

COLUMNS = 8  # query rows of one accumulator tile
NO_TOKEN = -np.finfo(np.float32).max  # the running maximum before the first token: finite, so exp2 of a difference is 0
ROW_LANES = (4, 8, 16)  # lanes that hold other tokens of the same query rows
PAGE_TILES = layout.PAGE_TOKENS // layout.TILE

LANE = np.arange(layout.LANES)
G, T = LANE // 4, LANE % 4
HALF = np.arange(2)
A_ROW = (G[:, None] + 8 * (np.arange(4) % 2)[:, None, None]) + 0 * HALF  # [register, lane, half]
A_COL = 2 * T[:, None] + HALF + 8 * (np.arange(4) // 2)[:, None, None]
B_ROW = 2 * T[:, None] + HALF + 8 * HALF[:, None, None]  # [register, lane, half]: the reduction side
B_COL = np.broadcast_to(G[:, None], (2, layout.LANES, 2))
C_ROW = registers.accumulator_row(LANE[:, None], np.arange(4))  # [lane, element]
C_COL = registers.accumulator_col(LANE[:, None], np.arange(4))


# ---- instructions


def a_matrix(regs: np.ndarray) -> np.ndarray:
    """A registers fp16 [..., 4, 32, 2] -> [..., 16, 16]."""
    matrix = np.empty((*regs.shape[:-3], 16, 16))
    matrix[..., A_ROW, A_COL] = regs
    return matrix


def b_matrix(regs: np.ndarray) -> np.ndarray:
    """B registers fp16 [..., 2, 32, 2] -> [..., 16, 8]."""
    matrix = np.empty((*regs.shape[:-3], 16, COLUMNS))
    matrix[..., B_ROW, B_COL] = regs
    return matrix


def nearest(x: np.ndarray) -> np.ndarray:
    """fp64 -> fp32."""
    return x.astype(np.float32)


def toward_zero(x: np.ndarray) -> np.ndarray:
    """fp64 -> fp32 as tensor cores do it: digits beyond 24 are cut off."""
    near = x.astype(np.float32)
    return np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near)


ROUNDING = nearest  # of the sums that multiply makes


def multiply(a: np.ndarray, b: np.ndarray, acc: np.ndarray | None = None) -> np.ndarray:
    """m16n8k16 over the steps axis: a [..., steps, 16, 16], b [..., steps, 16, 8] -> accumulators [..., 32, 4]."""
    products = (a @ b)[..., C_ROW, C_COL]
    if acc is None:
        acc = np.zeros((*products.shape[:-3], *products.shape[-2:]), np.float32)
    for step in range(products.shape[-3]):
        acc = ROUNDING(acc + products[..., step, :, :])
    return acc


def movmatrix(pairs: np.ndarray) -> np.ndarray:
    """[..., 32, 2]: an 8x8 matrix by rows -> its transpose."""
    matrix = np.empty((*pairs.shape[:-2], 8, 8), pairs.dtype)
    matrix[..., G[:, None], 2 * T[:, None] + HALF] = pairs
    return matrix[..., 2 * T[:, None] + HALF, G[:, None]]


def over_lanes(x: np.ndarray, step) -> np.ndarray:
    """step over the lanes of the same t; lanes on axis -2."""
    for distance in ROW_LANES:
        x = step(x, x[..., LANE ^ distance, :])
    return x


def rounded(x: np.ndarray, dtype: torch.dtype = torch.float16) -> np.ndarray:
    """fp32 -> nearest value of a 16-bit type, as fp32."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(dtype).float().numpy()


def bits_of(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32)


def pow2(exponent) -> np.ndarray:
    """fp32 2^exponent, the exponent clamped to the normal range."""
    return registers.pow2_bits(np.clip(exponent, -126, 127).astype(np.int32)).view(np.float32)


def max_exponent(values: np.ndarray) -> np.ndarray:
    """ceil(log2 max |values|) of the clamped maximum."""
    return registers.ceil_log2(bits_of(np.maximum(np.abs(values).max(), np.float32(2.0**registers.MIN_SCALE_LOG2))))


# ---- a record


def load_words(codes: np.ndarray) -> np.ndarray:
    """A plane of codes, bytes -> words [word, lane]."""
    words = np.ascontiguousarray(codes).view(np.uint32)
    count = words.size // layout.LANES
    return words[layout.word_offset(np.arange(count)[:, None], LANE) // layout.WORD_BYTES]


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Words [word, lane] -> A registers as fp16 [tile, 4, lane, 2]."""
    n = layout.tiles_per_word(bits)
    words_a_tile = 2 if bits == 8 else 1
    a = np.zeros((len(words) // words_a_tile * n, 4, layout.LANES), np.uint32)
    for step in subnormals.unpack_steps(bits):
        got = (words >> np.uint32(step.shift)) & np.uint32(step.mask)
        for row8 in range(words_a_tile):
            a[step.tile :: n, step.register + row8] = got[row8::words_a_tile]
    return a.view(np.float16).reshape(*a.shape, 2)


def code_matrix(record: np.ndarray, planes, rows: int, bits: int) -> np.ndarray:
    """-> raw codes as A matrices [row tile, column tile, 16, 16]."""
    a = a_matrix(unpack(load_words(plane(record, planes, "codes")), bits))
    return a.reshape(-1, rows // layout.TILE, 16, 16).swapaxes(0, 1)


def plane(record: np.ndarray, planes, name: str) -> np.ndarray:
    found, = (p for p in planes if p.name == name)
    return record[found.offset : found.offset + found.nbytes]


def metadata(record: np.ndarray, planes, storage: torch.dtype) -> np.ndarray:
    """The metadata plane as fp32, in stored order."""
    return torch.from_numpy(plane(record, planes, "meta").copy()).view(storage).float().numpy()


def powers(row_tiles: int, bits: int) -> np.ndarray:
    """k of every accumulator element of a matrix of codes: int [row tile, lane, element]."""
    return registers.row_power(layout.TILE * np.arange(row_tiles)[:, None, None] + C_ROW, bits)


# ---- one warp


class Warp:
    """Query rows q [R, head_dim] of one KV head against the pages and tokens it is given, in the kernel's order.

    columns: 8 or 16 query rows of the compiled kernel. Arrays are [query tile, ..., lane, element].
    """

    def __init__(self, cache: KVCache, q: torch.Tensor, columns: int, scale_log2: float, centring: bool):
        self.cache, self.format, self.head_dim = cache, cache.format, cache.head_dim
        self.record, self.centring, self.scale = cache.record, centring, np.float32(scale_log2)
        rows = np.zeros((columns, self.head_dim), np.float32)
        rows[: len(q)] = q.float().numpy()
        self.tiles = columns // COLUMNS
        self.col = COLUMNS * np.arange(self.tiles)[:, None, None] + C_COL[:, :2]  # query row of elements 0, 1
        largest = np.abs(rows).max(1)
        e_q = -registers.floor_log2(bits_of(np.maximum(largest, np.float32(2.0**subnormals.MIN_QUERY_LOG2))))
        self.e_q = np.where(largest == 0, 0, e_q)
        scaled = rounded(rows * pow2(self.e_q + subnormals.QUERY_OWN_SHIFT)[:, None])
        self.q_own, self.q_raw = self._as_b(scaled), self._as_b(rows)
        self.q_rows = scaled
        o_tiles = self.head_dim // layout.TILE
        self.acc_o = np.zeros((self.tiles, o_tiles, layout.LANES, 4), np.float32)
        self.row_max = np.full((self.tiles, layout.LANES, 2), NO_TOKEN, np.float32)
        self.row_sum = np.zeros_like(self.row_max)
        self.groups_v = self.head_dim // (self.format.v.group_size or self.head_dim)
        self.z = np.zeros((self.groups_v, *self.row_max.shape), np.float32)  # partial over lanes
        self.exponent = registers.MAX_VALUE_EXPONENT
        self.rounded, self.pages = np.zeros_like(self.z), 0  # sums of operands since O was centred, whole in every lane
        self.true_scale = False

    def _as_b(self, rows: np.ndarray) -> np.ndarray:
        """Query rows [columns, head_dim] -> B registers [query tile, channel tile, 2, lane, 2]."""
        channel = layout.TILE * np.arange(self.head_dim // layout.TILE)[:, None, None, None] + B_ROW
        row = COLUMNS * np.arange(self.tiles)[:, None, None, None, None] + B_COL
        return rows[row, channel]

    # K packed: logits [query tile, token tile, lane, element]

    def logits(self, record: np.ndarray) -> np.ndarray:
        side = self.format.k
        a = code_matrix(record, self.record.k_planes, layout.PAGE_TOKENS, side.bits)
        power = powers(PAGE_TILES, side.bits)
        meta = metadata(record, self.record.k_planes, side.storage)
        step = self._logits_per_channel if side.kind is Kind.CHANNEL else self._logits_per_token
        return step(side, a, power, meta)

    def _logits_per_channel(self, side, a, power, meta) -> np.ndarray:
        groups = layout.PAGE_TOKENS // side.group_size
        meta = meta.reshape(groups, 2, self.head_dim)
        channel = layout.TILE * np.arange(self.head_dim // layout.TILE)[:, None, None, None] + B_ROW
        scales = meta[:, 0][:, layout.channel_meta_index(channel)]  # [group, channel tile, register, lane, half]
        e_s = np.array([-max_exponent(s) for s in scales])
        operand = scales * pow2(e_s + subnormals.SCALE_SHIFT)[:, None, None, None, None]
        operand = b_matrix(rounded(self.q_own[:, None] * operand))  # [query tile, group, channel tile, 16, 8]
        group_of = np.arange(PAGE_TILES) * layout.TILE // side.group_size
        acc = multiply(a, operand[:, group_of])
        shift = subnormals.SUBNORMAL_SHIFT - subnormals.QUERY_SHIFT
        exponent = shift - self._per_column(self.e_q)[:, None] - e_s[group_of, None, None]
        bias = np.stack([self._bias(side, j, meta, e_s, operand) for j in range(groups)], 1)
        return acc * (self.scale * pow2(exponent) * pow2(-power)) + np.tile(bias, 2)[:, group_of]

    def _bias(self, side, group: int, meta, e_s, operand) -> np.ndarray:
        """What every code of a token group adds to the logits of elements 0, 1: [query tile, lane, 2]."""
        groups = len(meta)
        e_m = e_c = np.zeros(groups, np.int64)
        if side.storage is torch.bfloat16:
            e_m = np.array([subnormals.ZERO_SHIFT - max_exponent(m) for m in meta[:, 1]])
            e_c = e_s + subnormals.CENTRE_SHIFT
        scaled = rounded(np.stack((meta[:, 0] * pow2(e_c)[:, None], meta[:, 1] * pow2(e_m)[:, None]), 1))
        channel = layout.TILE * np.arange(self.head_dim // layout.TILE)[:, None, None, None] + A_COL
        is_zero = ((A_ROW < 8) | (not self.centring)).astype(int)
        a = scaled[subnormals.bias_row_group(A_ROW, groups), is_zero, layout.channel_meta_index(channel)]
        lane = subnormals.bias_lane(group, LANE, groups)
        acc = multiply(a_matrix(a), b_matrix(self.q_own))[:, lane]
        e_q = self._per_column(self.e_q)[..., :2] + subnormals.QUERY_OWN_SHIFT
        bias = acc[..., :2] * pow2(-(e_q + e_m[group]))
        if self.centring:
            ones = multiply(np.ones((1, 16, 16)), operand[:, group])[..., :2]
            lost = acc[..., 2:] * pow2(-(e_q + e_c[group])) - ones * pow2(-(e_q + e_s[group] + subnormals.SCALE_SHIFT))
            bias = bias + np.float32(((1 << side.bits) - 1) / 2) * lost
        return self.scale * bias

    def _logits_per_token(self, side, a, power, meta) -> np.ndarray:
        size = side.group_size or self.head_dim
        token = layout.TILE * np.arange(PAGE_TILES)[:, None, None] + C_ROW
        pairs = meta.reshape(-1, layout.PAGE_TOKENS, 2)[:, layout.token_meta_index(token)]
        total, b = np.zeros((), np.float32), b_matrix(self.q_own)
        for j in range(self.head_dim // size):
            tiles = slice(j * size // layout.TILE, (j + 1) * size // layout.TILE)
            acc = multiply(a[:, tiles], b[:, None, tiles])
            sum_q = self._per_column(self.q_rows[:, j * size : (j + 1) * size].sum(1, dtype=np.float32))[:, None]
            scale, zero = pairs[j, ..., 0], pairs[j, ..., 1]
            total = total + (acc * pow2(subnormals.SUBNORMAL_SHIFT - power)) * scale + sum_q * zero
        e_q = self._per_column(self.e_q)[:, None]
        return total * (self.scale * pow2(-(e_q + subnormals.QUERY_OWN_SHIFT)))

    def _per_column(self, values: np.ndarray) -> np.ndarray:
        """One value a query row -> [query tile, lane, element]."""
        return np.tile(values[self.col], 2)

    # softmax and V

    def attend(self, logits: np.ndarray) -> np.ndarray:
        """Online softmax of base-2 logits: P fp32 of the same shape; what went before is rescaled."""
        by_row = logits.reshape(*logits.shape[:-1], 2, 2).max(-2)  # [query tile, token tile, lane, 2]
        new_max = over_lanes(np.maximum(self.row_max, by_row.max(1)), np.maximum)
        alpha = np.exp2(self.row_max - new_max)
        self.row_max = new_max
        p = np.exp2(logits - np.tile(new_max, 2)[:, None])
        self.row_sum = self.row_sum * alpha + p.reshape(*p.shape[:-1], 2, 2).sum((1, -2))
        self.z *= alpha
        self.rounded = self.rounded * alpha
        self.acc_o *= np.tile(alpha, 2)[:, None]
        return p

    def packed_values(self, record: np.ndarray, p: np.ndarray) -> None:
        assert not self.true_scale, "packed V after the change to true scale"
        side = self.format.v
        meta = metadata(record, self.record.v_planes, side.storage).reshape(self.groups_v, layout.PAGE_TOKENS, 2)
        token = layout.TILE * np.arange(PAGE_TILES)[:, None, None] + C_ROW
        pairs = meta[:, layout.token_meta_index(token)]  # [group, token tile, lane, element, (scale, zero)]
        exponent = min(self.exponent, -int(max_exponent(pairs[..., 0])))
        self.acc_o *= pow2(exponent - self.exponent)
        self.rounded = self.rounded * pow2(exponent - self.exponent)
        self.exponent = exponent
        operand = rounded(p * (pairs[..., 0] * pow2(exponent + subnormals.PROBABILITY_SHIFT))[:, None])
        half_steps = np.float32(((1 << side.bits) - 1) / 2 * self.centring)
        centre = pairs[..., 1] + half_steps * pairs[..., 0]
        self.z += self._sum_of_page(p * centre[:, None])
        a = code_matrix(record, self.record.v_planes, self.head_dim, side.bits)
        b = self._transposed(operand)
        self.acc_o = multiply(a, b.swapaxes(0, 1)[:, self._group_of_tile()], self.acc_o)
        if self.centring:
            self.rounded = self.rounded + multiply(np.ones((1, 16, 16)), b)[..., :2]
            self.pages += 1
            is_short = self.groups_v > 1 or self.format.k.kind is not Kind.CHANNEL  # of registers
            if is_short or self.pages % subnormals.RECENTRED_PAGES == 0:
                self.recentre()

    def recentre(self) -> None:
        """O -= N/2 of the operands' sum since the last time."""
        total, self.rounded = self.rounded, np.zeros_like(self.z)
        half_steps = np.float32(((1 << self.format.v.bits) - 1) / 2)
        total = np.tile(total, 2)[self._group_of_tile()].swapaxes(0, 1)
        power = powers(self.acc_o.shape[1], self.format.v.bits)
        self.acc_o = self.acc_o - half_steps * pow2(power - subnormals.SUBNORMAL_SHIFT) * total

    def _sum_of_page(self, x: np.ndarray) -> np.ndarray:
        """[group, query tile, token tile, lane, element] -> each lane's share as in z."""
        return x.reshape(*x.shape[:-1], 2, 2).sum((2, -2), dtype=np.float32)

    def _group_of_tile(self) -> np.ndarray:
        """Channel group of V of each row tile of O."""
        return np.arange(self.head_dim // layout.TILE) * layout.TILE * self.groups_v // self.head_dim

    def _transposed(self, p: np.ndarray) -> np.ndarray:
        """P^T accumulators [..., token tile, lane, 4] -> B matrices [..., token tile, 16, 8]."""
        halves = p.reshape(*p.shape[:-1], 2, 2).swapaxes(-3, -2)  # [..., token tile, row8, lane, 2]
        return b_matrix(movmatrix(halves))

    def to_true_scale(self) -> None:
        """After the last packed V: powers out of O, zero-points in."""
        if self.true_scale:
            return
        if self.centring:
            self.recentre()
        power = powers(self.acc_o.shape[1], self.format.v.bits)
        z = np.tile(over_lanes(self.z, np.add), 2)[self._group_of_tile()].swapaxes(0, 1)
        in_two = pow2(subnormals.SUBNORMAL_SHIFT - power), pow2(-subnormals.PROBABILITY_SHIFT - self.exponent)
        self.acc_o = self.acc_o * in_two[0] * in_two[1] + z
        self.true_scale = True

    def values(self, v: torch.Tensor, p: np.ndarray) -> None:
        """V in 16 bit [tokens, head_dim], a multiple of 16 tokens, against P [query tile, token tile, lane, 4]."""
        self.to_true_scale()
        a = v.float().numpy().T.reshape(self.head_dim // 16, 16, -1, 16).swapaxes(1, 2)
        b = self._transposed(rounded(p, self.cache.dtype))
        self.acc_o = multiply(a, b[:, None], self.acc_o)

    # the segments

    def page(self, record: np.ndarray, v: torch.Tensor | None = None) -> None:
        """A page of 128 tokens; v: their V in 16 bit where it is not packed yet."""
        p = self.attend(self.logits(record))
        if v is None:
            self.packed_values(record, p)
        else:
            self.values(v, p)

    def tokens(self, k: torch.Tensor, v: torch.Tensor, live: int) -> None:
        """A tile of tokens in 16 bit, of which the first ``live`` exist; the others may hold NaN."""
        k, v = (x.index_fill(0, torch.arange(live, len(x)), 0) for x in (k, v))
        a = k.float().numpy().reshape(-1, 16, self.head_dim // 16, 16).swapaxes(1, 2)
        logits = multiply(a, b_matrix(self.q_raw)[:, None]) * self.scale
        token = layout.TILE * np.arange(len(a))[:, None, None] + C_ROW
        self.values(v, self.attend(np.where(token < live, logits, np.float32(-np.inf))))

    def result(self):
        """Unnormalised O [columns, head_dim], maximum and sum [columns]."""
        self.to_true_scale()
        o = np.empty((self.tiles * COLUMNS, self.head_dim), np.float32)
        channel = layout.TILE * np.arange(self.acc_o.shape[1])[:, None, None] + C_ROW
        o[np.tile(self.col, 2)[:, None], channel] = self.acc_o
        row_sum = over_lanes(self.row_sum, np.add)
        return o, self.row_max[:, :4].reshape(-1), row_sum[:, :4].reshape(-1)


# ---- the kernel


def merge(results: list) -> tuple[np.ndarray, np.ndarray]:
    """Warps' results -> o [columns, head_dim], lse [columns], natural log."""
    o, top, total = (np.stack(x) for x in zip(*results))
    highest = top.max(0)
    weight = np.exp2(top - highest)
    o, total = (weight[..., None] * o).sum(0), (weight * total).sum(0)
    seen = total > 0
    safe = np.where(seen, total, np.float32(1))
    return np.where(seen[:, None], o / safe[:, None], 0), np.where(seen, (highest + np.log2(safe)) / LOG2_E, -np.inf)


def decode(q: torch.Tensor, cache: KVCache, num_splits: int = 2, warps: int = 2, centring: bool = True,
           softmax_scale: float | None = None, make_warp=None) -> tuple[torch.Tensor, torch.Tensor]:
    """q [batch, 1, num_heads, head_dim] -> o fp32 of its shape and lse fp32 [batch, num_heads, 1].

    make_warp: from (cache, q of a KV head, scale_log2) to a Warp; None: the register path's.
    """
    batch, _, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    o = torch.full((num_splits, batch, 1, num_heads, head_dim), float("nan"))
    lse = torch.full((num_splits, batch, num_heads, 1), float("nan"))
    ratio = num_heads // cache.num_heads_kv
    columns = COLUMNS if ratio <= COLUMNS else 2 * COLUMNS
    if make_warp is None:
        def make_warp(cache, q, scale_log2):
            return Warp(cache, q, columns, scale_log2, centring)
    for split, seq, head in np.ndindex(num_splits, batch, cache.num_heads_kv):
        rows = slice(head * ratio, (head + 1) * ratio)
        crew = [make_warp(cache, q[seq, 0, rows], scale * LOG2_E) for _ in range(warps)]
        _run_split(cache, crew, split, num_splits, seq, head)
        part, part_lse = merge([warp.result() for warp in crew])
        o[split, seq, 0, rows] = torch.from_numpy(part[:ratio])
        lse[split, seq, rows, 0] = torch.from_numpy(part_lse[:ratio]).float()
    return reference.merge_states(o, lse)


def _run_split(cache: KVCache, crew: list[Warp], split: int, num_splits: int, seq: int, head: int) -> None:
    n_sink, n_qk, n_qv, n_tok = (int(x[seq]) for x in (cache.n_sink, cache.n_qk, cache.n_qv, cache.n_tok))
    pages = n_qk // layout.PAGE_TOKENS
    for n, page in enumerate(range(pages * split // num_splits, pages * (split + 1) // num_splits)):
        first = page * layout.PAGE_TOKENS
        slots = torch.arange(first, first + layout.PAGE_TOKENS) % cache.ring_v.shape[2]
        record = cache.pool[int(cache.table[seq, page]), head].numpy()
        crew[n % len(crew)].page(record, None if first < n_qv else cache.ring_v[seq, head, slots])
    if split == num_splits - 1:
        size = 64
        tiles = [(cache.sink_k[seq, head, at : at + size], cache.sink_v[seq, head, at : at + size], n_sink - at)
                 for at in range(0, n_sink, size)]
        for at in range(n_qk, n_tok - n_sink, size):
            slots = torch.arange(at, at + size)
            tiles.append((cache.ring_k[seq, head, slots % cache.ring_k.shape[2]],
                          cache.ring_v[seq, head, slots % cache.ring_v.shape[2]], n_tok - n_sink - at))
        for n, (k, v, live) in enumerate(tiles):
            missing = -len(k) % layout.TILE
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, missing), value=float("nan")) for x in (k, v))
            crew[n % len(crew)].tokens(k, v, min(live, len(k)))
