"""An engine's steps by the compiled append on the CPU, launched twice a layer: pages and rings bit for bit those of
``paged.append``, over steps that follow each other."""

import pytest
import torch

from lowbit_attn import kernels
from lowbit_attn.cache.attached import Attached
from lowbit_attn.cache.backend import BACKENDS
from lowbit_attn.cache.view import OPTIONAL_FIELDS, STEP_FIELDS
from lowbit_attn.formats import FORMATS
from lowbit_attn.paged import PAGE, PagedStore, Step, append, ring_slots
from lowbit_attn.paged_steps import LayerSteps, StepBuffers
from lowbit_attn.testing import assert_same_bytes, normal_codebooks
from sim.ptx.steps import RINGS, run_step

HEADS, DIM, ROWS, PAGES = 1, 64, 3, 8


def store_of(name: str, sinks: int, q_len: int) -> PagedStore:
    fmt, draw = FORMATS[name], torch.Generator().manual_seed(5)
    pool = torch.randint(0, 256, (PAGES, HEADS, fmt.record(DIM).nbytes), dtype=torch.uint8, generator=draw)
    rings = torch.randn(ROWS + 1, 2, HEADS, sinks + ring_slots(fmt, q_len), DIM, generator=draw).half()
    books = normal_codebooks(name, 1, HEADS, DIM).layer(0) if fmt.needs_codebooks else None
    return PagedStore(fmt, pool, rings, sinks, books and Attached(books, fmt, HEADS, DIM, "cpu"))


def launch(cache, rows: torch.Tensor, ring_rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A device's append of a view: what the launch leaves is copied to where the view's tensors lie."""
    state = {name: getattr(cache, name) for name in STEP_FIELDS}
    state |= {field.name: getattr(cache, field.name) for field in OPTIONAL_FIELDS["append"]
              if getattr(cache, field.name, None) is not None}
    numbers = {"num_sinks": cache.sinks, "window_k": cache.window_k, "window_v": cache.window_v,
               "page_stride": cache.strides.page, "head_stride": cache.strides.head}
    key = kernels.append_key("sm_90", "float16", DIM, cache.format, None)
    dense = {name: x.contiguous() for name, x in state.items()}
    found = run_step(key, dense, {"x_k": k, "x_v": v, "rows": rows, "ring_rows": ring_rows}, numbers)
    for name in STEP_FIELDS:
        if not (name in RINGS[:2] and not cache.sinks):  # without sinks a view of the ring stands for them
            state[name].copy_(found[name])


# (tokens behind the sinks before the step, of each row): none, one or two rows end a block; the last row is padding
@pytest.mark.parametrize("name,sinks,q_len,contexts", [
    ("k4v4", 0, 1, ((127, 255), (128, 256))), ("k4v4", 0, 3, ((126, 254), (60, 383))),
    ("k2v2", 32, 1, ((255, 20),)), ("kitty", 32, 2, ((254, 127), (256, 129))), ("cq2", 0, 1, ((127, 200),))])
def test_bytes_of_steps(name, sinks, q_len, contexts, monkeypatch):
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cpu"]._replace(append=launch))
    mine, theirs = store_of(name, sinks, q_len), store_of(name, sinks, q_len)
    buffers = StepBuffers(mine.format, sinks, 2, ROWS, torch.device("cpu"))
    layer, draw, packed = LayerSteps(mine, buffers, 1), torch.Generator().manual_seed(1), 0
    for context in contexts:
        lens = torch.tensor([*(sinks + n + q_len for n in context), 0], dtype=torch.int32)
        table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 4], [0] * 4], dtype=torch.int32)
        starts = torch.tensor([0, q_len, 2 * q_len, 2 * q_len], dtype=torch.int32)
        step = Step(table, lens, starts, torch.tensor([3, 1, 0], dtype=torch.int32))
        k, v = (torch.randn(ROWS * q_len, HEADS, DIM, generator=draw).half() for _ in range(2))
        before = mine.pool.clone()
        buffers.fill(step)
        layer.append(step, k, v, q_len)
        assert append(theirs, step, k, v) is None
        assert_same_bytes("pool", mine.pool, theirs.pool)
        assert_same_bytes("rings", mine.rings, theirs.rings)
        ended = sum((n + q_len) // PAGE > n // PAGE for n in context)
        assert int((mine.pool != before).any(2).any(1).sum()) == ended
        packed += ended
    assert packed
