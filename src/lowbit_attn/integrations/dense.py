"""Attention over K and V that are tensors: a chunk's own tokens, and the tail of a sliding-window layer.

Shapes: q [batch, num_heads, q_len, head_dim] are the last q_len tokens of k, v [batch, num_heads_kv, tokens,
head_dim]; the first ``pads[b]`` tokens of row b are padding that nobody sees. What a padding query gives has no
meaning.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from lowbit_attn import reference
from lowbit_attn.reference import Attention

QUERY_BLOCK = 512  # queries whose scores or mask exist at once


def attend(q, k, v, options: Attention, pads: Sequence[int], n_sink: int = 0) -> torch.Tensor:
    """Causal attention, [batch, q_len, num_heads, head_dim] in q's dtype; torch's kernels where they serve it.

    n_sink: first tokens of every row that ``options.keep_sinks`` keeps visible.
    """
    if options.softcap is not None or options.sink_logits is not None or options.keep_sinks:
        return with_lse(q, k, v, options, pads, n_sink)[0].to(q.dtype)
    q_len, tokens = q.shape[2], k.shape[2]
    if not any(pads) and q_len == tokens and (options.window or tokens) >= tokens:
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=options.softmax_scale, enable_gqa=True)
        return out.transpose(1, 2)
    blocks = []
    for start in range(0, q_len, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q_len)
        seen = slice(_first_seen(tokens - q_len + start, options.window), tokens - q_len + stop)
        blocks.append(_masked(q[:, :, start:stop], k[:, :, seen], v[:, :, seen], options,
                              [pad - seen.start for pad in pads]))
    return torch.cat(blocks, 2).transpose(1, 2)


def with_lse(q, k, v, options: Attention, pads: Sequence[int], n_sink: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp32: (o [batch, q_len, num_heads, head_dim], lse [batch, num_heads, q_len])."""
    batch, num_heads, q_len, head_dim = q.shape
    offset = k.shape[2] - q_len
    o = q.new_zeros((batch, q_len, num_heads, head_dim), dtype=torch.float32)
    lse = q.new_full((batch, num_heads, q_len), -torch.inf, dtype=torch.float32)
    for b in range(batch):
        for start in range(max(0, pads[b] - offset), q_len, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, q_len)
            first = 0 if options.keep_sinks else _first_seen(offset + start, options.window)
            seen = slice(max(first, pads[b]), offset + stop)
            o[b, start:stop], lse[b, :, start:stop] = reference.attention(
                q[b, :, start:stop].transpose(0, 1), k[b, :, seen], v[b, :, seen], options, n_sink)
    return o, lse


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _masked(q, k, v, options: Attention, pads: Sequence[int]) -> torch.Tensor:
    """torch's attention with an explicit mask where one is needed."""
    q_len, tokens = q.shape[2], k.shape[2]
    mask, gqa = None, {"enable_gqa": True}
    if q_len > 1 or any(pad > 0 for pad in pads):
        position = torch.arange(tokens, device=q.device)
        seen = reference.visible(q_len, tokens, options, device=q.device)
        real = position >= torch.tensor(pads, device=q.device)[:, None, None, None]
        # a padding query sees itself, so that its softmax is defined
        mask = seen & (real | (position == position[-q_len:, None]))
        # torch's fast kernels take a mask or grouped heads, not both
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        gqa = {}
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.softmax_scale, **gqa)
