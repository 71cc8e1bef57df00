"""The schedules: what follows from them for a kernel, without the DSL."""

from lowbit_attn.hopper.common.tuning import PACE_SMALL, PACE_STREAM
from lowbit_attn.hopper.warp.config import PLAN_WORDS, WORD, Schedule, WarpConfig

CURSOR_WORDS, RECORD_WORDS = 8, 4  # of an even share: where a warp is, and what it says of sums it leaves
PLANS_WORDS = PLAN_WORDS + CURSOR_WORDS + 2 * RECORD_WORDS


class Splits(Schedule):
    """Each CTA has a block of query rows and a part of its sequence's pages, as each other split of the block has."""

    name = "splits"
    may_cluster = True

    def kernel(self, cfg: WarpConfig):
        if cfg.arithmetic.has_books:
            from lowbit_attn.hopper.schedule.book_splits import BookSplitsSm90

            return BookSplitsSm90(cfg)
        from lowbit_attn.hopper.schedule.splits import SplitsSm90

        return SplitsSm90(cfg)


class Small(Splits):
    """CTAs of a quarter of the warps: the start and the end of one pass while the SM's others are at their pages."""

    name = "small"
    ctas_per_sm = 4
    may_cluster = False
    pace = PACE_SMALL


class Stream(Schedule):
    """Stream-K: a warp attends to a run of pages, of one sequence or of several (items.py)."""

    name = "stream"
    own_queries = True
    pace = PACE_STREAM

    def kernel(self, cfg: WarpConfig):
        from lowbit_attn.hopper.schedule.stream import StreamSm90

        return StreamSm90(cfg)

    def own_plan(self, cfg: WarpConfig) -> dict[str, int]:
        """The sums are of two items."""
        channels = {"channels": cfg.channel_bytes} if cfg.boost else {}
        return {"plans": WORD * PLANS_WORDS, "query": cfg.query_bytes, **channels, "sums": 2 * cfg.merge_bytes}


SPLITS, SMALL, STREAM = Splits(), Small(), Stream()
