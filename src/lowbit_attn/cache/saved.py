"""A cache as a file: the records of pages in use, counters, 16-bit tokens, and what gives the bytes their meaning.

Codebooks are not in it, since all sequences and caches of a layer share them: they are given anew to ``load``, and the
identity in the file says whether they are the right ones.

A hash covers the file. What it says is checked all the same: a file of version 1 has no hash, and kernels follow its
tables and indices without a look at them.
"""

import os
from typing import NamedTuple

import numpy as np
import torch

from lowbit_attn import layout, tensor_file
from lowbit_attn.cache import significance
from lowbit_attn.cache.attached import attach, check_identity, identity
from lowbit_attn.cache.pages import FREED, LIVE, UNUSED
from lowbit_attn.errors import CacheFileError, LayoutMismatchError
from lowbit_attn.formats import FORMATS, Format

MOST = {"num_pages": 1 << 31, "num_heads_kv": 1 << 20, "head_dim": 1 << 15, "sinks": 1 << 30, "max_batch": 1 << 31,
        "max_q_len": 1 << 10, "max_seqlen": 1 << 30}
NUMBERS = tuple(MOST)
SWITCHES = ("range_search", "saturate", "rotate_keys")
SWITCHED = {"None": None, "True": True, "False": False}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOKENS = ("sink_k", "sink_v", "ring_k", "ring_v")
INDICES = {"positions": layout.PAGE_TOKENS, "index": None}  # planes of indices below this; None: below head_dim


FILE = tensor_file.Kind("lowbit_attn KV cache", "path", "KVCache.save", CacheFileError)


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
    about = {"format": cache.format.name, "identity": cache.identity,
             "dtype": str(cache.dtype).removeprefix("torch."),
             **{name: str(getattr(cache, name)) for name in (*NUMBERS, *SWITCHES)}}
    tensor_file.write(path, FILE, tensors, about)


def load(kind: type, path: str | os.PathLike, device: torch.device | str, codebooks):
    """A cache of class ``kind`` with the contents of a file of ``save``.

    FileNotFoundError, or CacheFileError that says what is wrong with the file; LayoutMismatchError where its bytes are
    of another version's layout or of other codebooks; what the constructor raises.
    """
    about, tensors = tensor_file.read(path, FILE)
    said = _said(path, about)
    try:
        _check_shapes(said, tensors)
    except (KeyError, _MisfitError) as problem:
        raise CacheFileError(f"path: {str(path)!r} does not fit together: {problem}") from None
    layer = attach(codebooks, said.format, said.numbers["num_heads_kv"], said.numbers["head_dim"], torch.device(device))
    if about["identity"] != (wanted := identity(said.format, layer)):
        raise LayoutMismatchError(f"path: {str(path)!r} was packed as {about['identity']}, supported: {wanted}, this "
                                  "version's layout and the codebooks given; pack the tokens again, or give the "
                                  "codebooks that they were packed with")
    try:
        _check_records(said, tensors)
        _check_values(said, tensors)
    except (KeyError, _MisfitError) as problem:
        raise CacheFileError(f"path: {str(path)!r} does not fit together: {problem}") from None
    cache = _made(kind, path, said, tensors, device, codebooks)
    try:
        _fill(cache, tensors)
    except (KeyError, _MisfitError) as problem:
        raise CacheFileError(f"path: {str(path)!r} does not fit together: {problem}") from None
    return cache


class _Said(NamedTuple):
    """What a file says of its cache, beside the tensors."""

    format: Format
    dtype: torch.dtype
    numbers: dict[str, int]
    switches: dict[str, bool | None]


def _said(path, about: dict[str, str]) -> _Said:
    if about["version"] == tensor_file.UNHASHED and tensor_file.HASH in about:
        raise CacheFileError(f"path: {str(path)!r} was changed after it was written: caches of version "
                             f"{tensor_file.UNHASHED} have no hash")
    try:
        numbers = {name: tensor_file.whole_number(about[name], name, 0, most) for name, most in MOST.items()}
        switches = {name: SWITCHED[about[name]] for name in SWITCHES}
        name, dtype = about["format"], DTYPES[about["dtype"]]
        about["identity"]
    except (KeyError, ValueError) as problem:
        raise CacheFileError(f"path: {str(path)!r} does not say what its cache is: {problem!r}") from None
    try:
        return _Said(FORMATS[name], dtype, numbers, switches)
    except KeyError as problem:
        raise CacheFileError(f"path: {str(path)!r}: {problem}") from None


def _made(kind: type, path, said: _Said, tensors: dict, device, codebooks):
    """An empty cache as the file describes it; its memory is no more than what the tensors' shapes have confirmed."""
    weights = tensors.get("query_weights")
    weights = None if weights is None else weights.to(device)
    try:
        return kind(said.format.name, dtype=said.dtype, device=device, codebooks=codebooks, query_weights=weights,
                    **said.numbers, **said.switches)
    except (ValueError, NotImplementedError) as problem:
        raise CacheFileError(f"path: {str(path)!r} describes no cache that can be made here: {problem}") from None


def _check_shapes(said: _Said, tensors: dict[str, torch.Tensor]) -> None:
    """Raise _MisfitError unless the tensors have the shapes and dtypes that the numbers ask for; None: any size.

    The size of a record is the layout's, which may be another version's: ``_check_records`` comes after that is known.
    """
    pages, heads, dim, sinks, rows, q_len, seqlen = (said.numbers[name] for name in NUMBERS)
    window = max(said.format.window_k, q_len - 1)
    blocks = max(1, (seqlen - min(seqlen, sinks) - window) // layout.PAGE_TOKENS)
    held = len(tensors["pages"]) if tensors["pages"].dim() else 0
    ring, sink, int32 = (rows, heads, None, dim), (rows, heads, max(1, sinks), dim), torch.int32
    wanted = {"pages": ((held,), int32), "records": ((held, heads, None), torch.uint8),
              "table": ((rows, blocks), int32), "counters": ((4, rows), int32), "free": ((None,), int32),
              "n_pages": ((rows,), int32), "state": ((rows,), torch.int8), "first_positions": ((rows,), torch.int64),
              "sink_k": (sink, said.dtype), "sink_v": (sink, said.dtype), "ring_k": (ring, said.dtype),
              "ring_v": (ring, said.dtype)}
    if said.format.orders_tokens:
        wanted |= {"score": ((rows, heads, None), torch.float32), "seen": ((rows, None), int32),
                   "order": ((rows, heads, layout.PAGE_TOKENS), torch.uint8)}
    if said.format.k.weighs_queries:
        wanted["query_weights"] = (heads, dim), torch.float32
    for name, (shape, dtype) in wanted.items():
        x = tensors[name]
        fits = x.dim() == len(shape) and all(b in (None, a) for a, b in zip(x.shape, shape))
        said_shape = ", ".join("any" if size is None else str(size) for size in shape)
        what = {"records": "records are", "free": "free pages are", "pages": "pages are"}.get(name, f"{name} is")
        _require(fits and x.dtype == dtype, f"{what} {x.dtype} {list(x.shape)}, not {dtype} [{said_shape}]")
    _require(not (more := sorted(set(tensors) - set(wanted))), f"it has tensors {more}")
    _require(held + len(tensors["free"]) == pages, f"free pages are {len(tensors['free'])}, and {held} of {pages} are "
                                                   "in use")


def _check_records(said: _Said, tensors: dict[str, torch.Tensor]) -> None:
    """Raise _MisfitError for records of another size, and for indices in them that lead out of a page or a head."""
    try:
        record = said.format.record(said.numbers["head_dim"])
    except ValueError as problem:
        raise _MisfitError(str(problem)) from None
    records = tensors["records"]
    _require(records.shape[2] == record.nbytes, f"records are {list(records.shape)}, not of {record.nbytes} bytes")
    for plane in (*record.k_planes, *record.v_planes):
        if plane.name in INDICES:
            found = records[..., plane.offset : plane.offset + plane.nbytes]
            most = INDICES[plane.name] or said.numbers["head_dim"]
            _require(not found.numel() or int(found.max()) < most, f"records have {plane.name} beyond {most - 1}")


def _check_values(said: _Said, tensors: dict[str, torch.Tensor]) -> None:
    """Raise _MisfitError for indices, states and positions that no cache has."""
    pages, rows_state = said.numbers["num_pages"], tensors["state"]
    for name, low, high in (("table", -1, pages - 1), ("pages", 0, pages - 1), ("free", 0, pages - 1),
                            ("first_positions", 0, MOST["max_seqlen"])):
        x = tensors[name]
        _require(bool(((x >= low) & (x <= high)).all()), f"{name} has values beyond {low} to {high}")
    _require(bool(((rows_state == UNUSED) | (rows_state == LIVE) | (rows_state == FREED)).all()),
             f"state is {rows_state.tolist()}")
    holds = (tensors["counters"][3] > 0) | (tensors["n_pages"] > 0)
    _require(not bool((holds & (rows_state != LIVE)).any()),
             f"state is {rows_state.tolist()}, and rows {holds.nonzero()[:, 0].tolist()} hold tokens or pages")
    if said.format.orders_tokens:
        order, every = tensors["order"].long(), torch.arange(layout.PAGE_TOKENS, device="cpu")
        _require(bool((order.sort(-1).values == every).all()), "order has a row that is no permutation of 0 to 127")
        _require(bool((tensors["seen"] >= 0).all()), "seen has negative values")


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
    _require(records.shape[1:] == cache.pool.shape[1:], f"records are {list(records.shape)}")
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
    for row, n_qv in enumerate(tensors["counters"][2].tolist()):  # what is not packed yet is written there
        shared = [page for page in book.held[row][n_qv // layout.PAGE_TOKENS :] if book.refs[page] > 1]
        _require(not shared, f"row {row} shares pages {shared}, which are not packed on both sides")
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
