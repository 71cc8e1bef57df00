"""A decoder of Llama's shape for benchmarks: random weights, one decode step, KV stores of 16 and of few bits.

Only shapes and bytes are those of the named models: weights are random, so what it generates means nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowbit_attn
from lowbit_attn import layout
from lowbit_attn.budget import SIXTEEN_BIT
from lowbit_attn.formats import FORMATS
from lowbit_attn.linear import VQWeight, linear
from lowbit_attn.testing import normal_codebooks

Weight = torch.Tensor | VQWeight
NORM_EPS = 1e-5
ROPE_BASE = 500_000.0
COPY_BYTES = 256 << 20  # of a cache's pages copied at once
FILL_TOKENS = 16384  # prefilled at once
KITTY_SINKS = 32
INTERLEAVED = 16  # rounds in which a few sequences take their pages, so that they lie among each other's


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; qk_norm: heads of q and k are normalised before RoPE (Qwen3)."""

    layers: int
    hidden: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    ffn: int
    vocab: int
    qk_norm: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) features of a layer's linear maps."""
        inner = self.num_heads * self.head_dim
        return {"qkv": (inner + 2 * self.num_heads_kv * self.head_dim, self.hidden), "o": (self.hidden, inner),
                "gate_up": (2 * self.ffn, self.hidden), "down": (self.hidden, self.ffn)}

    @property
    def linear_bytes(self) -> int:
        """Bytes of 16-bit weights that a step multiplies with: every layer's and the output head's."""
        return 2 * (self.layers * sum(out * features for out, features in self.linears.values())
                    + self.vocab * self.hidden)

    @property
    def weights_bytes(self) -> int:
        """All weights, the embedding among them, of which a step reads a row a sequence."""
        return self.linear_bytes + 2 * self.vocab * self.hidden

    @property
    def token_bytes(self) -> int:
        """16-bit K and V of one token in one layer."""
        return 2 * 2 * self.num_heads_kv * self.head_dim


SHAPES = {
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
}


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMS-normalised x + residual, x + residual), all [batch, hidden]."""
    residual = residual + x
    return norm(residual, weight), residual


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype) * weight


def split_heads(qkv: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, position: torch.Tensor,
                q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, num_heads: int, num_heads_kv: int):
    """qkv [batch, (heads + 2 heads_kv) head_dim] -> q, k, v [batch, 1, heads or heads_kv, head_dim]; q and k rotated by
    position int [batch] with tables [positions, head_dim]."""
    q, k, v = qkv.view(qkv.shape[0], 1, num_heads + 2 * num_heads_kv, -1).split(
        (num_heads, num_heads_kv, num_heads_kv), 2)
    if q_norm is not None:
        q, k = norm(q, q_norm), norm(k, k_norm)
    cosine, sine = (x[position][:, None, None] for x in (cosine, sine))

    def rotated(x):
        first, second = x.chunk(2, -1)
        return (x * cosine + torch.cat((-second, first), -1) * sine).contiguous()

    return rotated(q), rotated(k), v.contiguous()


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def multiply(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x W^T, of weights in 16 bit or in codebooks."""
    return linear(x, weight) if isinstance(weight, VQWeight) else F.linear(x, weight)


class Decoder:
    """Random weights of a shape, and one decode step with them.

    fuse: compile the elementwise parts, so that a step is not made of many small kernels. quantized: makes the layers'
    weights of (out, in) features; the embedding and the output head stay in 16 bit.
    """

    def __init__(self, shape: Shape, positions: int, dtype: torch.dtype, device: str, fuse: bool,
                 quantized: Callable[[int, int], VQWeight] | None = None):
        self.shape = shape

        def random(*size):
            return torch.empty(size, dtype=dtype, device=device).normal_(std=size[-1] ** -0.5)

        def ones(*size):
            return torch.ones(size, dtype=dtype, device=device)

        make = quantized or random
        self.layers = [{name: make(*size) for name, size in shape.linears.items()}
                       | {"norms": ones(2, shape.hidden), "head_norms": ones(2, shape.head_dim)}
                       for _ in range(shape.layers)]
        self.embedding = torch.empty(shape.vocab, shape.hidden, dtype=dtype, device=device).normal_()
        self.head, self.last_norm = random(shape.vocab, shape.hidden), ones(shape.hidden)
        angle = torch.arange(positions, device=device)[:, None] * ROPE_BASE ** -(
            torch.arange(0, shape.head_dim, 2, device=device) / shape.head_dim)
        self.cosine, self.sine = (table.to(dtype).repeat(1, 2) for table in (angle.cos(), angle.sin()))
        parts = (add_norm, split_heads, swiglu)
        self.add_norm, self.split_heads, self.swiglu = (torch.compile(f, dynamic=True) if fuse else f for f in parts)

    @property
    def weights(self) -> str:
        """Format of the layers' weights."""
        weight = self.layers[0]["o"]
        return weight.format if isinstance(weight, VQWeight) else SIXTEEN_BIT

    @property
    def linear_bytes(self) -> int:
        """Bytes of weights that a step multiplies with."""
        return self.head.nbytes + sum(layer[name].nbytes for layer in self.layers for name in self.shape.linears)

    def logits(self, tokens: torch.Tensor, position: torch.Tensor, store) -> torch.Tensor:
        """One step: tokens and their positions int [batch] -> logits [batch, vocab]; store gets their K and V."""
        shape, x = self.shape, self.embedding[tokens]
        x, residual = self.add_norm(x, torch.zeros_like(x), self.layers[0]["norms"][0])
        for i, layer in enumerate(self.layers):
            head_norms = tuple(layer["head_norms"]) if shape.qk_norm else (None, None)
            q, k, v = self.split_heads(multiply(x, layer["qkv"]), self.cosine, self.sine, position, *head_norms,
                                       shape.num_heads, shape.num_heads_kv)
            store.append(i, k, v)
            x = multiply(store.attend(i, q).flatten(1), layer["o"])
            x, residual = self.reduce_add_norm(x, residual, layer["norms"][1])
            x = multiply(self.swiglu(multiply(x, layer["gate_up"])), layer["down"])
            is_last = i + 1 == shape.layers
            x, residual = self.reduce_add_norm(x, residual,
                                               self.last_norm if is_last else self.layers[i + 1]["norms"][0])
        return F.linear(x, self.head)

    def step(self, tokens: torch.Tensor, position: torch.Tensor, store) -> None:
        """Greedy decoding in place: the next tokens and positions take the place of these."""
        tokens.copy_(self.best(self.logits(tokens, position, store)))
        position.add_(1)

    def reduce_add_norm(self, x: torch.Tensor, residual: torch.Tensor,
                        weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``add_norm`` of the sum over ranks of what they made of their heads or features: of one rank, as it is."""
        return self.add_norm(x, residual, weight)

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The most likely token of each sequence."""
        return logits.argmax(-1)

    def linear_step(self, inputs: dict[str, torch.Tensor]) -> None:
        """The linear maps of a step alone; inputs: [batch, in features] of each and of "head"."""
        for layer in self.layers:
            for name in self.shape.linears:
                multiply(inputs[name], layer[name])
        F.linear(inputs["head"], self.head)

    def linear_inputs(self, batch: int) -> dict[str, torch.Tensor]:
        sizes = {name: features for name, (_, features) in self.shape.linears.items()} | {"head": self.shape.hidden}
        return {name: torch.randn(batch, n, dtype=self.head.dtype, device=self.head.device)
                for name, n in sizes.items()}


class SixteenBitStore:
    """Static K and V [batch, num_heads_kv, seqlen, head_dim] of every layer; a step writes the last position and
    attends to all. attend_with: a key of ``candidates``; None: torch's choice."""

    def __init__(self, shape: Shape, batch: int, seqlen: int, spare: int, dtype: torch.dtype, device: str):
        size = (shape.layers, 2, batch, shape.num_heads_kv, seqlen, shape.head_dim)
        self.shape, self.kv, self.last, self.attend_with = shape, torch.empty(size, dtype=dtype, device=device), \
            seqlen - 1, None
        self.layer_bytes = self.kv[0].numel() * 2

    @staticmethod
    def sequence_bytes(shape: Shape, format: str, seqlen: int, spare: int) -> int:
        return seqlen * shape.token_bytes

    def fill(self) -> None:
        self.kv.normal_()

    def fill_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Every sequence gets the tokens k, v [seqlen - 1, num_heads_kv, head_dim]."""
        for mine, given in zip(self.kv[layer], (k, v)):
            mine[:, :, : self.last] = given.transpose(0, 1)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for mine, given in zip(self.kv[layer], (k, v)):
            mine[:, :, self.last] = given[:, 0]

    def restart(self) -> None:
        """Steps leave the length as it is."""

    def turns(self, step) -> list:
        """The steps that come in turn: all are alike."""
        return [step]

    def check(self) -> None:
        """No step can be refused."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [batch, 1, num_heads, head_dim] -> o of its shape."""
        if self.attend_with is None:
            return self._sdpa(layer, q, folded=False)
        backend, folded = self.attend_with
        with sdpa_kernel(backend):
            return self._sdpa(layer, q, folded)

    def _sdpa(self, layer: int, q: torch.Tensor, folded: bool) -> torch.Tensor:
        """folded: the query heads of a KV head stand as queries of one head, so that its K and V are read once."""
        k, v = self.kv[layer]
        heads = self.shape.num_heads_kv if folded else self.shape.num_heads
        x = q.view(q.shape[0], heads, -1, q.shape[-1])
        return F.scaled_dot_product_attention(x, k, v, enable_gqa=heads != k.shape[1]).reshape(q.shape)

    @staticmethod
    def candidates() -> list[tuple[SDPBackend, bool]]:
        backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
        return [(backend, folded) for backend in backends for folded in (False, True)]


def sinks_of(format: str) -> int:
    """Tokens in 16 bit at the start of a sequence: what the format is used with."""
    return KITTY_SINKS * format.startswith("kitty")


class LowBitStore:
    """A KVCache for every layer. seqlen: tokens that the first step attends to; spare: tokens it may grow by."""

    def __init__(self, shape: Shape, format: str, batch: int, seqlen: int, spare: int, dtype: torch.dtype, device: str):
        self.shape, self.batch, self.seqlen, self.spare = shape, batch, seqlen, spare
        pages = batch * self._pages(seqlen + spare)
        books = None  # random ones, for formats that need some: what is timed does not depend on them
        if FORMATS[format].needs_codebooks:
            books = normal_codebooks(format, shape.layers, shape.num_heads_kv, shape.head_dim)
        self.caches = [lowbit_attn.KVCache(format, pages, shape.num_heads_kv, shape.head_dim, dtype, device,
                                           sinks_of(format), max_batch=batch, max_seqlen=seqlen + spare,
                                           codebooks=books and books.layer(i))
                       for i in range(shape.layers)]
        self.starts = [cache.counters() for cache in self.caches]

    @staticmethod
    def _pages(seqlen: int) -> int:
        return -(-seqlen // layout.PAGE_TOKENS)

    @classmethod
    def sequence_bytes(cls, shape: Shape, format: str, seqlen: int, spare: int) -> int:
        """Bytes of one sequence in one layer, as allocated: pages, table, sinks and rings."""
        books = normal_codebooks(format, 1, shape.num_heads_kv, shape.head_dim).layer(0) \
            if FORMATS[format].needs_codebooks else None
        one = lowbit_attn.KVCache(format, 1, shape.num_heads_kv, shape.head_dim, sinks=sinks_of(format),
                                  max_seqlen=seqlen + spare, codebooks=books)
        return (cls._pages(seqlen + spare) * one.pool.nbytes + one.table.nbytes
                + sum(x.nbytes for x in (one.sink_k, one.sink_v, one.ring_k, one.ring_v)))

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes that a step reads of one layer's cache."""
        return self.caches[0].nbytes

    def fill(self) -> None:
        """Random tokens for each layer, quantized by the cache's own kernels."""
        size = (self.seqlen - 1, self.shape.num_heads_kv, self.shape.head_dim)
        cache = self.caches[0]
        for layer in range(self.shape.layers):
            self.fill_layer(layer, *(torch.randn(size, dtype=cache.dtype, device=cache.device) for _ in range(2)))

    def fill_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Every sequence gets the tokens k, v [seqlen - 1, num_heads_kv, head_dim], in pages of its own."""
        cache, rows = self.caches[layer], range(self.batch)
        rounds = INTERLEAVED if self.batch <= 2 * INTERLEAVED else 1
        for i in range(1, rounds + 1):
            cache.reserve(rows, (self.seqlen + self.spare) * i // rounds)
        for start in range(0, len(k), FILL_TOKENS):
            cache.prefill(0, k[start : start + FILL_TOKENS], v[start : start + FILL_TOKENS])
        self._copy_first_row(cache)
        self.starts[layer] = [x.clone() for x in cache.counters()]

    def _copy_first_row(self, cache: lowbit_attn.KVCache) -> None:
        used = int(cache.n_qk[0]) // layout.PAGE_TOKENS
        source, targets = cache.table[0, :used].long(), cache.table[1:, :used].long()
        rows = max(1, COPY_BYTES // max(1, used * cache.pool[0].nbytes))
        words = cache.pool.view(torch.int64)
        for some in targets.split(rows):
            words[some] = words[source]
        for x in (*cache.counters(), cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v):
            x[1:] = x[:1].clone()
        cache.sync()

    def restart(self) -> None:
        """The lengths after ``fill`` again, so that every measurement reads as much; the newest tokens' values stay
        those that steps have written."""
        for cache, start in zip(self.caches, self.starts):
            for x, value in zip(cache.counters(), start):
                x.copy_(value)
            cache.sync()

    def turns(self, step) -> list:
        """The steps that come in turn: all are alike."""
        return [step]

    def check(self) -> None:
        """Raise CacheFaultError if a captured step was refused."""
        for cache in self.caches:
            cache.check()

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.caches[layer].append(k, v)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return lowbit_attn.decode(q, self.caches[layer])[0]
