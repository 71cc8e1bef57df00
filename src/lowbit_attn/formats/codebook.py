"""Codebook formats of 4, 2 and 1 bits (VQ-LLM, CQ): c = 8 / bits neighbouring channels of one token share a code of
one byte, which names the nearest of 256 entries of c fp16 values.

The entries are no part of a page: each KV head has its own for every group of channels (``codebooks``), and a side's
calls take them. K's page keeps its mean, fp16 a channel, which is taken off before the nearest entry is sought; V's
page keeps the root mean square of each token, fp16, by which its values are divided. Both make outliers harmless, for
which no entry was learned.

Names: ``cq2`` is ``kcq2vcq2``; a side may be affine, with its suffixes of uniform formats (``k4vcq2-g32-bf16``,
``kcq2v4-vg64``). The order of suffixes is -g, -vg, -bf16, -nonorm; the last drops the norms of V, whose NaN then cannot
be seen. Codes of residuals, VQ<c, 8, 2>, would be ``cq2x2``, and are refused.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from lowbit_attn import layout
from lowbit_attn.errors import LowBitAttnError
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.formats import uniform
from lowbit_attn.formats.affine import quotient, tree_sum
from lowbit_attn.formats.contract import Format, Planes, Side, part_of
from lowbit_attn.formats.spec import Kind, Plane, Scope, SideSpec

ENTRIES = order.ENTRIES
BITS = (4, 2, 1)
SINKS = 32
LARGEST = torch.finfo(torch.float16).max  # of a stored mean or norm: those beyond are clamped to it
REACH = 2.0**17  # of values that are compared with entries, which are smaller: those beyond count as this
SAFE = 2.0**60  # of values whose squares are added; a norm of more is beyond fp16 anyway
CELLS = 1 << 16  # distances that exist at once
GRAMMAR = ("cq<4|2|1>[-nonorm], k<cq4|cq2|cq1|8|4|2|1>[t]v<cq4|cq2|cq1|8|4|2|1>[-g<32|64|128>][-vg<32|64|128>][-bf16]"
           "[-nonorm], a codebook on a side at least; suffixes of groups and -bf16 for an affine side, -nonorm for V's")
PRESETS = ("kcq4vcq2", "cq2", "cq4")

_NAME = re.compile(r"cq([421])(-nonorm)?")
_PAIR = re.compile(r"k(cq)?([8421])(t?)v(cq)?([8421])"
                   r"((?:-g(?:32|64|128))?)((?:-vg(?:32|64|128))?)((?:-bf16)?)(-nonorm)?")
_RESIDUAL = re.compile(r"cq[421]x\d+|k(cq)?\d(x\d+)?v(cq)?\d(x\d+)?|VQ<\d+, ?\d+, ?\d+>", re.IGNORECASE)


class ResidualCodebookError(LowBitAttnError, KeyError):
    """A name of residual codebooks, VQ<c, 8, 2>, for which there is no format."""

    def __str__(self) -> str:
        return self.args[0]


@dataclass(frozen=True)
class Codebook(Side):
    """One byte for ``vec_size`` channels of a token; ``transposed``: of V.

    The values that come in and go out are stored ones: keys ordered and weighted as the cache's codebooks say, before
    their rotary embedding if those are. normed: V with a norm a token. Planes of a page:

        codes  u8 [128 tokens x groups of channels], in the order of ``codebook_order``
        mean   K: fp16 [head_dim], of each stored channel, in order: a row of the table of entries, read as one
        norm   V, if normed: fp16 [128], in the order of ``codebook_order.norm_index``

    A NaN or an infinity in K shows in its channel of its page of its head, in V (if normed) in its token of its head:
    in the mean or norm, since entries are finite. A finite mean or norm beyond fp16 is clamped.
    """

    kind = Kind.CODEBOOK
    vec_size: int
    transposed: bool
    normed: bool = False
    storage: torch.dtype = torch.float16

    @property
    def bits(self) -> int:
        return 8 // self.vec_size

    @property
    def layout_id(self) -> str:
        return f"cq-{order.ORDER_ID}"

    @property
    def shift(self) -> str | None:
        """Name of the plane of 16-bit values beside the codes."""
        return "mean" if not self.transposed else "norm" if self.normed else None

    def plainest(self) -> str:
        return f"cq{self.bits}{'-nonorm' * (self.transposed and not self.normed)}"

    def groups(self, head_dim: int) -> int:
        return head_dim // self.vec_size

    def entries_shape(self, num_heads_kv: int, head_dim: int) -> tuple[int, int, int, int]:
        """Shape of the entries of a layer's KV heads."""
        return num_heads_kv, self.groups(head_dim), ENTRIES, self.vec_size

    def spec(self, head_dim: int, start: int = 0) -> SideSpec:
        at, nbytes = part_of(self, head_dim)
        shared = [Plane("entries", 2 * ENTRIES * head_dim, 0, Scope.HEAD)]
        if not self.transposed:
            shared += [Plane("order", 2 * head_dim, 0, Scope.HEAD), Plane("weights", 4 * head_dim, 0, Scope.HEAD)]
        return SideSpec(self.kind, self.bits, head_dim, self.transposed, self.vec_size, "float16", start, nbytes,
                        at["codes"], at[self.shift] if self.shift else nbytes, shared=tuple(shared))

    def check(self, head_dim: int) -> None:
        if head_dim <= 0 or head_dim % self.vec_size:
            raise ValueError(f"{'V' if self.transposed else 'K'}: head_dim {head_dim} is not supported; it must be a "
                             f"multiple of {self.vec_size}, the channels of a code of {self.bits} bits")

    def plane_sizes(self, head_dim: int) -> dict[str, int]:
        sizes = {"codes": layout.PAGE_TOKENS * self.groups(head_dim)}
        if self.shift:
            sizes[self.shift] = layout.META_BYTES * (layout.PAGE_TOKENS if self.transposed else head_dim)
        return sizes

    def quantize(self, x: torch.Tensor, range_search: bool, entries: torch.Tensor | None = None) -> Planes:
        """fp32 stored values [n, 128, head_dim] -> planes; range_search changes nothing.

        entries: [heads, groups, 256, vec_size]; page i is of head i % heads, so n is a multiple of heads.
        """
        entries = self._checked(entries, x.shape[0], x.shape[2])
        planes, shifted = {}, x
        if self.shift == "mean":
            mean = stored(tree_sum((x / layout.PAGE_TOKENS).transpose(1, 2)))
            planes["mean"] = mean.contiguous().view(torch.uint8)
            shifted = x - mean.float()[:, None]
        elif self.shift == "norm":
            norm = stored(root_mean_square(x))
            planes["norm"] = _ordered(norm, order.token_of_norm).view(torch.uint8)
            shifted = x / torch.where(norm == 0, 1.0, norm.float())[..., None]
        groups = shifted.unflatten(2, (-1, self.vec_size)).unflatten(0, (-1, len(entries)))  # [pages, heads, T, G, c]
        values = groups.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)  # [heads G, pages T, c]
        codes = nearest(values, entries.detach().flatten(0, 1).to(values)).unflatten(1, (-1, layout.PAGE_TOKENS))
        codes = codes.unflatten(0, (len(entries), -1)).permute(2, 0, 3, 1).flatten(0, 1)  # [n, T, G]
        planes["codes"] = codes.flatten(1)[:, _source(codes.shape[2], self.transposed, True, x.device)]
        return planes

    def dequantize(self, planes: Planes, head_dim: int, entries: torch.Tensor | None = None) -> torch.Tensor:
        """Planes -> fp32 stored values [n, 128, head_dim]; entries: as in ``quantize``."""
        packed = planes["codes"]
        entries = self._checked(entries, packed.shape[0], head_dim)
        groups = self.groups(head_dim)
        codes = packed[:, _source(groups, self.transposed, False, packed.device)].long().unflatten(1, (-1, groups))
        head = torch.arange(len(codes), device=packed.device) % len(entries)
        group = torch.arange(groups, device=packed.device)
        values = entries.float()[head[:, None, None], group, codes].flatten(2)
        if self.shift == "mean":
            return values + planes["mean"].contiguous().view(torch.float16).float()[:, None]
        if self.shift == "norm":
            norm = _ordered(planes["norm"].contiguous().view(torch.float16), order.norm_index).float()
            return values * norm[..., None]
        return values

    def _checked(self, entries: torch.Tensor | None, pages: int, head_dim: int) -> torch.Tensor:
        heads = None if entries is None else entries.shape[0]
        wanted = self.entries_shape(heads or 1, head_dim)
        if entries is None or tuple(entries.shape) != wanted or pages % heads:
            got = "none" if entries is None else f"{list(entries.shape)} for {pages} pages"
            raise ValueError(f"entries: got {got}, supported for codes of {self.bits} bits: [heads, "
                             f"{', '.join(map(str, wanted[1:]))}], for pages of each head in turn")
        return entries


def stored(values: torch.Tensor) -> torch.Tensor:
    """Means or norms in fp16: finite ones clamped to what it holds; one NaN and one zero, so that bytes compare."""
    kept = torch.where(values.isfinite(), values.clamp(-LARGEST, LARGEST), values).to(torch.float16)
    kept = torch.where(kept.isnan(), torch.full_like(kept, float("nan")), kept)
    return torch.where(kept == 0, torch.zeros_like(kept), kept)


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Over the last axis in fp32, in the order of ``affine.tree_sum``; NaN and infinities stay."""
    total = tree_sum(x.clamp(-SAFE, SAFE) ** 2)
    found = quotient(total, x.shape[-1]).sqrt()
    return torch.where(x.isinf().any(-1) & ~found.isnan(), torch.inf, found)


def nearest(values: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The nearest entry of each value: fp32 [n, rows, c] and [n, 256, c] -> uint8 [n, rows].

    Distances are sums of squared differences in fp32, channel after channel, each operation rounded by itself; the
    lower index wins a tie. NaN and infinities count as 0, values beyond REACH as REACH.
    """
    values = values.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-REACH, REACH)
    codes = torch.empty(values.shape[:2], dtype=torch.uint8, device=values.device)
    rows = max(1, min(values.shape[1], CELLS // ENTRIES))
    some = max(1, CELLS // (ENTRIES * rows))
    for start in range(0, values.shape[0], some):
        theirs = entries[start : start + some, None].unbind(-1)
        for row in range(0, values.shape[1], rows):
            mine = values[start : start + some, row : row + rows, None].unbind(-1)
            distance = None
            for a, b in zip(mine, theirs):
                difference = a - b
                squared = difference.mul_(difference)
                distance = squared if distance is None else distance.add_(squared)
            codes[start : start + some, row : row + rows] = distance.argmin(-1)
    return codes


def _ordered(values: torch.Tensor, index_of) -> torch.Tensor:
    """16-bit values [n, 128] by ``index_of`` of their place, bit for bit."""
    places = index_of(torch.arange(values.shape[1], device=values.device))
    return values.contiguous().view(torch.int16)[:, places].contiguous().view(values.dtype)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept for all callers
def _source(groups: int, transposed: bool, packs: bool, device: torch.device) -> torch.Tensor:
    """What a packed plane takes from codes by [token, group] (packs), or these from it: index int64 [128 groups]."""
    index = torch.arange(layout.PAGE_TOKENS * groups, device=device)
    if packs:
        token, group = order.code_at(index, groups, transposed)
        return token * groups + group
    return order.code_offset(index // groups, index % groups, groups, transposed)


@lru_cache
def parse(name: str) -> Format | None:
    """The format of a name in GRAMMAR, or None if the name is not in it; ResidualCodebookError for VQ<c, 8, 2>."""
    if match := _NAME.fullmatch(name):
        bits, no_norm = int(match[1]), match[2]
        return Format(name, _side(bits, False), _side(bits, True, not no_norm), sinks=SINKS)
    match = _PAIR.fullmatch(name)
    if match and (match[1] or match[4]):
        return _pair(name, *match.groups())
    if _RESIDUAL.fullmatch(name) and ("x" in name or name[0] in "vV"):
        raise ResidualCodebookError(f"format {name!r}: codes of residuals (VQ<c, 8, 2>: two codes for the same "
                                    "channels) are not supported; supported: one code for 2, 4 or 8 channels: cq4, "
                                    "cq2, cq1")
    return None


def _pair(name: str, k_book, k_bits: str, per_token: str, v_book, v_bits: str, group: str, v_group: str, bf16: str,
          no_norm) -> Format | None:
    """The format of a name whose sides are named apart; None where a suffix fits neither side."""
    is_odd = k_book and (per_token or group or k_bits == "8") or v_book and (v_group or v_bits == "8")
    if is_odd or (no_norm and not v_book) or (bf16 and k_book and v_book):
        return None
    k, v = _side(int(k_bits), False), _side(int(v_bits), True, not no_norm)
    if not k_book:
        k = uniform.parse(f"k{k_bits}{per_token}v4{group}{bf16}").k
    if not v_book:
        v = uniform.parse(f"k4v{v_bits}{v_group}{bf16}").v
    return Format(name, k, v, sinks=SINKS)


def _side(bits: int, transposed: bool, normed: bool = False) -> Codebook | None:
    return Codebook(8 // bits, transposed, normed) if bits in BITS else None
