"""Decode steps of a whole model with a million tokens of one sequence on one GPU.

    python perf/million.py --formats k4v4 --formats k2v2

First one layer's cache of several such sequences, whose pages lie interleaved in more than 2^32 bytes, against fp64
over the cache's own dequantized values, and those against the tokens. Then the step of all layers in one CUDA graph,
the time to pack all tokens and the memory. Weights and tokens are random and every layer has tokens of its own;
prefill's attention is not run. One JSON line a format in perf/results/million.jsonl.
"""

import time
from typing import Annotated

import torch
import typer
from e2e import SPARE_TOKENS, Runner, release, step_parts
from llama import FILL_TOKENS, INTERLEAVED, SHAPES, Decoder, LowBitStore, Shape, sinks_of
from provenance import append_result, need, provenance

from lowbit_attn import KVCache, decode, layout
from lowbit_attn.budget import parse_tokens
from lowbit_attn.formats import FORMATS
from lowbit_attn.testing import attention_fp64, normal_codebooks

BEYOND = 1 << 32  # bytes that the checked cache is larger than
ERROR = 2e-3  # of o, relative, and of lse, absolute
OTHER_PAGE = 0.9  # relative error of a page's values: of another page's it is 1.4


class Tokens:
    """Random tokens of one sequence, made again for every use."""

    def __init__(self, seed: int, shape: Shape, seqlen: int, device: str):
        self.seed, self.size, self.device = seed, (seqlen, shape.num_heads_kv, shape.head_dim), device

    def make(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return tuple(torch.randn(self.size, generator=generator, dtype=torch.float16, device=self.device)
                     for _ in range(2))


def layer_of_many(shape: Shape, format: str, seqlen: int, least_bytes: int,
                  device: str) -> tuple[KVCache, list[Tokens]]:
    """One layer's cache of as many sequences as take ``least_bytes`` of pages, which lie among each other's."""
    page_bytes = FORMATS[format].record(shape.head_dim).nbytes * shape.num_heads_kv
    pages = -(-seqlen // layout.PAGE_TOKENS)
    batch = least_bytes // (pages * page_bytes) + 1
    books = normal_codebooks(format, 1, shape.num_heads_kv, shape.head_dim).layer(0) \
        if FORMATS[format].needs_codebooks else None
    cache = KVCache(format, batch * pages, shape.num_heads_kv, shape.head_dim, torch.float16, device, sinks_of(format),
                    max_batch=batch, max_seqlen=seqlen, codebooks=books)
    tokens = [Tokens(row, shape, seqlen, device) for row in range(batch)]
    for i in range(1, INTERLEAVED + 1):
        cache.reserve(range(batch), seqlen * i // INTERLEAVED)
    for row, of_row in enumerate(tokens):
        k, v = of_row.make()
        for start in range(0, seqlen, FILL_TOKENS):
            cache.prefill(row, k[start : start + FILL_TOKENS], v[start : start + FILL_TOKENS])
    return cache, tokens


def worst_page(cache: KVCache, held: torch.Tensor, made: torch.Tensor) -> float:
    """Largest relative error of a page's values. held: fp32 [num_heads_kv, tokens, head_dim], made: the tokens."""
    packed = len(made) // layout.PAGE_TOKENS * layout.PAGE_TOKENS
    worst = 0.0
    for head in range(cache.num_heads_kv):
        got, want = (x[:packed].float().unflatten(0, (-1, layout.PAGE_TOKENS)).flatten(1)
                     for x in (held[head], made[:, head]))
        worst = max(worst, ((got - want).norm(dim=1) / want.norm(dim=1)).max().item())
    return worst


def check(shape: Shape, format: str, seqlen: int, device: str = "cuda", least_bytes: int = BEYOND) -> dict:
    """Decode over one layer's cache against fp64 over its own values, and these against the tokens."""
    cache, tokens = layer_of_many(shape, format, seqlen, least_bytes, device)
    ratio, batch = shape.num_heads // shape.num_heads_kv, len(tokens)
    q = torch.randn(batch, 1, shape.num_heads, shape.head_dim, dtype=torch.float16, device=device)
    o, lse = decode(q, cache)
    error = lse_error = page_error = 0.0
    for row in range(batch):
        k, v = cache.gather(row)
        if not FORMATS[format].needs_codebooks:  # random codebooks say little of the tokens
            page_error = max(page_error, *(worst_page(cache, *pair) for pair in zip((k, v), tokens[row].make())))
        queries = cache.queries(q[row])
        for head in range(shape.num_heads_kv):
            heads = slice(head * ratio, (head + 1) * ratio)
            want, want_lse = attention_fp64(queries[:, heads], k[head : head + 1], v[head : head + 1])
            error = max(error, ((o[row, :, heads] - want).norm() / want.norm()).item())
            lse_error = max(lse_error, (lse[row, heads] - want_lse).abs().max().item())
    return dict(checked_rows=batch * shape.num_heads, pool_bytes=cache.pool.nbytes, o_error=error,
                lse_error=lse_error, page_error=page_error)


def is_wrong(errors: dict) -> bool:
    """Whether what ``check`` found is beyond its limits."""
    return max(errors["o_error"], errors["lse_error"]) > ERROR or errors["page_error"] > OTHER_PAGE


def pack_all(store: LowBitStore) -> float:
    """Seconds of ``prefill`` of all layers; the random tokens are made outside of that time."""
    cache, size = store.caches[0], (store.seqlen - 1, store.shape.num_heads_kv, store.shape.head_dim)
    seconds = 0.0
    for layer in range(store.shape.layers):
        k, v = (torch.randn(size, dtype=cache.dtype, device=cache.device) for _ in range(2))
        started = _now(cache.device)
        store.fill_layer(layer, k, v)
        seconds += _now(cache.device) - started
    return seconds


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(model: Decoder, format: str, seqlen: int, runner: Runner) -> dict:
    """Milliseconds of a step at ``seqlen`` tokens and of its parts, seconds to pack them, bytes."""
    shape, head = model.shape, model.head
    store = LowBitStore(shape, format, 1, seqlen, SPARE_TOKENS, head.dtype, head.device.type)
    packing = pack_all(store)
    release()
    q = torch.randn(1, 1, shape.num_heads, shape.head_dim, dtype=head.dtype, device=head.device)
    tokens, position = torch.zeros(1, dtype=torch.int64, device=head.device), \
        torch.full((1,), seqlen - 1, device=head.device)
    parts = step_parts(model, store, q, tokens, position, runner)
    held = torch.cuda.max_memory_allocated() if runner.is_cuda else 0
    return dict(**parts, pack_s=packing, cache_bytes=shape.layers * store.layer_bytes,
                weight_bytes=shape.weights_bytes, peak_bytes=held)


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "llama-3.1-8b",
    context: Annotated[str, typer.Option(help="tokens, such as 1M")] = "1M",
    formats: Annotated[list[str], typer.Option(help="cache formats")] = ["k4v4", "k2v2"],
    checked: Annotated[bool, typer.Option(help="compare a layer of each format with fp64 first")] = True,
    fuse: Annotated[bool, typer.Option(help="compile the elementwise parts of a layer")] = True,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/million.jsonl",
) -> None:
    """Compare one layer of each format with fp64, then time steps of the whole model."""
    need()
    shape, seqlen, runner, origin = SHAPES[model], parse_tokens(context), Runner("cuda"), provenance()
    errors, failed = {}, []
    with torch.no_grad():
        for format in formats if checked else ():
            errors[format] = check(shape, format, seqlen)
            print(format, errors[format], flush=True)
            release()
        decoder = Decoder(shape, seqlen + SPARE_TOKENS + 1, torch.float16, "cuda", fuse)
        for format in formats:
            torch.cuda.reset_peak_memory_stats()
            line = origin | dict(model=model, format=format, seqlen=seqlen, batch=1)
            line |= measure(decoder, format, seqlen, runner) | errors.get(format, {})
            release()
            append_result(output, line)
            print(line, flush=True)
            failed += [format] * (checked and is_wrong(errors[format]))
    if failed:
        raise SystemExit(f"errors above {ERROR}, or pages of others: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
