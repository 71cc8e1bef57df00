"""What a layer launches in a serving step does not depend on the number of rows, and no device value is read.

The kernels are replaced by ones that note their launch; what torch launches besides is counted by its dispatcher.
"""

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import lowbit_attn
from lowbit_attn import FORMATS, dispatch
from lowbit_attn.paged import PAGE, PagedStore, ring_slots
from lowbit_attn.paged_plan import make_plan
from lowbit_attn.paged_steps import LayerSteps
from lowbit_attn.reference import Attention
from unit.mixed import Engine, buffers_of

HEADS, RATIO, DIM, THRESHOLD = 2, 2, 64, 4
LOOKS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "__int__", "__float__", "__bool__", "__index__"}
VIEWS = ("view", "slice", "select", "unsqueeze", "expand", "as_strided", "t.", "transpose", "alias", "detach", "empty",
         "new_empty", "split", "unbind", "permute")
ROOT = Path(lowbit_attn.__file__).parent


class NoLooks(TorchFunctionMode):
    """Refuses what brings a value of a tensor to the host."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in LOOKS, f"{name} reads a device value"
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Counts torch's operators, but for those that only make views or memory."""

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        assert "_local_scalar_dense" not in name and "nonzero" not in name, f"{name} reads a device value"
        if not name.startswith(VIEWS) and not name.startswith(tuple(f"_{view}" for view in VIEWS)):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Ops:
    """Kernels that only note their launch."""

    def __init__(self, found: list[str]):
        self.found = found

    def __getattr__(self, name: str):
        return lambda *arguments: self.found.append(name)


def launches_of(rows: list[int], contexts: list[int], capacity: int, monkeypatch, fmt: str = "k4v4",
                sink_logits: bool = False) -> list[str]:
    """What one layer launches in a step of rows with so many new tokens behind so many others."""
    found, format = [], FORMATS[fmt]
    blocks = max(-(-(a + b) // PAGE) for a, b in zip(rows, contexts)) + 1
    pool = torch.zeros(1 + len(rows) * blocks, HEADS, format.record(DIM).nbytes, dtype=torch.uint8)
    rings = torch.zeros(len(rows) + 1, 2, HEADS, ring_slots(format, THRESHOLD), DIM, dtype=torch.float16)
    store = PagedStore(format, pool, rings)
    engine = Engine(store, len(rows), 0)
    engine.lens[:] = torch.tensor(contexts, dtype=torch.int32)
    step, (q, k, v) = engine.step(dict(enumerate(rows)), RATIO)
    buffers = buffers_of(store, len(rows), len(q))
    plan = make_plan(buffers, step.q_lens.numpy(), step.seq_lens.numpy(), THRESHOLD, capacity,
                     lambda array: torch.from_numpy(np.array(array)))
    layer = LayerSteps(store, buffers)
    layer._view(step, len(rows))  # views are made once
    if plan.decode:
        layer._view(step, plan.decode.rows)
    layer.ops = Ops(found)

    class Planned:
        def run(self, *arguments):
            found.append("decode")

    monkeypatch.setattr(dispatch, "planned", lambda *arguments: Planned())
    workspace = tuple(torch.empty(max(capacity, 1), HEADS, DIM, dtype=torch.float16) for _ in range(2))
    options = Attention(0.1, sink_logits=torch.zeros(HEADS * RATIO) if sink_logits else None)

    def varlen(q, keys, values, part, options, out):
        found.append("varlen")
        return torch.empty(q.shape[1], len(q))

    out = torch.empty_like(q)
    with NoLooks(), Launches(found):
        places = layer.append(plan, step, k, v, lambda: workspace)
        layer.attention(plan, step, q, out, options, places, varlen)
    return found


def rows_of(draw: random.Random, decode: int, chunks: int, unlike: bool) -> tuple[list[int], list[int]]:
    lens = [draw.randint(1, THRESHOLD) if unlike else 1 for _ in range(decode)]
    if unlike:
        lens[:2] = 1, 2
    return (sorted(lens) + [draw.randint(140, 300) for _ in range(chunks)],
            [draw.randint(1, 600) for _ in range(decode)] + [draw.randint(129, 500) for _ in range(chunks)])


@pytest.mark.parametrize("unlike, expected", [
    (False, ["copy", "append", "decode", "fill", "varlen"]),
    (True, ["copy", "append", "index_select.default", "decode", "index_select.out", "fill", "varlen"])])
def test_launches_do_not_depend_on_the_rows(unlike, expected, monkeypatch, seed):
    draw = random.Random(seed)
    for decode, chunks in ((4, 1), (64, 1), (12, 6), (60, 4)):
        found = launches_of(*rows_of(draw, decode, chunks, unlike), 10_000, monkeypatch)
        assert found == expected, (decode, chunks)


def test_steps_of_one_kind(monkeypatch):
    """Decode alone is two launches; prompts without context are read where the model left them."""
    assert launches_of([1] * 32, [200] * 32, 4096, monkeypatch) == ["append", "decode"]
    assert launches_of([200, 300], [0, 0], 4096, monkeypatch) == ["append", "varlen"]
    assert launches_of([1, 1, 200], [7, 300, 0], 4096, monkeypatch) == ["append", "decode", "varlen"]
    assert launches_of([200, 300], [0, 130], 4096, monkeypatch) == ["copy", "append", "fill", "varlen"]


def test_each_further_pass_is_three_launches(monkeypatch):
    """A context beyond the workspace, and rings of more chunks than it holds."""
    one = launches_of([1, 300], [5, 900], 4096, monkeypatch)
    more = launches_of([1, 300], [5, 900], 900, monkeypatch)
    assert one == ["copy", "append", "decode", "fill", "varlen"]
    assert more == [*one, "fill", "varlen", "merge"]
    logits = launches_of([1, 300], [5, 900], 4096, monkeypatch, sink_logits=True)
    assert len(logits) <= len(one) + 3 and logits[-1] == "merge", logits


def test_what_a_step_reaches_reads_no_value():
    """The functions that a GPU's steps run have none of the calls that bring a value to the host."""
    seen = 0
    for name in ("paged_steps.py", "paged_kernels.py", "integrations/vllm/gpu.py"):
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Call):
                is_name = isinstance(node.func, ast.Name)
                called = node.func.id if is_name else getattr(node.func, "attr", "")
                assert called not in LOOKS | ({"int", "float"} if is_name else set()), f"{name}:{node.lineno}: {called}"
                seen += 1
    assert seen > 60
