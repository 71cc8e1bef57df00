"""Fixed-shape steps over an engine's pages: the bytes of ``paged.append``, and no look at a value by the host."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lowbit_attn.paged import PagedStore, Step, append
from lowbit_attn.paged_static import append_static, ended_blocks
from lowbit_attn.testing import assert_same_bytes
from unit.stores import DIM, HEADS, NULL_PAGES, PAGES, Q_LEN, ROWS, STORES, store_of


def random_step(sinks: int, draw: torch.Generator) -> tuple[Step, torch.Tensor, torch.Tensor]:
    """Rows that end a block, or do not, a padded one, one of an unknown page and one of no ring; tokens behind them."""
    def number(low, high, *shape):
        return torch.randint(low, high, shape, generator=draw, dtype=torch.int32)

    q_lens = number(1, Q_LEN + 1, ROWS)
    q_lens[number(0, ROWS, 1)] = 0
    ends = sinks + 128 * number(0, 3, ROWS) + number(-2, Q_LEN + 2, ROWS)
    lens = torch.where(number(0, 2, ROWS).bool(), torch.maximum(ends, q_lens), number(Q_LEN, 380, ROWS))
    table = (torch.randperm(PAGES - NULL_PAGES, generator=draw)[: ROWS * 4].view(ROWS, 4) + NULL_PAGES).int()
    table[number(0, ROWS, 1)] = number(0, NULL_PAGES, 1)
    rings = torch.randperm(ROWS, generator=draw).int() + 1
    rings[number(0, ROWS, 1)] = 0
    starts = torch.cat((torch.zeros(1), q_lens.cumsum(0))).int()
    k, v = (torch.randn(int(starts[-1]) + 3, HEADS, DIM, generator=draw) for _ in range(2))
    table[rings == 0] = 0  # an engine that has no ring for a row has no pages for it
    return Step(table, lens, starts, rings), k, v


def longer(x: torch.Tensor) -> torch.Tensor:
    """Tokens with more padding behind them: as many for every step."""
    return torch.cat((x, x.new_zeros(40 - len(x), HEADS, DIM)))


@pytest.mark.parametrize("name,sinks", STORES)
def test_the_bytes_are_those_of_append(name, sinks, seed):
    mine, theirs, packed = store_of(name, sinks), store_of(name, sinks), 0
    draw = torch.Generator().manual_seed(seed)
    for _ in range(60 if "cq" not in name else 15):
        step, k, v = random_step(sinks, draw)
        before = mine.pool.clone()
        append_static(mine, step, k, v, Q_LEN)
        assert append(theirs, step, k, v) is None
        assert_same_bytes("pool", mine.pool, theirs.pool)
        assert_same_bytes("rings", mine.rings, theirs.rings)
        packed += int((mine.pool != before).any(2).any(1).sum())
        assert torch.equal(mine.pool[:NULL_PAGES], before[:NULL_PAGES])
    assert packed > 2


@pytest.mark.parametrize("name,sinks", STORES)
def test_no_value_is_looked_at(name, sinks):
    """Tensors without values go through it, and one trace serves every step of its shapes."""
    step, k, v = (x := random_step(sinks, torch.Generator().manual_seed(1)))[0], *map(longer, x[1:])
    store = store_of(name, sinks)
    append_static(store, step, k, v, Q_LEN)  # what is kept for later calls is made of values
    graph = make_fx(lambda pool, rings, *rest: append_static(
        PagedStore(store.format, pool, rings, sinks, store.attached, NULL_PAGES), Step(*rest[:4]), *rest[4:], Q_LEN),
        tracing_mode="fake", _allow_non_fake_inputs=True)(store.pool, store.rings, *step, k, v)
    names = [str(node.target) for node in graph.graph.nodes]
    assert not [name for name in names if "_local_scalar_dense" in name or "nonzero" in name]
    mine, theirs = store_of(name, sinks), store_of(name, sinks)
    for seed in range(2, 8):
        step, k, v = random_step(sinks, torch.Generator().manual_seed(seed))
        graph(mine.pool, mine.rings, *step, longer(k), longer(v))
        append(theirs, step, k, v)
        assert_same_bytes("pool", mine.pool, theirs.pool)
        assert_same_bytes("rings", mine.rings, theirs.rings)


def test_a_look_at_a_value_would_be_seen():
    """The steps that the host reads cannot go without values."""
    step, k, v = random_step(0, torch.Generator().manual_seed(1))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(Exception, match="_local_scalar_dense"):
        fakes = [mode.from_tensor(x) for x in (*step, k, v)]
        append(store_of("k4v4", 0), Step(*fakes[:4]), *fakes[4:])


def test_chunks_are_refused():
    store = store_of("k4v4", 0)
    step, k, v = random_step(0, torch.Generator().manual_seed(1))
    for q_len in (0, store.max_q_len + 1):
        with pytest.raises(ValueError, match=f"q_len: got {q_len}, supported: 1 to {store.max_q_len} tokens a row"):
            append_static(store, step, k, v, q_len)


WRONG = {  # what one row's step of one token that ends its block 1 may say, and what append says of it
    "table": (dict(table=[[3]]), "table: got 1 blocks a row"), "page": (dict(table=[[3, PAGES]]), "table: got"),
    "far page": (dict(table=[[3, 10**9]]), "table: got"), "ring": (dict(ring_rows=[ROWS + 1]), "ring_rows: got"),
    "no ring": (dict(ring_rows=[-1]), "ring_rows: got"), "short": (dict(seq_lens=[0]), "seq_lens: got"),
    "tokens": (dict(table=[[3, 4], [5, 6]], seq_lens=[256, 1], query_start_loc=[0, 1, 2], ring_rows=[1, 2]),
               "query_start_loc: got"),
    "descending": (dict(table=[[3, 4], [5, 6]], seq_lens=[256, 1], query_start_loc=[1, 0, 1], ring_rows=[1, 2]),
                   "query_start_loc: got")}


@pytest.mark.parametrize("name", WRONG)
def test_steps_that_name_what_is_not_there_are_refused(name):
    """Before anything is written, by both."""
    change, words = WRONG[name]
    good = dict(table=[[3, 4]], seq_lens=[255], query_start_loc=[0, 255], ring_rows=[1])
    k, store = torch.randn(256, HEADS, DIM), store_of("k4v4", 0)

    def step(**given):
        return Step(**{key: torch.tensor(value, dtype=torch.int32) for key, value in given.items()})

    append(store, step(**good), k[:255], k[:255])
    pool, rings = store.pool.clone(), store.rings.clone()
    wrong = step(**good | dict(seq_lens=[256], query_start_loc=[0, 1]) | change)
    for call, error in ((lambda: append(store, wrong, k[255:], k[255:]), ValueError),
                        (lambda: append_static(store, wrong, k[255:], k[255:], 1), RuntimeError)):
        with pytest.raises(error, match=words):
            call()
        assert_same_bytes("pool", store.pool, pool)
        assert_same_bytes("rings", store.rings, rings)
    append_static(store, step(**good | dict(seq_lens=[256], query_start_loc=[0, 1])), k[255:], k[255:], 1)
    assert not torch.equal(store.pool[4], pool[4]) and torch.equal(store.pool[3], pool[3])


def test_blocks_behind_the_table_have_no_page():
    """What kernels of a step are told, too, whose tables hold only so many."""
    step = Step(*(torch.tensor(x, dtype=torch.int32) for x in ([[3], [4]], [256, 128], [0, 1, 2], [1, 2])))
    assert ended_blocks(store_of("k4v4", 0), step, step.seq_lens - 1)[2].tolist() == [False, True]
