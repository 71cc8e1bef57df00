"""Times decode over one cache and over the same tokens dealt to the GPUs of one host (``lowbit_attn.parallel``).

    torchrun --nproc-per-node 2 perf/context_parallel.py --case 1048576x1 --format k4v4

A CUDA graph holds CALLS calls, all-gather and merge included. Every rank checks the sharded result against one cache
with all tokens; the first one appends a line to perf/results/parallel.jsonl.
"""

import os
import statistics
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from provenance import append_result, need, provenance

from lowbit_attn import KVCache, decode
from lowbit_attn.parallel import ShardedKVCache, decode_sharded

HEADS_KV, HEADS, HEAD_DIM, CHUNK = 8, 32, 128, 65_536  # CHUNK tokens are made and packed at once
CALLS, REPEATS, ERROR = 16, 20, 1e-3


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
        for _ in range(CALLS):
            call()
    return graph


def graph_us(call) -> float:
    """Median over replays of the time of one of CALLS calls in a graph, as the layers of a model follow each other.

    All ranks start a replay together; a launch and what is left of their distance at the start is shared by the calls.
    """
    graph, times = captured(call), []
    for _ in range(REPEATS):
        dist.barrier()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(stop) / CALLS)
    return statistics.median(times)


def error_of(got, want) -> float:
    """The larger of the relative error of o and the absolute error of lse."""
    (o, lse), (want_o, want_lse) = got, want
    return max(((o - want_o).float().norm() / want_o.float().norm()).item(), (lse - want_lse).abs().max().item())


def measure(tokens: int, batch: int, format: str, peers: bool) -> dict:
    """Fill both caches with ``batch`` sequences of so many tokens, compare and time; every rank's are returned."""
    world = dist.get_world_size()
    shape = dict(num_heads_kv=HEADS_KV, head_dim=HEAD_DIM, max_batch=batch, device="cuda", sinks=0)
    pages = batch * (tokens // 128 + 2)
    sharded = ShardedKVCache(format, pages // world + 2 * batch, **shape, peer_memory=peers)
    whole = KVCache(format, pages, **shape, max_seqlen=tokens + 128)
    for row in range(batch):
        fill(sharded, row, tokens)
        fill(whole, row, tokens)
    q = torch.randn(batch, 1, HEADS, HEAD_DIM, generator=torch.Generator("cuda").manual_seed(batch), device="cuda",
                    dtype=torch.float16)
    out, lse = torch.empty_like(q), torch.empty(batch, HEADS, 1, device="cuda")
    want = decode(q, whole)
    error = error_of(decode_sharded(q, sharded, out=out, lse=lse), want)
    exchange = sharded.exchanges.find(q.shape, q.dtype, False, False)
    found = dict(local_us=graph_us(lambda: decode(q, sharded.local, out=exchange.o, lse=exchange.lse)),
                 exchange_us=graph_us(lambda: exchange.merge(out, lse)),
                 one_gpu_us=graph_us(lambda: decode(q, whole, out=out, lse=lse)))
    out.zero_()
    found["us"] = graph_us(lambda: decode_sharded(q, sharded, out=out, lse=lse))  # out and lse are a replay's
    line = dict(ranks=world, tokens=tokens, batch=batch, format=format, peer_memory=peers, calls=CALLS,
                error=max(error, error_of((out, lse), want)), **{name: round(us, 1) for name, us in found.items()})
    gain = found["one_gpu_us"] / found["us"]
    # T/(T/N + c): what a call takes beyond its share of one GPU's time
    return line | dict(gain=round(gain, 3), c_us=round(found["us"] - found["one_gpu_us"] / world, 1))


def main(case: Annotated[list[str], typer.Option(help="TOKENSxBATCH")] = ["1048576x1", "1048576x2", "131072x8"],
         format: str = "k4v4", peers: Annotated[bool, typer.Option(help="through the GPUs' memory")] = False,
         output: str = "perf/results/parallel.jsonl") -> None:
    """Time decode of each case over one cache and over the same tokens dealt to the ranks."""
    need()
    cases = [tuple(map(int, text.split("x"))) for text in case]
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of torch's shared memory: not used here
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    failed = []
    for tokens, batch in cases:
        line = provenance() | measure(tokens, batch, format, peers)
        failed += [f"{tokens}x{batch}: {line['error']:.2e}"] * (line["error"] > ERROR)
        if dist.get_rank() == 0:
            append_result(output, line)
            print(line, flush=True)
    dist.destroy_process_group()
    if failed:
        raise SystemExit(f"errors above {ERROR}: {', '.join(failed)}")


if __name__ == "__main__":
    typer.run(main)
