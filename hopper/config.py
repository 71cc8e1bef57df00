"""What a decode kernel of one of the paths is, before it is built: its configuration and checks. Without the DSL.

A path is an arithmetic on a schedule, or the tile path, which has its own of both.
"""

import torch

from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper.arith.codebook.config import CODEBOOK, CODEBOOK2, CODEBOOK8, PREROPE, PREROPE8
from lowbit_attn.hopper.arith.fp16.config import FP16
from lowbit_attn.hopper.arith.int8.config import INT8
from lowbit_attn.hopper.common.support import BOOK_TILE, PATHS, WGMMA
from lowbit_attn.hopper.schedule.config import SMALL, SPLITS, STREAM
from lowbit_attn.hopper.tile import config as tile
from lowbit_attn.hopper.warp import plan
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.wgmma import config as wgmma
from lowbit_attn.kernels.key import Checks, KernelKey

TARGET = tile.TARGET
TILE_PATHS = ("tile", BOOK_TILE, WGMMA)
SPILLS = ("LDL", "STL")
WARP_FORBID = ("STSM", "HGMMA")  # which the tile path has
ARITHMETICS = {arithmetic.name: arithmetic
               for arithmetic in (FP16, INT8, CODEBOOK2, CODEBOOK, CODEBOOK8, PREROPE, PREROPE8)}
SCHEDULES = {schedule.name: schedule for schedule in (SPLITS, SMALL, STREAM)}


def make_config(path: str, fmt: Format, head_dim: int, dtype: str, rows: int,
                features: tuple[str, ...] = ()) -> WarpConfig | tile.DecodeConfig:
    """The configuration of a path's kernel; ValueError with the reasons if there is none."""
    if found := PATHS[path].missing(fmt, head_dim, getattr(torch, dtype)):
        raise ValueError("; ".join(found))
    if path == WGMMA:
        return wgmma.make_config(fmt, head_dim, dtype, rows, features)
    if path in TILE_PATHS:
        return tile.make_config(fmt, head_dim, dtype, rows, features)
    arithmetic, schedule = ARITHMETICS[PATHS[path].arithmetic], SCHEDULES[PATHS[path].schedule]
    return plan.make_config(fmt, head_dim, dtype, rows, arithmetic, schedule, features)


def ctas_per_sm(key: KernelKey, path: str) -> int:
    """Blocks of a decode kernel that an SM surely holds at once."""
    return SCHEDULES[key.schedule].ctas_per_sm


def checks(fmt: Format, head_dim: int, target: str = TARGET, path: str = "tile", rows: int = tile.COLUMNS,
           dtype: str = "float16", features: tuple[str, ...] = ()) -> Checks:
    """What the SASS of the decode kernel of a path must show."""
    cfg = make_config(path, fmt, head_dim, dtype, rows, features)
    if path in TILE_PATHS:
        forbid = () if path == WGMMA and cfg.may_spill else tile.SASS_FORBID
        return Checks(tile.SASS_NEED, forbid, cfg.smem_bytes)
    forbid = WARP_FORBID if cfg.arithmetic.may_spill(cfg) else SPILLS + WARP_FORBID
    return Checks(cfg.arithmetic.sass_need, forbid, cfg.smem_bytes)
