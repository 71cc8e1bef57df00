"""The decode kernel of a path, as it is traced, and the fake arguments that it is compiled for."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor

from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper import PATHS
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
                      fake_arguments(head_dim, ELEMENT[dtype]))


def kernel_of(cfg: WarpConfig | TileConfig):
    """The kernel class of a configuration, with it."""
    if isinstance(cfg, WarpConfig):
        return cfg.schedule.kernel(cfg)
    from lowbit_attn.hopper.tile.decode import DecodeSm90

    return DecodeSm90(cfg)


def fake_arguments(head_dim: int, element) -> tuple:
    """The ABI's 23 arguments; every size but head_dim varies at run time."""
    def tensor(kind, *shape, align=16):
        return make_fake_compact_tensor(kind, shape, stride_order=tuple(reversed(range(len(shape)))),
                                        assumed_align=align)

    n = cute.sym_int
    batch, q_len, heads, heads_kv, sinks, ring_k, ring_v = (n() for _ in range(7))
    rows, tokens = (batch, q_len, heads), (batch, heads_kv)
    return (
        tensor(element, *rows, head_dim), tensor(Uint32, n(), 32, align=128), tensor(Int32, n(), align=4),
        *(tensor(Int32, batch, align=4) for _ in range(4)),
        *(tensor(element, *tokens, sinks, head_dim) for _ in range(2)),
        *(tensor(element, *tokens, slots, head_dim) for slots in (ring_k, ring_v)),
        tensor(Float32, n(), n(), n()),
        tensor(element, *rows, head_dim), tensor(Float32, batch, heads, q_len, align=4), tensor(Float32, n(), align=4),
        Float32(1.0), Float32(1.0), *(Int32(1) for _ in range(6)),
    )
