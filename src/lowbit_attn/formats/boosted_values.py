"""Boosted values: K of one width, V of two within a page, by the significance of its tokens (LeanKV, section 4).

LeanKV gives significant tokens more bits. Here each page does so by itself: of its 128 tokens the ``boosted`` most
significant ones have V at ``boosted_bits`` bits, the others at ``bits``. K has one width, so its groups stay per
channel over the whole page. A page then has one size and a sequence needs no allocator.

The tokens of a page are stored in an order of their own: the boosted ones first, each part by position, K and V alike,
so that softmax(q K) V is the same. A plane names the position of each within the page; only what asks for positions
(sliding windows, ``KVCache.gather``) reads it. Without significance the order is that of positions.

Both windows are 128: a token's significance is known from the queries that came after it, so it is packed late.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from lowbit_attn import layout
from lowbit_attn.formats import packing
from lowbit_attn.formats.affine import Quantized, dequantize_groups, largest_finite, quantize_groups
from lowbit_attn.formats.contract import Format, Planes, Side, part_of
from lowbit_attn.formats.spec import Kind, SideSpec, WidePlane
from lowbit_attn.formats.uniform import SEARCH_BITS, PerChannel, dtype_name, levels

BOOSTED = 32  # tokens of a page, a quarter
MOST_BITS = layout.CODE_BITS[0]
WINDOW = layout.PAGE_TOKENS
SINKS = 32  # tokens in 16 bit: what the quality in docs/leankv.md was measured with
PLANES_VERSION = 1  # of the planes of V: another number where their bytes change
BLOCK_BYTES = layout.BLOCK_WORDS * layout.WORD_BYTES * layout.LANES  # a run of codes is whole blocks of four words
GRAMMAR = "k<8|4|2|1>v<4|2|1>-boost[<tokens, a multiple of 16>][to<8|4|2>][-bf16]"
PRESETS = ("k4v2-boost",)

_NAME = re.compile(r"k([8421])v([421])-boost([1-9]\d*)?(?:to([842]))?(-bf16)?")


@dataclass(frozen=True)
class BoostedValues(Side):
    """V per token over head_dim: the first ``boosted`` tokens of a page at ``boosted_bits`` bits, the rest at ``bits``.

    Planes of a page; rows of codes are channels and columns are tokens, in the order of all V codes:

        boosted    head_dim x boosted codes of boosted_bits bits
        codes      head_dim x (128 - boosted) codes of ``bits`` bits
        meta       (scale, zero-point) of all 128 tokens, as in PerToken
        positions  u8 [128]: the position in the page of each stored token
    """

    kind = Kind.TOKEN
    bits: int
    boosted_bits: int
    boosted: int = BOOSTED
    storage: torch.dtype = torch.float16

    orders_tokens = True

    @property
    def layout_id(self) -> str:
        return f"{layout.LAYOUT_ID}+boostv{PLANES_VERSION}"

    @property
    def runs(self) -> tuple[tuple[str, slice, int], ...]:
        """(plane, stored tokens, bits) of each run of codes."""
        return (("boosted", slice(0, self.boosted), self.boosted_bits),
                ("codes", slice(self.boosted, layout.PAGE_TOKENS), self.bits))

    def spec(self, head_dim: int, start: int = 0) -> SideSpec:
        at, nbytes = part_of(self, head_dim)
        wide = WidePlane(self.boosted_bits, self.boosted, at["boosted"], at["positions"])
        return SideSpec(self.kind, self.bits, head_dim, True, head_dim, dtype_name(self.storage), start, nbytes,
                        at["codes"], at["meta"], wide=wide)

    def plainest(self) -> str:
        width = f"to{self.boosted_bits}" * (self.boosted_bits != 2 * self.bits)
        count = str(self.boosted) * (self.boosted != BOOSTED)
        return f"k{MOST_BITS}v{self.bits}-boost{count}{width}{'-bf16' * (self.storage is torch.bfloat16)}"

    def largest(self) -> float:
        return min(largest_finite(bits, self.storage) for _, _, bits in self.runs)

    def check(self, head_dim: int) -> None:
        for _, tokens, bits in self.runs:
            layout.check_codes(head_dim, head_dim, bits, "V")
            count = tokens.stop - tokens.start
            if layout.plane_bytes(head_dim, count, bits) % BLOCK_BYTES:
                raise ValueError(f"V: {count} tokens of {bits} bits with head_dim {head_dim} are not supported; "
                                 f"supported: runs of tokens whose codes fill whole blocks of {BLOCK_BYTES} bytes")

    def plane_sizes(self, head_dim: int) -> dict[str, int]:
        codes = {plane: layout.plane_bytes(head_dim, tokens.stop - tokens.start, bits)
                 for plane, tokens, bits in self.runs}
        return codes | {"meta": 2 * layout.META_BYTES * layout.PAGE_TOKENS, "positions": layout.PAGE_TOKENS}

    def quantize(self, x: torch.Tensor, range_search: bool) -> Planes:
        """fp32 values [n, 128, head_dim] in stored order; the plane of positions says 0 .. 127."""
        planes, scales, zeros = {}, [], []
        for plane, tokens, bits in self.runs:
            q = quantize_groups(x[:, tokens], bits, self.storage, levels(bits, range_search))
            planes[plane] = packing.pack_codes(q.codes.transpose(1, 2), bits)
            scales.append(q.scale)
            zeros.append(q.zero)
        planes["meta"] = packing.pack_token_meta(torch.cat(scales, 1)[:, None], torch.cat(zeros, 1)[:, None])
        position = torch.arange(layout.PAGE_TOKENS, dtype=torch.uint8, device=x.device)
        return planes | {"positions": position.expand(len(x), -1)}

    def dequantize(self, planes: Planes, head_dim: int) -> torch.Tensor:
        """Each plane's bytes -> fp32 values [n, 128, head_dim] in stored order."""
        scale, zero = (x[:, 0] for x in packing.unpack_token_meta(planes["meta"], self.storage))
        runs = []
        for plane, tokens, bits in self.runs:
            codes = packing.unpack_codes(planes[plane], head_dim, tokens.stop - tokens.start, bits).transpose(1, 2)
            runs.append(dequantize_groups(Quantized(codes, scale[:, tokens], zero[:, tokens])))
        return torch.cat(runs, 1)


@lru_cache
def parse(name: str) -> Format | None:
    """The format of a name in GRAMMAR, or None if the name is not in it.

    Boosted tokens have twice the bits of the others unless the name says which.
    """
    match = _NAME.fullmatch(name)
    if not match:
        return None
    k_bits, bits, boosted, boosted_bits, bf16 = match.groups()
    k_bits, bits, boosted = int(k_bits), int(bits), int(boosted or BOOSTED)
    boosted_bits = int(boosted_bits or 2 * bits)
    if boosted % layout.TILE or boosted >= layout.PAGE_TOKENS or boosted_bits <= bits:
        return None
    storage = torch.bfloat16 if bf16 else torch.float16
    k = PerChannel(k_bits, storage=storage, searches_range=k_bits <= SEARCH_BITS)
    return Format(name, k, BoostedValues(bits, boosted_bits, boosted, storage), WINDOW, WINDOW, SINKS)
