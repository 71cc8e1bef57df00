"""The compiled merge of two levels without a GPU: its PTX, run on the CPU, against the reference's merge."""

import struct

import pytest
import torch

from lowbit_attn import kernels, reference
from sim.ptx import build
from sim.ptx import program as ptx

TENSORS = ("lse", "lse_high", "lse_low", "o_high", "o_low", "out", "sink_logits")  # a kernel's parameters, by name
THREADS = 128


def run(head_dim: int, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, q_len, ratio, _ = state["o_high"].shape
    memory = ptx.GlobalMemory([state[name] for name in TENSORS])
    numbers = {"batch": len(state["out"]), "heads": state["out"].shape[2], "logits": len(state["sink_logits"]),
               "q_len": q_len, "ratio": ratio, "rows": rows}
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + start) for start in memory.starts]
    parameters += [struct.pack("<i", numbers[name]) for name in ("heads", "logits", "q_len", "ratio", "rows")]
    code = build.program(kernels.merge_key("sm_90", "float16", head_dim))
    blocks = -(-rows * q_len * ratio // (THREADS // (head_dim // 8)))
    for block in range(blocks):
        ptx.run_grid([ptx.Cta(code, parameters, memory.memory, (block, 0, 0), (blocks, 1, 1))], THREADS)
    return memory.tensor(5, state["out"]), memory.tensor(0, state["lse"])


@pytest.mark.parametrize("head_dim, batch, heads_kv, ratio, q_len", [
    (128, 2, 3, 4, 1), (64, 1, 2, 3, 4), (96, 2, 2, 1, 3), (256, 1, 1, 8, 2)])
@pytest.mark.parametrize("has_sinks", (False, True))
def test_merge_is_the_references(head_dim, batch, heads_kv, ratio, q_len, has_sinks):
    rows, heads = batch * heads_kv, heads_kv * ratio
    o = torch.randn(2, rows, q_len, ratio, head_dim).half()
    lse = 3 * torch.randn(2, rows, ratio, q_len)
    lse[0, 0], lse[1, -1], lse[:, 0, 0, 0] = -torch.inf, -torch.inf, -torch.inf  # levels without tokens, and both
    o[0, 0], o[:, 0, 0, 0] = torch.nan, torch.nan
    sinks = torch.randn(heads) if has_sinks else torch.tensor([-torch.inf])
    state = dict(o_high=o[0], o_low=o[1], lse_high=lse[0], lse_low=lse[1], sink_logits=sinks,
                 out=torch.full((batch, q_len, heads, head_dim), torch.nan).half(),
                 lse=torch.full((batch, heads, q_len), torch.nan))
    parts = o.unflatten(1, (batch, heads_kv)).transpose(2, 3).reshape(2, batch, q_len, heads, head_dim)
    parts = torch.cat((parts.float(), torch.zeros(1, *parts.shape[1:])))
    logits = sinks.expand(heads)[None, None, :, None].expand(1, batch, heads, q_len)
    want, want_lse = reference.merge_states(parts, torch.cat((lse.reshape(2, batch, heads, q_len), logits)))
    got, got_lse = run(head_dim, state)
    torch.testing.assert_close(got.float(), want, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-5, atol=1e-5)
