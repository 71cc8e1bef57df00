"""The steps of a kernel on fp16 codes: see ``warp.config.Arithmetic``."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper.arith.fp16 import values
from lowbit_attn.hopper.arith.fp16.query import prepare as prepare_query
from lowbit_attn.hopper.arith.fp16.scores import of_page as scores
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import fetch, softmax
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.fetch import Arrival, Lane, Piece, Ring
from lowbit_attn.hopper.warp.page_loop import Call

__all__ = ["add_values", "prefetch_query", "before_values", "finish", "load_query", "prepare_query", "scores"]


def prefetch_query(cfg: WarpConfig, q: cute.Tensor, rows: Rows, me: Lane, thread: Int32) -> None:
    """All warps need all of q, and read it behind their first pages: bring it to L2."""
    fetch.prefetch_query(cfg, q, rows, thread)


def load_query(cfg: WarpConfig, call: Call, rows: Rows, me: Lane, early: None) -> cute.Tensor:
    return fetch.load_query(cfg, call.q, rows, me)


def before_values(cfg: WarpConfig, state: softmax.State, maxima: tuple) -> None:
    """O's exponent follows V's scales, so it waits for them."""


def finish(cfg: WarpConfig, state: softmax.State, me: Lane, ring: Ring) -> None:
    values.true_scale(cfg, state)


def add_values(cfg: WarpConfig, piece: Piece, me: Lane, state: softmax.State, p: cute.Tensor,
               maxima: tuple[Float32, ...], arrival: Arrival) -> None:
    values.rescale(cfg, state, maxima, values.largest_scale(cfg, piece, me))
    values.accumulate(cfg, piece, me, state, p, arrival.page)
