"""The compiled merge of rows without a GPU: its PTX, run on the CPU, against the reference's merge."""

import pytest
import torch

from lowbit_attn import kernels, reference
from sim.ptx import calls

THREADS, ROOM = 256, 24


def run(out, lse, more, more_lse, logits):
    """The kernel's result; tokens of ``out`` and heads of both lse have room between them, which nothing may touch."""
    tokens, heads, head_dim = out.shape
    key = kernels.merge_rows_key("sm_90", str(out.dtype).removeprefix("torch."), head_dim)
    held = torch.full((tokens, heads * head_dim + ROOM), torch.nan, dtype=out.dtype)
    held[:, : heads * head_dim] = out.flatten(1)
    held_lse, held_more_lse = (torch.cat((x, torch.full((heads, room), torch.nan)), 1)
                               for x, room in ((lse, 3), (more_lse, 5)))
    numbers = {"tokens": tokens, "heads": heads, "logits": len(logits), "out_token": held.shape[1],
               "lse_head": held_lse.shape[1], "more_lse_head": held_more_lse.shape[1]}
    rows = THREADS // 32 * (32 // (head_dim // 8))
    found = calls.run(key, (-(-tokens * heads // rows),), THREADS, {
        "out": held, "lse": held_lse, "more": more, "more_lse": held_more_lse, "sink_logits": logits}, numbers,
        sees_races=True)
    for name, was, width in (("out", held, heads * head_dim), ("lse", held_lse, tokens)):
        assert torch.equal(found[name][:, width:].view(torch.uint8), was[:, width:].contiguous().view(torch.uint8))
    return found["out"][:, : heads * head_dim].unflatten(1, (heads, head_dim)), found["lse"][:, :tokens]


@pytest.mark.parametrize("head_dim, dtype, tokens, heads, has_sinks", [
    (128, torch.float16, 5, 8, False), (64, torch.bfloat16, 19, 3, True), (96, torch.float16, 7, 4, True),
    (256, torch.float16, 3, 4, False), (128, torch.bfloat16, 1, 1, True)])
def test_merge_is_the_references(head_dim, dtype, tokens, heads, has_sinks):
    o = torch.randn(2, tokens, heads, head_dim).to(dtype)
    lse = 4 * torch.randn(2, heads, tokens)
    for side, head, token, none in ((1, 0, 0, -torch.inf), (0, -1, -1, -torch.inf), (1, -1, tokens // 2, torch.inf)):
        lse[side, head, token], o[side, token, head] = none, torch.nan  # no tokens
    logits = torch.randn(heads) if has_sinks else torch.tensor([-torch.inf])
    got, got_lse = run(o[0], lse[0], o[1], lse[1], logits)
    parts = torch.cat((o.float().nan_to_num(), torch.zeros_like(o[:1], dtype=torch.float32)))[:, None]
    seen = torch.where(lse == torch.inf, -torch.inf, lse)
    lses = torch.cat((seen, logits.expand(heads)[None, :, None].expand(1, heads, tokens)))[:, None]
    want, want_lse = reference.merge_states(parts, lses)
    torch.testing.assert_close(got.float(), want[0], rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-3)
    torch.testing.assert_close(got_lse, want_lse[0], rtol=1e-5, atol=1e-5)


def test_rows_without_tokens_are_zero():
    o, lse = torch.full((2, 2, 3, 64), torch.nan).half(), torch.full((2, 3, 2), -torch.inf)
    got, got_lse = run(o[0], lse[0], o[1], lse[1], torch.tensor([-torch.inf]))
    assert not got.any() and (got_lse == -torch.inf).all()
