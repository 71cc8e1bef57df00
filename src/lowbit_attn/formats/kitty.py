"""Kitty: 2-bit K and V, a few channels of K boosted to 4 bits page by page (Kitty, sections 3.2 and 4.1).

A boosted channel keeps the low bits of its code in the plane of all channels and the rest in a second, compact
plane of the same width, so a reader sees two plain matrices of codes and never a mask:

    code = low + (high << bits)
    q . k_t = sum_d (q_d scale_d) low_td + 2^bits sum_s (q scale)_index[s] high_ts + sum_d q_d zero_d

The paper keeps the first 32 tokens in 16 bit beside it (``Format.sinks``), and so do caches unless they are told
otherwise (``KVCache("kitty", ..., sinks=0)``): their pages start behind the sinks.

When V is packed (section 4.3). K of a full block of 128 tokens is packed at once; V leaves a local window of 128
tokens first. The paper has two versions of that, both served:

    engine      the oldest 128 tokens of V are packed together when 128 more have left the window, so 128 to 255
                tokens of V are in 16 bit: ``window_v`` of these formats, in every KVCache
    simulator   V is quantized token by token as it leaves the window, so exactly 128 are in 16 bit:
                ``integrations.simulator.SimulatedCache(..., v_step=1)``, for measuring quality

A token's V has its own groups, so both give the same values once a token is packed.
"""

import random
import re
from dataclasses import dataclass
from functools import lru_cache

import torch

from lowbit_attn import layout
from lowbit_attn.formats import packing
from lowbit_attn.formats.affine import Quantized, dequantize_groups, largest_finite, quantize_groups, tree_sum
from lowbit_attn.formats.contract import Format, Planes, Side, part_of
from lowbit_attn.formats.spec import HighPlane, Kind, SideSpec
from lowbit_attn.formats.uniform import PerToken, dtype_name, levels

BOOST_MULTIPLE = 8  # boosted channels come in eights: half a column tile
MAX_CHANNELS = 256  # that an index of one byte can name
SEED = 20_251_123  # of the random selection: part of what a "-random" page means, so it never changes
SHARES = {"kitty": 1 / 8, "kitty-pro": 1 / 4}
SINKS = 32  # of the paper's caches
WEIGHTED = "weighted"
PLANES_VERSION = 1  # of the planes "high" and "index": another number where their bytes change
GRAMMAR = "kitty[-pro|-b<channels, a multiple of 8>][-variance|-weighted|-random][-vg<32|64|128>][-bf16]"
PRESETS = tuple(SHARES)

_NAME = re.compile(r"kitty(?:(-pro)|-b(0|[1-9]\d*))?(?:-(variance|weighted|random))?(?:-vg(32|64|128))?(-bf16)?")


def magnitude(columns: torch.Tensor) -> torch.Tensor:
    """Kitty's score: mean |k| times 128, which orders alike. [n, head_dim, 128] -> [n, head_dim]."""
    return tree_sum(columns.abs())


def variance(columns: torch.Tensor) -> torch.Tensor:
    """Variance times 128, two passes. [n, head_dim, 128] -> [n, head_dim]."""
    mean = tree_sum(columns) / layout.PAGE_TOKENS
    return tree_sum((columns - mean[..., None]) ** 2)


def fixed_random(columns: torch.Tensor) -> torch.Tensor:
    """The paper's baseline: the same random channels in every page. [n, head_dim, 128] -> [n, head_dim]."""
    generator = random.Random(SEED)
    scores = [generator.random() for _ in range(columns.shape[1])]
    return columns.new_tensor(scores).expand(columns.shape[0], -1)


def weighted(columns: torch.Tensor, query_weights: torch.Tensor) -> torch.Tensor:
    """mean |q| mean |k| times 128: what rounding a channel does to logits. [n, head_dim, 128] -> [n, head_dim].

    query_weights: fp32 [n, head_dim], the mean |q| of the query heads that read the page.
    """
    return magnitude(columns) * query_weights


SELECTIONS = {"magnitude": magnitude, "variance": variance, WEIGHTED: weighted, "random": fixed_random}


@dataclass(frozen=True)
class Boosted(Side):
    """K per channel over 128 tokens, ``boosted_bits`` bits for the channels with the largest scores, ``bits`` else.

    share: of the channels; channels: their number, in the place of the share. selection: a name in SELECTIONS;
    "weighted" needs the query_weights of a cache, and a page holds what it chose as it does for the others.
    Planes of a page, each a multiple of 16 bytes; ``high`` and ``index`` only if channels are boosted:

        codes  low ``bits`` bits of all codes: 128 tokens x head_dim, as in PerChannel
        high   the other bits of boosted codes: 128 tokens x slots, the same order; zeros in padded slots
        index  u8 [slots]: the channel of each slot, ascending; padded slots repeat the last one, so that gathering
               by index never leaves the head
        meta   scales, then zero-points of all channels, as in PerChannel

    Scores are fp32 sums over tokens in the order of ``affine.tree_sum``, without contraction, because the boosted
    set follows from comparing them: a kernel must add alike.
    """

    kind = Kind.CHANNEL
    bits: int = 2
    boosted_bits: int = 4
    share: float = SHARES["kitty"]
    channels: int | None = None
    selection: str = "magnitude"
    storage: torch.dtype = torch.float16
    searches_range: bool = True

    @property
    def high_bits(self) -> int:
        """Bits of the high plane: the narrowest order of codes that holds what ``bits`` leave over."""
        return min(b for b in layout.CODE_BITS if b >= self.boosted_bits - self.bits)

    @property
    def weighs_queries(self) -> bool:
        return self.selection == WEIGHTED

    @property
    def layout_id(self) -> str:
        return f"{layout.LAYOUT_ID}+boost{PLANES_VERSION}"

    def spec(self, head_dim: int, start: int = 0) -> SideSpec:
        at, nbytes = part_of(self, head_dim)
        return SideSpec(self.kind, self.bits, head_dim, False, layout.PAGE_TOKENS, dtype_name(self.storage), start,
                        nbytes, at["codes"], at["meta"], self._high(head_dim, at), (), self.searches_range,
                        self.weighs_queries)

    def _high(self, head_dim: int, at: dict[str, int]) -> HighPlane | None:
        """The plane of the boosted channels, whose parts are ``at`` these offsets; None if no channel is boosted."""
        if not self.boost(head_dim):
            return None
        fixed = ()
        if self.selection == "random":
            any_page = torch.zeros(1, layout.PAGE_TOKENS, head_dim, dtype=torch.float32, device="cpu")
            fixed = tuple(self.boosted_channels(any_page)[0].tolist())
        return HighPlane(self.high_bits, self.boosted_bits, self.boost(head_dim), self.slots(head_dim), at["high"],
                         at["index"], self.selection, fixed)

    def plainest(self) -> str:
        shares = {share: name for name, share in SHARES.items()}
        name = shares[self.share] if self.channels is None else f"kitty-b{self.channels}"
        selection = f"-{self.selection}" * (self.selection != "magnitude")
        return f"{name}{selection}{'-bf16' * (self.storage is torch.bfloat16)}"

    def boost(self, head_dim: int) -> int:
        """Boosted channels of a page; ValueError unless they are a multiple of 8 of at most head_dim."""
        wanted = self.share * head_dim if self.channels is None else self.channels
        if wanted % BOOST_MULTIPLE or not 0 <= wanted <= head_dim:
            what = f"a boost of {self.share:.4g} of head_dim {head_dim} is" if self.channels is None else "a boost of"
            raise ValueError(f"K: {what} {wanted:g} channels, supported: multiples of {BOOST_MULTIPLE} up to "
                             f"head_dim {head_dim} (-b0, -b8, -b16, ...)")
        return int(wanted)

    def slots(self, head_dim: int) -> int:
        """Columns of the high plane: boosted channels padded to whole 16-byte loads of column tiles."""
        words = layout.words_per_lane(layout.PAGE_TOKENS, layout.TILE, self.high_bits)
        columns = layout.TILE * max(1, layout.BLOCK_WORDS // words)
        return -(-self.boost(head_dim) // columns) * columns

    def largest(self) -> float:
        return largest_finite(self.bits, self.storage)

    def check(self, head_dim: int) -> None:
        if self.selection not in SELECTIONS:
            raise ValueError(f"K: selection {self.selection!r}, supported: {', '.join(SELECTIONS)}")
        layout.check_codes(layout.PAGE_TOKENS, head_dim, self.bits, "K")
        if not self.bits < self.boosted_bits <= layout.CODE_BITS[0]:
            raise ValueError(f"K: {self.boosted_bits} bits boosted over {self.bits}, supported: more, up to "
                             f"{layout.CODE_BITS[0]}")
        if self.boost(head_dim) and head_dim > MAX_CHANNELS:
            raise ValueError(f"K: head_dim {head_dim} with boosted channels, supported: up to {MAX_CHANNELS}")

    def plane_sizes(self, head_dim: int) -> dict[str, int]:
        slots = self.slots(head_dim)
        high = {"high": layout.plane_bytes(layout.PAGE_TOKENS, slots, self.high_bits), "index": slots}
        return {
            "codes": layout.plane_bytes(layout.PAGE_TOKENS, head_dim, self.bits),
            **(high if slots else {}),
            "meta": 2 * layout.META_BYTES * head_dim,
        }

    def boosted_channels(self, x: torch.Tensor, query_weights: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 K [n, 128, head_dim] -> channels int64 [n, boost], ascending: those with the largest scores.

        Of equal scores the lower channel wins; NaN counts as infinity. query_weights: fp32 [n, head_dim], only for
        the selection "weighted", which cannot do without.
        """
        if (query_weights is not None) != self.weighs_queries:
            raise ValueError(f"query_weights: got {None if query_weights is None else list(query_weights.shape)} for "
                             f"selection {self.selection!r}, supported: weights for {WEIGHTED!r}, None for all others")
        extra = () if query_weights is None else (query_weights,)
        scores = SELECTIONS[self.selection](x.transpose(1, 2), *extra)
        scores = torch.where(scores.isnan(), torch.inf, scores)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[:, : self.boost(x.shape[2])].sort(-1).values

    def quantize(self, x: torch.Tensor, range_search: bool, query_weights: torch.Tensor | None = None) -> Planes:
        columns, channels = x.transpose(1, 2), self.boosted_channels(x, query_weights)
        rows = channels[..., None].expand(-1, -1, layout.PAGE_TOKENS)
        plain, boosted = (quantize_groups(group, bits, self.storage, levels(bits, range_search))
                          for group, bits in ((columns, self.bits), (columns.gather(1, rows), self.boosted_bits)))
        low = plain.codes.scatter(1, rows, boosted.codes & ((1 << self.bits) - 1))
        planes = {
            "codes": packing.pack_codes(low.transpose(1, 2), self.bits),
            "meta": packing.pack_channel_meta(_replaced(plain.scale, channels, boosted.scale)[:, None],
                                              _replaced(plain.zero, channels, boosted.zero)[:, None]),
        }
        boost, slots = channels.shape[1], self.slots(x.shape[2])
        if slots:
            high = boosted.codes.new_zeros((x.shape[0], layout.PAGE_TOKENS, slots))
            high[..., :boost] = (boosted.codes >> self.bits).transpose(1, 2)
            planes["high"] = packing.pack_codes(high, self.high_bits)
            planes["index"] = torch.cat((channels, channels[:, -1:].expand(-1, slots - boost)), 1).to(torch.uint8)
        return planes

    def dequantize(self, planes: Planes, head_dim: int) -> torch.Tensor:
        codes = packing.unpack_codes(planes["codes"], layout.PAGE_TOKENS, head_dim, self.bits)
        boost, slots = self.boost(head_dim), self.slots(head_dim)
        if slots:
            high = packing.unpack_codes(planes["high"], layout.PAGE_TOKENS, slots, self.high_bits)[..., :boost]
            columns = planes["index"][:, None, :boost].long().expand(-1, layout.PAGE_TOKENS, -1)
            codes = codes.scatter_add(2, columns, high << self.bits)
        scale, zero = packing.unpack_channel_meta(planes["meta"], head_dim, self.storage)  # each [n, 1, head_dim]
        return dequantize_groups(Quantized(codes.transpose(1, 2), scale[:, 0], zero[:, 0])).transpose(1, 2)


def _replaced(values: torch.Tensor, channels: torch.Tensor, boosted: torch.Tensor) -> torch.Tensor:
    """16-bit values [n, head_dim] with those of the boosted channels in their places, bit for bit, NaN included."""
    whole = values.view(torch.int16).scatter(1, channels, boosted.view(torch.int16))
    return whole.view(values.dtype)


@lru_cache
def parse(name: str) -> Format | None:
    """The format of a name in GRAMMAR, or None if the name is not in it.

    V is 2-bit per token and packed a page later than K, so at least 128 of its tokens stay in 16 bit (section 4.3).
    """
    match = _NAME.fullmatch(name)
    if not match or int(match[2] or 0) % BOOST_MULTIPLE:
        return None
    pro, channels, selection, v_group, bf16 = match.groups()
    storage = torch.bfloat16 if bf16 else torch.float16
    k = Boosted(share=SHARES["kitty-pro" if pro else "kitty"], channels=int(channels) if channels else None,
                selection=selection or "magnitude", storage=storage)
    v = PerToken(2, transposed=True, group_size=int(v_group) if v_group else None, storage=storage)
    return Format(name, k, v, window_v=layout.PAGE_TOKENS, sinks=SINKS)
