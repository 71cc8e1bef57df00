"""What tests of level caches compare: all that a cache and its pool hold."""

import torch

# what a step's kernels leave for each other, and nothing else reads
SCRATCH = ("places", "needs", "starts", "goes", "arrivals")


def state(cache) -> dict[str, torch.Tensor]:
    """All tensors of a cache and its pool; of stages and rings what holds tokens."""
    found = {name: x.clone() for name, x in vars(cache).items() if isinstance(x, torch.Tensor) and name not in SCRATCH}
    for v in range(len(cache.half)):
        row = v // cache.num_heads_kv
        for name in ("hi_k", "hi_v"):
            held = torch.arange(found[name].shape[1])
            staged = (held >= cache.sinks) & (held < cache.sinks + int(cache.n_stage[0, v]))
            found[name][v, ~((held < int(cache.n_sink[row])) | staged)] = 0
        ring = torch.ones(cache.slots, dtype=torch.bool)
        ring[cache.slots_of(row).cpu()] = False
        for name, empty in (("lo_k", slice(int(cache.n_stage[1, v]), None)), ("ring_k", ring)):
            found[name][v, empty] = found[name.replace("_k", "_v")][v, empty] = 0
    for i, (memory, free) in enumerate(zip(cache.pool.memory, cache.pool.lists)):
        found |= {f"memory{i}": memory.clone(), f"ids{i}": free.ids.clone(), f"ends{i}": free.ends.clone()}
    return found


def check_equal(one: dict, other: dict) -> None:
    for name, x in one.items():
        assert torch.equal(x, other[name]), name
