"""Calls that one of two or three ranks refuses, makes otherwise or does not make: all raise, in time, unchanged."""

import datetime
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lowbit_attn import KVCache
from lowbit_attn.all_reduce import AllReduce
from lowbit_attn.dealing import is_own
from lowbit_attn.parallel import RankError, ShardedKVCache, decode_sharded
from lowbit_attn.testing import assert_same_bytes

HEADS, HEADS_KV, DIM, BATCH, PAGES, MAX_Q_LEN = 4, 2, 64, 3, 4, 3
SHAPE = dict(num_heads_kv=HEADS_KV, head_dim=DIM, max_batch=BATCH)
ROUNDS, LIMIT, PATIENCE = 60, 600, 10.0  # calls of the battery; seconds for one; seconds that a lone rank waits


def tokens(draw: random.Random, *lead: int) -> torch.Tensor:
    return torch.randn(*lead, HEADS_KV, DIM, generator=torch.Generator().manual_seed(draw.randrange(1 << 30))).half()


def bad_tokens(x: torch.Tensor) -> list:
    """What takes the place of good K or V."""
    return [x.double(), x.int(), x[..., :1, :], x[..., :32], x[:0], x[0], x.float().tolist(), None, x.to("meta"),
            torch.stack((x, x), -1)[..., 0], torch.cat((x, x))]


def good_call(draw: random.Random) -> tuple[str, dict]:
    """A call that all ranks can make."""
    some = draw.sample(range(BATCH), draw.randint(1, BATCH))
    name = draw.choice(("prefill", "append", "append", "append", "decode", "decode", "flush", "rewind", "reserve"))
    if name == "prefill":
        n = draw.choice((1, 5, 130))
        return name, dict(seq=some[0], k=tokens(draw, n), v=tokens(draw, n))
    if name == "append":
        lead = len(some), draw.randint(1, MAX_Q_LEN)
        return name, dict(k=tokens(draw, *lead), v=tokens(draw, *lead), seqs=some)
    if name == "decode":
        lead = draw.randint(1, BATCH), draw.randint(1, MAX_Q_LEN)
        return name, dict(q=tokens(draw, *lead).repeat(1, 1, HEADS // HEADS_KV, 1))
    return name, dict(seqs=some) | dict(rewind=dict(tokens=0), reserve=dict(lengths=1)).get(name, {})


def bad_changes(name: str, given: dict) -> list[dict]:
    """Arguments of which one rank has one; None among them: it makes another call."""
    rows = [[BATCH], [-1], [0, 0], [0.5], "0", *[[row] for row in range(BATCH) if given.get("seqs") != [row]]]
    found = [dict(seqs=row) for row in rows] if "seqs" in given else []
    found += [{side: bad} for side in "kv" if side in given for bad in bad_tokens(given[side])]
    if name == "prefill":
        long = torch.zeros(20_000, HEADS_KV, DIM, dtype=torch.float16)
        found += [dict(seq=seq) for seq in (BATCH, -1, 0.0, None, (given["seq"] + 1) % BATCH)] + [dict(k=long, v=long)]
    if name == "decode":
        q = given["q"]
        found += [dict(q=bad) for bad in (q.double(), q.int(), q[..., :32], q[:, :, :3], q[:0], q[0], None, [1.0],
                                          torch.cat((q, q, q, q)), torch.cat((q, q, q, q), 1), q.float())]
        found += [dict(softmax_scale=-1.0), dict(softmax_scale="1"), dict(softmax_scale=[1]), dict(softmax_scale=0.25),
                  dict(softcap=float("nan")), dict(softcap=5.0), dict(path="none"), dict(path=3), dict(out=q[..., :32]),
                  dict(out=q.float()), dict(lse=q), dict(sink_logits=torch.zeros(HEADS + 1)), dict(sink_logits=q)]
    if name in ("rewind", "reserve"):
        found += [{"tokens" if name == "rewind" else "lengths": bad} for bad in (10**6, -1, 0.5, None, [1] * 9)]
    return [*found, None]


def make(cache: ShardedKVCache, name: str, given: dict):
    if name == "decode":
        return decode_sharded(given["q"], cache, **{key: value for key, value in given.items() if key != "q"})
    return getattr(cache, name)(**given)


def state(cache: ShardedKVCache) -> dict[str, torch.Tensor]:
    found = {name: x.clone() for name, x in vars(cache.local).items() if isinstance(x, torch.Tensor)}
    host = {name: torch.from_numpy(x.copy()) for name, x in vars(cache).items() if hasattr(x, "astype")}
    free = torch.tensor(cache.local.book.free), torch.tensor(cache.local.book.state)
    return found | host | dict(n_tok_of_all=cache.n_tok.clone(), free=free[0], book=free[1])


def refusal(call) -> tuple[str, str]:
    """(type, message) of what the call raised on this rank, within the limit."""
    start, said = time.monotonic(), ("", "nothing")
    try:
        call()
    except Exception as error:
        said = type(error).__name__, str(error)
    assert time.monotonic() - start < LIMIT
    return said


def of_all(value) -> list:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def battery(cache: ShardedKVCache, whole: KVCache, world: int, seed: int) -> None:
    """Random good calls, each first with something wrong on some ranks; the same numbers are drawn on all of them."""
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        name, given = good_call(draw)
        changes = bad_changes(name, given)
        which, who = draw.randrange(len(changes)), draw.sample(range(world), draw.randint(1, world - 1))
        before, is_bad, change = state(cache), cache.rank in who, changes[which]
        asked = (name, given | (change or {})) if is_bad else (name, given)
        if is_bad and change is None:
            asked = ("reserve", dict(seqs=[0], lengths=2)) if name == "flush" else ("flush", dict(seqs=[0]))
        every = of_all(refusal(lambda: make(cache, *asked)))
        assert all(kind for kind, _ in every), (name, str(change)[:300], who, every)
        assert all(kind == "RankError" for other, (kind, _) in enumerate(every) if other not in who), (every, who)
        for key, value in state(cache).items():
            assert_same_bytes(key, value, before[key])
        good = of_all(refusal(lambda: make(cache, name, given)))
        assert len(set(good)) == 1, good
        if not good[0][0] and name != "decode":
            getattr(whole, name)(**given)
        if cache.lengths.max() > 600:
            check_against(cache, whole)
            row = int(cache.lengths.argmax())
            cache.clear([row])
            whole.clear([row])
    check_against(cache, whole)


def check_against(cache: ShardedKVCache, whole: KVCache) -> None:
    """Every rank holds the tokens that are its own, and no others."""
    assert cache.lengths.tolist() == whole.n_tok.tolist() and cache.lengths.any()
    for row, length in enumerate(cache.lengths.tolist()):
        own = is_own(torch.arange(length), cache.rank, cache.world, cache.sinks)
        for mine, all_of_them in zip(cache.local.gather(row), whole.gather(row)):
            torch.testing.assert_close(mine, all_of_them[:, own], rtol=0, atol=0.05)


def constructions(rank: int) -> None:
    """Caches that one rank cannot make, or makes otherwise."""
    good = dict(format="k4v4", num_pages=PAGES) | SHAPE
    for change in (dict(format="k9v9"), dict(format="cq2"), dict(num_pages=0), dict(sinks=3), dict(max_q_len=2),
                   dict(max_seqlen=99), dict(bogus=1), dict(dtype=torch.bfloat16), dict(agree=None),
                   dict(head_dim=128), dict(peer_memory=True), dict(device="cuda:77"), dict(num_pages=PAGES + 1)):
        every = of_all(refusal(lambda: ShardedKVCache(**good | (change if rank == 1 else {}))))
        assert all(kind for kind, _ in every) and every[0][0] == "RankError", (change, every)
    assert f"num_pages: {PAGES} on rank 0, {PAGES + 1} on rank 1" in every[0][1], every


def all_reduce(rank: int) -> None:
    """Memory of all ranks is made by all, or by none: here rank 0 alone has what it takes."""
    if rank == 0:
        AllReduce._make = lambda self, *given: None
    every = of_all(refusal(lambda: AllReduce(8, 64, torch.float16, "cpu")))
    assert [kind for kind, _ in every] == ["RankError"] + ["NotImplementedError"] * (len(every) - 1)
    assert "rank 1 refused AllReduce: NotImplementedError" in every[0][1]


def capacity(rank: int, world: int) -> None:
    """Ranks that do not ask each other refuse the same call, because of the same rank."""
    for format, sinks, pages in (("kitty", 32, 3), ("k4v4", 5, 2), ("k4v4", 200, 2), ("kitty", 0, 2)):
        cache = ShardedKVCache(format, pages, 1, DIM, sinks=sinks, agree=False)
        k = torch.randn(1, 1, 1, DIM, generator=torch.Generator().manual_seed(0)).half()
        most = sum(cache.max_seqlens)
        start = max(0, most - 140 * world)
        if start:
            cache.prefill(0, k[0].expand(start, 1, DIM), k[0].expand(start, 1, DIM))
        said, steps = ("", ""), 0
        while not said[0] and steps < 400:
            said, steps = refusal(lambda: cache.append(k, k)), steps + 1
        assert cache.lengths[0] == start + steps - 1
        every = of_all((said, steps, int(cache.local.n_tok[0])))
        assert said[0] in ("ValueError", "PageExhaustedError") and len({found[:2] for found in every}) == 1, every
        assert sum(held for *_, held in every) == start + steps - 1


def torn(rank: int) -> None:
    """One rank's memory ends while it writes: nobody goes on with the sequence, all go on once it is cleared."""
    cache = ShardedKVCache("k4v4", PAGES, **SHAPE)
    k = torch.randn(2, 1, HEADS_KV, DIM, generator=torch.Generator().manual_seed(1)).half()
    q = torch.randn(1, 1, HEADS, DIM, generator=torch.Generator().manual_seed(2)).half()
    cache.append(k, k)
    if rank == 0:  # which holds all tokens
        cache.local.append = lambda *given: (_ for _ in ()).throw(MemoryError("no memory"))
    every = of_all(refusal(lambda: cache.append(k[:1], k[:1])))
    assert [kind for kind, _ in every] == ["MemoryError"] + [""] * (len(every) - 1)
    vars(cache.local).pop("append", None)
    for call in (lambda: cache.append(k[:1], k[:1]), lambda: decode_sharded(q, cache), lambda: cache.flush()):
        assert {kind for kind, _ in of_all(refusal(call))} == {"RankError"}
    cache.append(k[1:], k[1:], [1])
    cache.clear([0])
    cache.append(k, k)
    assert cache.lengths.tolist() == [1, 3, 0] and decode_sharded(q, cache)[0].isfinite().all()


def absent(rank: int, world: int) -> None:
    """A rank that does not come is given up after the group's timeout, with a message that names it."""
    x, q = torch.zeros(1, 1, HEADS_KV, DIM).half(), torch.zeros(1, 1, HEADS, DIM).half()
    calls = dict(decode_sharded=lambda cache: decode_sharded(q, cache),
                 prefill=lambda cache: cache.prefill(0, x[0].double(), x[0]))
    for name, call in calls.items():
        group = dist.new_group(range(world), timeout=datetime.timedelta(seconds=PATIENCE))
        cache = ShardedKVCache("k4v4", PAGES, **SHAPE, group=group)
        before = state(cache)
        if rank:
            continue
        with pytest.raises(TypeError if name == "prefill" else RankError) as caught:
            start = time.monotonic()
            call(cache)
        assert PATIENCE * 0.9 < time.monotonic() - start < LIMIT
        said = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
        assert f"{name}: rank 0 waited" in said and "the process group's timeout (init_process_group" in said
        for key, value in state(cache).items():
            assert_same_bytes(key, value, before[key])


def run(rank: int, world: int, folder: str, seed: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=world,
                            timeout=datetime.timedelta(seconds=LIMIT))
    try:
        more = dict(max_q_len=MAX_Q_LEN, sinks=5)
        battery(ShardedKVCache("k8v8", PAGES, **SHAPE, **more), KVCache("k8v8", 4 * PAGES, **SHAPE, **more), world,
                seed)
        constructions(rank)
        all_reduce(rank)
        capacity(rank, world)
        torn(rank)
        absent(rank, world)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("world", (2, 3))
def test_what_one_rank_refuses_is_refused_on_all(world, tmp_path, seed):
    mp.spawn(run, (world, str(tmp_path), seed), nprocs=world)
