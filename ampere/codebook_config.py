"""Sizes of the decode kernel of codebook caches: what its warps walk, and where it lies in shared memory.

    tables    both codebooks of the KV head, 64 KiB each; behind the last packed page the ring of 16-bit tokens.
              Where shared memory is small: of head_dim 64 rows without their second copy, 32 KiB each; of 128 one
              table at a time (is_phased)
    chunks    a ring a warp: a run of tokens' codes with the page's mean (K) or the tokens' norms (V)
    low       what fp16 leaves of q', for the product with means
    products  q' of kernels whose K is a table of products (codebook_table.py)
"""

from dataclasses import dataclass

from lowbit_attn import layout
from lowbit_attn.ampere.config import (
    ACCESS_BYTES,
    BOOK_ROWS,
    HALF_BYTES,
    LANES,
    MMA_N,
    TILE,
    DecodeConfig,
    Piece,
)
from lowbit_attn.formats import Format, Kind, SideSpec
from lowbit_attn.kernels.key import SMEM_LIMIT_BYTES

FLOAT_BYTES = 4
BOOK_ENTRIES, BOOK_ROW_WORDS = 256, 64  # of a table: row e has entry e of all groups (of 64 channels twice)
BOOK_ROW_BYTES = BOOK_ROW_WORDS * 4
CHUNK_BYTES = (2048, 1024)  # codes of a side in a slot, at most: 32 tokens' where 12 warps have their slots
NORM_TOKENS = 32  # whose norms lie together
SHAPES = ((12, 6), (12, 4), (12, 3), (12, 2), (8, 3), (8, 2))  # (warps, slots), best first
PHASED_WARPS = 8  # at most: as many rings of 16-bit tokens lie in one table, and S of two pages takes 64 registers
HELD_PAGES = 2  # of a warp in a phase
VEC_SIZES, HEAD_DIMS = (4, 2), (64, 128)
TABLE_VEC_SIZE = 4  # channels of a code of K whose products with few rows of q are looked up; else entries are
KEY_ROTATIONS = 4  # R of formats/codebook_order.py, of K


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
    def rotations(self) -> int:
        """R of formats/codebook_order.py, of V."""
        return min(4, self.num_groups // 8)

    @property
    def runs(self) -> int:
        """S of formats/codebook_order.py, of V."""
        return self.num_groups // (8 * self.rotations)


@dataclass(frozen=True)
class CodebookConfig(DecodeConfig):
    """``slots`` are those of 16-bit tokens, in the place of the tables; ``chunk_slots`` those of packed pages."""

    chunk_slots: int = 2
    chunk_bytes: int = CHUNK_BYTES[-1]
    row_bytes: int = BOOK_ROW_BYTES  # of a table
    is_phased: bool = False  # a few pages of K by K's table, which then gives way to V's for theirs

    @property
    def has_second_copy(self) -> bool:
        """Whether rows have entries twice, for lanes whose groups would share banks in the first copy."""
        return self.head_dim * HALF_BYTES < self.row_bytes

    @property
    def uses_table(self) -> bool:
        """Whether K's lookups give products of entries with q, not entries."""
        has_room = self.row_bytes == BOOK_ROW_BYTES and not self.is_phased
        return has_room and self.k.vec_size == TABLE_VEC_SIZE and self.rows < MMA_N

    @property
    def key_words(self) -> int:
        """Registers of what a lookup in K's table gives: an entry, or its fp16 products with all rows."""
        return self.rows // 2 if self.uses_table else self.k.pairs

    @property
    def key_columns(self) -> int:
        """Rotations of K's entries that columns of a row tell apart; more than two would be in two lanes."""
        return min(2, self.columns_a_row)

    @property
    def key_selects(self) -> int:
        """Selects that bring K's entries nearer to the order of groups: each halves the rotations that are left."""
        return (KEY_ROTATIONS // self.key_columns).bit_length() - 1

    @property
    def value_selects(self) -> int:
        """Selects of V's entries, as of K's; none beside K's table, which leaves time for more multiplies."""
        return 0 if self.uses_table else max(1, self.v.rotations // self.columns_a_row).bit_length() - 1

    @property
    def value_masks(self) -> int:
        """Rotations that V's entries are left with."""
        return self.v.rotations >> self.value_selects

    @property
    def value_tiles(self) -> int:
        """Accumulator tiles of a run's pair of channels in V: so many groups a column."""
        return max(1, self.v.rotations // self.columns_a_row)

    @property
    def packed_o_tiles(self) -> int:
        """Accumulator tiles of O of packed pages."""
        return self.v.runs * self.v.pairs * self.value_tiles

    @property
    def table_bytes(self) -> int:
        """Bytes of one side's table."""
        return BOOK_ENTRIES * self.row_bytes

    @property
    def tables_bytes(self) -> int:
        return self.table_bytes * (1 if self.is_phased else 2)

    def table_at(self, side: int) -> int:
        """Where a side's table is among both."""
        return 0 if self.is_phased else side * self.table_bytes

    @property
    def slot_accesses(self) -> int:
        return TILE * self.row_accesses

    @property
    def table_slots(self) -> int:
        """Slots of 16-bit tokens where the tables lie."""
        return self.tables_bytes // (self.slot_accesses * ACCESS_BYTES)

    @property
    def chunk_tokens(self) -> int:
        return self.chunk_bytes // max(piece.num_groups for piece in self.pieces)

    @property
    def chunk_tiles(self) -> int:
        return self.chunk_tokens // TILE

    @property
    def chunks(self) -> int:
        """Chunks of a page."""
        return layout.PAGE_TOKENS // self.chunk_tokens

    def code_accesses(self, piece: BookPiece) -> int:
        return self.chunk_tokens * piece.num_groups // ACCESS_BYTES

    @property
    def chunk_runs(self) -> int:
        """Accesses of a lane to the codes of a chunk, of the larger side."""
        return self.chunk_bytes // (ACCESS_BYTES * LANES)

    @property
    def mean_accesses(self) -> int:
        return self.head_dim * HALF_BYTES // ACCESS_BYTES

    @property
    def norm_accesses(self) -> int:
        return max(NORM_TOKENS, self.chunk_tokens) * HALF_BYTES // ACCESS_BYTES

    @property
    def chunk_accesses(self) -> int:
        """Accesses of a slot."""
        return self.chunk_bytes // ACCESS_BYTES + max(self.mean_accesses, self.norm_accesses)

    @property
    def steps(self) -> int:
        """Multiplies of k16 over the channels."""
        return self.head_dim // TILE

    @property
    def shared_bytes(self) -> int:
        chunks = self.warps * self.chunk_slots * self.chunk_accesses * ACCESS_BYTES
        query = self.rows * self.head_dim * FLOAT_BYTES if self.uses_table else 0
        return self.tables_bytes + chunks + self.steps * LANES * 4 * HALF_BYTES + query

    @property
    def query_parts(self) -> int:
        """Divided by weights, q has no 16-bit form: two numbers."""
        return 2

    @property
    def may_spill(self) -> bool:
        """Counters, before the first page."""
        return True


def codebook_config(fmt: Format, head_dim: int, dtype: str, target: str, rows: int, features: tuple[str, ...]):
    """The configuration of a kernel, or ValueError with what is supported."""
    k, v = fmt.specs(head_dim)
    if not (k and v and k.kind is v.kind is Kind.CODEBOOK and {k.group_size, v.group_size} <= set(VEC_SIZES)
            and head_dim in HEAD_DIMS and rows in BOOK_ROWS):
        raise ValueError(f"format {fmt}, head_dim {head_dim}, {rows} rows: supported: codebooks of 4 and 2 bits on "
                         f"both sides, head_dim 64 and 128, {', '.join(map(str, BOOK_ROWS))} rows")
    common = (target, head_dim, dtype, "codebook", rows)
    dense = head_dim * HALF_BYTES  # of a row's entries, once
    kinds = [{}, dict(row_bytes=dense), dict(row_bytes=dense, is_phased=True)]
    most_groups = head_dim // min(k.group_size, v.group_size)
    shapes = [(nbytes, *shape) for nbytes in CHUNK_BYTES for shape in SHAPES
              if nbytes == CHUNK_BYTES[-1] or (shape[0] == SHAPES[0][0] and nbytes <= NORM_TOKENS * most_groups)]
    configs = [CodebookConfig(*common, warps, 2, _piece(k), _piece(v), features=tuple(features), chunk_slots=slots,
                              chunk_bytes=nbytes, **kind)
               for kind in kinds for nbytes, warps, slots in shapes
               if warps <= PHASED_WARPS or not kind.get("is_phased")]
    fitting = [c for c in configs if c.shared_bytes <= SMEM_LIMIT_BYTES[target] and c.chunk_slots <= 2 * c.chunks]
    if not fitting:
        raise ValueError(f"format {fmt}, head_dim {head_dim}: {configs[-1].warps} warps need "
                         f"{configs[-1].shared_bytes} B of shared memory, {target} has {SMEM_LIMIT_BYTES[target]} B "
                         "a block")
    return fitting[0]


def _piece(side: SideSpec) -> BookPiece:
    return BookPiece(
        first_unit=side.first_unit, accesses=side.nbytes // ACCESS_BYTES, meta=side.meta // ACCESS_BYTES,
        rows=side.rows, cols=side.cols, bits=side.bits, groups=1, per_token=False, meta_dtype="float16",
        codes=side.codes // ACCESS_BYTES, vec_size=side.group_size, head_dim=side.head_dim,
        is_shifted=side.meta < side.nbytes)
