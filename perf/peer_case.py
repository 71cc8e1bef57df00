"""What every peer of perf/peers.py gets and gives: one decode step over data of one shape, its error and its time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Unavailable(RuntimeError):
    """A peer cannot run here; the message is the reason."""


class Shape(NamedTuple):
    """One new token for each of ``batch`` sequences of ``seqlen`` tokens."""

    batch: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    seqlen: int

    @property
    def line(self) -> dict:
        return {"batch": self.batch, "heads": self.num_heads, "kv_heads": self.num_heads_kv,
                "head_dim": self.head_dim, "seqlen": self.seqlen}

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """ "8,32,8,128,32768": batch, query heads, KV heads, head_dim, tokens."""
        try:
            shape = cls(*(int(word) for word in text.split(",")))
        except (TypeError, ValueError):
            raise ValueError(f"shape: got {text!r}, supported: batch,heads,kv_heads,head_dim,seqlen") from None
        if min(shape) < 1 or shape.num_heads % shape.num_heads_kv:
            raise ValueError(f"shape: got {text!r}, supported: positive numbers, heads a multiple of kv_heads")
        return shape


class Data(NamedTuple):
    """fp16 of N(0, 1): q [batch, num_heads, head_dim]; k, v [batch, num_heads_kv, seqlen, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One decode step of a peer, ready to be called as often as one likes.

    call: gives o [batch, num_heads, head_dim]. k, v: what its cache holds of the tokens, dequantized, [batch,
    num_heads_kv, tokens, head_dim] of any dtype. nbytes: of that cache. has_graph: whether a CUDA graph can hold the
    call; else it is launched from the host each time, and that is part of its time. note: what the step leaves out.
    """

    call: Callable[[], torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    nbytes: int
    has_graph: bool = True
    note: str = ""


def data_of(shape: Shape, device: str, seed: int = 0) -> Data:
    """Data of a seed: equal for every peer on one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    like = dict(generator=generator, device=device, dtype=torch.float16)
    q = torch.randn(shape.batch, shape.num_heads, shape.head_dim, **like)
    return Data(q, *(torch.randn(shape.batch, shape.num_heads_kv, shape.seqlen, shape.head_dim, **like)
                     for _ in range(2)))


def attention_fp64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """o fp64 [num_heads, head_dim] of one sequence: q [num_heads, head_dim], k, v [num_heads_kv, tokens, head_dim]."""
    q = q.double().unflatten(0, (k.shape[0], -1))
    scores = q @ k.double().transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v.double()).flatten(0, 1)


def error_of(step: Step, q: torch.Tensor) -> float:
    """|o - want| / |want| over the batch; want: fp64 attention over the values that the peer itself keeps."""
    o = step.call()
    if o.shape != q.shape:
        raise RuntimeError(f"o: got shape {list(o.shape)}, expected {list(q.shape)}")
    gone = wanted = 0.0
    for row in range(len(q)):
        want = attention_fp64(q[row], step.k[row], step.v[row])
        gone += (o[row].double() - want).square().sum().item()
        wanted += want.square().sum().item()
    return (gone / wanted) ** 0.5


def time_us(step: Step) -> tuple[float, str]:
    """(median us of a call, how it was launched). On a GPU L2 is flushed before each; on a CPU the time says nothing
    of a GPU, and is there so that the script can be tried."""
    if step.k.device.type != "cuda":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            step.call()
            times.append(1e6 * (time.perf_counter() - start))
        return statistics.median(times), "cpu"
    from triton.testing import do_bench

    from lowbit_attn.bench import graph_us

    if step.has_graph:
        return graph_us(step.call), "graph"
    return 1e3 * do_bench(step.call, warmup=25, rep=100, return_mode="median"), "host"
