"""What decode kernels read of a cache: the fields of its memory, in the order of every kernel's argument list.

A field is added here, in ``hopper/common/abi.py`` and in the signatures of ``ampere/decode.py`` and
``device/append.py``; a test compares them. State, plans and operators go through ``FIELDS``.
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
STEP_STATE = (*(name for name in STATE if name != "ring_start"), "limit", "faults", "arrivals")


class Strides(NamedTuple):
    """Where records are, in units of RECORD_ALIGN bytes of the pool and in entries of the table: the record of page j
    of (row r, KV head h) is at unit table[r * table_b + h * table_h + j] * page + h * head.

    Sinks and rings carry their strides themselves: those of rows and heads are any multiples of 8 elements.
    """

    page: int
    head: int
    table_b: int
    table_h: int
