"""How much each token's errors count: by the attention that queries of the same text give it."""

import torch

from lowbit_attn.layout import PAGE_TOKENS

QUERY_STEP = 4  # one query of so many tells how much attention tokens get
LEAST_SHARE = 0.05  # of a token's weight, beside a mean of 1: what nobody looked at yet may be looked at


def attention_squares(query: torch.Tensor, keys: torch.Tensor, pad: int, scale: float,
                      ) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the square attention probabilities that tokens get from every fourth query of a step.

    query: [num_heads, q_len, head_dim], of the last q_len tokens of keys [num_heads_kv, tokens, head_dim], whose first
    ``pad`` are padding. Returns (fp32 [num_heads_kv, tokens], int64 [tokens], how many of those queries see a token).
    """
    heads, tokens, _ = keys.shape
    token = torch.arange(tokens, device=keys.device)
    asks = token[tokens - query.shape[1] :]
    asks = asks[(asks >= pad) & ((asks - pad) % QUERY_STEP == 0)]
    squares = torch.zeros(heads, tokens, device=keys.device)
    for some in asks.split(PAGE_TOKENS):
        q = query[:, some - tokens].float().unflatten(0, (heads, -1))  # [heads, queries of a KV head, some, head_dim]
        scores = q @ keys.float().mT[:, None] * scale
        unseen = (token > some[:, None]) | (token < pad)
        squares += scores.masked_fill_(unseen, -torch.inf).softmax(-1).square().sum((1, 2))
    return squares, (asks[:, None] >= token).sum(0)


def token_weights(squares: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """How much each token's errors count, fp32 [num_heads_kv, tokens] of a mean near 1: the root mean square of the
    attention that it gets. Arguments: sums of ``attention_squares`` over the steps of a prompt; tokens that fewer than
    a 16th of the queries see count as if so many did not look."""
    share = (squares / seen.clamp(min=max(1, int(seen.max()) // 16))).sqrt()
    return share / share.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) + LEAST_SHARE
