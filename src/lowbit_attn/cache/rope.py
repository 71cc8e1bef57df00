"""What decode kernels read of K codebooks of keys before their rotary embedding, and which codebooks they can read.

A kernel turns entries by a table of positions within a page, and queries by the page's first position. A lane has
channel c of groups y and y + groups / 2 of a token: these must be channels that turn together, d and d + head_dim / 2.
And it has copies of a codebook of its own t, so groups SHARED apart must share theirs (``Recipe.k_shared``).
"""

import math

import torch

from lowbit_attn.codebooks import Codebooks, LayerCodebooks
from lowbit_attn.codebooks.learn import SHARED
from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES, SHRINK_LOG2
from lowbit_attn.layout import PAGE_TOKENS

VEC_SIZE, HEAD_DIM = 4, 128  # of the codes that the kernels turn
COPIES = 4  # of an entry in a row: with SHARED codebooks, one for each lane of half a warp
TURN_BITS = 32  # of the part of a turn that a position is


def missing(books: LayerCodebooks | Codebooks) -> list[str]:
    """Reasons why no kernel turns keys of such codebooks, of a layer or of a model; empty for those of rope="post"."""
    found = [] if books.rope != "pre" else _missing(books)
    return [f"codebooks of keys before their rotary embedding: {reason}; path='reference', any device"
            for reason in found]


def _missing(books: LayerCodebooks | Codebooks) -> list[str]:
    groups, vec_size = books.k_entries.shape[-3], books.k_entries.shape[-1]
    order = books.k_order.long()
    head_dim = groups * vec_size
    if (vec_size, head_dim) != (VEC_SIZE, HEAD_DIM):
        return [f"got codes of {vec_size} channels at head_dim {head_dim}, supported: {VEC_SIZE} at {HEAD_DIM}"]
    first, second = order.chunk(2, -1)
    if not bool(((first + head_dim // 2) % head_dim == second).all()):
        return ["got channels that turn together in any groups, supported: in groups half a head apart "
                "(calibrate --k-shared)"]
    if not bool((books.k_entries.unflatten(-3, (-1, SHARED)) == books.k_entries[..., None, :SHARED, :, :]).all()):
        return [f"got one for each group of channels, supported: {SHARED} a head (calibrate --k-shared)"]
    return []


def table(attached) -> torch.Tensor:
    """uint32 [num_heads_kv, 256, 64]: row e has entry e / 4 of codebooks 0, 1, 2, 3, in 4 copies, then 128 bytes of
    cosines and sines.

    These are, in order, of a pair of groups i of four, of a token of a page, of a lane's t: fp16 cosines of channels 0
    to 3 of group 4 i + t, then their sines, as (x cos - y sin, y cos + x sin) wants them for x of that group and y of
    the group half a head on.
    """
    layer = attached.layer
    heads, groups, entries, size = layer.k_entries.shape
    copies = (layer.k_entries[:, :SHARED] * 2.0**SHRINK_LOG2).transpose(1, 2).flatten(2).repeat(1, 1, COPIES)
    token = torch.arange(PAGE_TOKENS, device=copies.device, dtype=torch.float64)
    half = groups * size // 2
    angle = token[:, None] * attached.freq[:, None, :half].double()  # [heads, 128, half]
    sine = angle.sin() * -attached.sign[:, None, :half]
    both = torch.stack((angle.cos(), sine), -1).unflatten(2, (-1, 4, size))  # [heads, 128, i, t, c, 2]
    turns = both.permute(0, 2, 1, 3, 5, 4).reshape(heads, entries, -1).half()
    rows = torch.cat((copies, turns), 2)
    assert rows.shape[2] * 2 == BOOK_ROW_BYTES
    return rows.contiguous().view(torch.int32).view(torch.uint32)


def channels(attached) -> torch.Tensor:
    """fp32 [num_heads_kv, 4, head_dim]: as Attached.planes, but in place of the mean entry how far the channel turns at
    each position, int32 bits: parts of 2^32 of a turn, with the sign of the sines in ``table``; and zeros."""
    part = attached.freq.double() / (2 * math.pi) * 2.0**TURN_BITS * -attached.sign
    part = part.round().long().remainder(1 << TURN_BITS)
    part = torch.where(part < 1 << TURN_BITS - 1, part, part - (1 << TURN_BITS)).int()
    planes = (attached.order.int().view(torch.float32), attached.factor.reciprocal(), part.view(torch.float32),
              torch.zeros_like(attached.factor))
    return torch.stack(planes, 1).contiguous()
