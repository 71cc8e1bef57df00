"""What copies of a cache are: views of its memory, or caches of their own, also in another process or a file."""

import copy
from multiprocessing.reduction import ForkingPickler
from os import PathLike
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn.cache import saved
from lowbit_attn.cache.attached import check_identity
from lowbit_attn.cache.backend import BACKENDS, backend_of
from lowbit_attn.checks import one_of

MADE_ANEW = ("_counts", "_row_tensors")  # by every copy


class Sent(NamedTuple):
    """A tensor by value, as it goes to another process."""

    content: np.ndarray  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> "Sent":
        return cls(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(), x.dtype, tuple(x.shape), x.device)

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.content.copy()).view(self.dtype).view(self.shape).to(self.device)


class Copies:
    """Base of CacheState with what copy, pickle, torch.save and torch.multiprocessing ask of it."""

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        # torch.multiprocessing moves tensors into memory that both processes write, but each would have an account of
        # the pool's pages of its own
        ForkingPickler.register(cls, _sent)

    def __copy__(self) -> "Copies":
        """A view of the same memory, tensors, pages and all."""
        view = object.__new__(type(self))
        vars(view).update(vars(self))
        return view

    def __deepcopy__(self, memo: dict) -> "Copies":
        """A cache of its own with the same contents; no captured or compiled step knows it."""
        twin = memo[id(self)] = object.__new__(type(self))
        with torch.inference_mode(False):
            vars(twin).update({name: copy.deepcopy(x, memo) for name, x in self.__getstate__().items()})
        twin._start_copy()
        return twin

    def save(self, path: str | PathLike) -> None:
        """Write the cache into one safetensors file: pages in use, counters, 16-bit tokens, identity; no codebooks.

        The file appears whole or not at all. NotImplementedError for a Format that FORMATS does not name.
        """
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | PathLike, device: torch.device | str = "cpu", *, codebooks=None):
        """A cache of its own with the contents of a file of ``save``, on any device.

        codebooks: the LayerCodebooks that its pages were packed with, for formats that need some. FileNotFoundError;
        saved.CacheFileError for a file of another version, a truncated or inconsistent one; LayoutMismatchError for
        bytes of another layout or other codebooks.
        """
        return saved.load(cls, path, device, codebooks)

    def __getstate__(self) -> dict:
        self._refuse_capture("copy")
        check_identity(self)
        return {name: x for name, x in vars(self).items() if name not in MADE_ANEW}

    def __setstate__(self, state: dict) -> None:
        with torch.inference_mode(False):
            vars(self).update({name: x.clone() if isinstance(x, torch.Tensor) and x.is_inference() else x
                               for name, x in state.items()})
        if self.pool.device.type != self.device.type:  # torch.load(..., map_location=)
            self.device = self.pool.device
        one_of("device", self.device.type, list(BACKENDS))
        backend_of(self).prepare(self)
        check_identity(self)
        self._start_copy()

    def _start_copy(self) -> None:
        self._row_tensors, self.is_captured = {}, False
        self.bind()
        self._mark_started()


def _sent(cache: Copies) -> tuple:
    """How pickle makes a cache anew in another process."""
    state = {name: Sent.of(x) if isinstance(x, torch.Tensor) else x for name, x in cache.__getstate__().items()}
    return _received, (type(cache), state)


def _received(kind: type, state: dict) -> Copies:
    cache = object.__new__(kind)
    cache.__setstate__({name: x.tensor() if isinstance(x, Sent) else x for name, x in state.items()})
    return cache
