"""Caches as files: every format comes back as it was, and files that do not fit say why."""

import copy
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from lowbit_attn import FORMATS, KVCache, LayoutMismatchError, decode, tensor_file
from lowbit_attn.cache.saved import CacheFileError
from lowbit_attn.testing import assert_same_state, normal_codebooks

HEADS, DIM = 2, 64
NAMES = (*FORMATS, "k2tv1-g32", "k4v4-bf16", "kitty-weighted", "cq1", "cq2-nonorm", "k4vcq2", "kcq2v4", "k4v2-boost")


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(2, count, HEADS, DIM).half())


def of_format(name: str, rope: str = "post") -> dict:
    """What a cache of this format is made with."""
    fmt = FORMATS[name]
    books = normal_codebooks(name, 1, HEADS, DIM, rope).layer(0) if fmt.needs_codebooks else None
    weights = torch.rand(HEADS, DIM) if fmt.k.weighs_queries else None
    return dict(codebooks=books, query_weights=weights)


def make(name: str = "cq2", rope: str = "post", **options) -> KVCache:
    return KVCache(name, 20, HEADS, DIM, **of_format(name, rope), max_batch=5, max_q_len=2, **options)


def filled(cache: KVCache) -> KVCache:
    """Rows: 0 with pages, 1 shares two of them, 2 freed, 3 within its sinks, 4 unused."""
    cache.set_first_positions([0], 40)
    cache.prefill(0, *tokens(500))
    cache.share(0, 1, cache.sinks + 256)
    cache.prefill(2, *tokens(300))
    cache.prefill(3, *tokens(5))
    cache.free([2])
    cache.append(*(x[:, None] for x in tokens(2)), [1, 3])
    return cache


def assert_equal(got: KVCache, want: KVCache) -> None:
    """Contents, the host's account, and what both do next."""
    assert_same_state(got, want)
    got.book.check()
    assert (got.book.held, got.book.free, got.book.state.tolist()) == (
        want.book.held, want.book.free, want.book.state.tolist())
    assert got.first_positions.tolist() == want.first_positions.tolist() and got.limit.tolist() == want.limit.tolist()
    for name in ("sinks", "range_search", "saturate", "rotate_keys", "max_seqlen", "dtype", "identity", "max_q_len"):
        assert getattr(got, name) == getattr(want, name)
    k, v = tokens(200)
    for one in (got, want):
        one.prefill(1, k, v)
        one.prefill(2, k, v)
        one.append(k[:2, None], v[:2, None], [3, 0])
    assert_same_state(got, want)
    assert got.book.held == want.book.held
    q = torch.randn(5, 1, 4, DIM).to(got.dtype)
    for a, b in zip(decode(q, got), decode(q, want)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_comes_back(name, tmp_path):
    cache = filled(make(name))
    before = copy.deepcopy(cache)
    cache.save(tmp_path / "cache")
    found = KVCache.load(tmp_path / "cache", codebooks=of_format(name)["codebooks"])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert_same_state(cache, before)
    assert_equal(found, cache)


@pytest.mark.parametrize("options", (
    dict(rope="pre"), dict(sinks=0), dict(dtype=torch.bfloat16), dict(max_seqlen=900, range_search=True),
    dict(name="k4tv4", rotate_keys=True, saturate=True),
))
def test_options_come_back(options, tmp_path):
    cache = make(**options)
    if options.get("dtype") is None:
        filled(cache)
    cache.save(tmp_path / "cache")
    books = None if cache.attached is None else cache.attached.layer
    found = KVCache.load(str(tmp_path / "cache"), "cpu", codebooks=books)
    assert_same_state(found, cache)
    if options.get("dtype") is None:
        assert_equal(found, cache)


def test_only_pages_in_use_are_written(tmp_path):
    cache = make("k4v4")
    cache.save(tmp_path / "empty")
    filled(cache).save(tmp_path / "filled")
    empty, full = ((tmp_path / name).stat().st_size for name in ("empty", "filled"))
    used = int((cache.book.refs > 0).sum())
    assert 0 < used < 20 and abs(full - empty - used * HEADS * cache.record.nbytes) < 1000


def test_a_file_is_a_copy(tmp_path):
    cache = filled(make())
    cache.save(tmp_path / "cache")
    found = KVCache.load(tmp_path / "cache", codebooks=cache.attached.layer)
    before = copy.deepcopy(found)
    cache.save(tmp_path / "cache")
    cache.clear([0, 1])
    (tmp_path / "cache").write_bytes(b"")
    assert_same_state(found, before)


def rewritten(path, change=lambda tensors, about: None, **entries) -> None:
    """Write a file again with other tensors or entries."""
    with safe_open(path, "pt") as file:
        about, tensors = dict(file.metadata()), {name: file.get_tensor(name).clone() for name in file.keys()}
    change(tensors, about)
    save_file(tensors, path, signed(tensors, {name: x for name, x in (about | entries).items() if x is not None}))


def signed(tensors, about) -> dict:
    """The text of a file with the hash of its contents; version 1 has none."""
    about = {name: text for name, text in about.items() if name != "hash"}
    return about if about.get("version") == "1" else about | {"hash": tensor_file.digest(tensors, about)}


def put(name: str, value, *at):
    def change(tensors, about):
        tensors[name][at] = value
    return change


@pytest.mark.parametrize("change, entries, words", [
    (None, dict(kind="other"), "holds something else, supported: files of KVCache.save"),
    (None, dict(version="2"), "is of version 2, supported: 1, 3"),
    (None, dict(version=None), "is of version None"),
    (None, dict(format=None), "does not say what its cache is: KeyError"),
    (None, dict(identity=None), "does not say what its cache is: KeyError"),
    (None, dict(sinks="x"), "does not say what its cache is: ValueError"),
    (None, dict(saturate="perhaps"), "does not say what its cache is: KeyError"),
    (None, dict(dtype="float17"), "does not say what its cache is: KeyError"),
    (None, dict(max_batch="4"), "does not fit together: .*(table|counters|sink_k)"),
    (None, dict(num_pages="3"), "does not fit together: free pages are"),
    (None, dict(sinks="16"), "does not fit together"),
    (lambda tensors, about: tensors.pop("ring_k"), {}, "does not fit together: 'ring_k'"),
    (lambda tensors, about: tensors.update(records=tensors["records"][:-1].clone()), {}, "records are"),
    (lambda tensors, about: tensors.update(table=tensors["table"].long()), {}, "table is torch.int64"),
    (put("table", 99, 0, 0), {}, "table has values beyond -1 to 19"),
    (put("table", 7, 0, 1), {}, "does not fit together"),
    (put("n_pages", -1, 0), {}, "row 0 holds -1 pages"),
    (put("free", 0, 0), {}, "does not fit together: free pages are"),
    (put("counters", 128 * 9, 1, 0), {}, r"counters of rows \[0\]"),
    (put("counters", 7, 2, 0), {}, r"counters of rows \[0\]"),
    (put("counters", 1 << 20, 3, 3), {}, r"counters of rows \[3\]"),
])
def test_files_that_do_not_fit_are_refused(change, entries, words, tmp_path):
    cache = filled(make())
    cache.save(tmp_path / "cache")
    rewritten(tmp_path / "cache", change or (lambda tensors, about: None), **entries)
    with pytest.raises(CacheFileError, match=words):
        KVCache.load(tmp_path / "cache", codebooks=cache.attached.layer)


def moved(name: str, dtype) -> callable:
    return lambda tensors, about: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize("change, words", [
    (put("order", 5), "order has a row that is no permutation"),
    (put("order", 200, 0, 0, 3), "order has a row that is no permutation"),
    (put("seen", -1, 0, 0), "seen has negative values"),
    (put("state", 2, 0), "state is"), (put("state", 9, 4), "state is"), (put("state", -1, 4), "state is"),
    (put("first_positions", -1, 0), "first_positions has values beyond"),
    (put("table", 99, 3, -1), "table has values beyond"),
    (put("records", 255), "records have positions beyond 127"),
    (moved("records", torch.float32), "records are torch.float32"),
    (moved("pages", torch.float32), "pages is|pages are torch.float32"),
    (moved("free", torch.float32), "free pages are torch.float32"),
    (lambda tensors, about: tensors.update(free=tensors["free"][None]), r"free pages are torch.int32 \[1, "),
    (lambda tensors, about: tensors.update(pages=tensors["pages"][0].clone()), "pages are"),
    (lambda tensors, about: tensors.update(extra=torch.zeros(1)), r"it has tensors \['extra'\]"),
    (lambda tensors, about: tensors.pop("order"), "'order'"),
    (lambda tensors, about: about.update(num_pages=str(10**12)), "num_pages: got '1000000000000'"),
    (lambda tensors, about: about.update(num_pages=str(10**9)), "free pages are"),
    (lambda tensors, about: about.update(max_batch=str(10**9)), "table is"),
    (lambda tensors, about: about.update(sinks=str(10**9)), "does not fit together"),
    (lambda tensors, about: about.update(head_dim="60"), "does not fit together"),
    (lambda tensors, about: about.update(max_q_len="900"), "does not fit together|describes no cache"),
    (lambda tensors, about: about.update(rotate_keys="True"), "describes no cache that can be made here: rotate_keys"),
    (lambda tensors, about: about.update(dtype="load"), "does not say what its cache is"),
    (lambda tensors, about: about.update(dtype="float64"), "does not say what its cache is"),
    (lambda tensors, about: about.update(format="../x"), "is not known"),
])
@pytest.mark.parametrize("version", ["1", "3"])
def test_what_kernels_follow_is_checked_in_both_versions(change, words, version, tmp_path):
    cache = filled(make("k4v2-boost"))
    cache.save(tmp_path / "cache")
    rewritten(tmp_path / "cache", change, version=version)
    with pytest.raises(CacheFileError, match=words):
        KVCache.load(tmp_path / "cache")


def test_a_page_that_is_not_packed_has_one_holder(tmp_path):
    cache, path = make("k4v2"), tmp_path / "cache"
    cache.prefill(0, *tokens(500))
    cache.reserve([0, 1], 400)
    cache.save(path)

    def change(tensors, about):
        pages = tensors["table"][0, : tensors["n_pages"][0]]
        tensors["table"][1], tensors["n_pages"][1] = tensors["table"][0], tensors["n_pages"][0]
        used = torch.isin(torch.arange(20), pages).int()
        tensors.update(pages=used.nonzero()[:, 0].int(), free=(used == 0).nonzero()[:, 0].int(),
                       records=torch.zeros(len(pages), *tensors["records"].shape[1:], dtype=torch.uint8))

    rewritten(path, change)
    with pytest.raises(CacheFileError, match="shares pages .*, which are not packed on both sides"):
        KVCache.load(path)


@pytest.mark.parametrize("name", ["k4v4", "cq2", "k4v2-boost", "kitty"])
def test_files_of_version_1_are_read(name, tmp_path):
    cache, path = filled(make(name)), tmp_path / "cache"
    cache.save(path)
    with safe_open(path, "pt") as file:
        about, tensors = dict(file.metadata()), {name: file.get_tensor(name).clone() for name in file.keys()}
    save_file(tensors, path, {name: text for name, text in about.items() if name != "hash"} | {"version": "1"})
    assert_equal(KVCache.load(path, codebooks=of_format(name)["codebooks"]), cache)


def test_whatever_changes_in_a_file_is_seen(tmp_path):
    cache, path = filled(make("k4v4")), tmp_path / "cache"
    cache.save(path)
    with safe_open(path, "pt") as file:
        about, tensors = dict(file.metadata()), {name: file.get_tensor(name).clone() for name in file.keys()}
    for name, x in tensors.items():
        if x.numel():
            changed = x.clone()
            changed.view(-1)[:1].view(torch.uint8)[0] ^= 1
            save_file(tensors | {name: changed}, path, about)
            with pytest.raises(CacheFileError, match="was changed after it was written"):
                KVCache.load(path)
    for name in set(about) - {"kind"}:
        for text in (None, "1", "7x"):
            save_file(tensors, path, {key: x for key, x in (about | {name: text}).items() if x is not None})
            with pytest.raises(CacheFileError):
                KVCache.load(path)


def test_truncated_and_missing_files_are_refused(tmp_path):
    cache, path = filled(make()), tmp_path / "cache"
    with pytest.raises(FileNotFoundError, match="path: no file .*KVCache.save makes one"):
        KVCache.load(path)
    cache.save(path)
    content = path.read_bytes()
    for part in (b"", content[:7], content[:200], content[:-1]):
        path.write_bytes(part)
        with pytest.raises(CacheFileError, match="is no whole safetensors file"):
            KVCache.load(path, codebooks=cache.attached.layer)


def test_other_layouts_and_codebooks_are_refused(tmp_path):
    cache, path = filled(make()), tmp_path / "cache"
    cache.save(path)
    with pytest.raises(LayoutMismatchError, match="was packed as cq-.*give the codebooks"):
        KVCache.load(path, codebooks=normal_codebooks("cq2", 1, HEADS, DIM, seed=3).layer(0))
    with pytest.raises(ValueError, match="codebooks: got none for format cq2"):
        KVCache.load(path)
    make("k4v4").save(path)
    with pytest.raises(ValueError, match="codebooks: got some for format k4v4"):
        KVCache.load(path, codebooks=cache.attached.layer)
    rewritten(path, identity="0123456789abcdef")
    with pytest.raises(LayoutMismatchError, match="was packed as 0123456789abcdef"):
        KVCache.load(path)
    rewritten(path, format="k9v9")
    with pytest.raises(CacheFileError, match="format 'k9v9' is not known"):
        KVCache.load(path)


def test_formats_without_a_name_and_broken_writes(tmp_path, monkeypatch):
    fmt = replace(FORMATS["k4v4"], window_v=128)
    with pytest.raises(NotImplementedError, match="save: format k4v4: a Format that FORMATS does not give"):
        KVCache(fmt, 2, HEADS, DIM).save(tmp_path / "cache")
    old = filled(make("k4v4"))
    old.save(tmp_path / "cache")
    monkeypatch.setattr("lowbit_attn.tensor_file.os.replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make("k4v4").save(tmp_path / "cache")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert_equal(KVCache.load(tmp_path / "cache"), old)
