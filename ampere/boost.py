"""Boosted channels of K on the register path: a few channels have more code bits, in a second matrix of codes.

    code = low + 4 high     S_t = sum_d q~_d low_td + sum_slot (4 q~)_index[slot] high_t,slot

Both matrices are 2 bits wide, so a row has the same power in both and one set of accumulators takes both multiplies.
Which channels the 16 slots of a column tile stand for is read from the page: lane l looks up that of slot l % 16. For
one ldmatrix to gather q' of these channels, kernels with boosted channels keep q' by channel in shared memory, 16 bytes
a channel and 8 query rows; the scales come by shuffles. 4 q~ = fp16((4 q') (s 2^(e_s + 2))) is at most 65,504, as
q' < 2^12.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import mma
from lowbit_attn.ampere.codes import metadata_rows, multiply_codes, scale_query
from lowbit_attn.ampere.config import ACCESS_BYTES, LANES, MMA_N, TILE, static

HALVES = ACCESS_BYTES // layout.META_BYTES


def query_shape(config) -> tuple[int, int, int, int]:
    """Shape of q' by channel: (row groups, columns, channels, 8 query rows)."""
    return config.row_groups, config.columns, config.head_dim, MMA_N


def row_of(lane, channel, config, member):
    """(row group, column, channel) of the 16 bytes of q' that a lane names to ldmatrix: channel of slot lane % 16."""
    return member // LANES, lane // TILE % config.columns, channel


def scale_place(channel):
    """(16-byte access, value) of a channel's scale, from the metadata on."""
    index = layout.channel_meta_index(channel)
    return index // HALVES, index % HALVES


def slot_lane(lane, col8):
    """Lane that looks up slot 8*col8 + 2t, the first of a lane's two slots of half a column tile."""
    return TILE // 2 * col8 + 2 * (lane % 4)


@T.macro
def load_query(config, channel, lane, work):
    """q' of 16 channels, that of lane l % 16 each, as B operand: the rows of its fragments, transposed."""
    group, column, row = row_of(lane, channel, config, work.member)
    T.ptx_ldmatrix(T.bool(True), 2 * config.columns, T.access_ptr(work.query_of[group, column, row, 0], "r", MMA_N),
                   T.access_ptr(work.query[0], "w", 4 * config.columns))


@T.macro
def store_query(work, column, channel, lane, value):
    """q' of query row 8*column + g."""
    work.query_of[work.member // LANES, column, channel, lane // 4] = value


@T.macro
def gather(config, ring, slot, column_tile, lane, work):
    """4 q' and the scales at the slots of a column tile -> query, meta_k; zeros in padded slots."""
    boost = config.boost
    shape = (config.rings * config.slots, config.slot_accesses)
    octets = T.view(ring, (*shape, ACCESS_BYTES), "uint8")
    values = T.view(ring, (*shape, HALVES), "uint16")
    channel, scale, pair = T.alloc_var("int32"), T.alloc_var("int32"), T.alloc_var("int32")
    channel = T.cast(octets[slot, boost.index + column_tile, lane % TILE], "int32")
    load_query(config, channel, lane, work)
    access, value = scale_place(channel)
    scale = T.cast(values[slot, config.k.meta + access, value], "int32")
    pair = scale | T.shift_left(T.shfl_xor(scale, 1), 16)  # in lanes of even slots
    for col8 in static(2):
        if boost.is_padding(column_tile, col8):
            work.meta_k[col8] = T.uint32(0)
            for n in T.unroll(config.columns):
                for e in T.vectorized(2):
                    work.query[4 * n + 2 * col8 + e] = T.float16(0.0)
        else:
            work.meta_k[col8] = T.cast(T.shfl_sync(pair, slot_lane(lane, col8)), "uint32")
            for n in T.unroll(config.columns):
                for e in T.vectorized(2):
                    work.query[4 * n + 2 * col8 + e] = work.query[4 * n + 2 * col8 + e] * T.float16(4.0)


@T.macro
def add(config, ring, slot, lane, own_scale, work, ops):
    """What boosted codes have beyond the others': codes with 4 q~ as B, centred as they are: N = 3, scale 4 s."""
    high = config.boost.high
    for ct in static(high.column_tiles):
        if config.is_crowded:
            T.sync_warp()  # as in channel_scores
        gather(config, ring, slot, ct, lane, work)
        scale_query(config, work.e_s[0], 0, work)
        metadata_rows(config, 1, own_scale, work)
        for r in T.unroll(2):
            work.a[2 * r] = T.uint32(0)
        for n in T.unroll(config.columns):
            mma.multiply("float16", work.a, work.query, n, work.bias, n)
        for r in T.unroll(2):
            work.a[2 * r + 1] = work.minus[0]
        for n in T.unroll(config.columns):
            mma.multiply("float16", work.a, work.scaled, n, work.bias, n)
        multiply_codes(config, high, ring, slot, lane, work, ct, 0, high.row_tiles, work.scaled, lambda tile: 0,
                       ops.acc_s, 0)
