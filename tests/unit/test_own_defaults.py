"""Codebooks, level caches and an engine's pages under a caller's default device, dtype, autocast and inference mode."""

import contextlib
import copy
import pickle
from dataclasses import replace

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, decode
from lowbit_attn.cache.attached import Attached
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.calibrate import recipe_of
from lowbit_attn.codebooks.capture import LayerSample, Sample
from lowbit_attn.codebooks.learn import learn_layers
from lowbit_attn.codebooks.prompt import attention_squares, learn_prompt, token_weights
from lowbit_attn.integrations import prompt as prompt_layer
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.policy import Cumulative, Shares
from lowbit_attn.paged import PagedStore, Step, append, ring_slots
from lowbit_attn.paged_attention import attention
from lowbit_attn.precision import on_own_defaults
from lowbit_attn.testing import assert_same_bytes, normal_codebooks
from unit.caller_modes import MODES, forget, lead

HEADS, DIM = 2, 64
K, V = torch.randn(2, 700, HEADS, DIM, generator=torch.Generator().manual_seed(2))
Q = torch.randn(700, 4, DIM, generator=torch.Generator().manual_seed(3))


def compare(call, mode) -> None:
    """What ``call`` gives in a mode, what it gives after it, and what it gives without one are the same bytes."""
    forget()
    want = call()
    forget()
    with MODES[mode]():
        under = call()
    for found in (under, call()):
        assert len(found) == len(want)
        for i, (got, x) in enumerate(zip(found, want)):
            assert_same_bytes(f"result {i}", got, x)


# ---- codebooks


def made_and_moved(path) -> list[torch.Tensor]:
    """Codebooks with all fields and with defaults, their file, a layer of it, moved."""
    full = normal_codebooks("cq2", 2, HEADS, DIM, "pre")
    plain = Codebooks("cq2", "post", DIM, full.k_entries, full.v_entries)
    out = []
    for books in (full, plain, normal_codebooks("k4vcq2", 1, HEADS, DIM)):
        books.save(path)
        read = Codebooks.load(path)
        assert read.hash == books.hash
        layer = copy.deepcopy(read.layer(0)).to("cpu")
        out += [*books.tensors.values(), *read.tensors.values(), *layer.tensors.values()]
    return out


@pytest.mark.parametrize("mode", MODES)
def test_codebooks_and_their_file(mode, tmp_path):
    compare(lambda: made_and_moved(tmp_path / "books.safetensors"), mode)


def sample(rope: str) -> Sample:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randn(2, 4, HEADS, 128, DIM, generator=generator, device="cpu", dtype=torch.float32).half()
    moment = torch.randn(HEADS, DIM, DIM, generator=generator, device="cpu", dtype=torch.float32)
    freq = 10_000.0 ** -(torch.arange(DIM // 2, dtype=torch.float32, device="cpu") / (DIM // 2))
    first = torch.arange(32, 32 + 4 * 128, 128, device="cpu")
    return Sample([LayerSample(*pages, moment @ moment.mT, 0.125, freq)] * 2, first, 4096)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rope", ("pre", "post"))
def test_learning_from_a_sample(mode, rope):
    given, recipe = sample(rope), recipe_of(FORMATS["cq2"], rope)

    def learn():
        found = learn_layers(given, recipe)
        return [x for one in found for x in (one.k_entries, one.v_entries, one.k_order, one.k_weights)] + [
            torch.as_tensor([one.logit_error, one.value_error], dtype=torch.float64, device="cpu") for one in found]

    compare(learn, mode)


def from_prompt(rope: str) -> list[torch.Tensor]:
    k, v, q = K[:400].transpose(0, 1), V[:400].transpose(0, 1), Q[:400].transpose(0, 1)
    freq = 10_000.0 ** -(torch.arange(DIM // 2, dtype=torch.float32, device="cpu") / (DIM // 2))
    squares, seen = attention_squares(q, k, 3, 0.125)
    weights = token_weights(squares, seen)
    moment = torch.eye(DIM, dtype=torch.float32, device="cpu").expand(HEADS, DIM, DIM)
    books = learn_prompt(k, v, moment, freq, 4096, 5, recipe_of(FORMATS["cq2"], rope), "cq2", 0, weights)
    return [squares, seen, weights, *books.tensors.values()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rope", ("pre", "post"))
def test_codebooks_of_a_prompt(mode, rope):
    compare(lambda: from_prompt(rope), mode)


def prompt_rows(monkeypatch) -> list[torch.Tensor]:
    """A layer of transformers' that learns from its prompt, then takes two steps."""
    monkeypatch.setattr(prompt_layer, "LEAST_TOKENS", 300)
    layer = prompt_layer.PromptLayer(FORMATS["cq2"], codebooks="prompt-post")
    out = []
    for first, last in ((0, 400), (400, 401), (401, 402)):
        k, v, q = (x[first:last].transpose(0, 1)[None].half() for x in (K, V, Q))
        handle, _ = layer.update(k, v)
        out.append(layer.attend(handle, q))
    return [*out, *layer.rows[0].books.tensors.values()]


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_that_learns_from_its_prompt(mode, monkeypatch):
    compare(lambda: prompt_rows(monkeypatch), mode)


def book_cache(name: str, rope: str) -> list[torch.Tensor]:
    """A cache with codebooks: all that it serves."""
    books = normal_codebooks(name, 1, HEADS, DIM, rope).layer(0)
    cache = KVCache(name, 14, HEADS, DIM, max_batch=3, max_q_len=2, sinks=5, codebooks=books)
    if rope == "pre":
        cache.set_first_positions([0], 7)
    cache.prefill(0, K[:300], V[:300])
    lead(cache, K, V)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(cache)))
    q = Q[None, :1]
    return [*cache.gather(0), *cache.dequantize_pages([0, 1]), *decode(q, cache), *decode(q, twin), twin.n_tok]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, rope", (("cq2", "post"), ("kcq4vcq2", "pre"), ("k4vcq2", "post")))
def test_a_cache_with_codebooks(name, rope, mode):
    compare(lambda: book_cache(name, rope), mode)


# ---- significance


def significance_cache() -> list[torch.Tensor]:
    """A cache whose pages order tokens by what queries see in them."""
    cache = KVCache("k4v2-boost", 14, HEADS, DIM, max_batch=3, max_q_len=2, sinks=5)
    cache.prefill(0, K[:300], V[:300], Q[:300])
    cache.prefill(1, K[:200], V[:200])
    out = []
    for at in range(300, 400, 2):
        k, v, q = (x[None, at : at + 2] for x in (K, V, Q))
        cache.append(k, v)
        o, lse = decode(q, cache)
        cache.manage(q, lse)
        out += [o, lse]
    cache.prefill(0, K[400:500], V[400:500], Q[400:500])
    cache.share(0, 2)
    cache.rewind([2, 0], [1, 2])
    cache.free([1])
    twin = copy.deepcopy(cache)
    return [*out, *cache.gather(0), *decode(Q[None, :1], cache), *decode(Q[None, :1], twin), cache.score, cache.seen,
            cache.order]


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_by_significance(mode):
    compare(significance_cache, mode)


# ---- levels


def level_cache(name: str, policy) -> list[torch.Tensor]:
    """A cache of levels: prompts with queries and without, steps, all other calls, copies."""
    frames = 40 if name == "lean" else (40, 40)
    pool = FramePool(name, head_dim=DIM, frames=frames)
    cache = LevelCache(pool, HEADS, policy=policy, max_seqlen=800, sinks=5, max_batch=3, max_q_len=2)
    cache.prefill(0, K[:420], V[:420], Q[:420])
    cache.prefill(2, K[:30], V[:30])
    out = []
    for at in range(420, 600, 2):
        k, v, q = (x[None, at : at + 2].half() for x in (K, V, Q))
        cache.append(k, v, [0])
        o, lse = decode(q, cache)
        cache.manage(q, lse, [0])
        out += [o, lse]
    cache.rewind([0, 2], [3, 1])
    pool.grow(frames)
    cache.extend(900)
    cache.prefill(0, K[600:], V[600:], Q[600:])
    twin, whole = copy.deepcopy((cache, pool))[0], pickle.loads(pickle.dumps(cache))
    twin.free([2])
    twin.append(K[None, :1], V[None, :1], [2])
    cache.check()
    for one in (cache, twin, whole):
        out += [*decode(Q[None, :1], one), *(x for sides in one.gather(0) for x in sides), *one.counts_of(0)]
    return out + [*pool.memory, *(x for free in pool.lists for x in (free.ids, free.ends))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name, policy", (("lean", None), ("lean", Cumulative(0.05, 1.0)),
                                          ("lean-low", Shares(0.3, 0.2))))
def test_a_cache_of_levels(name, policy, mode):
    compare(lambda: level_cache(name, policy), mode)


# ---- pages of an engine


def engine(name: str) -> list[torch.Tensor]:
    """Two sequences of an engine: a prompt's chunk, then steps of one and of two tokens."""
    fmt, cpu = FORMATS[name], dict(device="cpu")
    attached = None
    if fmt.needs_codebooks:
        attached = Attached(normal_codebooks(name, 1, HEADS, DIM).layer(0), fmt, HEADS, DIM, torch.device("cpu"))
    pool = torch.zeros(12, HEADS, fmt.record(DIM).nbytes, dtype=torch.uint8, **cpu)
    rings = torch.zeros(4, 2, HEADS, ring_slots(fmt, 2), DIM, dtype=torch.float16, **cpu)
    store = PagedStore(fmt, pool, rings, attached=attached)
    table = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], dtype=torch.int32, **cpu)
    out, lens = [], [0, 0]
    for counts in ((300, 1), (1, 127), (1, 2), (2, 1)):
        lens = [n + new for n, new in zip(lens, counts)]
        starts = [0, counts[0], sum(counts)]
        step = Step(table, *(torch.tensor(x, dtype=torch.int32, **cpu) for x in (lens, starts, [1, 2])))
        k, v, q = (x[: sum(counts)] for x in (K, V, Q))
        before, o = append(store, step, k, v), torch.empty(q.shape, dtype=torch.float32, **cpu)
        out += [o, attention(store, step, q, k, v, before, o, prompt_layer.PLAIN)]
    return [*out, pool, rings]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ("k4v4", "k4tv4-g32", "cq2"))
def test_pages_of_an_engine(name, mode):
    compare(lambda: engine(name), mode)


# ---- gradients


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


def kept(owner) -> list[str]:
    return [name for name, x in vars(owner).items() if isinstance(x, torch.Tensor) and x.requires_grad]


def test_a_cache_of_levels_keeps_no_gradients():
    pool = FramePool("lean", head_dim=DIM, frames=60)
    cache = LevelCache(pool, HEADS, max_seqlen=900, sinks=5)
    cache.prefill(0, grad(300, HEADS, DIM), grad(300, HEADS, DIM), grad(300, 4, DIM), sink_logits=grad(4))
    cache.prefill(0, grad(30, HEADS, DIM), grad(30, HEADS, DIM), grad(30, 4, DIM), grad(4, 30))
    for _ in range(9):
        cache.append(grad(1, 1, HEADS, DIM), grad(1, 1, HEADS, DIM))
        o, lse = decode(grad(1, 1, 4, DIM), cache, sink_logits=grad(4))
        cache.manage(grad(1, 1, 4, DIM), lse.clone().requires_grad_())
        assert not o.requires_grad and not lse.requires_grad
    assert not kept(cache) and not any(memory.requires_grad for memory in pool.memory)


def test_a_cache_by_significance_keeps_no_gradients():
    cache = KVCache("k4v2-boost", 9, HEADS, DIM, sinks=5)
    cache.prefill(0, grad(300, HEADS, DIM), grad(300, HEADS, DIM), grad(300, 4, DIM), grad(4, 300))
    assert not kept(cache)
    for _ in range(9):
        cache.append(grad(1, 1, HEADS, DIM), grad(1, 1, HEADS, DIM))
        _, lse = decode(grad(1, 1, 4, DIM), cache)
        cache.manage(grad(1, 1, 4, DIM), lse.clone().requires_grad_())
    assert not kept(cache)


def test_codebooks_keep_no_gradients():
    books = normal_codebooks("cq2", 1, HEADS, DIM, "pre")
    tensors = {name: x.clone().requires_grad_() for name, x in books.tensors.items() if x.is_floating_point()}
    whole = Codebooks("cq2", "pre", DIM, **tensors)
    layer = replace(books.layer(0), **{name: x[0] for name, x in tensors.items()})
    for made in (whole, layer):
        assert not any(x.requires_grad for x in made.tensors.values())
    cache = KVCache("cq2", 9, HEADS, DIM, codebooks=layer)
    cache.prefill(0, grad(300, HEADS, DIM), grad(300, HEADS, DIM))
    copy.deepcopy(cache)
    assert not kept(cache) and not kept(cache.attached)


def test_pages_of_an_engine_keep_no_gradients():
    fmt = FORMATS["k4v4"]
    store = PagedStore(fmt, torch.zeros(12, HEADS, fmt.record(DIM).nbytes, dtype=torch.uint8),
                       torch.zeros(4, 2, HEADS, ring_slots(fmt, 2), DIM, dtype=torch.float16))
    table = torch.tensor([[1, 2, 3, 4]], dtype=torch.int32)
    for length, count in ((300, 300), (302, 2)):
        step = Step(table, *(torch.tensor(x, dtype=torch.int32) for x in ([length], [0, count], [1])))
        k, v, q = grad(count, HEADS, DIM), grad(count, HEADS, DIM), grad(count, 4, DIM)
        before, o = append(store, step, k, v), torch.empty(q.shape)
        lse = attention(store, step, q, k, v, before, o)
        assert not any(x.requires_grad for x in (store.rings, store.pool, o, lse))


# ---- the decorator


def test_what_the_decorator_ends_at_its_door():
    @on_own_defaults
    def inside():
        made = torch.zeros(2, 2)
        return made.device.type, (made @ made).dtype, torch.is_autocast_enabled("cpu")

    with MODES["default device"](), torch.autocast("cpu", dtype=torch.bfloat16):
        assert inside() == ("cpu", torch.float32, False)
        assert torch.zeros(1).device.type == "meta" and torch.is_autocast_enabled("cpu")
    with contextlib.suppress(ZeroDivisionError), MODES["default device"]():
        try:
            on_own_defaults(lambda: 1 // 0)()
        finally:
            assert torch.zeros(1).device.type == "meta"
    assert inside.__name__ == "inside" and torch.zeros(1).device.type == "cpu"
