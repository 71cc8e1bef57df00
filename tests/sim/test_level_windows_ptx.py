"""Windows over levels by their PTX on the CPU: what is hidden, what is kept of it, and decode of each level."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from unit.level_caches import check_equal, of_pages, state
from unit.level_texts import R, make, tokens

from lowbit_attn import kernels, reference
from lowbit_attn.levels import LevelCache, step, windows
from lowbit_attn.levels import decode as level_decode
from lowbit_attn.levels.view import views_of
from lowbit_attn.reference import Attention
from sim.ptx.levels import run_hidden, run_pack, run_places, run_plan

RAGGED = ((5, 9), (0, 4), (3, 0), (0, 0))  # (high, low) pages of two heads of two sequences


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


def test_hidden_tokens():
    """Windows that end in the sinks, at a block's ends, within blocks and the ring; one longer than all."""
    cache = of_pages("lean", 64, RAGGED, heads=2, recent=90, windows=True)
    n_tok, order = int(cache.n_tok[0]), np.random.default_rng(0).permutation
    for window in (1, 91, n_tok - 5 - 256, n_tok - 5 - 300, n_tok - 5, n_tok - 2, n_tok + 7, 1 << 30):
        hidden = torch.full((2, 4), -7, dtype=torch.int32)
        run_hidden(cache, hidden, window, order)
        assert torch.equal(hidden, windows.hidden(cache, cache.n_tok - window)), window


def test_classes_of_blocks_that_were_moved():
    """A row that goes, and one that does not; the twin's steps in torch, given the scores of the first launch."""
    cache = make("lean")
    for row, (length, recent) in enumerate(((100, 187), (200, 96), (330, 187))):
        cache.prefill(row, *tokens(length, row))
        cache.n_tok[row] = cache.n_sink[row] + cache.n_out[row] + recent
    for x in (cache.ring_k, cache.ring_v):
        x.normal_()
    cache.recount()
    index, q, lse = torch.tensor([2, 0, 1]), tokens(3, 5)[2][:, None], torch.full((3, R * 2, 1), 6.0)
    twin = copy.deepcopy(cache)
    run_plan(cache, index, q, lse)
    scores = step.Scores(cache.score.unflatten(0, (-1, 2))[index], cache.seen[index])
    plan = step.Plan(twin, index, scores, twin.n_tok[index] // 8 > (twin.n_tok[index] - 1) // 8)
    plan.write()
    run_pack(cache, index)
    run_places(cache, index)
    assert plan.go.any() and not plan.go.all()
    check_equal(state(cache), state(twin))


def merged(cache: LevelCache, q: torch.Tensor, options: Attention, decode) -> tuple[torch.Tensor, torch.Tensor]:
    """Both levels by ``decode`` (view, queries), merged in fp32; sequences of query heads again."""
    views = views_of(cache).under_window(cache)
    views_of(cache).hidden.copy_(windows.hidden(cache, cache.n_tok - options.window))
    rows = level_decode.level_queries(q, cache.num_heads_kv)
    found = [decode(view, rows) for view in views]
    o, lse = reference.merge_states(*(torch.stack([x.float() for x in parts]) for parts in zip(*found)))
    return o.unflatten(0, (len(q), -1)).transpose(1, 2).reshape(q.shape), lse.reshape(len(q), q.shape[2], 1)


def near(found, want, limit: float = 2e-3) -> None:
    assert (found[0] - want[0]).abs().max() <= limit * want[0].abs().max()
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=2e-3)


def features(options: Attention) -> tuple[str, ...]:
    return ("softcap",) * (options.softcap is not None) + (kernels.LEVEL_WINDOW,)


# of RAGGED's longest head: all, some pages, a page's part, stages alone, a part of the ring
CALLS = ((2000, {}), (900, {}), (500, dict(keep_sinks=True)), (130, dict(softcap=5.0, keep_sinks=True)), (40, {}))


@pytest.mark.parametrize("path, rows, ratio, window, options", [
    *(("integer", 4, 3, *call) for call in CALLS), ("register", 8, 5, *CALLS[2])])
def test_hopper(path, rows, ratio, window, options, scratch):
    pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
    from sim import hopper_calls
    from sim.ptx import program as ptx

    cache, options = of_pages("lean", 64, RAGGED, heads=2, windows=True), Attention(window=window, **options)
    q = torch.randn(2, 1, 2 * ratio, 64, generator=torch.Generator().manual_seed(9)).half()

    def decode(view, queries):
        key = kernels.decode_key("hopper", "sm_90a", "float16", 64, view.format.name, path, rows,
                                 features=features(options))
        text, cfg = hopper_calls.compiled(key, scratch)
        return hopper_calls.decode(ptx.Program(text), cfg, SimpleNamespace(cache=view, q=queries), options, 2)

    near(merged(cache, q, options, decode), cache.attend(q.float(), options))


@pytest.mark.parametrize("window, options", CALLS[2:3], ids=[str(window) for window, _ in CALLS[2:3]])
def test_ampere(window, options):
    from sim import ampere_calls

    cache, options = of_pages("lean", 64, RAGGED, heads=2, windows=True), Attention(window=window, **options)
    q = torch.randn(2, 1, 6, 64, generator=torch.Generator().manual_seed(9)).half()

    def decode(view, queries):
        key = kernels.decode_key("ampere", "sm_90", "float16", 64, view.format.name, "register", 8,
                                 features=features(options))
        return ampere_calls.decode(key, SimpleNamespace(cache=view, q=queries), options, 2)

    near(merged(cache, q, options, decode), cache.attend(q.float(), options))
