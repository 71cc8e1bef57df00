"""Codebook weights on a GPU: what they decode to and their products are the CPU's, also in a captured graph."""

import pytest
import torch
from codebook_weights import random_weight

from lowbit_attn.linear import NAMES, VQLinear, linear, quantize

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1), (5, 7), (33, 129), (257, 1030)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gpu_and_cpu_agree(name, shape):
    w = random_weight(name, *shape)
    on_gpu, dense = w.to("cuda"), w.dequantize()
    torch.testing.assert_close(on_gpu.dequantize().cpu(), dense, atol=2e-5 * float(dense.abs().max()), rtol=0)
    x = torch.randn(64, w.k)
    x[0], x[1, 0] = 0, 1e4
    exact = x.double() @ dense.double().T
    for m in (*range(1, 18), 64):
        got = linear(x[:m].cuda(), on_gpu).cpu().double()
        assert ((got - exact[:m]).abs() <= 1e-4 * exact[:m].abs().amax(1, True) + 1e-5).all()
    x[2, w.k // 2] = torch.inf
    got = linear(x.half().cuda(), on_gpu)
    assert got[2].isnan().all() and not got[0].any() and got[3:].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_captured(name):
    layer, x = VQLinear.from_weight(random_weight(name, 40, 200)).cuda(), torch.randn(3, 200, device="cuda")
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(torch.randn(3, 200))
    graph.replay()
    assert torch.equal(y, layer(x))


@pytest.mark.parametrize("name", ["e8p4", "gptvq2", "aqlm_2x8"])
def test_quantizers_run_on_a_gpu(name):
    inputs, w = torch.randn(500, 96), torch.randn(64, 96)
    made = quantize(w.cuda(), name, (inputs.T @ inputs).cuda())
    assert made.device.type == "cuda"
    assert (made.dequantize().cpu() - w).norm() < {"e8p4": 0.15, "gptvq2": 0.4, "aqlm_2x8": 0.45}[name] * w.norm()
