"""What the GPU tests run: a fixed list of decode kernels (the fast subset) and a sample of everything, drawn by a seed.

Both are needed twice: where kernels are built, ahead and without a GPU (gpu.build), and where they run. Names like
"k4v4+w128" are windowed's: what builds or calls their kernels registers them (windowed.registered).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, product

import torch
from windowed import FORMATS

from lowbit_attn import kernels
from lowbit_attn.cache.state import MAX_Q_LEN
from lowbit_attn.formats import Kind
from lowbit_attn.kernels import KernelKey

F16, BF16 = "float16", "bfloat16"
BITS = (8, 4, 2, 1)
HEAD_DIMS = (64, 96, 128, 256)
# query rows of a KV head: another kernel each, or blocks
ROW_CLASSES = ((1, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, 512))
TILE_HEAD_DIMS = (64, 128)  # of the paper's own case on the tile path
LENGTHS = (0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300, 383, 700, 1100, 2051, 4097)
CASES_OF_A_KERNEL = 7
# inputs that broke one arithmetic or another: their data are never drawn again
HARD = ("k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "v-300x", "v-token-300x", "v-1e-4-beside-sink",
        "v-page-1e3-after-1e-4", "zero-200x-range", "meta-beyond-fp16", "q-1e6-k-1e-6")
# beside these a softmax scale of 0.3 (up to five times head_dim^-1/2) or a sink logit leaves 16-bit attention no digit
LARGE_LOGITS = ("k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "zero-200x-range")
# 16-bit attention itself is off by a third of what a bound allows: above this one a wrong kernel could pass
BOUND_CEILING = 0.05
DRAWN_AGAIN_SHARE = 0.01


@dataclass(frozen=True)
class MatrixKernel:
    """What one decode kernel is compiled for, whatever the architecture; rows: of the calls it must serve."""

    format: str
    dtype: str
    head_dim: int
    rows: int
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join((self.format, self.dtype, f"d{self.head_dim}", f"r{self.rows}", *self.features))

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def shape(self, arch: str, path: str | None = None) -> tuple[str, int] | None:
        """(path, rows) of the kernel that an architecture takes for it; None: it serves no such cache."""
        return kernels.pick(arch, FORMATS[self.format], self.head_dim, self.torch_dtype, self.rows, path,
                            self.features)[0]

    def keys(self, arch: str, path: str | None = None) -> list[KernelKey]:
        """The kernels that decode calls need on the one target of an architecture that runs on Hopper: without a path
        also those of calls with other numbers of blocks of query rows (dispatch.for_shape)."""
        common = (kernels.ARCH_TARGETS[arch][-1], self.dtype, self.head_dim)
        shapes = [self.shape(arch, path)]
        if path is None and shapes[0]:
            shapes += [self.shape(arch, other) for other in kernels.other_ctas(arch, shapes[0][0])]
        return [kernels.decode_key(arch, *common, self.format, *shape, features=self.features)
                for shape in shapes if shape]


REGISTER = tuple(MatrixKernel(*kernel) for kernel in (
    # the presets of serving, and every width on either side
    ("k4v4", F16, 128, 8), ("k4v4", F16, 64, 8), ("k4v4", F16, 128, 16), ("k4v4", BF16, 128, 8),
    ("k2v2", F16, 128, 8), ("k2v2", F16, 64, 8), ("k2v2", BF16, 64, 16), ("k4v2", F16, 128, 8), ("k4v2", F16, 64, 8),
    ("k8v4", F16, 128, 8), ("k8v8", F16, 64, 8), ("k8v8", BF16, 128, 16), ("k2v4", F16, 128, 8),
    ("k1v1", F16, 128, 8), ("k1v2", F16, 64, 16), ("k4v1", F16, 128, 16), ("k2v8", BF16, 64, 8),
    # keys per token
    ("k4tv4", F16, 128, 8), ("k2tv2", F16, 64, 8), ("k8tv2", F16, 128, 16), ("k1tv4", BF16, 128, 8),
    # groups
    ("k4v4-g32", F16, 128, 8), ("k2v2-g64-vg32", F16, 64, 8), ("k4v4-vg64", F16, 128, 16),
    ("k4tv4-g32-vg64", F16, 128, 8), ("k2tv2-g64", BF16, 128, 8), ("k1v8-g32-vg32", F16, 64, 8),
    # the largest register demand: 16 rows beside several groups of K
    ("k4v4-g32", F16, 128, 16), ("k4tv4-g32-vg64", BF16, 128, 16), ("k2tv2-g64-vg64", F16, 128, 16),
    # bf16 metadata
    ("k4v4-bf16", BF16, 128, 8), ("k2v2-g32-bf16", BF16, 64, 8), ("k4tv4-g64-vg32-bf16", BF16, 128, 8),
    ("k8v2-bf16", F16, 128, 8),
    # K packed beside V in 16 bit
    ("k4v4+w128", F16, 128, 8), ("k2v2+w128", F16, 64, 8), ("k4tv4+w256", BF16, 128, 16),
    # the other head_dims
    ("k4v4", F16, 96, 8), ("k2v2-g32", BF16, 96, 16), ("k8tv4-g32-vg32", F16, 96, 8), ("k4v4", F16, 256, 8),
    ("k2v2", BF16, 256, 8), ("k8v4", F16, 256, 8), ("k4tv4", F16, 256, 8),
    # what is compiled in only where it is asked for
    ("k4v4", F16, 128, 8, ("softcap",)), ("k4v4", F16, 128, 16, ("window",)),
    ("k2v2-g32", BF16, 64, 8, ("softcap", "window")), ("k4tv4", F16, 128, 8, ("window",)),
    ("k4v4+w128", F16, 128, 8, ("softcap", "window")), ("k4v4", F16, 256, 8, ("softcap", "window")),
))
INTEGER = tuple(MatrixKernel(*kernel) for kernel in (  # Hopper's path for up to 4 rows
    ("k4v4", F16, 128, 4), ("k4v4", F16, 64, 4), ("k4v4", BF16, 128, 4), ("k2v2", F16, 128, 4), ("k2v2", BF16, 64, 4),
    ("k4v2", F16, 128, 4), ("k8v4", F16, 128, 4), ("k8v8", BF16, 128, 4), ("k1v1", F16, 64, 4), ("k2v8", F16, 64, 4),
    ("k1v4", F16, 128, 4), ("k4v4-g32-vg32", F16, 128, 4), ("k2v2-g64-vg64", BF16, 64, 4),
    ("k1v1-g32-vg64", F16, 128, 4), ("k4v4-bf16", BF16, 128, 4), ("k2v2-g32-vg32-bf16", BF16, 128, 4),
    ("k4v4", F16, 96, 4), ("k2v2-vg32", F16, 96, 4),
    ("k4v4", F16, 256, 4), ("k8v4", BF16, 256, 4), ("k4v4-g32-vg128-bf16", BF16, 256, 4),
    ("k4v4", F16, 128, 4, ("softcap",)), ("k2v2", F16, 128, 4, ("window",)),
    ("k4v4-g64", F16, 64, 4, ("softcap", "window")), ("k8v8", F16, 256, 4, ("softcap", "window")),
    # K packed beside V in 16 bit
    ("k4v4+w128", F16, 128, 4), ("k2v2-g32+w128", F16, 64, 4), ("k8v1+w256", BF16, 128, 4),
    ("k4v4-vg32+w128", F16, 256, 4), ("k1v4-g64+w128", F16, 128, 4, ("softcap", "window")),
))
INTEGER_BESIDE_REGISTER = tuple(k for k in INTEGER if k.format in ("k4v4", "k2v2"))  # calls of 5 rows leave the path
WIDE = tuple(MatrixKernel(*kernel) for kernel in (
    # many query rows at once
    ("k4v4", F16, 128, 64), ("k2v2", BF16, 128, 64), ("k8v4", F16, 64, 64), ("k4tv4", F16, 128, 64),
    ("k4v4", F16, 256, 64), ("k2v2", F16, 96, 64), ("k1v1-bf16", BF16, 64, 64), ("k4tv4-g32-vg64", F16, 128, 64),
    ("k2v2-g32-bf16", BF16, 128, 64), ("k4v4+w128", F16, 128, 64), ("k4v2", BF16, 256, 64),
    ("k4v4", F16, 128, 64, ("softcap", "window")), ("k2v2-g64", F16, 64, 64, ("window",)),
    ("k4v4-vg32", BF16, 96, 64), ("k8v8-vg32-bf16", F16, 96, 64),  # parts of a column hold whole groups of V
))
FEW = tuple(MatrixKernel(*kernel) for kernel in (  # the tile path with few query rows
    *(("k4v4", F16, head_dim, 8) for head_dim in TILE_HEAD_DIMS),
    ("k2v2", BF16, 128, 8), ("k4v4", F16, 96, 8), ("k4v4", F16, 256, 8), ("k8tv4-g32", F16, 64, 8),
    ("k1v8-g32-vg32-bf16", BF16, 128, 8), ("k4v2+w128", BF16, 256, 8, ("window",)),
    ("k4v4", F16, 128, 8, ("softcap", "window")), ("k8v8", F16, 128, 8), ("k2v8", F16, 128, 8),
))

KITTY = tuple(MatrixKernel(*kernel) for kernel in (
    ("kitty", F16, 128, 4), ("kitty-pro", F16, 128, 4), ("kitty-pro", BF16, 128, 4), ("kitty", F16, 64, 4),
    ("kitty-b40-vg64", F16, 128, 4), ("kitty-pro-bf16", F16, 64, 4), ("kitty-pro", F16, 96, 4),
    ("kitty-b0", F16, 128, 4), ("kitty-bf16", BF16, 128, 4), ("kitty", F16, 128, 4, ("softcap", "window")),
    ("kitty", F16, 128, 8), ("kitty-pro", F16, 128, 8), ("kitty-pro", BF16, 128, 16), ("kitty", F16, 64, 8),
    ("kitty-pro-bf16", BF16, 64, 16), ("kitty-pro", F16, 256, 8), ("kitty-b40-vg64", F16, 128, 8),
    ("kitty-b0", F16, 128, 8), ("kitty-bf16", BF16, 128, 8), ("kitty-pro-vg32", F16, 96, 8),
    ("kitty-pro", F16, 128, 8, ("softcap", "window")), ("kitty-variance", F16, 128, 64), ("kitty-pro", BF16, 256, 64),
))

CODEBOOK = tuple(MatrixKernel(*kernel) for kernel in (
    *((name, dtype, head_dim, 4) for name in ("cq2", "cq4", "kcq4vcq2") for dtype in (F16, BF16)
      for head_dim in (128, 64)),
    *((name, F16, 128, rows, features) for name in ("cq2", "cq4", "kcq4vcq2") for rows in (4, 8)
      for features in (("softcap",), ("window",), ("softcap", "window"))),
    ("kcq2vcq4", F16, 128, 4), ("cq2-nonorm", F16, 128, 4),
    *((name, dtype, head_dim, 8) for name in ("cq2", "cq4", "kcq4vcq2") for dtype in (F16, BF16)
      for head_dim in (128, 64)),
    ("kcq2vcq4", F16, 128, 8), ("cq2-nonorm", F16, 128, 8),
    *((name, dtype, head_dim, 2) for name in ("cq2", "cq4", "kcq4vcq2") for dtype in (F16, BF16)
      for head_dim in (128, 64)),
    ("kcq2vcq4", F16, 128, 2), ("cq2-nonorm", F16, 128, 2), ("cq2", F16, 128, 2, ("softcap", "window")),
    *((name, dtype, head_dim, 64) for name in ("cq2", "cq4", "kcq4vcq2") for dtype in (F16, BF16)
      for head_dim in (128, 64)),
    ("kcq2vcq4", F16, 128, 64), ("cq2-nonorm", F16, 128, 64), ("cq4", F16, 128, 64, ("softcap", "window")),
    *((name, dtype, 128, 64) for name in ("k4vcq2", "kcq4v2", "k8tvcq4", "cq1", "kcq2vcq1", "k4vcq1")
      for dtype in (F16, BF16)),
))

# Ampere's in the sizes of sm_89, whose shared memory does not hold both codebooks of head_dim 128
CODEBOOK_SM_89 = tuple(MatrixKernel(name, dtype, head_dim, rows) for name in ("cq2", "cq4", "kcq4vcq2")
                       for dtype in (F16, BF16) for head_dim in (128, 64) for rows in (2, 4, 8))

BOOSTED = tuple(MatrixKernel(*kernel) for kernel in (  # values of two widths
    *(("k4v2-boost", dtype, head_dim, rows) for dtype in (F16, BF16) for head_dim in (64, 128) for rows in (4, 8, 16)),
    ("k4v2-boost", F16, 256, 4), ("k4v2-boost", BF16, 256, 8), ("k4v2-boost", F16, 128, 4, ("softcap",)),
    ("k4v2-boost", F16, 128, 8, ("softcap",)), ("k4v2-boost16to8", F16, 128, 4), ("k4v2-boost16to8", BF16, 128, 8),
    ("k8v4-boost64", F16, 64, 4), ("k8v4-boost64", F16, 128, 8), ("k4v1-boostto4-bf16", BF16, 128, 4),
    ("k4v1-boostto4-bf16", BF16, 128, 8), ("k2v4-boost64", F16, 96, 4), ("k2v2-boost96to8", F16, 128, 16),
))

LEVEL_WINDOWS = tuple(MatrixKernel(name, F16, head_dim, rows, (*others, kernels.LEVEL_WINDOW))  # test_gpu_level_windows
                      for names, head_dim, rows, *others in (
                          (("k8v4", "k4v2"), 128, 4), (("k8v4", "k4v2"), 64, 2), (("k8v4", "k4v2"), 64, 16),
                          (("k4v4", "kitty-pro"), 128, 7, "softcap")) for name in names)

# the integer path with four CTAs an SM, and with an even share of pages for each CTA
SMALL, STREAM = (tuple(k for k in INTEGER + KITTY + BOOSTED if k.rows == 4 and k.shape("hopper", path))
                  for path in ("small", "stream"))

# what tiny models of test_gpu_hf.py ask for: single tokens, and chunks whose queries come as heads
MODELS = tuple(MatrixKernel(*kernel) for kernel in (
    *((name, F16, 128, rows) for name in ("k4v4", "k2v2") for rows in (4, 8, 16, 512)),
    ("k4v4", F16, 128, 4, ("window",)), *(("k4v4", BF16, 128, rows) for rows in (4, 8, 16, 512)),
    ("kitty-weighted", F16, 128, 4),
    *(("k4v4", F16, 256, rows, features) for rows in (3, 6, 9, 384) for features in ((), ("softcap",))),
    ("k4v4", F16, 256, 3, ("window",)), ("k4v4", F16, 256, 3, ("softcap", "window")),
))

# formats, dtype and head_dim whose quantize and dequantize kernels are compared with the CPU's bytes
QUANTIZED = (
    ("k4v4", F16, 64), ("k4v4", F16, 128), ("k2v2", F16, 64), ("k2v2", F16, 128), ("k8v1-g32-vg32", F16, 64),
    ("k1v8-bf16", BF16, 128), ("k4tv4", F16, 128), ("k2tv2-g32", F16, 64), ("k1tv1-g64-vg64-bf16", BF16, 128),
    ("k4v2-g64-vg32", F16, 96),
    ("kitty", F16, 128), ("kitty-pro-bf16", BF16, 64), ("kitty-pro-variance", BF16, 128), ("kitty-b24-random", F16, 96),
    ("kitty-weighted", F16, 128), ("kitty-pro-weighted-bf16", BF16, 64), ("kitty-b0-weighted", F16, 64),
    ("kitty-pro", F16, 256), ("k8tv8-g32", BF16, 96), ("k2v4", BF16, 256), ("k4tv1-vg128", F16, 256),
    ("k4v2-boost", F16, 128), ("k4v2-boost", BF16, 64), ("k4v1-boostto4-bf16", BF16, 128), ("k8v4-boost64", F16, 256),
)

# formats, dtype and head_dim whose steps on the device are compared with the CPU's, byte by byte
APPENDED = (
    ("k4v4", F16, 128), ("k4v4", F16, 64), ("k2v2", F16, 128), ("k8v4", F16, 64), ("k4tv4", F16, 128),
    ("kitty", F16, 128), ("kitty-pro-bf16", BF16, 64), ("k4v4-bf16", BF16, 128), ("k8tv8-g32", BF16, 96),
    ("k4v4", F16, 256), ("kitty-weighted", F16, 128),
    ("k4v4", F16, 96), ("k2v2", F16, 96), ("kitty-b24", F16, 96), ("k4v4", BF16, 128),
    ("k4v2-boost", F16, 128), ("k4v2-boost", BF16, 64), ("k8v4-boost64", F16, 256),
)


def keys(arch: str) -> list[KernelKey]:
    """What the fast subset needs beyond the shipped set, for the one target of an architecture that runs on Hopper."""
    target = kernels.ARCH_TARGETS[arch][-1]
    wanted = [key for kernel in REGISTER for key in kernel.keys(arch, "register")]
    wanted += [key for kernel in INTEGER for key in kernel.keys(arch, "integer")]
    wanted += [key for kernel in SMALL for key in kernel.keys(arch, "small")]
    wanted += [key for kernel in STREAM for key in kernel.keys(arch, "stream")]
    wanted += [key for kernel in INTEGER_BESIDE_REGISTER for key in replace(kernel, rows=8).keys(arch, "register")]
    wanted += [key for kernel in WIDE + KITTY + CODEBOOK + BOOSTED + MODELS + LEVEL_WINDOWS
               for key in kernel.keys(arch)]
    wanted += [key for kernel in FEW for key in kernel.keys(arch, "tile")]
    if arch == "ampere":
        wanted += [replace(key, sizes="sm_89") for kernel in CODEBOOK_SM_89 for key in kernel.keys(arch)]
    wanted += [key for name, dtype, head_dim in QUANTIZED
               for key in kernels.packing_keys(target, dtype, head_dim, FORMATS[name])]
    wanted += [key for name, dtype, head_dim in APPENDED
               for key in kernels.step_keys(target, dtype, head_dim, FORMATS[name])]
    return list(dict.fromkeys([*wanted, *kernels.level_window_keys(target)]))


# ---- the sample


@dataclass(frozen=True)
class Call:
    """One decode call of the sample: what testing.Case and decode take, as plain values."""

    kernel: MatrixKernel
    ratio: int
    q_len: int
    num_heads_kv: int
    lengths: tuple[int, ...]
    sinks: int
    data: str
    softmax_scale: float | None
    softcap: float | None
    window: int | None
    keep_sinks: bool
    has_sink_logits: bool
    range_search: bool | None
    rotate_keys: bool
    has_table_per_head: bool
    shared_pages: bool
    num_splits: int | None
    seed: int

    @property
    def is_hard_input(self) -> bool:
        """Whether it is one of HARD as it stands, with nothing that makes its logits larger or drowns its tokens."""
        is_scaled = (self.softmax_scale or 0) > self.kernel.head_dim**-0.5
        return self.data in HARD and not (is_scaled or self.rotate_keys or self.has_sink_logits)

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths)) if len(self.lengths) < 9 else f"{len(self.lengths)}x"
        return f"{self.kernel}-x{self.ratio}-q{self.q_len}-L{lengths}-{self.seed}"


def sample(seed: int, count: int) -> list[Call]:
    """``count`` calls, the same for both architectures, over about count / CASES_OF_A_KERNEL kernels."""
    rng = random.Random(seed)
    kernels_of_sample = list(islice(_kernels(rng), -(-count // CASES_OF_A_KERNEL)))
    return [_call(rng, kernels_of_sample[i // CASES_OF_A_KERNEL], i) for i in range(count)]


def settle(call: Call, bound: Callable[[Call], float]) -> Call:
    """The call itself, or, where what its o may be off by exceeds BOUND_CEILING, one drawn again: of the same kernel
    and, if they are hard, the same data. A hard input as it stands is kept whatever its bound."""
    for attempt in count():
        if call.is_hard_input or bound(call) <= BOUND_CEILING:
            return call
        rng = random.Random(f"{call} again {attempt}")
        call = _call(rng, call.kernel, call.seed, call.data if call.data in HARD else None)


def most_drawn_again(calls: int) -> int:
    """How many calls of a sample of so many may have been drawn again; of a small one, one."""
    return max(1, int(DRAWN_AGAIN_SHARE * calls))


def sample_keys(arch: str, seed: int, count: int) -> list[KernelKey]:
    """The kernels that a sample needs on the one target of an architecture that runs on Hopper."""
    drawn = dict.fromkeys(call.kernel for call in sample(seed, count))
    return list(dict.fromkeys(key for kernel in drawn for key in kernel.keys(arch)))


def _kernels(rng: random.Random) -> Iterator[MatrixKernel]:
    """Distinct kernels without end: each property goes through all of its values in a new random order, again and
    again, so that a sample of a few dozen has every value of every property."""
    bits = _rounds(rng, tuple(product(BITS, BITS)))
    per_token, k_group = _rounds(rng, (False, False, True)), _rounds(rng, (0, 32, 64, 128))
    v_group = _rounds(rng, (0, 0, 32, 64, 128))
    bf16_meta, lag = _rounds(rng, (False, False, True)), _rounds(rng, (0, 0, 0, 0, 128, 0, 0, 256))
    dtype, head_dim, rows = _rounds(rng, (F16, BF16)), _rounds(rng, HEAD_DIMS), _rounds(rng, ROW_CLASSES)
    features = _rounds(rng, ((), (), (), ("softcap",), ("window",), ("softcap", "window")))
    seen = set()
    while True:
        (k, v), t, g, vg, d = next(bits), next(per_token), next(k_group), next(v_group), next(head_dim)
        name = f"k{k}{'t' * t}v{v}" + f"-g{g}" * bool(g) + f"-vg{vg}" * bool(vg) + "-bf16" * next(bf16_meta)
        lagging = next(lag)
        name += f"+w{lagging}" * bool(lagging)
        kernel = MatrixKernel(name, next(dtype), d, next(rows)[1], next(features))
        if kernel not in seen and _exists(kernel) and all(kernel.shape(arch) for arch in kernels.ARCH_TARGETS):
            seen.add(kernel)
            yield kernel


def _exists(kernel: MatrixKernel) -> bool:
    try:
        FORMATS[kernel.format].record(kernel.head_dim)
    except ValueError:
        return False
    return True


def _rounds(rng: random.Random, values: tuple) -> Iterator:
    while True:
        yield from rng.sample(values, len(values))


def _call(rng: random.Random, kernel: MatrixKernel, seed: int, data: str | None = None) -> Call:
    """A call of a kernel; data: instead of drawn ones."""
    low, high = next(c for c in ROW_CLASSES if c[1] == kernel.rows)
    ratio, q_len = rng.choice([(r, n) for r in (*range(1, 17), 32) for n in range(1, MAX_Q_LEN + 1)
                               if low <= r * n <= high])
    batch = rng.choice((1, 2, 3, 5)) if rng.random() < 0.9 else rng.choice((32, 256))
    lengths = tuple(rng.choice(LENGTHS if batch < 9 else LENGTHS[:9]) for _ in range(batch))
    fmt, is_bf16 = FORMATS[kernel.format], kernel.dtype == BF16
    fits = {"q-1e6-k-1e-6": is_bf16, "meta-beyond-fp16": is_bf16 and fmt.k.storage == torch.bfloat16}
    choices = ["normal"] * 12 + ["flat-attention"] + [name for name in HARD if fits.get(name, True)]
    data = data or rng.choice(choices)
    scales = (None, None, 0.05) if data in LARGE_LOGITS else (None, None, 0.05, 0.3)
    windowed = "window" in kernel.features
    return Call(
        kernel, ratio, q_len, rng.choice((1, 2, 3)) if batch < 9 else 1, lengths, rng.choice((0, 0, 1, 4, 33, 64)),
        data, rng.choice(scales),
        rng.choice((5.0, 30.0, 50.0)) if "softcap" in kernel.features else None,
        rng.choice((1, 7, 64, 128, 200, 513, 1024)) if windowed else None, windowed and rng.random() < 0.5,
        data not in LARGE_LOGITS and rng.random() < 0.25, rng.choice((None, None, True, False)),
        fmt.k.kind is Kind.TOKEN and kernel.head_dim != 96 and data != "meta-beyond-fp16" and (
            rng.random() < 0.4),
        rng.random() < 0.25, rng.random() < 0.25, rng.choice((None, None, 1, 2, 3, 7, 40)), seed)
