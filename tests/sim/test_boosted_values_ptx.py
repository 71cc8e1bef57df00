"""Boosted values by the compiled kernels, whose PTX runs on the CPU: records byte for byte, decode against fp64."""

import pytest
import torch

from lowbit_attn import kernels, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, decode_stream, key_of
from sim.ptx import build
from sim.ptx import program as ptx
from sim.ptx.pack import GUARD, packed

F16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


@pytest.mark.parametrize("name, path, dtype, head_dim", [
    ("k4v2-boost", "integer", F16, 64), ("k4v2-boost", "stream", BF16, 64), ("k4v2-boost48", "integer", BF16, 128),
    ("k4v2-boost", "register", F16, 64), ("k4v2-boost16to8", "register", BF16, 128)])
def test_decode(name, path, dtype, head_dim, scratch):
    """In one split a warp has a page alone, whose V comes in halves; in stored order positions are shuffled."""
    case = Case(name, dtype, head_dim, 4, 2, (560, 0, 300), sinks=3)
    text, cfg = compiled(key_of(case, Attention(), path, 8 if path == "register" else 4), scratch)
    problem, program = testing.build(case), ptx.Program(text)
    assert (problem.cache.pool_positions[int(problem.cache.table[0, 0])].int().diff() < 0).any()
    attend = decode_stream if path == "stream" else decode
    testing.assert_decode(*attend(program, cfg, problem, Attention(), 2), testing.expected(problem))


@pytest.mark.parametrize("name, dtype, head_dim", [("k4v2-boost", F16, 64), ("k8v4-boost64", BF16, 128)])
def test_quantize_packs_the_bytes_of_the_reference(name, dtype, head_dim):
    """Both runs and the metadata; positions are not the kernel's to write."""
    from lowbit_attn.device.quantize import matrix_of

    fmt = FORMATS[name]
    spec = fmt.v.spec(head_dim)
    matrix = matrix_of(spec, str(dtype))
    code = build.program(kernels.quantize_key("sm_90", str(dtype).removeprefix("torch."), head_dim, fmt, "v"))
    x = torch.randn(1, 1, 128, head_dim).to(dtype)
    planes = fmt.v.quantize(x[0].float(), False)
    want = torch.cat([planes[plane].flatten().view(torch.uint8) for plane in ("boosted", "codes", "meta")])
    found = packed(code, matrix.threads, matrix.parts, x, spec.nbytes)
    assert torch.equal(found[: spec.wide.positions], want) and (found[spec.wide.positions :] == GUARD).all()
