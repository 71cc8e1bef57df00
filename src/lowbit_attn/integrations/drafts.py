"""Assisted generation over a LowBitCache: drafts are read as if each had come alone, and any of them is taken back.

transformers brings the drafts of a step in one forward call, behind the last accepted token or behind the whole prompt,
and crops those that the model rejects. A layer reads them in parts: a part ends where a block of the pages is full, so
that the next part reads the block as a step without drafts would, packed. Under a window, and for formats that follow
the queries, a part is one token. A crop into packed blocks restores what the layer held in 16 bit before the drafts and
stores the accepted ones again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps

import torch

from lowbit_attn.cache.rollback import Snapshot, has_packed_too_much, tokens_until_packed
from lowbit_attn.reference import Attention


class Recording:
    """Which tokens of the next forward call are drafts, of a cache that takes drafts back.

    ``prompt``: tokens of the prompt that the next call brings, maybe with drafts behind it; None: it brings none.
    """

    def __init__(self):
        self.is_on, self.prompt = False, None

    @contextmanager
    def of_prompt(self, tokens: int) -> Iterator[None]:
        """Assisted generation from a prompt of so many tokens."""
        self.prompt = tokens
        try:
            yield
        finally:
            self.is_on, self.prompt = False, None

    def drafts(self, held: int, new: int) -> int:
        """How many of the ``new`` tokens of a forward call over a cache of ``held`` tokens are read as drafts."""
        if not self.is_on:
            return 0
        prompt, self.prompt = self.prompt, None
        if prompt is None:
            return new if held else 0
        return new - prompt if new >= prompt else max(0, held + new - prompt)


@dataclass(frozen=True)
class Step:
    """New tokens of a layer: k, v, query [batch, heads, tokens, head_dim] and position_ids [.., tokens], if the model
    says them; options: as the model asked; pads: padding at the start of each row, which may end behind these tokens.
    """

    k: torch.Tensor
    v: torch.Tensor
    query: torch.Tensor
    options: Attention
    pads: Sequence[int]
    position_ids: torch.Tensor | None

    def __len__(self) -> int:
        return self.query.shape[2]

    def part(self, start: int, stop: int) -> "Step":
        k, v, query = (x[:, :, start:stop] for x in (self.k, self.v, self.query))
        ids = None if self.position_ids is None else self.position_ids[..., start:stop]
        return replace(self, k=k, v=v, query=query, position_ids=ids)


class Drafts:
    """The drafts of a layer's last step that it still holds, and what it was before them.

    ``snapshot``: that of its pages, None where the drafts fill no block: then the cache's own rewind takes them back.
    """

    def __init__(self, layer, step: Step):
        self.step, self.length, self.pads, self.snapshot = step, layer.length, layer.pads, None
        if layer.tail is None and (self._is_split(layer) or len(step) >= tokens_until_packed(layer.kv)):
            self.snapshot = Snapshot(layer.kv)

    def __len__(self) -> int:
        return len(self.step)

    def _is_split(self, layer) -> bool:
        """Whether every draft is a part of its own."""
        return layer.format.follows_queries or layer.windowed(self.step.options).window is not None

    def store(self, layer) -> torch.Tensor:
        """Have the layer read and store the drafts; whatever raises, it is as it was before them."""
        out, start = [], 0
        try:
            while start < len(self):
                size = len(self)
                if layer.tail is None:
                    size = 1 if self._is_split(layer) else tokens_until_packed(layer.kv)
                out.append(layer.attend_step(self.step.part(start, start + size)))
                start += size
        except BaseException:
            if self.snapshot is not None:
                self._restore(layer)
            raise
        return torch.cat(out, 1)

    def take_back(self, layer, tokens: int) -> None:
        """Have the layer forget the last ``tokens`` of the drafts."""
        self.step = self.step.part(0, len(self) - tokens)
        is_ahead = self.snapshot is not None and (layer.format.follows_queries or has_packed_too_much(layer.kv, tokens))
        if is_ahead:
            self._restore(layer)
            if len(self):
                self.store(layer)
            return
        if layer.tail is not None:
            layer.tail = tuple(x[:, :, :-tokens] for x in layer.tail)
        else:
            layer.kv.rewind(range(layer.batch_size), tokens)
        layer.length -= tokens

    def _restore(self, layer) -> None:
        self.snapshot.restore(layer.kv)
        layer.length, layer.pads = self.length, self.pads


def tell_prompt(decoding: Callable, argument: str, kind: type) -> Callable:
    """transformers' assisted decoding, which then tells a cache of this kind, passed as this argument, how long the
    prompt is: the first drafts come in one call with it, and nothing else says where they begin."""
    @wraps(decoding)
    def assisted(model, input_ids: torch.Tensor, *arguments, **options):
        cache, embedded = options.get(argument), options.get("inputs_embeds")
        if not isinstance(cache, kind):
            return decoding(model, input_ids, *arguments, **options)
        prompt = input_ids if embedded is None else embedded
        with cache.recording.of_prompt(prompt.shape[1]):
            return decoding(model, input_ids, *arguments, **options)
    return assisted
