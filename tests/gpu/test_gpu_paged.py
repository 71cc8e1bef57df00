"""Steps over an engine's pages on a CUDA device: the bytes and the attention of the CPU, captured steps, chunks."""

from dataclasses import replace

import pytest
import torch
from unit.mixed import buffers_of, varlen

from lowbit_attn import FORMATS
from lowbit_attn.cache.attached import Attached
from lowbit_attn.paged import PAGE, PagedStore, Step, append, ring_slots
from lowbit_attn.paged_attention import attention
from lowbit_attn.paged_plan import BatchPlan, make_plan
from lowbit_attn.paged_steps import LayerSteps, launch
from lowbit_attn.reference import Attention
from lowbit_attn.testing import assert_same_bytes, normal_codebooks

pytestmark = pytest.mark.gpu
DEVICE, HEADS, RATIO, ROWS, PAGES, WIDTH = "cuda", 2, 4, 5, 64, 10
NAMES = [("k4v4", 0), ("k2v2", 32), ("kitty-pro", 32), ("kcq4vcq2", 0)]
DIM, DTYPE = 128, torch.bfloat16
OPTIONS = Attention(0.1)


def stores(name: str, sinks: int) -> list[PagedStore]:
    """One on the CPU, and one on the device whose pages lie among those of another layer."""
    fmt, found = FORMATS[name], []
    for device in ("cpu", DEVICE):
        blocks = torch.zeros(PAGES, 2, HEADS, fmt.record(DIM).nbytes, dtype=torch.uint8, device=device)
        rings = torch.zeros(ROWS + 1, 3, HEADS, sinks + ring_slots(fmt, 4), DIM, dtype=DTYPE, device=device)
        books = normal_codebooks(name, 1, HEADS, DIM).layer(0) if fmt.needs_codebooks else None
        found.append(PagedStore(fmt, blocks[:, 1], rings[:, 1:], sinks,
                                books and Attached(books, fmt, HEADS, DIM, device)))
    return found


class Sequences:
    """Sequences in rows of their own, the last row padding, that grow by equally many tokens a step."""

    def __init__(self):
        self.draw = torch.Generator().manual_seed(0)
        self.lens = torch.zeros(ROWS, dtype=torch.int32)
        self.table = torch.zeros(ROWS, WIDTH, dtype=torch.int32)
        self.table[:-1] = torch.randperm(PAGES - 1, generator=self.draw)[: (ROWS - 1) * WIDTH].view(-1, WIDTH) + 1
        self.rings = torch.tensor([3, 1, 5, 2, 0], dtype=torch.int32)[:ROWS]

    def step(self, counts: list[int]) -> tuple[Step, list[torch.Tensor]]:
        """The next tokens of each row; q, k, v, with some more behind them."""
        new = torch.tensor([*counts, 0], dtype=torch.int32)
        self.lens = self.lens + new
        starts = torch.cat((torch.zeros(1), new.cumsum(0))).int()
        total = int(starts[-1]) + counts[0]
        values = [torch.randn(total, heads, DIM, generator=self.draw).to(DTYPE)
                  for heads in (HEADS * RATIO, HEADS, HEADS)]
        return Step(self.table, self.lens.clone(), starts, self.rings), values


def on_device(step: Step) -> Step:
    return Step(*(x.to(DEVICE) for x in step))


class Layer:
    """One layer's steps on the device, planned on the host as an engine does."""

    def __init__(self, store: PagedStore, threshold: int = 4, capacity: int = 4096):
        self.store, self.threshold, self.capacity = store, threshold, capacity
        self.buffers = buffers_of(store, ROWS + 2, 4096)
        self.steps = LayerSteps(store, self.buffers)
        self.workspace = tuple(torch.full((capacity, HEADS, DIM), torch.nan, dtype=DTYPE, device=DEVICE)
                               for _ in range(2))

    def plan(self, step: Step, there: Step, tokens: int | None = None) -> BatchPlan:
        plan = make_plan(self.buffers, step.q_lens.numpy(), step.seq_lens.numpy(), self.threshold, self.capacity,
                         lambda array: torch.from_numpy(array).to(DEVICE), tokens=tokens)
        launch(plan, there)
        return plan

    def run(self, plan: BatchPlan, there: Step, q, k, v, out, options=OPTIONS) -> None:
        places = self.steps.append(plan, there, k, v, lambda: self.workspace)
        self.steps.attention(plan, there, q, out, options, places, varlen)


def compared(layer: Layer, theirs: PagedStore, sequences: "Sequences", counts: list[int], options=OPTIONS) -> BatchPlan:
    """A step on both: equal bytes, and the attention of the CPU."""
    step, (q, k, v) = sequences.step(counts)
    there, out = on_device(step), torch.full_like(q, torch.nan, device=DEVICE)
    plan = layer.plan(step, there)
    layer.run(plan, there, *(x.to(DEVICE) for x in (q, k, v)), out,
              replace(options, sink_logits=options.sink_logits and options.sink_logits.to(DEVICE)))
    before, expected = append(theirs, step, k, v), torch.zeros_like(q, dtype=torch.float32)
    same_bytes(layer.store, theirs)
    attention(theirs, step, q.float(), k.float(), v.float(), before, expected, options)
    live = slice(int(step.query_start_loc[-1]))
    close(out[live], expected[live])
    return plan


def same_bytes(mine: PagedStore, theirs: PagedStore) -> None:
    """But for the null page and ring, which may hold anything on a GPU."""
    assert_same_bytes("pool", mine.pool[1:].cpu(), theirs.pool[1:])
    assert_same_bytes("rings", mine.rings[1:].cpu(), theirs.rings[1:])


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    apart = (out.float().cpu() - expected).abs().max() / expected.abs().max()
    assert apart < 0.02, float(apart)


@pytest.mark.parametrize("capacity", [4096, 512])
@pytest.mark.parametrize("name,sinks", NAMES)
def test_mixed_steps(arch, name, sinks, capacity):
    """Prompts in chunks, then steps in which some rows decode one token, drafts of unlike number, or read a chunk."""
    theirs, mine = stores(name, sinks)
    sequences, layer, seen = Sequences(), Layer(mine, capacity=capacity), set()
    for counts in ([127 + sinks, 130, 254 + sinks, 300], [128, 130, 140, 250], [1, 1, 1, 1], [1, 1, 1, 129],
                   [1, 2, 4, 3], [4, 4, 4, 4], [1, 3, 60, 130], [2, 1, 1, 5], *[[1] * 4] * 6, [1, 1, 200, 131]):
        plan = compared(layer, theirs, sequences, counts)
        seen |= {(part.is_causal, part.is_direct) for part in plan.passes}
    assert (True, False) in seen and ((False, False) in seen) == (capacity == 512)


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_padded_queries_that_see_no_token(arch, rows):
    """Rows of one token beside rows of four: padded queries of new sequences see nothing, and are dropped."""
    theirs, mine = stores("k4v4", 0)
    sequences, layer = Sequences(), Layer(mine)
    compared(layer, theirs, sequences, [1] * rows + [4] * (ROWS - 1 - rows))
    compared(layer, theirs, sequences, [2] * (ROWS - 1))


@pytest.mark.parametrize("name,sinks", [("k4v4", 0), ("kitty-pro", 32)])
def test_a_captured_step_serves_those_that_follow(arch, name, sinks):
    """One graph of append and attention over 140 steps: blocks end, rings go round, nothing is captured again."""
    theirs, mine = stores(name, sinks)
    sequences = Sequences()
    layer = Layer(mine)
    compared(layer, theirs, sequences, [127 + sinks, 130, 200, 254 + sinks])
    for number in range(140):
        step, values = sequences.step([1] * (ROWS - 1))
        if not number:
            there, inputs = on_device(step), [x.to(DEVICE) for x in values]
            out = torch.zeros_like(inputs[0])
        for kept, new in zip((*there, *inputs), (*step, *values)):
            kept.copy_(new)
        plan = layer.plan(step, there, tokens=ROWS)
        if number == 1:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer.run(plan, there, *inputs, out)
        graph.replay() if number else layer.run(plan, there, *inputs, out)  # a first step loads the kernels
        append(theirs, step, *values[1:])
        if number % 7 == 0 or PAGE - 3 < number < PAGE + 3:
            same_bytes(mine, theirs)
            expected = torch.zeros_like(values[0], dtype=torch.float32)
            attention(theirs, step, *(x.float() for x in values), None, expected, OPTIONS)
            close(out, expected)
    same_bytes(mine, theirs)
