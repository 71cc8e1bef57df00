"""The decode kernel of a path, as it is traced, and the fake arguments that it is compiled for."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_tensor

from lowbit_attn.device.numbers import ELEMENT
from lowbit_attn.formats.codebook_order import ENTRIES
from lowbit_attn.formats.contract import Format
from lowbit_attn.hopper import PATHS
from lowbit_attn.hopper.common.book_abi import BOOK_CHANNEL_PLANES, BOOK_ROW_WORDS
from lowbit_attn.hopper.config import make_config
from lowbit_attn.hopper.schedule.level_splits import LevelSplitsSm90
from lowbit_attn.hopper.tile.config import TARGET
from lowbit_attn.hopper.tile.config import DecodeConfig as TileConfig
from lowbit_attn.hopper.warp.config import WarpConfig
from lowbit_attn.hopper.wgmma.config import WgmmaConfig
from lowbit_attn.kernels.key import LEVEL_WINDOW, CuteKernel

UNIT_WORDS = 32  # of 128 bytes, in which the pool is counted


def decode_kernel(fmt: Format, head_dim: int, dtype: str, target: str = TARGET, path: str = "tile",
                  rows: int = 8, features: tuple[str, ...] = ()) -> CuteKernel:
    """The kernel of a path and the fake arguments (all but the stream) to compile it for; ValueError if not supported.

    rows: query rows (heads of a KV head times q_len) that a CTA serves: kernels.ROWS; features: what
    kernels.FEATURES names, or LEVEL_WINDOW.
    """
    if target != TARGET:
        raise ValueError(f"target: got {target!r}, supported: {TARGET!r}")
    if path not in PATHS:
        raise ValueError(f"path: got {path!r}, supported: {', '.join(PATHS)}")
    return CuteKernel(kernel_of(make_config(path, fmt, head_dim, dtype, rows, features)),
                      fake_arguments(head_dim, ELEMENT[dtype], fmt.needs_codebooks, LEVEL_WINDOW in features))


def kernel_of(cfg: WarpConfig | TileConfig):
    """The kernel class of a configuration, with it."""
    if isinstance(cfg, WarpConfig) and LEVEL_WINDOW in cfg.features:
        return LevelSplitsSm90(cfg)
    if isinstance(cfg, WarpConfig):
        return cfg.schedule.kernel(cfg)
    if isinstance(cfg, WgmmaConfig):
        from lowbit_attn.hopper.wgmma.decode import WgmmaSm90

        return WgmmaSm90(cfg)
    from lowbit_attn.hopper.tile.decode import BookDecodeSm90, DecodeSm90

    return BookDecodeSm90(cfg) if cfg.has_books else DecodeSm90(cfg)


def fake_arguments(head_dim: int, element, has_books: bool = False, has_hidden: bool = False) -> tuple:
    """All arguments but the stream, to compile a kernel for; every size but head_dim varies at run time."""
    def tensor(kind, *shape, align=16):
        return make_fake_compact_tensor(kind, shape, stride_order=tuple(reversed(range(len(shape)))),
                                        assumed_align=align)

    def tokens(slots):  # of a ring or of sinks: each (row, KV head) lies anywhere
        return make_fake_tensor(element, (rings, heads_kv, slots, head_dim),
                                (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), head_dim, 1),
                                assumed_align=16)

    n = cute.sym_int
    batch, q_len, heads, heads_kv, seqs, rings, sinks, ring_k, ring_v = (n() for _ in range(9))
    books = (*(tensor(Uint32, heads_kv, ENTRIES, BOOK_ROW_WORDS, align=128) for _ in range(2)),
             tensor(Float32, heads_kv, BOOK_CHANNEL_PLANES, head_dim)) if has_books else ()
    return (
        tensor(element, batch, q_len, heads, head_dim), *(tensor(Int32, batch, align=4) for _ in range(2)),
        tensor(Uint32, n(), UNIT_WORDS, align=128), tensor(Int32, n(), align=4),
        *(tensor(Int32, seqs, align=4) for _ in range(5)), *(tokens(slots) for slots in (sinks, sinks, ring_k, ring_v)),
        *books, *[tensor(Int32, seqs, align=4)] * has_hidden, tensor(Float32, n(), n(), n()),
        tensor(element, batch, q_len, heads, head_dim), tensor(Float32, batch, heads, q_len, align=4),
        tensor(Float32, n(), align=4),
        Float32(1.0), Float32(1.0), *(Int32(1) for _ in range(6)),
    )
