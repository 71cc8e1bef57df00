"""Everything a warp's kernel fixes at compile time: code positions, warps, ring slots, shared memory. Without the DSL.

An ``Arithmetic`` says how packed pages are multiplied (arith/), a ``Schedule`` how warps get their work (schedule/).
Neither is known here: both come with a configuration. Their steps in kernels are ``Arithmetic.steps`` and
``Schedule.kernel``; plan.py makes configurations.

A ``SidePlan`` says where a lane finds a side's codes and metadata; positions come from ``layout`` and ``registers``.
"""

from dataclasses import dataclass, replace
from types import ModuleType

from lowbit_attn import layout, registers
from lowbit_attn.formats.spec import SideSpec
from lowbit_attn.hopper.common import tuning
from lowbit_attn.hopper.common.tuning import MAX_WARPS, MIN_SLOTS, PAGE_WARPS, Rule
from lowbit_attn.registers import WIDE_HEAD_DIM

TARGET = "sm_90a"
WARP = 32
WORD = 4  # bytes
META_BYTES = 8  # of one access to metadata
COLUMNS = 8  # query rows of one m16n8k16
UNIT_TOKENS = 16  # 16-bit tokens that a warp takes at a time
PLAN_WORDS = 20  # of shared memory in which a warp keeps its rows and its walk, in whole accesses
PIECES = 2  # of a page: the K part, then the V part
ROW_TILES = layout.PAGE_TOKENS // layout.TILE  # of K
BOOST_BITS = 2  # of both planes of boosted K: rows then have the same powers, and S takes both
BOOST_WEIGHT = float(1 << BOOST_BITS)  # of a high code


class Arithmetic:
    """How a warp multiplies packed pages; cfg: the WarpConfig that has it. One instance of each subclass.

    steps, functions of a module, in the order in which a kernel takes them:
        prefetch_query(cfg, q, rows, me, thread)     start reads of q; its words, or None if they come later
        load_query(cfg, call, rows, me, early)       q's words of this lane; early: of ``prefetch_query``
        prepare_query(cfg, words, scale_log2, me, shared, channels)
                                                     the operand of ``scores``; a barrier of the CTA must follow
        scores(cfg, piece, me, query, tile=None)     S of a page, or of one row tile of it
        before_values(cfg, state, maxima)            while V is on its way
        add_values(cfg, piece, me, state, p, maxima, arrival)
                                                     O += P V of a page
        finish(cfg, state, me, ring)                 after the last page: O in its own units
    and, for schedules whose warps have queries of their own, in place of ``prepare_query``:
        prepare_own_query(cfg, words, scale_log2, me, shared, channels)
                                                     the warp's own operand; a barrier of the warp must follow
    """

    name: str
    query_width = 2  # bytes of an element of q's operand in shared memory
    merge_pad = 4  # floats between query rows of O at the merge, beside a row, so that writes have no bank conflict
    query_parts = 1  # 16-bit numbers whose sum is an element of q for 16-bit tokens
    has_books = False  # codebooks of the KV head are in shared memory: see arith/codebook/config.py
    has_true_scale = False  # O is in its own units all along, and zero-points join it at the merge
    sass_need: tuple[str, ...]

    @property
    def steps(self) -> ModuleType:
        """The module of the steps above; imports the DSL."""
        raise NotImplementedError

    def row_choices(self, head_dim: int) -> list[int]:
        """What ``rows`` may be."""
        raise NotImplementedError

    def col_blocks(self, rows: int) -> int:
        """Blocks of 8 columns: the n of the multiplies."""
        raise NotImplementedError

    def lane_rows(self, rows: int) -> int:
        """Query rows that a lane has in its accumulators."""
        raise NotImplementedError

    def column_row(self, t, column: int):
        """Query row of accumulator column ``column`` of a lane: its ``lane_rows`` columns, block by block."""
        raise NotImplementedError

    def operand_row(self, g, block: int):
        """Query row in column g of a B operand."""
        raise NotImplementedError

    def has_shared_query(self, cfg) -> bool:
        """Whether q's operand is read from shared memory for every page instead of staying in registers."""
        raise NotImplementedError

    def sides(self, k: "SidePlan", v: "SidePlan") -> tuple["SidePlan", "SidePlan"]:
        """Sides as its warps take them: other ones where a page comes in pieces."""
        return k, v

    def config(self, *fields) -> "WarpConfig":
        """A configuration that has it: of a subclass where shared memory has more in it."""
        return WarpConfig(*fields)

    def has_halves(self, cfg) -> bool:
        """Whether V of a warp's one page comes in two halves (fetch.is_single)."""
        return False

    def may_spill(self, cfg) -> bool:
        """Whether registers may be a few short."""
        return False

    def pace(self, cfg) -> Rule:
        """When its warps hurry or wait."""
        raise NotImplementedError


class Schedule:
    """How warps get their work. One instance of each subclass."""

    name: str
    ctas_per_sm = 1
    own_queries = False  # a warp has its own, and its own sums: it attends to other rows than the next one
    may_cluster = False  # splits of a block of rows may be a cluster of CTAs
    pace: Rule | None = None  # when its warps hurry or wait; None: as the arithmetic has it

    def kernel(self, cfg):
        """The CuTe kernel of a configuration; imports the DSL."""
        raise NotImplementedError

    def own_plan(self, cfg) -> dict[str, int]:
        """Bytes of each piece of shared memory that a warp has beside its ring."""
        return {}


@dataclass(frozen=True)
class SidePlan(SideSpec):
    """One side of a record as the multiplies read it: 16x16 tiles whose columns are their reduction side."""

    cut = 1  # pieces of consecutive tokens in which a page comes to a warp
    first_col: int = 0  # of one of ``runs``: its first column, and how many; 0: all
    num_cols: int = 0

    @property
    def cols(self) -> int:
        return self.num_cols or super().cols

    @property
    def runs(self) -> tuple["SidePlan", ...]:
        """Matrices of codes of one width, of consecutive columns: two where the first tokens have more bits."""
        if not (wide := self.wide):
            return (self,)
        return (replace(self, bits=wide.bits, codes=wide.codes, num_cols=wide.tokens, wide=None),
                replace(self, first_col=wide.tokens, num_cols=self.cols - wide.tokens, wide=None))

    @property
    def early_tiles(self) -> int:
        """Column tiles of the last run that are in the first half of all columns."""
        return self.col_tiles // 2 - self.runs[-1].first_col // layout.TILE

    @property
    def middle(self) -> int:
        """Bytes of the part's codes before those of the second half of the column tiles."""
        last = self.runs[-1]
        return last.codes + layout.word_offset(last.words_of(self.early_tiles * self.row_tiles), 0)

    def words_of(self, tiles: int) -> int:
        """Words a lane that hold this many consecutive row tiles."""
        return layout.words_per_lane(tiles * layout.TILE, layout.TILE, self.bits)

    def code_access(self, word: int, width: int, lane):
        """Index of the access of ``width`` words (1, 2 or 4, aligned) in which a lane finds ``word`` first."""
        lanes_apart = layout.word_offset(0, 1) // (width * WORD)
        return layout.word_offset(word, 0) // (width * WORD) + lane * lanes_apart

    def block_accesses(self, width: int) -> int:
        """Accesses of ``width`` words between a block of BLOCK_WORDS words a lane and the next."""
        return layout.word_offset(layout.BLOCK_WORDS, 0) // (width * WORD)

    def channel_access(self, group, is_zero: int, col_tile: int, t):
        """Index of the 8 bytes that hold a lane's four values of a column tile: words col8 = 0 and 1."""
        def at(*place):
            return layout.channel_meta_offset(*place, self.head_dim) // META_BYTES

        return group * at(1, 0, 0) + t * at(0, 0, 2) + at(0, is_zero, layout.TILE * col_tile)

    def power(self, row_tile: int, row8: int) -> int:
        """k of rows 16 * row_tile + 8 * row8 .. + 7: their codes enter the multiply as code * 2^(k - 24)."""
        return registers.row_power(layout.TILE * row_tile + 8 * row8, self.bits)


@dataclass(frozen=True)
class WarpConfig:
    """Compile-time constants of one kernel of warps."""

    k: SidePlan
    v: SidePlan
    head_dim: int
    rows: int  # query rows of a CTA
    arithmetic: Arithmetic
    schedule: Schedule
    dtype: str = "float16"
    warps: int = MAX_WARPS
    slots: int = MIN_SLOTS
    has_mixed: bool = False  # tokens whose K is packed while V is still in 16 bit
    features: tuple[str, ...] = ()  # of kernels.FEATURES
    boost: SidePlan | None = None  # of K: the high codes of boosted channels, whose columns are slots
    page_positions = 1  # of a run, that a page takes: see schedule/items.py
    parts, loop = 1, None  # in which a side of a page comes to its warp; the module of loops over these (part_loop.py)

    @property
    def page_log2(self) -> int:
        """log2 of the tokens that a warp takes at a time: those of a page, or of a piece of one."""
        return (layout.PAGE_TOKENS // self.k.cut).bit_length() - 1

    @property
    def ctas_per_sm(self) -> int:
        return self.schedule.ctas_per_sm

    @property
    def own_queries(self) -> bool:
        """Whether a warp attends to other rows than the next one."""
        return self.schedule.own_queries

    @property
    def has_clusters(self) -> bool:
        """Whether its splits may be a cluster: above WIDE_HEAD_DIM their sums would take a warp's shared memory."""
        return self.head_dim <= WIDE_HEAD_DIM and self.schedule.may_cluster

    @property
    def has_halves(self) -> bool:
        """Whether V of a warp's one page comes in two halves (fetch.is_single)."""
        return self.arithmetic.has_halves(self)

    @property
    def warp_barriers(self) -> int:
        """Barriers of a warp's ring: one a slot, one of mixed.py's units, and one of half of V."""
        return self.slots + 1 + self.has_halves

    @property
    def barriers(self) -> int:
        """Barriers of a CTA: those of its warps, then the cluster's."""
        return self.warps * self.warp_barriers + 1

    @property
    def mixed_steps(self) -> ModuleType:
        """The module of units whose K is packed while their V is in 16 bit (mixed.py); imports the DSL."""
        from lowbit_attn.hopper.warp import mixed

        return mixed

    @property
    def masks(self) -> ModuleType:
        """The module of what ``features`` do to scores (masks.py, level_masks.py); imports the DSL."""
        from lowbit_attn.hopper.warp import level_masks, masks

        return level_masks if "level_window" in self.features else masks

    @property
    def has_softcap(self) -> bool:
        return "softcap" in self.features

    @property
    def has_window(self) -> bool:
        return "window" in self.features or "level_window" in self.features

    @property
    def col_blocks(self) -> int:
        """Blocks of 8 columns: the n of the multiplies."""
        return self.arithmetic.col_blocks(self.rows)

    @property
    def lane_rows(self) -> int:
        """Query rows that a lane has in its accumulators."""
        return self.arithmetic.lane_rows(self.rows)

    @property
    def query_bytes(self) -> int:
        """q's operand in shared memory; 0: it stays in registers."""
        is_shared = self.arithmetic.has_shared_query(self)
        return self.rows * self.head_dim * self.arithmetic.query_width if is_shared else 0

    @property
    def channel_bytes(self) -> int:
        """q' by channel, from where boosted channels are gathered."""
        return self.rows * self.head_dim * self.arithmetic.query_width if self.boost else 0

    @property
    def page_warps(self) -> int:
        """The first warps, which take packed pages; the others have 16-bit units alone.

        With fewer bytes under way SMs get more equal shares of memory's rate, and end together.
        """
        if self.own_queries:
            return self.warps
        few = PAGE_WARPS // self.ctas_per_sm
        has_large_pages = PAGE_WARPS * (self.k.nbytes + self.v.nbytes) >= 2 * tuning.UNDER_WAY
        return few if has_large_pages and few < self.warps else self.warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def slot_bytes(self) -> int:
        return max(self.k.nbytes, self.v.nbytes)

    @property
    def warp_bytes(self) -> int:
        """A warp's own ring."""
        return self.slots * self.slot_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one 16-bit row (a token's K or V)."""
        return 2 * self.head_dim

    @property
    def row_pitch(self) -> int:
        """Bytes between 16-bit rows: 16 more than a row, so that ldmatrix has no bank conflict."""
        return self.row_bytes + 16

    @property
    def unit_bytes(self) -> int:
        """A 16-bit unit, K rows then V rows; it reuses the warp's ring."""
        return 2 * UNIT_TOKENS * self.row_pitch

    @property
    def mixed_row(self) -> int:
        """First row of the ring where a unit's 16-bit V lies beside packed K: behind K's part, at the ring's start."""
        return -(-self.k.nbytes // self.row_pitch)

    @property
    def merge_pitch(self) -> int:
        """Floats between query rows of O at the merge."""
        return self.head_dim + self.arithmetic.merge_pad

    @property
    def merge_bytes(self) -> int:
        """O of a warp with maximum and sum of its rows, fp32; they reuse its ring."""
        return self.rows * (self.merge_pitch + 2) * 4

    @property
    def inbox_slots(self) -> int:
        """Chunks that a split gets from the others of its cluster, at most."""
        warps = -(-self.rows * self.head_dim // (tuning.CHUNK_CHANNELS * WARP))
        return max((splits - 1) * -(-warps // splits) * WARP for splits in tuning.CLUSTERS)

    @property
    def smem_plan(self) -> dict[str, int]:
        """Bytes of each piece of shared memory, in order."""
        first = {"buffer": layout.align_record(self.warps * self.warp_bytes)}
        last = {"pace": layout.RECORD_ALIGN, "barriers": layout.align_record(8 * self.barriers)}
        if own := self.schedule.own_plan(self):
            return first | {name: layout.align_record(self.warps * nbytes) for name, nbytes in own.items()} | last
        channels = {"channels": self.channel_bytes} if self.boost else {}
        inbox = {"inbox": layout.align_record(WORD * tuning.SLOT_WORDS * self.inbox_slots)} if self.has_clusters else {}
        return first | {
            "plans": layout.align_record(WORD * PLAN_WORDS * self.warps),
            "query": layout.align_record(max(1, self.query_bytes)), **channels, **inbox,
        } | last

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return sum(self.smem_plan.values())
