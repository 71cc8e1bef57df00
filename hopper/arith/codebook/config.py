"""Lookups in codebooks that lie in shared memory, up to 2, 4 or 8 query rows; what follows from it for a kernel."""

from dataclasses import dataclass
from types import ModuleType

from lowbit_attn import layout
from lowbit_attn.formats.codebook_order import BOOK_ROW_BYTES, ENTRIES
from lowbit_attn.hopper.common.tuning import BOOK_WARPS, MAX_WARPS, MIN_SLOTS, Rule
from lowbit_attn.hopper.warp.config import WORD, Arithmetic, SidePlan, WarpConfig

TWO, FEW, MANY = 2, 4, 8  # query rows: of a lane t // 2, or t, as on the integer path, or 2t and the next
COLUMNS = 8  # of a multiply
PACE = Rule(8, 1, 1)  # lookups bound these kernels, so who waits loses; 1 ns: hardly any
TABLE_BYTES = ENTRIES * BOOK_ROW_BYTES  # of a side's codebook, or of the products that take its place
LARGE_PART = 6 << 10  # bytes
PARTS_HEAD_DIM = 128
FACTORS = 4  # of a query row, fp32: see query.Factor
TABLE_VEC_SIZE = 4  # channels of a code of K whose products with few rows of q are looked up; else entries are
BOOK_SIDES = ("k", "v")


def uses_table(cfg: WarpConfig) -> bool:
    """Whether K's lookups give products of entries with q (VQ-LLM's K side as a table), not entries."""
    return cfg.arithmetic.has_tables and cfg.k.group_size == TABLE_VEC_SIZE and cfg.rows <= FEW


def groups(side: SidePlan) -> int:
    """Groups of channels that share a code."""
    return side.head_dim // side.group_size


def rotations(side: SidePlan) -> int:
    """R of codebook_order: steps after which a lane has asked for every group of its run."""
    return min(4, groups(side) // (8 if side.transposed else 4))


def selects(cfg: WarpConfig, side: SidePlan) -> int:
    """Selects by which a lane's words come nearer to the order of groups: each halves ``rotations_left``."""
    needed = max(1, rotations(side) // columns_a_row(cfg)).bit_length() - 1  # columns tell the others apart
    return min(cfg.arithmetic.selects[side.transposed], needed)


def rotations_left(cfg: WarpConfig, side: SidePlan) -> int:
    """Rotations that multiplies are left to tell apart, ``stride`` groups from one to the next."""
    return rotations(side) >> selects(cfg, side)


def stride(cfg: WarpConfig, side: SidePlan) -> int:
    return 1 << selects(cfg, side)


def columns_a_row(cfg: WarpConfig) -> int:
    """Columns of a multiply that a query row has, of other rotations each."""
    return COLUMNS // cfg.rows


def lane_bytes(side: SidePlan) -> int:
    """Codes of a lane in 8 tokens of K, or in 16 tokens of V."""
    return groups(side) // (2 if side.transposed else 4)


@dataclass(frozen=True)
class BookSide(SidePlan):
    """A side in codes of a codebook. nbytes, meta and the matrix of codes are of a piece of a page in its slot."""

    cut: int = 1
    parts: int = 1  # in which such a piece comes to its warp: then a piece is a part

    @property
    def pieces(self) -> int:
        return self.cut * self.parts

    @property
    def rows(self) -> int:
        return super().rows if self.transposed else layout.PAGE_TOKENS // self.pieces

    @property
    def cols(self) -> int:
        return layout.PAGE_TOKENS // self.pieces if self.transposed else super().cols

    @property
    def groups(self) -> int:
        """A page has one of what takes the place of scales and zero-points."""
        return 1

    @property
    def has_meta(self) -> bool:
        """Whether something stands beside the codes; not in V without norms."""
        return self.meta < self.nbytes

    @property
    def copies(self) -> list[tuple[int, int, int, int]]:
        """(offset in the slot, bytes, offset in the record, bytes from there to the next piece's) of a piece's runs."""
        codes, meta = self.meta, self.nbytes - self.meta
        found = [(0, codes, self.start, codes)]
        behind = (codes, meta, self.start + self.pieces * codes, meta * self.transposed)  # K's mean is of all
        return [*found, behind] if meta else found


def cut_side(side: SidePlan, cut: int, parts: int) -> BookSide:
    """Each of ``cut`` times ``parts`` pieces has K's mean, or its own tokens' norms of V."""
    count = cut * parts
    codes, meta = side.meta // count, (side.nbytes - side.meta) // (count if side.transposed else 1)
    return BookSide(**vars(side) | {"nbytes": codes + meta, "meta": codes, "cut": cut, "parts": parts})


@dataclass(frozen=True)
class BookConfig(WarpConfig):
    """Constants of a kernel whose CTAs have the codebooks of their KV head in shared memory."""

    has_clusters = False

    @property
    def parts(self) -> int:
        return self.k.parts

    @property
    def loop(self) -> ModuleType | None:
        if self.parts == 1:
            return None
        from lowbit_attn.hopper.warp import part_loop

        return part_loop

    @property
    def book_bytes(self) -> int:
        """Shared memory for the codebooks and what comes with them."""
        return len(BOOK_SIDES) * TABLE_BYTES + (self.rows * FACTORS + self.head_dim) * WORD

    @property
    def barriers(self) -> int:
        """Others, then one of each codebook."""
        return super().barriers + len(BOOK_SIDES)

    @property
    def slot_bytes(self) -> int:
        return max(super().slot_bytes, -(-self.unit_bytes // MIN_SLOTS))  # rings of two slots must hold a unit

    @property
    def smem_plan(self) -> dict[str, int]:
        buffer, *others = super().smem_plan.items()
        return dict([buffer, ("books", layout.align_record(self.book_bytes)), *others])


class Codebook(Arithmetic):
    """fp16 entries, or products with them, gathered from shared memory into operands of m16n8k16.

    Its module has steps more:
        copy_piece(cfg, side, pages, ring, warp, slot, piece_id)
                                                 start bulk copies of a piece of a page to a slot
        place_books(cfg, buffer, barriers)       where the codebooks are: buffer, barriers of the CTA
        start_books(cfg, books, rows, place)     start their copies; one thread calls it, at the kernel's start
        end_books(cfg, place)                    wait for copies that nothing else has waited for
        part_scores(cfg, piece, me, query)       products of q' and the codes of a part of a page (warp/part_loop.py)
        with_mean(cfg, piece, me, query, acc)    S of a page, of such products and the mean beside any part
        token_query(cfg, shared, ring, me)       (words, [column] factor) of q for 16-bit tokens, as B operand
    """

    has_books = True
    has_tables = True  # of K where they are faster: see uses_table
    query_width = 4  # q of stored keys in fp32
    query_shift = 0  # log2 of what q' is larger by than 1 to 2
    query_parts = 2  # weights leave no 16-bit number
    merge_pad = 8
    sass_need = ("HMMA", "UBLKCP", "PRMT", "LDSM", "MOVM", "SYNCS")

    def __init__(self, name: str, rows: int, selects: tuple[int, int] = (0, 0), has_parts: bool = True):
        """selects: of K and of V, see ``selects``; has_parts: whether a page that comes in pieces is one warp's."""
        self.name, self.rows, self.selects, self.has_parts = name, rows, selects, has_parts
        self.most_warps = MAX_WARPS if rows == MANY else BOOK_WARPS  # of a CTA: MANY need more registers

    @property
    def steps(self):
        from lowbit_attn.hopper.arith.codebook import steps

        return steps

    def row_choices(self, head_dim: int) -> list[int]:
        return [self.rows]

    def col_blocks(self, rows: int) -> int:
        return 1

    def lane_rows(self, rows: int) -> int:
        return max(1, self.rows // FEW)

    def column_row(self, t, column: int):
        return 2 * t + column if self.rows == MANY else t // (FEW // self.rows)

    def operand_row(self, g, block: int):
        return g // (COLUMNS // self.rows)

    def has_shared_query(self, cfg: WarpConfig) -> bool:
        return True

    def may_spill(self, cfg: WarpConfig) -> bool:
        """A word, where a window's masks come beside q' as an operand."""
        return cfg.has_window and not uses_table(cfg)

    def sides(self, k: SidePlan, v: SidePlan) -> tuple[BookSide, BookSide]:
        """Pages in two pieces where they are large, and few rings would fit beside the codebooks, or where S takes many
        registers; of 128 channels both come to one warp, whose ring has two slots."""
        count = 2 if self.rows == MANY or max(k.nbytes, v.nbytes) > LARGE_PART else 1
        cut, parts = (1, count) if self.has_parts and k.head_dim == PARTS_HEAD_DIM else (count, 1)
        return cut_side(k, cut, parts), cut_side(v, cut, parts)

    def config(self, *fields) -> BookConfig:
        return BookConfig(*fields)

    def pace(self, cfg: WarpConfig) -> Rule:
        return PACE


class PreRope(Codebook):
    """Entries of keys before their rotary embedding, of which K has four a head; they are turned in registers."""

    has_tables = False
    query_shift = 11  # q' is turned in fp32 and then an operand: a channel 2^-25 of its row's largest stays normal

    @property
    def steps(self):
        from lowbit_attn.hopper.arith.codebook import prerope

        return prerope

    def may_spill(self, cfg: WarpConfig) -> bool:
        """A word, where V has no norms either."""
        return super().may_spill(cfg) or not cfg.v.has_meta


CODEBOOK2, CODEBOOK = Codebook("codebook2", TWO), Codebook("codebook", FEW)
CODEBOOK8 = Codebook("codebook8", MANY, selects=(1, 1))
PREROPE, PREROPE8 = (PreRope(name, rows, has_parts=False) for name, rows in (("prerope", FEW), ("prerope8", MANY)))
