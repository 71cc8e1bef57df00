"""Decode attention over KV caches of 1 to 8 bits."""

from lowbit_attn import linear_kernels  # noqa: F401  (registers products of codebook weights on a GPU)
from lowbit_attn._version import __version__
from lowbit_attn.api import decode, merge_states
from lowbit_attn.cache import KVCache
from lowbit_attn.dispatch import why_not
from lowbit_attn.errors import (
    CacheFaultError,
    CacheFileError,
    CodebookFileError,
    DamagedEntryError,
    FetchError,
    FolderError,
    KernelCheckError,
    KernelNotBuiltError,
    KernelWheelError,
    LayoutMismatchError,
    LowBitAttnError,
    OtherWeightsWarning,
    OutputPathError,
    PageExhaustedError,
    RankError,
    TextError,
    TextFileError,
    ToolFailedError,
    ToolMissingError,
    UntrustedError,
    VersionError,
    WeightFileError,
)
from lowbit_attn.formats import FORMATS, Format, UnknownFormatError
from lowbit_attn.formats.codebook import ResidualCodebookError

__all__ = ["CacheFaultError", "CacheFileError", "CodebookFileError", "DamagedEntryError", "FORMATS", "FetchError",
           "FolderError", "Format", "KVCache", "KernelCheckError", "KernelNotBuiltError", "KernelWheelError",
           "LayoutMismatchError", "LowBitAttnError", "OtherWeightsWarning", "OutputPathError", "PageExhaustedError",
           "RankError", "ResidualCodebookError", "TextError", "TextFileError", "ToolFailedError", "ToolMissingError",
           "UnknownFormatError", "UntrustedError", "VersionError", "WeightFileError", "__version__", "decode",
           "merge_states", "why_not"]
