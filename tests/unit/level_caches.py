"""What tests of level caches compare: all that a cache and its pool hold."""

from collections.abc import Sequence

import torch

from lowbit_attn import layout
from lowbit_attn.formats.levels import parse
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.level_cache import LevelCache

PAGE = layout.PAGE_TOKENS
DISTINCT = 24  # pages of a level with tokens of their own; others are copies
# what a step's kernels leave for each other, and nothing else reads
SCRATCH = ("places", "needs", "starts", "goes", "arrivals")


def state(cache) -> dict[str, torch.Tensor]:
    """All tensors of a cache and its pool; of stages and rings what holds tokens."""
    found = {name: x.clone() for name, x in vars(cache).items() if isinstance(x, torch.Tensor) and name not in SCRATCH}
    for v in range(len(cache.half)):
        row = v // cache.num_heads_kv
        for name in ("hi_k", "hi_v"):
            held = torch.arange(found[name].shape[1])
            staged = (held >= cache.sinks) & (held < cache.sinks + int(cache.n_stage[0, v]))
            found[name][v, ~((held < int(cache.n_sink[row])) | staged)] = 0
        ring = torch.ones(cache.slots, dtype=torch.bool)
        ring[cache.slots_of(row).cpu()] = False
        for name, empty in (("lo_k", slice(int(cache.n_stage[1, v]), None)), ("ring_k", ring)):
            found[name][v, empty] = found[name.replace("_k", "_v")][v, empty] = 0
    for i, (memory, free) in enumerate(zip(cache.pool.memory, cache.pool.lists)):
        found |= {f"memory{i}": memory.clone(), f"ids{i}": free.ids.clone(), f"ends{i}": free.ends.clone()}
    return found


def check_equal(one: dict, other: dict) -> None:
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def of_pages(name: str, head_dim: int, pages: Sequence[tuple[int, int]], *, heads: int = 1, staged=(17, 70),
             sinks: int = 5, recent: int = 90, scales: tuple[float, float] = (1.0, 1.0), device: str = "cpu",
             dtype: torch.dtype = torch.float16, seed: int = 0, **options) -> LevelCache:
    """A cache with so many (high, low) pages of each (sequence, head), written directly, in shuffled places; heads
    differ as after pruning. staged: tokens of both stages; scales: of the values of both levels, stages included, and
    of the ring the low one's; with windows=True positions are random. What no token takes is NaN, or all ones."""
    random, levels, counts = torch.Generator().manual_seed(seed), parse(name), torch.tensor(pages).T
    per_low, sizes = frame_sizes(*(fmt.record_bytes(head_dim) for fmt in levels.formats))
    frames = [int(counts[0].sum()), -(-int(counts[1].sum()) // per_low)]
    pool = FramePool(levels, head_dim=head_dim, device=device, frames=max(1, sum(frames)) if len(sizes) == 1 else
                     [max(1, n) for n in frames])
    cache = LevelCache(pool, heads, sinks=sinks, max_batch=len(pages) // heads, dtype=dtype,
                       max_seqlen=(int(counts.sum(0).max()) + 3) * PAGE, **options)
    for memory in pool.memory:
        memory.fill_(0xFF)
    places = torch.randperm(sum(frames), generator=random)
    for level, fmt in enumerate(levels.formats):
        taken = (places[: frames[0]], places[frames[0] :])[level] if pool.is_shared else torch.randperm(
            frames[level], generator=random)
        count = int(counts[level].sum())
        k, v = torch.randn(2, min(count, DISTINCT), PAGE, head_dim, generator=random)
        k[..., 3] += 5  # a channel with an offset
        v[..., 7] += 1
        size, units = fmt.record_bytes(head_dim) // layout.RECORD_ALIGN, pool.units(level)
        records = fmt.quantize(k, v * scales[level]).view(len(k), size, layout.RECORD_ALIGN).to(device)
        starts = (taken[:, None] * pool.frame_units(level) + torch.arange((1, per_low)[level]) * size).flatten()
        starts = starts[:count].to(device)
        units[starts[:, None] + torch.arange(size, device=device)] = records.repeat(-(-count // DISTINCT), 1, 1)[:count]
        for row, mine in enumerate(starts.int().split(counts[level].tolist())):
            cache.table[level, row, : len(mine)] = mine
    cache.c_pack.copy_(counts * PAGE)
    cache.n_stage.copy_(torch.tensor(staged)[:, None])
    cache.n_sink.fill_(sinks)
    out = PAGE * 3
    if cache.windows:
        out = -(-int((cache.c_pack + cache.n_stage).sum(0).max()) // PAGE) * PAGE
        _scatter_classes(cache, out, random)
    cache.n_out.fill_(out)
    cache.n_tok.copy_(cache.n_sink + cache.n_out + recent)
    cache.recount()
    for x, held, scale in ((cache.hi_k, sinks + staged[0], 1), (cache.hi_v, sinks + staged[0], scales[0]),
                           (cache.lo_k, staged[1], 1), (cache.lo_v, staged[1], scales[1])):
        x.copy_(torch.randn(x.shape, generator=random) * scale)
        x[:, held:] = torch.nan
    slots = torch.arange(out, out + recent, device=device) % cache.slots
    for x, scale in ((cache.ring_k, 1), (cache.ring_v, scales[1])):
        x.fill_(torch.nan)
        x[:, slots] = (torch.randn(x[:, slots].shape, generator=random) * scale).to(device, dtype)
    return cache


def _scatter_classes(cache: LevelCache, out: int, random: torch.Generator) -> None:
    """Random classes of ``out`` tokens that left the ring, as many of each as a head has; the rest are pruned."""
    for v, held in enumerate((cache.c_pack + cache.n_stage).T.tolist()):
        classes = torch.tensor([0] * held[0] + [1] * held[1] + [2] * (out - sum(held)), dtype=torch.uint8)
        blocks = classes[torch.randperm(out, generator=random)].view(-1, PAGE)
        cache.classes[v, : len(blocks)] = blocks
        for level in range(2):
            cache.before[level, v, 1 : len(blocks) + 1] = (blocks == level).sum(1).cumsum(0)
