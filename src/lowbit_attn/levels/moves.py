"""How tokens of a LevelCache get from the ring into stages and pages, and out of them for readers."""

import torch

from lowbit_attn import layout
from lowbit_attn.levels.policy import HIGH, LOW, PRUNED

PAGE = layout.PAGE_TOKENS
LEVELS = (HIGH, LOW)


class Departure:
    """Tokens that leave a row's ring, with all that they make of its heads' stages and pages; nothing is written yet.

    Args:
        cache, row: whose.
        k, v: [num_heads_kv, n, head_dim] of the cache's dtype, by position.
        classes: uint8 [num_heads_kv, n].

    Of each head and level the staged tokens come first, then the new ones of that class; each 128 of them are a record
    and the rest is the new stage. ``needs``: int64 [sizes] on the host, frames of each size of the pool. The device is
    asked for counts once, and once for the frames' ids, however many heads and records there are.
    """

    def __init__(self, cache, row: int, k: torch.Tensor, v: torch.Tensor, classes: torch.Tensor):
        self.cache, self.row, self.heads = cache, row, cache.heads_of(row)
        self.pruned = (classes == PRUNED).sum(1, dtype=torch.int32)
        new = torch.stack([(classes == level).sum(1) for level in LEVELS])
        read = torch.cat((new, cache.n_stage[:, self.heads], cache.c_pack[:, self.heads], cache.half[None, self.heads]))
        (*counts, self.half) = read.cpu().tolist()
        self.new, self.staged, packed = counts[0:2], counts[2:4], counts[4:6]
        self.pages = [[n // PAGE for n in mine] for mine in packed]
        self.records: list[torch.Tensor] = []  # by level: uint8 [n, record bytes], heads in order
        self.counts: list[list[int]] = []  # by level and head: records
        self.rests: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for level in LEVELS:
            order = (classes != level).to(torch.uint8).argsort(dim=1, stable=True)  # the level's, by position, first
            tokens = [self._tokens(level, head, order, k, v) for head in range(cache.num_heads_kv)]
            self.counts.append([len(k) // PAGE for k, _ in tokens])
            self.records.append(self._packed(level, tokens))
            self.rests.append([tuple(x[len(x) // PAGE * PAGE :] for x in sides) for sides in tokens])
        high, low = (torch.tensor(counts, device="cpu") for counts in self.counts)
        open_parts = -torch.tensor(self.pages[LOW], device="cpu") % cache.pool.per_low
        self.needs = cache.pool.needs(high, low, open_parts).sum(1)

    def _tokens(self, level: int, head: int, order: torch.Tensor, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        start, mine = (self.cache.sinks if level == HIGH else 0), order[head, : self.new[level][head]]
        stop = start + self.staged[level][head]
        return tuple(torch.cat((store[self.heads.start + head, start:stop], new[head][mine]))
                     for store, new in zip(stage_stores(self.cache, level), (k, v)))

    def _packed(self, level: int, tokens: list) -> torch.Tensor:
        cache, counts = self.cache, self.counts[level]
        if not any(counts):
            return torch.zeros((0, cache.pool.record_bytes[level]), dtype=torch.uint8, device=cache.device)
        blocks = [torch.cat([sides[i][: n * PAGE] for sides, n in zip(tokens, counts)]).unflatten(0, (-1, PAGE))
                  for i in range(2)]
        return cache.format.formats[level].quantize(blocks[0].float(), blocks[1].float(), cache.range_search)

    def write(self, frames: list[torch.Tensor]) -> None:
        """Put records into these frames, ids of each size, and the rest into the stages. The ring is not touched."""
        cache, heads = self.cache, self.heads
        units = self._units([iter(mine.tolist()) for mine in frames])
        for level in LEVELS:
            if units[level]:
                v, page, unit = torch.tensor(units[level], device=cache.device).T
                places = torch.arange(cache.pool.record_bytes[level] // layout.RECORD_ALIGN, device=cache.device)
                cache.pool.units(level)[unit[:, None] + places] = self.records[level].unflatten(
                    1, (-1, layout.RECORD_ALIGN))
                cache.table[level][v, page] = unit.to(torch.int32)
            for head, rest in enumerate(self.rests[level]):
                for store, tokens in zip(stage_stores(cache, level), rest):
                    start = cache.sinks if level == HIGH else 0
                    store[heads.start + head, start : start + len(tokens)] = tokens
        written = dict(dtype=torch.int32, device=cache.device)
        cache.n_stage[:, heads] = torch.tensor([[len(k) for k, _ in level] for level in self.rests], **written)
        cache.c_pack[:, heads] += PAGE * torch.tensor(self.counts, **written)
        cache.half[heads] = torch.tensor(self.half, **written)
        cache.n_drop[heads] += self.pruned

    def _units(self, ids: list) -> list[list[tuple[int, int, int]]]:
        """(row, page, unit) of each record by level: the next free place of a head's frames, or of a new one of ids."""
        pool, found = self.cache.pool, [[] for _ in LEVELS]
        for head in range(self.cache.num_heads_kv):
            for level in LEVELS:
                for page in range(self.pages[level][head], self.pages[level][head] + self.counts[level][head]):
                    is_new = level == HIGH or self.half[head] < 0
                    unit = next(ids[pool.sizes[level]]) * pool.frame_units(level) if is_new else self.half[head]
                    if level == LOW:
                        is_last = (page + 1) % pool.per_low == 0
                        self.half[head] = -1 if is_last else unit + pool.record_bytes[LOW] // layout.RECORD_ALIGN
                    found[level].append((self.heads.start + head, page, unit))
        return found


def share_pages(cache, src: int, dst: int) -> None:
    """Make the frames of a row common with those of an empty one; low pages of a frame that is not full are copied.

    PageExhaustedError, and nothing is written, if the pool has too few frames for the copies.
    """
    pool, here, there = cache.pool, cache.heads_of(src), cache.heads_of(dst)
    pages = [n // PAGE for n in cache.c_pack[LOW, here].tolist()]
    opened = [n % pool.per_low for n in pages]  # low pages of a head's frame that is not full
    size = pool.sizes[LOW]
    fresh = pool.take([sum(map(bool, opened)) if i == size else 0 for i in range(len(pool.lists))])[size].tolist()
    common = [cache.frames_of(here, i) for i in range(len(pool.lists))]
    own = [int(cache.table[LOW, here.start + head, pages[head] - n]) // pool.frame_units(LOW)
           for head, n in enumerate(opened) if n]
    is_common = ~torch.isin(common[size], torch.tensor(own, dtype=torch.int32, device=cache.device))
    pool.share([ids[is_common] if i == size else ids for i, ids in enumerate(common)])
    cache.table[:, there] = cache.table[:, here]
    cache.half[there] = -1
    frames, units = pool.units(LOW).unflatten(0, (-1, pool.frame_units(LOW))), pool.frame_units(LOW)
    record = pool.record_bytes[LOW] // layout.RECORD_ALIGN
    for (head, n), source, frame in zip(((head, n) for head, n in enumerate(opened) if n), own, fresh):
        v, first = there.start + head, pages[head] - n
        frames[frame, : n * record] = frames[source, : n * record]
        cache.table[LOW, v, first : pages[head]] = frame * units + record * torch.arange(n, device=cache.device).int()
        cache.half[v] = frame * units + n * record


def stage_stores(cache, level: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors whose rows hold a level's stage: the high one's begins behind the sinks."""
    return (cache.hi_k, cache.hi_v) if level == HIGH else (cache.lo_k, cache.lo_v)


def stage_of(cache, level: int, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Staged K, V [n, head_dim] of a (sequence, head) row; views."""
    start, count = (cache.sinks if level == HIGH else 0), int(cache.n_stage[level, v])
    return tuple(store[v, start : start + count] for store in stage_stores(cache, level))


def page_tokens(cache, level: int, v: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K, V fp32 [tokens, head_dim] of a (sequence, head) row's pages of a level."""
    size = cache.pool.record_bytes[level] // layout.RECORD_ALIGN
    first = cache.table[level, v, : int(cache.c_pack[level, v]) // PAGE].long()
    records = cache.pool.units(level)[first[:, None] + torch.arange(size, device=first.device)].flatten(1)
    fmt = cache.format.formats[level]
    return tuple(read(records, cache.head_dim).flatten(0, 1) for read in (fmt.dequantize_k, fmt.dequantize_v))


def head_tokens(cache, row: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All that a KV head holds, K, V fp32 [tokens, head_dim]: low and high pages, stages, sinks, recent tokens."""
    v, n_sink, slots = cache.heads_of(row).start + head, int(cache.n_sink[row]), cache.slots_of(row)
    parts = [page_tokens(cache, level, v) for level in reversed(LEVELS)]
    parts += [stage_of(cache, level, v) for level in reversed(LEVELS)]
    parts += [(cache.hi_k[v, :n_sink], cache.hi_v[v, :n_sink]), (cache.ring_k[v, slots], cache.ring_v[v, slots])]
    return tuple(torch.cat([part[i].float() for part in parts]) for i in range(2))
