"""The measurement of a million tokens, with a few of them on the CPU: its check finds errors, its parts are timed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "perf"))
import e2e  # noqa: E402
import million  # noqa: E402
from llama import Decoder, Shape  # noqa: E402

TINY = Shape(layers=2, hidden=64, num_heads=4, num_heads_kv=2, head_dim=64, ffn=96, vocab=50)
TOKENS = 1024


@pytest.mark.parametrize("format, of_page", [("k4v4", 0.2), ("k2v2", 0.8), ("cq2", None)])
def test_a_layer_of_several_sequences_is_checked(format, of_page):
    found = million.check(TINY, format, TOKENS, "cpu", least_bytes=200_000)
    rows, odd = divmod(found["checked_rows"], TINY.num_heads)
    assert rows > 1 and not odd and 200_000 < found["pool_bytes"] <= 200_000 * rows / (rows - 1)
    assert max(found["o_error"], found["lse_error"]) < million.ERROR and not million.is_wrong(found)
    assert found["page_error"] == 0 if of_page is None else 0 < found["page_error"] < of_page < million.OTHER_PAGE


def test_pages_of_sequences_lie_among_each_others():
    cache, tokens = million.layer_of_many(TINY, "k4v4", TOKENS, 200_000, "cpu")
    first, second = (cache.table[row, : TOKENS // 128].tolist() for row in range(2))
    assert not set(first) & set(second) and min(second) < max(first)
    assert len(tokens) == cache.max_batch and cache.n_tok.tolist() == [TOKENS] * cache.max_batch


def test_another_page_and_other_values_are_found(monkeypatch):
    cache, tokens = million.layer_of_many(TINY, "k4v4", TOKENS, 200_000, "cpu")
    k, _ = tokens[0].make()
    held = cache.gather(0)[0].clone()
    assert million.worst_page(cache, held, k) < 0.2
    held[1, 256:384] = held[1, 128:256].clone()
    assert million.worst_page(cache, held, k) > million.OTHER_PAGE
    whole = million.decode
    monkeypatch.setattr(million, "decode", lambda q, cache: (whole(q, cache)[0] * 1.01, whole(q, cache)[1]))
    found = million.check(TINY, "k4v4", TOKENS, "cpu", 200_000)
    assert found["o_error"] > million.ERROR and million.is_wrong(found)
    assert million.is_wrong(found | {"o_error": 0.0, "page_error": 1.4})


def test_steps_are_timed(monkeypatch):
    monkeypatch.setattr(e2e, "PERIOD", 4)
    monkeypatch.setattr(e2e, "PART_REPLAYS", 2)
    model = Decoder(TINY, TOKENS + million.SPARE_TOKENS + 1, torch.float16, "cpu", fuse=False)
    found = million.measure(model, "k4v4", TOKENS, million.Runner("cpu"))
    assert min(found[name] for name in ("step_ms", "weights_ms", "attention_ms", "pack_s")) > 0
    pages = (TOKENS - 1) // 128
    page = million.FORMATS["k4v4"].record(64).nbytes * 2
    assert found["cache_bytes"] >= 2 * pages * page and found["weight_bytes"] == TINY.weights_bytes
