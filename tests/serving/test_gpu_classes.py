"""The plug-in's classes as they are on a GPU, without one: vLLM 0.33's platform is told that it has one.

Metadata are made of tensors without values, so that a look at one by the host would be seen.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving import engine

pytestmark = pytest.mark.skipif(not engine.RELEASE.is_dir(), reason="vLLM 0.33 is not there; .ci/serving makes it")

PROGRAM = """
import json, sys
from types import SimpleNamespace as Some

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

class Gpu(CpuPlatform):
    device_type = "cuda"
    is_cuda, is_cpu = (lambda self: True), (lambda self: False)
    get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*CAPABILITY))

CAPABILITY = tuple(map(int, sys.argv[1].split(".")))
vllm.platforms._current_platform = Gpu()
assert vllm.platforms.current_platform.is_cuda()
from vllm.v1.attention.backend import AttentionCGSupport
from lowbit_attn.integrations.vllm import adapter, gpu, names
from torch._subclasses.fake_tensor import FakeTensorMode

backend, found = adapter.LowBitBackend, dict(arch=gpu.arch(), name=adapter.LowBitBackend.get_name())
found["support"] = [builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
                    for builder in (backend.get_builder_cls(), adapter.RingBackend.get_builder_cls())]
asked = dict(head_size=128, kv_cache_dtype="lowbit_k4v4", block_size=128, use_mla=False, has_sink=False,
             use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type="decoder",
             device_capability=DeviceCapability(*CAPABILITY))
found["reasons"] = {str(dtype): backend.validate_configuration(dtype=dtype, **asked)
                    for dtype in (torch.bfloat16, torch.float32)}
found["dense"] = adapter.LowBitImpl.dense is gpu.dense
config = Some(parallel_config=Some(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                                   tensor_parallel_size=1, pipeline_parallel_size=1),
              speculative_config=Some(method="ngram", num_speculative_tokens=3), kv_transfer_config=None,
              cache_config=Some(block_size=256, enable_prefix_caching=False, kv_cache_dtype_skip_layers=None),
              scheduler_config=Some(disable_hybrid_kv_cache_manager=False, max_num_seqs=8),
              model_config=Some(dtype=torch.bfloat16),
              compilation_config=Some(static_forward_context={"layer": Some(impl=adapter.LowBitImpl.__new__(
                  adapter.LowBitImpl)), "ring": Some(rows=None)}))
engine = adapter.engine_of(config)
found["refused"] = names.why_not(names.parse("lowbit_k4v4"), engine, names.Layer(128, 8, num_heads=32))
backend.served = names.parse("lowbit_kitty-pro")
with FakeTensorMode() as mode:
    builder = adapter.LowBitBuilder(None, ["layer"], config, torch.device("cpu"))
    rings = adapter.RingBuilder(None, ["ring"], config, torch.device("cpu"))
    for rows, q_len, tokens in ((4, 4, 16), (4, 4, 13), (4, 1, 4), (2, 9, 18), (9, 1, 9)):
        common = Some(block_table_tensor=torch.empty(rows, 40, dtype=torch.int32), num_reqs=rows, max_query_len=q_len,
                      seq_lens=torch.empty(rows, dtype=torch.int32), num_actual_tokens=tokens,
                      query_start_loc=torch.empty(rows + 1, dtype=torch.int32))
        even = builder.build(0, common).even
        rings.build(0, common)
        found.setdefault("even", []).append(even and even.q_len)
        assert even is None or even.buffers is builder.buffers
    found["stays"] = config.compilation_config.static_forward_context["ring"].rows is rings.rows
    found["null_pages"] = builder.buffers.null_pages
print("FOUND " + json.dumps(found))
"""


def classes(capability: str) -> dict:
    done = subprocess.run([sys.executable, "-c", PROGRAM, capability], env=engine.environment(engine.RELEASE),
                          cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.split("FOUND ")[1])


def test_hopper():
    found = classes("9.0")
    assert found["arch"] == "hopper" and found["name"] == "CUSTOM" and found["support"] == [True, True]
    assert found["dense"] and not found["refused"]
    assert found["reasons"] == {"torch.bfloat16": [], "torch.float32": ["dtype not supported"]}
    assert found["even"] == [4, None, 1, None, None], "rows alike and few enough"
    assert found["stays"] and found["null_pages"] == 2


def test_a_gpu_without_kernels():
    found = classes("10.0")
    assert found["arch"] is None
    assert found["refused"] == ["device cuda: this GPU's compute capability has no kernels, supported: 8.0, 8.9, 9.0"]
