"""Decode steps of a cache as one CUDA graph: captured once, replayed for every length.

    python examples/cuda_graph_decode.py --context 4096 --steps 300

On a CPU, where there are no graphs, the same step is called each time.
"""

import argparse

import torch

import lowbit_attn

HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128


def main(arguments: list[str] | None = None) -> None:
    """Fill a cache, run the steps, and compare the last one with the fp32 reference."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    longest = args.context + args.steps
    cache = lowbit_attn.KVCache(args.format, args.batch * (longest // 128 + 1), HEADS_KV, HEAD_DIM, device=device,
                                max_batch=args.batch, max_seqlen=longest)
    rows = list(range(args.batch))
    for row in rows:
        cache.prefill(row, *tokens(device, 2, args.context, HEADS_KV))
    cache.reserve(rows, longest)  # a captured step cannot take pages
    k, v, q = (tokens(device, args.batch, 1, heads) for heads in (HEADS_KV, HEADS_KV, HEADS))
    o, lse = q.clone(), torch.empty(args.batch, HEADS, 1, device=device)

    def step() -> None:
        cache.append(k, v)
        lowbit_attn.decode(q, cache, out=o, lse=lse)

    step()  # a first one, not captured, loads the kernels
    run = captured(step) if device == "cuda" else step
    for _ in range(args.steps - 1):
        for x in (k, v, q):
            x.normal_()  # a model would write its new token here
        run()
    cache.sync()  # reads the counters of captured steps; raises if one found no room
    want, _ = lowbit_attn.decode(q, cache, path="reference")
    error = ((o - want).float().norm() / want.float().norm()).item()
    how = "all but the first replayed from one CUDA graph" if device == "cuda" else (
        "called one by one (no GPU here: nothing is captured)")
    print(f"{args.steps} steps, {how}; each sequence grew from {args.context:,} to {int(cache.n_tok[0]):,} tokens")
    print(f"the last output differs from the fp32 reference by {error:.1e}, as a share of its norm"
          + " (on a CPU it is the reference)" * (device == "cpu"))
    print(f"cache: {cache.nbytes:,} bytes, in 16 bit {args.batch * longest * HEADS_KV * HEAD_DIM * 4:,}")


def tokens(device: str, *size: int) -> torch.Tensor:
    """Random 16-bit vectors of head_dim channels."""
    return torch.randn(*size, HEAD_DIM, device=device, dtype=torch.float16)


def captured(step):
    """What replays a step; capturing does not run it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


if __name__ == "__main__":
    main()
