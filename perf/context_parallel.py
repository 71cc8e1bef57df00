"""Times decode over one cache and over the same tokens dealt to the GPUs of one host (``lowbit_attn.parallel``).

    torchrun --nproc-per-node 2 perf/context_parallel.py --tokens 1048576 --format k4v4

Every step is one CUDA graph, all-gather and merge included. The first rank checks the sharded result against one cache
with all tokens, where a GPU can hold it, and appends a line to perf/results/parallel.jsonl.
"""

import os
import statistics

import torch
import torch.distributed as dist
import typer
from provenance import append_result, need, provenance

from lowbit_attn import KVCache, decode
from lowbit_attn.parallel import ShardedKVCache, decode_sharded

HEADS_KV, HEADS, HEAD_DIM, CHUNK = 8, 32, 128, 65_536  # CHUNK tokens are made and packed at once
REPEATS, ERROR = 30, 1e-3


def fill(cache, row: int, tokens: int) -> None:
    """Random tokens, the same on every rank and in both kinds of cache."""
    generator = torch.Generator("cuda").manual_seed(row)
    for start in range(0, tokens, CHUNK):
        shape = (min(CHUNK, tokens - start), HEADS_KV, HEAD_DIM)
        cache.prefill(row, *(torch.randn(shape, generator=generator, device="cuda", dtype=torch.float16)
                             for _ in range(2)))


def captured(call) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph_us(call) -> float:
    """Median time of one replay, which starts on all ranks together."""
    graph, times = captured(call), []
    for _ in range(REPEATS):
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)


def main(tokens: int = 1_048_576, batch: int = 1, format: str = "k4v4",
         output: str = "perf/results/parallel.jsonl") -> None:
    """Fill both caches with ``batch`` sequences of so many tokens, compare and time."""
    need()
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    shape = dict(num_heads_kv=HEADS_KV, head_dim=HEAD_DIM, max_batch=batch, device="cuda", sinks=0)
    pages = batch * (tokens // 128 + 2)
    sharded = ShardedKVCache(format, pages // world + 2 * batch, **shape)
    whole = KVCache(format, pages, **shape, max_seqlen=tokens + 128)
    for row in range(batch):
        fill(sharded, row, tokens)
        fill(whole, row, tokens)
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, generator=torch.Generator("cuda").manual_seed(batch), device="cuda",
                    dtype=torch.float16)
    (o, lse), (want, want_lse) = decode_sharded(q, sharded), decode(q, whole)
    error = max(((o - want).float().norm() / want.float().norm()).item(), (lse - want_lse).abs().max().item())
    own = graph_us(lambda: decode(q, sharded.local))
    both = graph_us(lambda: decode_sharded(q, sharded))
    one = graph_us(lambda: decode(q, whole))
    if rank == 0:
        line = provenance() | dict(ranks=world, tokens=tokens, batch=batch, format=format, error=error,
                                   us=round(both, 1), local_us=round(own, 1), one_gpu_us=round(one, 1),
                                   gain=round(one / both, 3))
        append_result(output, line)
        print(line)
    dist.destroy_process_group()
    if error > ERROR:
        raise SystemExit(f"error {error:.2e} above {ERROR}")


if __name__ == "__main__":
    typer.run(main)
