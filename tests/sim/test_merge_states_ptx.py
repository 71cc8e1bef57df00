"""The compiled merge of several ranks' states without a GPU: its PTX, run on the CPU, against the reference's merge."""

import struct

import pytest
import torch

from lowbit_attn import kernels, reference
from lowbit_attn.exchange import part_bytes
from sim.ptx import build
from sim.ptx import program as ptx

THREADS = 128


def run(head_dim: int, every: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """every: the buffer [states, bytes] that both views of the states read."""
    memory = ptx.GlobalMemory([lse, every, out])
    at = [struct.pack("<Q", ptx.GLOBAL_BASE + start) for start in memory.starts]
    batch, q_len, heads, _ = out.shape
    parameters = [at[0], at[1], at[1], at[2]]  # lse, lse_states, o_states, out
    parameters += [struct.pack("<i", n) for n in (every.shape[1] // 16, batch, heads, q_len, len(every))]
    key = kernels.merge_states_key("sm_90", "float16", head_dim)
    assert [name for _, name in build.parameters(key)] == ["lse", "lse_states", "o_states", "out", "accesses", "batch",
                                                           "heads", "q_len", "states"]
    blocks = -(-batch * q_len * heads // (THREADS // (head_dim // 8)))
    for block in range(blocks):
        ptx.run_grid([ptx.Cta(build.program(key), parameters, memory.memory, (block, 0, 0), (blocks, 1, 1))], THREADS)
    return memory.tensor(2, out), memory.tensor(0, lse)


@pytest.mark.parametrize("states, head_dim, batch, heads, q_len", [
    (2, 128, 2, 4, 1), (3, 64, 1, 3, 3), (1, 96, 2, 2, 1), (8, 256, 1, 4, 2), (2, 128, 1, 1, 1)])
def test_merge_is_the_references(states, head_dim, batch, heads, q_len):
    o = torch.randn(states, batch, q_len, heads, head_dim).half()
    lse = 5 * torch.randn(states, batch, heads, q_len)
    lse[0, 0], o[0, 0] = -torch.inf, torch.nan  # a rank without tokens
    lse[:, -1, -1, -1], o[:, -1, -1, -1] = -torch.inf, torch.nan  # a row without tokens on any rank
    every = torch.full((states, part_bytes(o.shape[1:], o.dtype)), 0xFF, dtype=torch.uint8)
    o_bytes, lse_bytes = (x[0].nbytes for x in (o, lse))
    every[:, :o_bytes] = o.view(torch.uint8).reshape(states, -1)
    every[:, o_bytes : o_bytes + lse_bytes] = lse.view(torch.uint8).reshape(states, -1)
    got, got_lse = run(head_dim, every, torch.full_like(o[0], torch.nan), torch.full_like(lse[0], torch.nan))
    want, want_lse = reference.merge_states(o, lse)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-5, atol=1e-5)
    assert not got[-1, -1, -1].any() and got_lse[-1, -1, -1] == -torch.inf
