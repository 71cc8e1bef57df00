"""The decode kernel of a path, as it is traced, and the fake arguments that it is compiled for."""

from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper import PATHS
from lowbit_attn.hopper.common.abi import fake_arguments
from lowbit_attn.hopper.common.numbers import ELEMENT
from lowbit_attn.hopper.config import make_config
from lowbit_attn.hopper.tile.config import TARGET
from lowbit_attn.hopper.tile.config import DecodeConfig as TileConfig
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.kernels.key import CuteKernel


def decode_kernel(fmt: Format, head_dim: int, dtype: str, target: str = TARGET, path: str = "tile",
                  rows: int = 8, features: tuple[str, ...] = ()) -> CuteKernel:
    """The kernel of a path and the fake arguments (all but the stream) to compile it for; ValueError if not supported.

    rows: query rows (heads of a KV head times q_len) that a CTA serves: kernels.ROWS; features: what
    kernels.FEATURES names.
    """
    if target != TARGET:
        raise ValueError(f"target: got {target!r}, supported: {TARGET!r}")
    if path not in PATHS:
        raise ValueError(f"path: got {path!r}, supported: {', '.join(PATHS)}")
    return CuteKernel(kernel_of(make_config(path, fmt, head_dim, dtype, rows, features)),
                      fake_arguments(head_dim, ELEMENT[dtype], fmt.needs_codebooks))


def kernel_of(cfg: WarpConfig | TileConfig):
    """The kernel class of a configuration, with it."""
    if isinstance(cfg, WarpConfig):
        return cfg.schedule.kernel(cfg)
    from lowbit_attn.hopper.tile.decode import DecodeSm90

    return DecodeSm90(cfg)
