"""The end of a block: O, row maxima and sums of its warps -> shared memory -> one (o, lse) of the split.

Warps that have rows of their own have nothing to merge: each writes its (o, lse) from its registers.
"""

import tilelang.language as T

from lowbit_attn.ampere import queries, softmax
from lowbit_attn.ampere.config import static

LN_2 = 0.6931471805599453


def merge_at(config, row, channel):
    """Float, within a warp's part, of one element of its O."""
    return row * config.merge_row + channel


@T.macro
def stash(config, regs, floats, warp, lane):
    """A warp's O [rows, head_dim], row maxima and sums -> its own part of shared memory."""
    softmax.sum_rows(regs.row_sum, config.row_values)
    stats = config.rows * config.merge_row
    for i in T.unroll(4 * config.o_tiles * config.columns):
        row = softmax.query_row(softmax.row_value(config, i), lane % 4)
        channel = 16 * (i // (4 * config.columns)) + 8 * (i % 4 // 2) + lane // 4
        floats[warp, merge_at(config, row, channel)] = regs.acc_o[i]
    if lane // 4 == 0:
        for j in T.unroll(config.row_values):
            floats[warp, stats + softmax.query_row(j, lane)] = regs.row_max[j]
            floats[warp, stats + config.rows + softmax.query_row(j, lane)] = regs.row_sum[j]


@T.macro
def merge(config, floats, thread, rows, o_partial, lse_partial, split):
    """The warps' (O, max, sum) -> o (normalised) and lse (natural log); o = 0 and lse = -inf if no token was seen.

    Only a sum of exactly 0 means that, so a NaN of live data comes out as NaN.
    """
    stats = config.rows * config.merge_row
    top, total, value, weight = (T.alloc_var("float32") for _ in range(4))
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    for i in T.serial(T.truncdiv(rows.count * config.head_dim - thread + (config.threads - 1), config.threads)):
        row = (thread + i * config.threads) // config.head_dim
        channel = (thread + i * config.threads) % config.head_dim
        query = queries.query(rows, row)
        head = queries.head(rows, row)
        top = T.float32(softmax.NO_TOKEN)
        for w in static(config.warps):
            top = T.max(top, floats[w, stats + row])
        total = T.float32(0.0)
        value = T.float32(0.0)
        for w in static(config.warps):
            weight = T.exp2(floats[w, stats + row] - top)
            total = total + weight * floats[w, stats + config.rows + row]
            value = value + weight * floats[w, merge_at(config, row, channel)]
        o_partial[split, rows.seq, query, head, channel] = normalised(value, total)
        if channel == 0:
            lse_partial[split, rows.seq, query, head] = log_sum(top, total)


def normalised(value, total):
    return T.if_then_else(total == T.float32(0.0), T.float32(0.0), value / total)


def log_sum(top, total):
    return T.if_then_else(total == T.float32(0.0), -T.infinity("float32"),
                          (top + T.log2(total)) * T.float32(LN_2))


@T.macro
def write(config, regs, rows, lane, o_partial, lse_partial, split):
    """The same from the registers of a warp that alone has its rows: eight lanes fill 32 bytes of a row."""
    softmax.sum_rows(regs.row_sum, config.row_values)
    query, head = T.alloc_var("int32"), T.alloc_var("int32")
    for v in T.unroll(config.row_values):
        if softmax.query_row(v, lane % 4) < rows.count:
            query = queries.query(rows, softmax.query_row(v, lane % 4))
            head = queries.head(rows, softmax.query_row(v, lane % 4))
            for i in T.unroll(2 * config.o_tiles):
                at = 4 * (i // 2 * config.columns + v // 2) + 2 * (i % 2) + v % 2
                o_partial[split, rows.seq, query, head, 8 * i + lane // 4] = normalised(regs.acc_o[at],
                                                                                        regs.row_sum[v])
            if lane // 4 == 0:
                lse_partial[split, rows.seq, query, head] = log_sum(regs.row_max[v], regs.row_sum[v])
