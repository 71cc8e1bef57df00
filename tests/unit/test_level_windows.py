"""Sliding windows over level caches: positions are those of the tokens, whatever became of them, and a window is
attention over what it leaves."""

import copy

import pytest
import torch

from lowbit_attn import PageExhaustedError, decode
from lowbit_attn.levels import LevelCache, windows
from lowbit_attn.levels.policy import Shares
from lowbit_attn.reference import Attention
from unit.level_caches import check_equal, state
from unit.level_texts import ROWS, D, H, R, Text, make, tokens


def windowed(text: Text, q: torch.Tensor, options: Attention) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over what its window leaves, of tokens at positions that are found by their keys."""
    cache, (batch, q_len, heads, _) = text.cache, q.shape
    o, lse = torch.zeros(q.shape), torch.full((batch, heads, q_len), -torch.inf)
    for row in range(batch):
        for head, (k, v) in enumerate(cache.gather(row)):
            at = text.positions(row, head)
            for j in range(q_len):
                last = int(cache.n_tok[row]) - q_len + j
                seen = (at <= last) & ((at > last - options.window) | ((at < cache.sinks) & options.keep_sinks))
                for r in range(head * R, head * R + R):
                    s = k[seen] @ q[row, j, r].float() * (options.softmax_scale or D**-0.5)
                    s = s if options.softcap is None else options.softcap * torch.tanh(s / options.softcap)
                    sink = torch.full((1,), -torch.inf)
                    if options.sink_logits is not None:
                        sink = options.sink_logits[r : r + 1]
                    p = torch.cat((s, sink)).softmax(0)[:-1]
                    o[row, j, r], lse[row, r, j] = p @ v[seen], torch.cat((s, sink)).logsumexp(0)
    return o, lse


@pytest.fixture(scope="module")
def text() -> Text:
    """A prompt and steps over two flushes; a prompt that goes on; a row whose tokens are in its ring."""
    text = Text(make())
    text.prefill(0, 700, 1)
    text.prefill(1, 500, 2)
    text.prefill(2, 60, 3)
    text.steps([0, 2], 140, 4)
    text.prefill(1, 600, 5)
    text.steps([1], 9, 6)
    return text


def test_positions_are_those_of_the_keys(text):
    assert len({len(k) for row in (0, 1) for k, _ in text.cache.gather(row)}) > 2
    assert text.cache.c_pack[:, :4].all() and text.cache.n_drop.all() and text.cache.n_stage.any()
    text.check()


@pytest.mark.parametrize("name", ("lean", "lean-low", "k4v4+k2v2"))
def test_positions_of_coarse_levels_too(name):
    text = Text(make(name, policy=Shares(0.25, 0.5)))
    text.prefill(0, 500, 1)
    text.steps([0, 1, 2], 330, 2)
    text.check()


@pytest.mark.parametrize("keep_sinks", (False, True))
@pytest.mark.parametrize("window", (1, 40, 100, 190, 260, 500, 830, 838, 2000))
def test_a_window_is_attention_over_what_it_leaves(text, window, keep_sinks):
    """Windows within the ring, the stages, one page, all but some sinks, and everything."""
    q = tokens(ROWS * 3, 9)[2].unflatten(0, (ROWS, 3))
    for options in ({}, dict(softcap=5.0, softmax_scale=0.3, sink_logits=torch.linspace(-2, 3, R * H))):
        asked = Attention(window=window, keep_sinks=keep_sinks, **options)
        want = windowed(text, q, asked)
        for found, mine in zip(decode(q, text.cache, window=window, keep_sinks=keep_sinks, **options), want):
            torch.testing.assert_close(found.float(), mine, rtol=1e-3, atol=2e-3)


def test_a_window_wider_than_all_is_none(text):
    q = tokens(ROWS, 9)[2][:, None]
    for found, want in zip(decode(q, text.cache, window=1200), decode(q, text.cache)):
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)


def test_a_level_of_which_nothing_is_seen():
    """All old tokens are high: a window behind them leaves the other level and the ring."""
    text = Text(make(policy=Shares(1.0)))
    text.prefill(0, 500, 1)
    text.cache.policy = Shares(0.0)
    text.prefill(0, 600, 2)
    assert windows.hidden(text.cache, torch.tensor([600]))[:, 0].tolist() == [384, 600 - 5 - 384]
    q = tokens(1, 9)[2][None]
    for found, want in zip(decode(q, text.cache, window=500), windowed(text, q, Attention(window=500))):
        torch.testing.assert_close(found.float(), want, rtol=1e-3, atol=2e-3)


def test_rows_that_wait_are_shared_taken_back_freed_and_extended():
    """Rows that were refused frames, and then go; copies of rows, rewound; rows that start anew; longer tables."""
    text = Text(make(frames=9))
    with pytest.raises(PageExhaustedError):
        text.steps([0, 1], 2000, 1)
    assert text.cache.waits.any() and (text.cache.n_out[:2] > 0).any()
    text.check()
    text.cache.free([1])
    text.keys[1] = text.keys[1][:0]
    text.cache.manage(tokens(1, 2)[2][None], torch.full((1, R * H, 1), 6.0), [0])
    assert not text.cache.waits[0]
    text.steps([0], 30, 2)
    text.check()
    text.cache.share(0, 1, text.cache.first_recent(0) + 40)
    text.keys[1] = text.keys[0][: text.cache.first_recent(0) + 40]
    text.check()
    text.cache.pool.grow((60, 60))
    text.cache.extend(4000)
    text.steps([0, 1], 200, 3)
    text.cache.rewind([0, 1], [30, 9])
    text.keys[:2] = text.keys[0][:-30], text.keys[1][:-9]
    text.check()
    text.steps([0, 1, 2], 200, 4)
    text.check()
    text.cache.pool.check(text.cache)


@pytest.mark.parametrize("name", ("k8v8+k8v4", "lean", "lean-low"))
def test_pages_outside_are_returned_and_nothing_else_changes(name):
    """With a row that shares the frames, which keeps them; heads differ; steps go on, and trim again."""
    text = Text(make(name))
    text.prefill(0, 1300, 1)
    text.cache.share(0, 1)
    text.keys[1] = text.keys[0]
    q, window = tokens(ROWS, 9)[2][:, None], 300
    used = [len(free.ids) - free.n_free for free in text.cache.pool.lists]
    for turn, rows in enumerate(([0], [0, 1], None)):
        before, far = decode(q, text.cache, window=window), decode(q, text.cache)
        text.cache.trim(window, rows)
        for one, other in zip(decode(q, text.cache, window=window), before):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
        assert not torch.equal(decode(q, text.cache)[0], far[0])
        text.cache.pool.check(text.cache)
        text.check()
        now = [len(free.ids) - free.n_free for free in text.cache.pool.lists]
        assert now == used if turn == 0 else sum(now) < sum(used)
        text.steps([0, 1], 200, 50 + turn)
    first = [windows.positions(text.cache, row, head)[0] for row in (0, 1) for head in range(H)]
    for low in (text.cache.c_pack[1, :4] // 128).tolist():
        assert low < 6
    assert min(first) > 500
    text.cache.rewind([0], 50)
    text.keys[0] = text.keys[0][:-50]
    text.check()
    text.cache.free([0, 1, 2])
    assert text.cache.pool.n_free == tuple(len(free.ids) for free in text.cache.pool.lists)


@pytest.mark.parametrize("broken, call", [
    ((torch.Tensor, "masked_fill"), lambda text: text.cache.trim(100)),  # the last step, of classes
    ((LevelCache, "store_sinks"), lambda text: text.prefill(0, 300, 2)),  # behind pages and positions
], ids=("trim", "prefill"))
def test_a_call_that_raises_leaves_all_as_it_was(broken, call, monkeypatch):
    text = Text(make())
    text.prefill(0, 900, 1)
    before = state(text.cache)

    def fail(*arguments):
        if arguments[0] is text.cache or arguments[0].dtype == torch.uint8:
            raise ZeroDivisionError
        return whole(*arguments)

    whole = getattr(*broken)
    monkeypatch.setattr(*broken, fail)
    with pytest.raises(ZeroDivisionError):
        call(text)
    monkeypatch.undo()
    found = state(text.cache)
    check_equal({name: x for name, x in before.items() if not name.startswith("memory")}, found)  # free frames hold any


def test_scores_of_a_prompt_count_what_its_window_shows():
    """lse over the window: what is outside takes no share of a query's probability."""
    text = Text(make(max_batch=1))
    text.prefill(0, 400, 1)
    twin, (k, v, q) = copy.deepcopy(text.cache), tokens(12, 2)
    options = Attention(window=200, keep_sinks=True)
    lse = torch.empty(R * H, 12)
    for i in range(12):  # each query over the keys up to its own
        one = copy.deepcopy(text.cache)
        one.prefill(0, k[: i + 1], v[: i + 1])
        lse[:, i] = one.attend(q[None, None, i], options)[1][0, :, 0]
    text.cache.prefill(0, k, v, q, window=200, keep_sinks=True)
    twin.prefill(0, k, v, q, lse=lse, window=200)
    torch.testing.assert_close(text.cache.score, twin.score, rtol=2e-3, atol=1e-5)
    assert torch.equal(text.cache.seen, twin.seen) and text.cache.score.any()


@pytest.mark.parametrize("call", [
    lambda c: decode(tokens(1)[2][None], c, window=100), lambda c: c.trim(100),
    lambda c: c.prefill(0, *tokens(20), window=100)])
def test_a_cache_without_positions_says_how_to_have_them(call):
    with pytest.raises(NotImplementedError, match=r"window: got 100 over levels without positions, supported: None, or "
                                                  r"a LevelCache\(..., windows=True\)"):
        call(make(windows=False))
