"""How tokens of a LevelCache get from the ring into stages and pages, and out of them for readers."""

import torch

from lowbit_attn import layout
from lowbit_attn.levels.policy import HIGH, PRUNED

PAGE = layout.PAGE_TOKENS
LEVELS = (HIGH, HIGH + 1)


class Departure:
    """Tokens that leave a row's ring, with all that they make of its heads' stages and pages; nothing is written yet.

    Args:
        cache, row: whose.
        k, v: [num_heads_kv, n, head_dim] of the cache's dtype, by position.
        classes: uint8 [num_heads_kv, n].

    Of each head and level the staged tokens come first, then the new ones of that class; each 128 of them are a record
    and the rest is the new stage. ``needs``: int64 [sizes], frames of each size of the pool.
    """

    def __init__(self, cache, row: int, k: torch.Tensor, v: torch.Tensor, classes: torch.Tensor):
        self.cache, self.row, self.classes = cache, row, classes
        heads = cache.heads_of(row)
        self.records: list[list[torch.Tensor]] = []  # by level and head: uint8 [n, record bytes]
        self.rests: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for level in LEVELS:
            tokens = [self._tokens(level, head, k, v) for head in range(cache.num_heads_kv)]
            self.records.append(self._packed(level, tokens))
            self.rests.append([tuple(x[len(x) // PAGE * PAGE :] for x in sides) for sides in tokens])
        high, low = (torch.tensor([len(records) for records in level]) for level in self.records)
        open_parts = -(cache.c_pack[1, heads].cpu().long() // PAGE) % cache.pool.per_low
        self.needs = cache.pool.needs(high, low, open_parts).sum(1)

    def _tokens(self, level: int, head: int, k, v) -> tuple[torch.Tensor, torch.Tensor]:
        staged = stage_of(self.cache, level, self.cache.heads_of(self.row).start + head)
        mine = self.classes[head] == level
        return tuple(torch.cat((old, new[head][mine])) for old, new in zip(staged, (k, v)))

    def _packed(self, level: int, tokens: list) -> list[torch.Tensor]:
        cache, counts = self.cache, [len(k) // PAGE for k, _ in tokens]
        blocks = [torch.cat([sides[i][: n * PAGE] for sides, n in zip(tokens, counts)]).unflatten(0, (-1, PAGE))
                  for i in range(2)] if any(counts) else None
        if blocks is None:
            return [torch.zeros((0, cache.pool.record_bytes[level]), dtype=torch.uint8)] * len(tokens)
        records = cache.format.formats[level].quantize(blocks[0].float(), blocks[1].float(), cache.range_search)
        return list(records.split(counts))

    def note_plan(self) -> None:
        """Leave the plan of a block of 128 tokens in the cache: their order by class and the counts of each level."""
        heads = self.cache.heads_of(self.row)
        self.cache.order[heads] = self.classes.argsort(dim=1, stable=True).to(torch.uint8)
        for level in LEVELS:
            self.cache.new[level, heads] = (self.classes == level).sum(1, dtype=torch.int32)

    def write(self, frames: list[torch.Tensor]) -> None:
        """Put records into these frames, ids of each size, and the rest into the stages. The ring is not touched."""
        cache = self.cache
        ids = [iter(mine.tolist()) for mine in frames]
        first = cache.heads_of(self.row).start
        for head in range(cache.num_heads_kv):
            v = first + head
            for level in LEVELS:
                for record in self.records[level][head]:
                    self._put(level, v, record, ids[cache.pool.sizes[level]])
                rest = self.rests[level][head]
                for store, tokens in zip(stage_stores(cache, level), rest):
                    start = cache.sinks if level == HIGH else 0
                    store[v, start : start + len(tokens)] = tokens
                cache.n_stage[level, v] = len(rest[0])
            cache.n_drop[v] += int((self.classes[head] == PRUNED).sum())

    def _put(self, level: int, v: int, record: torch.Tensor, frames) -> None:
        """Write one record into the next free place of a head's frames, or of a new one."""
        cache, pool = self.cache, self.cache.pool
        size = pool.record_bytes[level] // layout.RECORD_ALIGN
        page = int(cache.c_pack[level, v]) // PAGE
        if level == HIGH or int(cache.half[v]) < 0:
            unit = next(frames) * pool.frame_units(level)
        else:
            unit = int(cache.half[v])
        if level != HIGH:
            is_last = (page + 1) % pool.per_low == 0
            cache.half[v] = -1 if is_last else unit + size
        pool.units(level)[unit : unit + size] = record.view(-1, layout.RECORD_ALIGN)
        cache.table[level, v, page] = unit
        cache.c_pack[level, v] += PAGE


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
