"""K's side of a kernel before its pages: a table of products q' . entry, or q' as an operand for entries themselves.

Table, of entries of 4 channels: T[e][y] = q' of each row . (entry e of group y - the group's mean entry), fp16. It
takes the place of the entries. Of 4 rows 8 bytes take 8, which one lane reads and writes. Of 2 rows an entry is one
word, and there are two copies of it, ``SECOND_COPY`` apart, for lanes that would ask one bank for different entries.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from lowbit_attn.device import numbers
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.hopper.arith.codebook.config import (
    TWO,
    columns_a_row,
    groups,
    lane_bytes,
    rotations,
    stride,
)
from lowbit_attn.hopper.warp.config import WARP, WORD, WarpConfig
from lowbit_attn.hopper.warp.fetch import Lane, read

ENTRY_WORDS = 2  # of four channels, and of four products
SECOND_COPY = 192  # the offset of a word's copy differs in these bits
TOGETHER = 4  # entries whose loads are under way
UP = 3  # of query.prepare's factors


def entry_view(cfg: WarpConfig, books: cute.Pointer) -> cute.Tensor:
    """(words of an entry, group, entry): K's codebook as a table."""
    return cute.make_tensor(books, cute.make_layout((ENTRY_WORDS, WARP, order.ENTRIES),
                                                    stride=(1, ENTRY_WORDS, order.BOOK_ROW_BYTES // WORD)))


def own_entry(entry: Int32, first: Int32) -> Int32:
    """An entry of the warp's; beyond the last one its first, not the last of all, which another warp replaces."""
    return cutlass.select_(entry < order.ENTRIES, entry, first)


@cute.jit
def build(cfg: cutlass.Constexpr[WarpConfig], me: Lane, q: cute.Tensor, factors: cute.Tensor, books: cute.Pointer,
          means: cute.Tensor):
    """Products in place of K's entries, by all warps. q: (channel, row) of q'; means: (channel) of entries."""
    group = Int32(me.lane)
    if cutlass.const_expr(groups(cfg.k) < WARP):  # rows hold the entries twice, the second time with halves exchanged
        group = (group ^ (group // groups(cfg.k) * (groups(cfg.k) // 2))) % groups(cfg.k)
    rows = [read(q, (group, r)) for r in range(cfg.rows)]
    mean = read(means, group)
    ups = [factors[UP, r] for r in range(cfg.rows)]
    scaled = [[x * up for x in row] for row, up in zip(rows, ups)]
    below = [numbers.tree([x * m for x, m in zip(row, mean)], numbers.add) for row in scaled]
    view = entry_view(cfg, books)
    for first in cutlass.range(me.warp, order.ENTRIES, TOGETHER * cfg.warps, unroll=1):
        at = [own_entry(first + i * cfg.warps, first) for i in range(TOGETHER)]
        found = [read(view[None, Int32(me.lane), None], e) for e in at]
        if cutlass.const_expr(cfg.rows == TWO):
            cute.arch.sync_warp()  # a row's entries have all been read
        for i in cutlass.range_constexpr(TOGETHER):
            entry = [*numbers.widen(found[i][0], "float16"), *numbers.widen(found[i][1], "float16")]
            products = [numbers.tree([x * y for x, y in zip(row, entry)], numbers.add) - low
                        for row, low in zip(scaled, below)]
            if first + i * cfg.warps < order.ENTRIES:
                if cutlass.const_expr(cfg.rows == TWO):
                    row = cute.make_tensor(books + at[i] * (order.BOOK_ROW_BYTES // WORD),
                                           cute.make_layout(order.BOOK_ROW_BYTES // WORD))
                    row[group] = row[group ^ (SECOND_COPY // WORD)] = numbers.pack(*products)
                else:
                    words = cute.make_rmem_tensor(ENTRY_WORDS, Uint32)
                    words[0], words[1] = numbers.pack(*products[:2]), numbers.pack(*products[2:])
                    cute.autovec_copy(words, view[None, Int32(me.lane), at[i]])


def operand_steps(cfg: WarpConfig) -> list[int]:
    """[operand of a word] the step whose entries it is multiplied with first: see ``operand``."""
    each = 2 if cfg.k.group_size == ENTRY_WORDS else 1  # entries in the registers of a token
    apart = math.gcd(each, stride(cfg, cfg.k) * columns_a_row(cfg))
    return list(range(0, rotations(cfg.k), apart))


def operand(cfg: WarpConfig, me: Lane, q: cute.Tensor, factors: cute.Tensor) -> cute.Tensor:
    """q' 2^11 as the B operands of entries, fp16 (4, operands of a word * word of a block + operand).

    Columns are (row, v). Register j of an operand of step x has the group 16 word + 4 ((x + j + s v) mod 4) + t, of two
    channels; or channels 2j, 2j + 1 of group 16 word + 4 ((x + s v) mod 4) + t, of four; s: ``config.stride``.
    """
    words, period, steps = lane_bytes(cfg.k) // WORD, rotations(cfg.k), operand_steps(cfg)
    row, v = Int32(cfg.arithmetic.operand_row(me.g, 0)), Int32(me.g) % columns_a_row(cfg)
    fragments, fragment_words = numbers.fragments(len(steps) * words)
    up, is_wide = factors[UP, row], cfg.k.group_size == 2 * ENTRY_WORDS
    for word in range(words):
        for at, step in enumerate(steps):
            for j in range(2):
                within = (step + j * (not is_wide) + stride(cfg, cfg.k) * v) % period
                group = 4 * period * word + 4 * within + Int32(me.t)
                pair = read(q, (group, row))[2 * j * is_wide :][:2]
                fragment_words[j, len(steps) * word + at] = numbers.pack(*(x * up for x in pair))
    return fragments
