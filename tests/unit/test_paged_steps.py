"""Steps with as many tokens in every row: the bytes and the attention of any other step, no look at a value by the
host, and the same addresses for steps that follow."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit_attn.paged import PAGE, PagedStore, Step, append, counters
from lowbit_attn.paged_attention import attention
from lowbit_attn.paged_steps import MOVED, NEVER, LayerSteps, StepBuffers
from lowbit_attn.reference import Attention
from lowbit_attn.testing import assert_same_bytes
from unit.stores import DIM, HEADS, NULL_PAGES, PAGES, Q_LEN, ROWS, STORES, store_of

RATIO, LAYERS = 2, 3


def even_step(sinks: int, q_len: int, draw: torch.Generator, padding: int = 1) -> Step:
    """Rows of q_len new tokens, some of which end a block, then padding."""
    live = ROWS - padding
    ends = sinks + PAGE * torch.randint(0, 3, (live,), generator=draw) + torch.randint(-2, Q_LEN + 2, (live,),
                                                                                      generator=draw)
    lens = torch.cat((ends.clamp(min=q_len), torch.zeros(padding, dtype=torch.long))).int()
    table = (torch.randperm(PAGES - NULL_PAGES, generator=draw)[: ROWS * 4].view(ROWS, 4) + NULL_PAGES).int()
    rings = torch.randperm(ROWS, generator=draw).int() + 1
    table[live:], rings[live:] = 0, 0
    starts = torch.cat((torch.arange(live + 1), torch.full((padding,), live))).int() * q_len
    return Step(table, lens, starts, rings)


def new_tokens(count: int, draw: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(count, heads, DIM, generator=draw).half() for heads in (HEADS * RATIO, HEADS, HEADS)]


def buffers_of(store: PagedStore, layers: int = LAYERS) -> StepBuffers:
    return StepBuffers(store.format, store.sinks, layers, ROWS + 2, store.pool.device, store.null_pages)


@pytest.mark.parametrize("name,sinks", STORES)
def test_the_same_as_other_steps(name, sinks, seed):
    mine, theirs = store_of(name, sinks), store_of(name, sinks)
    buffers, draw, packed = buffers_of(mine), torch.Generator().manual_seed(seed), 0
    layer = LayerSteps(mine, buffers, 1)
    mine.pool.zero_(), theirs.pool.zero_()  # what attention reads must be records
    for number in range(30 if "cq" not in name else 8):
        q_len = 1 + number % Q_LEN
        step = even_step(sinks, q_len, draw)
        q, k, v = new_tokens(ROWS * q_len, draw)
        before = mine.pool.clone()
        buffers.fill(step)
        layer.append(step, k, v, q_len)
        assert append(theirs, step, k, v) is None
        assert_same_bytes("pool", mine.pool, theirs.pool)
        assert_same_bytes("rings", mine.rings, theirs.rings)
        options = Attention(0.2, sink_logits=torch.randn(HEADS * RATIO) if number % 2 else None)
        out, expected = torch.zeros_like(q), torch.zeros_like(q)
        layer.attention(step, q, out, options, q_len)
        attention(theirs, step, q, k, v, None, expected, options)
        assert torch.equal(out, expected)
        packed += int((mine.pool != before).any(2).any(1).sum())
    assert packed > 2


@pytest.mark.parametrize("name,sinks", [("k4v4", 0), ("kitty", 32)])
def test_what_the_launches_of_a_kernel_read(name, sinks, seed):
    """Rows that store have room for just their tokens; of the second launch those alone that end a block, for which
    exactly one is full; no row has room for more."""
    store, draw = store_of(name, sinks), torch.Generator().manual_seed(seed)
    buffers, ended = buffers_of(store), 0
    for number in range(40):
        q_len = 1 + number % Q_LEN
        step = even_step(sinks, q_len, draw)
        step.table[0] = NULL_PAGES - 1
        buffers.fill(step)
        counts = counters(store, step)
        assert all(torch.equal(buffers.counts(ROWS)[name], counts[name]) for name in counts)
        for layer in range(LAYERS):
            stored, packed = (buffers.state(layer, launch, ROWS) for launch in range(2))
            for row in range(ROWS):
                before = int(step.seq_lens[row]) - int(step.q_lens[row])
                has = int(step.q_lens[row]) and row
                assert int(stored["limit"][row]) - int(stored["n_tok"][row]) == (q_len if has else -before)
                assert int(stored["n_tok"][row]) == int(packed["n_tok"][row]) == before
                assert int(stored["n_qk"][row]) == int(stored["ring_start"][row]) == NEVER
                behind = int(step.seq_lens[row]) - sinks
                ends = has and max(0, behind) // PAGE > max(0, before - sinks) // PAGE
                assert int(packed["limit"][row]) == (int(step.seq_lens[row]) if ends else 0)
                if ends:
                    ended += 1
                    full = int(packed["n_tok"][row] - packed["n_sink"][row] - packed["n_qk"][row])
                    assert PAGE <= full < PAGE + Q_LEN and int(packed["n_qk"][row]) == behind // PAGE * PAGE - PAGE
                    assert packed["n_qv"][row] == packed["ring_start"][row] == packed["n_qk"][row]
    assert ended > 10


def test_no_value_is_looked_at():
    """Steps are entered without values, and a look at one would be seen."""
    store, draw = store_of("kitty", 32), torch.Generator().manual_seed(1)
    step, (_, k, v) = even_step(32, 2, draw), new_tokens(2 * ROWS, draw)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        buffers = StepBuffers(store.format, 32, LAYERS, ROWS + 2, torch.device("cpu"), NULL_PAGES)
        buffers.fill(Step(*(mode.from_tensor(x) for x in step)))
        with pytest.raises(Exception, match="_local_scalar_dense"):
            append(store, Step(*(mode.from_tensor(x) for x in step)), mode.from_tensor(k), mode.from_tensor(v))


def test_steps_that_follow_use_the_same_memory():
    """Views are made once for a number of rows, and again where the engine's table moved."""
    store, draw = store_of("k4v4", 0), torch.Generator().manual_seed(1)
    buffers = buffers_of(store)
    layer, step = LayerSteps(store, buffers, 0), even_step(0, 1, draw)
    places = [buffers.read.data_ptr(), buffers.moved.data_ptr()]
    first = layer._views(step)
    buffers.fill(step)
    later = even_step(0, 1, draw)
    for mine, other in zip(step, later):
        mine.copy_(other)
    buffers.fill(step)
    assert layer._views(Step(*(x[:] for x in step))) is first, "other tensors of the same memory"
    assert torch.equal(first.read.n_tok, step.seq_lens)
    assert first.read.n_tok.data_ptr() == buffers.read[3].data_ptr()
    assert places == [buffers.read.data_ptr(), buffers.moved.data_ptr()]
    assert layer._views(later) is not first
    assert all(x.data_ptr() % 128 == buffers.moved.data_ptr() % 128 for x in buffers.state(2, 1, 3).values()
               if x.data_ptr() != buffers.faults.data_ptr() and x.data_ptr() != buffers.arrivals.data_ptr())
    short = Step(step.table[:2], step.seq_lens[:2], step.query_start_loc[:3], step.ring_rows[:2])
    assert layer._views(short).read.n_tok.shape == (2,) and layer._views(short) is layer._views(short)
    assert [getattr(first.stored, name).data_ptr() for name in MOVED] != \
        [getattr(LayerSteps(store, buffers, 1)._views(step).stored, name).data_ptr() for name in MOVED]
    with pytest.raises(ValueError, match="step: got a table of strides"):
        layer._views(step._replace(table=step.table[:, ::2]))


def test_records_are_found_by_strides():
    """A layer's pages among those of others: units count from its first record, whatever lies between."""
    store, step = store_of("k4v4", 0), even_step(0, 1, torch.Generator().manual_seed(1))
    blocks = torch.zeros(PAGES, 3, *store.pool.shape[1:], dtype=torch.uint8)
    store = PagedStore(store.format, blocks[:, 1], store.rings, 0)
    view = store.view(step, counters(store, step))
    for page, head in ((0, 0), (0, 1), (7, 1), (PAGES - 1, HEADS - 1)):
        record = view.units[page * view.strides.page + head * view.strides.head]
        assert record.data_ptr() == store.pool[page, head].data_ptr()
    last = view.units[-1]
    assert last.data_ptr() + last.numel() == store.pool[-1, -1].data_ptr() + store.pool.shape[2]


def test_chunks_are_refused():
    store = store_of("k4v4", 0)
    layer, step = LayerSteps(store, buffers_of(store), 0), even_step(0, 1, torch.Generator().manual_seed(1), 0)
    _, k, v = new_tokens(ROWS, torch.Generator())
    with pytest.raises(ValueError, match="q_len: got 900"):
        layer.append(step, k, v, 900)
