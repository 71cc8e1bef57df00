"""Exceptions of this package, which ``lowbit_attn`` exports; docs/errors.md says when each is raised.

Arguments that a call does not take raise ValueError, TypeError or NotImplementedError of Python itself.
"""

import re


class LowBitAttnError(Exception):
    """Base of all exceptions that this package defines; each has a base of Python's own beside it."""


class CacheFaultError(LowBitAttnError, RuntimeError):
    """A step on the device could not be done; the sequences it names lost its tokens and are otherwise unchanged."""


class CacheFileError(LowBitAttnError, ValueError):
    """A file that holds no cache which this version can read."""


class CodebookFileError(LowBitAttnError, ValueError):
    """A file that holds no codebooks which this version can read, or codebooks of another model."""


class DamagedEntryError(LowBitAttnError, ValueError):
    """An entry is not what was written: cut, changed, or without its .so; the message names the file."""


class FetchError(LowBitAttnError, RuntimeError):
    """The model file could not be had; the message says what to do."""


class FolderError(LowBitAttnError, ValueError):
    """An output folder with something else in it, or one that cannot be used."""


class KernelNotBuiltError(LowBitAttnError, RuntimeError):
    """A kernel is not in the cache and may not, or cannot, be built or loaded here; the message names the remedy."""


class KernelCheckError(KernelNotBuiltError):
    """A built kernel breaks a static check: spills, a missing instruction, counts or shared memory."""


class KernelWheelError(LowBitAttnError, RuntimeError):
    """A kernel wheel cannot be made; the message says why and what to do."""


class LayoutMismatchError(LowBitAttnError, ValueError):
    """The cache was packed in another order, or by other codebooks, than what reads it has."""


class OutputPathError(LowBitAttnError, ValueError):
    """A path that cannot be written; the message names the argument, the path and the reason."""


class PageExhaustedError(LowBitAttnError, RuntimeError):
    """The pool has fewer free pages than the call needs; nothing was written."""


class RankError(LowBitAttnError, RuntimeError):
    """A call that this rank could make and another one refused, made otherwise, or did not make at all; this rank wrote
    nothing."""


class TextError(LowBitAttnError, ValueError):
    """A calibration text that is too short."""


class TextFileError(LowBitAttnError, ValueError):
    """A file that is missing, empty or not in UTF-8; the message names the file and, where it shows, its encoding."""


class ToolMissingError(LowBitAttnError, RuntimeError):
    """A program or library that the call needs is not installed; the message says how to get it."""


class ToolFailedError(LowBitAttnError, RuntimeError):
    """A program failed. The message is one line; ``output`` has all that it printed."""

    def __init__(self, name: str, output: str):
        super().__init__(name, output)
        self.name, self.output = name, output

    def __str__(self) -> str:
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        told = [line for line in lines if re.search(r"error|No space left|cannot", line)] or lines
        return f"{self.name} failed: {told[0][:200] if told else 'it printed nothing'}"


class UntrustedError(LowBitAttnError, PermissionError):
    """Somebody else may have written a file, or may write it; the message names it and the remedy."""


class VersionError(LowBitAttnError, ValueError):
    """Saved weights are of another layout version, format or shape than the module that reads them."""


class WeightFileError(LowBitAttnError, ValueError):
    """Files of a quantized model that are damaged, or of which a part is missing or does not fit the others."""


class OtherWeightsWarning(UserWarning):
    """Codebooks are used with a model whose weights are not those that they were learned from."""
