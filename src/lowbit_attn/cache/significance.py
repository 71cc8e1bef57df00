"""Significance of tokens: the mean probability that later queries gave them (LeanKV, section 4.1).

A query's probability of a token is that of softmax over all that the query sees; of the query heads that share a KV
head the largest counts, taken after normalisation, since each has a denominator of its own. A token's own query says
nothing about it. Sums and numbers of observations belong to tokens in 16 bit alone: once a page is packed, its order
is settled and its scores are dropped.

Prompts are scored by 64 of their queries, half of them spread over it and half its last; generation by the queries of
every eighth step. No tensor here has the square of the sequence's length.
"""

from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn import layout
from lowbit_attn.cache.journal import Journal
from lowbit_attn.checks import check_tensor
from lowbit_attn.precision import full_precision
from lowbit_attn.reference import PLAIN, Attention

PROMPT_QUERIES = 64
EVERY = 8  # steps from one that scores to the next
QUERY_BLOCK = 8  # queries whose probabilities exist at once


class Scores(NamedTuple):
    """Sums of probabilities fp32 [num_heads_kv, n] and numbers of the queries that gave them, int32 [n]."""

    score: torch.Tensor
    seen: torch.Tensor


def prompt_queries(tokens: int, count: int = PROMPT_QUERIES) -> torch.Tensor:
    """Positions of the queries that score so many new tokens, int64, ascending: half spread evenly, half the last."""
    if tokens <= count:
        return torch.arange(tokens, device="cpu")
    last = count // 2
    rest, spread = tokens - last, count - last
    return torch.cat((torch.arange(1, spread + 1, device="cpu") * rest // spread - 1,
                      torch.arange(rest, tokens, device="cpu")))


@torch.no_grad()
def observe(q: torch.Tensor, at: torch.Tensor, k: torch.Tensor, first: int, options: Attention = PLAIN,
            lse: torch.Tensor | None = None) -> Scores:
    """What queries say of the keys of consecutive tokens.

    q: [n_q, num_heads, head_dim] at positions ``at``, int64 [n_q]; k: [num_heads_kv, n, head_dim] at positions
    ``first`` on; any float dtype. lse: fp32 [num_heads, n_q] of the queries over all that they see; None: k holds all
    tokens (first is 0), and it is computed here. A window of the options hides tokens, and a hidden token is not
    observed.
    """
    if lse is None and first:
        raise ValueError(f"lse: got None beside keys from position {first} on, supported: the lse over all tokens")
    num_heads_kv, n, head_dim = k.shape
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    at = at.to(k.device)
    position = torch.arange(first, first + n, device=k.device)
    behind = at[:, None] - position  # [n_q, n]
    inside = behind >= 0 if options.window is None else (behind >= 0) & (behind < options.window)
    score = torch.zeros(num_heads_kv, n, dtype=torch.float32, device=k.device)
    with full_precision(k.device.type):
        keys = k.float().transpose(1, 2)
        for start in range(0, len(q), QUERY_BLOCK):
            some = slice(start, start + QUERY_BLOCK)
            seen = inside[some]
            rows = q[some].float().transpose(0, 1).reshape(num_heads_kv, -1, head_dim)  # (query head, query)
            s = (rows @ keys * scale).unflatten(1, (-1, len(seen)))  # [num_heads_kv, r, block, n]
            if options.softcap is not None:
                s = options.softcap * torch.tanh(s / options.softcap)
            s = s.masked_fill(~seen, -torch.inf)
            total = _lse(s, options) if lse is None else lse[:, some].float().unflatten(0, (num_heads_kv, -1))
            p = torch.exp(s - torch.where(total == -torch.inf, 0.0, total)[..., None]).amax(1)
            score += p.masked_fill(behind[some] == 0, 0.0).sum(1)
    return Scores(score, (inside & (behind > 0)).sum(0, dtype=torch.int32))


@torch.no_grad()
def observe_ring(q: torch.Tensor, ring: torch.Tensor, oldest: torch.Tensor, first: torch.Tensor, n_tok: torch.Tensor,
                 lse: torch.Tensor, options: Attention) -> tuple[Scores, torch.Tensor]:
    """``observe`` of rings [batch, num_heads_kv, slots, head_dim] in fixed shapes, without a host read.

    oldest, first: slot of the oldest token and its position; n_tok: tokens of the rows; all int [batch]. q: [batch,
    q_len, num_heads, head_dim] of the rows' last tokens; lse: fp32 [batch, num_heads, q_len]. Returns scores by slot,
    fp32 [batch, num_heads_kv, slots] and int32 [batch, slots], and which slots hold a token, bool [batch, slots].
    """
    (_, heads, slots, head_dim), q_len = ring.shape, q.shape[1]
    age = (torch.arange(slots, device=q.device) - oldest[:, None]) % slots
    position, stop = first[:, None] + age, n_tok[:, None]
    at = stop - q_len + torch.arange(q_len, device=q.device)
    behind = at[..., None] - position[:, None]  # [batch, q_len, slots]
    inside = (behind >= 0) & (position < stop)[:, None]
    if options.window is not None:
        inside &= behind < options.window
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    with full_precision(q.device.type):
        queries = q.float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)  # [batch, H, r, q_len, D]
        s = (queries.flatten(2, 3) @ ring.float().transpose(2, 3) * scale).unflatten(2, (-1, q_len))
        if options.softcap is not None:
            s = options.softcap * torch.tanh(s / options.softcap)
        s = s.masked_fill(~inside[:, None, None], -torch.inf)
        total = lse.float().unflatten(1, (heads, -1))[..., None]
        p = torch.exp(s - total.masked_fill(total == -torch.inf, 0)).amax(2)  # of a group's heads, each normalised
        score = p.masked_fill((behind == 0)[:, None], 0).sum(2)  # a token's own query says nothing
    return Scores(score, (inside & (behind > 0)).sum(1, dtype=torch.int32)), position < stop


def added(old: Scores, new: Scores, is_held: torch.Tensor, acts: torch.Tensor) -> Scores:
    """Scores of rings with new ones, of rows that act, bool [batch]; slots without a token get 0. As in
    ``observe_ring``."""
    return Scores(torch.where(acts[:, None, None], (old.score + new.score) * is_held[:, None], old.score),
                  torch.where(acts[:, None], (old.seen + new.seen) * is_held, old.seen))


def _lse(s: torch.Tensor, options: Attention) -> torch.Tensor:
    lse = s.logsumexp(-1)
    if options.sink_logits is None:
        return lse
    return torch.logaddexp(lse, options.sink_logits.float().reshape(*lse.shape[:2], 1))


def means(score: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Mean probabilities fp32, of score's shape [.., n]; inf for tokens that no query has seen yet."""
    return torch.where(seen > 0, score / seen.clamp(min=1), torch.inf)


def ranking(mean: torch.Tensor) -> torch.Tensor:
    """Tokens from the most significant to the least, int64 [.., n]; of equals the earlier first."""
    return mean.argsort(dim=-1, descending=True, stable=True)


def order_of(mean: torch.Tensor, boosted: int) -> torch.Tensor:
    """The order in which a page stores its tokens, uint8 [.., 128]: the ``boosted`` most significant ones by position,
    then the others by position."""
    best = torch.zeros_like(mean, dtype=torch.bool).scatter_(-1, ranking(mean)[..., :boosted], True)
    return (~best).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.uint8)


# ---- of a cache whose format orders tokens: score fp32 [max_batch, num_heads_kv, ring], seen int32 [max_batch, ring],
# both by slot of the ring, and order uint8 [max_batch, num_heads_kv, 128] of the oldest tokens there

STATE = ("score", "seen", "order")


def allocate(cache) -> None:
    """Give a cache its scores; None where its format stores tokens by position."""
    cache.score = cache.seen = cache.order = None
    if cache.format.orders_tokens:
        ring, device = cache.ring_k.shape[:3], cache.device
        cache.score = torch.zeros(ring, dtype=torch.float32, device=device)
        cache.seen = torch.zeros((ring[0], ring[2]), dtype=torch.int32, device=device)
        cache.order = by_position(device).repeat(*ring[:2], 1)


def by_position(device: torch.device) -> torch.Tensor:
    return torch.arange(layout.PAGE_TOKENS, dtype=torch.uint8, device=device)


def check_queries(cache, q: torch.Tensor, lse: torch.Tensor | None, lead: tuple[int, ...],
                  lse_shape: tuple[int, ...]) -> None:
    """Raise unless the format orders tokens and these are queries [*lead, num_heads, head_dim] and their lse."""
    if not cache.format.orders_tokens:
        raise ValueError(f"q: got queries for format {cache.format}, whose pages hold tokens by position, supported: "
                         "formats that order tokens by significance (k4v2-boost)")
    heads = q.shape[-2]
    if heads == 0 or heads % cache.num_heads_kv:
        raise ValueError(f"q: {heads} heads, supported: multiples of num_heads_kv = {cache.num_heads_kv}")
    check_tensor("q", q, (*lead, heads, cache.head_dim), (cache.dtype, torch.float32), cache.device)
    if lse is not None:
        check_tensor("lse", lse, lse_shape, (torch.float32,), cache.device)


class OpenScores:
    """The scores of a row's open tokens while a call adds tokens and packs blocks; nothing is written before ``write``.

    Args:
        cache, row: whose scores.
        new: tokens that the call adds behind those that are open.
        blocks: blocks of 128 that it packs, oldest first.
        observed: what the call's queries say of all open tokens, old and new; None: nothing.
        ring_row: the row of scores, which are those of a ring's tokens; None: ``row``.

    ``orders``: uint8 [blocks, num_heads_kv, 128]. The first block has the order of the last ``manage``, as a step on a
    device has, unless the call brings queries.
    """

    def __init__(self, cache, row: int, new: int, blocks: int, observed: Scores | None,
                 ring_row: int | None = None):
        n_sink, n_qk, _, n_tok = (int(count[row]) for count in cache.counts)
        row = row if ring_row is None else ring_row
        self.cache, self.row, self.boosted = cache, row, cache.format.v.boosted
        held = torch.arange(n_qk, n_tok - n_sink, device=cache.device) % cache.seen.shape[1]
        score = torch.nn.functional.pad(cache.score[row][:, held], (0, new))
        seen = torch.nn.functional.pad(cache.seen[row, held], (0, new))
        if observed is not None:
            score, seen = score + observed.score, seen + observed.seen
        mean = means(score, seen)
        packed = blocks * layout.PAGE_TOKENS
        self.orders = order_of(mean[:, :packed].unflatten(1, (blocks, layout.PAGE_TOKENS)).transpose(0, 1),
                               self.boosted) if blocks else None
        if blocks and observed is None:
            self.orders[0] = cache.order[row]
        start, length = n_qk + packed, score.shape[1] - packed
        slots = torch.arange(start, start + length, device=cache.device) % cache.seen.shape[1]
        self.score, self.seen = torch.zeros_like(cache.score[row]), torch.zeros_like(cache.seen[row])
        self.score[:, slots], self.seen[slots] = score[:, packed:], seen[packed:]
        self.order = cache.order[row]
        if blocks or observed is not None:  # a step without queries leaves ranking to the next manage
            self.order = _next_order(mean[:, packed:] if observed is not None else mean[:, :0], self.boosted)

    def write(self, journal: Journal) -> None:
        for name in STATE:
            journal.write(getattr(self.cache, name)[self.row], getattr(self, name))


def _next_order(mean: torch.Tensor, boosted: int) -> torch.Tensor:
    """The order of the oldest 128 of these tokens [num_heads_kv, n]; of fewer: by position."""
    if mean.shape[1] < layout.PAGE_TOKENS:
        return by_position(mean.device).expand(len(mean), -1)
    return order_of(mean[:, : layout.PAGE_TOKENS], boosted)


def prompt_scores(cache, row: int, q: torch.Tensor, k: torch.Tensor, options: Attention,
                  lse: torch.Tensor | None) -> Scores:
    """What 64 queries of new tokens say of a row's open tokens, old and new.

    q: [tokens, num_heads, head_dim]; k: [tokens, num_heads_kv, head_dim] as the cache will hold them; lse: fp32
    [num_heads, tokens] over all that the queries see, or None.
    """
    n_sink, n_qk, _, n_tok = (int(count[row]) for count in cache.counts)
    fresh = min(len(k), cache.sinks - n_sink)
    first = n_sink + fresh + n_qk  # position of the oldest open token afterwards
    picked = prompt_queries(len(k))
    at, q = n_tok + picked, q[picked.to(q.device)]
    keys = k.transpose(0, 1)
    if lse is None:
        keys = torch.cat((cache.gather(row)[0], keys.float()), 1) if n_tok else keys
        every = observe(q, at, keys, 0, options)
        return Scores(every.score[:, first:], every.seen[first:])
    ring = cache.ring_k[row]
    held = torch.arange(n_qk, n_tok - n_sink, device=cache.device) % ring.shape[1]
    keys = torch.cat((ring[:, held], keys[:, fresh:]), 1)
    return observe(q, at, keys, first, options, lse[:, picked.to(lse.device)])


def manage(cache, rows: np.ndarray, q: torch.Tensor, lse: torch.Tensor, options: Attention, every: int) -> None:
    """Score the open tokens of rows that are due by the queries of the step just decoded, and rank the oldest 128.

    q: [batch, q_len, num_heads, head_dim]; lse: fp32 [batch, num_heads, q_len]. A row is due when a step's tokens
    bring its length to or over a multiple of ``every``.
    """
    q_len, lengths = q.shape[1], cache.counts.n_tok[rows]
    if len(rows) != len(q) or not 1 <= q_len <= cache.max_q_len or (lengths < q_len).any():
        raise ValueError(f"q: got {len(q)} sequences of {q_len} queries, supported: one for each of the {len(rows)} "
                         f"rows, 1 to max_q_len = {cache.max_q_len} queries, of tokens in the cache")
    if lse is None:
        raise TypeError("lse: got None, supported: a torch.Tensor [batch, num_heads, q_len], as decode gives it")
    if every < 1:
        raise ValueError(f"every: got {every}, supported: 1 or more steps")
    done: list[OpenScores] = []
    for b, row in enumerate(rows.tolist()):
        n_sink, n_qk, _, n_tok = (int(count[row]) for count in cache.counts)
        if n_tok // every == (n_tok - q_len) // every:
            continue
        ring = cache.ring_k[row]
        held = torch.arange(n_qk, n_tok - n_sink, device=cache.device) % ring.shape[1]
        at = torch.arange(n_tok - q_len, n_tok, device=cache.device)
        observed = observe(q[b], at, ring[:, held], n_sink + n_qk, options, lse[b])
        done.append(OpenScores(cache, row, 0, 0, observed))
    with Journal() as journal:
        for scores in done:
            scores.write(journal)


def manage_in_graph(cache, q: torch.Tensor, lse: torch.Tensor, options: Attention, every: int) -> None:
    """``manage`` of rows 0 .. batch - 1 from the device's counters alone: it may be captured in a CUDA graph. Rows that
    are not due write what was there."""
    batch, q_len = q.shape[:2]
    if batch > cache.max_batch or not 1 <= q_len <= cache.max_q_len or lse is None or every < 1:
        raise ValueError(f"q, every: got {batch} sequences of {q_len} queries, lse {'' if lse is not None else 'None'} "
                         f"and {every}, supported: at most max_batch = {cache.max_batch}, 1 to max_q_len = "
                         f"{cache.max_q_len}, the lse of decode and 1 or more steps")
    n_sink, n_qk, n_tok = (x[:batch].long() for x in (cache.n_sink, cache.n_qk, cache.n_tok))
    acts = n_tok // every > (n_tok - q_len) // every
    new, is_held = observe_ring(q, cache.ring_k[:batch], n_qk, n_sink + n_qk, n_tok, lse, options)
    score, seen = added(Scores(cache.score[:batch], cache.seen[:batch]), new, is_held, acts)
    oldest = (n_qk[:, None] + torch.arange(layout.PAGE_TOKENS, device=q.device)) % seen.shape[1]
    mean = means(score.gather(2, oldest[:, None].expand(-1, score.shape[1], -1)), seen.gather(1, oldest)[:, None])
    has_block = n_tok - n_sink - n_qk >= layout.PAGE_TOKENS
    order = torch.where(has_block[:, None, None], order_of(mean, cache.format.v.boosted), by_position(q.device))
    cache.score[:batch], cache.seen[:batch] = score, seen
    cache.order[:batch] = torch.where(acts[:, None, None], order, cache.order[:batch])


def cut(journal: Journal, cache, src: int, dst: int, start: int, stop: int) -> None:
    """Give row dst the scores of row src for open tokens ``start`` to ``stop - 1``, counted after the sinks, and no
    others; src may be dst."""
    if cache.score is None:
        return
    kept = torch.zeros(cache.seen.shape[1], dtype=torch.bool, device=cache.device)
    kept[torch.arange(start, max(start, stop), device=cache.device) % len(kept)] = True
    journal.write(cache.score[dst], torch.where(kept, cache.score[src], 0.0))
    journal.write(cache.seen[dst], torch.where(kept, cache.seen[src], 0))
    order = cache.order[src] if stop - start >= layout.PAGE_TOKENS else by_position(cache.device)
    journal.write(cache.order[dst], order.expand_as(cache.order[dst]))
