"""The compiled copy of an engine's 16-bit tokens without a GPU: its PTX, run on the CPU, moves the bytes that it is
told to move and no others."""

import pytest
import torch

from lowbit_attn import kernels
from sim.ptx import calls

SINKS, SLOTS, ROWS, RINGS, CAPACITY = 5, 128, 3, 4, 120
# source, row, first, tokens, dest, sides
ITEMS = [(0, 0, 2, 32, 0, 3), (0, 1, 34, 7, 40, 1), (1, 1, 0, 5, 48, 3), (1, 2, 3, 2, 60, 2), (2, 2, 300, 32, 64, 3),
         (2, 0, 127, 2, 100, 2), (2, 1, 5, 1, 110, 1), (0, 0, 0, 0, 112, 3)]


def bits(*shape: int) -> torch.Tensor:
    return torch.randint(1, 2**15, shape, dtype=torch.int16)


@pytest.mark.parametrize("head_dim, dtype, heads", [(128, "float16", 2), (64, "bfloat16", 3), (96, "float16", 2),
                                                    (256, "float16", 1)])
def test_copies_are_the_tokens_of_their_source(head_dim, dtype, heads):
    x = {f"x_{side}": bits(41, heads * head_dim + 8 * room) for room, side in ((3, "k"), (0, "v"))}
    rings = bits(RINGS, 2, heads, SINKS + SLOTS, head_dim)  # as an engine has them
    parts = {f"{kind}_{side}": rings[:, i, :, at:].contiguous() for i, side in enumerate("kv")
             for kind, at in (("sink", 0), ("ring", SINKS))}
    tensors = x | parts | {
        "ring_rows": torch.tensor([3, 1, 2], dtype=torch.int32),
        "items": torch.tensor(ITEMS, dtype=torch.int32).T.contiguous(),
        **{name: torch.zeros(CAPACITY, heads, head_dim, dtype=torch.int16) for name in ("keys", "values")}}
    numbers = {"count": len(ITEMS), "heads": heads, "slots_k": SLOTS, "slots_v": SLOTS,
               **{f"{name}_token": rows.stride(0) for name, rows in x.items()},
               **{f"{name}_{axis}": tensors[name].stride(i) for name in parts
                  for i, axis in enumerate(("row", "head"))}}
    found = calls.run(kernels.paged_copy_key("sm_90", dtype, head_dim), (2, len(ITEMS)), 256, tensors, numbers)
    for i, (name, side) in enumerate((("keys", "k"), ("values", "v"))):
        want = torch.zeros(CAPACITY, heads, head_dim, dtype=torch.int16)
        for source, row, first, count, dest, sides in ITEMS:
            own = x[f"x_{side}"][:, : heads * head_dim].unflatten(1, (heads, head_dim))
            ring = rings[tensors["ring_rows"][row], i].transpose(0, 1)
            held = (own, ring[:SINKS], ring[SINKS:].repeat(4, 1, 1))[source]
            if sides >> i & 1:
                want[dest : dest + count] = held[first : first + count]
        assert torch.equal(found[name], want), name
