"""What decode kernels read of a cache: the fields of its memory, in the order of every kernel's argument list.

A field is added here, in ``hopper/common/abi.py`` and in the signatures of ``ampere/decode.py`` and
``device/append.py``; a test compares them. State, plans and operators go through ``FIELDS``.

Behind these fields a kernel takes those of OPTIONAL_FIELDS that the caches it serves have, and no argument for others.
"""

from typing import NamedTuple


class Field(NamedTuple):
    """One tensor of the view."""

    name: str
    dtype: str  # "int32", "uint8", or "token": the cache's 16-bit type
    shape: tuple[str, ...]
    meaning: str


ROW_FIELDS = (
    Field("rows", "int32", ("batch",), "row of counters and table that a batch row reads"),
    Field("ring_rows", "int32", ("batch",), "row of sinks and rings that a batch row reads"),
)
FIELDS = (
    Field("pool", "uint8", ("num_pages", "num_heads_kv", "record"), "packed records"),
    Field("table", "int32", ("seqs", "max_pages"), "page ids; entries are found by the strides, not by this shape"),
    Field("n_sink", "int32", ("seqs",), "sink tokens in 16 bit"),
    Field("n_qk", "int32", ("seqs",), "tokens of K in pages, a multiple of 128"),
    Field("n_qv", "int32", ("seqs",), "tokens of V in pages, a multiple of 128, at most n_qk"),
    Field("n_tok", "int32", ("seqs",), "all tokens"),
    Field("ring_start", "int32", ("seqs",), "tokens behind the sinks that are not in K's ring any more; token i behind "
          "the sinks is in slot i % slots. n_qk, where all of them are in pages of this cache"),
    Field("sink_k", "token", ("rings", "num_heads_kv", "sinks", "head_dim"), "sinks; more slots than n_sink may be"),
    Field("sink_v", "token", ("rings", "num_heads_kv", "sinks", "head_dim"), "the same of V"),
    Field("ring_k", "token", ("rings", "num_heads_kv", "slots", "head_dim"), "the latest tokens, a ring"),
    Field("ring_v", "token", ("rings", "num_heads_kv", "slots", "head_dim"), "the same of V"),
)
STATE = tuple(field.name for field in FIELDS)
COUNTERS = tuple(field.name for field in FIELDS if field.name.startswith("n_"))
SIGNIFICANCE = (
    Field("score", "float32", ("rings", "num_heads_kv", "slots"), "sum of the probabilities that a token of K's ring "
          "had, the largest of its group of heads"),
    Field("seen", "int32", ("rings", "slots"), "queries in that sum"),
)
OPTIONAL_FIELDS = {
    "decode": (
        Field("k_book", "uint32", ("num_heads_kv", "entries", "row"), "codebooks of K: row e has the entries e of all "
              "groups of channels, fp16"),
        Field("v_book", "uint32", ("num_heads_kv", "entries", "row"), "the same of V"),
        Field("k_channels", "float32", ("num_heads_kv", "planes", "head_dim"), "what codebooks of K say of a channel"),
        Field("hidden", "int32", ("seqs",), "of a level under a window (levels/view.py): how many tokens of its pages, "
              "then of its stage, are before the window; negative: so many sinks are in it"),
    ),
    "append": (
        Field("query_weights", "float32", ("num_heads_kv", "head_dim"), "mean |q| of the channels of K"),
        Field("k_entries", "float16", ("num_heads_kv", "groups", "entries"), "codebooks of K, a group after the other"),
        Field("v_entries", "float16", ("num_heads_kv", "groups", "entries"), "the same of V"),
        Field("order", "uint8", ("rings", "num_heads_kv", "page"), "the order in which the oldest block is stored"),
        *SIGNIFICANCE,
    ),
    "score": SIGNIFICANCE,
}
STEP_FIELDS = (*STATE, "limit", "faults", "arrivals")
# of the operator: ring_start is n_qk there, and no operator writes one tensor by two names
STEP_STATE = tuple(name for name in STEP_FIELDS if name != "ring_start")


class Strides(NamedTuple):
    """Where records are, in units of RECORD_ALIGN bytes of the pool and in entries of the table: the record of page j
    of (row r, KV head h) is at unit table[r * table_b + h * table_h + j] * page + h * head.

    Sinks and rings carry their strides themselves: those of rows and heads are any multiples of 8 elements.
    """

    page: int
    head: int
    table_b: int
    table_h: int


def optional(cache, op: str) -> tuple:
    """The tensors of OPTIONAL_FIELDS that a cache has for kernels of ``op``, in their order."""
    found = (getattr(cache, field.name, None) for field in OPTIONAL_FIELDS[op])
    return tuple(x for x in found if x is not None)
