"""Private names of torch, transformers and Python: all that are used, each beside the public way to the same answer.

They save microseconds of a decode call. Where a version lacks one, the public way is taken. Of the DSLs none is used.
Memory that GPUs of a host share has no public way: ``shared_words`` raises where a version lacks it.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch


def _find(owner: object, path: str) -> Callable | None:
    """A name with dots inside an object; None if any part is not there."""
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _either(path: str, public: Callable) -> Callable:
    """torch's private function, or the public one that gives the same."""
    return _find(torch, path) or public


def public_raw_stream(index: int) -> int:
    """Handle of a device's current stream."""
    return torch.cuda.current_stream(index).cuda_stream


def public_empty(kind: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New memory on a kind of device, the current one if there are several."""
    return torch.empty_strided(shape, strides, dtype=dtype, device=kind)


def public_assert(holds: torch.Tensor, message: str) -> None:
    """RuntimeError unless a truth value on a device is true; waits for the device."""
    if not holds:
        raise RuntimeError(message)


# each a third to a tenth of the public call's time, which checks first what a plan knows
current_device: Callable[[], int] = _either("_C._cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = _either("_C._cuda_getCurrentRawStream", public_raw_stream)
is_stream_capturing: Callable[[], bool] = _either("_C._cuda_isCurrentStreamCapturing",
                                                  torch.cuda.is_current_stream_capturing)


# the same without a look by the host: a GPU's own assertion fails, and its next call raises
assert_async: Callable[[torch.Tensor, str], None] = _either("_assert_async", public_assert)


def empty_strided(kind: str) -> Callable:
    """(shape, strides, dtype) -> new memory on a kind of device: half the time of torch.empty_like.

    It is what torch's compiled code calls.
    """
    return _find(torch, f"_C._dynamo.guards._empty_strided_{kind}") or partial(public_empty, kind)


def mark_static_address(x: torch.Tensor) -> None:
    """Tell torch.compile that a tensor stays where it is. Without the name graphs copy the tensor at each call: slower,
    with the same results."""
    if mark := _find(torch, "_dynamo.mark_static_address"):
        mark(x, guard=True)


def shared_words(count: int, device: torch.device, group) -> tuple[torch.Tensor, list[int], object]:
    """int64 zeros [count] that every GPU of a group on one host may write; every rank calls it, with the same count.

    Returns this rank's, the addresses of all ranks' as this GPU sees them, and what keeps these valid.
    """
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(count, dtype=torch.int64, device=device)
    own.zero_()
    handle = _symmetric_memory.rendezvous(own, group)
    peer = getattr(handle, "get_remote_tensor", None) or handle.get_buffer
    ranks = range(handle.world_size)
    tensors = [own if rank == handle.rank else peer(rank, (count,), torch.int64) for rank in ranks]
    return own, [x.data_ptr() for x in tensors], (handle, tensors)


def environment(name: str) -> Callable[[], bytes | None]:
    """A function that reads an environment variable, in bytes, as it is when called; None if it is not set.

    os.environ.get takes 2 us for a name that is not set: as long as all the rest of finding a plan.
    """
    get, encode = _find(os.environ, "_data.get"), _find(os.environ, "encodekey")
    return partial(get, encode(name)) if get and encode else partial(os.environb.get, os.fsencode(name))


def group_timeout(group) -> timedelta | None:
    """How long calls of a torch.distributed process group wait. None where a version does not tell: a group that is
    made with it has torch's default."""
    for kind in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):  # the group serves no such device, or a backend has no options
            continue
    return None
def wrap(owner: type, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Put what ``wrapper`` makes of a private method in its place.

    For what no public name tells. A class that lacks the method is left as it is.
    """
    if (method := getattr(owner, name, None)) is not None:
        setattr(owner, name, wrapper(method))
