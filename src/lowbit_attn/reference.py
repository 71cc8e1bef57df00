"""fp32 attention on the CPU's terms: short, slow, no DSL. Everything fast is compared with this."""

import torch


def attention(q, k, v, softmax_scale=None, causal=True):
    """Attention of the last queries of a sequence over its keys.

    q: [q_len, num_heads, head_dim]; k, v: [num_heads_kv, seqlen, head_dim]; any float dtype.
    causal: query j sees positions <= seqlen - q_len + j, else every position.
    Returns o fp32 [q_len, num_heads, head_dim] and lse fp32 [num_heads, q_len] (natural log). A row
    that sees nothing gives o = 0 and lse = -inf.
    """
    q_len, num_heads, head_dim = q.shape
    num_heads_kv, seqlen, _ = k.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q = q.float().transpose(0, 1).reshape(num_heads_kv, -1, head_dim)  # rows: (query head of the group, query)
    scores = q @ k.float().transpose(1, 2) * scale
    if causal and q_len > 1:
        position = torch.arange(seqlen, device=q.device)
        last = torch.arange(seqlen - q_len, seqlen, device=q.device).repeat(num_heads // num_heads_kv)
        scores = scores.masked_fill(position > last[:, None], float("-inf"))
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    o = p @ v.float()
    return o.reshape(num_heads, q_len, head_dim).transpose(0, 1), lse.reshape(num_heads, q_len)


def merge_states(o, lse):
    """Merge partial attention results over disjoint sets of tokens.

    o: [num_states, batch, q_len, num_heads, head_dim], each normalised; lse: fp32
    [num_states, batch, num_heads, q_len], natural log, -inf for an empty state (its o is ignored).
    Returns (o, lse) without the first axis; o in fp32.
    """
    merged = lse.logsumexp(0)
    weight = torch.exp(lse - torch.where(merged == float("-inf"), 0.0, merged))
    weight = weight.transpose(2, 3)[..., None]
    return (torch.where(weight == 0, 0.0, o.float()) * weight).sum(0), merged


def decode(q, cache, softmax_scale=None):
    """Decode attention over every sequence of a KVCache, by its dequantized values.

    q: [batch, q_len, num_heads, head_dim], the last q_len tokens of rows 0..batch-1 of the cache.
    Returns o fp32 of q's shape and lse fp32 [batch, num_heads, q_len].
    """
    rows = [attention(q[b], *cache.gather(b), softmax_scale) for b in range(q.shape[0])]
    return torch.stack([o for o, _ in rows]), torch.stack([lse for _, lse in rows])
