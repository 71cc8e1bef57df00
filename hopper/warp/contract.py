"""What a warp's kernel asks of an arithmetic and of a schedule. Neither is known here: both come with a configuration.

An arithmetic says how packed pages are multiplied (arith/), a schedule how warps get their work (schedule/). Here is
what follows from them before anything is traced, without the DSL; their steps in kernels are ``Arithmetic.steps`` and
``Schedule.kernel``.
"""

from types import ModuleType

from lowbit_attn.hopper.common.tuning import Rule

STEPS = ("prefetch_query", "load_query", "prepare_query", "scores", "before_values", "add_values", "finish")
OWN_STEPS = ("prepare_own_query",)


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
    most_warps = 0  # of a CTA, where shared memory alone would allow more; 0: as ``make_config`` has it for others
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

    def book_bytes(self, cfg) -> int:
        """Shared memory for codebooks of the KV head and what comes with them; 0: there are none.

        With some, a module has two steps more:
            start_books(cfg, books, rows, place)     start their copies; one thread calls it, at the kernel's start
            token_query(cfg, shared, ring, me)       (words, [column] factor) of q for 16-bit tokens, as B operand
        """
        return 0

    def page_cut(self, k, v) -> int:
        """In how many pieces of consecutive tokens a warp takes a page with these sides; 0: as a whole, always."""
        return 0

    def has_halves(self, cfg) -> bool:
        """Whether V of a warp's one page comes in two halves (fetch.is_single)."""
        return False

    def may_spill(self, cfg) -> bool:
        """Whether registers may be a few short."""
        return False

    def recentred_pages(self, cfg) -> int:
        """So many pages add up before O is centred; 1: no sums are carried from page to page."""
        return 1

    def pace(self, cfg) -> Rule:
        """When its warps hurry or wait."""
        raise NotImplementedError

    def expected_counts(self, cfg) -> dict[str, int]:
        """Predicted static SASS counts: one warp's share of one packed page, of one 16-bit unit and of one beside
        packed K. The page loop is not unrolled, so a CTA issues the page's share once for each page."""
        raise NotImplementedError


class Schedule:
    """How warps get their work. One instance of each subclass."""

    name: str
    ctas_per_sm = 1
    own_queries = False  # a warp has its own, and its own sums: it attends to other rows than the next one
    is_even = False  # all CTAs share all sequences' pages, so that a sequence has no splits
    may_cluster = False  # splits of a block of rows may be a cluster of CTAs
    pace: Rule | None = None  # when its warps hurry or wait; None: as the arithmetic has it

    def kernel(self, cfg):
        """The CuTe kernel of a configuration; imports the DSL."""
        raise NotImplementedError

    def own_plan(self, cfg) -> dict[str, int]:
        """Bytes of each piece of shared memory that a warp has beside its ring."""
        return {}
