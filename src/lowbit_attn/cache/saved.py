"""A cache as a file: the records of pages in use, counters, 16-bit tokens, and what gives the bytes their meaning.

Codebooks are not in it, since all sequences and caches of a layer share them: they are given anew to ``load``, and the
identity in the file says whether they are the right ones.
"""

import os

import numpy as np
import torch

from lowbit_attn import tensor_file
from lowbit_attn.cache import significance
from lowbit_attn.cache.attached import check_identity, identity
from lowbit_attn.errors import CacheFileError, LayoutMismatchError

KIND = "lowbit_attn KV cache"
VERSION = 1  # of the file: another number where the meaning of a tensor or entry changes
NUMBERS = ("num_pages", "num_heads_kv", "head_dim", "sinks", "max_batch", "max_q_len", "max_seqlen")
SWITCHES = ("range_search", "saturate", "rotate_keys")
SWITCHED = {"None": None, "True": True, "False": False}
TOKENS = ("sink_k", "sink_v", "ring_k", "ring_v")


class _MisfitError(Exception):
    """A part of a file contradicts another."""


def save(cache, path: str | os.PathLike) -> None:
    """Write a cache into one safetensors file. NotImplementedError for a Format that FORMATS does not name."""
    if cache.unnamed:
        raise NotImplementedError(f"save: {'; '.join(cache.unnamed)}")
    cache.settle("save")
    check_identity(cache)
    cache.check()
    book = cache.book
    pages = torch.from_numpy(np.flatnonzero(book.refs).astype(np.int32))
    tensors = {"pages": pages, "records": cache.pool[pages.long().to(cache.device)], "table": cache.table,
               "counters": torch.stack(cache.counters()), **{name: getattr(cache, name) for name in TOKENS},
               "free": cache.free_list, "n_pages": cache.n_pages, "state": torch.from_numpy(book.state.astype(np.int8)),
               "first_positions": torch.from_numpy(cache.first_positions)}
    if cache.format.orders_tokens:
        tensors |= {name: getattr(cache, name) for name in significance.STATE}
    if cache.query_weights is not None:
        tensors["query_weights"] = cache.query_weights
    about = {"kind": KIND, "version": str(VERSION), "format": cache.format.name, "identity": cache.identity,
             "dtype": str(cache.dtype).removeprefix("torch."),
             **{name: str(getattr(cache, name)) for name in (*NUMBERS, *SWITCHES)}}
    tensor_file.write(path, tensors, about)


def load(kind: type, path: str | os.PathLike, device: torch.device | str, codebooks):
    """A cache of class ``kind`` with the contents of a file of ``save``.

    FileNotFoundError, or CacheFileError that says what is wrong with the file; LayoutMismatchError where its bytes are
    of another version's layout or of other codebooks; what the constructor raises.
    """
    about, tensors = tensor_file.read(path, KIND, "path", "KVCache.save", CacheFileError)
    if about.get("version") != str(VERSION):
        raise CacheFileError(f"path: {str(path)!r} is of version {about.get('version')}, supported: {VERSION}; save "
                             "the cache again with this version")
    cache = _made(kind, path, about, tensors, device, codebooks)
    if cache.identity != about["identity"]:
        raise LayoutMismatchError(f"path: {str(path)!r} was packed as {about['identity']}, supported: "
                                  f"{identity(cache.format, cache.attached)}, this version's layout and the codebooks "
                                  "given; pack the tokens again, or give the codebooks that they were packed with")
    try:
        _fill(cache, tensors)
    except (KeyError, _MisfitError) as problem:
        raise CacheFileError(f"path: {str(path)!r} does not fit together: {problem}") from None
    return cache


def _made(kind: type, path, about: dict[str, str], tensors: dict, device, codebooks):
    """An empty cache as the file describes it."""
    try:
        numbers = {name: int(about[name]) for name in NUMBERS}
        switches = {name: SWITCHED[about[name]] for name in SWITCHES}
        format, dtype = about["format"], getattr(torch, about["dtype"])
        about["identity"]
    except (KeyError, ValueError, AttributeError) as problem:
        raise CacheFileError(f"path: {str(path)!r} does not say what its cache is: {problem!r}") from None
    weights = tensors.get("query_weights")
    weights = None if weights is None else weights.to(device)
    return kind(format, dtype=dtype, device=device, codebooks=codebooks, query_weights=weights, **numbers, **switches)


@torch.inference_mode(False)
def _fill(cache, tensors: dict[str, torch.Tensor]) -> None:
    """Put a file's contents into an empty cache of its shape; KeyError or _MisfitError for what does not fit."""
    names = (*TOKENS, *significance.STATE) if cache.format.orders_tokens else TOKENS
    wanted = {"table": cache.table, "counters": torch.stack(cache.counters()), "n_pages": cache.n_pages,
              "first_positions": torch.from_numpy(cache.first_positions),
              "state": torch.empty(cache.max_batch, dtype=torch.int8, device="cpu"),
              **{name: getattr(cache, name) for name in names}}
    for name, like in wanted.items():
        found = tensors[name]
        _require((found.shape, found.dtype) == (like.shape, like.dtype),
                 f"{name} is {found.dtype} {list(found.shape)}, not {like.dtype} {list(like.shape)}")
    pages, records, free = tensors["pages"], tensors["records"], tensors["free"].tolist()
    _require(records.shape == (len(pages), *cache.pool.shape[1:]), f"records are {list(records.shape)}")
    table, n_pages, book = tensors["table"], tensors["n_pages"].tolist(), cache.book
    for row, count in enumerate(n_pages):
        _require(0 <= count <= table.shape[1], f"row {row} holds {count} pages")
        held = table[row, :count].tolist()
        _require(all(0 <= page < cache.num_pages for page in held) and len(set(held)) == count,
                 f"row {row} holds pages {held}")
        book.hold(row, held)
    book.free, book.state[:] = free, tensors["state"].numpy()
    _require(sorted(free) == np.flatnonzero(book.refs == 0).tolist(), f"free pages are {free}")
    _require(pages.tolist() == np.flatnonzero(book.refs).tolist(), f"records are of pages {pages.tolist()}")
    _check_counters(cache, tensors["counters"].numpy(), np.array(n_pages))
    cache.pool[pages.long().to(cache.device)] = records.to(cache.device)
    for name in ("table", *names):
        getattr(cache, name).copy_(tensors[name])
    for mine, theirs in zip(cache.counters(), tensors["counters"]):
        mine.copy_(theirs)
    cache.first_positions[:] = tensors["first_positions"].numpy()
    cache.bind()
    cache.refresh_limits()


def _check_counters(cache, counters: np.ndarray, n_pages: np.ndarray) -> None:
    """Raise unless the counters of all rows are such as a cache of this shape can have."""
    n_sink, n_qk, n_qv, n_tok = counters
    fits = (n_sink == np.minimum(n_tok, cache.sinks)) & (0 <= n_qv) & (n_qv <= n_qk) & (n_qk <= 128 * n_pages)
    fits &= (n_qk % 128 == 0) & (n_qv % 128 == 0) & (n_qk <= n_tok - n_sink) & (n_tok <= cache.max_seqlen)
    fits &= n_tok - n_sink - n_qk <= cache.ring_k.shape[2]
    fits &= n_tok - n_sink - n_qv <= cache.ring_v.shape[2]
    _require(fits.all(), f"counters of rows {np.flatnonzero(~fits).tolist()}")


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise _MisfitError(what)
