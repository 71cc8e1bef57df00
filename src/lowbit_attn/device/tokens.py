"""Blocks of 16-bit tokens in shared memory: coalesced copies in, ldmatrix fragments out, free of bank conflicts."""

import tilelang.language as T

ACCESS_BYTES = 16  # one cp.async, one row of an ldmatrix
ACCESS_HALVES = 8
MATRICES = 4  # 8 x 8 matrices of one ldmatrix


def token_strides(name: str, head_dim: int) -> tuple:
    """Strides of 16-bit tokens [rows, num_heads_kv, slots, head_dim], where each (row, KV head) lies anywhere."""
    return T.dynamic(f"{name}_row", "int64"), T.dynamic(f"{name}_head", "int64"), head_dim, 1


def in_whole_accesses(tokens):
    """Tokens with strides that are seen to be whole accesses, without which 16-byte stores fall apart."""
    row, head = (stride // ACCESS_HALVES * ACCESS_HALVES for stride in tokens.strides[:2])
    return T.view(tokens, strides=(row, head, *tokens.strides[2:]))


def token_place(index, row_accesses):
    """(row of the tile, 16-byte access of the row) of a copy of 16-bit tokens."""
    return index // row_accesses, index % row_accesses


def ring_slot(slot, slots):
    """Slot of a ring, for one that may lie a round ahead."""
    return T.if_then_else(slot < slots, slot, slot - slots)


def slot_of(row, x, page, head, first, is_ring, order):
    """Where row ``row`` of a tile of tokens lies in x [page, head]: see ``load_tokens``."""
    token = first + (row if order is None else T.cast(order[page, head, row], "int32"))
    return ring_slot(token, x.shape[2]) if is_ring else token


def swizzled(row, access, row_accesses):
    """Where one 16-byte access of a row of 16-bit data sits in a slot.

    Eight consecutive rows, which one phase of ldmatrix reads at the same column, fall into eight groups of banks. Rows
    of 12 accesses (head_dim 96) start in two of them by turns, so four places within a group of four do.
    """
    return row * row_accesses + (access ^ (row % 8 if row_accesses % 8 == 0 else row // 2 % 4))


def loading_threads(threads: int, count: int, row_accesses: int) -> int:
    """Threads that copy ``count`` rows: as many as keep their access of the row, so that one address serves them all.

    Rows of 12 accesses (head_dim 96) take 192 of 256 threads. With all, every copy of a thread has a row and an access
    of its own, and the compiler holds them in registers throughout the loop over blocks of tokens.
    """
    return max(n for n in range(row_accesses, threads + 1, row_accesses) if count * row_accesses % n == 0)


@T.macro
def load_tokens(x, page, head, first, count, row_accesses, tile, thread, threads, is_ring=False, order=None):
    """Rows first .. first + count of x [page, head] -> shared tile [accesses, 8], by ``threads`` threads; waits.

    The caller synchronises these threads. is_ring: the row after the last one of x is its first. order: uint8 [pages,
    heads, count], row i of the tile is row first + order[page, head, i] of x.
    """
    loaders = loading_threads(threads, count, row_accesses)
    if thread < loaders:
        for i in T.unroll(count * row_accesses // loaders):
            row, access = token_place(i * loaders + thread, row_accesses)
            T.ptx_cp_async(T.access_ptr(tile[swizzled(row, access, row_accesses), 0], "w", ACCESS_HALVES),
                           T.access_ptr(x[page, head, slot_of(row, x, page, head, first, is_ring, order),
                                          access * ACCESS_HALVES], "r", ACCESS_HALVES),
                           ACCESS_HALVES)
    T.ptx_commit_group()
    T.ptx_wait_group(0)


@T.macro
def load_fragment(transposed, tile, place, pairs, first):
    """Four 8 x 8 matrices, whose rows the lanes name by their ``place``, -> eight of a lane's pairs from 2 * first on.

    Lane 4g + t gets row g, columns 2t and 2t + 1 of each, or, transposed, rows 2t and 2t + 1, column g.
    """
    T.ptx_ldmatrix(T.bool(transposed), MATRICES, T.access_ptr(tile[place, 0], "r", ACCESS_HALVES),
                   T.access_ptr(pairs[2 * first], "w", 2 * MATRICES))
