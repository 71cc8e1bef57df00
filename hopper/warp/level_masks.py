"""The features of a kernel of a level under a window, of one query: masks.py, but for what the window hides.

View.hidden, the last of a row's counters, says how many tokens of pages and stage are before the window, or, negative,
how many sinks are in it. The segment of sinks is a level's sinks, then its stage; ``sink_window`` counts the former,
negative where windows do not hide them.
"""

import cutlass
from cutlass import Int32

from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.masks import capped, mask_tokens
from lowbit_attn.hopper.warp.page_loop import Unit, Walk
from lowbit_attn.hopper.warp.softmax import Limits

__all__ = ["capped", "is_in_window", "mask_tokens", "row_window"]


def row_window(counts: tuple, limits: Limits) -> Int32:
    """``masks.row_window`` of a level: all tokens behind the sinks but the hidden ones."""
    n_sink, _, _, n_tok, _, hidden = counts
    return n_tok - n_sink - hidden


def is_in_window(cfg: WarpConfig, walk: Walk, unit: Unit, token: Int32, stop: Int32, limits: Limits):
    """``masks.is_in_window`` of a level; walk.first_seen is what is hidden."""
    sinks = cutlass.max(limits.sink_window, 0 - limits.sink_window)
    beyond = walk.first_seen - (walk.mixed_page << cfg.page_log2)  # tokens of the stage
    stage = sinks + cutlass.min(walk.first_seen, Int32(0)) + cutlass.max(beyond, Int32(0))
    begin = unit.is_sink * (stage - unit.start) + (1 - unit.is_sink) * (stop - limits.window)
    kept = unit.is_sink * (0 - limits.sink_window - unit.start)
    return (token >= begin) | (token < kept)
