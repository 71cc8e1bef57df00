"""What is another on a GPU: its architecture, and vLLM's kernel for chunks of prompts in 16 bit."""

import torch
from vllm.platforms import current_platform

from lowbit_attn.dispatch import CAPABILITY_TARGETS
from lowbit_attn.reference import Attention


def arch() -> str | None:
    """The GPU as kernels call it; None: a CPU, or a GPU without kernels. Touches no device."""
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    return CAPABILITY_TARGETS.get((capability.major, capability.minor), (None,))[0]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Attention,
          is_causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``paged_dense.Dense`` by the FlashAttention that vLLM brings."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    starts = [torch.arange(0, 2 * len(x), len(x), dtype=torch.int32, device=q.device) for x in (q, k)]
    return flash_attn_varlen_func(
        q, k, v, max_seqlen_q=len(q), cu_seqlens_q=starts[0], max_seqlen_k=len(k), cu_seqlens_k=starts[1],
        softmax_scale=options.softmax_scale, softcap=options.softcap or 0.0, causal=is_causal,
        return_softmax_lse=True, fa_version=get_flash_attn_version(head_size=q.shape[2]))
