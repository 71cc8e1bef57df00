"""Which implementation serves a call: the only place that asks what device and architecture there is."""

from lowbit_attn import reference
from lowbit_attn.cache import KVCache


def decode(q, cache: KVCache, out, lse, softmax_scale, num_splits, path) -> None:
    """Run the chosen path into out and lse; raise NotImplementedError with the reasons if there is none."""
    if path == "reference" or (path is None and cache.device.type == "cpu"):
        o, logsumexp = reference.decode(q, cache, softmax_scale)
        out.copy_(o)
        lse.copy_(logsumexp)
        return
    reasons = why_not(cache, q.shape[2], q.shape[1], path)
    raise NotImplementedError("; ".join(reasons))


def why_not(cache: KVCache, num_heads: int, q_len: int = 1, path: str | None = None) -> list[str]:
    """Reasons why no kernel serves such a call; empty if one does."""
    return [f"device {cache.device}: kernels need a CUDA device; supported: path='reference'"]
