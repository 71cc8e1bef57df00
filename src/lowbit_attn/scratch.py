"""Device memory that decode calls leave as they found it: what splits exchange, and the sink logit of calls without.

A captured call's memory must be no other graph's, and made before the capture: it comes from a stock.
"""

import ctypes
import math
from functools import cache
from threading import Lock

import torch

from lowbit_attn.cache.state import is_capturing

SECTOR_WORDS = 8  # of L2
CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
GRAPH_SCRATCH = 1 << 22  # 32-bit words a device, 16 MiB; 132 CTAs of 4 query rows at head_dim 128 take 0.4 MiB, of 64 6
GRAPH_COUNTERS = 1 << 18  # the same of zeros, 1 MiB; calls of 64 sequences and 8 KV heads take 2 KiB

_NO_SINK_LOGIT: dict[torch.device, torch.Tensor] = {}
_FREE: dict[tuple[torch.device, int], torch.Tensor] = {}  # the stock, by what its words are
_OF_CAPTURE: dict[tuple, torch.Tensor] = {}
_STOCK = Lock()


def no_sink_logit(device: torch.device) -> torch.Tensor:
    """A sink logit of -inf for every head: fp32 [1]. Kept for good, since captured graphs outlive plans."""
    if device not in _NO_SINK_LOGIT:
        if is_capturing(device):
            return torch.full((1,), -torch.inf, dtype=torch.float32, device=device)
        # a copy from the host is complete when it returns, so that any stream may read it
        _NO_SINK_LOGIT[device] = torch.tensor([-torch.inf], dtype=torch.float32, device=device)
    return _NO_SINK_LOGIT[device]


def prepare(device: torch.device, word: int | None) -> None:
    """Make what calls on a device share for good; waits for it, so a cache does it when it is made. word: Scratch's."""
    if not is_capturing(device):
        no_sink_logit(device)
        with _STOCK:
            for own, count in ((0, GRAPH_COUNTERS), (word, GRAPH_SCRATCH)):
                if own is not None and (device, own) not in _FREE:
                    _FREE[device, own] = torch.full((count,), own, dtype=torch.int32, device="cpu").to(device)


def partials(shape: tuple[int, ...], word: int | None, device: torch.device, header: int = 0) -> torch.Tensor:
    """fp32 of which every 32-bit word is ``word``, as calls leave it, or anything if that is None.

    header: words before them that are the kernel's, too.
    """
    count = header + math.prod(shape)
    found = torch.empty(count, dtype=torch.int32, device=device) if word is None else words(count, word, device)
    return found[header:].view(torch.float32).view(shape)


def words(count: int, word: int, device: torch.device) -> torch.Tensor:
    """int32 [count], all of them ``word``, as every call leaves them.

    Captured calls of one stream run one after the other, so those of a capture share theirs, which are no other's for
    good: the graph may run at any time, but not beside itself. They come from the stock that ``prepare`` made; a
    capture beyond the stock sets them in one launch more.
    """
    if is_capturing(device):
        with _STOCK:
            return _of_capture(count, word, device)[:count]
    return _filled(count, word, device)


def _filled(count: int, word: int, device: torch.device) -> torch.Tensor:
    return torch.full((count,), word, dtype=torch.int32, device=device)


def _of_capture(count: int, word: int, device: torch.device) -> torch.Tensor:
    """At least ``count`` words for the current stream's capture."""
    stream, stock = torch.cuda.current_stream(device).cuda_stream, (device, word)
    name, free = (*stock, stream, capture_id(stream)), _FREE.get(stock)
    found = _OF_CAPTURE.get(name)
    if found is not None and len(found) >= count:
        return found
    aligned = -(-count // SECTOR_WORDS) * SECTOR_WORDS
    if free is not None and len(free) >= aligned:
        found, _FREE[stock] = free[:aligned], free[aligned:]
    else:
        found = _filled(aligned, word, device)
    if name[-1] is not None:
        _OF_CAPTURE[name] = found
    return found


def capture_id(stream: int) -> int | None:
    """Number of the capture that a stream takes part in, unique in the process; None if the driver does not tell."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    try:
        failed = _driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), ctypes.byref(status),
                                                     ctypes.byref(number), None, None, None)
    except (OSError, AttributeError):
        return None
    return number.value if not failed and status.value == CAPTURING else None


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
