"""The view of a cache: its fields are the arguments of every kernel, in its order."""

import inspect

import pytest
import torch

from lowbit_attn import KVCache, decode, kernels, ops
from lowbit_attn.cache.view import FIELDS, ROW_FIELDS, STATE, STEP_FIELDS, optional
from lowbit_attn.formats import FORMATS
from lowbit_attn.plan import check_whole_accesses

ROWS = [field.name for field in ROW_FIELDS]
STRIDES = ["page_stride", "head_stride", "table_b", "table_h"]


def test_hopper_kernels_take_the_fields_in_order():
    from lowbit_attn.hopper.common.abi import DecodeKernel, View
    from lowbit_attn.hopper.common.book_abi import BookDecodeKernel, Books
    from lowbit_attn.hopper.common.level_abi import LevelDecodeKernel
    from lowbit_attn.hopper.decode import fake_arguments

    names = list(inspect.signature(DecodeKernel.__call__).parameters)[1:]
    assert names[: 1 + len(ROWS) + len(STATE)] == ["q", *ROWS, *STATE] and names[-5:] == [*STRIDES, "stream"]
    assert list(View._fields) == [*ROWS, *STATE, *STRIDES, "books", "hidden"]
    import cutlass

    assert len(fake_arguments(128, cutlass.Float16)) == len(names) - 1  # all but the stream
    with_books, at = list(inspect.signature(BookDecodeKernel.__call__).parameters)[1:], 1 + len(ROWS) + len(STATE)
    assert with_books == [*names[:at], "k_book", "v_book", "k_channels", *names[at:]]
    of_level = list(inspect.signature(LevelDecodeKernel.__call__).parameters)[1:]
    assert of_level == [*names[:at], "hidden", *names[at:]]
    assert len(fake_arguments(128, cutlass.Float16, has_hidden=True)) == len(of_level) - 1
    assert len(fake_arguments(128, cutlass.Float16, True)) == len(with_books) - 1 == len(names) - 1 + len(Books._fields)


def buffers(key: kernels.KernelKey) -> list[str]:
    """Arguments of a TileLang kernel, buffers by their names."""
    program = kernels.trace(key).prim_func
    return [program.buffer_map[p].name if p in program.buffer_map else p.name for p in program.params]


def test_ampere_kernels_take_the_fields_in_order():
    key = kernels.decode_key("ampere", "sm_80", "float16", 64, "k4v4", "register", 8)
    names = [name.removeprefix("batch_") for name in buffers(key)]
    assert names[: 1 + len(ROWS) + len(STATE)] == ["q", *ROWS, *STATE] and names[-4:] == STRIDES
    of_level = buffers(kernels.decode_key("ampere", "sm_80", "float16", 64, "k4v4", "register", 8,
                                          (kernels.LEVEL_WINDOW,)))
    at = 1 + len(ROWS) + len(STATE)
    assert [name.removeprefix("batch_") for name in of_level] == [*names[:at], "hidden", *names[at:]]


def test_a_step_takes_the_fields_in_order():
    names = buffers(kernels.append_key("sm_80", "float16", 64, FORMATS["k4v4"], None))
    names.remove("pool_meta")  # the pool once more, as halves
    assert names[2 : 2 + len(ROWS) + len(STEP_FIELDS)] == [*ROWS, *STEP_FIELDS]


def test_optional_fields_come_behind_the_others():
    wanted = len(ROWS) + len(STEP_FIELDS) + 2
    names = buffers(kernels.append_key("sm_80", "float16", 64, FORMATS["k4v2-boost"], None))
    assert names[wanted + 1 :][:4] == ["order", "score", "seen", "num_sinks"]
    for name, planes in (("kitty-weighted", ["query_weights"]), ("kitty", [])):
        names = buffers(kernels.append_key("sm_80", "float16", 64, FORMATS[name], None))
        names.remove("pool_meta")
        assert names[wanted:] == [*planes, "num_sinks", "window_k", "window_v", *STRIDES[:2]]
        weights = torch.rand(2, 64) if planes else None
        cache = KVCache(name, 4, 2, 64, max_batch=3, query_weights=weights)
        assert [x is weights for x in optional(cache, "append")] == [True] * len(planes)
        assert optional(cache, "decode") == ()
    assert [len(optional(KVCache("k4v2-boost", 4, 2, 64), op)) for op in ("append", "score")] == [3, 2]


def test_sinks_and_rings_begin_at_whole_accesses():
    ring = torch.zeros(3, 2, 64, 68, dtype=torch.float16)
    check_whole_accesses("ring_k", ring.new_zeros(3, 2, 70, 64)[:, :, :64])
    for wrong in (ring[..., :64], ring.new_zeros(3, 2, 4097)[..., :4096].unflatten(2, (64, 64)),
                  ring.new_zeros(3 * 8192 + 1)[1:].view(3, 2, 64, 64)):
        with pytest.raises(ValueError, match="ring_k: got strides"):
            check_whole_accesses("ring_k", wrong)


def test_a_cache_has_the_fields():
    cache = KVCache("kitty", 4, 2, 64, max_batch=3)
    sizes = {"num_pages": 4, "num_heads_kv": 2, "seqs": 3, "rings": 3, "head_dim": 64}
    for field in FIELDS:
        x = getattr(cache, field.name)
        assert x.dtype == {"token": torch.float16}.get(field.dtype, getattr(torch, field.dtype, None))
        assert len(x.shape) == len(field.shape)
        assert all(size == sizes.get(axis, size) for axis, size in zip(x.shape, field.shape))


def held(cache: KVCache, **changed) -> ops.HeldCache:
    """The cache as operators have it, some fields replaced."""
    state = {name: getattr(cache, name) for name in STATE} | dict(zip(ROWS, cache.batch_rows(cache.max_batch)))
    return ops.HeldCache(cache.format.name, list(cache.strides), state | changed)


@pytest.mark.parametrize("name", ("k4v4", "kitty"))
def test_a_ring_has_an_origin_of_its_own(name):
    """Pages that a sequence does not hold any more: its ring starts where it did."""
    cache = KVCache(name, 12, 2, 64, sinks=4, max_batch=1)
    k, v = torch.randn(2, 700, 2, 64).half()
    cache.prefill(0, k, v)
    pages = int(cache.n_qk[0]) // 128
    table = cache.table.clone()
    table[0, : pages - 2] = cache.table[0, 2:pages]  # without the first two pages
    view = held(cache, table=table, ring_start=cache.n_qk.clone(), n_qk=cache.n_qk - 256, n_qv=cache.n_qv - 256,
                n_tok=cache.n_tok)
    got, want = view.held(0, 0), cache.gather(0)
    for ours, theirs in zip(got, want):
        assert torch.equal(ours, torch.cat((theirs[:, :4], theirs[:, 4 + 256:]), 1))


def test_rows_are_checked():
    cache = KVCache("k4v4", 4, 2, 64, max_batch=3)
    q = torch.randn(2, 1, 4, 64)
    for rows, message in (([0, 0], "distinct rows"), ([0, 3], "distinct rows"), ([1], "1 rows for a batch of 2"),
                          (torch.zeros(3, dtype=torch.int32), "rows"), (torch.zeros(2, dtype=torch.int64), "rows")):
        with pytest.raises((ValueError, TypeError), match=message):
            decode(q, cache, rows=rows)
    with pytest.raises(TypeError, match="rows"):
        decode(q, cache, rows=["a", "b"])


def test_rows_in_any_order():
    cache = KVCache("kitty", 24, 2, 64, max_batch=4)
    for row, tokens in enumerate((300, 10, 0, 500)):
        if tokens:
            cache.prefill(row, *torch.randn(2, tokens, 2, 64))
    q = torch.randn(4, 1, 4, 64)
    o, lse = decode(q, cache)
    some, some_lse = decode(q[[3, 1]], cache, rows=[3, 1])
    assert torch.equal(some, o[[3, 1]]) and torch.equal(some_lse, lse[[3, 1]])
    none, none_lse = decode(q[[0, 3]], cache, rows=torch.tensor([7, 3], dtype=torch.int32))
    assert (none[0] == 0).all() and (none_lse[0] == -torch.inf).all() and torch.equal(none[1], o[3])
