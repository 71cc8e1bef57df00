"""The cache's life on a CUDA device against the CPU's, byte by byte: steps, graphs, rewinds, shared pages, faults."""

import numpy as np
import pytest
import torch

import lowbit_attn
from gpu import matrix
from gpu.checks import query_weights
from lowbit_attn import CacheFaultError, KVCache
from lowbit_attn.testing import assert_same_bytes, assert_same_state, relative_error

pytestmark = pytest.mark.gpu
HEADS = 2
LENGTHS = (0, 3, 100, 127, 240)  # of the rows before the steps: an empty one, within the sinks, around a page


def tokens(batch, count, head_dim, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, count, HEADS, head_dim, generator=generator).to(dtype) for _ in range(2))


def pair(name, head_dim, dtype=torch.float16, lengths=LENGTHS, pages=40, **options) -> list[KVCache]:
    """The same cache on the CPU and on the GPU, rows filled to these lengths."""
    caches = [KVCache(name, pages, HEADS, head_dim, dtype, device, max_batch=len(lengths),
                      query_weights=query_weights(name, HEADS, head_dim, device), **options)
              for device in ("cpu", "cuda")]
    k, v = tokens(len(lengths), max(lengths), head_dim, dtype, seed=1)
    for cache in caches:
        for row, length in enumerate(lengths):
            cache.prefill(row, k[row, :length].to(cache.device), v[row, :length].to(cache.device))
    return caches


def assert_alike(got: KVCache, want: KVCache) -> None:
    """Bytes and counters, and the host's copy of the counters as the device has them."""
    assert_same_state(got, want)
    for mine, counter in zip(got.counts, got.counters()):
        assert mine.tolist() == counter.tolist()
    assert not got.faults.any() and not got.arrivals.any()
    for row, held in enumerate(got.book.held):
        assert got.table[row, : len(held)].tolist() == held
    assert_same_bytes("limit", got.limit, want.limit)


@pytest.mark.parametrize("q_len, sinks", [(1, 0), (1, 5), (3, 32), (16, 5)])
@pytest.mark.parametrize("name, dtype, head_dim", matrix.APPENDED)
def test_steps_equal_the_cpus(name, dtype, head_dim, q_len, sinks):
    """Bytes after every step around a block boundary, and over 330 tokens in all: two boundaries of most rows."""
    dtype = getattr(torch, dtype)
    want, got = pair(name, head_dim, dtype, sinks=sinks, max_q_len=q_len)
    k, v = tokens(len(LENGTHS), 330, head_dim, dtype)
    for step, at in enumerate(range(0, 330 - q_len, q_len)):
        new = [x[:, at : at + q_len] for x in (k, v)]
        want.append(*new)
        got.append(*(x.cuda() for x in new))
        if step % 37 == 0 or q_len == 16:
            assert_alike(got, want)
    assert_alike(got, want)
    assert int(want.n_qk.min()) >= 128
    want.flush()
    got.flush()
    assert_alike(got, want)


@pytest.mark.parametrize("q_len", range(1, 17))
def test_every_number_of_tokens(q_len):
    want, got = pair("k4v4", 128, sinks=5, max_q_len=16)
    k, v = tokens(len(LENGTHS), 12 * q_len, 128, seed=q_len)
    for at in range(0, 12 * q_len, q_len):
        new = [x[:, at : at + q_len] for x in (k, v)]
        want.append(*new)
        got.append(*(x.cuda() for x in new))
        assert_alike(got, want)


def test_chosen_rows_strided_and_wider_inputs():
    want, got = pair("k4v4", 128, sinks=5, max_q_len=4, saturate=True)
    k, v = tokens(3, 160, 128)
    k[1, 7, 0, 3] = torch.inf
    for at in range(0, 160, 4):
        new = [x[:, at : at + 4] for x in (k, v)]
        want.append(*new, [4, 0, 2])
        fused = torch.stack([x.cuda() for x in new], 2)  # a fused projection: K and V side by side
        rows = (fused[:, :, 0], fused[:, :, 1].float()) if at % 8 else fused.unbind(2)
        got.append(*rows, [4, 0, 2])
    assert_alike(got, want)


def test_rotated_keys():
    want, got = pair("k4tv4", 128, lengths=(0, 120), rotate_keys=True)
    k, v = tokens(2, 20, 128)
    for at in range(20):
        want.append(k[:, at : at + 1], v[:, at : at + 1])
        got.append(k[:, at : at + 1].cuda(), v[:, at : at + 1].cuda())
    # the rotation's product may round its last bit the other way on another device
    for ours, theirs in zip(got.gather(1), want.gather(1)):
        assert relative_error(ours.cpu(), theirs) < 0.02
    assert got.counts.n_tok.tolist() == want.counts.n_tok.tolist()


# ---- captured


class Captured:
    """One step, append then decode, in a CUDA graph over static inputs."""

    def __init__(self, cache: KVCache, q_len: int, seqs=None, batch: int | None = None):
        batch = cache.max_batch if batch is None else batch
        self.k, self.v = (torch.zeros(batch, q_len, HEADS, cache.head_dim, dtype=cache.dtype, device="cuda")
                          for _ in range(2))
        self.q = torch.zeros(batch, q_len, 4 * HEADS, cache.head_dim, dtype=cache.dtype, device="cuda")
        warm = KVCache(cache.format, cache.num_pages, HEADS, cache.head_dim, cache.dtype, "cuda", cache.sinks,
                       max_batch=cache.max_batch, max_q_len=cache.max_q_len, max_seqlen=cache.max_seqlen)
        warm.append(self.k, self.v)  # loads the kernels, which a capture cannot
        lowbit_attn.decode(self.q, warm)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            cache.append(self.k, self.v, seqs)
            self.o, self.lse = lowbit_attn.decode(self.q, cache)

    def __call__(self, q, k, v):
        for mine, given in ((self.q, q), (self.k, k), (self.v, v)):
            mine.copy_(given)
        self.graph.replay()
        return self.o, self.lse


@pytest.mark.parametrize("name", ("k4v4", "kitty"))
def test_one_captured_step_serves_every_length(name):
    """300 replays over two boundaries of every row: outputs and bytes of eager steps, bytes of the CPU."""
    want, got = pair(name, 128, sinks=5, max_seqlen=600)
    _, eager = pair(name, 128, sinks=5, max_seqlen=600)
    got.reserve(range(len(LENGTHS)), 600)
    step = Captured(got, 1)
    k, v = tokens(len(LENGTHS), 300, 128)
    q = torch.randn(300, len(LENGTHS), 1, 4 * HEADS, 128, generator=torch.Generator().manual_seed(7)).half()
    for i in range(300):
        new = [x[:, i : i + 1] for x in (k, v)]
        want.append(*new)
        o, lse = step(q[i], *new)
        eager.append(*(x.cuda() for x in new))
        o_eager, lse_eager = lowbit_attn.decode(q[i].cuda(), eager)
        if i % 50 == 0 or i % 128 in (0, 1, 2, 126, 127):
            assert_same_bytes("o", o, o_eager)
            assert_same_bytes("lse", lse, lse_eager)
    assert_alike(eager, want)
    got.sync()
    for mine, counter in zip(got.counts, want.counts):
        assert mine.tolist() == counter.tolist()
    assert_same_state(got, want)
    # the host follows again: a rewind, a prefill and an eager step after the replays
    k, v = tokens(1, 150, 128, seed=9)
    for cache in (got, want):
        cache.rewind([2], 1)
        cache.prefill(2, k[0].to(cache.device), v[0].to(cache.device))
        cache.append(k[:, :1].to(cache.device), v[:, :1].to(cache.device), [0])
    assert_same_state(got, want)


def test_weights_updated_in_place_matter_to_a_captured_steps_later_pages():
    """Packed with what the tensor holds when a page is packed, within one graph, as the CPU's."""
    want, got = pair("kitty-weighted", 128, sinks=5)
    got.reserve(range(len(LENGTHS)), 600)
    new = [torch.zeros(len(LENGTHS), 1, HEADS, 128, dtype=torch.float16, device="cuda") for _ in range(2)]
    pair("kitty-weighted", 128, sinks=5)[1].append(*new)  # loads the kernel, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got.append(*new)
    k, v = tokens(len(LENGTHS), 300, 128)
    for i in range(300):
        for mine, given in zip(new, (k, v)):
            mine.copy_(given[:, i : i + 1])
        if i % 100 == 50:
            for cache in (want, got):
                cache.query_weights.copy_(cache.query_weights.flip(0).roll(i, 1))
        graph.replay()
        want.append(k[:, i : i + 1], v[:, i : i + 1])
    got.sync()
    assert_same_state(got, want)


def test_replays_neither_allocate_nor_leave_the_device():
    _, got = pair("k4v4", 128)
    got.reserve(range(len(LENGTHS)), 500)
    step = Captured(got, 1)
    inputs = [torch.randn_like(x) for x in (step.q, step.k, step.v)]
    step(*inputs)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(140):
            step(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert got.n_tok.tolist() == [length + 141 for length in LENGTHS]


def test_no_call_waits_for_the_device():
    _, got = pair("kitty", 128, sinks=5, lengths=(250, 130, 0, 0))
    k, v = (x.cuda() for x in tokens(4, 300, 128))
    got.append(k[:, :1], v[:, :1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for at in range(1, 20):  # row 0 takes a page among them
            got.append(k[:, at : at + 1], v[:, at : at + 1])
        got.append(k[:2, :1], v[:2, :1], [3, 1])
        got.rewind([0, 1], [1, 2])
        got.free([2])
        got.share(0, 2)
        got.free([3])
        got.prefill(3, k[0], v[0])
        got.flush()
        got.reserve([3], 500)
        assert got.nbytes > 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got.book.check()


def test_rows_given_on_the_device():
    want, got = pair("k4v4", 128, sinks=5)
    got.reserve(range(len(LENGTHS)), 500)
    rows = torch.tensor([1, 4], dtype=torch.int32, device="cuda")
    step = Captured(got, 1, rows, batch=2)
    k, v = tokens(2, 60, 128)
    for i in range(60):
        picked = [[1, 4], [3, 0]][i % 2]
        rows.copy_(torch.tensor(picked, dtype=torch.int32))
        step(torch.zeros_like(step.q), k[:, i : i + 1], v[:, i : i + 1])
        want.append(k[:, i : i + 1], v[:, i : i + 1], picked)
    got.sync()
    assert_same_state(got, want)


# ---- faults on the device


def test_a_step_without_room_changes_nothing_and_is_reported():
    want, got = pair("k4v4", 128, sinks=5)
    step = Captured(got, 1)
    got.free([1])
    k, v = tokens(len(LENGTHS), 200, 128)
    room = got.limit.tolist()
    assert room[1] == 0
    for i in range(200):
        step(torch.zeros_like(step.q), k[:, i : i + 1], v[:, i : i + 1])
        rows = [row for row in (0, 2, 3, 4) if int(want.n_tok[row]) < room[row]]
        want.append(k[rows, i : i + 1], v[rows, i : i + 1], rows)
    full = [row for row in range(5) if int(want.n_tok[row]) == room[row] or row == 1]
    assert len(full) > 1
    with pytest.raises(CacheFaultError, match=r"sequences \[.*1.*\] were freed or had no room"):
        got.check()
    got.sync()  # reported once
    want.free([1])
    assert_same_state(got, want)
    assert got.n_tok.tolist() == want.n_tok.tolist()


@pytest.mark.parametrize("row", (-1, 5, 1 << 30))
def test_an_unknown_row_is_reported(row):
    want, got = pair("k4v4", 128)
    rows = torch.tensor([2, row], dtype=torch.int32, device="cuda")
    step = Captured(got, 1, rows, batch=2)
    k, v = tokens(2, 1, 128)
    step(torch.zeros_like(step.q), k, v)
    want.append(k[:1], v[:1], [2])
    with pytest.raises(CacheFaultError, match="a row beyond 0 to max_batch - 1 = 4"):
        got.sync()
    assert_same_state(got, want)


def test_what_a_capture_cannot_do_says_so():
    _, got = pair("k4v4", 128)
    Captured(got, 1)
    messages = {}
    calls = {"prefill": lambda: got.prefill(0, *tokens(1, 1, 128)), "flush": got.flush, "sync": got.sync,
             "reserve": lambda: got.reserve([0], 300), "free": lambda: got.free([0])}
    filler = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        filler.add_(1)
        for name, call in calls.items():
            try:
                call()
            except RuntimeError as error:
                messages[name] = str(error)
    assert set(messages) == set(calls)
    assert all("supported there: append and decode" in message for message in messages.values())


# ---- rewind and share


@pytest.mark.parametrize("name", ("k4v4", "kitty"))
@pytest.mark.parametrize("length", range(124, 136))
def test_rejected_drafts(name, length):
    """Steps of four tokens around a boundary of which one to three are dropped, and others follow."""
    want, got = pair(name, 128, lengths=(length, length + 128), sinks=0, max_q_len=4)
    k, v = tokens(2, 60, 128)
    at = 0
    for dropped in (1, 2, 3, 0, 3, 2, 1, 3):
        for cache in (want, got):
            cache.append(k[:, at : at + 4].to(cache.device), v[:, at : at + 4].to(cache.device))
            cache.rewind([1, 0], [dropped, 3 - dropped])
        at += 4
        assert_alike(got, want)
    for cache in (want, got):
        cache.flush()
    assert_alike(got, want)


def test_shared_pages_then_apart():
    want, got = pair("kitty", 128, lengths=(400, 0, 0), pages=8, sinks=5)
    k, v = tokens(3, 150, 128)
    for cache in (want, got):
        cache.share(0, 1)
        cache.share(0, 2, 5 + 128)
    assert_alike(got, want)
    assert got.book.refs.tolist() == want.book.refs.tolist() and 3 in got.book.refs.tolist()
    for cache in (want, got):
        for i in range(150):
            cache.append(*(x[:2, i : i + 1].to(cache.device) for x in (k, v)))
    assert_alike(got, want)
    for cache in (want, got):
        cache.free([0])
    assert_alike(got, want)
    q = torch.randn(3, 1, 8, 128, dtype=torch.float16)
    o, _ = lowbit_attn.decode(q.cuda(), got)
    o_cpu, _ = lowbit_attn.decode(q, want)
    assert not o[0].any()
    assert relative_error(o.cpu(), o_cpu) < 2e-3


def test_memory_of_the_caller():
    record = lowbit_attn.FORMATS["k4v4"].record_bytes(128)
    pool = torch.zeros(4, HEADS, record, dtype=torch.uint8, device="cuda")
    cache = KVCache("k4v4", 4, HEADS, 128, device="cuda", pool=pool)
    k, v = (x[0].cuda() for x in tokens(1, 300, 128))
    cache.prefill(0, k, v)
    assert cache.pool.data_ptr() == pool.data_ptr() and np.count_nonzero(pool.cpu().numpy()) > record
