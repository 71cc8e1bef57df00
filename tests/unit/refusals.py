"""Good arguments of a cache, and the check that a bad call raises, says why and changes nothing."""

import pytest
import torch

from lowbit_attn import KVCache
from lowbit_attn.testing import assert_same_bytes

HEADS, DIM = 2, 64


def state(cache: KVCache) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in vars(cache).items() if isinstance(x, torch.Tensor)}


def refused(cache, call, error, *words) -> None:
    """The call raises this error, whose message has these words in this order, and leaves the cache as it was."""
    before = state(cache)
    with pytest.raises(error) as caught:
        call()
    message, at = str(caught.value), 0
    for word in words:
        assert word in message[at:], f"{word!r} is missing (or out of order) in: {message}"
        at = message.index(word, at)
    for name, value in before.items():
        assert_same_bytes(name, getattr(cache, name), value)


GOOD = dict(format="k4v4", num_pages=2, num_heads_kv=2, head_dim=64)
