"""Reads lists of tokens in chunks over fresh caches, and counts what attended to packed pages.

A prompt that is read in one forward call attends to its own tokens in 16 bit and is packed afterwards: the logits are
those of a 16-bit cache, whatever the format. In chunks, every token attends to what came in earlier calls as the cache
holds it: packed, but for sinks and the open block.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from lowbit_attn.integrations.hf import CACHE_ARGUMENT
from lowbit_attn.quality import new_cache, use_cache_kind


@dataclass
class Attended:
    """Predicted tokens whose queries saw a packed page, of all that were predicted."""

    packed: int = 0
    tokens: int = 0

    @property
    def share(self) -> float:
        return self.packed / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class Wanted:
    """Tokens to read, and of how many at their end the logits are asked for."""

    ids: Sequence[int]
    keep: int = 1

    def whole_chunks(self, chunk: int, like: "Wanted | None" = None) -> int:
        """Tokens of leading whole chunks without a wanted logit, that ``like`` begins with too and does not want."""
        most = min(len(one.ids) - one.keep for one in (self, like or self))
        same = next((i for i, (a, b) in enumerate(zip(self.ids, like.ids)) if a != b), most) if like else most
        return min(same, most) // chunk * chunk


class Reader:
    """A model over caches of one kind: each list of tokens has a cache of its own.

    options: of LowBitCache, None: 16 bit. chunk: tokens of a forward call. What a list shares with the one before it,
    in whole chunks, is read once.
    """

    def __init__(self, model, options: Mapping | None, chunk: int):
        self.model, self.options, self.chunk = model, options, chunk
        self.attended = Attended()
        self._held: tuple[Sequence[int], Cache] = ((), None)

    def read(self, wanted: Wanted, following: Wanted | None = None) -> tuple[torch.Tensor, Cache]:
        """Logits fp32 [keep, vocabulary] of the last ``keep`` tokens, and the cache that holds all of them."""
        use_cache_kind(self.model, self.options)
        cache, start = self._begun(wanted)
        shared = wanted.whole_chunks(self.chunk, following) if following else 0
        first, found = len(wanted.ids) - wanted.keep, []
        while start < len(wanted.ids):
            if start and start == shared and start != len(self._held[0]):
                self._held = wanted.ids[:start], copy.deepcopy(cache)
            stop = min(start + self.chunk, len(wanted.ids))
            kept = max(0, stop - max(start, first))
            found.append(self.step(cache, wanted.ids[start:stop], kept))
            start = stop
        return torch.cat(found), cache

    def step(self, cache: Cache, ids: Sequence[int], keep: int = 1) -> torch.Tensor:
        """One forward call: logits fp32 [keep, vocabulary] of its last ``keep`` tokens, which count as attending."""
        self.attended.tokens += keep
        self.attended.packed += keep * is_packed(cache)
        tokens = torch.tensor([list(ids)], device=self.model.device)
        with torch.inference_mode():
            logits = self.model(tokens, **{CACHE_ARGUMENT: cache}, logits_to_keep=max(1, keep)).logits[0]
        return logits[len(logits) - keep :].float()

    def _begun(self, wanted: Wanted) -> tuple[Cache, int]:
        """A cache with the leading tokens that are held, and how many; else an empty one."""
        ids, cache = self._held
        if cache is not None and len(ids) <= wanted.whole_chunks(self.chunk) and wanted.ids[: len(ids)] == ids:
            return copy.deepcopy(cache), len(ids)
        return new_cache(self.options, self.model, len(wanted.ids)), 0


def is_packed(cache: Cache) -> bool:
    """Whether a layer of a cache holds packed pages."""
    for layer in cache.layers:
        for one in getattr(layer, "rows", None) or [layer]:
            kv = getattr(one, "kv", None)
            if kv is not None and _has_pages(kv):
                return True
    return False


def _has_pages(kv) -> bool:
    if hasattr(kv, "c_pack"):  # of levels, whose staged tokens are still in 16 bit
        return bool(kv.c_pack.any())
    return bool(kv.counts.n_qk.any() or kv.counts.n_qv.any())
