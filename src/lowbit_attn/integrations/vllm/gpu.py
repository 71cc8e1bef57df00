"""What is another on a GPU: its architecture, vLLM's scratch memory, and its FlashAttention for chunks of prompts."""

import os
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from lowbit_attn.dispatch import CAPABILITY_TARGETS
from lowbit_attn.paged_plan import Pass
from lowbit_attn.reference import Attention


def arch() -> str | None:
    """The GPU as kernels call it; None: a CPU, or a GPU without kernels. Touches no device."""
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return CAPABILITY_TARGETS.get((capability.major, capability.minor), (None,))[0]


def unsafe_settings(config: VllmConfig) -> tuple[str, ...]:
    """Settings of an engine on a GPU with which steps of this plug-in would not run in their order, or would share
    memory while they run beside each other."""
    if not current_platform.is_cuda():
        return ()
    compilation, parallel = config.compilation_config, config.parallel_config
    return tuple(name for name, is_on in (
        ("use_inductor_graph_partition", bool(compilation.use_inductor_graph_partition)),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH=1", os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1"),
        ("--enable-dbo", bool(getattr(parallel, "enable_dbo", False))),
    ) if is_on)


def copy_to(device: torch.device) -> Callable[[np.ndarray], torch.Tensor]:
    """Copies an array to the device from pinned memory, without waiting for it."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return lambda array: async_tensor_h2d(array, device=device)


def workspace(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a shape in vLLM's scratch memory."""
    from vllm.v1.worker.workspace import current_workspace_manager

    return tuple(current_workspace_manager().get_simultaneous((shape, dtype), (shape, dtype)))


@cache
def _version(head_dim: int) -> int:
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    return get_flash_attn_version(head_size=head_dim)


def varlen(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Pass, options: Attention,
           out: torch.Tensor) -> torch.Tensor:
    """``paged_steps.Varlen`` by the FlashAttention that vLLM brings."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    _, lse, *_ = flash_attn_varlen_func(
        q, keys, values, max_seqlen_q=part.max_q, cu_seqlens_q=part.cu_q, max_seqlen_k=part.max_k,
        cu_seqlens_k=part.cu_k, softmax_scale=options.softmax_scale, softcap=options.softcap or 0.0,
        causal=part.is_causal, return_softmax_lse=True, fa_version=_version(q.shape[2]), out=out)
    if part.has_empty:  # FlashAttention 2 gives +inf for a row without keys
        lse.masked_fill_(lse == torch.inf, -torch.inf)
    return lse
