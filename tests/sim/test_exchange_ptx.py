"""The exchange between GPUs without one: its PTX, run on the CPU for several ranks at once, against the reference."""

import struct

import pytest
import torch

from lowbit_attn import kernels, reference
from lowbit_attn.hopper.common import slots
from sim.hopper_calls import ptx_of
from sim.peer_memory import PeerMemory
from sim.ptx import program as ptx


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    pytest.importorskip("cutlass", reason="CuTe-DSL is not installed")
    return tmp_path_factory.mktemp("ptx")


class Ranks(PeerMemory):
    """Memory of all ranks of one shape, o [ranks, batch, q_len, heads, head_dim]."""

    def __init__(self, text: str, o: torch.Tensor, capacity: int):
        self.program, self.o, (ranks, batch, q_len, heads, head_dim) = ptx.Program(text), o, o.shape
        self.rows, self.words, self.capacity = batch * q_len * heads, head_dim // 2, capacity
        self.lse = torch.zeros(ranks, batch, heads, q_len)
        slots = torch.zeros(2, ranks, capacity, self.words + 1, dtype=torch.int64)
        super().__init__(ranks, dict(
            o=o[0], lse=self.lse[0], slots=slots, peers=torch.zeros(ranks, dtype=torch.int64),
            calls=torch.zeros(capacity, dtype=torch.int32), out=torch.full_like(o[0], torch.nan),
            out_lse=torch.full_like(self.lse[0], torch.nan)))

    def parameters(self, rank: int) -> list[bytes]:
        _, batch, q_len, heads, _ = self.o.shape
        of_o, of_lse = (batch, q_len, heads), (batch, heads, q_len)
        sizes = dict(o=of_o, lse=of_lse, slots=(self.ranks, self.capacity), peers=(self.ranks,),
                     calls=(self.capacity,), out=of_o, out_lse=of_lse)
        strides = dict(o=(q_len * heads * self.words, heads * self.words), lse=(heads * q_len, q_len),
                       slots=(self.ranks * self.capacity * (self.words + 1), self.capacity * (self.words + 1)),
                       peers=(), calls=())
        strides |= dict(out=strides["o"], out_lse=strides["lse"])
        return [self.parameter(rank, name, sizes[name], strides[name]) for name in self.names] + [
            struct.pack("<i", rank)]

    def call(self, reverse: bool) -> None:
        """All CTAs of all ranks run at once."""
        for rank in range(self.ranks):
            self.write(rank, "o", self.o[rank])
            self.write(rank, "lse", self.lse[rank])
        ctas = [ptx.Cta(self.program, self.parameters(rank), self.memory.memory, (row, 0, 0), (self.rows, 1, 1))
                for rank in range(self.ranks) for row in range(self.rows)]
        ptx.run_grid(ctas[:: -1 if reverse else 1], self.words, reverse)


@pytest.mark.parametrize("ranks, head_dim, batch, heads, q_len, capacity", [
    (2, 128, 2, 2, 1, 8), (3, 64, 1, 2, 2, 4), (2, 256, 1, 1, 1, 1)])
def test_every_rank_gets_the_merge_call_after_call(scratch, ranks, head_dim, batch, heads, q_len, capacity):
    text = ptx_of(kernels.trace(kernels.exchange_key("sm_90a", "float16", head_dim)), "sm_90a", scratch)
    assert "st.relaxed.sys" in text and "ld.relaxed.sys" in text
    of_ranks = Ranks(text, torch.zeros(ranks, batch, q_len, heads, head_dim).half(), capacity)
    for call in range(4):
        of_ranks.o = torch.randn(ranks, batch, q_len, heads, head_dim).half()
        of_ranks.lse = 4 * torch.randn(ranks, batch, heads, q_len)
        of_ranks.lse[0, 0], of_ranks.o[0, 0] = -torch.inf, torch.nan  # a rank without tokens
        if call == 2:  # none on any rank
            of_ranks.lse[:, -1, -1, -1], of_ranks.o[:, -1, -1, -1] = -torch.inf, torch.nan
        of_ranks.call(call % 2 == 1)
        want, want_lse = reference.merge_states(of_ranks.o, of_ranks.lse)
        for rank in range(ranks):
            torch.testing.assert_close(of_ranks.read(rank, "out").float(), want, rtol=2e-3, atol=1e-3)
            torch.testing.assert_close(of_ranks.read(rank, "out_lse"), want_lse, rtol=1e-5, atol=1e-5)
            calls = of_ranks.read(rank, "calls").tolist()
            assert calls == [call + 1] * of_ranks.rows + [0] * (capacity - of_ranks.rows)


def test_a_rank_that_the_others_do_not_join_waits(scratch):
    text = ptx_of(kernels.trace(kernels.exchange_key("sm_90a", "float16", 64)), "sm_90a", scratch)
    of_ranks = Ranks(text, torch.randn(2, 1, 1, 1, 64).half(), 1)
    cta = ptx.Cta(of_ranks.program, of_ranks.parameters(0), of_ranks.memory.memory, (0, 0, 0), (1, 1, 1))
    with pytest.raises(AssertionError, match="deadlock"):
        ptx.run_grid([cta], of_ranks.words)
    assert of_ranks.read(0, "out").isnan().all() and not of_ranks.read(0, "calls").any()


def test_a_rank_that_does_not_come_is_given_up(scratch, monkeypatch):
    """The kernel stops with an error after so many polls, rather than never."""
    monkeypatch.setattr(slots, "POLLS", 1)
    text = ptx_of(kernels.trace(kernels.exchange_key("sm_90a", "float16", 64)), "sm_90a", scratch)
    of_ranks = Ranks(text, torch.randn(2, 1, 1, 1, 64).half(), 1)
    cta = ptx.Cta(of_ranks.program, of_ranks.parameters(0), of_ranks.memory.memory, (0, 0, 0), (1, 1, 1))
    with pytest.raises(NotImplementedError, match="trap"):  # what the interpreter says of an instruction without result
        ptx.run_grid([cta], of_ranks.words)
    assert of_ranks.read(0, "out").isnan().all() and not of_ranks.read(0, "calls").any()
