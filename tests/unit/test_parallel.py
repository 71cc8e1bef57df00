"""A cache dealt to 1, 2 and 3 ranks (gloo, on the CPU) against one cache and attention over all ranks' tokens."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lowbit_attn import KVCache, PageExhaustedError, decode
from lowbit_attn.parallel import ShardedKVCache, decode_sharded, local_lengths
from lowbit_attn.parallel_decode import Call
from lowbit_attn.reference import Attention, attention

HEADS, HEADS_KV, HEAD_DIM, BATCH = 4, 2, 64, 3


def owners(length: int, world: int, sinks: int) -> np.ndarray:
    """The rank of every token, by the rule of the module's docstring."""
    position = np.arange(length)
    return np.where(position < sinks, 0, (position - sinks).clip(0) // 128 % world)


@pytest.mark.parametrize("sinks", (0, 5, 200))
@pytest.mark.parametrize("world", (1, 2, 3, 7))
def test_local_lengths_count_the_tokens_of_each_rank(world, sinks):
    lengths = np.array([0, 1, 4, 5, 6, 127, 128, 129, 133, 134, 256, 384, 385, 700, 1025, 5000])
    want = [[int((owners(n, world, sinks) == rank).sum()) for n in lengths] for rank in range(world)]
    for rank in range(world):
        assert local_lengths(lengths, rank, world, sinks).tolist() == want[rank]
        assert local_lengths(torch.from_numpy(lengths), rank, world, sinks).tolist() == want[rank]
        assert int(local_lengths(700, rank, world, sinks)) == want[rank][13]


def pieces(cache: ShardedKVCache, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [heads_kv, tokens, head_dim] of one row as all ranks hold them, in the order of the sequence."""
    length, owner = int(cache.lengths[row]), owners(int(cache.lengths[row]), cache.world, cache.sinks)
    whole = torch.zeros(2, HEADS_KV, length, HEAD_DIM)
    whole[:, :, torch.from_numpy(owner == cache.rank)] = torch.stack(cache.local.gather(row))
    if cache.world > 1:
        dist.all_reduce(whole)
    return whole[0], whole[1]


def check(cache: ShardedKVCache, q: torch.Tensor, **options) -> None:
    """decode_sharded against attention over what all ranks hold."""
    o, lse = decode_sharded(q, cache, **options)
    for row in range(len(q)):
        want, want_lse = attention(q[row], *pieces(cache, row), Attention(**options))
        assert torch.allclose(o[row].float(), want, atol=2e-3), (row, (o[row] - want).abs().max())
        assert torch.allclose(lse[row], want_lse, atol=1e-3), (row, lse[row] - want_lse)
        assert o[row].abs().max() > 0 or not cache.lengths[row]


def step(cache, whole, generator, tokens, rows):
    k, v = (torch.randn(len(rows), tokens, HEADS_KV, HEAD_DIM, generator=generator).half() for _ in range(2))
    cache.append(k, v, rows)
    whole.append(k, v, rows)


def generation(cache, whole, generator):
    """Ragged prompts, one of them empty, then single tokens over block borders; all pack the same blocks."""
    for row, length in enumerate((700, 0, 250)):
        k, v = (torch.randn(length, HEADS_KV, HEAD_DIM, generator=generator).half() for _ in range(2))
        cache.prefill(row, k, v)
        whole.prefill(row, k, v)
    for i in range(8):
        step(cache, whole, generator, 1, [2, 0, 1][: 1 + i % 3])
        cache.flush()
        whole.flush()
        assert cache.lengths.tolist() == whole.n_tok.tolist() == cache.n_tok.tolist()
        q = torch.randn(BATCH, 1, HEADS, HEAD_DIM, generator=generator).half()
        got, want = decode_sharded(q, cache), decode(q, whole)
        assert all(torch.allclose(x.float(), y.float(), atol=1e-3) for x, y in zip(got, want))
    options = dict(softcap=5.0, softmax_scale=0.2)
    check(cache, q, **options)
    logits = torch.tensor([0.5, -1.0, 2.0, 3.0])
    got, want = decode_sharded(q, cache, sink_logits=logits), decode(q, whole, sink_logits=logits)
    assert all(torch.allclose(x.float(), y.float(), atol=1e-3) for x, y in zip(got, want))


def drafts(cache, whole, generator):
    """Several queries a row whose tokens straddle the border of a block, with some of them taken back."""
    for row, length in enumerate((250, 121, 509)):
        k, v = (torch.randn(length, HEADS_KV, HEAD_DIM, generator=generator).half() for _ in range(2))
        cache.prefill(row, k, v)
        whole.prefill(row, k, v)
    for i in range(30):
        tokens = 1 + i % 5
        step(cache, whole, generator, tokens, [0, 1, 2])
        check(cache, torch.randn(BATCH, tokens, HEADS, HEAD_DIM, generator=generator).half(),
              **(dict(softcap=3.0) if i % 4 == 1 else {}))
        back = [(i + row) % tokens for row in range(BATCH)]
        cache.rewind([0, 1, 2], back)
        whole.rewind([0, 1, 2], back)
        assert cache.lengths.tolist() == whole.n_tok.tolist()
    for row in range(BATCH):
        assert [len(x) for x in pieces(cache, row)] == [HEADS_KV, HEADS_KV]
        assert (pieces(cache, row)[0] - whole.gather(row)[0]).abs().max() < 0.1  # k8v8: no token is another's
    with pytest.raises(ValueError, match="tokens: got .* supported: 0 to"):
        cache.rewind([0], 6)
    q = torch.randn(BATCH, 2, HEADS, HEAD_DIM, generator=generator).half()
    logits = torch.tensor([0.5, -1.0, 2.0, 3.0])
    got, want = decode_sharded(q, cache, sink_logits=logits), decode(q, whole, sink_logits=logits)
    assert all(torch.allclose(x.float(), y.float(), atol=1e-2) for x, y in zip(got, want))


def exhaustion(cache, generator):
    """A call for which one rank lacks pages raises on all of them and changes nothing on any."""
    k, v = (torch.randn(3000, HEADS_KV, HEAD_DIM, generator=generator).half() for _ in range(2))
    cache.prefill(0, k[:300], v[:300])
    before = cache.lengths.copy(), cache.n_tok.clone(), cache.local.n_tok.clone(), cache.local.n_free
    with pytest.raises(PageExhaustedError, match="pages on rank"):
        cache.prefill(1, k, v)
    with pytest.raises(PageExhaustedError, match="pages on rank"):
        cache.reserve([0, 1], [300, 3000])
    assert (cache.lengths == before[0]).all() and torch.equal(cache.n_tok, before[1])
    assert torch.equal(cache.local.n_tok, before[2]) and cache.local.n_free == before[3]
    cache.free([0])
    assert cache.local.n_free == cache.local.num_pages and not cache.lengths.any()
    cache.prefill(0, k[:257], v[:257])
    check(cache, torch.randn(1, 1, HEADS, HEAD_DIM, generator=generator).half())


def buffers(cache, generator):
    """Results go where the caller says, whatever its layout; a call that is refused writes nothing."""
    for row, length in enumerate((300, 0, 129)):
        cache.prefill(row, *(torch.randn(length, HEADS_KV, HEAD_DIM, generator=generator).half() for _ in range(2)))
    for tokens in (1, 2):
        q = torch.randn(BATCH, tokens, HEADS, HEAD_DIM, generator=generator).half()
        want = decode_sharded(q, cache)
        dense = torch.empty_like(q), torch.empty_like(want[1])
        wide = torch.full((BATCH, tokens, HEADS, 2 * HEAD_DIM), torch.nan).half()
        strided = wide[..., HEAD_DIM:], torch.empty(HEADS, BATCH, tokens).transpose(0, 1)
        for out, lse in (dense, strided):
            found = decode_sharded(q, cache, out=out, lse=lse)
            assert found[0] is out and found[1] is lse
            assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
        assert wide[..., :HEAD_DIM].isnan().all()
    with pytest.raises(ValueError, match="out: got shape"):
        decode_sharded(q, cache, out=wide)
    with pytest.raises(TypeError, match="lse: got torch.float16, supported: torch.float32"):
        decode_sharded(q, cache, lse=want[1].half())
    with pytest.MonkeyPatch.context() as patch:  # as calls on a GPU, whose like the ranks have compared
        patch.setattr(Call, "is_agreed", lambda call: True)
        assert all(map(torch.equal, decode_sharded(q, cache), want))
        assert all(map(torch.equal, decode_sharded(q[:, :1], cache), decode_sharded(q[:, :1].clone(), cache)))
    again = decode_sharded(q, cache), decode_sharded(q, cache)  # neither is the other's memory
    assert torch.equal(again[0][0], want[0]) and again[0][0].data_ptr() != again[1][0].data_ptr()
    if cache.world > 1:
        found = decode_sharded(q.float(), cache)
        assert found[0].dtype == torch.float32 and torch.allclose(found[0], want[0].float(), atol=2e-3)
        logits, wrong = torch.zeros(HEADS + 1), torch.zeros(2, 1, HEADS, HEAD_DIM // 2).half()
        with pytest.raises(ValueError, match="sink_logits: got shape"):  # on all ranks, not only where it is used
            decode_sharded(q[:2], cache, sink_logits=logits)
        for refused, error in ((logits, ValueError), (logits[1:].half(), TypeError)):  # a shape that was called, too
            with pytest.raises(error, match="sink_logits: got"):
                decode_sharded(q, cache, sink_logits=refused)
        assert torch.equal(decode_sharded(q, cache)[0], want[0])
        with pytest.raises(ValueError, match="q: got shape"):
            decode_sharded(wrong, cache)
        assert not cache.exchanges.has(wrong.shape, wrong.dtype, True)
        with pytest.raises(RuntimeError, match="captured before its first call of this shape"):
            cache.exchanges.find(torch.Size((BATCH, 3, HEADS, HEAD_DIM)), q.dtype, True, True)
        with pytest.raises(NotImplementedError, match="peer_memory: got cpu, supported: Hopper GPUs"):
            ShardedKVCache("k4v4", 4, HEADS_KV, HEAD_DIM, peer_memory=True)


def run(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{world}", rank=rank, world_size=world)
    shape = dict(num_heads_kv=HEADS_KV, head_dim=HEAD_DIM, max_batch=BATCH)
    try:
        for name, sinks in (("k4v4", 0), ("k2v2", 5)):
            generator = torch.Generator().manual_seed(7)
            generation(*(kind(name, 16, sinks=sinks, **shape) for kind in (ShardedKVCache, KVCache)), generator)
        for sinks in (0, 3):
            generator = torch.Generator().manual_seed(8)
            drafts(*(kind("k8v8", 16, sinks=sinks, max_q_len=5, **shape) for kind in (ShardedKVCache, KVCache)),
                   generator)
        buffers(ShardedKVCache("k4v4", 16, max_q_len=3, **shape), torch.Generator().manual_seed(10))
        exhaustion(ShardedKVCache("k4v4", 6, **shape, max_seqlen=4000), torch.Generator().manual_seed(9))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", (1, 2, 3))
def test_ranks_agree_with_one_cache(world, tmp_path):
    mp.spawn(run, (world, str(tmp_path)), nprocs=world)


def test_one_rank_needs_no_process_group():
    cache = ShardedKVCache("k4v4", 4, HEADS_KV, HEAD_DIM)
    cache.prefill(0, torch.randn(200, HEADS_KV, HEAD_DIM), torch.randn(200, HEADS_KV, HEAD_DIM))
    check(cache, torch.randn(1, 1, HEADS, HEAD_DIM).half())
    with pytest.raises(ValueError, match="k: 2 tokens a step, supported: 1 to max_q_len = 1"):
        cache.append(torch.randn(1, 2, HEADS_KV, HEAD_DIM), torch.randn(1, 2, HEADS_KV, HEAD_DIM))
