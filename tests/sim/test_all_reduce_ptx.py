"""Sums over GPUs without one: the kernels' PTX, run on the CPU for several ranks at once, against fp32 sums."""

import struct

import pytest
import torch

from lowbit_attn import kernels
from lowbit_attn.kernels.all_reduce import ADD_NORM, SUM, all_reduce_key, words_a_thread
from sim.hopper_calls import ptx_of
from sim.peer_memory import PeerMemory
from sim.ptx import program as ptx

EPSILON = 1e-5


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    pytest.importorskip("cutlass", reason="CuTe-DSL is not installed")
    return tmp_path_factory.mktemp("ptx")


class Ranks(PeerMemory):
    """Memory of all ranks for rows of one width; ``rows`` may differ from call to call."""

    def __init__(self, text: str, variant: str, ranks: int, capacity: int, width: int, dtype: torch.dtype):
        self.program, self.variant, self.capacity, self.width = ptx.Program(text), variant, capacity, width
        row = torch.zeros(capacity, width, dtype=dtype)
        slots = torch.zeros(2, ranks, capacity, width // 2, dtype=torch.int64)
        tensors = dict(x=row, slots=slots, peers=torch.zeros(ranks, dtype=torch.int64),
                       calls=torch.zeros(capacity, dtype=torch.int32), out=torch.full_like(row, torch.nan))
        tensors |= dict(residual=row, weight=row[0]) if variant == ADD_NORM else {}
        super().__init__(ranks, tensors)

    def parameters(self, rank: int, rows: int) -> list[bytes]:
        half = self.ranks * self.capacity * self.width // 2
        sizes = dict.fromkeys(("x", "out", "residual"), (rows,)) | dict(
            slots=(self.ranks, self.capacity), peers=(self.ranks,), calls=(self.capacity,), weight=())
        strides = dict.fromkeys(self.names, ()) | dict(slots=(half, half // self.ranks))
        found = [self.parameter(rank, name, sizes[name], strides[name]) for name in self.names]
        return found + [struct.pack("<i", rank)] + [struct.pack("<f", EPSILON)] * (self.variant == ADD_NORM)

    def call(self, rows: int, reverse: bool) -> None:
        """All CTAs of all ranks run at once."""
        ctas = [ptx.Cta(self.program, self.parameters(rank, rows), self.memory.memory, (row, 0, 0), (rows, 1, 1))
                for rank in range(self.ranks) for row in range(rows)]
        ptx.run_grid(ctas[:: -1 if reverse else 1], self.width // 2 // words_a_thread(self.width), reverse)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight.float()


@pytest.mark.parametrize("variant", (SUM, ADD_NORM))
@pytest.mark.parametrize("ranks, width, dtype", [(2, 128, torch.float16), (3, 192, torch.bfloat16),
                                                 (2, 2880, torch.bfloat16)])
def test_every_rank_gets_the_same_sum_call_after_call(scratch, variant, ranks, width, dtype):
    name = str(dtype).removeprefix("torch.")
    text = ptx_of(kernels.trace(all_reduce_key("sm_90a", name, width, variant)), "sm_90a", scratch)
    assert "st.relaxed.sys" in text and "ld.relaxed.sys" in text
    of_ranks, capacity = Ranks(text, variant, ranks, 3, width, dtype), 3
    weight = torch.randn(width).to(dtype)
    residual, counts = torch.randn(capacity, width).to(dtype), [0] * capacity
    for rank in range(ranks):
        if variant == ADD_NORM:
            of_ranks.write(rank, "residual", residual)
            of_ranks.write(rank, "weight", weight)
    for call, rows in enumerate((2, 3, 1, 3)):
        x = torch.randn(ranks, capacity, width).to(dtype)
        for rank in range(ranks):
            of_ranks.write(rank, "x", x[rank])
            of_ranks.write(rank, "out", torch.full((capacity, width), torch.nan, dtype=dtype))
        of_ranks.call(rows, call % 2 == 1)
        want = x.float().sum(0)[:rows]
        if variant == ADD_NORM:
            residual[:rows] = (residual[:rows].float() + want).to(dtype)
            found = of_ranks.read(0, "residual")
            torch.testing.assert_close(found, residual)
            residual, want = found, norm(found[:rows], weight)
        for rank in range(ranks):
            out = of_ranks.read(rank, "out")
            torch.testing.assert_close(out[:rows].float(), want, rtol=2**-8 if dtype == torch.bfloat16 else 2**-10,
                                       atol=1e-5)
            assert torch.equal(out[:rows], of_ranks.read(0, "out")[:rows]) and out[rows:].isnan().all()
        counts = [count + (row < rows) for row, count in enumerate(counts)]
        assert all(of_ranks.read(rank, "calls").tolist() == counts for rank in range(ranks))


def test_a_rank_that_the_others_do_not_join_waits(scratch):
    text = ptx_of(kernels.trace(all_reduce_key("sm_90a", "float16", 64)), "sm_90a", scratch)
    of_ranks = Ranks(text, SUM, 2, 1, 64, torch.float16)
    cta = ptx.Cta(of_ranks.program, of_ranks.parameters(0, 1), of_ranks.memory.memory, (0, 0, 0), (1, 1, 1))
    with pytest.raises(AssertionError, match="deadlock"):
        ptx.run_grid([cta], 32)
    assert of_ranks.read(0, "out").isnan().all() and not of_ranks.read(0, "calls").any()
