"""A model dealt to two ranks (gloo, on the CPU) against the whole model with the same weights, over both caches."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).parents[2] / "perf"))
import e2e  # noqa: E402
import tensor_parallel as tp  # noqa: E402
from llama import Decoder, LowBitStore, Shape, SixteenBitStore  # noqa: E402

from lowbit_attn.budget import SIXTEEN_BIT  # noqa: E402

TINY = Shape(layers=2, hidden=64, num_heads=8, num_heads_kv=4, head_dim=32, ffn=96, vocab=52)
RANKS, BATCH, SEQLEN, SPARE = 2, 3, 300, 8


def sliced(layer: dict, rank: int) -> dict:
    """A rank's part of a layer: rows of what makes heads or features, columns of what sums over them."""
    q, k, v = layer["qkv"].split((8 * 32, 4 * 32, 4 * 32))
    gate, up = layer["gate_up"].chunk(2)
    rows, columns = (lambda x, axis=axis: x.chunk(RANKS, axis)[rank] for axis in (0, 1))
    return layer | {"qkv": torch.cat([*map(rows, (q, k, v))]), "o": columns(layer["o"]).contiguous(),
                    "gate_up": torch.cat([rows(gate), rows(up)]), "down": columns(layer["down"]).contiguous()}


def store_of(shape: Shape, format: str, heads: slice):
    """A store of the KV heads ``heads`` of the same tokens."""
    kind, name = (SixteenBitStore, ()) if format == SIXTEEN_BIT else (LowBitStore, (format,))
    store, generator = kind(shape, *name, BATCH, SEQLEN, SPARE, torch.float16, "cpu"), torch.Generator().manual_seed(3)
    for layer in range(shape.layers):
        k, v = (torch.randn(SEQLEN - 1, TINY.num_heads_kv, TINY.head_dim, generator=generator).half() for _ in range(2))
        store.fill_layer(layer, k[:, heads], v[:, heads])
    return store


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(5)
        whole = Decoder(TINY, SEQLEN + SPARE, torch.float16, "cpu", fuse=False)
        part = tp.ShardedDecoder(TINY, SEQLEN + SPARE, torch.float16, "cpu", False, rank, RANKS)
        part.layers = [sliced(layer, rank) for layer in whole.layers]
        part.embedding, part.head = whole.embedding, whole.head.chunk(RANKS)[rank]
        heads = slice(rank * TINY.num_heads_kv // RANKS, (rank + 1) * TINY.num_heads_kv // RANKS)
        for format in (SIXTEEN_BIT, "k4v4"):
            states = [(torch.tensor([1, 7, 33]), torch.full((BATCH,), SEQLEN - 1)) for _ in range(2)]
            stores = store_of(TINY, format, slice(None)), store_of(part.shape, format, heads)
            want = whole.logits(*states[0], stores[0])
            got = part.logits(*states[1], stores[1])
            assert (got - want.chunk(RANKS, 1)[rank]).norm() < 0.01 * want.norm(), format
            assert part.best(got).tolist() == whole.best(want).tolist()  # tokens of both shares
            for _ in range(3):
                part.step(*states[1], stores[1])
            assert states[1][0].shape == (BATCH,) and states[1][1].tolist() == [SEQLEN + 2] * BATCH
    finally:
        dist.destroy_process_group()


def test_ranks_make_the_whole_models_logits_and_tokens(tmp_path):
    mp.spawn(run, (str(tmp_path),), nprocs=RANKS)


def test_shares_are_equal_or_refused():
    part = tp.share_of(TINY, 4)
    assert (part.num_heads, part.num_heads_kv, part.ffn, part.vocab) == (2, 1, 24, 13)
    assert (part.hidden, part.layers, part.head_dim) == (64, 2, 32)
    with pytest.raises(ValueError, match="3 ranks: got num_heads 8, num_heads_kv 4, vocab 52, supported"):
        tp.share_of(TINY, 3)


def test_cases_are_those_that_fit():
    shape = tp.SHAPES["llama-3.1-8b"]
    memory = 80 * 10**9
    assert tp.cases(shape, [SIXTEEN_BIT, "k4v4"], [1, 8, 64], 131072, memory) == [
        (SIXTEEN_BIT, 1), ("k4v4", 1), ("k4v4", 8)]
    assert (SIXTEEN_BIT, 4) in tp.cases(tp.share_of(shape, 2), [SIXTEEN_BIT], [4], 131072, memory)


def test_parts_of_a_case_are_timed(monkeypatch):
    monkeypatch.setattr(e2e, "PERIOD", 4)
    for module in (e2e, tp):
        monkeypatch.setattr(module, "PART_REPLAYS", 2)
    model, noted = Decoder(TINY, SEQLEN + tp.SPARE_TOKENS, torch.float16, "cpu", fuse=False), []
    found = tp.run(model, [("k4v4", 2)], SEQLEN, tp.Runner("cpu"), lambda *line: noted.append(line))
    times = found["k4v4", 2]
    assert min(times[name] for name in ("step_ms", "weights_ms", "attention_ms", "layer_bytes")) > 0
    assert noted == [(model, "k4v4", 2, times)]
