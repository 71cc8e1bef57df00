"""Decode steps of a whole model whose heads and FFN are dealt to the GPUs of one host, beside one GPU in the same run.

    torchrun --nproc-per-node 2 perf/tensor_parallel.py --context 128K --batch 1 --batch 8

Each rank has its share of the heads, of the FFN and of the vocabulary (Megatron-LM's tensor parallelism): two
all-reduces a layer and one gather of the best tokens, all in one CUDA graph. All-reduces by --reduce, one after the
other: nccl; sum, one kernel through the GPUs' own memory (lowbit_attn.all_reduce); add_norm, that kernel with the
residual and the RMSNorm behind it. Weights and caches are those of e2e.py. One JSON line a case in
perf/results/tensor_parallel.jsonl.
"""

import os
from dataclasses import replace
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from e2e import (
    DTYPES,
    LARGEST,
    PART_REPLAYS,
    SPARE_TOKENS,
    Runner,
    best_attention,
    largest_batch,
    release,
    step_parts,
    store_class,
)
from llama import NORM_EPS, SHAPES, Decoder, Shape
from provenance import append_result, need, provenance

from lowbit_attn.all_reduce import AllReduce
from lowbit_attn.budget import SIXTEEN_BIT, parse_tokens

SEED, RESULTS = 0, "perf/results/tensor_parallel.jsonl"
NCCL, SUM, ADD_NORM = REDUCES = ("nccl", "sum", "add_norm")


def share_of(shape: Shape, ranks: int) -> Shape:
    """What each of so many ranks has of a shape; ValueError unless all have the same."""
    sizes = {name: getattr(shape, name) for name in ("num_heads", "num_heads_kv", "ffn", "vocab")}
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % ranks]:
        raise ValueError(f"{ranks} ranks: got {', '.join(odd)}, supported: multiples of the number of ranks")
    return replace(shape, **{name: size // ranks for name, size in sizes.items()})


class ShardedDecoder(Decoder):
    """A rank's share of a Decoder of a shape. The embedding is whole: a step reads a row of it a sequence."""

    def __init__(self, whole: Shape, positions: int, dtype: torch.dtype, device: str, fuse: bool, rank: int,
                 ranks: int):
        super().__init__(share_of(whole, ranks), positions, dtype, device, fuse)
        self.rank, self.ranks = rank, ranks
        self.embedding = torch.empty(whole.vocab, whole.hidden, dtype=dtype, device=device).normal_()
        self.reduces, self.all_reduce = NCCL, None

    def reduce_by(self, name: str, batch: int) -> None:
        """Sum from now on so, one of REDUCES; batch: the largest."""
        if name != NCCL and self.all_reduce is None:
            self.all_reduce = AllReduce(batch, self.shape.hidden, self.head.dtype, self.head.device)
        self.reduces = name

    def reduce_add_norm(self, x: torch.Tensor, residual: torch.Tensor,
                        weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reduces == ADD_NORM:
            return self.all_reduce.add_norm(x, residual, weight, NORM_EPS, out=x), residual
        if self.reduces == SUM:
            self.all_reduce.sum(x, out=x)
        else:
            dist.all_reduce(x)
        return self.add_norm(x, residual, weight)

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """The best token of all ranks' shares of the vocabulary: numbers below 2^24 are exact in fp32."""
        value, token = logits.max(-1)
        mine = torch.stack((value.float(), (token + self.rank * self.shape.vocab).float()))
        every = mine.new_empty(self.ranks, *mine.shape)
        dist.all_gather_into_tensor(every.view(-1, *mine.shape[1:]), mine)
        return every[:, 1].gather(0, every[:, 0].argmax(0, keepdim=True))[0].long()


def measure(model: Decoder, format: str, batch: int, seqlen: int, runner: Runner) -> dict:
    """Mean milliseconds of a step of a batch, and of its linear maps and its attention from graphs of their own."""
    shape, head = model.shape, model.head
    like = dict(dtype=head.dtype, device=head.device)
    names = (shape,) if format == SIXTEEN_BIT else (shape, format)
    store = store_class(format)(*names, batch, seqlen, SPARE_TOKENS, head.dtype, head.device.type)
    store.fill()
    q = torch.randn(batch, 1, shape.num_heads, shape.head_dim, **like)
    tokens = torch.arange(batch, device=head.device)
    position = torch.full((batch,), seqlen - 1, device=head.device)
    by = best_attention(store, q, runner) if format == SIXTEEN_BIT else "lowbit_attn"
    return dict(**step_parts(model, store, q, tokens, position, runner), layer_bytes=store.layer_bytes, attention_by=by)


def reduce_ms(model: ShardedDecoder, batch: int, runner: Runner) -> float:
    """The all-reduces of a step alone, each with the residual and the norm behind it."""
    x, residual = (torch.zeros(batch, model.shape.hidden, dtype=model.head.dtype, device=model.head.device)
                   for _ in range(2))

    def step():
        for _ in range(2 * model.shape.layers):
            model.reduce_add_norm(x, residual, model.last_norm)

    return runner.ms(step, PART_REPLAYS)


def cases(shape: Shape, formats: list[str], batches: list[int], seqlen: int, memory: int) -> list[tuple[str, int]]:
    """(format, batch) of those that fit into so many bytes beside the weights."""
    return [(format, batch) for format in formats for batch in batches
            if largest_batch(memory, shape, format, seqlen, SPARE_TOKENS, batch) >= batch > LARGEST]


def least_memory() -> int:
    """Free bytes of the GPU that has the fewest, so that all ranks find the same cases to fit."""
    free = torch.tensor(torch.cuda.mem_get_info()[0], device="cuda")
    dist.all_reduce(free, op=dist.ReduceOp.MIN)
    return int(free)


def run(model: Decoder, wanted: list[tuple[str, int]], seqlen: int, runner: Runner, note) -> dict:
    """Every case's measurements; ``note`` gets each as it comes."""
    found = {}
    for format, batch in wanted:
        found[format, batch] = measure(model, format, batch, seqlen, runner)
        release()
        if isinstance(model, ShardedDecoder):
            found[format, batch]["reduce_ms"] = reduce_ms(model, batch, runner)
        note(model, format, batch, found[format, batch])
    return found


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "llama-3.1-8b",
    context: Annotated[str, typer.Option(help="tokens, such as 32K")] = "128K",
    batch: Annotated[list[int], typer.Option(help="sequences")] = [1, 8],
    formats: Annotated[list[str], typer.Option(help="cache formats")] = ["k4v4"],
    plain: Annotated[bool, typer.Option(help="16 bit, too, with the first kind of all-reduce")] = True,
    reduce: Annotated[list[str], typer.Option(help=f"of {', '.join(REDUCES)}")] = list(REDUCES),
    dtype: Annotated[str, typer.Option(help=f"one of {', '.join(DTYPES)}")] = "float16",
    fuse: Annotated[bool, typer.Option(help="compile the elementwise parts of a layer")] = True,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = RESULTS,
) -> None:
    """Time decode steps of a model on one GPU, then on all ranks together."""
    need()
    if dtype not in DTYPES or not reduce or set(reduce) - set(REDUCES):
        raise typer.BadParameter(f"dtype, reduce: got {dtype}, {', '.join(reduce)}, supported: {', '.join(DTYPES)}; "
                                 f"{', '.join(REDUCES)}")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # of torch's shared memory: not used here
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(SEED)
    rank, ranks, shape, seqlen = dist.get_rank(), dist.get_world_size(), SHAPES[model], parse_tokens(context)
    one_gpu, runner, memory, origin = {}, Runner("cuda"), least_memory(), provenance()
    everything = [*formats, *[SIXTEEN_BIT] * plain]  # 16 bit fills the memory: last

    def note(decoder: Decoder, format: str, batch: int, found: dict) -> None:
        is_sharded = isinstance(decoder, ShardedDecoder)
        line = origin | dict(model=model, ranks=ranks if is_sharded else 1, format=format, seqlen=seqlen, batch=batch,
                             dtype=dtype)
        line |= {name: round(x, 3) if isinstance(x, float) else x for name, x in found.items()}
        line |= {"reduce": decoder.reduces} if is_sharded else {}
        if is_sharded and (format, batch) in one_gpu:
            line["gain"] = round(one_gpu[format, batch]["step_ms"] / found["step_ms"], 3)
        if rank == 0:
            append_result(output, line)
            print(line, flush=True)

    with torch.no_grad():
        if rank == 0:
            whole = Decoder(shape, seqlen + SPARE_TOKENS + 1, DTYPES[dtype], "cuda", fuse)
            one_gpu = run(whole, cases(shape, everything, batch, seqlen, memory), seqlen, runner, note)
            del whole
            release()
        dist.barrier()
        part = ShardedDecoder(shape, seqlen + SPARE_TOKENS + 1, DTYPES[dtype], "cuda", fuse, rank, ranks)
        for name in reduce:
            part.reduce_by(name, max(batch))
            run(part, cases(part.shape, everything if name == reduce[0] else formats, batch, seqlen, memory), seqlen,
                runner, note)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
