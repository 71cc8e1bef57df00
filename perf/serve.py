"""A server's whole work: prompts arrive while other requests decode. vLLM's engine with random weights on one GPU.

    python3 perf/serve.py run --dtype auto --dtype fp8 --dtype lowbit_k4v4 --load ttft --load chat --load long
    python3 perf/serve.py run --dtype auto --dtype lowbit_k4v4 --load chat --mode poisson --rate 8
    python3 perf/serve.py run --dtype auto --dtype lowbit_k4v4 --load verify --drafts 3

Every number contains all that a user pays for: scheduling, prompts, packing, decoding, sampling and host time. The
engine runs in vLLM's default mode (torch.compile, full and piecewise CUDA graphs, async scheduling); --no-compile asks
for compilation mode 0. Each dtype runs in a process of its own, and each load ``--repeats`` times.

closed: so many requests are always under way (--concurrency). poisson: requests arrive by a Poisson process of --rate
requests a second. A line of JSON a load is appended to --output; ``ratio_to_auto`` compares output tokens/s, or the
time to the first token of the load ttft, with the line of ``auto`` of the same call.

A step is mixed if it computes a part of a prompt. Its time is that between two results of the engine, its host time
that of preparing and launching it. launches, syncs: calls of the CUDA runtime in a mixed step, by torch's profiler.
"""

import json
import random
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import mean, median, stdev
from typing import Annotated

import engine
import typer

GOOD_TTFT_S, GOOD_ITL_S = 2.0, 0.05  # of a request that counts as served well
LENGTHS = (8192, 32768, 131072)  # tokens of the lone prompts of ttft
PROFILED = 4  # mixed steps
DTYPES = ("auto", "fp8", "lowbit_k4v4")


class Mode(StrEnum):
    closed = "closed"
    poisson = "poisson"


@dataclass(frozen=True)
class Load:
    """Requests: how many, the range of prompt tokens, the range of output tokens; how many are under way."""

    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    concurrency: int = 32
    shared: int = 0  # tokens of one of 8 system prompts before each prompt
    repeats_itself: bool = False  # prompts of one repeated passage


LOADS = {
    "chat": Load(160, (500, 4000), (100, 300)),
    "long": Load(64, (4000, 16000), (100, 300)),
    "chat-800": Load(64, (500, 4000), (800, 1600)),
    "long-800": Load(48, (4000, 16000), (800, 1600)),
    "docs": Load(32, (24000, 40000), (500, 1000), 16),
    "shared": Load(160, (100, 1000), (100, 300), shared=2048),
    "verify": Load(96, (500, 4000), (100, 300), repeats_itself=True),
}
TTFT = "ttft"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    output: engine.Output = Path("serve.jsonl"),
    dtype: Annotated[list[str] | None, typer.Option(help=f"Default: {', '.join(DTYPES)}.")] = None,
    load: Annotated[list[str] | None, typer.Option(help=f"{TTFT}, {', '.join(LOADS)}. Default: ttft, chat.")] = None,
    mode: Annotated[Mode, typer.Option()] = Mode.closed,
    rate: Annotated[float, typer.Option(help="Requests a second, of mode poisson.")] = 8.0,
    concurrency: Annotated[int, typer.Option(help="0: the load's own.")] = 0,
    repeats: Annotated[int, typer.Option(help="Runs of each load.")] = 1,
    requests: Annotated[int, typer.Option(help="Of a run; 0: the load's own number.")] = 0,
    cache_gib: Annotated[float, typer.Option(help="Of the KV cache; 0: what is left.")] = 0.0,
    drafts: Annotated[int, typer.Option(help="N-gram drafts a step.")] = 0,
    batched_tokens: Annotated[int, typer.Option(help="vLLM's --max-num-batched-tokens.")] = 8192,
    prefix_caching: Annotated[bool, typer.Option("--prefix-caching")] = False,
    no_compile: Annotated[bool, typer.Option("--no-compile", help="Compilation mode 0, graphs of decode.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="A model of two layers: a trial on a CPU.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds of a dtype, at most.")] = 590.0,
) -> None:
    """Measure loads with each dtype in turn; 0 if every one was measured, else 1."""
    from provenance import provenance

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    loads = load or [TTFT, "chat"]
    if unknown := [name for name in loads if name not in (TTFT, *LOADS)]:
        raise typer.BadParameter(f"load: got {', '.join(unknown)}, supported: {TTFT}, {', '.join(LOADS)}")
    asked = dict(mode=mode, rate=rate, concurrency=concurrency, repeats=repeats, requests=requests,
                 cache_gib=cache_gib, drafts=drafts, batched_tokens=batched_tokens, prefix_caching=prefix_caching,
                 no_compile=no_compile, tiny=tiny)
    began, failed = provenance()["date"], 0
    for name in dtype or DTYPES:
        row = asked | dict(dtype=name, loads=loads, output=str(output), since=began)
        command = [sys.executable, __file__, "row", json.dumps(row)]
        failed += not engine._row(command, limit, output, provenance() | dict(part="serve", dtype=name))
    raise typer.Exit(int(failed > 0))


@app.command(hidden=True)
def row(asked: str) -> None:
    """Measure one dtype in this process; asked: what ``run`` got, as JSON."""
    from provenance import provenance

    asked = json.loads(asked)
    began = time.perf_counter()
    llm = engine_of(asked)
    about = dict(part="serve", model="tiny" if asked["tiny"] else "llama-3.1-8b",
                 **{name: asked[name] for name in ("dtype", "mode", "cache_gib", "drafts", "batched_tokens",
                                                   "prefix_caching")})
    about |= dict(compilation="mode 0, FULL_DECODE_ONLY" if asked["no_compile"] else "default",
                  start_s=round(time.perf_counter() - began, 1)) | engine.capacity(llm) | provenance()
    watch, output = Watch(llm), Path(asked["output"])
    for name in asked["loads"]:
        if name == TTFT:
            for line in first_tokens(llm, (256, 512) if asked["tiny"] else LENGTHS):
                engine.write(output, compared(about | dict(load=TTFT) | line, output, asked["since"]))
            continue
        line = dict(load=name) | measured(llm, watch, name, asked)
        engine.write(output, compared(about | line, output, asked["since"]))


def engine_of(asked: dict):
    """vLLM's engine as a server has it."""
    tiny, compiled = asked["tiny"], not (asked["no_compile"] or engine.is_cpu())
    folder = engine.model_folder(Path("build/serve-model"), engine.TINY if tiny else engine.LLAMA, asked["dtype"])
    options = dict(max_num_batched_tokens=asked["batched_tokens"], enable_prefix_caching=asked["prefix_caching"])
    if asked["drafts"]:
        options |= dict(speculative_config=dict(method="ngram", num_speculative_tokens=asked["drafts"],
                                                prompt_lookup_max=4, prompt_lookup_min=2))
    if asked["cache_gib"]:
        options |= dict(kv_cache_memory_bytes=int(asked["cache_gib"] * 2**30))
    if compiled:
        options |= dict(compilation_config={})
    length = 4000 if tiny else 132_000
    return engine.engine(folder, asked["dtype"], length, 64, **options)


class Watch:
    """What the engine's steps were and took: its scheduler and its executor, seen from outside."""

    def __init__(self, llm):
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduled: deque[dict] = deque()  # steps whose results have not come yet
        self.steps: list[dict] = []
        schedule, execute = self.core.scheduler.schedule, self.core.model_executor.execute_model

        def watched_schedule(*arguments, **options):
            found = schedule(*arguments, **options)
            if found.total_num_scheduled_tokens:
                live = self.core.scheduler.requests  # their computed tokens count the scheduled ones already
                is_mixed = any(live[name].num_computed_tokens - count < live[name].num_prompt_tokens
                               for name, count in found.num_scheduled_tokens.items())
                self.scheduled.append(dict(tokens=found.total_num_scheduled_tokens, is_mixed=is_mixed))
            return found

        def watched_execute(*arguments, **options):
            began = time.perf_counter()
            result = execute(*arguments, **options)
            if self.scheduled:
                self.scheduled[-1]["host_s"] = time.perf_counter() - began
            return result

        self.core.scheduler.schedule, self.core.model_executor.execute_model = watched_schedule, watched_execute

    def reset(self) -> None:
        self.scheduled.clear()
        self.steps = []

    def ended(self, seconds: float) -> None:
        """The oldest scheduled step has its results."""
        if self.scheduled:
            self.steps.append(self.scheduled.popleft() | dict(seconds=seconds))


@dataclass
class Requests:
    """The requests of a run, and when their tokens came."""

    added: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    count: dict[str, int] = field(default_factory=dict)
    ttft: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, list[float]] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def add(self, name: str) -> None:
        self.added[name], self.count[name], self.gaps[name] = time.perf_counter(), 0, []

    def enter(self, output, now: float) -> None:
        """A result of the engine."""
        name, tokens = output.request_id, len(output.outputs[0].token_ids)
        if tokens > self.count[name]:
            if not self.count[name]:
                self.ttft[name] = now - self.added[name]
            else:  # tokens of one step come together
                self.gaps[name] += [now - self.last[name]] + [0.0] * (tokens - self.count[name] - 1)
            self.count[name], self.last[name] = tokens, now
        if output.finished:
            self.ended.add(name)

    @property
    def live(self) -> int:
        return len(self.added) - len(self.ended)

    def good(self) -> int:
        """Requests that were served well."""
        return sum(self.ttft[name] <= GOOD_TTFT_S and (not gaps or mean(gaps) <= GOOD_ITL_S)
                   for name, gaps in self.gaps.items() if name in self.ttft)


def drawn(load: Load, vocabulary: int, requests: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt tokens, output tokens) of each request, the same for every dtype."""
    draw, found = random.Random(seed), []
    system = [[draw.randrange(10, vocabulary) for _ in range(load.shared)] for _ in range(8)]
    for _ in range(requests):
        length, count = draw.randrange(*load.prompt), draw.randrange(*load.output)
        if load.repeats_itself:
            passage = [draw.randrange(10, vocabulary) for _ in range(64)]
            prompt = (passage * (length // 64 + 1))[:length]
        else:
            prompt = [draw.randrange(10, vocabulary) for _ in range(length)]
        found.append(((draw.choice(system) if load.shared else []) + prompt, count))
    return found


def measured(llm, watch: Watch, name: str, asked: dict) -> dict:
    """One load, as often as asked, then some mixed steps under the profiler."""
    load, vocabulary = LOADS[name], llm.llm_engine.model_config.get_vocab_size()
    if asked["tiny"]:
        load = Load(12, (50, 900), (5, 30), 4, 256 * bool(load.shared), load.repeats_itself)
    requests, concurrency = asked["requests"] or load.requests, asked["concurrency"] or load.concurrency
    arrivals = None
    if asked["mode"] == Mode.poisson:
        draw = random.Random(5)
        arrivals = _arrivals(draw, requests, asked["rate"])
    once(llm, watch, drawn(load, vocabulary, min(4, requests), 99), 4, None)  # loads kernels that no graph has
    runs = []
    for repeat in range(asked["repeats"]):
        before = counters(llm)
        line = once(llm, watch, drawn(load, vocabulary, requests, 7), concurrency, arrivals)
        after = counters(llm)
        runs.append(line | {key: after[key] - before[key] for key in after})
    line = middle(runs)
    line |= dict(requests=requests, concurrency=None if arrivals else concurrency,
                 rate=asked["rate"] if arrivals else None,
                 out_tok_s_of_each=[one["out_tok_s"] for one in runs])
    if len(runs) > 1:
        line["out_tok_s_error"] = round(stdev(line["out_tok_s_of_each"]) / len(runs) ** 0.5, 2)
    try:
        return line | profiled(llm, watch, drawn(load, vocabulary, 16, 3))
    except Exception as error:  # the timed part stands
        return line | dict(profile_error=f"{type(error).__name__}: {error}"[:300])


def _arrivals(draw: random.Random, requests: int, rate: float) -> list[float]:
    """Seconds from the start at which requests arrive."""
    found, now = [], 0.0
    for _ in range(requests):
        now += draw.expovariate(rate)
        found.append(now)
    return found


def middle(runs: list[dict]) -> dict:
    """The run with the median output tokens/s."""
    ordered = sorted(runs, key=lambda one: one["out_tok_s"])
    return dict(ordered[len(ordered) // 2])


def once(llm, watch: Watch, requests: list[tuple[list[int], int]], concurrency: int,
         arrivals: list[float] | None) -> dict:
    """One run over these requests."""
    from vllm import SamplingParams

    inner, state, waiting = llm.llm_engine, Requests(), deque(enumerate(requests))
    watch.reset()
    began = time.perf_counter()
    previous = began

    def add() -> None:
        number, (prompt, count) = waiting.popleft()
        name = f"request-{began:.6f}-{number}"
        # vLLM may give a request another name inside; results have this one
        inner.add_request(name, dict(prompt_token_ids=prompt),
                          SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False))
        state.add(name)

    while waiting or state.live:
        now = time.perf_counter() - began
        while waiting and (state.live < concurrency if arrivals is None else arrivals[waiting[0][0]] <= now):
            add()
        if not state.live:
            time.sleep(max(0.0, arrivals[waiting[0][0]] - now))
            previous = time.perf_counter()
            continue
        outputs = inner.step()
        now = time.perf_counter()
        if outputs:
            watch.ended(now - previous)
            previous = now
        for output in outputs:
            state.enter(output, now)
    return summary(state, watch.steps, requests, time.perf_counter() - began)


def summary(state: Requests, steps: list[dict], requests: list[tuple[list[int], int]], seconds: float) -> dict:
    tokens, prompts = sum(state.count.values()), sum(len(prompt) for prompt, _ in requests)
    gaps = [gap for some in state.gaps.values() for gap in some]
    pure, mixed = ([step for step in steps if step["is_mixed"] == flag] for flag in (False, True))
    return dict(
        prompt_tokens=prompts, out_tokens=tokens, seconds=round(seconds, 3), out_tok_s=round(tokens / seconds, 1),
        all_tok_s=round((tokens + prompts) / seconds, 1), req_s=round(len(requests) / seconds, 3),
        ttft_ms=quantiles(state.ttft.values(), 0.5, 0.9, 0.99), itl_ms=quantiles(gaps, 0.5, 0.9, 0.99),
        tpot_ms=quantiles([mean(some) for some in state.gaps.values() if some], 0.5, 0.9),
        good=state.good(), steps=len(steps), mixed_steps=len(mixed),
        pure_ms=quantiles([step["seconds"] for step in pure], 0.5, 0.9),
        mixed_ms=quantiles([step["seconds"] for step in mixed], 0.5, 0.9),
        mixed_host_ms=quantiles([step["host_s"] for step in mixed if "host_s" in step], 0.5, 0.9))


def quantiles(values, *points: float) -> list[float] | None:
    """Values in ms at these parts of their order."""
    ordered = sorted(values)
    return [round(ordered[min(len(ordered) - 1, int(point * len(ordered)))] * 1e3, 3) for point in points] \
        if ordered else None


def counters(llm) -> dict[str, float]:
    """Counters of the engine that grow."""
    wanted = {"vllm:num_preemptions": "preemptions", "vllm:prefix_cache_hits": "hit_tokens",
              "vllm:spec_decode_num_accepted_tokens": "accepted", "vllm:spec_decode_num_draft_tokens": "drafted"}
    return {wanted[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in wanted}


def profiled(llm, watch: Watch, requests: list[tuple[list[int], int]]) -> dict:
    """Launches and synchronizations of mixed steps, by torch's profiler; nothing on a CPU."""
    import torch
    from vllm import SamplingParams

    if not torch.cuda.is_available():
        return {}
    inner, names, waiting = llm.llm_engine, [], deque(requests)
    for number in range(8):
        prompt, count = waiting.popleft()
        names.append(inner.add_request(f"profiled-{number}-{time.perf_counter()}", dict(prompt_token_ids=prompt),
                                       SamplingParams(temperature=0, max_tokens=count, ignore_eos=True,
                                                      detokenize=False)))
    for _ in range(12):
        inner.step()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        for number in range(PROFILED):
            prompt, count = waiting.popleft()
            inner.add_request(f"behind-{number}-{time.perf_counter()}", dict(prompt_token_ids=prompt),
                              SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False))
            inner.step()
        torch.cuda.synchronize()
    calls = {event.key: event.count for event in found.key_averages()}
    inner.abort_request([request for request in [*watch.core.scheduler.requests]], internal=True)
    while inner.has_unfinished_requests():
        inner.step()
    launches = sum(count for key, count in calls.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    syncs = sum(count for key, count in calls.items() if key in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
    return dict(launches_per_mixed_step=launches / PROFILED,
                syncs_per_mixed_step=max(0, syncs - 1) / PROFILED)  # one is this function's own


def first_tokens(llm, lengths: tuple[int, ...]):
    """Seconds to the first token of a lone prompt: lines by length."""
    from vllm import SamplingParams

    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    for length in lengths:
        times = []
        for repeat in range(4 if length < 100_000 else 2):
            draw = random.Random(repeat)
            prompt = dict(prompt_token_ids=[draw.randrange(10, vocabulary) for _ in range(length)])
            began = time.perf_counter()
            llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False),
                         use_tqdm=False)
            times.append(time.perf_counter() - began)
        later = times[1:]
        yield dict(prompt_tokens=length, seconds=round(median(later), 4), of_each=[round(x, 4) for x in times])


def compared(line: dict, output: Path, since: str) -> dict:
    """A line with its ratio to the line of ``auto`` of the same call."""
    if line["dtype"] == "auto" or not output.exists():
        return line
    alike = ("part", "load", "model", "mode", "cache_gib", "drafts", "batched_tokens", "prefix_caching", "compilation",
             "gpu", "rate", "concurrency", *["prompt_tokens"] * (line["load"] == TTFT))
    found = [other for other in map(json.loads, output.read_text().splitlines()) if other.get("dtype") == "auto"
             and other["date"] >= since and all(other.get(key) == line.get(key) for key in alike)]
    if not found:
        return line
    name = "seconds" if line["load"] == TTFT else "out_tok_s"
    return line | dict(ratio_to_auto=round(line[name] / found[-1][name], 4))


if __name__ == "__main__":
    app()
