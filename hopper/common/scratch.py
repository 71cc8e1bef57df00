"""Sizes of what the splits, clusters or CTAs of an even share exchange in a decode call."""

EMPTY = -1  # a word of scratch whose value has not come: a NaN that no arithmetic gives
CHUNK_CHANNELS = 4  # of a row's o that splits add up together
SLOT_WORDS = CHUNK_CHANNELS + 2  # of scratch: sums of a chunk, maximum and sum of its row
LINE_WORDS = 32  # of L2
CLUSTERS = (2, 4, 8)  # splits of a block that may be a cluster, if as many clusters as blocks surely fit on the GPU
CLUSTER_WORDS = 4  # of scratch, which clusters do not need
PACE_COUNTS = 4  # of CTAs that count together how far they have come (warp/page_loop.py), each in a line
HEADER_WORDS = PACE_COUNTS * LINE_WORDS  # in front of all paths' scratch, also that of paths which do not count there
