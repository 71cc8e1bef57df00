"""Steps that pack blocks, by the compiled append on the CPU: a whole cache afterwards, bit for bit the CPU's."""

import copy

import pytest
import torch

from lowbit_attn import KVCache, kernels, layout
from lowbit_attn.cache.view import STEP_FIELDS
from lowbit_attn.testing import normal_codebooks
from sim.ptx.steps import RINGS, run_step

HEAD_DIM = 64


def filled(name: str, heads: int, lengths: tuple[int, ...], **options) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """(a cache whose next step packs, K, V): rows were filled by steps, so that full blocks are still in the ring."""
    cache = KVCache(name, 8, heads, HEAD_DIM, sinks=5, max_batch=len(lengths), max_q_len=4, **options)
    k, v = torch.randn(2, len(lengths), max(lengths) + 4, heads, HEAD_DIM).half()
    for row, length in enumerate(lengths):
        for at in range(0, length, 4):
            some = slice(at, min(at + 4, length))
            cache.append(k[row : row + 1, some], v[row : row + 1, some], seqs=[row])
    cache.reserve(range(len(lengths)), [length + 4 for length in lengths])
    return cache, k, v


def step(cache: KVCache, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, sees_races: bool = False,
         **changed) -> dict[str, torch.Tensor]:
    """The state after the kernel's step; sees_races: between warps; changed: tensors in place of the cache's, or of
    ring_rows."""
    key = kernels.append_key("sm_90", "float16", HEAD_DIM, cache.format, None)
    state = {name: getattr(cache, name) for name in STEP_FIELDS} | changed
    x = {"x_k": k, "x_v": v, "rows": rows, "ring_rows": state.pop("ring_rows", rows.clone())}
    numbers = {"num_sinks": cache.sinks, "window_k": cache.window_k, "window_v": cache.window_v,
               "page_stride": cache.strides.page, "head_stride": cache.strides.head}
    return run_step(key, state, x, numbers, sees_races=sees_races)


def new_tokens(k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], tokens: int) -> list[torch.Tensor]:
    """K and V of a step of rows 1 and 0."""
    return [torch.stack([x[row, lengths[row] : lengths[row] + tokens] for row in (1, 0)]) for x in (k, v)]


@pytest.mark.parametrize("name, heads, lengths, tokens, values", [
    ("k2v2", 1, (136, 137), 1, True), ("kitty", 1, (136, 137), 1, False), ("kitty", 1, (262, 136), 3, True)],
    ids=("both-sides", "keys-alone", "values-beside-keys-of-another-row"))
def test_a_step_that_packs(name, heads, lengths, tokens, values):
    """values: whether V is packed, too. Where both are, no warp races with another."""
    cache, k, v = filled(name, heads, lengths)
    new = new_tokens(k, v, lengths, tokens)
    want = copy.deepcopy(cache)
    want.append(*new, seqs=[1, 0])
    packed = [bool((getattr(want, n) > getattr(cache, n)).any()) for n in ("n_qk", "n_qv")]
    assert packed == [True, values]
    found = step(cache, *new, torch.tensor([1, 0], dtype=torch.int32), sees_races=name == "k2v2")
    for field, tensor in found.items():
        assert torch.equal(tensor, getattr(want, field)), field


def test_a_step_that_packs_by_codebooks():
    cache, k, v = filled("cq2", 1, (136, 137), codebooks=normal_codebooks("cq2", 1, 1, HEAD_DIM).layer(0))
    new_k, new_v = new_tokens(k, v, (136, 137), 1)
    want = copy.deepcopy(cache)
    want.append(new_k, new_v, seqs=[1, 0])
    assert (want.n_qk > cache.n_qk).any() and (want.n_qv > cache.n_qv).any()
    books = {"k_entries": cache.k_entries, "v_entries": cache.v_entries}
    stored = cache.attached.keys(new_k, cache.dtype).half()
    for field, found in step(cache, stored, new_v, torch.tensor([1, 0], dtype=torch.int32), **books).items():
        assert torch.equal(found, getattr(want, field)), field


@pytest.mark.parametrize("name, lengths", [("k2v2", (136, 137)), ("kitty", (264, 136))])
def test_a_step_whose_rings_are_elsewhere(name, lengths):
    """Rows of rings in another order, with room between heads; pages that the cache does not hold any more."""
    cache, k, v = filled(name, 2, lengths)
    new = new_tokens(k, v, lengths, 3)
    want = copy.deepcopy(cache)
    want.append(*new, seqs=[1, 0])
    gone = torch.tensor([1, 2], dtype=torch.int32) * layout.PAGE_TOKENS  # packed by someone else: blocks wrap around
    apart = {"n_tok": cache.n_tok + gone, "limit": cache.limit + gone, "ring_start": cache.n_qk + gone}
    ring_rows = torch.tensor([0, 2], dtype=torch.int32)  # of the batch's rows 1 and 0
    for ring in RINGS:
        held = getattr(cache, ring)
        apart[ring] = torch.zeros(3, 3, *held.shape[2:], dtype=held.dtype)
        for row, ring_row in ((1, 0), (0, 2)):
            apart[ring][ring_row, :2] = moved(held[row], gone[row], ring)
    found = step(cache, *new, torch.tensor([1, 0], dtype=torch.int32), ring_rows=ring_rows, **apart)
    for ring in RINGS:
        assert not found[ring][:, 2].any() and not found[ring][1].any()
        for row, ring_row in ((1, 0), (0, 2)):
            assert torch.equal(found[ring][ring_row, :2], moved(getattr(want, ring)[row], gone[row], ring)), ring
    for field in ("pool", "n_qk", "n_qv", "n_sink", "arrivals", "faults"):
        assert torch.equal(found[field], getattr(want, field)), field
    assert torch.equal(found["n_tok"], want.n_tok + gone) and torch.equal(found["ring_start"], want.n_qk + gone)


def moved(held: torch.Tensor, gone: torch.Tensor, ring: str) -> torch.Tensor:
    """Tokens [heads, slots, head_dim] of a ring where they lie if so many went before."""
    return held.roll(int(gone), 1) if ring.startswith("ring") else held


def test_a_step_that_packs_in_an_order_by_significance():
    """Two rows, one of which packs: K, V and positions in the order that scores gave, which then are forgotten."""
    lengths = (390, 150)
    cache, k, v = filled("k4v2-boost", 2, lengths)
    cache.order.copy_(torch.stack([torch.randperm(layout.PAGE_TOKENS) for _ in range(4)]).view(2, 2, -1))
    open_tokens = [(row, i % cache.score.shape[2]) for row, length in enumerate(lengths)
                   for i in range(int(cache.n_qk[row]), length - cache.sinks)]
    for row, slot in open_tokens:
        cache.score[row, :, slot] = torch.rand(2)
        cache.seen[row, slot] = 1 + slot % 7
    new = new_tokens(k, v, lengths, 3)
    want = copy.deepcopy(cache)
    want.append(*new, seqs=[1, 0])
    assert want.n_qk.tolist() == want.n_qv.tolist() == [2 * layout.PAGE_TOKENS, 0]
    page = int(want.table[0, 1])
    assert torch.equal(want.pool_positions[page], cache.order[0])
    found = step(cache, *new, torch.tensor([1, 0], dtype=torch.int32), order=cache.order, score=cache.score,
                 seen=cache.seen)
    for field, value in found.items():
        assert torch.equal(value, getattr(want, field)), field
