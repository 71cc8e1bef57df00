"""Numbers given to a cache: integers are checked, not cut, and what kernels could not address is refused."""

import numpy as np
import pytest
import torch

from lowbit_attn import FORMATS, KVCache, dispatch, loader
from unit.refusals import DIM, GOOD, HEADS, refused

NO_INTEGERS = (1.9, 1.0, "1", True, None, torch.tensor(1.0), torch.tensor(True), torch.tensor([1, 2]), np.float64(1))
NO_SEQUENCES = ("01", b"01", {0}, {0: 1}, 0, (row for row in [0]), torch.zeros(1, 1, dtype=torch.int32), np.array(0),
                [0.0], ["0"], [True], torch.zeros(1), np.zeros(1), np.zeros(1, dtype=bool))


@pytest.fixture
def cache() -> KVCache:
    cache = KVCache("k4v4", 4, HEADS, DIM, sinks=4, max_batch=2, max_q_len=4)
    for row in range(2):
        cache.prefill(row, *torch.randn(2, 150, HEADS, DIM))
    return cache


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_numbers_are_checked_not_cut(cache, value):
    k = torch.randn(3, HEADS, DIM)
    for name, call in (("seq", lambda: cache.prefill(value, k, k)), ("seq", lambda: cache.gather(value)),
                       ("src", lambda: cache.share(value, 1)), ("dst", lambda: cache.share(0, value))):
        refused(cache, call, TypeError, f"{name}: got ", "supported: an integer")
    if not isinstance(value, torch.Tensor) or not value.ndim:
        refused(cache, lambda: cache.rewind([0], value), TypeError, "tokens: got ", "supported: an integer")
        refused(cache, lambda: cache.reserve([0], value), TypeError, "lengths: got ", "supported: an integer")
    if value is not None:
        refused(cache, lambda: cache.share(0, 1, value), TypeError, "tokens: got ", "supported: an integer")
    for name in ("num_pages", "num_heads_kv", "head_dim", "sinks", "max_batch", "max_q_len", "max_seqlen"):
        if value is not None or name not in ("sinks", "max_seqlen"):
            with pytest.raises(TypeError, match=f"{name}: got .*, supported: an integer"):
                KVCache(**{**GOOD, name: value})


@pytest.mark.parametrize("value", NO_SEQUENCES, ids=lambda value: type(value).__name__)
def test_rows_are_a_sequence_of_integers(cache, value):
    k = torch.randn(1, 1, HEADS, DIM)
    for call in (cache.free, cache.clear, cache.flush, lambda seqs: cache.rewind(seqs, 0),
                 lambda seqs: cache.reserve(seqs, 9), lambda seqs: cache.append(k, k, seqs)):
        refused(cache, lambda: call(value), TypeError, "seqs: got ", "supported: ")  # noqa: B023


def test_integers_of_other_libraries_are_integers(cache):
    cache.prefill(np.int64(1), *torch.randn(2, 3, HEADS, DIM))
    cache.rewind(torch.tensor([1]), torch.tensor(1))
    cache.rewind(np.array([1, 0]), np.array([1, 0], dtype=np.int8))
    cache.reserve(range(2), (9, np.int16(300)))
    assert cache.n_tok.tolist() == [150, 151] and cache.n_pages.tolist() == [1, 2]
    cache.free((1,))


@pytest.mark.parametrize("values", ([], [1, 1, 1], (5,)), ids=str)
def test_a_number_for_each_row_or_one_for_all(cache, values):
    words = (f"got {len(values)} numbers for 2 sequences", "one for each, or one for all")
    refused(cache, lambda: cache.rewind([0, 1], values), ValueError, "tokens: ", *words)
    refused(cache, lambda: cache.reserve([0, 1], values), ValueError, "lengths: ", *words)


def test_numbers_of_no_sequence(cache):
    refused(cache, lambda: cache.rewind([0], 1 << 63), ValueError, "tokens: ", "64 bits")
    refused(cache, lambda: cache.append(*torch.randn(2, 1, 1, HEADS, DIM), [1 << 70]), ValueError, "seqs: ", "64 bits")
    refused(cache, lambda: cache.reserve([0], [-5]), ValueError, "lengths: got [-5]", "0 to max_seqlen")
    refused(cache, lambda: cache.reserve([0], (1 << 63) - 1), ValueError, "supported: max_seqlen")


@pytest.mark.parametrize("name, value", [("range_search", "yes"), ("range_search", 1), ("saturate", None),
                                         ("rotate_keys", 0)])
def test_truth_values(name, value):
    with pytest.raises(TypeError, match=f"{name}: got .*, supported: True, False"):
        KVCache(**{**GOOD, name: value})


@pytest.mark.parametrize("pages, error, words", [
    ([4], ValueError, "pages: got [4], supported: 0 to num_pages - 1 = 3"),
    (torch.tensor([-1]), ValueError, "pages: got [-1]"), ([0.5], TypeError, "pages: got 0.5, supported: an integer"),
    (torch.tensor([0.0]), TypeError, "pages: got 0.0, supported: an integer"),
    (torch.tensor(0), TypeError, "pages: got shape [], supported: a sequence of integers"),
    (0, TypeError, "pages: got 0, supported: a sequence of integers"),
])
def test_pages_to_read(cache, pages, error, words):
    refused(cache, lambda: cache.dequantize_pages(pages), error, words)
    for good in ([0, 3], torch.tensor([0, 3]), np.array([0, 3], dtype=np.uint8), range(0, 4, 3)):
        assert cache.dequantize_pages(good)[0].shape == (2, HEADS, 128, DIM)
    assert cache.dequantize_pages([])[0].shape == (0, HEADS, 128, DIM)


def test_what_kernels_could_not_address_is_refused_before_it_is_allocated():
    """Table entries and record units are int32 on the device, positions less than a window that sees all."""
    record = FORMATS["k4v4"].record_bytes(128)
    most = ((1 << 31) - 1) // (8 * record // 128)
    for change, words in (
        (dict(num_pages=most + 1, num_heads_kv=8, head_dim=128, max_seqlen=500),
         f"num_pages: got {most + 1} .* supported: pools of at most 256 GiB, {most} pages"),
        (dict(num_pages=1 << 20, max_batch=1 << 11), "max_batch: got 2048 sequences of at most 1048576 pages"),
        (dict(max_seqlen=(1 << 30) + 1), "max_seqlen: got .* 1 to 1073741824"),
    ):
        with pytest.raises(ValueError, match=words):
            KVCache(**{**GOOD, **change})


@pytest.mark.parametrize("pages", (1, 3, 4, 10))
def test_more_pages_than_a_grid_has_take_more_launches(monkeypatch, pages):
    """Packing and reading: each launch gets its part of the pages and of the tokens."""
    launches = {"quantize": [], "dequantize": []}
    monkeypatch.setattr(loader, "load", lambda key: lambda *arguments: launches[key.op].append(arguments))
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    monkeypatch.setattr(dispatch, "GRID_PAGES", 3)
    cache = KVCache("k4v4", 12, HEADS, DIM)
    ids, blocks = torch.arange(pages), torch.randn(pages, HEADS, 128, DIM).half()
    dispatch._write_blocks(cache, ids, blocks, "k")
    assert torch.equal(torch.cat([x for x, *_ in launches["quantize"]]), blocks)
    assert torch.equal(torch.cat([x for _, x, *_ in launches["quantize"]]), ids.int())
    found = dispatch._read_pages(cache, ids)
    for side, x in zip((launches["dequantize"][: -(-pages // 3)], launches["dequantize"][-(-pages // 3) :]), found):
        assert torch.equal(torch.cat([x for x, *_ in side]), ids.int())
        assert [out.data_ptr() for *_, out, _, _ in side] == [x[at:].data_ptr() for at in range(0, pages, 3)]
    for launched in launches.values():
        assert all(max(len(x) for x in arguments[:1]) <= 3 for arguments in launched)


def test_kernels_are_there_before_anything_is_written(monkeypatch):
    """What cannot be built is told by the call that needs it, of both sides before the first is packed."""
    asked = []

    def load(key):
        asked.append((key.op, key.variant))
        if key.variant == "v" or key.op == "append":
            raise loader.KernelNotBuiltError("not built")
        return lambda *arguments: asked.append("launch")

    monkeypatch.setattr(loader, "load", load)
    monkeypatch.setattr(loader, "argument", lambda tensor: tensor)
    monkeypatch.setattr(dispatch, "target_of", lambda device: ("hopper", "sm_90a"))
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", dispatch.BACKENDS["cuda"]._replace(prepare=lambda cache: None))
    cache = KVCache("k4v4", 4, HEADS, DIM)
    for call, wanted in ((lambda: cache.prefill(0, *torch.randn(2, 200, HEADS, DIM)), ("quantize", "v")),
                         (lambda: cache.append(*torch.randn(2, 1, 1, HEADS, DIM)), ("append", ""))):
        refused(cache, call, loader.KernelNotBuiltError, "not built")
        assert wanted in asked and "launch" not in asked
        assert cache.counts.n_tok.tolist() == [0] and cache.n_free == 4
