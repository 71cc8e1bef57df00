"""Codebooks attached to one layer's cache: what they do to keys and queries beside naming entries.

A cache stores keys in another order and weighted, so that a group of channels holds what one code can tell apart;
queries are ordered alike and divided by the same weights, and logits stay. Keys of ``rope="pre"`` codebooks are turned
back by their positions before they are packed, and forth when pages are read; in 16 bit they stay as they came.
"""

from dataclasses import replace
from functools import cached_property

import torch

from lowbit_attn.cache import rope
from lowbit_attn.codebooks import LayerCodebooks
from lowbit_attn.errors import LayoutMismatchError
from lowbit_attn.formats import FORMATS, Format, Kind
from lowbit_attn.formats.codebook import LARGEST
from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES
from lowbit_attn.layout import PAGE_TOKENS


class Attached:
    """Codebooks of a layer on a cache's device; ``layer``: the codebooks themselves, ``identity``: their hash.

    ValueError, naming what differs, for codebooks of another format, head_dim or number of KV heads.
    """

    def __init__(self, layer: LayerCodebooks, format: Format, num_heads_kv: int, head_dim: int,
                 device: torch.device | str):
        check(layer, format, num_heads_kv, head_dim)
        with torch.inference_mode(False):
            self.layer = _asked(layer, format).to(device)
            self.order = self.factor = self.partner = None
            if self.layer.k_entries is None:
                return
            self.order = self.layer.k_order.long()
            self.factor = self.layer.k_weights.gather(1, self.order)  # of each stored channel
            if layer.rope == "pre":
                half = head_dim // 2
                place = self.order.argsort(1)
                self.partner = place.gather(1, (self.order + half) % head_dim)
                self.sign = torch.where(self.order < half, -1.0, 1.0)
                self.freq = self.layer.rope_inv_freq[self.order % half]

    @property
    def identity(self) -> str:
        return self.layer.hash

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes

    @property
    def is_pre_rope(self) -> bool:
        return self.partner is not None

    @cached_property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What decode kernels read: (K, V, channels). For a side without a codebook the other's stands there, unread;
        without one of K, channels are zero.

        K, V: uint32 [num_heads_kv, 256, 64], row e of a table the entries e of all groups; of head_dim 64 twice, the
        second time with the halves of the groups exchanged. channels: fp32 [num_heads_kv, 4, head_dim], of each stored
        channel of K: the model's channel (its int32 bits), 1 / weight, the mean over the entries, and the largest
        distance of an entry from it. Of keys before their rotary embedding: see ``rope``.
        """
        layer = self.layer
        if self.is_pre_rope:
            return rope.table(self), kernel_table(layer.v_entries), rope.channels(self)
        with torch.inference_mode(False):
            sides = [None if x is None else kernel_table(x) for x in (layer.k_entries, layer.v_entries)]
            tables = [sides[1] if sides[0] is None else sides[0], sides[0] if sides[1] is None else sides[1]]
            if layer.k_entries is None:
                heads, groups, _, size = layer.v_entries.shape
                return *tables, torch.zeros(heads, 4, groups * size, device=tables[1].device)
            entries = layer.k_entries.float()
            mean = entries.mean(2, keepdim=True)
            reach = (entries - mean).abs().amax(2)
            channels = torch.stack((self.order.int().view(torch.float32), self.factor.reciprocal(), mean.flatten(1),
                                    reach.flatten(1)), 1)
            return *tables, channels.contiguous()

    @cached_property
    def packed_by(self) -> dict[str, torch.Tensor | None]:
        """What kernels that pack "k" or "v" take: entries fp16 [num_heads_kv, groups, 256 c]; None: it is affine."""
        sides = {side: self.entries(side) for side in "kv"}
        with torch.inference_mode(False):
            return {side: None if x is None else x.flatten(2).contiguous() for side, x in sides.items()}

    def entries(self, side: str) -> torch.Tensor | None:
        """Entries fp16 [num_heads_kv, groups, 256, c] of "k" or "v"; None: the side is affine."""
        return self.layer.k_entries if side == "k" else self.layer.v_entries

    @cached_property
    def unrotated(self) -> list[str]:
        """Why no kernel can turn these keys; empty for codebooks of keys after their rotary embedding."""
        return rope.missing(self.layer)

    def keys(self, k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Keys [..., num_heads_kv, head_dim] of the model -> stored ones, in fp32; finite ones stay so in ``dtype``."""
        if self.order is None:
            return k
        largest = torch.finfo(dtype).max
        stored = k.float().gather(-1, self.order.expand(k.shape)) * self.factor
        return torch.where(stored.isfinite(), stored.clamp(-largest, largest), stored)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [..., num_heads, head_dim] of the model -> those of stored keys, fp32."""
        if self.order is None:
            return q
        ratio = q.shape[-2] // len(self.order)
        order, factor = (x.repeat_interleave(ratio, 0) for x in (self.order, self.factor))
        return q.float().gather(-1, order.expand(q.shape)) / factor

    def turned(self, k: torch.Tensor, start: int, back: bool) -> torch.Tensor:
        """Stored keys fp32 [pages, num_heads_kv, tokens, head_dim] turned by their positions, start, start + 1, ...
        over all pages' tokens; back: to before their rotary embedding.

        Angles are exact, so that R(i + j) is R(i) R(j), as kernels have it. Those of transformers, products in fp32,
        differ by up to 2^-9 below position 65,536; what is turned back here is turned forth by the same.
        """
        if not self.is_pre_rope:
            return k
        pages, _, tokens, _ = k.shape
        position = torch.arange(start, start + pages * tokens, device=k.device).view(pages, 1, tokens, 1)
        angle = position.double() * self.freq[:, None].double()
        sine = (angle.sin() * (-self.sign if back else self.sign)[:, None]).float()
        other = k.gather(-1, self.partner[:, None].expand(k.shape))
        return k * angle.cos().float() + other * sine


def kernel_table(entries: torch.Tensor) -> torch.Tensor:
    """Entries fp16 [heads, groups, 256, c] -> uint32 [heads, 256, 64]: see ``Attached.planes``."""
    rows = entries.transpose(1, 2)  # [heads, 256, groups, c]
    if rows[0, 0].numel() * 2 < BOOK_ROW_BYTES:
        rows = torch.cat((rows, rows.roll(rows.shape[2] // 2, 2)), 2)
    return rows.flatten(2).contiguous().view(torch.int32).view(torch.uint32)


def count_clamped(cache) -> dict[str, int]:
    """How many stored means of K and norms of V are at fp16's largest magnitude, which those beyond are clamped to."""
    counts = dict.fromkeys(("mean", "norm"), 0)
    planes = {plane.name: plane for plane in (*cache.record.k_planes, *cache.record.v_planes) if plane.name in counts}
    for name, plane in planes.items():
        packed = cache.counts.n_qk if name == "mean" else cache.counts.n_qv
        pages = {page for held, count in zip(cache.book.held, packed.tolist()) for page in held[: count // PAGE_TOKENS]}
        stored = cache.pool[cache.upload(sorted(pages)).long(), :, plane.offset : plane.offset + plane.nbytes]
        counts[name] = int((stored.contiguous().view(torch.float16).abs() == LARGEST).sum())
    return counts


def attach(books, format: Format, num_heads_kv: int, head_dim: int, device) -> Attached | None:
    """What a cache keeps of its argument ``codebooks``; None for a format without. TypeError or ValueError."""
    if not format.needs_codebooks:
        if books is not None:
            raise ValueError(f"codebooks: got some for format {format}, supported: None, for its codes are affine")
        return None
    if books is None:
        raise ValueError(f"codebooks: got none for format {format}, supported: a LayerCodebooks (Codebooks.load(file)"
                         ".layer(i)); lowbit-attn calibrate makes such files")
    if not isinstance(books, LayerCodebooks):
        raise TypeError(f"codebooks: got {type(books).__name__}, supported: a LayerCodebooks (Codebooks.load(file)"
                        ".layer(i))")
    return Attached(books, format, num_heads_kv, head_dim, device)


def check(books, format: Format, num_heads_kv: int, head_dim: int) -> None:
    """Raise ValueError unless codebooks, of a layer or a model, are of this shape and of the format's sides."""
    if books.head_dim != head_dim:
        raise ValueError(f"codebooks: got head_dim {books.head_dim}, supported: {head_dim}, the cache's")
    if books.num_heads_kv != num_heads_kv:
        raise ValueError(f"codebooks: got {books.num_heads_kv} KV heads, supported: {num_heads_kv}, the cache's")
    check_format(books, format)


def check_format(books, format: Format) -> None:
    """Raise ValueError unless codebooks were made for these sides: channels of a code, means and norms."""
    try:
        theirs = FORMATS[books.format]
    except KeyError as error:
        raise ValueError(f"codebooks: made for a format that is not known here: {error}") from None
    for name, mine, made, entries in (("K", format.k, theirs.k, books.k_entries),
                                      ("V", format.v, theirs.v, books.v_entries)):
        if mine.kind is Kind.CODEBOOK and (mine != made or entries is None):
            raise ValueError(f"codebooks: made for {books.format}, whose {name} is another than that of {format}, "
                             f"supported: codebooks of {format}")
        if entries is not None and made.kind is Kind.CODEBOOK and entries.shape[-1] != made.vec_size:
            raise ValueError(f"codebooks: {name} has entries of {entries.shape[-1]} channels, supported: "
                             f"{made.vec_size}, as their format {books.format} says")


def _asked(layer: LayerCodebooks, format: Format) -> LayerCodebooks:
    """The part of codebooks that a format's sides ask for: all, but where one is affine."""
    if layer.k_entries is not None and format.k.kind is not Kind.CODEBOOK:
        layer = replace(layer, k_entries=None, k_order=None, k_weights=None, rope="post", rope_inv_freq=None)
    if layer.v_entries is not None and format.v.kind is not Kind.CODEBOOK:
        layer = replace(layer, v_entries=None)
    return layer


def identity(format: Format, attached: Attached | None) -> str:
    """What bytes of a cache mean: the layout of its format's families and the hash of its codebooks."""
    return identity_of(format, None if attached is None else attached.identity)


def identity_of(format: Format, books_hash: str | None) -> str:
    """Hash of the codebooks; None: there are none."""
    return format.layout_id if books_hash is None else f"{format.layout_id}+{books_hash[:16]}"


def check_identity(cache) -> None:
    """Raise LayoutMismatchError unless a cache's bytes are of this version's layout and of the codebooks it has."""
    if cache.layout_id != cache.format.layout_id:
        raise LayoutMismatchError(f"cache: layout id {cache.layout_id}, supported: {cache.format.layout_id}; "
                                  "pack the cache again with this version")
    found = identity(cache.format, cache.attached)
    if cache.identity != found:
        raise LayoutMismatchError(f"cache: packed as {cache.identity}, supported: {found}; its codebooks were "
                                  "exchanged after it was made; make a cache with the others and fill it anew")
