"""The end of a block: O, row maxima and sums of its warps -> shared memory -> one (o, lse) of the split.

Warps that have rows of their own have nothing to merge: each writes its (o, lse) from its registers. A split that is
the only one is the whole: its (o, lse) go to the call's outputs, with the sink logit in the denominator.
"""

import tilelang.language as T

from lowbit_attn.ampere import combine, queries, softmax
from lowbit_attn.ampere.config import static


def merge_at(config, row, channel):
    """Float, within a warp's part, of one element of its O."""
    return row * config.merge_row + channel


@T.macro
def stash(config, regs, floats, warp, lane):
    """A warp's O [rows, head_dim], row maxima and sums -> its own part of shared memory."""
    softmax.sum_rows(regs.row_sum, config.row_values)
    stats = config.rows * config.merge_row
    for n in T.unroll(softmax.count(config, config.o_tiles)):
        i = softmax.element(config, n)
        row = softmax.query_row(config, softmax.row_value(config, i), lane % 4)
        channel = 16 * (i // (4 * config.columns)) + 8 * (i % 4 // 2) + lane // 4
        floats[warp, merge_at(config, row, channel)] = regs.acc_o[i]
    if lane // 4 == 0:
        for j in T.unroll(config.row_values):
            floats[warp, stats + softmax.query_row(config, j, lane)] = regs.row_max[j]
            floats[warp, stats + config.rows + softmax.query_row(config, j, lane)] = regs.row_sum[j]


@T.macro
def merge(config, floats, thread, rows, results):
    """The warps' (O, max, sum) -> o (normalised) and lse (natural log); o = 0 and lse = -inf if no token was seen.

    Only a sum of exactly 0 means that, so a NaN of live data comes out as NaN.
    """
    stats = config.rows * config.merge_row
    top, total, value, weight = (T.alloc_var("float32") for _ in range(4))
    query, head, at = (T.alloc_var("int32") for _ in range(3))
    found = T.alloc_local((2,), "float32")
    for i in T.serial(T.truncdiv(rows.count * config.head_dim - thread + (config.threads - 1), config.threads)):
        row = (thread + i * config.threads) // config.head_dim
        channel = (thread + i * config.threads) % config.head_dim
        query = queries.query(rows, row)
        head = queries.head(rows, row)
        at = combine.row_at(results, rows.seq, query, head)
        top = T.float32(softmax.NO_TOKEN)
        for w in static(config.warps):
            top = T.max(top, floats[w, stats + row])
        total = T.float32(0.0)
        value = T.float32(0.0)
        for w in static(config.warps):
            weight = T.exp2(floats[w, stats + row] - top)
            total = total + weight * floats[w, stats + config.rows + row]
            value = value + weight * floats[w, merge_at(config, row, channel)]
        if results.num_splits == 1:
            combine.with_sink(results, head, log_sum(top, total), found)
            results.out[0, 0, at, channel] = T.cast(
                combine.weighted(normalised(value, total), found[0]), config.dtype)
            if channel == 0:
                results.lse[rows.seq, head, query] = found[1]
        else:
            at = at + results.split * combine.num_rows(results)
            results.o_partial[0, 0, 0, at, channel] = normalised(value, total)
            if channel == 0:
                results.lse_partial[0, 0, 0, at] = log_sum(top, total)


def normalised(value, total):
    return T.if_then_else(total == T.float32(0.0), T.float32(0.0), value / total)


def log_sum(top, total):
    """Natural logarithm of a sum of 2^(logit - top)."""
    return T.if_then_else(total == T.float32(0.0), -T.infinity("float32"),
                          (top + T.log2(total)) * T.float32(combine.LN_2))


def own_output(config, i, v):
    """Accumulator element of row value ``v`` in channel 8i + g."""
    return 4 * (i // 2 * config.columns + v // 2) + 2 * (i % 2) + v % 2


@T.macro
def write(config, regs, rows, lane, results):
    """Write o from the registers of a warp that alone has its rows: eight lanes fill 32 bytes of a row."""
    softmax.sum_rows(regs.row_sum, config.row_values)
    query, head, at = (T.alloc_var("int32") for _ in range(3))
    found = T.alloc_local((2,), "float32")
    for v in T.unroll(config.row_values):
        row = softmax.query_row(config, v, lane % 4)
        if row < rows.count:
            query = queries.query(rows, row)
            head = queries.head(rows, row)
            at = combine.row_at(results, rows.seq, query, head)
            if results.num_splits == 1:
                combine.with_sink(results, head, log_sum(regs.row_max[v], regs.row_sum[v]), found)
                for i in T.unroll(2 * config.o_tiles):
                    results.out[0, 0, at, 8 * i + lane // 4] = T.cast(combine.weighted(
                        normalised(regs.acc_o[own_output(config, i, v)], regs.row_sum[v]), found[0]), config.dtype)
                if lane // 4 == 0:
                    results.lse[rows.seq, head, query] = found[1]
            else:
                at = at + results.split * combine.num_rows(results)
                for i in T.unroll(2 * config.o_tiles):
                    results.o_partial[0, 0, 0, at, 8 * i + lane // 4] = normalised(
                        regs.acc_o[own_output(config, i, v)], regs.row_sum[v])
                if lane // 4 == 0:
                    results.lse_partial[0, 0, 0, at] = log_sum(regs.row_max[v], regs.row_sum[v])
