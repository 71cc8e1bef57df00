"""Steps over an engine's pages and rings, at random, against KVCache and the reference's attention."""

import random
from dataclasses import replace

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, reference
from lowbit_attn.cache.attached import Attached
from lowbit_attn.paged import NULL, PagedStore, Step, append, counters, ring_slots, why_not
from lowbit_attn.paged_attention import attention
from lowbit_attn.reference import Attention
from lowbit_attn.testing import assert_same_bytes, normal_codebooks

HEADS, RATIO, DIM, PAGES, ROWS, DRAFTS = 2, 2, 64, 40, 4, 3


class Sequence:
    """A sequence of the engine: its pages and ring there, its tokens k, v [tokens, HEADS, DIM] so far."""

    def __init__(self, pages: list[int], ring: int, row: int):
        self.pages, self.ring, self.row = pages, ring, row
        self.k = self.v = torch.empty(0, HEADS, DIM)


class Engine:
    """An engine's part: it deals out pages and rings, used ones too, and says what a step is.

    A KVCache gets the tokens that stay. Pages and rings begin with bytes that no reader may use.
    """

    def __init__(self, fmt, sinks=0, dtype=torch.float16, seed=0):
        self.random = random.Random(seed)
        self.cache = KVCache(fmt, 4 * PAGES, HEADS, DIM, dtype, sinks=sinks, max_batch=ROWS)
        record = fmt.record(DIM).nbytes
        pool = torch.randint(0, 256, (PAGES, 3, HEADS, record), dtype=torch.uint8)[:, 1]  # of a block of three layers
        rings = torch.full((ROWS + 2, 2, HEADS, sinks + ring_slots(fmt, 1 + DRAFTS), DIM), torch.nan, dtype=dtype)
        self.store = PagedStore(fmt, pool, rings, sinks)
        self.pages, self.rings = list(range(1, PAGES)), list(range(1, ROWS + 2))
        self.rows, self.live = list(range(ROWS)), []

    def start(self, shared: list[int] = ()) -> Sequence:
        ring = self.rings.pop(self.random.randrange(len(self.rings)))
        self.live.append(Sequence(list(shared), ring, self.rows.pop()))
        return self.live[-1]

    def stop(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        held = {page for other in self.live for page in other.pages}
        self.pages += [page for page in sequence.pages if page not in held]
        self.random.shuffle(self.pages)
        self.rings.append(sequence.ring)
        self.rows.append(sequence.row)
        self.cache.clear([sequence.row])

    def plan(self, counts: dict[Sequence, int], padding: int = 0) -> Step:
        """A step that brings so many new tokens to sequences, with rows of padding behind them."""
        for sequence, count in counts.items():
            missing = -(-(len(sequence.k) + count) // 128) - len(sequence.pages)
            sequence.pages += [self.pages.pop() for _ in range(missing)]
        table = torch.zeros(len(counts) + padding, max(len(s.pages) for s in counts) + 1, dtype=torch.int32)
        for row, sequence in enumerate(counts):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        lens = [len(s.k) + count for s, count in counts.items()] + [0] * padding
        starts = torch.tensor([0, *counts.values(), *[0] * padding]).cumsum(0)
        rings = [s.ring for s in counts] + [NULL] * padding
        return Step(table, *(torch.as_tensor(x, dtype=torch.int32) for x in (lens, starts, rings)))

    def fits(self, count: int) -> bool:
        return -(-count // 128) + 1 < len(self.pages)

    def step(self, counts: dict[Sequence, int], kept: dict[Sequence, int] = {}, options=Attention(), padding=0,
             values=None):
        """Runs a step, checks its attention and what the store holds; kept: the tokens that stay, of all by default."""
        step, total = self.plan(counts, padding), sum(counts.values())
        dtype = self.store.dtype
        k, v = values if values else (torch.randn(total + padding, HEADS, DIM).to(dtype).float() for _ in range(2))
        q = torch.randn(len(k), HEADS * RATIO, DIM)
        found = {s: self.gathered(s) for s in counts}
        before = append(self.store, step, k, v)
        out = torch.full_like(q, 7.0)
        lse = attention(self.store, step, q, k, v, before, out, options)
        at = 0
        for sequence, count in counts.items():
            new = slice(at, at + count)
            whole = (torch.cat((old, x[new].transpose(0, 1)), 1) for old, x in zip(found[sequence], (k, v)))
            o, expected = reference.attention(q[new], *whole, options)
            assert torch.allclose(out[new], o, atol=2e-5) and torch.allclose(lse[new], expected.T, atol=2e-5)
            stays = slice(at, at + kept.get(sequence, count))
            sequence.k, sequence.v = torch.cat((sequence.k, k[stays])), torch.cat((sequence.v, v[stays]))
            self.cache.prefill(sequence.row, k[stays].to(dtype), v[stays].to(dtype))
            at += count
        assert (out[at:] == 7.0).all() and (lse[at:] == -torch.inf).all()
        for sequence in self.live:
            self.check(sequence)

    def gathered(self, sequence: Sequence):
        """What the next step of a sequence reads of its tokens so far: K, V [HEADS, tokens, DIM]."""
        table = torch.tensor([[*sequence.pages, NULL]], dtype=torch.int32)
        step = Step(table, *(torch.tensor(x, dtype=torch.int32)
                             for x in ([len(sequence.k) + 1], [0, 1], [sequence.ring])))
        return self.store.view(step, counters(self.store, step, is_after=False)).held(0, sequence.ring)

    def check(self, sequence: Sequence) -> None:
        """The store holds what the cache does, to the bit, where the cache has packed every block that is full."""
        row, cache, record = sequence.row, self.cache, self.cache.record
        for mine, theirs in zip(self.gathered(sequence), cache.gather(row)):
            assert_same_bytes("tokens", mine, theirs)
        for count, planes in ((cache.n_qk, record.k_planes), (cache.n_qv, record.v_planes)):
            pages = int(count[row]) // 128
            for plane in planes:
                part = slice(plane.offset, plane.offset + plane.nbytes)
                assert_same_bytes(plane.name, self.store.pool[sequence.pages[:pages], :, part],
                                  cache.pool[cache.table[row, :pages], :, part])


def windowed(name: str, window_v: int):
    return replace(FORMATS[name], window_v=window_v)


STORES = [("k8v8", 0, 0), ("k4v4", 0, 0), ("k2v2", 0, 32), ("k4tv4-g32", 0, 5), ("kitty", 128, 32), ("k4v2-bf16", 0, 0),
          ("k4v4", 128, 0)]


@pytest.mark.parametrize("name,window,sinks", STORES)
def test_random_steps_hold_what_a_cache_holds(name, window, sinks, seed):
    """Ragged steps of prompts' chunks, single tokens and rejected drafts; sequences end and others take their place."""
    engine = Engine(windowed(name, window), sinks, torch.bfloat16 if "bf16" in name else torch.float16, seed)
    draw, packed = engine.random, 0
    for _ in range(40):
        while engine.rows and draw.random() < 0.4:
            engine.start()
        if len(engine.live) > 1 and draw.random() < 0.1:
            engine.stop(draw.choice(engine.live))
        counts, kept = {}, {}
        for sequence in draw.sample(engine.live, len(engine.live)):
            drafts, piece = 1 + draw.randrange(DRAFTS), draw.randrange(5, 60)
            count = draw.choice((1, 1, 1 + DRAFTS, drafts, piece, 127, 128, 200, 300))
            if draw.random() < 0.8 and engine.fits(count + 300 * len(counts)) and len(sequence.k) < 900:
                counts[sequence] = count
                if count <= 1 + DRAFTS:
                    kept[sequence] = draw.randint(1, count)
        if counts:
            engine.step(counts, kept, padding=draw.randrange(3))
            packed += sum(len(s.k) // 128 for s in counts)
    assert packed > 20


@pytest.mark.parametrize("name,window,sinks", STORES)
def test_every_draft_around_the_end_of_a_block(name, window, sinks):
    """Drafts that fill a block, are rejected at every place, and fill it again with other tokens."""
    engine = Engine(windowed(name, window), sinks)
    for start in range(sinks + 128 - 2 * DRAFTS, sinks + 129):
        for kept in range(1, 2 + DRAFTS):
            sequence = engine.start()
            engine.step({sequence: start})
            engine.step({sequence: 1 + DRAFTS}, {sequence: kept})
            engine.step({sequence: 1 + DRAFTS})
            engine.stop(sequence)


@pytest.mark.parametrize("name", ["k8v8", "k4v4", "k2v2"])
def test_another_sequence_reads_a_block_in_the_step_that_fills_it(name):
    engine = Engine(FORMATS[name])
    first, other = engine.start(), None
    engine.step({first: 130})
    engine.step({first: 125})
    step = engine.plan({first: 2})
    second = engine.start(shared=first.pages[:2])
    k, v = (torch.randn(2 + 40, HEADS, DIM).half().float() for _ in range(2))
    second.k, second.v = torch.cat((first.k, k[:1])), torch.cat((first.v, v[:1]))
    step, other = engine.plan({first: 2, second: 40}), second
    q = torch.randn(42, HEADS * RATIO, DIM)
    out = torch.empty_like(q)
    attention(engine.store, step, q, k, v, append(engine.store, step, k, v), out)
    engine.cache.prefill(other.row, second.k.half(), second.v.half())
    whole = [torch.cat((old, x[2:].transpose(0, 1)), 1) for old, x in zip(engine.cache.gather(other.row), (k, v))]
    assert torch.allclose(out[2:], reference.attention(q[2:], *whole)[0], atol=2e-5)


def test_chunks_of_any_size_leave_the_same_bytes():
    """However a prompt is cut, its pages and its ring end up the same."""
    k, v = (torch.randn(700, HEADS, DIM).half().float() for _ in range(2))
    found = []
    for size in (700, 128, 97, 333, 1):
        engine = Engine(FORMATS["k4v4"])
        sequence = engine.start()
        for at in range(0, 700, size):
            some = slice(at, at + size)
            engine.step({sequence: len(k[some])}, values=(k[some], v[some]))
        found.append((engine.store.pool[sequence.pages[:5]], *engine.gathered(sequence)))
    for others in found[1:]:
        for mine, theirs in zip(found[0], others):
            assert_same_bytes("prompt", mine, theirs)


@pytest.mark.parametrize("sinks", [0, 32])
def test_nothing_is_written_for_padding_page_0_and_ring_0(sinks):
    """As engines warm up: lengths that mean something, pages and rings that are none."""
    engine = Engine(FORMATS["k4v4"], sinks)
    pool, rings = engine.store.pool.clone(), engine.store.rings.clone()
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([300, 129, 0, 512], [0, 200, 201, 201, 201], [0, 0, 3, 2])]
    step = Step(torch.zeros(4, 4, dtype=torch.int32), *ints)
    step.table[2:] = 5
    k, v = (torch.randn(210, HEADS, DIM) for _ in range(2))
    append(engine.store, step, k, v)
    assert_same_bytes("pool", engine.store.pool, pool)
    assert_same_bytes("rings", engine.store.rings, rings)
    assert counters(engine.store, step)["n_tok"].tolist() == [300, 129, 0, 0]


def test_options_of_attention():
    for options in (Attention(0.3, 5.0), Attention(sink_logits=torch.randn(HEADS * RATIO))):
        engine = Engine(FORMATS["k8v8"])
        a, b = engine.start(), engine.start()
        engine.step({a: 150, b: 2}, options=options)
        engine.step({b: 140, a: 1}, options=options)
    with pytest.raises(NotImplementedError, match="window: got 5, supported: None"):
        engine.step({a: 1}, options=Attention(window=5))


@pytest.mark.parametrize("name", ["cq2", "k4vcq2", "kcq4v4"])
def test_codebooks_of_the_layer(name):
    """Stored keys are those of the codebooks; attention is that over a KVCache with the same ones."""
    fmt = FORMATS[name]
    books = normal_codebooks(name, 1, HEADS, DIM).layer(0)
    engine = Engine.__new__(Engine)
    Engine.__init__(engine, FORMATS["k4v4"])
    engine.cache = KVCache(fmt, PAGES, HEADS, DIM, sinks=0, max_batch=ROWS, codebooks=books)
    pool = torch.zeros(PAGES, HEADS, fmt.record(DIM).nbytes, dtype=torch.uint8)
    engine.store = PagedStore(fmt, pool, engine.store.rings, 0, Attached(books, fmt, HEADS, DIM, "cpu"))
    sequence = engine.start()
    for count in (200, 1, 130, 1):
        step = engine.plan({sequence: count})
        k, v = (torch.randn(count, HEADS, DIM).half().float() for _ in range(2))
        q = torch.randn(count, HEADS * RATIO, DIM)
        old = engine.gathered(sequence)
        out = torch.empty_like(q)
        before = append(engine.store, step, k, v)
        attention(engine.store, step, q, k, v, before, out)
        stored = engine.store.attached.keys(k, torch.float16).half().transpose(0, 1)
        whole = [torch.cat((x, new), 1) for x, new in zip(old, (stored, v.transpose(0, 1)))]
        expected, _ = reference.attention(engine.store.attached.queries(q), *whole)
        assert torch.allclose(out, expected, atol=5e-3)
        sequence.k, sequence.v = torch.cat((sequence.k, k)), torch.cat((sequence.v, v))
        engine.cache.prefill(sequence.row, k, v)
        engine.check(sequence)


def test_what_pages_cannot_hold_is_refused():
    assert not why_not(FORMATS["k4v4"], 128) and not why_not(FORMATS["kitty"], 64)
    for name, reason in (("k4v2-boost", "orders tokens"), ("kitty-weighted", "query weights"),
                         ("k4v4", "head_dim")):
        assert reason in "; ".join(why_not(FORMATS[name], 12 if name == "k4v4" else 128))
    pool, rings = torch.zeros(3, 1, 17408, dtype=torch.uint8), torch.zeros(3, 2, 1, 128, 128).half()
    assert PagedStore(FORMATS["k4v4"], pool, rings).max_q_len == 1
    with pytest.raises(ValueError, match="rings: got 127 slots behind 1 sinks, supported for k4v4: at least 128"):
        PagedStore(FORMATS["k4v4"], pool, rings, sinks=1)
    with pytest.raises(ValueError, match="pool"):
        PagedStore(FORMATS["k2v2"], pool, rings)
    with pytest.raises(NotImplementedError, match="orders tokens"):
        PagedStore(FORMATS["k4v2-boost"], pool, rings)
    with pytest.raises(ValueError, match="attached: got None for format cq2"):
        PagedStore(FORMATS["cq2"], pool, rings)
    turned = Attached(normal_codebooks("cq2", 1, 1, 128, "pre").layer(0), FORMATS["cq2"], 1, 128, "cpu")
    with pytest.raises(NotImplementedError, match="attached: codebooks of rope 'pre', supported: 'post'"):
        PagedStore(FORMATS["cq2"], pool, rings, attached=turned)


def test_rings_have_room_for_drafts_and_windows():
    assert [ring_slots(FORMATS["k4v4"], n) for n in (1, 2, 65, 66)] == [128, 192, 192, 256]
    assert ring_slots(FORMATS["kitty"], 1) == 256
