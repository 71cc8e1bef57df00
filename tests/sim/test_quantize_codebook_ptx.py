"""The compiled kernels of codebook sides on the CPU: they pack what the reference packs, and read what is packed."""

import struct

import pytest
import torch
from codebook_packing import assert_same_but_near_ties, hard_tokens, pages_of, twins, uneven

from lowbit_attn import kernels, layout
from lowbit_attn.formats import FORMATS
from sim.ptx import build
from sim.ptx import program as ptx

HEAD_DIM, HEADS, GUARD = 64, 2, 0xA5


def run(key: kernels.KernelKey, side, tensors: dict[str, torch.Tensor], pages: int, units: int) -> ptx.GlobalMemory:
    """All blocks of threads of a kernel of one side; tensors in the order of their names, as its parameters come."""
    from lowbit_attn.device.quantize import matrix_of

    matrix = matrix_of(side.spec(HEAD_DIM))
    memory = ptx.GlobalMemory(list(tensors.values()))
    pointers = sorted({name: start for name, start in zip(tensors, memory.starts)}.items())
    if side.shift:
        pointers = sorted([*pointers, ("pool_meta", dict(pointers)["pool"])])
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE + start) for _, start in pointers]
    parameters += [struct.pack("<i", number) for number in (units, HEADS, pages, HEADS * units)]
    for page in range(pages):
        for head in range(HEADS):
            cta = ptx.Cta(build.program(key), parameters, memory.memory, (head, page, 0), (HEADS, pages, 1))
            ptx.run_grid([cta], matrix.threads)
    return memory


def record_of(side, planes: dict[str, torch.Tensor]) -> torch.Tensor:
    """The part of the record, uint8 [n, bytes]."""
    return torch.cat([planes[name].view(torch.uint8).flatten(1) for name in side.plane_sizes(HEAD_DIM)], 1)


@pytest.mark.parametrize("name, side_name, dtype", [
    ("cq2", "k", "float16"), ("cq2", "v", "bfloat16"), ("cq4", "k", "bfloat16"), ("cq4", "v", "float16"),
    ("cq1", "k", "float16"), ("cq2-nonorm", "v", "float16")])
def test_pages_are_those_of_the_reference(name, side_name, dtype):
    """Hard tokens, and entries of which each has an equal one."""
    side = getattr(FORMATS[name], side_name)
    entries = twins(torch.randn(side.entries_shape(HEADS, HEAD_DIM)).half())
    check_a_page(name, side_name, dtype, hard_tokens(HEADS, HEAD_DIM, 384)[:128], entries)


@pytest.mark.parametrize("name, side_name", [("cq4", "v"), ("cq2", "k"), ("cq1", "v"), ("cq2-nonorm", "v")])
@pytest.mark.parametrize("scale", (2.0**-12, 1.0))
def test_entries_and_values_of_many_magnitudes(name, side_name, scale):
    """Pairs of entries near each other near 0, and values far beyond the largest entry."""
    side = getattr(FORMATS[name], side_name)
    entries = uneven(torch.randn(side.entries_shape(HEADS, HEAD_DIM)) * 8) * scale
    x = uneven(torch.randn(128, HEADS, HEAD_DIM // 8, 8) * 8, 1).flatten(2) * scale
    x[::19] *= 1000
    check_a_page(name, side_name, "bfloat16", x, entries.half())


def check_a_page(name: str, side_name: str, dtype: str, x: torch.Tensor, entries: torch.Tensor) -> None:
    """The page that the kernel packs of tokens [128, heads, head_dim]."""
    fmt = FORMATS[name]
    side = getattr(fmt, side_name)
    x = x.to(getattr(torch, dtype))
    nbytes = side.spec(HEAD_DIM).nbytes
    units = nbytes // layout.RECORD_ALIGN
    pool = torch.full((HEADS, nbytes), GUARD, dtype=torch.uint8)
    blocks = pages_of(x)[None]
    tensors = dict(entries=entries.view(torch.int16), pages=torch.zeros(1, dtype=torch.int32), pool=pool,
                   x=blocks.contiguous().view(torch.int16))
    memory = run(kernels.quantize_key("sm_90", dtype, HEAD_DIM, fmt, side_name), side, tensors, 1, units)
    got = memory.tensor(2, pool)
    planes = side.quantize(blocks[0].float(), False, entries)
    want = record_of(side, planes)
    assert_same_but_near_ties(side, blocks[0].float(), entries, got, want)
    assert (got[:, sum(side.plane_sizes(HEAD_DIM).values()) :] == GUARD).all()


@pytest.mark.parametrize("name, side_name", [("cq2", "k"), ("cq4", "v")])
def test_pages_are_read_as_the_reference_reads_them(name, side_name):
    fmt = FORMATS[name]
    side = getattr(fmt, side_name)
    entries = torch.randn(side.entries_shape(HEADS, HEAD_DIM)).half()
    planes = side.quantize(torch.randn(HEADS, 128, HEAD_DIM) * 3, False, entries)
    pool = record_of(side, planes)
    out = torch.full((HEADS, 128, HEAD_DIM), float("nan"))
    tensors = dict(entries=entries.view(torch.int16), out=out, pages=torch.zeros(1, dtype=torch.int32), pool=pool)
    memory = run(kernels.dequantize_key("sm_90", HEAD_DIM, fmt, side_name), side, tensors, 1,
                 side.spec(HEAD_DIM).nbytes // layout.RECORD_ALIGN)
    assert torch.equal(memory.tensor(1, out), side.dequantize(planes, HEAD_DIM, entries))
