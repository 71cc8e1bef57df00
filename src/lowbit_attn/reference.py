"""fp32 attention on the CPU's terms: short, slow, no DSL. Everything fast is compared with this."""

from dataclasses import dataclass

import torch

from lowbit_attn.precision import full_precision


@dataclass(frozen=True)
class Attention:
    """What a call asks for beside softmax(q k) v.

    softmax_scale: factor of q k; None: head_dim ** -0.5.
    softcap: c > 0 turns a scaled logit x into c tanh(x / c) (Gemma 2); None: no cap.
    window: each query sees the last ``window`` positions, its own included (Mistral); None: all.
    keep_sinks: the cache's sink tokens are seen however far they are behind (StreamingLLM).
    sink_logits: fp32 [num_heads]; exp(sink_logits) joins the denominator of each head's softmax (gpt-oss), and the
        returned lse; None: nothing does.
    """

    softmax_scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    keep_sinks: bool = False
    sink_logits: torch.Tensor | None = None


PLAIN = Attention()


def visible(q_len: int, seqlen: int, options: Attention = PLAIN, n_sink: int = 0, device="cpu") -> torch.Tensor:
    """Which positions the last q_len queries of a sequence see: bool [q_len, seqlen].

    Query j sees positions <= seqlen - q_len + j; with a window only the last ``window`` of them, and the first
    ``n_sink`` if sinks are kept.
    """
    position = torch.arange(seqlen, device=device)
    last = torch.arange(seqlen - q_len, seqlen, device=device)[:, None]
    seen = position <= last
    if options.window is not None:
        seen &= (position > last - options.window) | ((position < n_sink) & options.keep_sinks)
    return seen


def attention(q, k, v, options: Attention = PLAIN, n_sink: int = 0, causal: bool = True, seen=None):
    """Attention of the last queries of a sequence over its keys.

    q: [q_len, num_heads, head_dim]; k, v: [num_heads_kv, seqlen, head_dim], the first n_sink tokens sinks; any float
    dtype. causal: query j sees what ``visible`` says, else every position; seen: bool [q_len, seqlen], which ones in
    place of that. Returns o fp32 [q_len, num_heads, head_dim] and lse fp32 [num_heads, q_len] (natural log). A row that
    sees nothing gives o = 0 and lse = -inf.
    """
    with full_precision(q.device.type):
        if seen is None and causal and (len(q) > 1 or options.window is not None):
            seen = visible(len(q), k.shape[1], options, n_sink, q.device)
        return _attention(q, k, v, options, seen)


def _attention(q, k, v, options: Attention, seen):
    q_len, num_heads, head_dim = q.shape
    num_heads_kv = k.shape[0]
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    q = q.float().transpose(0, 1).reshape(num_heads_kv, -1, head_dim)  # rows: (query head of the group, query)
    scores = q @ k.float().transpose(1, 2) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen.repeat(num_heads // num_heads_kv, 1), float("-inf"))
    lse = scores.logsumexp(-1)
    if options.sink_logits is not None:
        lse = torch.logaddexp(lse, options.sink_logits.float().reshape(num_heads_kv, -1).repeat_interleave(q_len, 1))
    p = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    o = p @ v.float()
    return o.reshape(num_heads, q_len, head_dim).transpose(0, 1), lse.reshape(num_heads, q_len)


def masked_attention(q, k, v, seen, options: Attention = PLAIN):
    """Attention of a batch over a few tokens each, of which every query sees its own.

    q: [batch, q_len, num_heads, head_dim]; k, v: [batch, n, num_heads_kv, head_dim]; seen: bool [batch, q_len, n].
    Only the scale and the cap of the options count. Returns o fp32 of q's shape and lse fp32 [batch, num_heads, q_len];
    a query that sees nothing gives o = 0 and lse = -inf, whatever is in k and v.
    """
    batch, q_len, num_heads, head_dim = q.shape
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    k, v = (x.float().repeat_interleave(num_heads // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bnhd->bhqn", q.float(), k) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = torch.where(seen[:, None], scores, float("-inf"))
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    v = torch.where(seen.any(1)[..., None, None], v, 0.0)
    return torch.einsum("bhqn,bnhd->bqhd", p, v), lse


def merge_states(o, lse):
    """Merge partial attention results over disjoint sets of tokens.

    o: [num_states, batch, q_len, num_heads, head_dim], each normalised; lse: fp32
    [num_states, batch, num_heads, q_len], natural log, -inf for an empty state (its o is ignored).
    Returns (o, lse) without the first axis; o in fp32.
    """
    with full_precision(lse.device.type):
        merged = lse.logsumexp(0)
        weight = torch.exp(lse - torch.where(merged == float("-inf"), 0.0, merged))
        weight = weight.transpose(2, 3)[..., None]
        return (torch.where(weight == 0, 0.0, o.float()) * weight).sum(0), merged


def decode(q, cache, options: Attention = PLAIN, rows=None):
    """Decode attention over sequences of a KVCache, by its dequantized values.

    q: [batch, q_len, num_heads, head_dim], rotated as the cache's keys; q[b] are the last q_len tokens of row rows[b]
    (int32 [batch]), by default of row b. Returns o fp32 of q's shape and lse fp32 [batch, num_heads, q_len]; a row that
    the cache does not have holds no tokens.
    """
    rows, ring_rows = cache.batch_rows(q.shape[0]) if rows is None else (rows, rows)
    found = []
    for b, (row, ring_row) in enumerate(zip(rows.tolist(), ring_rows.tolist())):
        exists = 0 <= row < len(cache.n_tok)
        k, v = cache.held(row, ring_row) if exists else 2 * (q.new_zeros((cache.num_heads_kv, 0, cache.head_dim)),)
        found.append(attention(q[b], k, v, options, int(cache.n_sink[row]) if exists else 0))
    return torch.stack([o for o, _ in found]), torch.stack([lse for _, lse in found])
