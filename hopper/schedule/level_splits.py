"""The kernel of splits for a level under a window."""

from lowbit_attn.hopper.common.level_abi import LevelDecodeKernel
from lowbit_attn.hopper.schedule.splits import SplitsSm90


class LevelSplitsSm90(LevelDecodeKernel, SplitsSm90):
    """Leaves out the pages, and hides the tokens, that are before the window."""
