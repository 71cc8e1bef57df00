"""Where packed codes lie: codes by row and vector of weights, to and from the order in which kernels read them.

Lane = 4 g + t of a warp everywhere. A pack is padded with zero codes to whole tiles; what they decode to meets zeros of
x, or is cut off with the padded rows. Every ``pack_*`` has an ``unpack_*`` that undoes it, padding included.
"""

import torch
from torch.nn.functional import pad

LANES, LOAD_BYTES = 32, 16


def ceil_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad_codes(codes: torch.Tensor, rows: int, vectors: int) -> torch.Tensor:
    """codes [n, v, books] with zeros after them up to [rows, vectors, books]."""
    return pad(codes, (0, 0, 0, vectors - codes.shape[1], 0, rows - codes.shape[0]))


def pack_e8p(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 16 bits, int64 [n, k/8, stages], as uint8 [n/R, k/128, 32 lanes, 16 bytes]; R = 8 rows of two stages
    or 16 rows of one.

    Word j of a lane: pattern and sign byte of two codes of columns 128 c + 8 (4 j + t) on: first and residual code of
    row R r + g, or, of one stage, the codes of rows 16 r + g and 16 r + 8 + g.
    """
    rows, vectors, stages = codes.shape
    words = torch.stack((codes >> 8, codes & 255), -1).to(torch.uint8)  # [n, k/8, stages, 2]
    words = words.reshape(rows // (16 // stages), 2 // stages, 8, vectors // 16, 4, 4, stages, 2)
    return words.permute(0, 3, 2, 5, 4, 1, 6, 7).reshape(-1, vectors // 16, LANES, LOAD_BYTES).contiguous()


def unpack_e8p(packed: torch.Tensor, stages: int) -> torch.Tensor:
    """Codes, int64 [n, k/8, stages], of what ``pack_e8p`` made."""
    blocks, chunks = packed.shape[:2]
    words = packed.reshape(blocks, chunks, 8, 4, 4, 2 // stages, stages, 2).long()
    codes = words[..., 0] << 8 | words[..., 1]
    return codes.permute(0, 5, 2, 1, 4, 3, 6).reshape(blocks * 16 // stages, chunks * 16, stages)


def pack_gptvq(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 8 bits, [n, k/4, 1], as uint8 [n/256, k/1024, 16 row blocks, 8 w, 32 lanes, 16 bytes].

    Byte 2 j + r of a lane: row 16 b + 8 r + g of the row tile, vector 8 w + j of column tile 4 c + t (256 columns).
    """
    rows, vectors, _ = codes.shape
    codes = codes.to(torch.uint8).reshape(rows // 256, 16, 2, 8, vectors // 256, 4, 8, 8)
    return codes.permute(0, 4, 1, 6, 3, 5, 7, 2).reshape(-1, vectors // 256, 16, 8, LANES, LOAD_BYTES).contiguous()


def unpack_gptvq(packed: torch.Tensor) -> torch.Tensor:
    """Codes, int64 [n, k/4, 1], of what ``pack_gptvq`` made."""
    tiles, chunks = packed.shape[:2]
    codes = packed.reshape(tiles, chunks, 16, 8, 8, 4, 8, 2).long()
    return codes.permute(0, 2, 7, 4, 1, 5, 3, 6).reshape(tiles * 256, chunks * 256, 1)


def pack_gptvq_books(books: torch.Tensor) -> torch.Tensor:
    """Codebooks by tile, [n/256, k/256, 256 entries, 4], as [n/256, k/1024, 256 entries, 4 tiles, 4]."""
    rows, columns = books.shape[:2]
    return books.reshape(rows, columns // 4, 4, 256, 4).transpose(2, 3).contiguous()


def unpack_gptvq_books(packed: torch.Tensor) -> torch.Tensor:
    """Codebooks by tile, [n/256, k/256, 256 entries, 4], of what ``pack_gptvq_books`` made."""
    rows, chunks = packed.shape[:2]
    return packed.transpose(2, 3).reshape(rows, chunks * 4, 256, 4)


def _rotate(codes: torch.Tensor, vectors: int, back: bool) -> torch.Tensor:
    """codes [..., lanes, groups, vectors, books]: place i of a lane gets vector (i + lane) mod ``vectors``, or back.

    Lanes of a warp then read different vectors of x's table at every step, and so different banks.
    """
    lane = torch.arange(codes.shape[-4], device=codes.device)[:, None]
    step = torch.arange(vectors, device=codes.device)
    index = ((step - lane if back else step + lane) % vectors)[:, None, :, None].expand(codes.shape)
    return codes.gather(-2, index)


def pack_aqlm_2x8(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 8 bits, [n, k/8, 2 books], as uint8 [k/256, n/32, 4 loads, 32 lanes, 16 bytes].

    A lane has one row. Byte b of load j: book b mod 2 of vector (8 j + b div 2 + lane) mod 32 of the 256 columns.
    """
    rows, vectors, _ = codes.shape
    codes = _rotate(codes.to(torch.uint8).reshape(rows // 32, LANES, vectors // 32, 32, 2), 32, False)
    codes = codes.reshape(rows // 32, LANES, vectors // 32, 4, LOAD_BYTES)
    return codes.permute(2, 0, 3, 1, 4).contiguous()


def unpack_aqlm_2x8(packed: torch.Tensor) -> torch.Tensor:
    """Codes, int64 [n, k/8, 2], of what ``pack_aqlm_2x8`` made."""
    groups, blocks = packed.shape[:2]
    codes = packed.permute(1, 3, 0, 2, 4).reshape(blocks, LANES, groups, 32, 2).long()
    return _rotate(codes, 32, True).reshape(blocks * LANES, groups * 32, 2)


def pack_aqlm_2x12(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 12 bits, [n, k/8, 2 books], as int32 [k/32, n/128, 3 loads, 32 lanes, 4 words].

    A lane has rows 4 lane to 4 lane + 3 of 128, each 96 bits: four vectors in the order (i + lane) mod 4, of each the
    code of book 0 and then of book 1, lowest bits first; three words a row, twelve a lane.
    """
    rows, vectors, _ = codes.shape
    pairs = (codes[..., 0] | codes[..., 1] << 12).reshape(rows // 128, LANES, vectors, 4, 1)
    p = _rotate(pairs, 4, False)[..., 0]
    words = torch.stack((p[..., 0] | (p[..., 1] & 0xFF) << 24, p[..., 1] >> 8 | (p[..., 2] & 0xFFFF) << 16,
                         p[..., 2] >> 16 | p[..., 3] << 8), -1)  # [n/128, lane, 4 k/32, 3]
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    words = words.reshape(rows // 128, LANES, 4, vectors // 4, 3).permute(3, 0, 1, 2, 4)
    return words.reshape(vectors // 4, rows // 128, LANES, 3, 4).transpose(2, 3).contiguous()


def unpack_aqlm_2x12(packed: torch.Tensor) -> torch.Tensor:
    """Codes, int64 [n, k/8, 2], of what ``pack_aqlm_2x12`` made."""
    groups, blocks = packed.shape[:2]
    words = packed.transpose(2, 3).reshape(groups, blocks, LANES, 4, 3).long() & 0xFFFFFFFF
    w0, w1, w2 = words.permute(1, 2, 3, 0, 4).reshape(blocks, LANES, 4 * groups, 3).unbind(-1)
    pairs = torch.stack((w0 & 0xFFFFFF, w0 >> 24 | (w1 & 0xFFFF) << 8, w1 >> 16 | (w2 & 0xFF) << 16, w2 >> 8), -1)
    pairs = _rotate(pairs[..., None], 4, True).reshape(blocks * 128, groups * 4)
    return torch.stack((pairs & 0xFFF, pairs >> 12), -1)


def pack_aqlm_1x16(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 16 bits, [n, k/8, 1], as int16 [n, k/8] of the same bits: dequantized only, so in plain order."""
    codes = codes[..., 0].long()
    return torch.where(codes >= 1 << 15, codes - (1 << 16), codes).to(torch.int16)


def unpack_aqlm_1x16(packed: torch.Tensor) -> torch.Tensor:
    """Codes, int64 [n, k/8, 1], of what ``pack_aqlm_1x16`` made."""
    return (packed.long() & 0xFFFF)[..., None]
