"""The kernel of splits for formats with codebooks."""

from lowbit_attn.hopper.common.book_abi import BookDecodeKernel
from lowbit_attn.hopper.schedule.splits import SplitsSm90


class BookSplitsSm90(BookDecodeKernel, SplitsSm90):
    """Has the codebooks of the CTA's KV head in shared memory."""
