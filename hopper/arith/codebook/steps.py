"""The steps of a kernel on codebooks: see ``warp.config.Arithmetic``."""

import cutlass.cute as cute
from cutlass import Float32, Int32

from lowbit_attn.hopper.arith.codebook import books, query, values
from lowbit_attn.hopper.arith.codebook.books import copy_piece
from lowbit_attn.hopper.arith.codebook.books import end as end_books
from lowbit_attn.hopper.arith.codebook.books import place_of as place_books
from lowbit_attn.hopper.arith.codebook.books import start as start_books
from lowbit_attn.hopper.arith.codebook.query import prepare as prepare_query
from lowbit_attn.hopper.arith.codebook.query import token_words as token_query
from lowbit_attn.hopper.arith.codebook.scores import of_codes as part_scores
from lowbit_attn.hopper.arith.codebook.scores import of_page as scores
from lowbit_attn.hopper.arith.codebook.scores import with_mean
from lowbit_attn.hopper.arith.codebook.values import finish
from lowbit_attn.hopper.common.abi import Rows
from lowbit_attn.hopper.warp import fetch, softmax
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.warp.fetch import Arrival, Lane, Piece
from lowbit_attn.hopper.warp.page_loop import Call

__all__ = ["add_values", "before_values", "copy_piece", "end_books", "finish", "load_query", "part_scores",
           "place_books", "prefetch_query", "prepare_query", "scores", "start_books", "token_query", "with_mean"]


def prefetch_query(cfg: WarpConfig, q: cute.Tensor, rows: Rows, me: Lane, thread: Int32) -> None:
    """q is read behind the first pages' copies: bring it to L2."""
    fetch.prefetch_query(cfg, q, rows, thread)


def load_query(cfg: WarpConfig, call: Call, rows: Rows, me: Lane, early: None) -> query.Loaded:
    return query.load(cfg, call, rows, me)


def before_values(cfg: WarpConfig, state: softmax.State, maxima: tuple) -> None:
    """O's exponent follows V's norms, so it waits for them."""


def add_values(cfg: WarpConfig, piece: Piece, me: Lane, state: softmax.State, p: cute.Tensor,
               maxima: tuple[Float32, ...], arrival: Arrival) -> None:
    books.wait_for_values(arrival)
    values.accumulate(cfg, piece, me, state, p, maxima)
