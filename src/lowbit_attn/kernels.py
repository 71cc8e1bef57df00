"""Which kernels exist: their names, how each is traced, and the shipped set of every target.

An arch package (hopper, ampere) declares what its decode kernels support; ``device`` holds the kernels both share.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product

import torch

from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.spec import Kind
from lowbit_attn.formats.uniform import dtype_name

# Shared memory a block may use (CUDA programming guide, "Technical specifications per compute capability").
SMEM_LIMIT_BYTES = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_90a": 232_448}
ARCH_TARGETS = {"hopper": ("sm_90a",), "ampere": ("sm_80", "sm_89", "sm_90")}
SHIPPED_TARGETS = {"hopper": ("sm_90a",), "ampere": ("sm_80", "sm_89")}  # Ampere's on Hopper are for tests only
SHIPPED_FORMATS = tuple(name for name in FORMATS if not FORMATS[name].needs_codebooks)  # presets with kernels
SHIPPED_HEAD_DIMS = (64, 128, 256)
SHIPPED_DTYPES = ("float16", "bfloat16")
ROWS = (4, 8, 16, 64)  # query rows of one KV head (heads times q_len) that a CTA of a decode kernel serves
SHIPPED_ROWS = (4, 8, 16)
FEATURES = ("softcap", "window")  # of reference.Attention: compiled in only where a call asks for them
SPLITS, SMALL, STREAM = SCHEDULES = ("splits", "small", "stream")  # see Support.schedule; the first one is picked
READ_VARIANTS = ("256x8", "512x4", "512x8", "1024x2")
WIDE_HEAD_DIM = 128  # above it the accumulators of a query row take so many registers that fewer rows fit
QUANTIZE_DTYPES = (torch.float16, torch.bfloat16)
QUANTIZE_HEAD_DIMS = (64, 96, 128, 256)


@dataclass(frozen=True)
class KernelKey:
    """Identity of one compiled kernel; what varies at run time (batch, heads, lengths) is not in it."""

    op: str  # "decode", "quantize", "dequantize", "append" or "read"
    arch: str  # "hopper" | "ampere"; "device": any architecture's, for all but decode
    target: str
    dtype: str
    head_dim: int
    format: str = ""  # "" where no packed data is touched (read)
    # quantize: side, or side-search; append: search_<sides>; dequantize: side; read: threads x unroll
    variant: str = ""
    arithmetic: str = ""  # decode: see Support, as for the schedule
    schedule: str = ""
    rows: int = 0  # decode: query rows of one KV head that it multiplies at once
    features: tuple[str, ...] = ()  # decode: those of FEATURES it has, in that order
    sizes: str = ""  # decode: the target whose shared memory it is made for, if not its own: to measure it elsewhere

    @property
    def name(self) -> str:
        parts = [self.op, self.variant, self.arithmetic, self.schedule, self.format, self.dtype, f"d{self.head_dim}"]
        parts += [f"r{self.rows}"] * bool(self.rows) + [f"as_{self.sizes}"] * bool(self.sizes)
        return "-".join(filter(None, [*parts, *self.features]))

    @property
    def path(self) -> str:
        """The name by which a call asks for a decode kernel's arithmetic and schedule."""
        return path_of(self.arch, self.arithmetic, self.schedule)

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
    expected: tuple[tuple[str, int], ...] = ()
    smem_bytes: int | None = None  # dynamic shared memory the launch asks for; None: none


@cache
def arch_package(arch: str):
    return import_module(f"lowbit_attn.{arch}")


def trace(key: KernelKey):
    """The DSL program of a kernel: a TileKernel or a CuteKernel. Imports the DSL."""
    if key.op == "read":
        threads, unroll = map(int, key.variant.split("x"))
        return import_module("lowbit_attn.device.read").read_kernel(threads, unroll)
    fmt = FORMATS[key.format]
    if key.op == "decode":
        decode = import_module(f"lowbit_attn.{key.arch}.decode")
        return decode.decode_kernel(fmt, key.head_dim, key.dtype, key.sizes or key.target, key.path, key.rows,
                                    key.features)
    if key.op == "append":
        append = import_module("lowbit_attn.device.append")
        return append.append_kernel(fmt, key.head_dim, key.dtype, key.variant.removeprefix("search_"))
    quantize = import_module("lowbit_attn.device.quantize")
    side_name, _, search = key.variant.partition("-")
    side = fmt.specs(key.head_dim)["kv".index(side_name)]
    if key.op == "quantize":
        return quantize.quantize_kernel(side, key.dtype, search == "search")
    return quantize.dequantize_kernel(side)


def needs_nvcc(key: KernelKey) -> bool:
    """Whether a kernel is TileLang's, which compiles with nvcc; CuTe-DSL brings its own compiler."""
    return key.op != "read" and not (key.op == "decode" and key.arch == "hopper")


def checks(key: KernelKey) -> Checks:
    """The static checks of a kernel, declared beside its source."""
    if key.op == "decode":
        config = import_module(f"lowbit_attn.{key.arch}.config")
        return config.checks(FORMATS[key.format], key.head_dim, target=key.sizes or key.target, path=key.path,
                             rows=key.rows, dtype=key.dtype, features=key.features)
    if key.op == "append" and key.head_dim > WIDE_HEAD_DIM and FORMATS[key.format].k.spec(key.head_dim).high:
        return Checks(forbid=())  # beside K's 512 threads V's search, or weights, spill a few registers
    return Checks()


def ctas_per_sm(key: KernelKey) -> int:
    """Blocks of a decode kernel that an SM surely holds at once."""
    sized = replace(key, target=key.sizes or key.target)
    return import_module(f"lowbit_attn.{key.arch}.config").ctas_per_sm(sized)


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


@dataclass(frozen=True)
class Support:
    """What one decode path of one architecture serves. A group of head_dim channels is always served."""

    arithmetic: str  # "fp16" or "int8" on packed codes, or "tile": on tiles of 16 bit
    k_bits: tuple[int, ...]
    v_bits: tuple[int, ...]
    k_groups: tuple[int, ...]  # tokens, K per channel
    head_dims: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    storages: tuple[torch.dtype, ...]  # of scale and zero-point
    rows: tuple[int, ...]  # query rows of a KV head that its kernels serve at once, ascending; more go in blocks
    wide_rows: tuple[int, ...]  # the same for head_dim above WIDE_HEAD_DIM
    channel_groups: tuple[int, ...] = ()  # channels, V and K per token, beside head_dim
    k_per_token: bool = False
    windows: bool = False  # V may be packed later than K
    features: tuple[str, ...] = FEATURES
    schedule: str = SPLITS  # how warps get their work: "small" is splits in CTAs of which an SM holds several
    clusters: bool = False  # its splits may be a cluster of CTAs
    boosted: bool = False  # K of 2 bits with channels of 4 bits (Kitty)
    paired_bits: int = 0  # up to so many bits two blocks of query rows are faster than the next path's kernel

    def reach(self, fmt: Format, rows: int, head_dim: int) -> int:
        """Up to how many query rows its kernel for ``rows`` is the one to take, if the paths before it are not."""
        return self.rows_for(rows, head_dim) * (2 if max(fmt.k.bits, fmt.v.bits) <= self.paired_bits else 1)

    def rows_for(self, rows: int, head_dim: int) -> int:
        """Query rows of the kernel that takes ``rows`` of them: the smallest that holds all, else the largest."""
        served = self.wide_rows if head_dim > WIDE_HEAD_DIM else self.rows
        return next((n for n in served if n >= rows), served[-1])

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        """Reasons why a call is not served; empty if it is."""
        try:
            k, v = fmt.specs(head_dim)
        except ValueError as error:
            return [str(error)]
        kinds = (Kind.CHANNEL, *[Kind.TOKEN] * self.k_per_token)
        is_served = k and v and k.kind in kinds and v.kind is Kind.TOKEN and (k.high is None or self.boosted)
        if not is_served or k.transposed or not v.transposed:
            return [f"format {fmt}, supported: K per channel{' or per token' * self.k_per_token}"
                    f"{' or boosted' * self.boosted} with V per token"]
        channels = (*self.channel_groups, head_dim)
        lag = fmt.window_v - fmt.window_k
        # K per token in small groups beside a lagging V is the one combination that does not fit the registers
        lags = self.windows and not (k.is_per_token and k.groups > 1)
        storages = tuple(map(dtype_name, self.storages))
        wanted = (
            ("K bits", k.bits, (2,) if k.high else self.k_bits), ("V bits", v.bits, self.v_bits),
            ("bits of boosted channels", k.high.code_bits if k.high else 4, (4,)),
            ("K group", k.group_size, channels if k.is_per_token else self.k_groups),
            ("V group", v.group_size, channels),
            ("V window beyond K's", lag, (lag if lags else 0,)),
            ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
            ("K metadata", k.storage, storages), ("V metadata", v.storage, storages),
        )
        wanted += tuple(("feature", name, self.features) for name in features)
        return [f"{name} {value}, supported: {_listed(supported)}" for name, value, supported in wanted
                if value not in supported]

    def __str__(self) -> str:
        groups = _listed((*self.channel_groups, "head_dim"))
        per_token = f" or per token in groups of {groups} channels" * self.k_per_token
        boosted = " or of 2 bits with boosted channels of 4 (Kitty)" * self.boosted
        return (f"K of {_listed(self.k_bits)} bits per channel in groups of {_listed(self.k_groups)} tokens"
                f"{per_token}{boosted}; V of {_listed(self.v_bits)} bits per token in groups of {groups} channels; "
                f"{_listed(self.storages)} metadata; head_dim {_listed(self.head_dims)}; {_listed(self.dtypes)}; "
                f"any number of query heads a KV head; {_listed(self.rows)} query rows at once "
                f"({_listed(self.wide_rows)} above head_dim {WIDE_HEAD_DIM}), more in blocks")


def quantize_missing(fmt: Format, head_dim: int, dtype: torch.dtype) -> list[str]:
    """Reasons why no kernel can fill or read the pages of a cache; empty if one can."""
    reasons = [] if dtype in QUANTIZE_DTYPES else [f"dtype {dtype}, supported: {_listed(QUANTIZE_DTYPES)}"]
    if head_dim not in QUANTIZE_HEAD_DIMS:
        return [*reasons, f"head_dim {head_dim}, supported: {_listed(QUANTIZE_HEAD_DIMS)}"]
    k, v = fmt.specs(head_dim)
    if not (k and v and k.kind in (Kind.CHANNEL, Kind.TOKEN) and v.kind is Kind.TOKEN):
        reasons.append(f"format {fmt}, supported: K per channel, per token or boosted, with V per token")
    return reasons


def _listed(supported) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in supported)


def device_target(target: str) -> str:
    """What an architecture-neutral kernel is built for: sm_80's binaries run on sm_89 too, sm_90's beside sm_90a's."""
    return {"sm_89": "sm_80", "sm_90a": "sm_90"}.get(target, target)


def quantize_key(target: str, dtype: str, head_dim: int, fmt: Format, side_name: str,
                 range_search: bool | None = None) -> KernelKey:
    """The kernel that fills one side ("k" or "v") of pages; formats that have the side in common share it."""
    side = fmt.k if side_name == "k" else fmt.v
    search = side.searches_range if range_search is None else range_search
    return KernelKey("quantize", "device", device_target(target), dtype, head_dim, side.plainest(),
                     f"{side_name}-search" if search else side_name)


def append_key(target: str, dtype: str, head_dim: int, fmt: Format, range_search: bool | None = None) -> KernelKey:
    """The kernel that does a step of ``KVCache.append``; its variant names the sides with range search."""
    searches = "".join(name for name, side in (("k", fmt.k), ("v", fmt.v))
                       if (side.searches_range if range_search is None else range_search))
    return KernelKey("append", "device", device_target(target), dtype, head_dim, fmt.name,
                     f"search_{searches}" if searches else "")


def dequantize_key(target: str, head_dim: int, fmt: Format, side_name: str) -> KernelKey:
    """The kernel that reads one side of pages, into fp32."""
    side = fmt.k if side_name == "k" else fmt.v
    return KernelKey("dequantize", "device", device_target(target), "float32", head_dim, side.plainest(), side_name)


def packing_keys(target: str, dtype: str, head_dim: int, fmt: Format) -> list[KernelKey]:
    """The kernels that fill and read the pages of a format with its default range search."""
    return [quantize_key(target, dtype, head_dim, fmt, side) for side in "kv"] + [
        dequantize_key(target, head_dim, fmt, side) for side in "kv"]


def step_keys(target: str, dtype: str, head_dim: int, fmt: Format) -> list[KernelKey]:
    """The kernels of ``KVCache.append`` and of what else fills and reads the pages."""
    return [*packing_keys(target, dtype, head_dim, fmt), append_key(target, dtype, head_dim, fmt)]


def decode_key(arch: str, target: str, dtype: str, head_dim: int, fmt: str, path: str, rows: int,
               features: tuple[str, ...] = (), sizes: str = "") -> KernelKey:
    """The decode kernel of a path."""
    support = arch_package(arch).PATHS[path]
    return KernelKey("decode", arch, target, dtype, head_dim, fmt, "", support.arithmetic, support.schedule, rows,
                     features, sizes)


def path_of(arch: str, arithmetic: str, schedule: str) -> str | None:
    """The path with this arithmetic on this schedule; None if there is none."""
    paths = arch_package(arch).PATHS.items()
    return next((path for path, has in paths if (has.arithmetic, has.schedule) == (arithmetic, schedule)), None)


def pick(arch: str, fmt: Format, head_dim: int, dtype: torch.dtype, rows: int, path: str | None = None,
         features: tuple[str, ...] = ()) -> tuple[tuple[str, int] | None, list[str]]:
    """((path, rows of its kernel), reasons of the paths passed over) for ``rows`` query rows of a KV head.

    The first path that takes all rows at once, or in two blocks where those are faster, else the one that takes most;
    path: only this one. None: no path.
    """
    best, reach, reasons = None, 0, []
    for name, support in arch_package(arch).PATHS.items():
        if path != name and (path is not None or support.schedule != SPLITS):
            continue
        missing = support.missing(fmt, head_dim, dtype, features)
        reasons += [f"{arch} {name} path: {reason}" for reason in missing]
        if not missing and (best is None or support.rows_for(rows, head_dim) > best[1]):
            best, reach = (name, support.rows_for(rows, head_dim)), support.reach(fmt, rows, head_dim)
        if reach >= rows:
            break
    return best, reasons


def other_ctas(arch: str, path: str | None = None) -> list[str]:
    """Paths that are ``path``, or any other, on another schedule: not picked but by name or by a call's shape."""
    paths = arch_package(arch).PATHS
    return [other for other, has in paths.items() if has.schedule != SPLITS
            and (path is None or (path != other and paths[path].arithmetic == has.arithmetic))]


def clusters(key: KernelKey, blocks: int, sms: int) -> tuple[int, ...]:
    """Splits of each of so many blocks of query rows that may be one cluster of CTAs and merge among themselves."""
    package = arch_package(key.arch)
    if not package.PATHS[key.path].clusters or key.head_dim > WIDE_HEAD_DIM:
        return ()
    return tuple(splits for splits in package.CLUSTERS if package.fits_clusters(blocks, splits, sms))


def is_even(key: KernelKey) -> bool:
    """Whether all CTAs of a call share all sequences' pages evenly, so that a sequence has no splits."""
    return key.schedule == STREAM


def shipped_shapes(arch: str, name: str, dtype: str, head_dim: int) -> list[tuple[str, int]]:
    """(path, rows) of the decode kernels that are shipped for a preset: what most calls take, and for the paper's own
    case, int4 in fp16, the largest kernel and the tile path too."""
    def picked(rows: int, path: str | None = None):
        return pick(arch, FORMATS[name], head_dim, getattr(torch, dtype), rows, path)[0]

    shapes = [picked(rows) for rows in SHIPPED_ROWS]
    shapes += [picked(ROWS[0], path) for path in other_ctas(arch)]
    if (name, dtype) == ("k4v4", "float16"):
        shapes += [picked(ROWS[-1]), picked(ROWS[0], "tile")]
    return sorted({shape for shape in shapes if shape})


def shipped(arch: str) -> list[KernelKey]:
    """Every kernel that ``make`` builds for an architecture."""
    keys = {}
    for target, dtype, head_dim in product(SHIPPED_TARGETS[arch], SHIPPED_DTYPES, SHIPPED_HEAD_DIMS):
        common = (target, dtype, head_dim)
        for name in SHIPPED_FORMATS:
            shapes = shipped_shapes(arch, name, dtype, head_dim)
            keys |= dict.fromkeys([*step_keys(*common, FORMATS[name]),
                                   *(decode_key(arch, *common, name, *shape) for shape in shapes)])
    return list(keys)


def baselines(arch: str) -> list[KernelKey]:
    """The read-only kernels that the benchmarks compare with; they use no packed data."""
    target = device_target(ARCH_TARGETS[arch][-1])
    return [KernelKey("read", "device", target, "uint32", 0, variant=variant) for variant in READ_VARIANTS]
