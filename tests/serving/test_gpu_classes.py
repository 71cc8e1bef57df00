"""The plug-in's classes as they are on a GPU, without one: vLLM 0.33's platform is told that it has one.

Metadata of the device are tensors without values, so that a look at one by the host would be seen.
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
from lowbit_attn.integrations.vllm import adapter, gpu, names, plans
from torch._subclasses.fake_tensor import FakeTensorMode

backend, found = adapter.LowBitBackend, dict(arch=gpu.arch(), name=adapter.LowBitBackend.get_name())
found["support"] = [builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
                    for builder in (backend.get_builder_cls(), adapter.RingBackend.get_builder_cls())]
asked = dict(head_size=128, kv_cache_dtype="lowbit_k4v4", block_size=128, use_mla=False, has_sink=False,
             use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, attn_type="decoder",
             device_capability=DeviceCapability(*CAPABILITY))
found["reasons"] = {str(dtype): backend.validate_configuration(dtype=dtype, **asked)
                    for dtype in (torch.bfloat16, torch.float32)}
config = Some(parallel_config=Some(decode_context_parallel_size=1, prefill_context_parallel_size=1,
                                   cp_kv_cache_interleave_size=1, enable_dbo=False,
                                   tensor_parallel_size=1, pipeline_parallel_size=1),
              speculative_config=Some(method="ngram", num_speculative_tokens=3), kv_transfer_config=None,
              cache_config=Some(block_size=256, enable_prefix_caching=False, kv_cache_dtype_skip_layers=None),
              scheduler_config=Some(disable_hybrid_kv_cache_manager=False, max_num_seqs=8,
                                    max_num_batched_tokens=2048),
              model_config=Some(dtype=torch.bfloat16),
              compilation_config=Some(use_inductor_graph_partition=False, cudagraph_capture_sizes=[1, 2, 4, 8]))
engine = adapter.engine_of(config)
layer = names.Layer(128, 8, num_heads=32)
found["refused"] = names.why_not(names.parse("lowbit_k4v4"), engine, layer)
config.compilation_config.use_inductor_graph_partition = True
found["unsafe"] = names.why_not(names.parse("lowbit_k4v4"), adapter.engine_of(config), layer)
config.compilation_config.use_inductor_graph_partition = False
served = backend.served = names.parse("lowbit_kitty-pro")
ring = Some(name_of=adapter.RING, rings=lambda: torch.empty(9, 2, 8, served.sinks + 320, 128, device="meta"))
config.compilation_config.static_forward_context = {"layer": Some(impl=Some(ring=ring, served=served)),
                                                    "ring": Some(rows=None)}
launched = []
plans.launch = lambda plan, step: launched.append((plan.decode and plan.decode.live, plan.tokens))
gpu.copy_to = lambda device: lambda array: torch.from_numpy(array)
with FakeTensorMode() as mode:  # tensors that are made in it refuse looks wherever they are used
    builder = adapter.LowBitBuilder(None, ["layer"], config, torch.device("cpu"))
    rings = adapter.RingBuilder(None, ["ring"], config, torch.device("cpu"))
found["threshold"] = [builder.reorder_batch_threshold, rings.reorder_batch_threshold]
for q_lens, lens, tokens in (([4] * 3 + [0], [9, 9, 9, 0], 16), ([1, 2, 4], [50, 60, 70], 7),
                             ([1, 300], [77, 900], 301), ([5, 700], [5, 700], 705)):
    rows, starts = len(q_lens), torch.tensor([0, *q_lens]).cumsum(0).int()
    with mode:
        device = dict(block_table_tensor=torch.empty(8, 40, dtype=torch.int32)[:rows],
                      seq_lens=torch.empty(rows, dtype=torch.int32), query_start_loc=torch.empty(rows + 1).int())
    common = Some(num_reqs=rows, max_query_len=max(q_lens), num_actual_tokens=tokens, query_start_loc_cpu=starts,
                  seq_lens_cpu_upper_bound=torch.tensor(lens, dtype=torch.int32), **device)
    plan = builder.build(0, common).plan
    rings.build(0, common)
    decode = plan.decode
    rows = decode and [decode.live, decode.rows, decode.q_len, decode.gather is not None]
    found.setdefault("plans", []).append([rows, [[part.max_q, part.max_k, part.is_direct] 
                                                 for part in plan.passes]])
    assert plan.buffers is builder.planner.buffers
found["launched"] = launched
found["stays"] = config.compilation_config.static_forward_context["ring"].rows is rings.rows
found["null_pages"] = builder.planner.buffers.layout.null_pages
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
    assert not found["refused"] and found["threshold"] == [4, None]
    reason, = found["unsafe"]
    assert reason.startswith("use_inductor_graph_partition: supported: off")
    assert found["reasons"] == {"torch.bfloat16": [], "torch.float32": ["dtype not supported"]}
    assert found["plans"] == [[[3, 4, 4, False], []], [[3, 4, 4, True], []], [[1, 1, 1, False], [[300, 900, False]]],
                              [None, [[700, 700, True]]]]
    assert found["launched"] == [[3, 16], [3, 7], [1, 301], [None, 705]]
    assert found["stays"] and found["null_pages"] == 2


def test_a_gpu_without_kernels():
    found = classes("10.0")
    assert found["arch"] is None
    assert found["refused"] == ["device cuda: this GPU's compute capability has no kernels, supported: 8.0, 8.9, 9.0"]
