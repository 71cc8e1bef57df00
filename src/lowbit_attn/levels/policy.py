"""Policies: which tokens are stored at the high precision, which at the low one, and which are dropped (LeanKV, 4).

A policy takes mean probabilities (``significance.means``) of tokens of one age and gives each a class. ``Shares`` and
``Cumulative`` decide once, when a block of 128 tokens leaves the 16-bit window, for each KV head on its own. ``Paper``
is the published algorithm, token by token; it serves comparisons in torch and no cache.

Pruning is off by default in all of them: a token that was dropped cannot be asked for (docs/leankv.md has the table).
"""

from dataclasses import dataclass
from numbers import Real

import torch

from lowbit_attn.cache.significance import ranking

HIGH, LOW, PRUNED = range(3)  # classes of a token
FRACTION_BITS = 24  # of a mean probability as a whole number, so that sums are exact in any order


@dataclass(frozen=True)
class Shares:
    """The most significant share of the tokens is stored high, the next one low, the rest is dropped.

    high, low: shares, 0 to 1, together at most 1; low None: all others. Counts are rounded to whole tokens.
    """

    high: float = 0.25
    low: float | None = None

    def __post_init__(self):
        object.__setattr__(self, "low", 1 - _share("high", self.high) if self.low is None else _share("low", self.low))
        if self.high + self.low > 1:
            raise ValueError(f"low: got {self.low} beside high = {self.high}, supported: together at most 1")

    @property
    def prunes(self) -> bool:
        return self.high + self.low < 1

    def counts(self, tokens: int) -> tuple[int, int]:
        """(high tokens, high and low tokens) of so many."""
        return round(self.high * tokens), round((self.high + self.low) * tokens)

    def classes(self, mean: torch.Tensor) -> torch.Tensor:
        """Mean probabilities [.., n] -> classes uint8 [.., n]; of equals the earlier is the more significant."""
        high, kept = self.counts(mean.shape[-1])
        place = torch.arange(mean.shape[-1], device=mean.device)
        by_rank = (place >= high).to(torch.uint8) + (place >= kept).to(torch.uint8)
        return torch.zeros_like(mean, dtype=torch.uint8).scatter_(-1, ranking(mean), by_rank.expand_as(mean))


@dataclass(frozen=True)
class Cumulative:
    """LeanKV's thresholds: tokens are dropped, the least significant first, while their sum is below T_l of the total,
    then stored low while it is below T_h.

    Only tokens of one age may be compared: the means of young tokens are high, since nearby queries favour them. A
    token that no query has seen is stored high and counts nothing.
    """

    T_l: float = 0.0
    T_h: float = 0.5

    def __post_init__(self):
        if _share("T_l", self.T_l) > _share("T_h", self.T_h):
            raise ValueError(f"T_l: got {self.T_l}, supported: at most T_h = {self.T_h}")

    @property
    def prunes(self) -> bool:
        return self.T_l > 0

    def classes(self, mean: torch.Tensor) -> torch.Tensor:
        """Mean probabilities [.., n] -> classes uint8 [.., n]; of equals the later is dropped first."""
        unseen = mean.isinf()
        weight = (mean.masked_fill(unseen, 0).double() * (1 << FRACTION_BITS)).round().long()
        order = ranking(mean).flip(-1)  # from the least significant on
        total = weight.sum(-1, keepdim=True).float()
        before = weight.gather(-1, order).cumsum(-1)
        by_rank = torch.where(before < self.T_l * total, PRUNED, torch.where(before < self.T_h * total, LOW, HIGH))
        found = torch.zeros_like(mean, dtype=torch.uint8).scatter_(-1, order, by_rank.to(torch.uint8))
        return found.masked_fill(unseen, HIGH)


@dataclass(frozen=True)
class Paper:
    """LeanKV as published: the prompt by cumulative thresholds, then Algorithm 1, one candidate and one victim a step.

    The text leaves open what generation compares T_l and T_h with; here it is the score that the caller gives (the
    public code of its predecessor takes mean probability times the number of tokens). It needs K per token, so that one
    token may change its precision: of at most 4 bits this costs more than the levels save, and no cache takes it.
    """

    T_l: float
    T_h: float

    def __post_init__(self):
        if not 0 <= self.T_l <= self.T_h:
            raise ValueError(f"T_l, T_h: got {self.T_l}, {self.T_h}, supported: 0 <= T_l <= T_h")

    @property
    def prunes(self) -> bool:
        return self.T_l > 0

    def step(self, classes: torch.Tensor, score: torch.Tensor, candidate: int) -> torch.Tensor:
        """Classes of one head's tokens after one of them left the window, uint8 [n]; the arguments stay as they are.

        classes: uint8 [n] of the tokens before; the candidate's own is not read, and tokens of the window or not yet
        there are given as PRUNED. score: fp32 [n]; of equals the earlier is the victim.
        """
        after = classes.clone()
        after[candidate] = PRUNED
        if score[candidate] >= self.T_h:  # line 5
            after[candidate] = HIGH
            victim = _least(score, after == HIGH)
            if score[victim] < self.T_h:
                after[victim] = LOW if score[victim] >= self.T_l else PRUNED
        elif score[candidate] >= self.T_l:  # line 13
            after[candidate] = LOW
            victim = _least(score, after == LOW)
            if score[victim] < self.T_l:
                after[victim] = PRUNED
        return after


Policy = Shares | Cumulative


def _least(score: torch.Tensor, among: torch.Tensor) -> int:
    """The first token of the least score among those marked, of which there is one at least."""
    places = among.nonzero()[:, 0]
    values = score[places]
    return int(places[(values == values.min()).nonzero()[0, 0]])


def _share(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value!r}, supported: 0 to 1")
    return value
