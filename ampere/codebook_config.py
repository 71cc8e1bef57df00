"""Sizes of the decode kernel of codebook caches: what its warps walk, and where it lies in shared memory.

    tables    both codebooks of the KV head, 64 KiB each; behind the last packed page the ring of 16-bit tokens
    chunks    a ring a warp: a run of tokens' codes with the page's mean (K) or the tokens' norms (V)
    low       what fp16 leaves of q', for the product with means
"""

from dataclasses import dataclass

from lowbit_attn import layout
from lowbit_attn.ampere.config import ACCESS_BYTES, HALF_BYTES, LANES, MMA_N, TILE, DecodeConfig, Piece
from lowbit_attn.formats import Format, Kind, SideSpec
from lowbit_attn.kernels.key import SMEM_LIMIT_BYTES

BOOK_ENTRIES, BOOK_ROW_WORDS = 256, 64  # of a table: row e has entry e of all groups (of 64 channels twice)
TABLE_BYTES = BOOK_ENTRIES * BOOK_ROW_WORDS * 4
CHUNK_BYTES = 1024  # codes of a side in a slot, at most
NORM_TOKENS = 32  # whose norms lie together
SHAPES = ((12, 6), (12, 4), (12, 3), (12, 2), (8, 2))  # (warps, slots), best first
VEC_SIZES, HEAD_DIMS = (4, 2), (64, 128)


@dataclass(frozen=True)
class BookPiece(Piece):
    """K or V part whose codes name entries of ``vec_size`` channels; meta: mean or norms, if ``is_shifted``."""

    vec_size: int = 0
    head_dim: int = 0
    is_shifted: bool = True

    @property
    def num_groups(self) -> int:
        return self.head_dim // self.vec_size

    @property
    def pairs(self) -> int:
        """Registers of an entry."""
        return self.vec_size // 2

    @property
    def turns(self) -> int:
        """R of formats/codebook_order.py, of V."""
        return min(4, self.num_groups // 8)

    @property
    def runs(self) -> int:
        """S of formats/codebook_order.py, of V."""
        return self.num_groups // (8 * self.turns)


@dataclass(frozen=True)
class CodebookConfig(DecodeConfig):
    """``slots`` are those of 16-bit tokens, in the place of the tables; ``chunk_slots`` those of packed pages."""

    chunk_slots: int = 2

    @property
    def slot_accesses(self) -> int:
        return TILE * self.row_accesses

    @property
    def table_slots(self) -> int:
        """Slots of 16-bit tokens where the tables lie."""
        return 2 * TABLE_BYTES // (self.slot_accesses * ACCESS_BYTES)

    @property
    def chunk_tokens(self) -> int:
        return CHUNK_BYTES // max(piece.num_groups for piece in self.pieces)

    @property
    def chunk_tiles(self) -> int:
        return self.chunk_tokens // TILE

    @property
    def chunks(self) -> int:
        """Of a page."""
        return layout.PAGE_TOKENS // self.chunk_tokens

    def code_accesses(self, piece: BookPiece) -> int:
        return self.chunk_tokens * piece.num_groups // ACCESS_BYTES

    @property
    def mean_accesses(self) -> int:
        return self.head_dim * HALF_BYTES // ACCESS_BYTES

    @property
    def norm_accesses(self) -> int:
        return max(NORM_TOKENS, self.chunk_tokens) * HALF_BYTES // ACCESS_BYTES

    @property
    def chunk_accesses(self) -> int:
        """Of a slot."""
        return CHUNK_BYTES // ACCESS_BYTES + max(self.mean_accesses, self.norm_accesses)

    @property
    def steps(self) -> int:
        """Multiplies of k16 over the channels."""
        return self.head_dim // TILE

    @property
    def shared_bytes(self) -> int:
        chunks = self.warps * self.chunk_slots * self.chunk_accesses * ACCESS_BYTES
        return 2 * TABLE_BYTES + chunks + self.steps * LANES * 4 * HALF_BYTES

    @property
    def may_spill(self) -> bool:
        """Counters, before the first page."""
        return True


def codebook_config(fmt: Format, head_dim: int, dtype: str, target: str, rows: int, features: tuple[str, ...]):
    """The configuration of a kernel, or ValueError with what is supported."""
    k, v = fmt.specs(head_dim)
    if not (k and v and k.kind is v.kind is Kind.CODEBOOK and {k.group_size, v.group_size} <= set(VEC_SIZES)
            and head_dim in HEAD_DIMS and rows == MMA_N):
        raise ValueError(f"format {fmt}, head_dim {head_dim}, {rows} rows: supported: codebooks of 4 and 2 bits on both "
                         f"sides, head_dim 64 and 128, {MMA_N} rows")
    configs = [CodebookConfig(target, head_dim, dtype, "codebook", rows, warps, 2, _piece(k), _piece(v),
                              features=tuple(features), chunk_slots=slots) for warps, slots in SHAPES]
    fitting = [c for c in configs if c.shared_bytes <= SMEM_LIMIT_BYTES[target] and c.chunk_slots <= 2 * c.chunks]
    if not fitting:
        raise ValueError(f"format {fmt}, head_dim {head_dim}: two codebooks take {2 * TABLE_BYTES} B of shared memory, "
                         f"{target} has {SMEM_LIMIT_BYTES[target]} B a block")
    return fitting[0]


def _piece(side: SideSpec) -> BookPiece:
    return BookPiece(side.first_unit, side.nbytes // ACCESS_BYTES, side.meta // ACCESS_BYTES, side.rows, side.cols,
                     side.bits, 1, False, "float16", side.codes // ACCESS_BYTES, side.group_size, side.head_dim,
                     side.meta < side.nbytes)
