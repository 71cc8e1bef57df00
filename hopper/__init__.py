"""Kernels for SM90 in CuTe-DSL, and what each decode path serves."""

from dataclasses import dataclass

import torch

from lowbit_attn.formats.contract import Format
from lowbit_attn.kernels import WIDE_HEAD_DIM, Scratch, Support

FLOATS = (torch.float16, torch.bfloat16)
EMPTY = -1  # a word of scratch whose value has not come: a NaN that no arithmetic gives
SPLITS_MEET = True  # all splits of a call must run at once
CHUNK_CHANNELS = 4  # of a row's o that splits add up together
SLOT_WORDS = CHUNK_CHANNELS + 2  # of scratch: sums of a chunk, maximum and sum of its row
LINE_WORDS = 32  # of L2
CLUSTERS = (2, 4, 8)  # splits of a block that may be a cluster, if as many clusters as blocks surely fit on the GPU
GPCS = 8  # parts of a GPU that clusters do not cross, at most
CLUSTER_WORDS = 4  # of scratch, which clusters do not need
PACE_COUNTS = 4  # of CTAs that count together how far they have come (warp/pace.py), each in a line
HEADER_WORDS = PACE_COUNTS * LINE_WORDS  # in front of all paths' scratch, also that of paths which do not count there
MAX_SMALL_PART = 9_216  # bytes: 12 warps an SM with two slots each, of the same size
MAX_WIDE_RECORD = 68_544  # bytes left beside 16-bit tiles of K, V and Q of head_dim 256 in shared memory


@dataclass(frozen=True)
class TileSupport(Support):
    """Above WIDE_HEAD_DIM one whole record must fit beside the 16-bit tiles."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        found = super().missing(fmt, head_dim, dtype, features)
        if not found and head_dim > WIDE_HEAD_DIM and fmt.record_bytes(head_dim) > MAX_WIDE_RECORD:
            found = [f"record of {fmt.record_bytes(head_dim)} B at head_dim {head_dim}, "
                     f"supported: up to {MAX_WIDE_RECORD} B (K and V of 8 bits: in larger groups)"]
        return found


@dataclass(frozen=True)
class SmallSupport(Support):
    """One group a side, and parts of a record of which four CTAs' rings fit an SM's shared memory."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        found = super().missing(fmt, head_dim, dtype, features)
        if not found:
            record = fmt.record(head_dim)
            part = max(record.v_offset, record.nbytes - record.v_offset)
            if part > MAX_SMALL_PART:
                found = [f"part of a record of {part} B, supported: up to {MAX_SMALL_PART} B"]
        return found


PATHS = {
    "integer": Support(k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                       dtypes=FLOATS, storages=FLOATS, rows=(4,), wide_rows=(4,), channel_groups=(32, 64, 128),
                       windows=True, boosted=True),
    "register": Support(k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                        dtypes=FLOATS, storages=FLOATS, rows=(8, 16), wide_rows=(8,), channel_groups=(32, 64, 128),
                        k_per_token=True, windows=True, boosted=True, paired_bits=4),
    "tile": TileSupport(k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128, 256),
                        dtypes=FLOATS, storages=FLOATS, rows=(8, 64), wide_rows=(8, 64),
                        channel_groups=(32, 64, 128), k_per_token=True, windows=True),
    # the integer path in CTAs of a quarter of the warps, four an SM
    "small": SmallSupport(k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(128,), head_dims=(64, 96, 128),
                          dtypes=FLOATS, storages=FLOATS, rows=(4,), wide_rows=(4,), windows=True, features=(),
                          boosted=True),
    # the integer path on Stream-K's schedule: all CTAs share all sequences' pages evenly
    "stream": Support(k_bits=(8, 4, 2, 1), v_bits=(8, 4, 2, 1), k_groups=(32, 64, 128), head_dims=(64, 96, 128),
                      dtypes=FLOATS, storages=FLOATS, rows=(4,), wide_rows=(4,), channel_groups=(32, 64, 128),
                      windows=True, features=(), boosted=True),
}

IN_CLUSTERS = ("integer", "register")  # paths whose splits may be clusters
# the same in other CTAs, for calls that name the path or by dispatch.for_shape
SMALLER = {"integer": "small"}  # several an SM
EVEN = {"integer": "stream"}  # with an equal share of all pages each


def scratch(q_shape: tuple[int, ...], rows: int, places: int, splits: int) -> Scratch:
    """Of a call with q [batch, q_len, num_heads, head_dim] and ``places`` blocks of ``rows`` query rows."""
    words = slot_words(splits * -(-rows * chunks(q_shape) // splits))
    return Scratch(((places if splits > 1 else 1, splits, words),), EMPTY if splits > 1 else None, header=HEADER_WORDS)


def fits_clusters(places: int, splits: int, sms: int) -> bool:
    """Whether each block's splits, as many as ``CLUSTERS`` has, can be a cluster, with a CTA an SM. An SM comes with
    its neighbour."""
    return places * splits <= sms - GPCS * (splits - 2)


def cluster_scratch(splits: int) -> Scratch:
    """The same of a call whose blocks are clusters of so many splits."""
    return Scratch(((1, splits, CLUSTER_WORDS),), EMPTY, header=HEADER_WORDS)


def even_scratch(q_shape: tuple[int, ...], rows: int, ctas: int) -> Scratch:
    """The same of a path of ``EVEN`` with so many CTAs."""
    return Scratch(((ctas, 1, slot_words(rows * chunks(q_shape))),), EMPTY, header=HEADER_WORDS)


def slot_words(count: int) -> int:
    """32-bit words of so many slots, whole lines of L2: kernels access up to 16 bytes at once."""
    return -(-count * SLOT_WORDS // LINE_WORDS) * LINE_WORDS


def chunks(q_shape: tuple[int, ...]) -> int:
    """Of a query row."""
    return q_shape[-1] // CHUNK_CHANNELS
