"""The one order of codes and metadata in a page: pure integer functions and their inverses.

Every function uses only ``+ - * // %`` on its arguments, so the same function object serves Python
ints, numpy and torch integer arrays, and the symbolic values of both DSLs. Sizes (rows, bits) are
Python ints. Nothing is imported but hashlib, for the layout id.

A page holds the codes of 128 tokens of one KV head as two matrices of 16x16 tiles:

    K: rows = tokens,   columns = channels     V: rows = channels, columns = tokens (stored transposed)

Columns are the reduction side of the matrix multiply. One 16x16 tile is the A operand of m16n8k16,
built from the 8x8 atom that ldmatrix, stmatrix and WGMMA share: lane ``4*g + t`` holds row g, columns
2t and 2t + 1. With ``row = 8*row8 + g`` and ``column = 8*col8 + 2*t + e`` inside a tile:

    word  = tile // n          n = tiles_per_word(bits); 8 bits: 2*tile + row8
    byte  = col8 + 2*e
    slot  = row8 + 2*(tile % n)    (8 bits: 0)
    bit   = 8*byte + bits*slot

so one AND on a word, and one on the word shifted right by 8, give the registers of the A operand.
Four consecutive words of a lane are one 16-byte load.
"""

import hashlib

PAGE_TOKENS = 128  # tokens in a page, at every bit-width
TILE = 16  # rows and columns of a tile
LANES = 32
WORD_BYTES = 4
BLOCK_WORDS = 4  # consecutive words of one lane: one 16-byte load
CODE_BITS = (8, 4, 2, 1)
RECORD_ALIGN = 128  # the K part and the V part of a record are rounded up to this many bytes
META_BYTES = 2  # one fp16 or bf16 value
CHANNEL_MULTIPLE = 32  # head_dim must be a multiple of this


def tiles_per_word(bits):
    """Row tiles whose codes share a word: 1, 1, 2, 4 for 8, 4, 2, 1 bits."""
    return max(1, 4 // bits)


def slots_per_byte(bits):
    return 8 // bits


def words_per_lane(rows, cols, bits):
    """32-bit words that each of the 32 lanes holds of a rows x cols matrix of codes."""
    return rows * cols * bits // (8 * WORD_BYTES * LANES)


def plane_bytes(rows, cols, bits):
    """Bytes of a rows x cols matrix of codes."""
    return rows * cols * bits // 8


def tile_of(row, col, rows):
    """Row tiles run fastest, so a run of column tiles is contiguous."""
    return (col // TILE) * (rows // TILE) + row // TILE


def code_slot(row, col, rows, bits):
    """(word, lane, byte, slot) that hold the code of one element."""
    tile = tile_of(row, col, rows)
    row8, g = (row % TILE) // 8, row % 8
    col8, t, e = (col % TILE) // 8, (col % 8) // 2, col % 2
    lane, byte = 4 * g + t, col8 + 2 * e
    if bits == 8:
        return 2 * tile + row8, lane, byte, 0 * row8
    n = tiles_per_word(bits)
    return tile // n, lane, byte, row8 + 2 * (tile % n)


def code_element(word, lane, byte, slot, rows, bits):
    """(row, column) of the code held there: the inverse of ``code_slot``."""
    if bits == 8:
        tile, row8 = word // 2, word % 2
    else:
        tile, row8 = word * tiles_per_word(bits) + slot // 2, slot % 2
    g, t = lane // 4, lane % 4
    col8, e = byte % 2, byte // 2
    row_tiles = rows // TILE
    row = (tile % row_tiles) * TILE + 8 * row8 + g
    col = (tile // row_tiles) * TILE + 8 * col8 + 2 * t + e
    return row, col


def word_offset(word, lane):
    """Byte offset, within a plane of codes, of word ``word`` of lane ``lane``."""
    return ((word // BLOCK_WORDS) * LANES + lane) * (BLOCK_WORDS * WORD_BYTES) + (word % BLOCK_WORDS) * WORD_BYTES


def word_at(offset):
    """(word, lane, byte) at a byte offset of a plane of codes: the inverse of ``word_offset``."""
    block_bytes = BLOCK_WORDS * WORD_BYTES
    block, within = offset // block_bytes, offset % block_bytes
    return (block // LANES) * BLOCK_WORDS + within // WORD_BYTES, block % LANES, within % WORD_BYTES


def channel_meta_index(channel):
    """Position of a channel among the D values of one per-channel metadata row (K per channel).

    A lane (its t) reads 16 bytes: the values of two k16 steps of the multiply.
    """
    column_tile, col8 = channel // TILE, (channel % TILE) // 8
    t, e = (channel % 8) // 2, channel % 2
    return ((column_tile // 2) * 4 + t) * 8 + (column_tile % 2) * 4 + 2 * col8 + e


def channel_at(index):
    """Channel at a position of a per-channel metadata row: the inverse of ``channel_meta_index``."""
    pair, within = index // 8, index % 8
    column_tile = (pair // 4) * 2 + within // 4
    return column_tile * TILE + 8 * ((within % 4) // 2) + 2 * (pair % 4) + within % 2


def token_meta_index(token):
    """Position of a token's (scale, zero) pair in one per-token metadata row (V; K per token).

    A lane (its g) reads 16 bytes: the pairs of four tokens.
    """
    return ((token // 32) * 8 + token % 8) * 4 + (token % 32) // 8


def token_at(index):
    """Token at a position of a per-token metadata row: the inverse of ``token_meta_index``."""
    group, j = index // 4, index % 4
    return (group // 8) * 32 + j * 8 + group % 8


def channel_meta_offset(group, is_zero, channel, head_dim):
    """Byte offset of one value of per-channel metadata: per token group all scales, then all zero-points."""
    return META_BYTES * ((2 * group + is_zero) * head_dim + channel_meta_index(channel))


def token_meta_offset(group, is_zero, token):
    """Byte offset of one value of per-token metadata: per channel group, (scale, zero) pairs."""
    return META_BYTES * ((group * PAGE_TOKENS + token_meta_index(token)) * 2 + is_zero)


def align_record(nbytes):
    return -(-nbytes // RECORD_ALIGN) * RECORD_ALIGN


def check_codes(rows, head_dim, bits, name):
    """Raise ValueError unless a matrix of codes with this many rows has this order."""
    if bits not in CODE_BITS:
        raise ValueError(f"{name}: {bits} bits is not supported; supported: {CODE_BITS}")
    if head_dim <= 0 or head_dim % CHANNEL_MULTIPLE:
        raise ValueError(f"{name}: head_dim {head_dim} is not supported; it must be a multiple of {CHANNEL_MULTIPLE}")
    span = TILE * tiles_per_word(bits)
    if rows % span:
        raise ValueError(f"{name}: {bits}-bit codes with head_dim {head_dim} are not supported; "
                         f"they need a multiple of {span} rows, got {rows}")


def _layout_id():
    """Hash of the order itself, probed on every width, so that the id cannot lag behind the functions."""
    digest = hashlib.sha256(repr((PAGE_TOKENS, RECORD_ALIGN, META_BYTES)).encode())
    for bits in CODE_BITS:
        for rows, cols in ((128, 32), (64, 128)):
            order = []
            for index in range(rows * cols):
                word, lane, byte, slot = code_slot(index % rows, index // rows, rows, bits)
                order.append((word_offset(word, lane) + byte) * slots_per_byte(bits) + slot)
            digest.update(repr((bits, rows, order)).encode())
    digest.update(repr([channel_meta_offset(1, z, c, 64) for z in (0, 1) for c in range(64)]).encode())
    digest.update(repr([token_meta_offset(1, z, t) for z in (0, 1) for t in range(PAGE_TOKENS)]).encode())
    return digest.hexdigest()[:16]


LAYOUT_ID = _layout_id()
