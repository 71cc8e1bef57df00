"""Decode steps of a whole model from captured CUDA graphs: 16-bit and low-bit KV caches in the same memory.

    python perf/e2e.py                                      Llama-3.1-8B's shape: 4K, 32K, 128K; batch 1 and largest
    python perf/e2e.py --model qwen3-8b --generation 8192   tokens/s over a generation, largest batches
    python perf/e2e.py --weights "16 bit" --weights e8p4 --contexts 4K --contexts 128K --batch 1 --batch 8
                                                            with layers of codebook weights, too
    python perf/e2e.py --formats lean --formats lean-low    caches of two levels; every eighth step manages them

One JSON line a case in perf/results/e2e.jsonl, tables on screen. Weights and tokens are random; packs are random K and
V quantized by the cache's own kernels, every sequence in pages of its own. A step is embedding, all layers with append
and decode, output head and argmax, in one graph; its time is the mean over a flush period (128 tokens), flush included.
"""

import gc
import time
import warnings
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from e2e_report import generation_lines, generation_table, result_table, target_table
from level_store import LevelStore
from llama import SHAPES, Decoder, LowBitStore, Shape, SixteenBitStore
from provenance import append_result, need, provenance
from random_weights import random_weight
from rich.console import Console

from lowbit_attn import layout
from lowbit_attn.budget import SIXTEEN_BIT, Gpu, parse_tokens
from lowbit_attn.formats import levels

KEPT_FREE_BYTES = 3 << 30
PERIOD = layout.PAGE_TOKENS  # steps that are timed: every sequence flushes once in them
PART_REPLAYS = 16  # of graphs of parts that change nothing
WARM_UP = 3
SPARE_TOKENS = PERIOD + WARM_UP + 1  # that a graph's replays append before the store starts again
ATTENTION_REPLAYS = 10  # of each candidate for 16-bit attention
READ_MIB = (16, 64, 256, 1024)
LARGEST = 0
DTYPES = dict(float16=torch.float16, bfloat16=torch.bfloat16)
POINTS = 5  # lengths at which a generation is measured


@dataclass(frozen=True)
class Result:
    """Mean milliseconds of one decode step and of its parts: weights, attention, and both append and attention from
    graphs of their own, append and other by difference; floors are plain reads of the same bytes. layer_bytes: of one
    layer's cache. attention_by: what computed it. weights: format of the layers' weights. manage_ms: of levels, the
    mean over a period, by difference too."""

    model: str
    format: str
    seqlen: int
    batch: int
    largest: bool
    step_ms: float
    tokens_per_s: float
    weights_ms: float
    attention_ms: float
    append_ms: float
    append_attention_ms: float
    other_ms: float
    floor_weights_ms: float
    floor_attention_ms: float
    layer_bytes: int
    attention_by: str
    weights: str = SIXTEEN_BIT
    manage_ms: float = 0.0


def store_class(format: str):
    if format == SIXTEEN_BIT:
        return SixteenBitStore
    return LevelStore if levels.parse(format) else LowBitStore


def activation_bytes(shape: Shape) -> int:
    """At most of a sequence's bytes beside its cache: logits in 16 bit and for the argmax, a layer's activations."""
    return 8 * shape.vocab + 8 * (shape.ffn + shape.hidden) + 8 * shape.num_heads * shape.head_dim


def largest_batch(memory: int, shape: Shape, format: str, seqlen: int, spare: int, most: int) -> int:
    """Sequences of this length whose caches fit beside the weights; memory in bytes; at least 0, at most ``most``."""
    sequence = shape.layers * store_class(format).sequence_bytes(shape, format, seqlen, spare)
    left = memory - KEPT_FREE_BYTES - shape.weights_bytes
    return max(0, min(most, left // (sequence + activation_bytes(shape))))


class Runner:
    """Captures steps and times their replays; on a CPU the steps run as they are."""

    def __init__(self, device: str):
        self.is_cuda = device == "cuda"

    def ms(self, steps, replays: int) -> float:
        """Mean time of a replay of the captured step, after WARM_UP more runs of it; of several steps in turn."""
        turns = steps if isinstance(steps, list) else [steps]
        replay = {}
        for step in dict.fromkeys(turns):
            step()
            replay[step] = self._capture(step) if self.is_cuda else step
        for _ in range(WARM_UP - len(replay)):
            replay[turns[0]]()
        started = self._now()
        for i in range(replays):
            replay[turns[i % len(turns)]]()
        return (self._now() - started) / replays * 1e3

    def _now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @staticmethod
    def _capture(step):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


def best_attention(store: SixteenBitStore, q: torch.Tensor, runner: Runner) -> str:
    """Set the store to the fastest of torch's attention backends for this shape; returns its name."""
    times = {}
    # torch says at length why a backend has no kernel for the shape
    warnings.filterwarnings("ignore", message=".*(kernel|attention).*")
    for candidate in store.candidates():
        store.attend_with = candidate
        try:
            times[candidate] = runner.ms(lambda: store.attend(0, q), ATTENTION_REPLAYS)
        except RuntimeError:
            continue  # this backend has no kernel for the shape
    store.attend_with = min(times, key=times.get)
    backend, folded = store.attend_with
    return f"sdpa {backend.name.lower()}{' folded' * folded}"


def read_points() -> Gpu:
    """Times of a plain read by its size, measured here."""
    from bench import read_us

    points = [(float(mib << 20), read_us(mib << 20)[0]) for mib in READ_MIB]
    return Gpu(torch.cuda.get_device_name(), 0.0, tuple(points), "measured")


def measure(name: str, model: Decoder, format: str, batch: int, seqlen: int, largest: bool, gpu: Gpu,
            runner: Runner) -> Result:
    """Time one case; the caches are built, filled and dropped here."""
    shape, head = model.shape, model.head
    like = dict(dtype=head.dtype, device=head.device)
    store = store_class(format)(*((shape,) if format == SIXTEEN_BIT else (shape, format)), batch, seqlen, SPARE_TOKENS,
                                head.dtype, head.device.type)
    store.fill()
    q = torch.randn(batch, 1, shape.num_heads, shape.head_dim, **like)
    k, v = (torch.randn(batch, 1, shape.num_heads_kv, shape.head_dim, **like) for _ in range(2))
    tokens = torch.randint(shape.vocab, (batch,), device=head.device)
    position = torch.full((batch,), seqlen - 1, device=head.device)
    by = best_attention(store, q, runner) if format == SIXTEEN_BIT else "lowbit_attn"
    layers, inputs = range(shape.layers), model.linear_inputs(batch)
    layer_bytes = store.layer_bytes

    def attend():
        for i in layers:
            store.attend(i, q)

    def append_and_attend():
        for i in layers:
            store.append(i, k, v)
            store.attend(i, q)

    weights = runner.ms(lambda: model.linear_step(inputs), PART_REPLAYS)
    attention = runner.ms(attend, PART_REPLAYS)
    both, manage = cache_ms(store, append_and_attend, runner)
    store.restart()
    step = runner.ms(store.turns(lambda: model.step(tokens, position, store)), PERIOD)
    store.check()
    return Result(
        name, format, seqlen, batch, largest, step, batch / step * 1e3, weights, attention, both - attention, both,
        step - weights - both - manage, gpu.read_us(model.linear_bytes) * 1e-3,
        shape.layers * gpu.read_us(layer_bytes) * 1e-3, layer_bytes, by, model.weights, manage)



def step_parts(model: Decoder, store, q: torch.Tensor, tokens: torch.Tensor, position: torch.Tensor,
               runner: Runner) -> dict[str, float]:
    """Mean milliseconds of a step, and of its linear maps and its attention from graphs of their own."""
    inputs = model.linear_inputs(len(tokens))

    def attend():
        for i in range(model.shape.layers):
            store.attend(i, q)

    attention = runner.ms(attend, PART_REPLAYS)
    weights = runner.ms(lambda: model.linear_step(inputs), PART_REPLAYS)
    store.restart()
    step = runner.ms(lambda: model.step(tokens, position, store), PERIOD)
    return dict(step_ms=step, weights_ms=weights, attention_ms=attention)


def cache_ms(store, append_and_attend, runner: Runner) -> tuple[float, float]:
    """(append and attention, ``manage`` beside them) of a step; without levels the latter is 0."""
    turns = store.turns(append_and_attend)
    if len(turns) == 1:
        return runner.ms(turns, PERIOD), 0.0
    with_manage = runner.ms(turns, PERIOD)
    store.restart()
    both = runner.ms(append_and_attend, PART_REPLAYS)
    return both, with_manage - both


def release() -> None:
    """Give the last case's memory back before the next one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Bench:
    """One model's weights and what all of its cases share."""

    def __init__(self, name: str, positions: int, most: int, device: str, output: str, fuse: bool = True,
                 dtype: torch.dtype = torch.float16, weights: str = SIXTEEN_BIT):
        self.name, self.shape, self.most, self.output = name, SHAPES[name], most, output
        self.gpu = read_points()
        release()
        self.memory = torch.cuda.mem_get_info()[0]
        quantized = None if weights == SIXTEEN_BIT else partial(random_weight, weights, device=device)
        self.model = Decoder(self.shape, positions + SPARE_TOKENS + 1, dtype, device, fuse, quantized)
        self.runner, self.origin = Runner(device), provenance() | dict(dtype=str(dtype).removeprefix("torch."))

    def batch(self, format: str, seqlen: int, wanted: int) -> int:
        """``wanted``, or the largest; 0 where it does not fit."""
        largest = largest_batch(self.memory, self.shape, format, seqlen, SPARE_TOKENS, self.most)
        return largest if wanted == LARGEST else wanted * (wanted <= largest)

    def run(self, format: str, batch: int, seqlen: int, is_largest: bool) -> Result:
        result = measure(self.name, self.model, format, batch, seqlen, is_largest, self.gpu, self.runner)
        release()
        line = asdict(result)
        if result.weights == SIXTEEN_BIT:  # as lines were before there were others
            del line["weights"]
        append_result(self.output, self.origin | line)
        return result


def contexts(bench: Bench, lengths: list[int], formats: list[str], batches: list[int],
             console: Console) -> list[Result]:
    """Every context, batch and format, and their table."""
    results = []
    for seqlen in lengths:
        for wanted in batches:
            for format in formats:
                if batch := bench.batch(format, seqlen, wanted):
                    results.append(bench.run(format, batch, seqlen, wanted == LARGEST))
                else:
                    console.print(f"{format} {seqlen} tokens, batch {wanted or 'largest'}: does not fit")
    console.print(result_table(results))
    return results


def generation(bench: Bench, prompt: int, generated: int, formats: list[str], console: Console) -> None:
    """Tokens a second over a generation, each format at the largest batch that holds its end."""
    runs = {}
    for format in formats:
        if not (batch := bench.batch(format, prompt + generated, LARGEST)):
            console.print(f"{format}: one sequence of {prompt + generated} tokens does not fit")
            continue
        lengths = [prompt + generated * i // (POINTS - 1) for i in range(POINTS)]
        runs[format] = [bench.run(format, batch, seqlen, True) for seqlen in lengths]
    lines = generation_lines(runs)
    for line in lines:
        what = {"model": bench.name, "prompt": prompt, "generated": generated}
        append_result(bench.output, bench.origin | what | line)
    console.print(result_table([result for run in runs.values() for result in run]), generation_table(lines))


def main(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "llama-3.1-8b",
    contexts_of: Annotated[list[str], typer.Option("--contexts", help="tokens, such as 32K")] = ["4K", "32K", "128K"],
    formats: Annotated[list[str], typer.Option(help="cache formats beside 16 bit")] = ["k4v4", "k4v2", "k2v2"],
    batch: Annotated[list[int], typer.Option(help="sequences; 0: as many as fit")] = [1, LARGEST],
    generated: Annotated[int, typer.Option("--generation", help="tokens; 0: steps at fixed contexts")] = 0,
    prompt: Annotated[str, typer.Option(help="tokens before a generation")] = "1K",
    most: Annotated[int, typer.Option(help="largest batch ever taken")] = 1024,
    weights: Annotated[list[str], typer.Option(help="16 bit or formats of codebook weights")] = [SIXTEEN_BIT],
    fuse: Annotated[bool, typer.Option(help="compile the elementwise parts of a layer")] = True,
    dtype: Annotated[str, typer.Option(help="of weights and 16-bit caches: float16 or bfloat16")] = "float16",
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/e2e.jsonl",
) -> None:
    """Time decode steps of a model with 16-bit and low-bit caches in the same memory."""
    need()
    lengths = [parse_tokens(text) for text in contexts_of]
    start = parse_tokens(prompt)
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype: got {dtype}, supported: {', '.join(DTYPES)}")
    positions = start + generated if generated else max(lengths)
    everything, console, results = [SIXTEEN_BIT, *formats], Console(width=170), []
    for name in weights:
        bench = Bench(model, positions, most, "cuda", output, fuse, DTYPES[dtype], weights=name)
        with torch.no_grad():
            if generated:
                generation(bench, start, generated, everything, console)
            else:
                results += contexts(bench, lengths, everything, batch, console)
        del bench
        release()
    if results:
        console.print(target_table(results))


if __name__ == "__main__":
    typer.run(main)
