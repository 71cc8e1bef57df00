"""Arguments of the torch operators, and the comparison of two decode calls' results."""

from lowbit_attn import KVCache, ops
from lowbit_attn.testing import assert_same_bytes


def arguments(cache: KVCache, sink_logits=None, softmax_scale=None, softcap=None, window=None, keep_sinks=False):
    """An operator's arguments after q and outputs."""
    state = [getattr(cache, name) for name in ops.STATE]
    return (*cache.batch_rows(cache.max_batch), *state, sink_logits, cache.format.name, list(cache.strides),
            softmax_scale, softcap, window, keep_sinks, None, None)


def assert_same(got, want):
    for name, ours, theirs in zip(("o", "lse"), got, want):
        assert_same_bytes(name, ours, theirs)


def step_arguments(cache: KVCache):
    """The append operator's arguments after ring_rows."""
    return (*(getattr(cache, name) for name in ops.STEP_STATE), cache.format.name, list(cache.strides),
            *(getattr(cache, name) for name in ops.STEP_VALUES))
