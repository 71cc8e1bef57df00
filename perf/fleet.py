"""How many GPUs a stream of requests needs, by format of the KV cache: a discrete-event simulation. Needs no GPU.

    python perf/fleet.py size       bytes, requests and shipping by format
    python perf/fleet.py run        the fleet's table

Machines that read prompts hand packed caches to decode GPUs over a link; a GPU decodes all of its requests in one batch.
A step's time is interpolated between steps of a Llama-3.1-8B shape measured on an H200 (perf/e2e.py). Not simulated: the
reading of prompts, and a scheduler's own time. docs/serving.md has the tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import simpy
import typer
from paper_lines import Lines

from lowbit_attn.budget import SIXTEEN_BIT, interpolate, sequence_bytes
from lowbit_attn.formats import FORMATS
from lowbit_attn.layout import PAGE_TOKENS

app = typer.Typer(no_args_is_help=True, add_completion=False)

COMMIT = "bc6f14c59b0f"  # of the measured steps
FORMATS_SHOWN = (SIXTEEN_BIT, "k4v4", "k4v2", "k2v2")
LAYERS, HEADS_KV, HEAD_DIM = 32, 8, 128
LINK_BYTES_S = 50e9  # 400 Gb/s a GPU, by datasheet
CONTEXTS = (8192, 32768, 131072)
LATE_S = 2.0  # a first token later than this is late
LATE_SHARE = 0.01  # of requests may be


@dataclass(frozen=True)
class Request:
    """arrival in seconds; prompt and new, tokens."""

    arrival: float
    prompt: int
    new: int


class Steps:
    """Time and room of one decode GPU for one format, from measured steps."""

    def __init__(self, name: str):
        lines = Lines().all("e2e", model="llama-3.1-8b", commit=COMMIT)
        own = [line for line in lines if line["format"] == name]
        if not own:
            raise typer.BadParameter(f"format: got {name!r}, supported: {', '.join({x['format'] for x in lines})}")
        self.fmt = None if name == SIXTEEN_BIT else FORMATS[name]
        self.weights = _points((line["batch"], line["weights_ms"]) for line in lines)
        self.rest = _points((line["batch"], line["step_ms"] - line["weights_ms"] - line["attention_ms"])
                            for line in own)
        self.attention = _points((line["layer_bytes"], line["attention_ms"]) for line in own)
        self.room = LAYERS * max(line["layer_bytes"] for line in lines if line["format"] == SIXTEEN_BIT)
        short, long = 64 * PAGE_TOKENS, 128 * PAGE_TOKENS
        self.slope = (self.layer_bytes(long) - self.layer_bytes(short)) / (long - short)  # bytes a token adds
        self.tail = self.layer_bytes(short) - self.slope * short  # that 16-bit tokens have beyond it

    def layer_bytes(self, tokens: int) -> int:
        return sequence_bytes(self.fmt, HEADS_KV, HEAD_DIM, tokens)

    def cache_bytes(self, tokens: int) -> int:
        """All layers of a sequence."""
        return LAYERS * self.layer_bytes(tokens)

    def seconds(self, batch: int, tokens: int) -> float:
        """A step of ``batch`` sequences of ``tokens`` in all."""
        size = self.slope * tokens + self.tail * batch
        return (interpolate(self.weights, batch) + max(0.0, interpolate(self.rest, batch))
                + interpolate(self.attention, size)) / 1000


def _points(pairs: Iterator[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Means of equal abscissas, rising."""
    found: dict[float, list[float]] = {}
    for x, y in pairs:
        found.setdefault(x, []).append(y)
    return tuple((x, float(np.mean(found[x]))) for x in sorted(found))


def arrivals(rate: float, seconds: float, seed: int = 0) -> list[Request]:
    """Poisson arrivals; prompts around 16K tokens (1K to 120K), answers around 400 (16 to 4,096), both log-normal."""
    random = np.random.default_rng(seed)
    count = random.poisson(rate * seconds)
    times = np.sort(random.uniform(0, seconds, count))
    prompts = np.clip(random.lognormal(np.log(16384), 1.0, count), 1024, 122880).astype(int)
    new = np.clip(random.lognormal(np.log(400), 0.8, count), 16, 4096).astype(int)
    return [Request(*values) for values in zip(times.tolist(), prompts.tolist(), new.tolist())]


@dataclass
class Fleet:
    """Decode GPUs before one queue; first come, first served; a request goes to the GPU with the most room.

    waits: seconds from a request's arrival, its prompt read, to its first token; gaps: mean seconds between its tokens.
    """

    env: simpy.Environment
    steps: Steps
    size: int
    queue: list = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.gpus = [Gpu(self) for _ in range(self.size)]

    def feed(self, requests: list[Request]) -> Iterator:
        for request in requests:
            yield self.env.timeout(request.arrival - self.env.now)
            self.queue.append(_Running(request, request.prompt, request.new))
            self.place()

    def place(self) -> None:
        """Give waiting requests to GPUs that have room, in their order."""
        while self.queue:
            need = self.steps.cache_bytes(self.queue[0].tokens + self.queue[0].left)
            alive = [gpu for gpu in self.gpus if gpu.is_alive]
            best = max(alive, key=lambda gpu: gpu.free, default=None)
            if best is None or best.free < need:
                return
            best.take(self.queue.pop(0), need)


@dataclass(eq=False)
class _Running:
    request: Request
    tokens: int  # in the cache
    left: int  # to be made
    need: int = 0
    first: float | None = None  # when its first token came


class Gpu:
    """One decode GPU: a link over which caches come one after the other, and a loop of steps over what is there."""

    def __init__(self, fleet: Fleet):
        self.fleet, self.env, self.is_alive = fleet, fleet.env, True
        self.free = fleet.steps.room
        self.held: set[_Running] = set()  # on their way or running
        self.running: list[_Running] = []
        self.link = simpy.Resource(self.env)
        self.came = self.env.event()
        self.env.process(self.work())

    def take(self, one: _Running, need: int) -> None:
        one.need, self.free = need, self.free - need
        self.held.add(one)
        self.env.process(self.ship(one))

    def ship(self, one: _Running) -> Iterator:
        with self.link.request() as claim:
            yield claim
            yield self.env.timeout(self.fleet.steps.cache_bytes(one.tokens) / LINK_BYTES_S)
        if one in self.held:  # the GPU has not failed meanwhile
            self.running.append(one)
            if not self.came.triggered:
                self.came.succeed()

    def work(self) -> Iterator:
        while True:
            if not self.running:
                self.came = self.env.event()
                yield self.came
            batch = list(self.running)
            yield self.env.timeout(self.fleet.steps.seconds(len(batch), sum(one.tokens for one in batch)))
            for one in batch:
                if one in self.held:
                    self.step(one)
            self.fleet.place()

    def step(self, one: _Running) -> None:
        one.tokens, one.left = one.tokens + 1, one.left - 1
        if one.first is None:
            one.first = self.env.now
            self.fleet.waits.append(self.env.now - one.request.arrival)
        if one.left == 0:
            self.drop(one)
            self.fleet.gaps.append((self.env.now - one.first) / max(1, one.request.new - 1))

    def drop(self, one: _Running) -> None:
        self.held.discard(one)
        self.running = [other for other in self.running if other is not one]
        self.free += one.need

    def fail(self, after: float, seconds: float) -> Iterator:
        """Stop for some time; its requests go on elsewhere, their caches shipped again with the tokens made so far."""
        yield self.env.timeout(after)
        self.is_alive = False
        lost = sorted(self.held, key=lambda one: one.request.arrival)
        for one in lost:
            self.drop(one)
        self.fleet.queue[:0] = lost
        self.fleet.place()
        yield self.env.timeout(seconds)
        self.is_alive = True
        self.fleet.place()


def simulate(name: str, gpus: int, requests: list[Request], fail: tuple[float, float] | None = None) -> Fleet:
    """Serve all requests; fail: (when, for how many seconds) the first GPU fails."""
    env = simpy.Environment()
    fleet = Fleet(env, Steps(name), gpus)
    if fail:
        env.process(fleet.gpus[0].fail(*fail))
    env.process(fleet.feed(requests))
    env.run(until=max(request.arrival for request in requests) + 3600)
    if len(fleet.gaps) != len(requests):
        raise RuntimeError(f"{len(requests) - len(fleet.gaps)} of {len(requests)} requests have not ended an hour after "
                           "the last arrival: take more GPUs")
    return fleet


def late(fleet: Fleet) -> float:
    """Share of requests whose first token is late."""
    return float(np.mean(np.array(fleet.waits) > LATE_S))


def least_gpus(name: str, requests: list[Request]) -> tuple[int, Fleet]:
    """The smallest fleet in which few requests are late, by bisection."""
    def served(gpus: int) -> Fleet | None:
        try:
            fleet = simulate(name, gpus, requests)
        except RuntimeError:
            return None
        return fleet if late(fleet) <= LATE_SHARE else None

    low, high, found = 0, 1, served(1)
    while found is None:
        low, high = high, 2 * high
        found = served(high)
    while high - low > 1:
        middle = (low + high) // 2
        if fleet := served(middle):
            high, found = middle, fleet
        else:
            low = middle
    return high, found


@app.command()
def size() -> None:
    """Bytes of a token, requests that fit on a GPU, and the time to ship 32K tokens, by format."""
    print("| KV cache | KB a token, 32K | " + " | ".join(f"requests of {n >> 10}K" for n in CONTEXTS)
          + " | GB of 32K | ms to ship |\n" + "|---" * (4 + len(CONTEXTS)) + "|")
    for name in FORMATS_SHOWN:
        steps = Steps(name)
        nbytes = steps.cache_bytes(32768)
        fits = [f"{steps.room // steps.cache_bytes(n):.0f}" for n in CONTEXTS]
        print(f"| {name} | {nbytes / 32768 / 1000:.1f} | {' | '.join(fits)} | {nbytes / 1e9:.2f} | "
              f"{nbytes / LINK_BYTES_S * 1e3:.0f} |")


@app.command()
def run(
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 24.0,
    seconds: Annotated[float, typer.Option(help="How long they come.")] = 180.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
) -> None:
    """The smallest fleet of each format, and what it does when a GPU fails halfway for 60 seconds."""
    requests = arrivals(rate, seconds, seed)
    new = sum(request.new for request in requests)
    print(f"{len(requests)} requests, {new} new tokens, mean prompt {np.mean([r.prompt for r in requests]):.0f}\n")
    print("| KV cache | GPUs | tokens/s a GPU | first token: median, 99 % | ms a token: median, 99 % | late when one "
          "fails |\n|---|---|---|---|---|---|")
    for name in FORMATS_SHOWN:
        gpus, fleet = least_gpus(name, requests)
        wait, gap = (np.percentile(values, (50, 99)) for values in (fleet.waits, fleet.gaps))
        failed = late(simulate(name, gpus, requests, (seconds / 2, 60.0))) if gpus > 1 else float("nan")
        print(f"| {name} | {gpus} | {new / seconds / gpus:.0f} | {wait[0]:.2f}, {wait[1]:.2f} s | {gap[0] * 1e3:.1f}, "
              f"{gap[1] * 1e3:.1f} | {failed:.1%} |", flush=True)


if __name__ == "__main__":
    app()
