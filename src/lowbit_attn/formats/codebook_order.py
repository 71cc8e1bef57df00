"""The order of codebook codes and of the norms beside them: pure integer functions and their inverses.

A page holds one byte for each of 128 tokens and G = head_dim / c groups of channels. Where G is a power of two from 8
on (every head_dim of 64, 128 and 256) lane ``4 g + t`` of a warp owns 16 consecutive bytes of each run of 512:

    K   token = 8 b + g,              group = 4 R q + 4 ((i + g) mod R) + t    n = b G / 4 + R q + i
    V   token = 16 b + 8 j + 2 t + e, group = 8 R s + R g + (i + t) mod R      n = (b S + s) 4 R + 4 i + 2 j + e
    byte = (n // 16) 512 + 16 lane + n mod 16

with R = min(4, G / 4) for K, R = min(4, G / 8) and S = G / (8 R) for V. Lanes that look up one byte position at once
then ask for different groups, which lie in different banks of shared memory, and the rotation by g (by t) is undone in
the rows of the query operand (of the weights). Other head_dims (96, ...) have the plain order ``token G + group``.

Every function uses only ``+ - * // %`` on its arguments, as in layout.py.
"""

import hashlib

from lowbit_attn.layout import PAGE_TOKENS

LANES, RUN = 32, 16  # lanes of a warp, and bytes that a lane loads at once
FEWEST_GROUPS = 8  # of the order by lanes
ENTRIES = 256  # of a codebook
BOOK_ROW_BYTES = 256  # of a row of the table of entries as kernels have it: one entry of every group
SHRINK_LOG2 = -2  # of keys that kernels turn: one whose channels are two clamped means stays finite in fp16


def is_by_lanes(groups):
    """Whether pages with so many groups of channels have the order by lanes, which register kernels read."""
    return groups >= FEWEST_GROUPS and groups & (groups - 1) == 0


def code_offset(token, group, groups, transposed):
    """Byte of the code of one token and group; transposed: of V."""
    if not is_by_lanes(groups):
        return token * groups + group
    return (_v_offset if transposed else _k_offset)(token, group, groups)


def code_at(offset, groups, transposed):
    """(token, group) at a byte: the inverse of ``code_offset``."""
    if not is_by_lanes(groups):
        return offset // groups, offset % groups
    return (_v_code if transposed else _k_code)(offset, groups)


def norm_index(token):
    """Position of a token among the 128 norms: a lane (its t) reads tokens 2t, 2t + 1 of four eights in 16 bytes."""
    return token // 32 * 32 + token % 8 // 2 * 8 + token % 32 // 8 * 2 + token % 2


def token_of_norm(index):
    """Token at a position: the inverse of ``norm_index``."""
    return index // 32 * 32 + index % 8 // 2 * 8 + index % 32 // 8 * 2 + index % 2


def _byte(lane, n):
    return n // RUN * (LANES * RUN) + lane * RUN + n % RUN


def _lane_at(offset):
    """(lane, n) at a byte: the inverse of ``_byte``."""
    return offset % (LANES * RUN) // RUN, offset // (LANES * RUN) * RUN + offset % RUN


def _k_offset(token, group, groups):
    turns = min(4, groups // 4)
    g, t = token % 8, group % 4
    i = (group % (4 * turns) // 4 + turns - g % turns) % turns
    return _byte(4 * g + t, token // 8 * (groups // 4) + group // (4 * turns) * turns + i)


def _k_code(offset, groups):
    turns = min(4, groups // 4)
    lane, n = _lane_at(offset)
    g, t, within = lane // 4, lane % 4, n % (groups // 4)
    q, i = within // turns, within % turns
    return n // (groups // 4) * 8 + g, 4 * turns * q + 4 * ((i + g) % turns) + t


def _v_offset(token, group, groups):
    turns = min(4, groups // 8)
    runs = groups // (8 * turns)
    t, g = token % 8 // 2, group % (8 * turns) // turns
    i = (group % turns + turns - t % turns) % turns
    n = (token // 16 * runs + group // (8 * turns)) * 4 * turns + 4 * i + token % 16 // 8 * 2 + token % 2
    return _byte(4 * g + t, n)


def _v_code(offset, groups):
    turns = min(4, groups // 8)
    runs = groups // (8 * turns)
    lane, n = _lane_at(offset)
    g, t, run, within = lane // 4, lane % 4, n // (4 * turns), n % (4 * turns)
    token = run // runs * 16 + within % 4 // 2 * 8 + 2 * t + within % 2
    return token, run % runs * 8 * turns + turns * g + (within // 4 + t) % turns


def _order_id():
    """Hash of the order itself, probed for numbers of groups of each kind, so that the id cannot lag behind it."""
    digest = hashlib.sha256()
    tokens = (*range(32), PAGE_TOKENS - 1)
    for groups in (8, 16, 24, 64):
        for transposed in (False, True):
            order = [code_offset(token, group, groups, transposed) for token in tokens for group in range(groups)]
            digest.update(repr((groups, transposed, order)).encode())
    digest.update(repr([norm_index(token) for token in range(PAGE_TOKENS)]).encode())
    return digest.hexdigest()[:16]


ORDER_ID = _order_id()
