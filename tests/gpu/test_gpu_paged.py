"""Steps over an engine's pages on a CUDA device: the bytes and the attention of the CPU, captured steps, chunks."""

import pytest
import torch

from lowbit_attn import FORMATS, reference
from lowbit_attn.cache.attached import Attached
from lowbit_attn.paged import PAGE, PagedStore, Step, append, ring_slots
from lowbit_attn.paged_attention import attention
from lowbit_attn.paged_steps import LayerSteps, StepBuffers
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


def dense(q, k, v, options, is_causal):
    return reference.attention(q, k.transpose(0, 1), v.transpose(0, 1), options, causal=is_causal)


def prompts(mine: PagedStore, theirs: PagedStore, sequences: Sequences, counts: list[int]) -> None:
    """A step of chunks on both: equal bytes, and attention by way of dequantized pages."""
    step, (q, k, v) = sequences.step(counts)
    before = append(mine, on_device(step), k.to(DEVICE), v.to(DEVICE))
    expected_before = append(theirs, step, k, v)
    same_bytes(mine, theirs)
    out, expected = torch.zeros_like(q, device=DEVICE), torch.zeros_like(q, dtype=torch.float32)
    attention(mine, on_device(step), *(x.to(DEVICE) for x in (q, k, v)), before, out, OPTIONS, dense)
    attention(theirs, step, q.float(), k.float(), v.float(), expected_before, expected, OPTIONS)
    close(out, expected)


def same_bytes(mine: PagedStore, theirs: PagedStore) -> None:
    """But for the null page and ring, which may hold anything on a GPU."""
    assert_same_bytes("pool", mine.pool[1:].cpu(), theirs.pool[1:])
    assert_same_bytes("rings", mine.rings[1:].cpu(), theirs.rings[1:])


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    apart = (out.float().cpu() - expected).abs().max() / expected.abs().max()
    assert apart < 0.02, float(apart)


@pytest.mark.parametrize("name,sinks", NAMES)
def test_chunks_then_steps(arch, name, sinks):
    """Prompts in two chunks, then steps of one and of three tokens over the ends of blocks."""
    theirs, mine = stores(name, sinks)
    sequences = Sequences()
    prompts(mine, theirs, sequences, [300, 130, 254 + sinks, 127 + sinks])
    prompts(mine, theirs, sequences, [130, 140, 250, 128])
    buffers = StepBuffers(mine.format, sinks, 3, ROWS + 2, mine.pool.device)
    layer = LayerSteps(mine, buffers, 2)
    for number in range(24):
        q_len = 3 if number % 4 == 3 else 1
        step, (q, k, v) = sequences.step([q_len] * (ROWS - 1))
        there, out = on_device(step), torch.zeros_like(q, device=DEVICE)
        buffers.fill(there)
        layer.append(there, k.to(DEVICE), v.to(DEVICE), q_len)
        append(theirs, step, k, v)
        same_bytes(mine, theirs)
        layer.attention(there, q.to(DEVICE), out, OPTIONS, q_len)
        expected = torch.zeros_like(q, dtype=torch.float32)
        attention(theirs, step, q.float(), k.float(), v.float(), None, expected, OPTIONS)
        close(out, expected)


def whole(layer: LayerSteps, step: Step, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
    layer.append(step, *inputs[1:], 1)
    layer.attention(step, inputs[0], out, OPTIONS, 1)


@pytest.mark.parametrize("name,sinks", [("k4v4", 0), ("kitty-pro", 32)])
def test_a_captured_step_serves_those_that_follow(arch, name, sinks):
    """One graph of append and attention over 140 steps: blocks end, rings go round, nothing is captured again."""
    theirs, mine = stores(name, sinks)
    sequences = Sequences()
    prompts(mine, theirs, sequences, [200, 130, 254 + sinks, 127 + sinks])
    buffers = StepBuffers(mine.format, sinks, 1, ROWS, mine.pool.device)
    layer = LayerSteps(mine, buffers, 0)
    for number in range(140):
        step, values = sequences.step([1] * (ROWS - 1))
        if not number:
            there, inputs = on_device(step), [x.to(DEVICE) for x in values]
            out = torch.zeros_like(inputs[0])
        for kept, new in zip((*there, *inputs), (*step, *values)):
            kept.copy_(new)
        buffers.fill(there)
        if number == 1:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                whole(layer, there, inputs, out)
        graph.replay() if number else whole(layer, there, inputs, out)  # a first step loads the kernels
        append(theirs, step, *values[1:])
        if number % 7 == 0 or PAGE - 3 < number < PAGE + 3:
            same_bytes(mine, theirs)
            expected = torch.zeros_like(values[0], dtype=torch.float32)
            attention(theirs, step, *(x.float() for x in values), None, expected, OPTIONS)
            close(out, expected)
    same_bytes(mine, theirs)
