"""The contract of one side (K or V) of a format: all that kernels, packers, dispatch and support may know of it.

A Side (contract.py) writes and reads the bytes in torch. Its SideSpec says in numbers where the same bytes lie, so that
code elsewhere asks for ``kind``, ``bits`` or ``high`` and never for a class of format.
"""

from dataclasses import dataclass
from enum import StrEnum

from lowbit_attn import layout


class Kind(StrEnum):
    """What one set of numbers (scale and zero-point, or one codebook) is for."""

    CHANNEL = "per channel"  # one channel over consecutive tokens
    TOKEN = "per token"  # one token over consecutive channels
    CODEBOOK = "codebook"  # runs of channels of one token, by the entry they are nearest to


class Scope(StrEnum):
    """What a plane belongs to, and so how often it is stored."""

    PAGE = "page"  # in the record of a page and KV head
    HEAD = "head"  # once for each KV head of a layer
    LAYER = "layer"
    SEQUENCE = "sequence"  # once for each sequence of a layer


@dataclass(frozen=True)
class Plane:
    """A named run of bytes; ``offset`` counts from the start of the record, or of what its scope stores."""

    name: str
    nbytes: int
    offset: int = 0
    scope: Scope = Scope.PAGE


@dataclass(frozen=True)
class HighPlane:
    """The codes of a few channels have more bits than the others' (Kitty, section 3.2): the rest of them, compact.

    bits: of this plane's codes, which stand above the ``bits`` of all channels. code_bits: of a whole code. channels:
    how many have one; slots: columns of the plane, the channels padded to whole loads. codes, index: byte offsets in
    the side's part of the record. selection: how a page chooses its channels; fixed: those, where they follow from
    head_dim alone, else empty.
    """

    bits: int
    code_bits: int
    channels: int
    slots: int
    codes: int
    index: int
    selection: str
    fixed: tuple[int, ...] = ()


@dataclass(frozen=True)
class SideSpec:
    """One side at one head_dim, in bytes and counts.

    transposed: the matrix of codes has channels as rows and tokens as columns (V), else tokens as rows (K).
    group_size: tokens (per channel) or channels (per token) that share a scale and a zero-point. storage: dtype of
    these, by name. start, nbytes: the side's part of the record. codes, meta: offsets of the planes in that part.
    shared: planes beyond the page's. weighs_queries: whether packing takes the mean |q| of each channel.
    """

    kind: Kind
    bits: int
    head_dim: int
    transposed: bool
    group_size: int
    storage: str
    start: int
    nbytes: int
    codes: int
    meta: int
    high: HighPlane | None = None
    shared: tuple[Plane, ...] = ()
    searches_range: bool = False
    weighs_queries: bool = False

    @property
    def rows(self) -> int:
        """Rows of the matrix of codes."""
        return self.head_dim if self.transposed else layout.PAGE_TOKENS

    @property
    def cols(self) -> int:
        return layout.PAGE_TOKENS if self.transposed else self.head_dim

    @property
    def row_tiles(self) -> int:
        """16x16 tiles along the rows."""
        return self.rows // layout.TILE

    @property
    def col_tiles(self) -> int:
        return self.cols // layout.TILE

    @property
    def groups(self) -> int:
        """Groups of metadata: of a channel's tokens, or of a token's channels."""
        return (layout.PAGE_TOKENS if self.kind is Kind.CHANNEL else self.head_dim) // self.group_size

    @property
    def is_per_token(self) -> bool:
        return self.kind is Kind.TOKEN

    @property
    def steps(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def first_unit(self) -> int:
        """Where the part starts, in units of layout.RECORD_ALIGN bytes."""
        return self.start // layout.RECORD_ALIGN
