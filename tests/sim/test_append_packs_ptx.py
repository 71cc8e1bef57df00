"""Steps that pack blocks, by the compiled append on the CPU: a whole cache afterwards, bit for bit the CPU's."""

import copy
import struct

import pytest
import torch

from lowbit_attn import KVCache, kernels
from lowbit_attn.view import STEP_STATE
from sim.ptx import build
from sim.ptx import program as ptx

HEAD_DIM = 64


def filled(name: str, heads: int, lengths: tuple[int, ...]) -> tuple[KVCache, torch.Tensor, torch.Tensor]:
    """(a cache whose next step packs, K, V): rows were filled by steps, so that full blocks are still in the ring."""
    cache = KVCache(name, 8, heads, HEAD_DIM, sinks=5, max_batch=len(lengths), max_q_len=4)
    k, v = torch.randn(2, len(lengths), max(lengths) + 4, heads, HEAD_DIM).half()
    for row, length in enumerate(lengths):
        for at in range(0, length, 4):
            some = slice(at, min(at + 4, length))
            cache.append(k[row : row + 1, some], v[row : row + 1, some], seqs=[row])
    cache.reserve(range(len(lengths)), [length + 4 for length in lengths])
    return cache, k, v


def step(cache: KVCache, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state after the kernel's step."""
    from lowbit_attn.device.step import StepGeometry

    key = kernels.append_key("sm_90", "float16", HEAD_DIM, cache.format, None)
    geometry = StepGeometry(cache.format, HEAD_DIM, key.variant.removeprefix("search_"), "float16")
    state = {name: getattr(cache, name) for name in STEP_STATE}
    tensors = dict(sorted({**state, "rows": rows, "x_k": k, "x_v": v}.items()))
    memory = ptx.GlobalMemory(list(tensors.values()))
    starts = dict(zip(tensors, memory.starts))
    pointers = sorted({**starts, "pool_meta": starts["pool"]}.items())  # parameters come by name, pointers first
    batch, tokens, heads, _ = k.shape
    numbers = {"batch": batch, "entries": cache.table.shape[1], "head_stride": cache.strides.head, "heads": heads,
               "marks": len(cache.faults), "num_sinks": cache.sinks, "page_stride": cache.strides.page,
               "seqs": cache.max_batch, "sink_slots": cache.sink_k.shape[2], "slots_k": cache.ring_k.shape[2],
               "slots_v": cache.ring_v.shape[2], "tokens": tokens, "window_k": cache.window_k,
               "window_v": cache.window_v}
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + start) for _, start in pointers]
    parameters += [struct.pack("<i", number) for number in numbers.values()]
    grid = min(2 * heads * batch, geometry.max_blocks)
    for block in range(grid):
        cta = ptx.Cta(build.program(key), parameters, memory.memory, (block, 0, 0), (grid, 1, 1), ("relaxed", "add"))
        ptx.run_grid([cta], geometry.threads)
    return {name: memory.tensor(i, x) for i, (name, x) in enumerate(tensors.items()) if name in state}


@pytest.mark.parametrize("name, heads, lengths, tokens, values", [
    ("k2v2", 1, (136, 137), 1, True), ("kitty", 1, (136, 137), 1, False), ("kitty", 1, (262, 136), 3, True)],
    ids=("both-sides", "keys-alone", "values-beside-keys-of-another-row"))
def test_a_step_that_packs(name, heads, lengths, tokens, values):
    """values: whether V is packed, too."""
    cache, k, v = filled(name, heads, lengths)
    new = [torch.stack([x[row, lengths[row] : lengths[row] + tokens] for row in (1, 0)]) for x in (k, v)]
    want = copy.deepcopy(cache)
    want.append(*new, seqs=[1, 0])
    packed = [bool((getattr(want, n) > getattr(cache, n)).any()) for n in ("n_qk", "n_qv")]
    assert packed == [True, values]
    for field, found in step(cache, *new, torch.tensor([1, 0], dtype=torch.int32)).items():
        assert torch.equal(found, getattr(want, field)), field
