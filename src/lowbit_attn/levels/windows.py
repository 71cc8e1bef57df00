"""Where in a sequence the tokens of a LevelCache's levels are, which sliding windows ask for.

A level's tokens are in order of position: a stage fills by position, 128 of its tokens become a page, and later pages
have later tokens. So of each level a window hides the first tokens, whole pages and a part of one, and one number for
each (sequence, KV head) says how many. Positions are those of the classes, since no token changes its own:

    classes  uint8 [v, blocks, 128]     the class of each token that left the ring, by position: HIGH, LOW or PRUNED
    before   int32 [2, v, blocks + 1]   tokens that a level has of the blocks before

A cache made with ``windows=True`` keeps both, 1.06 bytes a token and KV head.
"""

import torch

from lowbit_attn import layout
from lowbit_attn.levels.policy import PRUNED
from lowbit_attn.reference import Attention

PAGE = layout.PAGE_TOKENS
LEVELS = (0, 1)  # high, low


def allocate(cache) -> None:
    """Give a cache its classes by position, for as many blocks as its table has pages."""
    rows, blocks = cache.table.shape[1:]
    cache.classes = torch.zeros((rows, blocks, PAGE), dtype=torch.uint8, device=cache.device)
    cache.before = torch.zeros((2, rows, blocks + 1), dtype=torch.int32, device=cache.device)


def check(cache, window: int) -> None:
    """Raise NotImplementedError for a cache without positions."""
    if not cache.windows:
        raise NotImplementedError(f"window: got {window} over levels without positions, supported: None, or a "
                                  "LevelCache(..., windows=True)")


def note(cache, row: int, classes: torch.Tensor) -> None:
    """Keep the classes uint8 [num_heads_kv, n] of whole blocks that leave a row's ring now, behind n_out tokens."""
    heads, first = cache.heads_of(row), int(cache.n_out[row]) // PAGE
    blocks = classes.unflatten(1, (-1, PAGE))
    stop = first + blocks.shape[1]
    cache.classes[heads, first:stop] = blocks
    new = torch.stack([(blocks == level).sum(2) for level in LEVELS]).cumsum(2)
    cache.before[:, heads, first + 1 : stop + 1] = (cache.before[:, heads, first, None] + new).int()


def hidden(cache, first: torch.Tensor) -> torch.Tensor:
    """Tokens of each level in pages and stage that are before position ``first`` int [rows] of a row: int32 [2, v].

    Where ``first`` is among the sinks, minus so many sinks as come after it.
    """
    after_sinks, n_out = (x.repeat_interleave(cache.num_heads_kv).long()
                          for x in (first - cache.sinks, cache.n_out[: len(first)]))
    v = torch.arange(len(after_sinks), device=cache.device)
    stop = torch.minimum(after_sinks.clamp(min=0), n_out)
    block, rest = stop // PAGE, stop % PAGE
    classes = cache.classes[v, block.clamp(max=cache.classes.shape[1] - 1)]
    is_before = torch.arange(PAGE, device=cache.device) < rest[:, None]
    found = torch.stack([cache.before[level, v, block] + ((classes == level) & is_before).sum(1) for level in LEVELS])
    return torch.where(after_sinks < 0, after_sinks, found).int()


def positions(cache, row: int, head: int) -> torch.Tensor:
    """Position of each token that a KV head holds, int64, in the order of ``moves.head_tokens``."""
    v, n_sink, n_out = cache.heads_of(row).start + head, int(cache.n_sink[row]), int(cache.n_out[row])
    left = cache.classes[v].flatten()[:n_out]
    places = [cache.sinks + (left == level).nonzero()[:, 0] for level in LEVELS]
    packed = cache.c_pack[:, v].tolist()
    ends = torch.arange(int(cache.n_tok[row]), device=cache.device)
    return torch.cat([*(places[level][: packed[level]] for level in reversed(LEVELS)),
                      *(places[level][packed[level] :] for level in reversed(LEVELS)), ends[:n_sink],
                      ends[n_sink + n_out :]])


def visible(positions: torch.Tensor, at: torch.Tensor, options: Attention, n_sink: int) -> torch.Tensor:
    """Which tokens at these positions the queries at positions ``at`` see: bool [queries, tokens]; as
    ``reference.visible``."""
    seen = positions <= at[:, None]
    if options.window is not None:
        seen &= (positions > at[:, None] - options.window) | ((positions < n_sink) & options.keep_sinks)
    return seen


def drop_pages(cache, row: int, first: int) -> None:
    """Return the pages of a row whose tokens are all before position ``first``, as if those had been pruned.

    Of low pages whole frames alone.
    """
    pool, heads = cache.pool, cache.heads_of(row)
    count = torch.full((row + 1,), first, device=cache.device)
    pages = torch.minimum(hidden(cache, count)[:, heads].clamp(min=0), cache.c_pack[:, heads]) // PAGE
    pages[1] -= pages[1] % pool.per_low
    gone = [[] for _ in pool.lists]
    for level, mine in enumerate(pages.tolist()):
        step = pool.per_low if level else 1
        gone[pool.sizes[level]] += [cache.table[level, heads.start + head, :n:step] // pool.frame_units(level)
                                    for head, n in enumerate(mine)]
    pool.give([torch.cat(ids) for ids in gone])
    places = torch.arange(cache.table.shape[2], device=cache.device) + pages[..., None]
    last = cache.table.shape[2] - 1
    cache.table[:, heads] = cache.table[:, heads].gather(2, places.clamp(max=last)).masked_fill(places > last, -1)
    dropped = PAGE * pages
    cache.c_pack[:, heads] -= dropped
    cache.n_drop[heads] += dropped.sum(0, dtype=torch.int32)
    cache.before[:, heads] = (cache.before[:, heads] - dropped[..., None]).clamp(min=0)
    classes = cache.classes[heads].flatten(1)
    is_gone = torch.stack([((classes == level).cumsum(1) <= dropped[level, :, None]) & (classes == level)
                           for level in LEVELS]).any(0)
    is_gone[:, int(cache.n_out[row]) :] = False
    cache.classes[heads] = classes.masked_fill(is_gone, PRUNED).view_as(cache.classes[heads])
