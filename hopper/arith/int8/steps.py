"""The steps of a kernel on int8 digits: see ``contract.Arithmetic``."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper.arith.int8 import values
from lowbit_attn.hopper.arith.int8.scores import of_page as scores
from lowbit_attn.hopper.arith.int8.scores import prepare as prepare_query
from lowbit_attn.hopper.arith.int8.scores import shared_view, store_query
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import query, softmax
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.fetch import Arrival
from lowbit_attn.hopper.warp.unpack import Lane, Piece

__all__ = ["add_values", "before_values", "finish", "load_query", "prefetch_query", "prepare_own_query",
           "prepare_query", "scores"]


def prefetch_query(cfg: WarpConfig, q: cute.Tensor, rows: Rows, me: Lane, thread: Int32) -> cute.Tensor:
    """q words for ``prepare_query``, by the last warp: none has fewer pages."""
    return query.load(cfg, q, rows._replace(count=rows.count * Int32(me.warp == cfg.warps - 1)), me)


def load_query(cfg: WarpConfig, q: cute.Tensor, rows: Rows, me: Lane, early: cute.Tensor) -> cute.Tensor:
    return early


def prepare_own_query(cfg: WarpConfig, words: cute.Tensor, scale_log2: Float32, me: Lane, shared: cute.Pointer,
                      channels: cute.Pointer) -> query.Query:
    """The operand of ``scores`` of a warp with rows of its own; a barrier of the warp must follow."""
    view = shared_view(cfg, shared)
    store_query(cfg, words, scale_log2, me, view, channels)
    return query.Query(view, (), channels)


def before_values(cfg: WarpConfig, state: softmax.State, maxima: tuple) -> None:
    """O is in its own units: it goes to the new maxima while V is on its way."""
    softmax.rescale(cfg, state, maxima, None)


def add_values(cfg: WarpConfig, piece: Piece, me: Lane, state: softmax.State, p: cute.Tensor,
               maxima: tuple[Float32, ...], arrival: Arrival) -> None:
    values.accumulate(cfg, piece, me, state, p, arrival.ring, arrival.phase, arrival.is_single)


def finish(cfg: WarpConfig, state: softmax.State) -> None:
    """O is in its own units already."""
