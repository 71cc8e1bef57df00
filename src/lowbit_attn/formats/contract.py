"""What a format is: two sides (K and V), each a list of planes that it alone can write and read.

A record is all that a reader needs of one page of one KV head: the K part rounded up to 128 bytes,
then the V part, rounded too. Everything outside a side copies bytes and understands nothing.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from lowbit_attn import layout
from lowbit_attn.formats.spec import Kind, Plane, SideSpec

Planes = dict[str, torch.Tensor]


class Side(ABC):
    """One side (K or V) of a format: both ends of its bytes."""

    bits: int
    kind: Kind | None = None  # None: of no kind that kernels know
    searches_range: bool = False  # whether range search (which changes codes, never the layout) is on by default
    weighs_queries: bool = False  # whether ``quantize`` takes query_weights, fp32 [n, head_dim], too
    orders_tokens: bool = False  # whether pages store tokens by significance, with a plane "positions", u8 [128]

    @property
    def layout_id(self) -> str:
        """Identity of the byte order of this family of sides: caches of another one cannot be read."""
        return layout.LAYOUT_ID

    def spec(self, head_dim: int, start: int = 0) -> SideSpec | None:
        """What others may know of the side's bytes, whose part of the record begins at byte ``start``.

        None: a side that only its own torch code can read, so no kernel serves it.
        """
        return None

    def plainest(self) -> str:
        """Name of the plainest format that has this side: what kernels that touch one side only are named after."""
        raise NotImplementedError(f"{type(self).__name__}: no kernels, supported: sides of the named formats")

    def largest(self) -> float:
        """Magnitude up to which all values give finite metadata and read back finite."""
        return float("inf")

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise ValueError, saying what is supported, if a page of this head_dim cannot be stored."""

    @abstractmethod
    def plane_sizes(self, head_dim: int) -> dict[str, int]:
        """Bytes of each plane of one page, in order."""

    @abstractmethod
    def quantize(self, x: torch.Tensor, range_search: bool) -> Planes:
        """fp32 values [n, 128, head_dim] -> each plane's bytes, uint8 [n, plane bytes].

        A side of kind CODEBOOK takes ``entries`` too, fp16 [heads, groups, 256, c]; so does ``dequantize``.
        """

    @abstractmethod
    def dequantize(self, planes: Planes, head_dim: int) -> torch.Tensor:
        """Each plane's bytes -> fp32 values [n, 128, head_dim]."""


@dataclass(frozen=True)
class Record:
    """The byte map of one page of one KV head."""

    k_planes: tuple[Plane, ...]
    v_planes: tuple[Plane, ...]
    v_offset: int  # the K part starts at 0
    nbytes: int


@dataclass(frozen=True)
class Format:
    """A K side and a V side under one name.

    ``window_k`` and ``window_v`` are the recent tokens that stay in 16 bit at least, multiples of 128. ``sinks`` are
    the first tokens that its authors keep in 16 bit, the default of a cache.
    """

    name: str
    k: Side
    v: Side
    window_k: int = 0
    window_v: int = 0
    sinks: int = 0

    def __post_init__(self):
        for side, window in (("window_k", self.window_k), ("window_v", self.window_v)):
            if window < 0 or window % layout.PAGE_TOKENS:
                raise ValueError(f"{side}: got {window}, supported: multiples of {layout.PAGE_TOKENS}")
        if self.window_k > self.window_v:
            raise ValueError(f"window_k: got {self.window_k}, supported: at most window_v = {self.window_v} "
                             "(K is packed first)")
        if self.orders_tokens and self.window_k != self.window_v:
            raise ValueError(f"window_k: got {self.window_k}, supported: window_v = {self.window_v}, for K and V of a "
                             "page are stored in one order")

    def __str__(self) -> str:
        return self.name

    def record(self, head_dim: int) -> Record:
        """Planes and offsets of one page of one KV head; ValueError if head_dim is not supported."""
        try:
            self.k.check(head_dim)
            self.v.check(head_dim)
        except ValueError as error:
            raise ValueError(f"format {self.name}: {error}") from None
        k_planes, k_bytes = _place(self.k.plane_sizes(head_dim), 0)
        v_planes, nbytes = _place(self.v.plane_sizes(head_dim), k_bytes)
        return Record(k_planes, v_planes, k_bytes, nbytes)

    def specs(self, head_dim: int) -> tuple[SideSpec | None, SideSpec | None]:
        """The specs of K and V in a record; ValueError if head_dim is not supported."""
        return self.k.spec(head_dim), self.v.spec(head_dim, self.record(head_dim).v_offset)

    @property
    def needs_codebooks(self) -> bool:
        """Whether a side's codes mean nothing without codebooks, which a cache then takes."""
        return Kind.CODEBOOK in (self.k.kind, self.v.kind)

    @property
    def layout_id(self) -> str:
        """Identity of the byte order of both sides."""
        return "/".join(dict.fromkeys((self.k.layout_id, self.v.layout_id)))

    @property
    def orders_tokens(self) -> bool:
        """Whether the tokens of a page are stored by significance, K and V alike; ``positions`` says where each was."""
        return self.v.orders_tokens

    @property
    def follows_queries(self) -> bool:
        """Whether what is packed depends on the queries of the steps before."""
        return self.k.weighs_queries or self.orders_tokens

    def record_bytes(self, head_dim: int) -> int:
        return self.record(head_dim).nbytes

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of a layer's KV head that all pages share: codebooks, channel order and weights."""
        return sum(plane.nbytes for spec in self.specs(head_dim) if spec for plane in spec.shared)

    def bits_per_element(self, head_dim: int, tokens: int | None = None) -> float:
        """Stored bits per K or V element, metadata and rounding of the record included.

        tokens: of all sequences of a batch, over which what their pages share is spread; None: without it.
        """
        shared = 0 if tokens is None else 8 * self.shared_bytes(head_dim) / (2 * head_dim * tokens)
        return 8 * self.record_bytes(head_dim) / (2 * layout.PAGE_TOKENS * head_dim) + shared

    def quantize(self, k: torch.Tensor, v: torch.Tensor, range_search: bool | None = None,
                 query_weights: torch.Tensor | None = None, k_entries: torch.Tensor | None = None,
                 v_entries: torch.Tensor | None = None, order: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 K and V [n, 128, head_dim] -> records uint8 [n, record bytes]; the others: as in ``write_k``.

        order: uint8 [n, 128], the tokens in the order in which they are stored, of formats that order them.
        """
        records = k.new_zeros((k.shape[0], self.record_bytes(k.shape[-1])), dtype=torch.uint8)
        if order is not None:
            k, v = reordered(k, order), reordered(v, order)
        self.write_k(records, k, range_search, query_weights, k_entries)
        self.write_v(records, v, range_search, v_entries)
        if order is not None:
            self.positions(records, k.shape[-1]).copy_(order)
        return records

    def positions(self, records: torch.Tensor, head_dim: int) -> torch.Tensor:
        """Positions in the page of the stored tokens: the plane itself, uint8 [n, 128], of formats that order them."""
        if not self.orders_tokens:
            raise ValueError(f"format {self}: its tokens are stored by position, supported: formats that order them")
        return _slices(self.record(head_dim).v_planes, records)["positions"]

    def write_k(self, records: torch.Tensor, k: torch.Tensor, range_search: bool | None = None,
                query_weights: torch.Tensor | None = None, entries: torch.Tensor | None = None) -> None:
        """Quantize fp32 K [n, 128, head_dim] into the K part of records uint8 [n, record bytes].

        query_weights: fp32 [n, head_dim], of formats whose K side weighs queries. entries: fp16 [heads, groups, 256, c]
        of a side of kind CODEBOOK; record i is of head i % heads.
        """
        extra = {} if query_weights is None else {"query_weights": query_weights}
        _write(self.k, self.record(k.shape[-1]).k_planes, records, k, range_search, **extra, **_given(entries))

    def write_v(self, records: torch.Tensor, v: torch.Tensor, range_search: bool | None = None,
                entries: torch.Tensor | None = None) -> None:
        """Quantize fp32 V [n, 128, head_dim] into the V part of records uint8 [n, record bytes]; entries: as in
        ``write_k``."""
        _write(self.v, self.record(v.shape[-1]).v_planes, records, v, range_search, **_given(entries))

    def dequantize_k(self, records: torch.Tensor, head_dim: int, entries: torch.Tensor | None = None) -> torch.Tensor:
        """Records uint8 [n, record bytes] -> fp32 K [n, 128, head_dim] as stored; entries: as in ``write_k``."""
        return self.k.dequantize(_slices(self.record(head_dim).k_planes, records), head_dim, **_given(entries))

    def dequantize_v(self, records: torch.Tensor, head_dim: int, entries: torch.Tensor | None = None) -> torch.Tensor:
        """Records uint8 [n, record bytes] -> fp32 V [n, 128, head_dim] as stored; entries: as in ``write_k``."""
        return self.v.dequantize(_slices(self.record(head_dim).v_planes, records), head_dim, **_given(entries))


def reordered(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Tokens of pages x [.., 128, head_dim] in the order uint8 [.., 128]: place i holds token order[i]."""
    return x.gather(-2, order.long()[..., None].expand_as(x))


def by_position(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Tokens of pages x [.., 128, head_dim] as stored -> by position; positions uint8 [.., 128]: where each belongs."""
    return torch.empty_like(x).scatter_(-2, positions.long()[..., None].expand_as(x), x)


def part_of(side: Side, head_dim: int) -> tuple[dict[str, int], int]:
    """(byte offset of each plane in a side's part of the record, bytes of the part)."""
    planes, nbytes = _place(side.plane_sizes(head_dim), 0)
    return {plane.name: plane.offset for plane in planes}, nbytes


def _place(sizes: dict[str, int], start: int) -> tuple[tuple[Plane, ...], int]:
    planes, offset = [], start
    for name, nbytes in sizes.items():
        planes.append(Plane(name, nbytes, offset))
        offset += nbytes
    return tuple(planes), layout.align_record(offset)


def _given(entries: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if entries is None else {"entries": entries}


def _slices(planes: tuple[Plane, ...], records: torch.Tensor) -> Planes:
    return {p.name: records[:, p.offset : p.offset + p.nbytes] for p in planes}


def _write(side: Side, planes: tuple[Plane, ...], records, x, range_search: bool | None, **extra) -> None:
    search = side.searches_range if range_search is None else range_search
    written = side.quantize(x.float(), search, **extra)
    for plane in planes:
        records[:, plane.offset : plane.offset + plane.nbytes] = written[plane.name]
