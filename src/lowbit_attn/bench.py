"""Times decode beside the fastest read of the same bytes and torch's best 16-bit attention, in one run on one GPU.

A read is plain or has the cache hint that decode gives its pages, and "the fastest read" is the faster of the two;
"plain read" says that only that one was measured. Random data, distinct pages in permuted order, 64 residual tokens a
sequence, L2 flushed, medians. ``us`` is the call replayed from a CUDA graph. Needs a CUDA device and triton's timer.
"""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import log2

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowbit_attn import FORMATS, KVCache, budget, decode, kernels, layout, loader
from lowbit_attn.testing import normal_codebooks, permute_pages

RESIDUAL_TOKENS = 64
RAGGED_SEED = 1
RAGGED_NOTE = "fp16_us: equal lengths of the same total"  # so that torch's kernels read the same bytes without padding
READ_CTAS_PER_SM = (2, 3, 4, 6)
# high words of L2's policy (as in device/ptx.py, which imports the DSL): as a load without one, and lines that go first
PLAIN, HINTED = 0x10F00000, 0x12F00000
# a plain read is void below this share of the rate that is expected of it: a curve measured on this kind of GPU, or the
# H200's curve in proportion to another's memory, of which datasheets promise 2 to 8 % more than reads get
VOID_BELOW, VOID_BELOW_SCALED = 0.95, 0.85
OWN_READ_BYTES = 512 << 20  # what is read to learn the rate of a GPU that budget.GPUS has not
SDPA_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


@dataclass(frozen=True)
class BenchCase:
    """One decode step. Every sequence holds ``seqlen`` tokens, or, ragged, from ``ragged[0]`` to ``ragged[1]`` with
    ``seqlen`` as their mean: the same tokens in all. dtype: a name in torch."""

    format: str
    batch: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    seqlen: int
    q_len: int = 1
    dtype: str = "float16"
    ragged: tuple[int, int] | None = None

    def __post_init__(self):
        if self.ragged is None:
            return
        shortest, longest = self.ragged
        most = shortest + (self.batch - 1) * longest  # with one sequence at either end
        least = longest + (self.batch - 1) * shortest
        if any(n % layout.PAGE_TOKENS for n in (shortest, longest, self.seqlen)) or self.batch < 2 or not (
                0 < shortest < longest and least <= self.batch * self.seqlen <= most):
            raise ValueError(f"ragged: got {shortest} to {longest} with mean {self.seqlen} in a batch of {self.batch}, "
                             f"supported: multiples of {layout.PAGE_TOKENS} tokens, 2 or more sequences, one of them "
                             "at either end, that can have the mean")

    @property
    def rows(self) -> int:
        """Query rows of a KV head."""
        return self.num_heads // self.num_heads_kv * self.q_len

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence, the same at every call. Ragged ones: one sequence at either end, the others above
        the shortest in proportion to log-uniform draws, then single pages at random until the sum is right."""
        if self.ragged is None:
            return (self.seqlen,) * self.batch
        draw = random.Random(RAGGED_SEED)
        low, high = (n // layout.PAGE_TOKENS for n in self.ragged)
        missing = self.batch * (self.seqlen // layout.PAGE_TOKENS - low) - (high - low)  # above low, of the others
        shares = [(high / low) ** draw.random() - 1 for _ in range(self.batch - 2)]
        pages = [low, high, *(min(high, low + int(missing * share / sum(shares))) for share in shares)]
        excess = sum(pages) - self.batch * self.seqlen // layout.PAGE_TOKENS
        while excess:
            i, step = draw.randrange(2, self.batch), -1 if excess > 0 else 1
            if low <= pages[i] + step <= high:
                pages[i] += step
                excess += step
        draw.shuffle(pages)
        return tuple(n * layout.PAGE_TOKENS for n in pages)

    @property
    def line(self) -> dict:
        """What a line of the results says of the case; ``from_line`` is the inverse."""
        line = {"format": self.format, "batch": self.batch, "heads": self.num_heads, "kv_heads": self.num_heads_kv,
                "head_dim": self.head_dim, "seqlen": self.seqlen, "q_len": self.q_len, "dtype": self.dtype}
        return line | ({"ragged": list(self.ragged)} if self.ragged else {})

    @classmethod
    def from_line(cls, line: dict) -> "BenchCase":
        """The case of a line of the results; early lines name no dtype."""
        return cls(line["format"], line["batch"], line["heads"], line["kv_heads"], line["head_dim"], line["seqlen"],
                   line["q_len"], line.get("dtype", "float16"), tuple(line["ragged"]) if "ragged" in line else None)

    def __str__(self) -> str:
        heads, queries = f"{self.num_heads}/{self.num_heads_kv}", f" q{self.q_len}" * (self.q_len > 1)
        tokens = "L{}-{} mean {}".format(*self.ragged, self.seqlen) if self.ragged else f"L{self.seqlen}"
        dtype = f" {self.dtype}" * (self.dtype != "float16")
        return f"{self.format} b{self.batch} {heads} d{self.head_dim} {tokens}{queries}{dtype}"


def cache_tokens(seqlen: int) -> int:
    """Tokens that the cache holds of a sequence of this length: its last page is a residual of 64."""
    return seqlen // layout.PAGE_TOKENS * layout.PAGE_TOKENS - layout.PAGE_TOKENS + RESIDUAL_TOKENS


def make_cache(case: BenchCase) -> KVCache:
    """Random K and V through the cache's own quantize kernels; the last 64 tokens stay in the residual. Codebooks, if
    it needs some, are of normal entries."""
    lengths, dtype = [cache_tokens(n) for n in case.lengths], getattr(torch, case.dtype)
    pages, books = sum(n // layout.PAGE_TOKENS for n in lengths), None
    if FORMATS[case.format].needs_codebooks:
        books = normal_codebooks(case.format, 1, case.num_heads_kv, case.head_dim).layer(0)
    cache = KVCache(case.format, pages, case.num_heads_kv, case.head_dim, dtype, "cuda", sinks=0,
                    max_batch=case.batch, max_seqlen=max(lengths), max_q_len=case.q_len, codebooks=books)
    for row, length in enumerate(lengths):
        k, v = (torch.randn(length, case.num_heads_kv, case.head_dim, device="cuda", dtype=dtype) for _ in range(2))
        cache.prefill(row, k, v)
    permute_pages(cache, seed=1)
    return cache


def query_of(case: BenchCase, cache: KVCache) -> torch.Tensor:
    """Random q [batch, q_len, num_heads, head_dim] of the cache's dtype, on its device."""
    return torch.randn(case.batch, case.q_len, case.num_heads, case.head_dim, device=cache.device, dtype=cache.dtype)


def call_bytes(case: BenchCase, cache: KVCache) -> int:
    """Packed records, codebooks, sinks, residual, q and o of the call; positions of ordered tokens are not read."""
    value, packed = cache.format.v.spec(cache.head_dim), int(cache.counts.n_qv.sum()) // layout.PAGE_TOKENS
    unread = value.nbytes - value.wide.positions if value and value.wide else 0
    of_call = 2 * case.batch * case.q_len * case.num_heads * case.head_dim * 2
    return cache.nbytes - unread * packed * cache.num_heads_kv + of_call


def graph_us(step) -> float:
    """Median time of one replay of a captured step, L2 flushed before each."""
    from triton.testing import do_bench

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return 1e3 * do_bench(graph.replay, warmup=10, rep=60, return_mode="median")


@cache
def read_us(nbytes: int, policy: int = PLAIN) -> tuple[float, str]:
    """Best read of so many bytes over the launch shapes, and which it was. policy: PLAIN, or HINTED, as decode asks
    for pages: what the flush left in L2 then stays there, which saves time up to some 250 MB."""
    words = torch.randint(-(2**31), 2**31 - 1, (-(-nbytes // 16), 4), dtype=torch.int32, device="cuda")
    data = words.view(torch.uint32)
    sink = torch.zeros(1, dtype=torch.uint32, device="cuda")
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    shapes = {}
    for key in kernels.baselines("hopper"):
        for per_sm in READ_CTAS_PER_SM:
            kernel, ctas = loader.load(key), per_sm * sms
            shapes[f"{key.variant}x{per_sm}"] = graph_us(lambda: kernel(data, sink, ctas, policy))  # noqa: B023
    best = min(shapes, key=shapes.get)
    return shapes[best], best


@cache
def fp16_us(batch: int, num_heads: int, num_heads_kv: int, head_dim: int, seqlen: int,
            q_len: int, dtype: str = "float16") -> tuple[float, str]:
    """Best 16-bit decode attention of torch here over its backends, contiguous K and V, and which it was.

    Several queries see all tokens: the mask within a step would cost a backend more than it saves.
    """
    like = dict(device="cuda", dtype=getattr(torch, dtype))
    q = torch.randn(batch, num_heads, q_len, head_dim, **like)
    k, v = (torch.randn(batch, num_heads_kv, seqlen, head_dim, **like) for _ in range(2))
    times = {}
    # torch says at length why a backend has no kernel for the shape
    warnings.filterwarnings("ignore", message=".*(kernel|attention).*")
    for backend in SDPA_BACKENDS:
        def step():
            with sdpa_kernel(backend):  # noqa: B023
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=num_heads != num_heads_kv)
        try:
            times[f"sdpa {backend.name.lower()}"] = graph_us(step)
        except RuntimeError:
            continue  # this backend has no kernel for the shape
    best = min(times, key=times.get)
    return times[best], best


@dataclass(frozen=True)
class ReadFloor:
    """Least credible rate of a plain read in TB/s, 0 where any is; of: what it rests on."""

    tb_per_s: float
    of: str


def read_floor(nbytes: int, device: str, own_read_us: Callable[[int], float]) -> ReadFloor:
    """The floor for a read of so many bytes on a GPU by its name in torch.

    own_read_us: time of a plain read there; called only if the GPU is not in budget.GPUS, whose own rate for much is
    then taken for right, so that only small reads can be found slow.
    """
    known, curve = budget.gpu_of_device(device), budget.GPUS["h200"]
    expected = _h200_rate(nbytes)
    if known is curve:
        return ReadFloor(VOID_BELOW * expected, f"{VOID_BELOW:.0%} of what an H200 was measured to read")
    if known:
        scaled = expected * known.spec_tb_per_s / curve.spec_tb_per_s
        return ReadFloor(VOID_BELOW_SCALED * scaled, f"{VOID_BELOW_SCALED:.0%} of the H200's reads in proportion to "
                         f"{known.name}'s {known.spec_tb_per_s:g} TB/s ({known.source})")
    own = OWN_READ_BYTES / own_read_us(OWN_READ_BYTES) * 1e-6
    return ReadFloor(VOID_BELOW_SCALED * expected * own / _h200_rate(OWN_READ_BYTES),
                     f"{VOID_BELOW_SCALED:.0%} of the H200's reads in proportion to {own:.2f} TB/s, this GPU's own "
                     f"read of {OWN_READ_BYTES >> 20} MiB: {device} is not in the table")


def _h200_rate(nbytes: int) -> float:
    """TB/s between the measured sizes, linear in log2; 0 up to the smallest, where any rate is credible."""
    points = [(log2(size), size / us * 1e-6) for size, us in budget.GPUS["h200"].reads if size]
    size = log2(nbytes)
    if size <= points[0][0]:
        return 0.0
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if size <= x1:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return points[-1][1]


def fastest_reads(lines: list[dict]) -> tuple[list[float], str]:
    """us of the fastest read of each line's bytes, and what they are called: "read", the faster of plain and hinted, or
    "plain read", for all lines alike, where one of them (an early one) has no other."""
    if all("hinted_read_us" in line for line in lines):
        return [min(line["read_us"], line["hinted_read_us"]) for line in lines], "read"
    return [line["read_us"] for line in lines], "plain read"


def measure(case: BenchCase, cache: KVCache, arch: str, path: str | None) -> dict:
    """The numbers of one case: a cache of ``make_cache``, read by one architecture's kernels on one path (None: the
    dispatcher's pick)."""
    q = query_of(case, cache)
    nbytes = call_bytes(case, cache)
    us = graph_us(lambda: decode(q, cache, path=path))
    read, read_shape = read_us(nbytes)
    hinted, _ = read_us(nbytes, HINTED)
    floor = read_floor(nbytes, torch.cuda.get_device_name(), lambda size: read_us(size)[0])
    fp16, fp16_by = fp16_us(case.batch, case.num_heads, case.num_heads_kv, case.head_dim, case.seqlen, case.q_len,
                            case.dtype)
    return {
        "arch": arch, "path": path, **case.line,
        "us": round(us, 2), "bytes": nbytes, "read_us": round(read, 2), "read_shape": read_shape,
        "hinted_read_us": round(hinted, 2),
        "fp16_us": round(fp16, 2), "fp16_by": fp16_by, "void": nbytes / read / 1e6 < floor.tb_per_s, "floor": floor.of,
        **({"note": RAGGED_NOTE} if case.ragged else {}),
    }
