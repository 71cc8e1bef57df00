"""What decode paths and the kernels of pages serve: architectures declare it, and a call learns what is missing."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lowbit_attn import layout
from lowbit_attn.formats import Format
from lowbit_attn.formats.levels import Levels
from lowbit_attn.formats.spec import Kind
from lowbit_attn.formats.uniform import dtype_name
from lowbit_attn.kernels.key import FEATURES, LEVEL_WINDOW, SPLITS
from lowbit_attn.registers import WIDE_HEAD_DIM

QUANTIZE_DTYPES = (torch.float16, torch.bfloat16)
QUANTIZE_HEAD_DIMS = (64, 96, 128, 256)
PLAN_HEAD_DIMS = (64, 96, 128)  # of levels' manage: the keys of a ring of wider heads do not fit shared memory


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
    level_windows: bool = False  # the windows of levels, for one query
    schedule: str = SPLITS  # how warps get their work: "small" is splits in CTAs of which an SM holds several
    clusters: bool = False  # its splits may be a cluster of CTAs
    boosted: bool = False  # K of 2 bits with channels of 4 bits (Kitty)
    boosted_values: bool = False  # V of two widths in a page, but for windows, which would need its positions
    wide_bits: tuple[int, ...] = (8, 4, 2)  # of the first tokens of such a V
    codebooks: bool = False  # of both sides, and nothing else
    pre_rope: bool = False  # the codebooks are of keys before their rotary embedding
    least_rows: int = 1  # fewer are faster on the paths behind it
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
        if not is_served or k.transposed or not v.transposed or (v.wide and not self.boosted_values):
            return [f"format {fmt}, supported: K per channel{' or per token' * self.k_per_token}"
                    f"{' or boosted' * self.boosted} with V per token{' or boosted' * self.boosted_values}"]
        channels = (*self.channel_groups, head_dim)
        lag = fmt.window_v - fmt.window_k
        # K per token in small groups beside a lagging V is the one combination that does not fit the registers
        lags = self.windows and not (k.is_per_token and k.groups > 1)
        storages = tuple(map(dtype_name, self.storages))
        wanted = (
            ("K bits", k.bits, (2,) if k.high else self.k_bits), ("V bits", v.bits, self.v_bits),
            ("bits of boosted channels", k.high.code_bits if k.high else 4, (4,)),
            ("bits of boosted values", v.wide.bits if v.wide else self.wide_bits[0], self.wide_bits),
            ("K group", k.group_size, channels if k.is_per_token else self.k_groups),
            ("V group", v.group_size, channels),
            ("V window beyond K's", lag, (lag if lags else 0,)),
            ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
            ("K metadata", k.storage, storages), ("V metadata", v.storage, storages),
        )
        served = (*self.features, *[LEVEL_WINDOW] * self.level_windows)
        served = tuple(name for name in served if not v.wide or name not in ("window", LEVEL_WINDOW))
        wanted += tuple(("feature", name, served or ("none",)) for name in features)
        return unserved(wanted)

    def __str__(self) -> str:
        groups = listed((*self.channel_groups, "head_dim"))
        per_token = f" or per token in groups of {groups} channels" * self.k_per_token
        boosted = " or of 2 bits with boosted channels of 4 (Kitty)" * self.boosted
        values = f" or of {listed(self.wide_bits)} bits for the first tokens (boosted values, without windows)"
        values *= self.boosted_values
        return (f"K of {listed(self.k_bits)} bits per channel in groups of {listed(self.k_groups)} tokens"
                f"{per_token}{boosted}; V of {listed(self.v_bits)} bits per token in groups of {groups} channels"
                f"{values}; "
                f"{listed(self.storages)} metadata; head_dim {listed(self.head_dims)}; {listed(self.dtypes)}; "
                f"any number of query heads a KV head; {listed(self.rows)} query rows at once "
                f"({listed(self.wide_rows)} above head_dim {WIDE_HEAD_DIM}), more in blocks")


@dataclass(frozen=True)
class CodebookSupport(Support):
    """Codebooks on both sides, in the order by lanes."""

    def missing(self, fmt: Format, head_dim: int, dtype: torch.dtype, features: tuple[str, ...] = ()) -> list[str]:
        try:
            k, v = fmt.specs(head_dim)
        except ValueError as error:
            return [str(error)]
        if not (k and v and k.kind is v.kind is Kind.CODEBOOK):
            return [f"format {fmt}, supported: codebooks of K and of V"]
        wanted = (("K bits", k.bits, self.k_bits), ("V bits", v.bits, self.v_bits),
                  ("head_dim", head_dim, self.head_dims), ("dtype", dtype, self.dtypes),
                  *(("feature", name, self.features) for name in features))
        return unserved(wanted)

    def __str__(self) -> str:
        before = ", of keys before their rotary embedding and four of K a head" * self.pre_rope
        return (f"codebooks of K of {listed(self.k_bits)} bits with codebooks of V of {listed(self.v_bits)} bits"
                f"{before}; head_dim {listed(self.head_dims)}; {listed(self.dtypes)}; any number of query heads a KV "
                f"head; {listed(self.rows)} query rows at once, more in blocks")


def quantize_missing(fmt: Format, head_dim: int, dtype: torch.dtype) -> list[str]:
    """Reasons why no kernel can fill or read the pages of a cache; empty if one can."""
    reasons = [] if dtype in QUANTIZE_DTYPES else [f"dtype {dtype}, supported: {listed(QUANTIZE_DTYPES)}"]
    if head_dim not in QUANTIZE_HEAD_DIMS:
        return [*reasons, f"head_dim {head_dim}, supported: {listed(QUANTIZE_HEAD_DIMS)}"]
    k, v = fmt.specs(head_dim)
    if not (k and v and v.kind in (Kind.TOKEN, Kind.CODEBOOK)):
        reasons.append(f"format {fmt}, supported: K per channel, per token, boosted or by codebooks, with V per token "
                       "or by codebooks")
    return reasons


def paged_missing(fmt: Format, head_dim: int) -> list[str]:
    """Reasons why pages of a serving engine cannot hold a format, with or without kernels; empty if they can."""
    reasons = []
    if fmt.orders_tokens:
        reasons.append(f"format {fmt}: orders tokens by significance, which needs scores of each token, supported: "
                       "formats that store tokens by position")
    if fmt.k.weighs_queries:
        reasons.append(f"format {fmt}: needs query weights of every layer, supported: formats without a calibration")
    try:
        nbytes = fmt.record(head_dim).nbytes
    except ValueError as error:
        return [*reasons, str(error)]
    if nbytes % layout.PAGE_TOKENS:
        reasons.append(f"format {fmt}: a record of head_dim {head_dim} has {nbytes} bytes, supported: multiples of "
                       f"{layout.PAGE_TOKENS}, so many for each token")
    return reasons


def manage_missing(levels: Levels, head_dim: int, dtype: torch.dtype) -> list[str]:
    """Reasons why no kernels manage a cache of levels; empty if some do."""
    if head_dim not in PLAN_HEAD_DIMS:
        return [f"head_dim {head_dim}, supported: {listed(PLAN_HEAD_DIMS)}"]
    return [f"{level} level: {reason}" for level, fmt in zip(("high", "low"), levels.formats)
            for reason in quantize_missing(fmt, head_dim, dtype)]


def find_path(paths: Mapping[str, Support], arithmetic: str, schedule: str) -> str | None:
    """The path with this arithmetic on this schedule; None if there is none."""
    return next((path for path, has in paths.items() if (has.arithmetic, has.schedule) == (arithmetic, schedule)), None)


def unserved(wanted) -> list[str]:
    """Reasons from (name, value, supported values)."""
    return [f"{name} {value}, supported: {listed(supported)}" for name, value, supported in wanted
            if value not in supported]


def listed(supported) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in supported)
