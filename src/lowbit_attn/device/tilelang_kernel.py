"""What a TileLang kernel module hands to the build: the traced function and how to lower it."""

from dataclasses import dataclass, field
from typing import Any

# One source serves sm_80, sm_89 and sm_90: the passes that would turn it into a TMA or WGMMA kernel are off, and so
# is the automatic barrier insertion, which deadlocks loops whose trip count differs between warps.
ONE_SOURCE_PASSES = {
    "tl.disable_thread_storage_sync": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_tma_lower": True,
    "tl.disable_wgmma": True,
    "tl.disable_safe_memory_legalize": True,
}


@dataclass(frozen=True)
class TileKernel:
    """A prim_func, the pass configuration it is lowered under, and extra nvcc flags.

    overlaps: its launch may begin while the kernel before it in the stream ends (programmatic dependent launch, from
    sm_90 on): what it does first is T.pdl_sync(), which waits for all that one has written.
    """

    prim_func: Any
    pass_configs: dict[str, Any] = field(default_factory=lambda: dict(ONE_SOURCE_PASSES))
    compile_flags: tuple[str, ...] = ()
    overlaps: bool = False
