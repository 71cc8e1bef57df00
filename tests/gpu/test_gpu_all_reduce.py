"""Sums over two GPUs of a host by one kernel each, called and in a CUDA graph, against sums in fp32."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lowbit_attn.all_reduce import AllReduce

pytestmark = pytest.mark.gpu
RANKS, ROWS, EPSILON = 2, 9, 1e-5


def made(call: int, width: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """What a rank adds in a call: every rank can make all ranks'."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(ROWS, width, generator=generator).to(dtype).cuda()


def close(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), want, rtol=2**-8 if dtype == torch.bfloat16 else 2**-10, atol=2e-4)


def equal_on_ranks(x: torch.Tensor) -> None:
    every = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(every, x)
    assert all(torch.equal(other, x) for other in every)


def check_sums(reduce: AllReduce, width: int, dtype: torch.dtype, rank: int) -> None:
    for call, rows in enumerate((ROWS, 1, 8, 8, ROWS)):
        want = sum(made(call, width, dtype, other).float() for other in range(RANKS))[:rows]
        x = made(call, width, dtype, rank)[:rows]
        out = reduce.sum(x, out=x if call == 2 else None)
        close(out, want, dtype)
        equal_on_ranks(out)


def check_norms_in_a_graph(reduce: AllReduce, width: int, dtype: torch.dtype, rank: int) -> None:
    """A graph of three calls, each of which reads what the one before left, replayed."""
    weight, residual = torch.rand(width).to(dtype).cuda() + 0.5, made(50, width, dtype, 0)
    dist.broadcast(weight, 0)
    x, start = made(60, width, dtype, rank), residual.clone()

    def steps():
        y = x
        for _ in range(3):
            y = reduce.add_norm(y, residual, weight, EPSILON)
        return y

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps()
    for replay in range(20):
        residual.copy_(start)
        x.copy_(made(replay, width, dtype, rank))
        graph.replay()
        parts, kept = [made(replay, width, dtype, other).float() for other in range(RANKS)], start.float()
        for _ in range(3):
            kept = (kept + sum(parts)).to(dtype).float()
            y = kept * torch.rsqrt(kept.square().mean(-1, keepdim=True) + EPSILON) * weight.float()
            parts = [y.to(dtype).float()] * RANKS
        eps = torch.finfo(dtype).eps  # a rounding of y that differs moves a sum of several
        for found, want in ((residual, kept), (out, y)):
            torch.testing.assert_close(found.float(), want, rtol=8 * eps, atol=16 * eps)
        equal_on_ranks(out)


def run(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    try:
        for width, dtype in ((4096, torch.float16), (2880, torch.bfloat16)):
            reduce = AllReduce(ROWS, width, dtype, torch.device("cuda", rank))
            check_sums(reduce, width, dtype, rank)
            check_norms_in_a_graph(reduce, width, dtype, rank)
            with pytest.raises(ValueError, match=f"x: got .*, supported: .1 to {ROWS}, {width}"):
                reduce.sum(torch.zeros(ROWS + 1, width, dtype=dtype, device="cuda"))
            same = torch.zeros(ROWS, width, dtype=dtype, device="cuda")
            with pytest.raises(ValueError, match="out: got the residual"):
                reduce.add_norm(same.clone(), same, same[0], EPSILON, out=same)
    finally:
        dist.destroy_process_group()


def test_two_gpus_sum_rows(tmp_path, monkeypatch):
    if torch.cuda.device_count() < RANKS or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("two Hopper GPUs are needed")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # NVLink multicast stays off
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    mp.spawn(run, (str(tmp_path),), nprocs=RANKS)
