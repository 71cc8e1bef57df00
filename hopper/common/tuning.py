"""Constants of all decode kernels, without the DSL: sizes of what CTAs exchange, and what was tuned by trying.

What was tuned changes no result, only how long a call takes: see docs/lessons.md. What follows from the hardware, or
from how many registers a lane has, stands where it is used.
"""

from typing import NamedTuple

# ---- what the splits, clusters or CTAs of an even share exchange in a decode call
EMPTY = -1  # a word of scratch whose value has not come: a NaN that no arithmetic gives
CHUNK_CHANNELS = 4  # of a row's o that splits add up together
SLOT_WORDS = CHUNK_CHANNELS + 2  # of scratch: sums of a chunk, maximum and sum of its row
LINE_WORDS = 32  # of L2
CLUSTERS = (2, 4, 8)  # splits of a block that may be a cluster, if as many clusters as blocks surely fit on the GPU
CLUSTER_WORDS = 4  # of scratch, which clusters do not need
PACE_COUNTS = 4  # of CTAs that count together how far they have come (warp/page_loop.py), each in a line
HEADER_WORDS = PACE_COUNTS * LINE_WORDS  # in front of all paths' scratch, also that of paths which do not count there

# ---- warps with pages of their own
MAX_WARPS, MIN_SLOTS, MAX_SLOTS = 8, 2, 8  # of a CTA and of a warp's ring; more slots are no faster
MANY_WARPS = 12  # where 168 registers a lane are enough: more warps hide more latency
BOOK_WARPS = 16  # of a CTA with codebooks, where registers and shared memory are enough
PAGE_WARPS = 8  # take packed pages where these are large: a page's arithmetic hides behind the others' copies
UNDER_WAY = 48 << 10  # bytes that an SM must have under way to take its share of DRAM's rate
FEW_PAGES = 4  # of a warp: with fewer, a call is as long as its start and its end, and page counts come too late
PASSING_BYTES = 200 << 20  # of a call whose lines L2 need not keep: more than three times what it holds

# ---- the merge of splits
MOST_LANES_LOG2 = 2  # of a chunk, where a split has enough chunks for the others: a line has 8 chunks
SLOTS_AT_ONCE = 4  # of a lane that are under way: with 128 chunks of a row block each lane has about four splits
UNIT_CHUNKS = 2  # of a row, which a thread adds up together at the end of an even share
PARTS_AT_ONCE = 4  # of an item, which it reads together there

# ---- the tile path
IN_FLIGHT_BYTES = 68 * 1024  # packed bytes in flight an SM that keep its memory busy
MAX_STAGES = 8  # of packed parts: more are no faster


class Rule(NamedTuple):
    """When a warp hurries or waits (warp/page_loop.py): one that is this part of a page behind is helped; one that is
    this part of a page ahead waits."""

    behind: int = 4
    ahead: int = 2
    wait_ns: int = 600
    page_ns: int | None = None  # so long for a page that it is ahead, up to wait_ns; None: always wait_ns


FAR = 16  # pages of a warp: CTAs that are further apart have sequences of other lengths, and say nothing
PACE_INT8 = Rule(8, 4)
PACE_FP16 = Rule(16, 1, 300)
PACE_FP16_LARGE_PAGES = Rule(16, 4, 800)  # where the last warps have no pages
PACE_SMALL = Rule(2, 2)  # three warps: the least that one can be ahead is a third of a page
PACE_STREAM = Rule(8, 8, 2000, 1000)
