"""What a tile's scores are to the queries: caps, and masks of the tokens that a query does not see."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.device import numbers
from lowbit_attn.hopper.common.abi import Rows, query_and_head
from lowbit_attn.hopper.tile import softmax
from lowbit_attn.hopper.tile.config import TILE_M, TILE_N, DecodeConfig
from lowbit_attn.hopper.tile.walk import TileWalk, token_tile_of


class Visible(NamedTuple):
    """What the queries see: query j sees positions up to first_last + j, ``window`` of them (sinks: sink_window)."""

    first_last: Int32
    window: Int32
    sink_window: Int32


class LogitScale(NamedTuple):
    """How raw scores become logits of base 2."""

    scale_log2: Float32
    softcap_log2: Float32


class MmaThread(NamedTuple):
    """Place of a thread in its MMA warpgroup; lane = 4 * g + t."""

    thread: Int32
    warp: Int32
    g: Int32
    t: Int32


class Line(NamedTuple):
    """A query row in a thread's accumulators of S: values i of tokens ``first + offset``."""

    row: Int32  # of the CTA
    first: Int32
    values: tuple[tuple[int, int], ...]  # (i, offset)


def lines(cfg: DecodeConfig, me: MmaThread) -> list[Line]:
    """A thread's lines of S [64 rows, 128 tokens], or of S^T [128 tokens, rows] where query rows are columns."""
    if not cfg.in_columns:
        return [Line(16 * me.warp + me.g + 8 * half, 2 * me.t, tuple(
            (i, 8 * (i // 4) + i % 2) for i in softmax.row_values(TILE_N // 2, half))) for half in range(2)]
    of_warp, of_block = cfg.row_steps(TILE_N // TILE_M)
    return [Line(softmax.column(c, me.t), of_warp * me.warp + me.g, tuple(
        (i, of_block * block + 8 * half) for i, block, half in softmax.column_values(TILE_N // TILE_M, cfg.rows, c)))
        for c in range(cfg.rows // 4)]


@cute.jit
def to_logits(cfg: cutlass.Constexpr[DecodeConfig], acc_s: cute.Tensor, walk: TileWalk, rows: Rows, visible: Visible,
              scores: LogitScale, me: MmaThread, i: Int32) -> Float32:
    """Tile i: caps the scores and masks what a row does not see; returns what still scales them to logits."""
    scale_log2 = scores.scale_log2
    if cutlass.const_expr("softcap" in cfg.features):
        softmax.cap_scores(acc_s, scores.scale_log2, scores.softcap_log2)
        scale_log2 = Float32(1.0)
    if i >= walk.num_pages:
        mask_token_tile(cfg, acc_s, walk, rows, visible, me, i)
    elif cutlass.const_expr("window" in cfg.features):
        mask_page(cfg, acc_s, rows, visible, me, walk.packed_start + (walk.first_page + i) * TILE_N)
    return scale_log2


def end_of(rows: Rows, visible: Visible, row: Int32, start: Int32) -> Int32:
    """First token, of a tile at position ``start``, that comes after the query of a row."""
    query, _ = query_and_head(rows, row)
    return visible.first_last + query + 1 - start


@cute.jit
def mask_page(cfg: cutlass.Constexpr[DecodeConfig], acc_s: cute.Tensor, rows: Rows, visible: Visible, me: MmaThread,
              start: Int32):
    """The page at position ``start``: masks what lies left of a row's window, if the last query does not see it all."""
    if start < visible.first_last + rows.q_len - visible.window:
        for line in lines(cfg, me):
            mask_left(line, acc_s, end_of(rows, visible, line.row, start) - visible.window)


@cute.jit
def mask_token_tile(cfg: cutlass.Constexpr[DecodeConfig], acc_s: cute.Tensor, walk: TileWalk, rows: Rows,
                    visible: Visible, me: MmaThread, i: Int32):
    """Masks tokens that do not exist, that come after a row's query, or lie left of its window."""
    tile = token_tile_of(walk, i - walk.num_pages)
    start = tile.start + (1 - tile.is_sink) * (walk.packed_start + walk.ring_start)
    window = tile.is_sink * visible.sink_window + (1 - tile.is_sink) * visible.window
    for line in lines(cfg, me):
        end = end_of(rows, visible, line.row, start)
        mask_right(line, acc_s, cutlass.min(tile.live, end))
        if cutlass.const_expr("window" in cfg.features):
            mask_left(line, acc_s, end - window)


def mask_right(line: Line, acc_s: cute.Tensor, live: Int32) -> None:
    """Scores of tokens from ``live`` on become -inf, whatever they were."""
    for i, offset in line.values:
        acc_s[i] = cutlass.select_(line.first + offset < live, acc_s[i], Float32(numbers.NEG_INF))


def mask_left(line: Line, acc_s: cute.Tensor, first: Int32) -> None:
    """Scores of tokens before ``first`` become -inf, whatever they were."""
    for i, offset in line.values:
        acc_s[i] = cutlass.select_(line.first + offset >= first, acc_s[i], Float32(numbers.NEG_INF))
