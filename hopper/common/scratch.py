"""Scratch of a decode call: how many words the splits, clusters or CTAs of an even share exchange, and where."""

from lowbit_attn.kernels.key import Scratch

EMPTY = -1  # a word of scratch whose value has not come: a NaN that no arithmetic gives
CHUNK_CHANNELS = 4  # of a row's o that splits add up together
SLOT_WORDS = CHUNK_CHANNELS + 2  # of scratch: sums of a chunk, maximum and sum of its row
LINE_WORDS = 32  # of L2
CLUSTERS = (2, 4, 8)  # splits of a block that may be a cluster, if as many clusters as blocks surely fit on the GPU
GPCS = 8  # parts of a GPU that clusters do not cross, at most
CLUSTER_WORDS = 4  # of scratch, which clusters do not need
PACE_COUNTS = 4  # of CTAs that count together how far they have come (warp/pace.py), each in a line
HEADER_WORDS = PACE_COUNTS * LINE_WORDS  # in front of all paths' scratch, also that of paths which do not count there


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
