"""Boosted channels of K on the register path: a few channels have more code bits, in a second matrix of codes.

    code = low + 4 high     S_t = sum_d q~_d low_td + sum_slot (4 q~)_index[slot] high_t,slot

Both matrices are 2 bits wide, so a row has the same power in both and one set of accumulators takes both multiplies.
A lane's four slots of a column tile are those of its channels in any column tile: 2t, 2t + 1, 2t + 8, 2t + 9; which
channels they stand for is read from the page. 4 q~ = fp16((4 q') (s 2^(e_s + 2))) is at most 65,504: q' < 2^12.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.ampere import mma
from lowbit_attn.ampere.codes import metadata_rows, multiply_codes, scale_query
from lowbit_attn.ampere.config import ACCESS_BYTES, TILE, static

HALVES = ACCESS_BYTES // layout.META_BYTES


def index_place(t, col8):
    """(word, bit) of a 16-byte access of the index where the channel of slot 8*col8 + 2t starts; 2t + 1: 8 bits on."""
    slot = TILE // 2 * col8 + 2 * t
    return slot // layout.WORD_BYTES, slot % layout.WORD_BYTES * 8


def query_place(channel, member):
    """(column tile, member, element less 4*column) of q' at a channel, of the query rows that ``member`` holds."""
    return channel // TILE, member // 4 * 4 + channel % 8 // 2, channel % TILE // 8 * 2 + channel % 2


def scale_place(channel):
    """(16-byte access, value) of a channel's scale, from the metadata on."""
    index = layout.channel_meta_index(channel)
    return index // HALVES, index % HALVES


@T.macro
def gather(config, ring, slot, column_tile, lane, work):
    """4 q' and the scales at the lane's slots of a column tile -> query, meta_k; zeros in padded slots."""
    boost = config.boost
    values = T.view(ring, (config.rings * config.slots, config.slot_accesses, HALVES), config.k.meta_dtype)
    word, channel = T.alloc_var("uint32"), T.alloc_var("int32")
    for col8 in static(2):
        if boost.is_padding(column_tile, col8):
            work.meta_k[col8] = T.uint32(0)
            for n in T.unroll(config.columns):
                for e in T.vectorized(2):
                    work.query[4 * n + 2 * col8 + e] = T.float16(0.0)
        else:
            at, bit = index_place(lane % 4, col8)
            word = ring[slot, boost.index + column_tile, at] >> T.cast(bit, "uint32")
            for e in static(2):
                channel = T.cast((word >> T.uint32(8 * e)) & T.uint32(0xFF), "int32")
                access, value = scale_place(channel)
                work.meta_k_v[2 * col8 + e] = values[slot, config.k.meta + access, value]
                tile, member, element = query_place(channel, work.member)
                for n in T.unroll(config.columns):
                    work.query[4 * n + 2 * col8 + e] = work.query_of[tile, member, 4 * n + element]
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
        if config.options.centring:
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
