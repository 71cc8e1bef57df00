"""The end-to-end benchmark on a CPU: its model, the caches it fills, its arithmetic and its report."""

import io
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lowbit_attn.budget import SIXTEEN_BIT, Gpu

sys.path.append(str(Path(__file__).parents[2] / "perf"))
import e2e  # noqa: E402
import e2e_report  # noqa: E402
from level_store import LevelStore  # noqa: E402
from llama import SHAPES, Decoder, LowBitStore, Shape, SixteenBitStore  # noqa: E402
from random_weights import random_weight  # noqa: E402

TINY = Shape(layers=2, hidden=64, num_heads=4, num_heads_kv=2, head_dim=32, ffn=96, vocab=50)
BATCH, SEQLEN, SPARE = 3, 300, 140


def stores(format: str, shape: Shape) -> tuple[SixteenBitStore, LowBitStore]:
    """Both kinds with the same tokens, different ones in each layer."""
    plain = SixteenBitStore(shape, BATCH, SEQLEN, SPARE, torch.float16, "cpu")
    low = LowBitStore(shape, format, BATCH, SEQLEN, SPARE, torch.float16, "cpu")
    for layer in range(shape.layers):
        k, v = (torch.randn(SEQLEN - 1, shape.num_heads_kv, shape.head_dim, dtype=torch.float16) for _ in range(2))
        plain.fill_layer(layer, k, v)
        low.fill_layer(layer, k, v)
    return plain, low


@pytest.mark.parametrize("shape", (TINY, replace(TINY, qk_norm=True)), ids=("llama", "qwen3"))
def test_a_step_over_8_bits_is_the_step_over_16(shape):
    model = Decoder(shape, SEQLEN + SPARE, torch.float16, "cpu", fuse=False)
    tokens, position = torch.tensor([1, 7, 33]), torch.full((BATCH,), SEQLEN - 1)
    want, got = (model.logits(tokens, position, store) for store in stores("k8v8", shape))
    assert want.shape == (BATCH, shape.vocab) and want.std() > 0.1
    assert (got - want).norm() < 0.02 * want.norm()
    moved = model.logits(tokens, position - 1, stores("k8v8", shape)[1])
    assert (moved - want).norm() > 0.05 * want.norm()  # RoPE counts


@pytest.mark.parametrize("weights", ("e8p4", "gptvq2"))
def test_a_step_with_codebook_weights_is_the_step_with_what_they_decode_to(weights):
    make = partial(random_weight, weights, device="cpu")
    quantized = Decoder(TINY, SEQLEN + SPARE, torch.float16, "cpu", fuse=False, quantized=make)
    plain = Decoder(TINY, SEQLEN + SPARE, torch.float16, "cpu", fuse=False)
    for mine, theirs in zip(plain.layers, quantized.layers):
        mine |= {name: theirs[name].dequantize(torch.float16) for name in TINY.linears}
    for name in ("embedding", "head"):
        setattr(plain, name, getattr(quantized, name))
    tokens, position, stores_of = torch.tensor([1, 7, 33]), torch.full((BATCH,), SEQLEN - 1), stores("k4v4", TINY)
    want, got = (model.logits(tokens, position, stores_of[0]) for model in (plain, quantized))
    assert want.std() > 0.1 and (got - want).norm() < 0.02 * want.norm()
    assert (plain.weights, quantized.weights) == (SIXTEEN_BIT, weights)
    assert plain.linear_bytes == TINY.linear_bytes
    assert quantized.linear_bytes == TINY.linear_bytes - sum(x.nbytes for x in plain_weights(plain)) + sum(
        x.nbytes for x in plain_weights(quantized))


def plain_weights(model: Decoder) -> list:
    return [layer[name] for layer in model.layers for name in TINY.linears]


def test_steps_go_on_from_their_own_tokens():
    model = Decoder(TINY, SEQLEN + SPARE, torch.float16, "cpu", fuse=False)
    store = stores("k4v4", TINY)[1]
    tokens, position = torch.tensor([1, 7, 33]), torch.full((BATCH,), SEQLEN - 1)
    for length in range(SEQLEN, SEQLEN + 90):
        model.step(tokens, position, store)
        assert position.tolist() == [length] * BATCH and store.caches[1].n_tok.tolist() == [length] * BATCH
    assert store.caches[0].n_qk.tolist() == [384] * BATCH and 0 <= tokens.min() and tokens.max() < TINY.vocab
    store.restart()
    for cache in store.caches:
        assert cache.n_tok.tolist() == [SEQLEN - 1] * BATCH and cache.n_qk.tolist() == [256] * BATCH
        assert cache.counts.n_tok.tolist() == [SEQLEN - 1] * BATCH


def test_every_sequence_has_pages_of_its_own():
    _, store = stores("k4v2", TINY)
    for cache in store.caches:
        tables = cache.table[:, :2].flatten().tolist()
        assert len(set(tables)) == len(tables) and min(tables) >= 0
        first = cache.gather(0)
        for row in range(1, BATCH):
            assert all(torch.equal(x, y) for x, y in zip(first, cache.gather(row)))
    assert not torch.equal(store.caches[0].gather(0)[0], store.caches[1].gather(0)[0])


@pytest.mark.parametrize("format", ("k4v4", "k2v2", "kitty"))
def test_bytes_of_a_sequence_are_those_allocated(format):
    shape = replace(TINY, head_dim=64)
    cache = LowBitStore(shape, format, BATCH, SEQLEN, SPARE, torch.float16, "cpu").caches[0]
    held = (cache.pool, cache.table, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v)
    assert sum(x.nbytes for x in held) == BATCH * LowBitStore.sequence_bytes(shape, format, SEQLEN, SPARE)


WIDE = replace(TINY, head_dim=64)  # levels need whole blocks of codes
LONG = 1500  # tokens, after which a head has pages of both levels


def level_store(format: str) -> LevelStore:
    store = LevelStore(WIDE, format, BATCH, LONG, SPARE, torch.float16, "cpu")
    store.fill()
    return store


@pytest.mark.parametrize("format", ("lean", "lean-low"))
def test_every_sequence_over_levels_has_frames_of_its_own(format):
    store = level_store(format)
    for cache in store.caches:
        cache.pool.check(cache)  # each frame is free or held once
        first = cache.gather(0)
        assert [len(k) for k, _ in first] == [LONG - 1] * 2 and (cache.c_pack > 0).all()
        for row in range(1, BATCH):
            assert all(torch.equal(x, y) for a, b in zip(first, cache.gather(row)) for x, y in zip(a, b))
    assert not torch.equal(store.caches[0].gather(0)[0][0], store.caches[1].gather(0)[0][0])
    held = [cache.pool.nbytes + sum(getattr(cache, name).nbytes for name in (
        "table", "hi_k", "hi_v", "lo_k", "lo_v", "ring_k", "ring_v", "score", "seen")) for cache in store.caches]
    assert held == [BATCH * LevelStore.sequence_bytes(WIDE, format, LONG, SPARE)] * 2


def test_steps_over_levels_are_managed_and_start_anew():
    store = level_store("lean")
    model = Decoder(WIDE, LONG + SPARE, torch.float16, "cpu", fuse=False)
    tokens, position = torch.tensor([1, 7, 33]), torch.full((BATCH,), LONG - 1)
    turns = store.turns(lambda: model.step(tokens, position, store))
    assert len(turns) == 8 and len(set(turns)) == 2
    before = [[k.clone() for k, _ in cache.gather(1)] for cache in store.caches]
    packed = [cache.n_out.tolist() for cache in store.caches]
    for i in range(e2e.PERIOD):
        turns[i % 8]()
    for cache, out in zip(store.caches, packed):
        assert cache.n_out.tolist() == [n + 128 for n in out]  # a block of each left
        assert cache.n_tok.tolist() == [LONG - 1 + e2e.PERIOD] * BATCH and not cache.n_drop.any()
        cache.pool.check(cache)
    store.restart()
    for cache, old, out in zip(store.caches, before, packed):
        assert cache.n_out.tolist() == out and cache.n_tok.tolist() == [LONG - 1] * BATCH
        cache.pool.check(cache)
        assert [len(k) for k, _ in cache.gather(1)] == [len(k) for k in old]
    with pytest.raises(RuntimeError, match="ring of 192 recent tokens full"):
        for _ in range(192):  # steps that are never managed
            store.append(0, *(torch.zeros(BATCH, 1, 2, 64, dtype=torch.float16) for _ in range(2)))


def test_largest_batch():
    shape, spare = SHAPES["llama-3.1-8b"], e2e.SPARE_TOKENS
    assert shape.weights_bytes // 2 == 8_030_261_248 - 65 * 4096  # the published count without the norms
    assert SHAPES["qwen3-8b"].weights_bytes // 2 == 8_190_735_360 - 36 * (2 * 4096 + 2 * 128) - 4096
    memory = 140 * 10**9
    batches = {name: e2e.largest_batch(memory, shape, name, 131072, spare, 1024)
               for name in (SIXTEEN_BIT, "k4v4", "k2v2")}
    for name, batch in batches.items():
        sequence = shape.layers * e2e.store_class(name).sequence_bytes(shape, name, 131072, spare)
        left = memory - e2e.KEPT_FREE_BYTES - shape.weights_bytes - batch * e2e.activation_bytes(shape)
        assert batch * sequence <= left < (batch + 1) * sequence + e2e.activation_bytes(shape)
    assert batches[SIXTEEN_BIT] == 7 and 3.5 < batches["k4v4"] / 7 < 4 and 6.5 < batches["k2v2"] / 7 < 8
    assert e2e.largest_batch(memory, shape, "k2v2", 4096, spare, 100) == 100
    assert e2e.largest_batch(10**9, shape, "k4v4", 4096, spare, 100) == 0


def test_a_step_over_levels_is_measured_with_manage(monkeypatch):
    monkeypatch.setattr(e2e, "PERIOD", 16)
    model = Decoder(WIDE, LONG + e2e.SPARE_TOKENS, torch.float16, "cpu", fuse=False)
    gpu = Gpu("none", 1.0, ((0.0, 0.0), (1e6, 10.0)), "invented")
    result = e2e.measure("tiny", model, "lean", 2, LONG, True, gpu, e2e.Runner("cpu"))
    parts = result.weights_ms + result.attention_ms + result.append_ms + result.manage_ms + result.other_ms
    assert parts == pytest.approx(result.step_ms) and result.manage_ms  # 0 for all other caches


@pytest.mark.parametrize("format", (SIXTEEN_BIT, "k4v4"))
def test_measure(monkeypatch, format):
    monkeypatch.setattr(e2e, "PERIOD", 4)
    model = Decoder(TINY, SEQLEN + e2e.SPARE_TOKENS, torch.float16, "cpu", fuse=False)
    gpu = Gpu("none", 1.0, ((0.0, 0.0), (1e6, 10.0)), "invented")
    result = e2e.measure("tiny", model, format, 2, SEQLEN, True, gpu, e2e.Runner("cpu"))
    assert min(result.step_ms, result.attention_ms, result.append_attention_ms, result.weights_ms) > 0
    parts = result.weights_ms + result.attention_ms + result.append_ms + result.other_ms
    assert parts == pytest.approx(result.step_ms)
    assert result.tokens_per_s == pytest.approx(2e3 / result.step_ms)
    token = 2 * 2 * 2 * 32
    tail = SEQLEN - 1 - 256
    packed = 2 * 2 * (LowBitStore(TINY, "k4v4", 1, 1, 0, torch.float16, "cpu").caches[0].pool[0, 0].nbytes)
    assert result.layer_bytes == 2 * (SEQLEN * token if format == SIXTEEN_BIT else packed + tail * token)
    assert result.floor_attention_ms == pytest.approx(2 * result.layer_bytes * 1e-8)


def result(format, step, attention, batch=1, seqlen=131072, largest=False, append=0.1):
    weights = 3.0
    return e2e.Result("m", format, seqlen, batch, largest, step, batch / step * 1e3, weights, attention, append,
                      append + attention, step - weights - attention - append, 2.9, attention * 0.9, 10, "x")


def test_targets():
    results = [result(SIXTEEN_BIT, 8.0, 4.0), result("k4v4", 5.9, 1.8), result("k2v2", 5.6, 1.4, append=0.2),
               result(SIXTEEN_BIT, 40.0, 30.0, 7, largest=True), result("k4v4", 44.0, 30.0, 26, largest=True),
               result("k2v2", 50.0, 30.0, 50, largest=True)]
    found = list(e2e_report.targets(results))
    assert [round(t.value, 3) for t in found] == [0.738, 1.056, 0.7, 1.143, 3.377, 5.714]
    assert [round(t.bound, 3) for t in found] == [0.72, 1.1, 0.66, 1.1, 3.0, 4.5]
    assert [t.is_met for t in found] == [False, True, False, False, True, True]
    both = replace(result("k4v4", 3.5, 0.1, seqlen=4096), weights="e8p4")
    found = list(e2e_report.targets([result(SIXTEEN_BIT, 8.0, 4.0, seqlen=4096), both]))
    assert [(t.value, t.bound, t.is_met) for t in found] == [(3.5 / 8, 0.45, True)]
    assert not list(e2e_report.targets([replace(result(SIXTEEN_BIT, 8.0, 4.0, seqlen=4096), weights="e8p4"), both]))
    strict, *_ = e2e_report.targets([result(SIXTEEN_BIT, 8.0, 6.0), result("k4v4", 4.5, 1.8)])
    assert strict.bound == pytest.approx(3.8 / 8 + 0.03) and not strict.is_met
    assert not list(e2e_report.targets(results[1:3]))  # nothing to compare with


def test_tables_show_every_result():
    results = [result(SIXTEEN_BIT, 8.0, 4.0), result("k4v4", 5.0, 1.8)]
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(e2e_report.result_table(results), e2e_report.target_table(results))
    text = console.export_text()
    assert "5.000" in text and "1.60" in text and "yes" in text and "Random weights" in text


def test_a_generation_is_the_mean_over_its_lengths():
    runs = {SIXTEEN_BIT: [result(SIXTEEN_BIT, 5.0 + a, a, 2) for a in (1.0, 2.0, 3.0)],
            "k4v4": [result("k4v4", 4.0 + a, a / 4, 8) for a in (1.0, 2.0, 6.0)]}
    plain, low = e2e_report.generation_lines(runs)
    assert plain["tokens_per_s"] == pytest.approx(2 / 7 * 1e3, abs=0.1) == plain["predicted_tokens_per_s"]
    assert low["tokens_per_s"] == pytest.approx(8 / 6.75 * 1e3, abs=0.1)
    # first step 5.0, of which attention 0.25; later ones 0.5 and 1.5
    assert low["predicted_tokens_per_s"] == pytest.approx(8 / (4.75 + (0.25 / 2 + 0.5 + 1.5 / 2) / 2) * 1e3, abs=0.1)
    assert low["x_16_bit_tokens_per_s"] == pytest.approx(low["tokens_per_s"] / plain["tokens_per_s"], abs=1e-3)


class TinyBench(e2e.Bench):
    """The benchmark on a CPU: a tiny model, an invented read rate, little memory."""

    def __init__(self, output: Path):
        self.name, self.shape, self.most, self.output = "tiny", TINY, 3, str(output)
        self.gpu, self.memory = Gpu("none", 1.0, ((0.0, 0.0), (1e6, 10.0)), "invented"), e2e.KEPT_FREE_BYTES + 10**6
        self.model = Decoder(TINY, 400, torch.float16, "cpu", fuse=False)
        self.runner, self.origin = e2e.Runner("cpu"), {"commit": "none"}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    for name in ("PERIOD", "PART_REPLAYS", "ATTENTION_REPLAYS", "WARM_UP"):
        monkeypatch.setattr(e2e, name, 1)
    return TinyBench(tmp_path / "e2e.jsonl")


def lines_of(bench) -> list[dict]:
    return [json.loads(line) for line in Path(bench.output).read_text().splitlines()]


def test_contexts_run_every_case_that_fits(bench):
    console = Console(width=200, record=True, file=io.StringIO())
    e2e.contexts(bench, [200, 10**6], [SIXTEEN_BIT, "k4v4"], [1, e2e.LARGEST], console)
    assert [(x["format"], x["batch"], x["largest"], x["seqlen"]) for x in lines_of(bench)] == [
        (SIXTEEN_BIT, 1, False, 200), ("k4v4", 1, False, 200), (SIXTEEN_BIT, 3, True, 200), ("k4v4", 3, True, 200)]
    text = console.export_text()
    assert text.count("does not fit") == 4 and "3 (largest)" in text


def test_a_generation_is_measured_at_five_lengths(bench):
    console = Console(width=200, record=True, file=io.StringIO())
    e2e.generation(bench, 100, 100, [SIXTEEN_BIT, "k4v4"], console)
    *results, plain, low = lines_of(bench)
    assert [x["seqlen"] for x in results] == [100, 125, 150, 175, 200] * 2 and {x["batch"] for x in results} == {3}
    assert low["generated"] == 100 and plain["x_16_bit_tokens_per_s"] == 1
    assert "whole generation" in console.export_text()
    assert low["x_16_bit_tokens_per_s"] == pytest.approx(low["tokens_per_s"] / plain["tokens_per_s"], rel=0.01)
