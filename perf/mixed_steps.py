"""Times of the parts of a serving engine's mixed step on a GPU: plan, append, copy, fill, merge, decode.

    python perf/mixed_steps.py --format k4v4 --output mixed_steps.jsonl

One layer of Llama-3.1-8B's shape in bfloat16, random data, L2 flushed before each launch, medians. A line of JSON a
part: microseconds, the bytes that it must move, and the ratio to a copy of as many bytes in the same run.
"""

import json
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import torch
import typer
from provenance import need, provenance

from lowbit_attn import FORMATS
from lowbit_attn.formats import Format
from lowbit_attn.paged import PAGE, PagedStore, Step, ring_slots
from lowbit_attn.paged_plan import BatchPlan, PlanBuffers, TokenLayout, make_plan
from lowbit_attn.paged_steps import LayerSteps, launch, workspace_tokens
from lowbit_attn.reference import Attention

HEADS, RATIO, DIM, DTYPE, DEVICE = 8, 4, 128, torch.bfloat16, "cuda"
MAX_ROWS, MAX_TOKENS = 64, 8192
# name: (tokens before the step, new tokens) of each row
STEPS = {
    "decode-32": [(2000 + 61 * row, 1) for row in range(32)],
    "chunk-8192": [(0, 8192)],
    "chunk-8192-behind-24576": [(24576, 8192)],
    "chunk-8192-behind-57344": [(57344, 8192)],
    "mixed": [(2000 + 61 * row, 1) for row in range(24)] + [(2048, 2000)],
}


def microseconds(call, repeats: int = 15) -> float:
    """Median time of a call behind a flushed L2."""
    flush, times = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), []
    for _ in range(repeats + 3):
        flush.zero_()
        torch.cuda._sleep(200_000)  # the launches below are queued by then
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return median(times[3:])


class Case:
    """A step of one layer, with what its parts need."""

    def __init__(self, format: Format, rows: list[tuple[int, int]]):
        sinks = format.sinks
        blocks = [-(-(before + new) // PAGE) + 1 for before, new in rows]
        pages = sum(blocks) + 1
        pool = torch.randint(0, 256, (pages, HEADS, format.record(DIM).nbytes), dtype=torch.uint8, device=DEVICE)
        rings = torch.randn(len(rows) + 1, 2, HEADS, sinks + ring_slots(format, 1), DIM, dtype=DTYPE, device=DEVICE)
        self.store = PagedStore(format, pool, rings, sinks)
        table = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
        order = torch.randperm(pages - 1) + 1
        for row, count in enumerate(blocks):
            table[row, :count], order = order[:count], order[count:]
        q_lens = np.array([new for _, new in rows])
        lens = np.array([before + new for before, new in rows])
        starts = np.concatenate(([0], np.cumsum(q_lens)))
        self.step = Step(*(torch.as_tensor(x, dtype=torch.int32).to(DEVICE) for x in
                           (table, lens, starts, np.arange(1, len(rows) + 1))))
        where = TokenLayout.of(format, sinks, self.store.slots)
        self.buffers = PlanBuffers(where, MAX_ROWS, MAX_TOKENS + MAX_ROWS, torch.device(DEVICE))
        self.capacity = workspace_tokens(MAX_TOKENS)
        self.plan: BatchPlan = make_plan(self.buffers, q_lens, lens, 1, self.capacity,
                                         lambda array: torch.from_numpy(array).to(DEVICE))
        launch(self.plan, self.step)
        total = int(starts[-1])
        self.q = torch.randn(total, HEADS * RATIO, DIM, dtype=DTYPE, device=DEVICE)
        self.k, self.v = (torch.randn(total, HEADS, DIM, dtype=DTYPE, device=DEVICE) for _ in range(2))
        self.workspace = tuple(torch.randn(self.capacity, HEADS, DIM, dtype=DTYPE, device=DEVICE) for _ in range(2))
        self.steps = LayerSteps(self.store, self.buffers)
        self.steps.append(self.plan, self.step, self.k, self.v, lambda: self.workspace)  # real pages and loaded kernels
        self.out = torch.empty_like(self.q)

    def parts(self) -> dict:
        """Calls by name, each with the bytes that it must move."""
        plan, ops, store, step = self.plan, self.steps.ops, self.store, self.step
        token, record = 2 * HEADS * DIM * 2, store.pool.shape[1] * store.pool.shape[2]
        ended = int(self.buffers.count)
        found = {"plan": (lambda: launch(plan, step), 0),
                 "append": (lambda: ops.append(store, plan.buffers, step, self.k, self.v),
                            plan.tokens * token + ended * record)}
        if plan.decode:
            rows, options = plan.decode, Attention()
            held = int(self.buffers.read[1].sum()) // PAGE * record
            found["decode"] = (lambda: self.steps._decode(rows, step, self.q, self.out, options, None), held)
        for number, part in enumerate(plan.passes):
            keys, values = (x[: part.num_keys] for x in self.workspace)
            if part.copies is not None:
                count = int(part.copies[3].sum())
                found[f"copy-{number}"] = (lambda part=part, keys=keys, values=values: ops.copy(
                    store, step, part.copies, self.k, self.v, keys, values), 2 * count * token)
            if part.pages is not None:
                pages = part.pages.shape[1]
                found[f"fill-{number}"] = (lambda part=part, keys=keys, values=values: ops.fill(
                    store, step, part.pages, keys, values), pages * (record + PAGE * token))
        if plan.chunks is not None:
            out = self.out[plan.chunks]
            more, lse = torch.randn_like(out), torch.randn(HEADS * RATIO, len(out), device=DEVICE)
            found["merge"] = (lambda: ops.merge(out, lse, more, lse.clone()), 3 * out.numel() * 2 + 4 * lse.numel() * 4)
        return found


def main(
    format: Annotated[list[str] | None, typer.Option(help="Default: k4v4, k2v2, kitty-pro.")] = None,
    step: Annotated[list[str] | None, typer.Option(help=f"Default: {', '.join(STEPS)}.")] = None,
    output: Annotated[Path, typer.Option()] = Path("mixed_steps.jsonl"),
) -> None:
    """Measure the parts of mixed steps."""
    need()
    torch.manual_seed(0)
    for name in format or ("k4v4", "k2v2", "kitty-pro"):
        for title in step or STEPS:
            case = Case(FORMATS[name], STEPS[title])
            for part, (call, nbytes) in case.parts().items():
                line = dict(part="mixed_steps", format=name, step=title, call=part, us=round(microseconds(call), 2),
                            bytes=nbytes)
                if nbytes:
                    halves = torch.empty(2, max(nbytes // 2, 1), dtype=torch.uint8, device=DEVICE)
                    line["x_copy"] = round(line["us"] / microseconds(lambda: halves[0].copy_(halves[1])), 3)
                text = json.dumps(line | provenance())
                print(text, flush=True)
                with open(output, "a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    typer.run(main)
