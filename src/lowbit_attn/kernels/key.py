"""Names kernels and their limits: what architectures, programs and all above them share. Stands on formats alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowbit_attn.formats import Format
    from lowbit_attn.formats.contract import Side
    from lowbit_attn.formats.levels import Levels

# Shared memory a block may use (CUDA programming guide, "Technical specifications per compute capability").
SMEM_LIMIT_BYTES = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_90a": 232_448}
ROWS = (2, 4, 8, 16, 32, 64)  # query rows of one KV head (heads times q_len) that a CTA of a decode kernel serves
PAIR_ROWS = 4  # the same of the kernel of two levels
FEATURES = ("softcap", "window")  # of reference.Attention: compiled in only where a call asks for them
LEVEL_WINDOW = "level_window"  # the window of a level, whose hidden tokens a plane counts: no other cache's feature
SPLITS, SMALL, STREAM = SCHEDULES = ("splits", "small", "stream")  # see Support.schedule; the first one is picked


@dataclass(frozen=True)
class KernelKey:
    """Identity of one compiled kernel; what varies at run time (batch, heads, lengths) is not in it."""

    op: str  # "decode", "quantize", "dequantize", "append", "read"; "linear": of codebook weights; of levels "merge",
    # of both in one launch "pair", of their append "level_append", of their manage "plan", "pack", of their windows
    # "level_places", "level_hidden"; of several ranks "merge_states", "exchange"; of any rows, "all_reduce"; of steps
    # of a serving engine "paged_plan", "paged_append", "paged_copy", "paged_fill", "merge_rows"
    arch: str  # "hopper" | "ampere"; "device": any architecture's, for all but decode
    target: str
    dtype: str
    head_dim: int  # 0: of no head
    format: str = ""  # "" where no packed data is touched (read)
    # quantize: side, or side-search; append, paged_append: search_<sides>, pack: search_<sides>_<sides>; dequantize:
    # side; read:
    # threads x unroll; linear: what of the product (device/linear/config.py); all_reduce: kernels/all_reduce.py
    variant: str = ""
    arithmetic: str = ""  # decode: see Support, as for the schedule
    schedule: str = ""
    rows: int = 0  # decode: query rows of one KV head that it multiplies at once; linear: rows of x
    features: tuple[str, ...] = ()  # decode: those of FEATURES it has, in that order; of a level LEVEL_WINDOW last
    sizes: str = ""  # decode: the target whose shared memory it is made for, if not its own: to measure it elsewhere

    @property
    def name(self) -> str:
        parts = [self.op, self.variant, self.arithmetic, self.schedule, self.format, self.dtype]
        parts += [f"d{self.head_dim}"] * (self.op != "linear")
        parts += [f"r{self.rows}"] * bool(self.rows) + [f"as_{self.sizes}"] * bool(self.sizes)
        return "-".join(filter(None, [*parts, *self.features]))

    def __str__(self) -> str:
        return f"{self.name}@{self.target}"


@dataclass(frozen=True)
class CuteKernel:
    """A CuTe-DSL entry point and the fake arguments (all but the stream) it is compiled for."""

    entry: object
    arguments: tuple


@dataclass(frozen=True)
class Checks:
    """What the SASS of a kernel must show: see sass.KernelSass."""

    need: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ("LDL", "STL")
    smem_bytes: int | None = None  # dynamic shared memory the launch asks for; None: none


@dataclass(frozen=True)
class Scratch:
    """What the splits of a decode call leave for those that merge them.

    shapes: of fp32 tensors; word: what each of their 32-bit words is between calls, as int32, or None: anything;
    counters: how many int32, zero between calls; header: words before each of ``shapes``, anything between calls, and
    as many for all calls of an architecture with the same ``word``: captured ones share their memory.
    """

    shapes: tuple[tuple[int, ...], ...]
    word: int | None = None
    counters: int = 0
    header: int = 0


def is_even(key: KernelKey) -> bool:
    """Whether all CTAs of a call share all sequences' pages evenly, so that a sequence has no splits."""
    return key.schedule == STREAM


def device_target(target: str) -> str:
    """What an architecture-neutral kernel is built for: sm_80's binaries run on sm_89 too, sm_90's beside sm_90a's."""
    return {"sm_89": "sm_80", "sm_90a": "sm_90"}.get(target, target)


def quantize_key(target: str, dtype: str, head_dim: int, fmt: Format, side_name: str,
                 range_search: bool | None = None) -> KernelKey:
    """The kernel that fills one side ("k" or "v") of pages; formats that have the side in common share it."""
    side = fmt.k if side_name == "k" else fmt.v
    search = _searches(side, range_search)
    return KernelKey("quantize", "device", device_target(target), dtype, head_dim, side.plainest(),
                     f"{side_name}-search" if search else side_name)


def _searches(side: Side, range_search: bool | None) -> bool:
    """Whether a side's kernels search the range; one with a codebook has none."""
    from lowbit_attn.formats import Kind

    return side.kind is not Kind.CODEBOOK and (side.searches_range if range_search is None else range_search)


def _searched(fmt: Format, range_search: bool | None) -> str:
    """The sides of a format whose kernels search the range: "", "k", "v" or "kv"."""
    return "".join(name for name, side in (("k", fmt.k), ("v", fmt.v)) if _searches(side, range_search))


def append_key(target: str, dtype: str, head_dim: int, fmt: Format, range_search: bool | None = None) -> KernelKey:
    """The kernel that does a step of ``KVCache.append``; its variant names the sides with range search."""
    searches = _searched(fmt, range_search)
    return KernelKey("append", "device", device_target(target), dtype, head_dim, fmt.name,
                     f"search_{searches}" if searches else "")


def paged_plan_key(target: str) -> KernelKey:
    """The kernel that plans a step of a serving engine, whatever its format."""
    return KernelKey("paged_plan", "device", device_target(target), "int32", 0)


def paged_append_key(target: str, dtype: str, head_dim: int, fmt: Format,
                     range_search: bool | None = None) -> KernelKey:
    """The kernel that stores and packs a step of a serving engine; its variant names the sides with range search."""
    return replace(append_key(target, dtype, head_dim, fmt, range_search), op="paged_append")


def dequantize_key(target: str, head_dim: int, fmt: Format, side_name: str) -> KernelKey:
    """The kernel that reads one side of pages, into fp32."""
    side = fmt.k if side_name == "k" else fmt.v
    return KernelKey("dequantize", "device", device_target(target), "float32", head_dim, side.plainest(), side_name)


def merge_key(target: str, dtype: str, head_dim: int) -> KernelKey:
    """The kernel that merges what decode gave over two levels."""
    return KernelKey("merge", "device", device_target(target), dtype, head_dim)


def merge_states_key(target: str, dtype: str, head_dim: int) -> KernelKey:
    """The kernel that merges what decode gave on several ranks."""
    return KernelKey("merge_states", "device", device_target(target), dtype, head_dim)


def exchange_key(target: str, dtype: str, head_dim: int) -> KernelKey:
    """Hopper's kernel that exchanges what decode gave between the GPUs of a host, and merges it."""
    return KernelKey("exchange", "hopper", target, dtype, head_dim)


def rank_keys(arch: str, target: str, dtype: str, head_dim: int) -> list[KernelKey]:
    """The kernels that merge what decode gave on several ranks, with and without an exchange of their own."""
    keys = [merge_states_key(target, dtype, head_dim)]
    return keys + [exchange_key(target, dtype, head_dim)] * (arch == "hopper")


def pair_key(target: str, dtype: str, head_dim: int, levels: Levels, features: tuple[str, ...] = ()) -> KernelKey:
    """Hopper's kernel of decode over both levels in one launch."""
    return KernelKey("pair", "hopper", target, dtype, head_dim, levels.pair, "", "int8", STREAM, PAIR_ROWS, features)


def level_append_key(target: str, dtype: str, head_dim: int) -> KernelKey:
    """The kernel of ``LevelCache.append``, whatever the levels."""
    return KernelKey("level_append", "device", device_target(target), dtype, head_dim)


def level_window_keys(target: str) -> tuple[KernelKey, KernelKey]:
    """The kernels that keep where tokens of levels are, and say what a window hides of them."""
    return tuple(KernelKey(op, "device", device_target(target), "int32", 0) for op in ("level_places", "level_hidden"))


def manage_keys(target: str, dtype: str, head_dim: int, levels: Levels,
                range_search: bool | None = None) -> tuple[KernelKey, KernelKey]:
    """The kernels of ``LevelCache.manage``: scores and plans, whatever the levels, and what packs; its variant names
    the sides with range search, high and low."""
    searches = [_searched(fmt, range_search) for fmt in levels.formats]
    common = "device", device_target(target), dtype, head_dim
    return KernelKey("plan", *common), KernelKey("pack", *common, levels.pair,
                                                 f"search_{'_'.join(searches)}" if any(searches) else "")


def paged_copy_key(target: str, dtype: str, head_dim: int) -> KernelKey:
    """The kernel that copies tokens in 16 bit of an engine's step into dense rows, of any format."""
    return KernelKey("paged_copy", "device", device_target(target), dtype, head_dim)


def paged_fill_key(target: str, dtype: str, head_dim: int, fmt: Format) -> KernelKey:
    """The kernel that reads both sides of an engine's pages into dense rows in 16 bit."""
    return KernelKey("paged_fill", "device", device_target(target), dtype, head_dim, fmt.name)


def merge_rows_key(target: str, dtype: str, head_dim: int) -> KernelKey:
    """The kernel that merges attention of rows to other tokens into what is there."""
    return KernelKey("merge_rows", "device", device_target(target), dtype, head_dim)


def packing_keys(target: str, dtype: str, head_dim: int, fmt: Format) -> list[KernelKey]:
    """The kernels that fill and read the pages of a format with its default range search."""
    return [quantize_key(target, dtype, head_dim, fmt, side) for side in "kv"] + [
        dequantize_key(target, head_dim, fmt, side) for side in "kv"]


def step_keys(target: str, dtype: str, head_dim: int, fmt: Format) -> list[KernelKey]:
    """The kernels of ``KVCache.append`` and of what else fills and reads the pages."""
    return [*packing_keys(target, dtype, head_dim, fmt), append_key(target, dtype, head_dim, fmt)]
