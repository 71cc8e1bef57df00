"""Everything a warp's kernel fixes at compile time: code positions, warps, ring slots, shared memory.

A side (K or V) is described once, by ``SidePlan``: where its bytes lie in a record, and which word, shift and mask
give each operand register. The positions come from ``layout`` and ``registers``.
"""

from dataclasses import dataclass, replace

from lowbit_attn import layout, registers
from lowbit_attn.formats.contract import Format
from lowbit_attn.formats.spec import Kind, SideSpec, WidePlane
from lowbit_attn.hopper.common.scratch import CHUNK_CHANNELS, CLUSTERS, SLOT_WORDS
from lowbit_attn.hopper.common.tuning import MANY_WARPS, MAX_SLOTS, MAX_WARPS, MIN_SLOTS, PAGE_WARPS, UNDER_WAY
from lowbit_attn.hopper.warp.contract import Arithmetic, Schedule
from lowbit_attn.kernels.key import FEATURES, SMEM_LIMIT_BYTES, WIDE_HEAD_DIM

TARGET = "sm_90a"
SMEM_LIMIT = SMEM_LIMIT_BYTES[TARGET]
SM_SMEM, BLOCK_SMEM = 233_472, 1024  # bytes of shared memory an SM has, and those that a CTA takes beside its own
WARP = 32
WORD = 4  # bytes
META_BYTES = 8  # of one access to metadata
COLUMNS = 8  # query rows of one m16n8k16
HEAD_DIMS = (64, 96, 128, 256)
UNIT_TOKENS = 16  # 16-bit tokens that a warp takes at a time
PLAN_WORDS = 20  # of shared memory in which a warp keeps its rows and its walk, in whole accesses
PIECES = 2  # of a page: the K part, then the V part
ROW_TILES = layout.PAGE_TOKENS // layout.TILE  # of K
BOOK_BARRIERS = 2  # of a CTA: codebooks of K, of V
BOOST_BITS = 2  # of both planes of boosted K: rows then have the same powers, and S takes both
BOOST_WEIGHT = float(1 << BOOST_BITS)  # of a high code
MERGE_EXPONENTIALS = 7  # of splits: three for a lane; of a row and its sink, with several splits and with one
CLUSTER_EXPONENTIALS = 16  # of splits that are a cluster: of two, of any other number, and of the row and its sink
DIVISIONS = 16  # by sums, and by run-time integers, which take a reciprocal too: before the pages and again after them
SPILLS = ("LDL", "STL")
SASS_FORBID = ("STSM", "HGMMA")


@dataclass(frozen=True)
class SidePlan:
    """One side of a record as a matrix of 16x16 tiles whose columns are the multiply's reduction side."""

    bits: int
    is_transposed: bool  # V: rows = channels, columns = tokens
    rows: int
    cols: int
    is_per_token: bool  # metadata: (scale, zero) per token and channel group; else per channel and token group
    group: int  # tokens (per channel) or channels (per token)
    storage: str  # of scale and zero
    part_offset: int  # bytes from the start of the record
    part_bytes: int
    meta_offset: int  # bytes from the start of the part
    codes_offset: int = 0  # the same
    vec_size: int = 0  # channels of a code, of a codebook side; 0: an affine side
    cut: int = 1  # pieces of consecutive tokens in which a page comes; what stands above is of a piece in its slot
    wide: WidePlane | None = None  # of the first tokens of V; ``bits`` and ``codes_offset`` are the others'

    @property
    def row_tiles(self) -> int:
        return self.rows // layout.TILE

    @property
    def col_tiles(self) -> int:
        return self.cols // layout.TILE

    @property
    def head_dim(self) -> int:
        return self.rows if self.is_transposed else self.cols

    @property
    def groups(self) -> int:
        return (self.head_dim if self.is_per_token else layout.PAGE_TOKENS) // self.group

    @property
    def levels(self) -> int:
        """N = 2^bits - 1, the largest code."""
        return (1 << self.bits) - 1

    @property
    def copies(self) -> list[tuple[int, int, int, int]]:
        """(offset in the slot, bytes, offset in the record, bytes from there to the next piece's) of a piece's runs."""
        if self.cut == 1:
            return [(0, self.part_bytes, self.part_offset, 0)]
        codes, meta = self.meta_offset, self.part_bytes - self.meta_offset
        found = [(0, codes, self.part_offset, codes)]
        behind = (codes, meta, self.part_offset + self.cut * codes, meta * self.is_transposed)  # K's mean is of all
        return [*found, behind] if meta else found

    @property
    def has_meta(self) -> bool:
        """Whether something stands beside the codes; not in V of a codebook without norms."""
        return self.meta_offset < self.part_bytes

    @property
    def runs(self) -> tuple["SidePlan", ...]:
        """Matrices of codes of one width, of consecutive columns: two where the first tokens have more bits."""
        if not (wide := self.wide):
            return (self,)
        return (replace(self, bits=wide.bits, cols=wide.tokens, codes_offset=wide.codes, wide=None),
                replace(self, cols=self.cols - wide.tokens, wide=None))

    @property
    def early_tiles(self) -> int:
        """Column tiles of the last run that are in the first half of all columns."""
        return self.col_tiles // 2 - (self.col_tiles - self.runs[-1].col_tiles)

    @property
    def middle(self) -> int:
        """Bytes of the part's codes before those of the second half of the column tiles."""
        last = self.runs[-1]
        return last.codes_offset + layout.word_offset(last.words_of(self.early_tiles * self.row_tiles), 0)

    def words_of(self, tiles: int) -> int:
        """Words a lane that hold this many consecutive row tiles."""
        return layout.words_per_lane(tiles * layout.TILE, layout.TILE, self.bits)

    def operand(self, tile: int) -> list[tuple[int, int, int]]:
        """(word, shift, mask) of the four A registers of a tile: register = (word >> shift) & mask."""
        found = {}
        for row8 in (0, 1) if self.bits == 8 else (0,):
            word = 2 * tile + row8 if self.bits == 8 else tile // layout.tiles_per_word(self.bits)
            for step in registers.unpack_steps(self.bits):
                if step.tile == tile % layout.tiles_per_word(self.bits):
                    found[step.register + row8] = (word, step.shift, step.mask)
        return [found[i] for i in range(4)]

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

    def token_access(self, group: int, token_tile: int, g):
        """Index of the 8 bytes that hold a lane's two (scale, zero) pairs of a token tile: tokens g and g + 8."""
        def at(*place):
            return layout.token_meta_offset(*place) // META_BYTES

        return group * at(1, 0, 0) + at(0, 0, layout.TILE * token_tile) + g * at(0, 0, 1)

    def power(self, row_tile: int, row8: int) -> int:
        """k of rows 16 * row_tile + 8 * row8 .. + 7: their codes enter the multiply as code * 2^(k - 24)."""
        return registers.row_power(layout.TILE * row_tile + 8 * row8, self.bits)


@dataclass(frozen=True)
class BoostPlan:
    """The boosted channels of K: a second matrix of codes, whose columns are slots, and each slot's channel."""

    high: SidePlan  # of its codes only: the metadata are K's
    count: int  # slots in use, a multiple of 8; the rest of the last tile hold zero codes
    index_offset: int  # bytes from the start of the part

    @property
    def steps(self) -> int:
        """k16 steps of the multiply: column tiles."""
        return self.high.col_tiles

    def in_use(self, step: int, col8: int) -> bool:
        """Whether the eight slots of half a column tile are, all of them or none."""
        return layout.TILE * step + 8 * col8 < self.count


@dataclass(frozen=True)
class WarpConfig:
    """Compile-time constants of one kernel of warps; ``check`` raises ValueError with the reasons."""

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
    boost: BoostPlan | None = None

    @property
    def page_log2(self) -> int:
        """log2 of the tokens that a warp takes at a time: those of a page, or of a piece of one."""
        return (layout.PAGE_TOKENS // self.k.cut).bit_length() - 1

    @property
    def book_bytes(self) -> int:
        """Shared memory of codebooks and of what comes with them; 0: of a format without."""
        return self.arithmetic.book_bytes(self)

    @property
    def has_books(self) -> bool:
        return self.book_bytes > 0

    @property
    def query_width(self) -> int:
        """Bytes of an element of q's operand in shared memory."""
        return self.arithmetic.query_width

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
        return self.head_dim <= WIDE_HEAD_DIM and self.schedule.may_cluster and not self.has_books

    @property
    def has_halves(self) -> bool:
        """Whether V of a warp's one page comes in two halves (fetch.is_single)."""
        return self.arithmetic.has_halves(self)

    @property
    def warp_barriers(self) -> int:
        """Barriers of a warp's ring: one a slot, one of mixed.py's units, and one of half of V."""
        return self.slots + 1 + self.has_halves

    @property
    def has_softcap(self) -> bool:
        return "softcap" in self.features

    @property
    def has_window(self) -> bool:
        return "window" in self.features

    @property
    def col_blocks(self) -> int:
        """Blocks of 8 columns: the n of the multiplies."""
        return self.arithmetic.col_blocks(self.rows)

    @property
    def lane_rows(self) -> int:
        """Query rows that a lane has in its accumulators."""
        return self.arithmetic.lane_rows(self.rows)

    @property
    def has_shared_query(self) -> bool:
        """Whether q's operand is read from shared memory for every page instead of staying in registers."""
        return self.arithmetic.has_shared_query(self)

    @property
    def query_bytes(self) -> int:
        return self.rows * self.head_dim * self.query_width if self.has_shared_query else 0

    @property
    def channel_bytes(self) -> int:
        """q' by channel, from where boosted channels are gathered."""
        return self.rows * self.head_dim * self.query_width if self.boost else 0

    @property
    def page_warps(self) -> int:
        """The first warps, which take packed pages; the others have 16-bit units alone.

        With fewer bytes under way SMs get more equal shares of memory's rate, and end together.
        """
        if self.own_queries:
            return self.warps
        few = PAGE_WARPS // self.ctas_per_sm
        has_large_pages = PAGE_WARPS * (self.k.part_bytes + self.v.part_bytes) >= 2 * UNDER_WAY
        return few if has_large_pages and few < self.warps else self.warps

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def slot_bytes(self) -> int:
        least = -(-self.unit_bytes // MIN_SLOTS) if self.has_books else 0  # rings of two slots must hold a unit
        return max(self.k.part_bytes, self.v.part_bytes, least)

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
        return -(-self.k.part_bytes // self.row_pitch)

    @property
    def mixed_bytes(self) -> int:
        """Such a unit: a page's K part, then 16 rows of V; it reuses the warp's ring."""
        return (self.mixed_row + UNIT_TOKENS) * self.row_pitch if self.has_mixed else 0

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
        warps = -(-self.rows * self.head_dim // (CHUNK_CHANNELS * WARP))
        return max((splits - 1) * -(-warps // splits) * WARP for splits in CLUSTERS)

    @property
    def reuse_bytes(self) -> int:
        """Bytes that a warp's ring must have for what reuses it."""
        return max(self.unit_bytes, self.mixed_bytes, self.merge_bytes * (not self.own_queries))

    @property
    def own_bytes(self) -> int:
        """Bytes of a warp's shared memory beside its ring."""
        return sum(self.schedule.own_plan(self).values())

    @property
    def slots_needed(self) -> int:
        """Slots with which all but one of a CTA's make ``UNDER_WAY`` bytes, and a warp's ring holds what reuses it."""
        under_way = -(-UNDER_WAY // (self.ctas_per_sm * self.warps * self.slot_bytes))
        return min(MAX_SLOTS, max(MIN_SLOTS, 1 + under_way, -(-self.reuse_bytes // self.slot_bytes)))

    @property
    def smem_plan(self) -> dict[str, int]:
        """Bytes of each piece of shared memory, in order."""
        first = {"buffer": layout.align_record(self.warps * self.warp_bytes)}
        first |= {"books": layout.align_record(self.book_bytes)} if self.has_books else {}
        barriers = self.warps * self.warp_barriers + 1 + BOOK_BARRIERS * self.has_books
        last = {"pace": layout.RECORD_ALIGN, "barriers": layout.align_record(8 * barriers)}
        if own := self.schedule.own_plan(self):
            return first | {name: layout.align_record(self.warps * nbytes) for name, nbytes in own.items()} | last
        channels = {"channels": self.channel_bytes} if self.boost else {}
        inbox = {"inbox": layout.align_record(WORD * SLOT_WORDS * self.inbox_slots)} if self.has_clusters else {}
        return first | {
            "plans": layout.align_record(WORD * PLAN_WORDS * self.warps),
            "query": layout.align_record(max(1, self.query_bytes)), **channels, **inbox,
        } | last

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        return sum(self.smem_plan.values())

    @property
    def merge_exponentials(self) -> int:
        """Static exponentials of the merge with other splits."""
        return MERGE_EXPONENTIALS + CLUSTER_EXPONENTIALS * self.has_clusters

    @property
    def row_choices(self) -> list[int]:
        """What ``rows`` may be."""
        return self.arithmetic.row_choices(self.head_dim)

    def problems(self) -> list[str]:
        """Reasons why this configuration cannot run; empty if it can."""
        found = []
        if self.smem_bytes > (limit := smem_limit(self.ctas_per_sm)):
            found.append(f"shared memory: {self.smem_bytes} B at {self.warps} warps and "
                         f"{self.slots} slots, limit {limit} B")
        if self.warp_bytes < self.reuse_bytes:
            found.append(f"ring of a warp: {self.warp_bytes} B, a 16-bit unit or O needs {self.reuse_bytes} B")
        if self.head_dim not in HEAD_DIMS:
            found.append(f"head_dim: got {self.head_dim}, supported: {', '.join(map(str, HEAD_DIMS))}")
        if self.rows not in self.row_choices:
            rows = ", ".join(map(str, self.row_choices))
            found.append(f"rows: got {self.rows}, supported at head_dim {self.head_dim}: {rows}")
        if unknown := [name for name in self.features if name not in FEATURES]:
            found.append(f"features: got {', '.join(unknown)}, supported: {', '.join(FEATURES)}")
        if self.boost and not self.k.bits == self.boost.high.bits == BOOST_BITS:
            found.append(f"boosted K: got {self.boost.high.bits} bits over {self.k.bits}, supported: "
                         f"{BOOST_BITS} over {BOOST_BITS}")
        return found

    def check(self) -> "WarpConfig":
        if found := self.problems():
            raise ValueError("; ".join(found))
        return self


def smem_limit(ctas_per_sm: int) -> int:
    """Bytes of shared memory of each of so many CTAs an SM."""
    return min(SMEM_LIMIT, SM_SMEM // ctas_per_sm - BLOCK_SMEM)


def plan_side(side: SideSpec) -> SidePlan:
    """How the kernels read one side of a record."""
    is_book = side.kind is Kind.CODEBOOK
    if side.wide:  # its last plane, of positions, is not copied
        return SidePlan(side.bits, side.transposed, side.rows, side.cols, side.is_per_token, side.group_size,
                        side.storage, side.start, side.wide.positions, side.meta, side.codes, wide=side.wide)
    return SidePlan(side.bits, side.transposed, side.rows, side.cols, side.is_per_token,
                    layout.PAGE_TOKENS if is_book else side.group_size, side.storage, side.start, side.nbytes,
                    side.meta, vec_size=side.group_size if is_book else 0)


def cut_side(side: SidePlan, cut: int) -> SidePlan:
    """A codebook side whose pages come in ``cut`` pieces."""
    if cut == 1:
        return side
    codes = side.meta_offset // cut
    meta = (side.part_bytes - side.meta_offset) // (cut if side.is_transposed else 1)
    tokens = layout.PAGE_TOKENS // cut
    rows, cols = (side.rows, tokens) if side.is_transposed else (tokens, side.cols)
    return replace(side, rows=rows, cols=cols, part_bytes=codes + meta, meta_offset=codes, cut=cut)


def plan_boost(side: SideSpec, k: SidePlan) -> BoostPlan | None:
    """Plan the boosted channels of K; None if there are none."""
    if not (high := side.high):
        return None
    return BoostPlan(replace(k, bits=high.bits, cols=high.slots, codes_offset=high.codes), high.channels, high.index)


def make_config(fmt: Format, head_dim: int, dtype: str, rows: int, arithmetic: Arithmetic, schedule: Schedule,
                features: tuple[str, ...] = ()) -> WarpConfig:
    """The configuration of a format: as many warps as leave ``MIN_SLOTS`` each, then the slots they need."""
    k_spec, v_spec = fmt.specs(head_dim)
    k, v = plan_side(k_spec), plan_side(v_spec)
    if cut := arithmetic.page_cut(k, v):
        k, v = cut_side(k, cut), cut_side(v, cut)
    boost = plan_boost(k_spec, k)
    slot = max(k.part_bytes, v.part_bytes)
    queries = rows * head_dim * arithmetic.query_width * (2 if boost else 1)  # once more by channel
    free = smem_limit(schedule.ctas_per_sm) - queries * (not schedule.own_queries)
    free -= layout.RECORD_ALIGN * 8  # pace, and barriers: room for 112 of 8 bytes
    has_mixed = fmt.window_v > fmt.window_k
    is_slim = not features and rows <= COLUMNS and head_dim <= 128 and k.groups == v.groups == 1
    is_slim = is_slim and not (has_mixed and k.is_per_token)  # would spill 5 words
    found = WarpConfig(k, v, head_dim, rows, arithmetic, schedule, dtype, 1, MIN_SLOTS, has_mixed,
                       features, boost)
    free -= found.smem_plan.get("inbox", 0) + found.smem_plan.get("books", 0)
    fitting, many = free // (MIN_SLOTS * slot + found.own_bytes), MANY_WARPS // schedule.ctas_per_sm
    warps = many if is_slim and many <= fitting else max(1, min(MAX_WARPS // schedule.ctas_per_sm, fitting))
    if found.has_books:
        slot = found.slot_bytes
        warps = min(arithmetic.most_warps, (free - layout.RECORD_ALIGN) // (MIN_SLOTS * slot + PLAN_WORDS * WORD))
    found = replace(found, warps=warps)
    return replace(found, slots=min(found.slots_needed, (free // warps - found.own_bytes) // slot)).check()
