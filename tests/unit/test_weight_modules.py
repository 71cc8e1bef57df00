"""VQLinear as a module: state dicts, safetensors, casts, torch.compile, headers of other versions."""

import io
from contextlib import contextmanager, nullcontext

import pytest
import torch
from codebook_weights import random_weight
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from lowbit_attn.linear import NAMES, VersionError, VQLinear, e8p, hadamard, linear, quantize

N, K = 40, 72


def module(name: str, bias: bool = True) -> VQLinear:
    return VQLinear.from_weight(random_weight(name, N, K), torch.randn(N) if bias else None)


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_bring_the_module_back(name):
    made, x = module(name), torch.randn(3, K)
    other = VQLinear(K, N, name, bias=True)
    missing = other.load_state_dict(load_safetensors(save_safetensors(made.state_dict())))
    assert not missing.missing_keys and not missing.unexpected_keys
    assert torch.equal(other(x), made(x))
    assert torch.equal(made(x), linear(x, made.vq_weight) + made.bias)
    assert name in repr(made) and torch.equal(made.vq_weight.dequantize(), other.vq_weight.dequantize())


def test_pickle_and_copies():
    made, x = module("e8p2", bias=False), torch.randn(3, K)
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), made(x))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_casts_leave_the_planes_alone(name, dtype):
    made = module(name)
    before = made.vq_weight.dequantize()
    made = made.to(dtype)
    assert torch.equal(made.vq_weight.dequantize(), before) and made.bias.dtype == dtype
    if dtype != torch.float64:
        assert made(torch.randn(2, K, dtype=dtype)).dtype == dtype


def test_moves_keep_dtypes_on_other_devices():
    made = module("aqlm_2x8").half().to("meta")
    assert made.codes.device.type == made.header.device.type == "meta" and made.codebooks.dtype == torch.float16
    empty = VQLinear(K, N, "aqlm_2x8", device="meta").bfloat16().to_empty(device="cpu")
    assert empty.scales.dtype == torch.float32 and empty.codebooks.dtype == torch.float16


@pytest.mark.parametrize("name", NAMES)
def test_compiled_is_one_operator(name):
    made, x = module(name), torch.randn(5, K)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(made, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), made(x))
    calls = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert torch.ops.lowbit_attn.vq_linear in [getattr(call, "overloadpacket", call) for call in calls]
    torch.library.opcheck(torch.ops.lowbit_attn.vq_linear.default,
                          (x, [getattr(made, plane) for plane in made.plane_names], name, N, K, ""),
                          test_utils=("test_schema", "test_faketensor"))


def test_headers_of_other_layouts_are_refused():
    made = module("e8p4", bias=False)
    state = made.state_dict()
    for place, value, words in ((0, 2, "got layout version 2, supported: 1; quantize the model again"),
                                (1, 3, "got aqlm_2x8 of 40 x 72, supported by this module: e8p4 of 40 x 72"),
                                (1, 99, "got format 99 of 40 x 72"), (2, 41, "got e8p4 of 41 x 72")):
        header = state["header"].clone()
        header[place] = value
        before = made.codes.clone()
        with pytest.raises(VersionError, match=words):
            made.load_state_dict(state | {"header": header, "codes": torch.zeros_like(made.codes)})
        assert torch.equal(made.codes, before), "nothing was loaded"
    with pytest.raises(VersionError, match="layout version none"):
        made.check_header(torch.zeros(0, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="header"):
        made.load_state_dict({name: plane for name, plane in state.items() if name != "header"})


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"bias: got shape \[3\], supported: \[40\]"):
        VQLinear.from_weight(random_weight("e8p4", N, K), torch.zeros(3))
    with pytest.raises(ValueError, match="format: got 'int4'"):
        VQLinear(K, N, "int4")
    with pytest.raises(ValueError, match=r"x: got shape \[2, 3\]"):
        module("e8p4")(torch.zeros(2, 3))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_x(name):
    made, x, scale = module(name), torch.randn(2, 3, K, requires_grad=True), torch.randn(2, 3, N)
    (made(x) * scale).sum().backward()
    torch.testing.assert_close(x.grad, scale @ made.vq_weight.dequantize(), atol=1e-4, rtol=1e-4)


@contextmanager
def surroundings(kind: str):
    """Defaults of a caller that must not change what is computed."""
    if kind == "default device":
        torch.set_default_device("meta")
    if kind == "default dtype":
        torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16) if kind == "autocast" else nullcontext():
            yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["default device", "default dtype", "autocast", "inference"])
@pytest.mark.parametrize("name", ["e8p4", "gptvq2", "aqlm_2x8"])
def test_the_caller_s_defaults_change_nothing(name, kind):
    """Tables that are kept from such a call serve others as well."""
    w, x, inputs = torch.randn(24, 40), torch.randn(3, 40), torch.randn(200, 40)
    hessian = inputs.T @ inputs
    made = quantize(w, name, hessian)
    y, dense = linear(x, made), made.dequantize()
    for table in (e8p.grid, e8p.patterns, e8p.tables, e8p._shapes, e8p._large, e8p._sign_bytes, hadamard.matrix):
        table.cache_clear()
    with surroundings(kind), torch.inference_mode(kind == "inference"):
        again = quantize(w, name, hessian)
        other, decoded = linear(x, again), again.dequantize()
    assert all(torch.equal(made.planes[plane], again.planes[plane]) for plane in made.planes)
    assert torch.equal(other, y) and torch.equal(decoded, dense)
    assert torch.equal(linear(x, made), y)
