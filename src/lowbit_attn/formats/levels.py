"""Levels: an ordered pair of formats for the tokens of a sequence, the significant ones high, the others low (LeanKV).

A page of a level holds 128 tokens of one KV head in any order, as a record of the level's format: K keeps its groups
per channel over the page. So a level is any format whose pages can be read without the others'; what a format asks for
beyond its page (windows, query weights, an order of its own) it does not get here.
"""

import re
from dataclasses import dataclass
from functools import lru_cache

from lowbit_attn.formats import FORMATS
from lowbit_attn.formats.contract import Format
from lowbit_attn.formats.spec import Kind

HIGH_SHARE = 25  # percent
SINKS = 32
PER_TOKEN_BITS = 8  # of K per token, at least
GRAMMAR = "<format>+<format>[-high<percent>]"
PRESETS = {"lean": "k8v4+k4v2", "lean-low": "k4v4+kitty-pro"}

_NAME = re.compile(r"([^+]+)\+([^+]+?)(?:-high([1-9]\d?))?")


@dataclass(frozen=True)
class Levels:
    """A pair of formats under one name, and the percentage of tokens that are stored in the high one by default."""

    name: str
    high: Format
    low: Format
    percent: int = HIGH_SHARE

    orders_tokens = True  # by significance: calls bring queries
    needs_codebooks = False
    sinks = SINKS

    def __post_init__(self):
        for level, fmt in (("high", self.high), ("low", self.low)):
            if fmt.orders_tokens or fmt.k.weighs_queries:
                raise ValueError(f"{level}: got format {fmt}, which orders tokens or weighs queries itself, supported: "
                                 "formats whose pages stand alone")
            if fmt.needs_codebooks:
                raise ValueError(f"{level}: got format {fmt}, whose codes mean nothing without codebooks, supported: "
                                 "formats whose pages stand alone")
            if fmt.k.kind is Kind.TOKEN and fmt.k.bits < PER_TOKEN_BITS:
                raise ValueError(
                    f"{level}: got format {fmt}, K per token of {fmt.k.bits} bits, supported: K per channel, or per "
                    "token of 8 bits. Some channels of keys have offsets, which a token's group spreads over all its "
                    "channels: with K of 4 bits per token, k8v4+k4v2 took Qwen2.5-Coder-1.5B from perplexity 4.45 to "
                    "38.6, and its recall from 1.0 to 0.45")

    def __str__(self) -> str:
        return self.name

    @property
    def formats(self) -> tuple[Format, Format]:
        return self.high, self.low

    @property
    def pair(self) -> str:
        """The name without a preset's or a share, as packing has neither."""
        return f"{self.high}+{self.low}"

    @property
    def layout_id(self) -> str:
        return "/".join(dict.fromkeys(fmt.layout_id for fmt in self.formats))

    def check(self, head_dim: int) -> None:
        """Raise ValueError unless both formats serve head_dim and the high one has the larger records."""
        high, low = (fmt.record_bytes(head_dim) for fmt in self.formats)
        if high <= low:
            raise ValueError(f"levels {self}: records of {high} bytes high and {low} low at head_dim {head_dim}, "
                             "supported: the larger records first")

    def bits_per_element(self, head_dim: int) -> float:
        """Stored bits per element of packed tokens at the default share, metadata included."""
        high, low = (fmt.bits_per_element(head_dim) for fmt in self.formats)
        return (self.percent * high + (100 - self.percent) * low) / 100


@lru_cache
def parse(name: str) -> Levels | None:
    """The levels of a preset or of a name in GRAMMAR, or None if it is none; ValueError for a pair that is refused."""
    match = _NAME.fullmatch(PRESETS.get(name, name))
    if not match or match[1] not in FORMATS or match[2] not in FORMATS:
        return None
    return Levels(name, FORMATS[match[1]], FORMATS[match[2]], int(match[3] or HIGH_SHARE))
