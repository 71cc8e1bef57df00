"""What the GPU tests' sample needs of a call: its problem, its answer, and whether its bound says anything."""

from functools import cache

import torch

from gpu import matrix
from gpu.matrix import Call
from lowbit_attn import testing
from lowbit_attn.reference import Attention


def case_of(call: Call) -> testing.Case:
    kernel, heads = call.kernel, call.ratio * call.num_heads_kv
    return testing.Case(kernel.format, kernel.torch_dtype, kernel.head_dim, heads, call.num_heads_kv, call.lengths,
                        call.q_len, call.sinks, call.data, call.range_search, shared_pages=call.shared_pages,
                        rotate_keys=call.rotate_keys, seed=call.seed)


@cache
def problem_and_options(call: Call, device: str = "cuda") -> tuple[testing.Problem, Attention]:
    problem = testing.build(case_of(call), device)
    logits = None
    if call.has_sink_logits:
        logits = 2 * torch.randn(call.ratio * call.num_heads_kv, generator=torch.Generator().manual_seed(call.seed))
        logits = logits.to(device)
    return problem, Attention(call.softmax_scale, call.softcap, call.window, call.keep_sinks, logits)


@cache
def expected(call: Call, path: str) -> testing.Expected:
    return testing.expected(*problem_and_options(call), path)


def bound_of(call: Call) -> float:
    """What o of any sequence may be off by. Worked out on the CPU, so that every machine draws the same calls again."""
    if call.data == "normal":
        return testing.NORMAL_TOLERANCE[call.kernel.torch_dtype]
    problem, options = problem_and_options.__wrapped__(call, "cpu")
    return float(testing.expected(problem, options).o_tolerance.max())


@cache
def settled(call: Call) -> Call:
    """The call, or the one that is made in its place because what its o may be off by says too little."""
    return matrix.settle(call, bound_of)
