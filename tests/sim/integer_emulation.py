"""The integer path on the CPU: numpy lanes and registers, bytes and s32 sums, around what the register path shares.

m16n8k32 is written from the PTX definition; its sums are exact integers, read as the fp32 numbers whose bits they are.
The query rows stand in pairs of columns (row, digit); 16-bit tokens and the merge see each row twice.
"""

import numpy as np
import torch

from lowbit_attn import layout, registers
from lowbit_attn.cache import KVCache
from sim import emulation
from sim.emulation import C_COL, C_ROW, LANE, PAGE_TILES, G, T, bits_of, over_lanes, pow2

ROWS = 4
BYTE = np.arange(4)
ROW_T = T  # query row of a lane's accumulators
ROW_G = G // 2  # query row of a lane's column of a B operand
OVER_ROW = (1, 2, 4)  # lanes that share a row where operands are made
A_ROW = G[:, None] + 8 * (np.arange(4) % 2)[:, None, None] + 0 * BYTE  # [register, lane, byte]
A_COL = 4 * T[:, None] + BYTE + 16 * (np.arange(4) // 2)[:, None, None]
B_ROW = 4 * T[:, None] + BYTE + 16 * np.arange(2)[:, None, None]
B_COL = np.broadcast_to(G[:, None], (2, layout.LANES, 4))


def multiply(a: np.ndarray, b: np.ndarray, start_bits: int, low: int, high: int) -> np.ndarray:
    """m16n8k32 over steps: a u8 [row tile, step, 4, lane, byte], b [step, 2, lane, byte] -> fp32 [row tile, lane, 4].

    The sums must stay in low <= sum < high, where start + sum is an fp32 number.
    """
    left, right = np.zeros((*a.shape[:-3], 16, 32), np.int64), np.zeros((len(b), 32, 8), np.int64)
    left[..., A_ROW, A_COL] = a
    right[:, B_ROW, B_COL] = b
    sums = (left @ right).sum(1)[..., C_ROW, C_COL]
    assert sums.min() >= low and sums.max() < high
    return (start_bits + sums).astype(np.int32).view(np.float32)


def a_bytes(words: np.ndarray, rows: int, bits: int, tile: int | None = None) -> np.ndarray:
    """Words [word, lane] of a plane -> masked bytes [row tile, step, register, lane, byte].

    tile: of this row tile alone, its codes where row tile 0 has its own. A last step of one column tile has zeros in
    the registers of the other, as m16n8k16 has half the columns.
    """
    cols = words.size * layout.WORD_BYTES * 8 // bits // rows
    col_tiles, steps = cols // layout.TILE, -(-cols // registers.BYTE_STEP)
    row = layout.TILE * np.arange(rows // layout.TILE if tile is None else 1)[:, None, None] + 8 * np.arange(2)
    first_col = layout.TILE * np.arange(col_tiles)[:, None]  # [row tile, column tile, row8] with the rows
    word, _, _, _ = layout.code_slot(row + layout.TILE * (tile or 0), first_col, rows, bits)
    mask = registers.byte_mask(row, bits).astype(np.uint32)[..., None]
    shift = np.uint32((tile or 0) % layout.tiles_per_word(bits) * 2 * bits)
    found = np.zeros((len(row), 2 * steps, 2, layout.LANES), np.uint32)
    found[:, :col_tiles] = (words[word] >> shift) & mask
    return found.view(np.uint8).reshape(len(row), steps, 4, layout.LANES, 4)


def fused(x, y, z) -> np.ndarray:
    """fp32 of x * y + z, rounded once."""
    return (np.asarray(x, np.float64) * y + z).astype(np.float32)


def joined(acc: np.ndarray, start: float) -> np.ndarray:
    """fp32 [..., lane, 4] -> 256 high + low [..., lane, row8]."""
    high = fused(acc[..., 0::2], registers.DIGIT_BASE, -(registers.DIGIT_BASE + 1) * start)
    return (high + acc[..., 1::2]).astype(np.float32)


def exponent(largest: np.ndarray, guard: float, top: int) -> np.ndarray:
    clamped = np.maximum(largest * np.float32(guard), np.float32(registers.MIN_FIXED_POINT))
    return top - registers.floor_log2(bits_of(clamped))


class Warp(emulation.Warp):
    """Up to 4 query rows q [R, head_dim]; K per channel or boosted."""

    def __init__(self, cache: KVCache, q: torch.Tensor, scale_log2: float):
        super().__init__(cache, q.repeat_interleave(2, 0), 2 * ROWS, scale_log2, False)
        rows = np.zeros((ROWS, self.head_dim), np.float32)
        rows[: len(q)] = q.float().numpy()
        self.q_scaled = rows * self.scale
        self.steps = self.head_dim // registers.BYTE_STEP

    def _own(self, values: np.ndarray) -> np.ndarray:
        """Values by channel [..., head_dim] -> those of each lane's column tile of a step, [..., step, lane, byte]."""
        tile = 2 * np.arange(self.steps)[:, None, None] + (G % 2)[:, None]
        return values[..., layout.TILE * tile + 2 * T[:, None] + registers.byte_column(BYTE)]

    def logits(self, record: np.ndarray, tile: int | None = None) -> np.ndarray:
        """-> [1, token tile, lane, element]: elements 0, 1 are tokens g, 2, 3 tokens g + 8, of row t.

        tile: of this token tile alone.
        """
        side, planes = self.format.k, self.record.k_planes
        names = ("codes", "high") if self._is_boosted else ("codes",)
        codes = np.concatenate([a_bytes(emulation.load_words(emulation.plane(record, planes, name)),
                                        layout.PAGE_TOKENS, side.bits, tile) for name in names], 1)
        groups = side.spec(self.head_dim).groups
        meta = emulation.metadata(record, planes, side.storage).reshape(groups, 2, self.head_dim)
        meta = meta[..., layout.channel_meta_index(np.arange(self.head_dim))]
        if tile is not None:
            own = tile // (PAGE_TILES // groups)
            return self._group_logits(record, codes, meta[own])[None]
        tiles = PAGE_TILES // groups
        return np.concatenate([self._group_logits(record, codes[j * tiles : (j + 1) * tiles], pair, j * tiles)
                               for j, pair in enumerate(meta)])[None]

    @property
    def _is_boosted(self) -> bool:
        return any(plane.name == "high" for plane in self.record.k_planes)

    def _group_logits(self, record: np.ndarray, codes: np.ndarray, meta, first: int = 0) -> np.ndarray:
        """Of the token tiles from ``first`` on, which share scales and zero-points [head_dim]."""
        scale, zero = meta
        rows = self._own(self.q_scaled)[ROW_G, :, LANE].swapaxes(0, 1)  # [step, lane, byte]
        products = (rows * self._own(scale)).astype(np.float32)
        boosted = self._boosted(record, scale) if self._is_boosted else []
        largest = np.max([np.abs(x).max(-1) for x in (*products, *boosted)], 0)
        bias = np.float32(0)
        for step, byte in np.ndindex(self.steps, 4):
            bias = fused(rows[step, :, byte], self._own(zero)[step, :, byte], bias)
        for distance in OVER_ROW:
            largest, bias = np.maximum(largest, largest[LANE ^ distance]), bias + bias[LANE ^ distance]
        e = exponent(largest, registers.SIGNED_GUARD, registers.SIGNED_TOP)
        start = registers.SIGNED_START + registers.HALF_DIGIT
        b = [self._operand(fused(x, pow2(e)[:, None], start)) for x in (*products, *boosted)]
        sums = np.float32(0)
        for run in registers.signed_runs(len(b), self.format.k.bits):
            acc = multiply(codes[:, run], np.stack([b[step] for step in run]), registers.SIGNED_START_BITS,
                           -registers.SIGNED_LIMIT, registers.SIGNED_LIMIT)
            sums = sums + joined(acc, registers.SIGNED_START)
        power = emulation.powers(PAGE_TILES, self.format.k.bits)[first : first + len(codes), :, ::2]
        down = pow2(-e[8 * ROW_T])[:, None] * pow2(-power)
        return np.repeat(fused(sums, down, bias[8 * ROW_T][:, None]), 2, -1)

    def _boosted(self, record: np.ndarray, scale: np.ndarray) -> list[np.ndarray]:
        """[step] 4 q s of the lane's slots [lane, byte]; of a lone column tile each lane of a row's two has one half,
        [lane, e]."""
        index = emulation.plane(record, self.record.k_planes, "index").astype(int)
        column_tiles, found = len(index) // layout.TILE, []
        for first in range(0, column_tiles, 2):
            parity = (G % 2)[:, None]
            slot = layout.TILE * (first + parity) + 2 * T[:, None] + registers.byte_column(BYTE)
            if first + 1 == column_tiles:
                slot = layout.TILE * first + 8 * parity + 2 * T[:, None] + np.arange(2)
            channel = index[slot]
            rows = np.float32(4) * self.q_scaled[ROW_G[:, None], channel]
            found.append((rows * scale[channel]).astype(np.float32))
        return found

    def _operand(self, values: np.ndarray) -> np.ndarray:
        """start + 128 + X [lane, byte or e] of each lane's share of a step -> s8 digits of B [register, lane, byte]."""
        word = values.view(np.uint32)
        digits = np.stack([(word >> np.uint32(8)) & np.uint32(255), (word & np.uint32(255)) ^ np.uint32(128)])
        digits = digits.astype(np.uint8).view(np.int8).astype(np.int64)
        odd = (G % 2 != 0)[:, None]
        own, other = np.where(odd, digits[1], digits[0]), np.where(odd, digits[0], digits[1])
        got = other[LANE ^ 4]
        even_s, odd_s = np.where(odd, got, own), np.where(odd, own, got)  # from the lanes of either parity
        if values.shape[-1] == 4:
            return np.stack((even_s, odd_s))
        halves = np.stack((even_s, odd_s), -1).reshape(layout.LANES, 4)  # byte col8 + 2 e
        return np.stack((halves, 0 * halves))

    def packed_values(self, record: np.ndarray, p: np.ndarray) -> None:
        side = self.format.v
        meta = emulation.metadata(record, self.record.v_planes, side.storage)
        meta = meta.reshape(self.groups_v, layout.PAGE_TOKENS, 2)
        token = layout.TILE * np.arange(PAGE_TILES)[:, None, None] + C_ROW[:, ::2]  # [tile, lane, row8]
        words = emulation.load_words(emulation.plane(record, self.record.v_planes, "codes"))
        codes = a_bytes(words, self.head_dim, side.bits)
        power, own = emulation.powers(len(codes), side.bits)[..., ::2], p[0, ..., ::2]
        tiles = len(codes) // self.groups_v
        for j in range(self.groups_v):
            scale, zero = np.moveaxis(meta[j, layout.token_meta_index(token)], -1, 0)
            self.z[j, 0] += (own * zero).sum((0, 2), dtype=np.float32)[:, None]
            products = (own * scale).astype(np.float32)
            largest = over_lanes(products.max((0, 2))[:, None], np.maximum)[:, 0]
            e = exponent(largest, registers.UNSIGNED_GUARD, registers.UNSIGNED_TOP)
            word = fused(products, pow2(e)[:, None], registers.UNSIGNED_START).view(np.uint32)
            x = (word & np.uint32(0xFFFF)).astype(np.int64)
            assert (word >> np.uint32(16) == registers.UNSIGNED_START_BITS >> 16).all()
            digits = np.stack((x >> 8, x & 255), 2)  # [tile, lane, column of the lane's pair, byte: token g, g + 8]
            pairs = emulation.movmatrix((digits[..., 0] + 256 * digits[..., 1]).astype(np.int64))
            b = np.stack((pairs & 255, pairs >> 8), -1).reshape(PAGE_TILES // 2, 2, layout.LANES, 4)
            at = slice(j * tiles, (j + 1) * tiles)
            acc = multiply(codes[at], b, registers.UNSIGNED_START_BITS, 0, 2**23)
            down = pow2(-e)[:, None] * pow2(-power[at])
            added = fused(joined(acc, registers.UNSIGNED_START), down, self.acc_o[0, at, :, ::2])
            self.acc_o[0, at] = np.repeat(added, 2, -1)

    def to_true_scale(self) -> None:
        if not self.true_scale:
            z = np.tile(over_lanes(self.z, np.add), 2)[:, 0]
            self.acc_o[0] += np.repeat(z, self.acc_o.shape[1] // self.groups_v, 0)
            self.true_scale = True

    def page(self, record: np.ndarray, v: torch.Tensor | None = None) -> None:
        """v: V in 16 bit beside packed K, 16 tokens at a time."""
        if v is None:
            super().page(record)
            return
        for tile in range(PAGE_TILES):
            p = self.attend(self.logits(record, tile))
            self.values(v[layout.TILE * tile : layout.TILE * (tile + 1)], p)

    def result(self):
        """The base class's columns 2t, 2t + 1 of a packed page are both row t: as 16-bit tokens' are."""
        return tuple(x[::2] for x in super().result())
