"""Where tokens of a cache of levels are, for windows: kept behind ``manage``, looked up before ``decode``.

    places   of rows whose block was moved:  order, new -> classes by position, and tokens of a level up to there
    hidden   position of the window's first token -> how many tokens of each level come before: those of the blocks
             before, and of its own block by votes, a warp a (row, KV head)

Tensors as LevelCache and levels/windows.py name them; ``fresh`` is ``new``.
"""

import tilelang.language as T

from lowbit_attn import layout
from lowbit_attn.device.level_rows import ones
from lowbit_attn.device.tilelang_kernel import TileKernel
from lowbit_attn.levels.policy import HIGH, LOW, PRUNED

PAGE, LANES = layout.PAGE_TOKENS, layout.LANES
WARPS = 4  # of a CTA of ``hidden``
LANE_TOKENS = PAGE // LANES


def level_places_kernel() -> TileKernel:
    """Rows int64 [batch] of the call of ``level_pack``; of those that ``goes`` names, classes and ``before``."""
    batch, seqs, rows, blocks, ends = (T.dynamic(name) for name in ("batch", "seqs", "cache_rows", "blocks", "ends"))

    @T.prim_func
    def places(
        which: T.Tensor((batch,), "int64"),
        goes: T.Tensor((seqs,), "int32"),
        n_out: T.Tensor((seqs,), "int32"),
        order: T.Tensor((rows, PAGE), "uint8"),
        fresh: T.Tensor((2, rows), "int32"),
        n_stage: T.Tensor((2, rows), "int32"),
        c_pack: T.Tensor((2, rows), "int32"),
        classes: T.Tensor((rows, blocks, PAGE), "uint8"),
        before: T.Tensor((2, rows, ends), "int32"),
        num_heads: T.int32,
    ):
        with T.Kernel(num_heads, batch, threads=PAGE) as (head, at):
            tx = T.get_thread_binding()
            row, v, block, kept = (T.alloc_var("int32") for _ in range(4))
            if goes[at] != 0:
                row = T.cast(which[at], "int32")
                v = row * num_heads + head
                block = T.truncdiv(n_out[row], PAGE) - 1
                kept = fresh[HIGH, v] + fresh[LOW, v]
                classes[v, block, T.cast(order[v, tx], "int32")] = T.cast(
                    T.if_then_else(tx < fresh[HIGH, v], HIGH, T.if_then_else(tx < kept, LOW, PRUNED)), "uint8")
                if tx < 2:
                    before[tx, v, block + 1] = c_pack[tx, v] + n_stage[tx, v]

    return TileKernel(places)


@T.macro
def count_before(classes, v, block, rest, lane, held, found):
    """Tokens of each level among the first ``rest`` of a block, by one warp -> found."""
    found[HIGH] = 0
    found[LOW] = 0
    for e in T.vectorized(LANE_TOKENS):
        held[e] = classes[v, block, LANE_TOKENS * lane + e]
    for e in T.unroll(LANE_TOKENS):
        for level in T.unroll(2):
            is_one = T.And(LANE_TOKENS * lane + e < rest, T.cast(held[e], "int32") == level)
            found[level] = found[level] + ones(T.cast(T.ballot(is_one), "uint32"))


def level_hidden_kernel() -> TileKernel:
    """What ``windows.hidden`` finds for each row's first position of the last query's window -> hidden int32 [2, v]."""
    seqs, rows, blocks, ends = (T.dynamic(name) for name in ("seqs", "cache_rows", "blocks", "ends"))

    @T.prim_func
    def hide(
        n_out: T.Tensor((seqs,), "int32"),
        n_tok: T.Tensor((seqs,), "int32"),
        classes: T.Tensor((rows, blocks, PAGE), "uint8"),
        before: T.Tensor((2, rows, ends), "int32"),
        hidden: T.Tensor((2, rows), "int32"),
        num_heads: T.int32,
        sinks: T.int32,
        window: T.int32,
    ):
        with T.Kernel(T.truncdiv(rows + (WARPS - 1), WARPS), threads=WARPS * LANES) as place:
            tx = T.get_thread_binding()
            v, lane, row, first, stop, block, rest = (T.alloc_var("int32") for _ in range(7))
            held, found = T.alloc_local((LANE_TOKENS,), "uint8"), T.alloc_local((2,), "int32")
            v = place * WARPS + tx // LANES
            lane = tx % LANES
            if v < rows:
                row = T.truncdiv(v, num_heads)
                first = n_tok[row] - window - sinks  # among the tokens behind the sinks
                stop = T.max(0, T.min(first, n_out[row]))
                block = T.truncdiv(stop, PAGE)
                rest = stop - PAGE * block
                found[HIGH] = 0
                found[LOW] = 0
                if rest > 0:
                    count_before(classes, v, block, rest, lane, held, found)
                if lane == 0:
                    for level in T.unroll(2):
                        hidden[level, v] = T.if_then_else(first < 0, first, before[level, v, block] + found[level])

    return TileKernel(hide)
