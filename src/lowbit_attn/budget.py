"""How large a cache is in each format, and how fast it can be read: pure arithmetic, no device.

The floor of a decode step is the time to read every byte of the cache once, layer by layer. A kernel that reads
little reaches less bandwidth, so the floor of a layer is the time of a plain read of the same bytes.
"""

import difflib
import json
import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowbit_attn.cache.state import MAX_TOKENS
from lowbit_attn.formats import FORMATS, Format, levels
from lowbit_attn.formats.levels import Levels
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.levels.frames import frame_sizes
from lowbit_attn.levels.state import WINDOW, buffer_bytes

MIB = 1 << 20
MIN_GAIN = 1.05  # a whole step faster than 16 bit by less than this counts as no gain
MAX_QUERY_ROWS = 64  # query rows (GQA ratio x q_len) one pass over a page serves; more rows read it again
SIXTEEN_BIT = "16 bit"
MEASURED = Path(__file__).parent / "measured.json"  # decode calls timed by perf/bench.py, one a line of ``calls``

Points = tuple[tuple[float, float], ...]


def interpolate(points: Points, x: float) -> float:
    """Straight lines between rising points; below the first its own y, beyond the last in proportion."""
    above = bisect_right([size for size, _ in points], x)
    if above == 0:
        return points[0][1]
    x0, y0 = points[above - 1]
    if above == len(points):
        return y0 * x / x0
    x1, y1 = points[above]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True)
class Gpu:
    """Memory in GB (10^9 bytes) and plain-read times: (bytes, microseconds) points, rising; beyond the last, its rate.

    ``source``: where the read rate is from. A datasheet rate is one point and is not reached by small reads.
    ``spec_tb_per_s``: the memory's rate by NVIDIA's datasheet of the card; ``device``: its name in torch.
    """

    name: str
    memory_gb: float
    reads: Points
    source: str
    spec_tb_per_s: float = 0.0
    device: str = ""

    @property
    def peak_tb_per_s(self) -> float:
        nbytes, us = self.reads[-1]
        return nbytes / us * 1e-6

    def read_us(self, nbytes: float) -> float:
        """Time of one kernel that reads this many bytes, straight lines between the points."""
        return interpolate(((0.0, 0.0), *self.reads) if self.reads[0][0] else self.reads, nbytes)


def _measured(empty_us: float, *rates: tuple[int, float]) -> Points:
    """Points from (MiB, TB/s) pairs and the time of an empty kernel."""
    return ((0.0, empty_us), *((mib * MIB, mib * MIB / rate * 1e-6) for mib, rate in rates))


def _datasheet(name: str, memory_gb: float, tb_per_s: float, device: str) -> Gpu:
    return Gpu(name, memory_gb, ((1e9, 1e3 / tb_per_s),), "datasheet", tb_per_s, device)


GPUS = {
    "h200": Gpu("H200 SXM", 141, _measured(4.0, (16, 1.7), (32, 2.24), (64, 2.71), (128, 3.25), (256, 3.77),
                                           (512, 4.16), (2048, 4.49)), "measured", 4.8, "NVIDIA H200"),
    "h100": _datasheet("H100 SXM", 80, 3.35, "NVIDIA H100 80GB HBM3"),
    "a100": _datasheet("A100 SXM 80 GB", 80, 2.039, "NVIDIA A100-SXM4-80GB"),
    "a10040gb": _datasheet("A100 SXM 40 GB", 40, 1.555, "NVIDIA A100-SXM4-40GB"),
    "l40s": _datasheet("L40S", 48, 0.864, "NVIDIA L40S"),
    "rtx4090": _datasheet("GeForce RTX 4090", 24, 1.008, "NVIDIA GeForce RTX 4090"),
}


@dataclass(frozen=True)
class LayerGroup:
    """``count`` layers of one shape. window: they see the last ``window`` tokens only, keep them in 16 bit, whatever
    the format, and drop older ones, as LowBitCache does by default; None: they keep all tokens in the format."""

    count: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    window: int | None = None

    @property
    def query_rows(self) -> int:
        """Query heads that read one KV head."""
        return self.num_heads // self.num_heads_kv


@dataclass(frozen=True)
class Model:
    """Shape of a model's attention. weights_gb: bytes read a step besides the cache, in GB; None: not known.

    sliding_layers: how many of the layers see the last ``sliding_window`` tokens only (see LayerGroup). mixed: the
    layers of a model whose layers differ in more than that; the other numbers then count for nothing.
    """

    layers: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    weights_gb: float | None = None
    sliding_layers: int = 0
    sliding_window: int = 0
    mixed: tuple[LayerGroup, ...] = ()

    def __post_init__(self):
        if not 0 <= self.sliding_layers <= self.layers or (self.sliding_layers and self.sliding_window < 1):
            raise ValueError(f"sliding_layers: got {self.sliding_layers} with a window of {self.sliding_window}, "
                             f"supported: 0 to {self.layers}, with a window of 1 or more")
        for name in ("layers", "num_heads", "num_heads_kv", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, supported: 1 or more")
        if self.num_heads % self.num_heads_kv:
            raise ValueError(f"heads: got {self.num_heads}, supported: multiples of kv-heads = {self.num_heads_kv}")
        if self.weights_gb is not None and self.weights_gb < 0:
            raise ValueError(f"weights-gb: got {self.weights_gb}, supported: 0 or more")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layers by shape."""
        shape = self.num_heads, self.num_heads_kv, self.head_dim
        counts = (self.layers - self.sliding_layers, None), (self.sliding_layers, self.sliding_window)
        return self.mixed or tuple(LayerGroup(count, *shape, window) for count, window in counts if count)

    @property
    def packed(self) -> tuple[LayerGroup, ...]:
        """The layers that keep their tokens in the format."""
        return tuple(group for group in self.groups if group.window is None)


@dataclass(frozen=True)
class Row:
    """One format's line. reason: why the format cannot be used or brings nothing, "" if it does.

    bits: stored bits per element of the whole cache, 16-bit tails, sliding layers and the codebooks of all layers
    included; cache_gb in 10^9 bytes; max_batch: largest batch of this context that fits beside the weights; floor_ms:
    least time a token step needs to read the cache; measured_ms: time of this package's kernels, between decode calls
    measured on this GPU with as many query rows a KV head (None: none was);
    ratio: the 16-bit floor over this one; step_ratio: the same with the time of the weights added to both (None: not
    known).
    """

    format: str
    bits: float = 0.0
    cache_gb: float = 0.0
    fits: bool = False
    max_batch: int = 0
    floor_ms: float = 0.0
    measured_ms: float | None = None
    ratio: float = 0.0
    step_ratio: float | None = None
    reason: str = ""


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, any case; ValueError with the known ones otherwise."""
    key = name.lower().replace(" ", "").replace("-", "")
    if key in GPUS:
        return GPUS[key]
    close = difflib.get_close_matches(key, GPUS, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(f"gpu: got {name!r}, supported: {', '.join(GPUS)}{hint}")


def gpu_of_device(device: str) -> Gpu | None:
    """The GPU that torch calls so; None for one that is not in the table (another board, a slice of a GPU)."""
    return next((gpu for gpu in GPUS.values() if gpu.device == device), None)


def parse_tokens(text: str) -> int:
    """ "131072", "128K" (x 1,024) or "1M" -> tokens."""
    match = re.fullmatch(r"(\d+)([kKmM]?)", text.strip())
    if not match or not int(match[1]):
        raise ValueError(f"ctx: got {text!r}, supported: a positive number of tokens, such as 4096, 128K or 1M")
    return int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]


def sequence_bytes(fmt: Format | None, num_heads_kv: int, head_dim: int, ctx: int, sinks: int = 0) -> int:
    """Bytes of one layer's cache of one sequence: packed pages, sinks and the 16-bit tail. fmt None: all 16 bit."""
    token = 2 * num_heads_kv * head_dim  # one side of one token in 16 bit
    if fmt is None:
        return 2 * ctx * token
    record = fmt.record(head_dim)
    total = 0
    for nbytes, window in ((record.v_offset, fmt.window_k), (record.nbytes - record.v_offset, fmt.window_v)):
        blocks = max(0, ctx - min(ctx, sinks) - window) // PAGE_TOKENS
        total += blocks * num_heads_kv * nbytes + (ctx - blocks * PAGE_TOKENS) * token
    return total


def level_bytes(pair: Levels, num_heads_kv: int, head_dim: int, ctx: int, sinks: int) -> int:
    """Bytes of one layer's cache of levels of one sequence: all of its 16-bit buffers, and frames for the tokens that
    left the window, the levels' own share of them high."""
    pair.check(head_dim)
    per_low, sizes = frame_sizes(*(fmt.record_bytes(head_dim) for fmt in pair.formats))
    blocks = max(0, ctx - min(ctx, sinks) - WINDOW) // PAGE_TOKENS
    of_block = (pair.percent * sizes[0] + (100 - pair.percent) * sizes[-1] / per_low) / 100
    return num_heads_kv * (buffer_bytes(sinks, head_dim) + round(blocks * of_block))


@cache
def pays_from(pair: Levels, head_dim: int, sinks: int) -> int:
    """Tokens from which levels are smaller than a uniform cache of their high format, in steps of a page."""
    first = sinks // PAGE_TOKENS * PAGE_TOKENS  # fewer tokens are sinks alone, for which levels have other buffers too
    return next(n for n in range(max(PAGE_TOKENS, first), first + (1 << 22), PAGE_TOKENS)
                if level_bytes(pair, 1, head_dim, n, sinks) < sequence_bytes(pair.high, 1, head_dim, n, sinks))


def window_bytes(group: LayerGroup, ctx: int) -> int:
    """Bytes of one sliding layer's cache of one sequence: all but one token of its window, in 16 bit."""
    return sequence_bytes(None, group.num_heads_kv, group.head_dim, min(ctx, max(0, group.window - 1)))


def floor_us(gpu: Gpu, group: LayerGroup, layer_bytes: float) -> float:
    """Least time of a token step in these layers, each of which reads this much cache, one kernel a layer."""
    passes = -(-group.query_rows // MAX_QUERY_ROWS)
    return group.count * gpu.read_us(layer_bytes * passes)


@cache
def _calls() -> dict:
    return json.loads(MEASURED.read_text())


def _calls_like(gpu: Gpu, group: LayerGroup) -> list[dict]:
    """The measured calls on this GPU of the layers' head_dim and query rows a KV head."""
    return [call for call in _calls()["calls"]
            if (call["gpu"], call["head_dim"], call["rows"]) == (gpu.name, group.head_dim, group.query_rows)]


def measured_note(gpu: Gpu, model: Model) -> str:
    """GPU, query rows, date and commits of the measured calls that a model's times come from, or that there is none."""
    rows = " and of ".join(dict.fromkeys(f"{group.query_rows} query rows a KV head at head_dim {group.head_dim}"
                                         for group in model.packed))
    if not rows:
        return "every layer has a window and keeps its tokens in 16 bit: the floor alone is shown"
    found = [_calls_like(gpu, group) for group in model.packed]
    if not all(found):
        return f"no call of {rows} was measured on {gpu.name}: the floor alone is shown"
    commits = ", ".join(dict.fromkeys(call["commit"] for calls in found for call in calls))
    return (f"between calls of {rows} measured on {gpu.name}, {_calls()['date']}, commit {commits}; -: none of this "
            "format, or none so small")


def measured_ms(gpu: Gpu, group: LayerGroup, fmt: Format | Levels | None, layer_bytes: float) -> float | None:
    """Time of a token step's decode calls over these layers, from those measured on this GPU with this format and as
    many query rows a KV head; None if there are none, or none so small.

    layer_bytes: of one layer's cache of the batch. Beyond the largest call times grow with the bytes.
    """
    if fmt is None:
        return None
    points = tuple(sorted(
        (call["batch"] * sequence_bytes(fmt, call["kv_heads"], call["head_dim"], call["seqlen"]), call["us"])
        for call in _calls_like(gpu, group) if call["format"] == fmt.name))
    if not points or layer_bytes < points[0][0]:
        return None
    return group.count * interpolate(points, layer_bytes) * 1e-3


def suggest(model: Model, ctx: int, batch: int, gpu: Gpu, formats: Iterable[str] | None = None,
            sinks: int | None = 0) -> list[Row]:
    """The 16-bit row, then one row for each format or pair of levels (default: the presets of both), in the given
    order; sinks None: the format's own.

    Raises KeyError (with close matches) for an unknown format, ValueError for a batch below 1,
    and for more tokens than a cache takes.
    """
    if batch < 1:
        raise ValueError(f"batch: got {batch}, supported: 1 or more")
    for name, tokens, least in (("ctx", ctx, 1), ("sinks", sinks or 0, 0)):
        if not least <= tokens <= MAX_TOKENS:
            raise ValueError(f"{name}: got {tokens}, supported: {least} to {MAX_TOKENS}")
    rows = [_row(model, ctx, batch, gpu, None, sinks)]
    rows += [_row(model, ctx, batch, gpu, levels.parse(name) or FORMATS[name], sinks)
             for name in formats or (*FORMATS, *levels.PRESETS)]
    return rows


@dataclass
class _Sums:
    """Over all layers: bytes of a sequence's tokens, in the format and in 16 bit, and of codebooks; least times in us;
    ms: of measured calls, None where one lacks."""

    size: int = 0
    plain_size: int = 0
    books: int = 0
    floor: float = 0.0
    plain_floor: float = 0.0
    ms: float | None = 0.0


def _sums(model: Model, ctx: int, batch: int, gpu: Gpu, fmt: Format | Levels | None, sinks: int) -> _Sums:
    """ValueError where the format does not serve the head_dim of a layer."""
    sums, size_of = _Sums(ms=0.0 if model.packed else None), level_bytes if isinstance(fmt, Levels) else sequence_bytes
    for group in model.groups:
        shape, books, ms = (group.num_heads_kv, group.head_dim), 0, 0.0
        if group.window is None:
            size, plain = size_of(fmt, *shape, ctx, sinks), sequence_bytes(None, *shape, ctx)
            books = group.num_heads_kv * fmt.shared_bytes(group.head_dim) if isinstance(fmt, Format) else 0
            ms = measured_ms(gpu, group, fmt, batch * size)
        else:
            size = plain = window_bytes(group, ctx)
        sums.size += group.count * size
        sums.plain_size += group.count * plain
        sums.books += group.count * books  # once a layer
        sums.floor += floor_us(gpu, group, batch * size + books)
        sums.plain_floor += floor_us(gpu, group, batch * plain)
        sums.ms = None if ms is None or sums.ms is None else sums.ms + ms
    return sums


def _row(model: Model, ctx: int, batch: int, gpu: Gpu, fmt: Format | Levels | None, sinks: int | None) -> Row:
    name = fmt.name if fmt else SIXTEEN_BIT
    sinks = (fmt.sinks if fmt else 0) if sinks is None else sinks
    try:
        sums = _sums(model, ctx, batch, gpu, fmt, sinks)
    except ValueError as error:
        return Row(name, reason=str(error))
    weights = (model.weights_gb or 0.0) * 1e9
    step_ratio = None
    if model.weights_gb is not None:
        weights_us = weights / gpu.peak_tb_per_s * 1e-6
        step_ratio = (sums.plain_floor + weights_us) / (sums.floor + weights_us)
    max_batch = max(0, int((gpu.memory_gb * 1e9 - weights - sums.books) // sums.size))
    cache_bytes = batch * sums.size + sums.books
    row = Row(name, 16 * cache_bytes / (batch * sums.plain_size), cache_bytes * 1e-9, max_batch >= batch, max_batch,
              sums.floor * 1e-3, sums.ms, sums.plain_floor / sums.floor, step_ratio)
    least = max((pays_from(fmt, group.head_dim, sinks) for group in model.packed), default=0) if isinstance(
        fmt, Levels) else 0
    if ctx < least:
        reason = f"larger than {fmt.high} below {least:,} tokens: 16-bit buffers"
    else:
        window = max(fmt.window_k, fmt.window_v) if isinstance(fmt, Format) else WINDOW
        reason = _reason(row, fmt, ctx - sinks < PAGE_TOKENS + window)
    return Row(**{**vars(row), "reason": reason})


def _reason(row: Row, fmt: Format | Levels | None, is_short: bool) -> str:
    if fmt is None:
        return ""
    if is_short and row.bits >= 16:
        return "no full page yet: all tokens are still in 16 bit"
    if row.ratio < MIN_GAIN:
        return "the cache is too small for its size to matter"
    if row.step_ratio is not None and row.step_ratio < MIN_GAIN:
        return "the step reads weights, hardly any cache"
    return ""
