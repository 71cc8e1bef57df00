"""Scratch of a decode call: how many words its splits, clusters or CTAs of an even share exchange."""

from lowbit_attn.hopper.common.tuning import (
    CHUNK_CHANNELS,
    CLUSTER_WORDS,
    EMPTY,
    HEADER_WORDS,
    LINE_WORDS,
    SLOT_WORDS,
)
from lowbit_attn.kernels.key import Scratch

GPCS = 8  # parts of a GPU that clusters do not cross, at most


def scratch(q_shape: tuple[int, ...], rows: int, places: int, splits: int) -> Scratch:
    """Scratch of a call with q [batch, q_len, num_heads, head_dim] and ``places`` blocks of ``rows`` query rows."""
    words = slot_words(splits * -(-rows * chunks(q_shape) // splits))
    return Scratch(((places if splits > 1 else 1, splits, words),), EMPTY if splits > 1 else None, header=HEADER_WORDS)


def fits_clusters(places: int, splits: int, sms: int) -> bool:
    """Whether each block's splits, as many as ``CLUSTERS`` has, can be a cluster, with a CTA an SM. An SM comes with
    its neighbour."""
    return places * splits <= sms - GPCS * (splits - 2)


def cluster_scratch(splits: int) -> Scratch:
    """Scratch of a call whose blocks are clusters of so many splits."""
    return Scratch(((1, splits, CLUSTER_WORDS),), EMPTY, header=HEADER_WORDS)


def even_scratch(q_shape: tuple[int, ...], rows: int, ctas: int) -> Scratch:
    """Scratch of a call whose CTAs, so many, share all pages evenly."""
    return Scratch(((ctas, 1, slot_words(rows * chunks(q_shape))),), EMPTY, header=HEADER_WORDS)


def slot_words(count: int) -> int:
    """32-bit words of so many slots, whole lines of L2: kernels access up to 16 bytes at once."""
    return -(-count * SLOT_WORDS // LINE_WORDS) * LINE_WORDS


def chunks(q_shape: tuple[int, ...]) -> int:
    """Chunks of a query row."""
    return q_shape[-1] // CHUNK_CHANNELS
