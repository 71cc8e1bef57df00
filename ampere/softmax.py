"""Online softmax of one warp on S^T accumulators, in base 2 and fp32.

Lane 4g + t holds, of each 16-token tile, tokens g and g + 8 of query rows 2t and 2t + 1 (accumulator 2*half + j).
Row maxima are equal in the eight lanes of a row; row sums stay per lane until the end.
"""

import tilelang.language as T

from lowbit_attn.ampere.config import static

NO_TOKEN = -1e30  # row maximum before the first token: finite, so that -inf - maximum is never NaN
ROW_LANES = (4, 8, 16)  # lanes that share a query row differ in these bits


@T.macro
def start_row(row_max, row_sum):
    for j in (0, 1):
        row_max[j] = T.float32(NO_TOKEN)
        row_sum[j] = T.float32(0.0)


@T.macro
def scale_scores(acc_s, tiles, softmax_scale_log2):
    """Scores -> base-2 logits, before the maximum is taken: a negative softmax_scale is legal."""
    for i in static(4 * tiles):
        acc_s[i] = acc_s[i] * softmax_scale_log2


@T.macro
def mask_scores(acc_s, tiles, live, g):
    """-inf for tokens from ``live`` on."""
    for i in static(4 * tiles):
        if 16 * (i // 4) + 8 * (i % 4 // 2) + g >= live:
            acc_s[i] = -T.infinity("float32")


@T.macro
def online_softmax(acc_s, tiles, acc_o, o_tiles, row_max, row_sum, new_max, rescale):
    """Logits -> probabilities in place; O and the sums follow the maximum when any lane's moved."""
    for j in (0, 1):
        new_max[j] = row_max[j]
    for i in static(4 * tiles):
        new_max[i % 2] = T.max(new_max[i % 2], acc_s[i])
    for distance in ROW_LANES:
        for j in (0, 1):
            new_max[j] = T.max(new_max[j], T.shfl_xor(new_max[j], distance))
    if T.any_sync(T.Or(new_max[0] > row_max[0], new_max[1] > row_max[1])) != 0:
        for j in (0, 1):
            rescale[j] = T.exp2(row_max[j] - new_max[j])
            row_sum[j] = row_sum[j] * rescale[j]
            row_max[j] = new_max[j]
        for i in static(4 * o_tiles):
            acc_o[i] = acc_o[i] * rescale[i % 2]
    for i in static(4 * tiles):
        acc_s[i] = T.exp2(acc_s[i] - row_max[i % 2])
        row_sum[i % 2] = row_sum[i % 2] + acc_s[i]


@T.macro
def finish_sum(row_sum):
    """Sums of the lanes of a row -> the row's sum in all of them."""
    for distance in ROW_LANES:
        for j in (0, 1):
            row_sum[j] = row_sum[j] + T.shfl_xor(row_sum[j], distance)
