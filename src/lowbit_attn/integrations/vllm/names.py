"""Names of KV cache dtypes for vLLM, ``lowbit_<format>[-s<sinks>]``, and why a configuration cannot be served."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lowbit_attn import paged
from lowbit_attn.cache.state import MAX_Q_LEN
from lowbit_attn.formats import FORMATS, Format
from lowbit_attn.formats.levels import PRESETS as LEVELS

PREFIX = "lowbit_"
VARIABLE = "LOWBIT_ATTN_VLLM"  # the dtype, where vLLM's --kv-cache-dtype takes no names of others: 0.32, and its CPU
BOOKS = "LOWBIT_ATTN_CODEBOOKS"  # path of a codebook file, or of a folder of such files
SERVED = ("k8v8", "k8v4", "k4v4", "k4v2", "k2v2", "k2v2-s32", "k4tv4", "kitty", "kitty-pro", "cq4", "cq2", "kcq4vcq2")
LAYOUTS = ("BLHNC", "LBHNC")
DRAFT_MODEL = "draft_model"
DRAFTS = ("ngram", DRAFT_MODEL)
CONNECTORS = ("DecodeBenchConnector",)  # vLLM's own, which fills caches with dummy values to measure decode steps
PAGE = paged.PAGE
SLIDING_IN_16_BIT = ("--kv-cache-dtype-skip-layers sliding_window --attention-config "
                     "'{\"backend_per_kind\": {\"sliding_window\": \"FLASH_ATTN\"}}'")

_SINKS = re.compile(r"-s(\d+)$")


class Served(NamedTuple):
    """A format and the tokens of a sequence that stay in 16 bit."""

    format: Format
    sinks: int

    @property
    def is_private(self) -> bool:
        """Whether 16-bit tokens of a sequence say what its pages do not, so that no other one can use the pages."""
        return bool(self.sinks or self.format.window_v)


def dtype_name(name: str) -> str:
    return PREFIX + name


def parse(dtype: str) -> Served:
    """The format and sinks of a dtype's name; ValueError for a name that is none."""
    name = dtype.removeprefix(PREFIX)
    if name == dtype:
        raise ValueError(f"KV cache dtype: got {dtype!r}, supported: {PREFIX}<format>[-s<sinks>], as "
                         f"{', '.join(map(dtype_name, SERVED))}")
    if name in LEVELS or "+" in name:
        raise ValueError(f"KV cache dtype: got {dtype!r}, two levels in a sequence, supported: formats of one level")
    found = _SINKS.search(name)
    try:
        fmt = FORMATS[_SINKS.sub("", name)]
    except KeyError as error:
        raise ValueError(f"KV cache dtype: got {dtype!r}: {error}") from None
    return Served(fmt, int(found[1]) if found else fmt.sinks)


def asked(cache_dtype: str, variable: str | None) -> Served:
    """What --kv-cache-dtype or, where that says none of ours, the variable asks for."""
    names = {name for name in (cache_dtype, variable) if name and name.startswith(PREFIX)}
    if len(names) != 1:
        raise ValueError(f"--kv-cache-dtype {cache_dtype}, {VARIABLE}={variable}: supported: one name, in either")
    return parse(names.pop())


def check_dtype(layer_dtype: str, engine_dtype: str) -> None:
    """Raise NotImplementedError for a layer that vLLM wants in another dtype than the engine's, if that is ours."""
    if engine_dtype.startswith(PREFIX) and layer_dtype != engine_dtype:
        raise NotImplementedError(
            f"--kv-cache-dtype-skip-layers: a layer of dtype {layer_dtype} came to this backend, which packs every "
            f"layer that it gets; supported: layers of a kind that another backend takes, as {SLIDING_IN_16_BIT}")


@dataclass(frozen=True)
class Engine:
    """What of an engine's configuration decides whether it can be served; the defaults can."""

    device: str = "cpu"
    arch: str | None = None  # of a GPU, as kernels call it: "hopper" or "ampere"; None: none that has kernels
    dtype: torch.dtype = torch.float16  # of tokens in 16 bit
    block_size: int = PAGE
    prefix_caching: bool = False
    hybrid: bool = True
    layout: str = LAYOUTS[0]
    dcp: int = 1
    interleave: int = 1  # tokens that --decode-context-parallel-size deals to a rank at once
    pcp: int = 1
    tp: int = 1
    pp: int = 1
    connector: str | None = None
    drafts: str | None = None
    num_drafts: int = 0
    skips_layers: bool = False
    unsafe: tuple[str, ...] = ()  # settings that are on and cannot be served

    @property
    def max_q_len(self) -> int:
        """New tokens of a decoding row: its drafts and one; a draft model's rows have one more behind those."""
        return 1 + self.num_drafts + (self.drafts == DRAFT_MODEL)


@dataclass(frozen=True)
class Layer:
    """What of an attention layer decides whether it can be served."""

    head_dim: int
    num_heads_kv: int
    sliding_window: int | None = None
    alibi: bool = False
    kind: str = "decoder"
    shares_kv: bool = False
    num_heads: int | None = field(default=None, compare=False)  # query heads; None: as many as KV heads


def why_not(served: Served, engine: Engine, layer: Layer) -> list[str]:
    """Why an engine cannot serve a dtype, each reason with what to change; empty if it can.

    Whether a codebook format has a file that fits is not looked at here: ``books.find`` does.
    """
    fmt, name = served.format, f"{served.format}{f' with {served.sinks} sinks' if served.sinks else ''}"
    reasons = paged.why_not(fmt, layer.head_dim) or _no_kernels(fmt, engine, layer)
    for is_wrong, reason in (
        (engine.device not in ("cpu", "cuda"), f"device {engine.device}: supported: cpu, cuda"),
        (engine.block_size % PAGE, f"--block-size {engine.block_size}: supported: multiples of {PAGE}"),
        (served.is_private and engine.prefix_caching,
         f"{name}: tokens in 16 bit outside the pages cannot be shared, pass --no-enable-prefix-caching"
         f"{f' or serve {dtype_name(fmt.name)}-s0' if served.sinks and not fmt.window_v else ''}"),
        (not engine.hybrid, "the 16-bit ring of each request needs the hybrid cache manager, drop "
                            "--disable-hybrid-kv-cache-manager"),
        (engine.layout not in LAYOUTS, f"VLLM_KV_CACHE_LAYOUT={engine.layout}: supported: {', '.join(LAYOUTS)}"),
        *_undealt(served, engine),
        (engine.pcp > 1, f"--prefill-context-parallel-size {engine.pcp}: supported: 1"),
        (engine.pp > 1, f"--pipeline-parallel-size {engine.pp}: not run, supported: 1"),
        (engine.connector and engine.connector not in CONNECTORS,
         f"--kv-transfer-config with {engine.connector}: it was not run with these pages, drop it; supported: "
         f"{', '.join(CONNECTORS)}, to measure decode steps"),
        (engine.drafts and engine.drafts not in DRAFTS,
         f"--speculative-config with method {engine.drafts}: supported: {', '.join(DRAFTS)}"),
        (engine.drafts == DRAFT_MODEL and engine.layout != LAYOUTS[0],
         f"--speculative-config with method {DRAFT_MODEL}: pages of two models have two sizes, which needs "
         f"VLLM_KV_CACHE_LAYOUT={LAYOUTS[0]}"),
        (fmt.needs_codebooks and engine.drafts == DRAFT_MODEL,
         f"{name}: --speculative-config with method {DRAFT_MODEL}: its model has no codebooks, supported: ngram"),
        (fmt.needs_codebooks and engine.skips_layers,
         f"{name}: --kv-cache-dtype-skip-layers: codebooks are counted by layers, drop it"),
        (layer.sliding_window, f"sliding window {layer.sliding_window}: these layers stay in 16 bit, pass "
                               f"{SLIDING_IN_16_BIT}, which a CPU's one backend cannot serve"),
        *[(True, f"{setting}: supported: off, since it changes the order in which steps store and read tokens")
          for setting in engine.unsafe],
        (engine.device == "cuda" and engine.max_q_len > MAX_Q_LEN,
         f"--speculative-config with {engine.num_drafts} drafts: supported on a GPU: up to "
         f"{MAX_Q_LEN - 1 - (engine.drafts == DRAFT_MODEL)}"),
        (layer.alibi, "ALiBi: supported: positions in the keys"),
        (layer.kind != "decoder", f"attention of kind {layer.kind}: supported: decoder"),
        (layer.shares_kv, "layers that share another layer's cache: supported: a cache for each layer"),
    ):
        reasons += [reason] if is_wrong else []
    return reasons or _no_room(served, engine, layer)


def _undealt(served: Served, engine: Engine) -> list[tuple[bool, str]]:
    """Why blocks cannot be dealt to several ranks, each with whether it holds."""
    fmt, flag, is_dealt = served.format, f"--decode-context-parallel-size {engine.dcp}", engine.dcp > 1
    return [
        (is_dealt and engine.interleave != PAGE,
         f"{flag} with --cp-kv-cache-interleave-size {engine.interleave}: supported: {PAGE}, whole pages"),
        (is_dealt and bool(served.sinks or fmt.window_k or fmt.window_v),
         f"{flag}: sinks and windows in 16 bit are not dealt, supported: formats without, as {dtype_name('k4v4')}"
         f"{f' or {dtype_name(fmt.name)}-s0' if not (fmt.window_k or fmt.window_v) else ''}"),
        (is_dealt and fmt.needs_codebooks, f"{flag}: supported: formats without codebooks"),
        (is_dealt and engine.drafts is not None, f"{flag}: supported without --speculative-config"),
    ]


def _no_kernels(fmt: Format, engine: Engine, layer: Layer) -> list[str]:
    """Why no kernel of a GPU serves an engine's steps; empty if one does, and on a CPU."""
    if engine.device != "cuda":
        return []
    if engine.arch is None:
        return ["device cuda: this GPU's compute capability has no kernels, supported: 8.0, 8.9, 9.0"]
    heads = (layer.num_heads or layer.num_heads_kv) * engine.dcp  # those of all ranks that have the same KV heads
    return paged.no_kernels(fmt, engine.arch, layer.head_dim, engine.dtype, heads // layer.num_heads_kv)


def _no_room(served: Served, engine: Engine, layer: Layer) -> list[str]:
    """Why a ring does not fit a block of layout LBHNC, where all blocks have one size."""
    if engine.layout != "LBHNC":
        return []
    needed = served.sinks + paged.ring_slots(served.format, engine.max_q_len)
    room = engine.block_size * served.format.record(layer.head_dim).nbytes // PAGE // (4 * layer.head_dim)
    if room >= needed:
        return []
    fitting = -(-engine.block_size * needed // room // PAGE) * PAGE
    return [f"--block-size {engine.block_size}: holds {room} tokens in 16 bit with VLLM_KV_CACHE_LAYOUT=LBHNC, needed: "
            f"{needed}; pass --block-size {fitting} or leave the layout to BLHNC"]


def ring_bytes(served: Served, engine: Engine, layer: Layer) -> int:
    """Bytes of a request's ring of one layer, a whole number for each token of a block: as many as needed, or in layout
    LBHNC as a block has."""
    if engine.layout == "LBHNC":
        return engine.block_size * served.format.record(layer.head_dim).nbytes // PAGE * layer.num_heads_kv
    tokens = served.sinks + paged.ring_slots(served.format, engine.max_q_len)
    return -(-tokens * 4 * layer.num_heads_kv * layer.head_dim // engine.block_size) * engine.block_size


def ring_tokens(served: Served, nbytes: int, layer: Layer) -> int:
    """Tokens of a ring of so many bytes, sinks among them: behind those, whole tiles of a kernel."""
    tokens = nbytes // (4 * layer.num_heads_kv * layer.head_dim)
    return served.sinks + (tokens - served.sinks) // paged.RING_ALIGN * paged.RING_ALIGN
