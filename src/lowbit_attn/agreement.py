"""Calls that all ranks of a process group make, or none: what a rank refuses, every rank refuses.

A rank prepares a call: it checks the arguments and changes nothing. Then all ranks exchange two numbers, whether they
can make the call and a digest of its arguments. If all can, with equal arguments, each does its part of the work. Else
each raises, and a second exchange tells what the others have said.

The numbers travel between the hosts' CPUs, through a gloo group beside the caller's own. So nothing waits for a GPU,
and no message can meet one of the caller's. The caller's timeout holds there, too: it is the time after which a rank
that does not come is given up.
"""

import time
from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from lowbit_attn import _private
from lowbit_attn.errors import RankError

T = TypeVar("T")
GROUPS: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()  # the caller's -> its CPUs'
IN_TIME = "the process group's timeout (init_process_group(timeout=...) or new_group(timeout=...))"


class Agreement:
    """What the ranks of a group say to each other before a call. Every rank makes one together with the others.

    group: None for the default group. is_alone: there is one rank, so nothing is said.
    """

    def __init__(self, group: "dist.ProcessGroup | None", rank: int, world: int, is_alone: bool = False):
        self.rank, self.world, self.is_alone = rank, world, is_alone or world == 1
        self.group = None if self.is_alone else _group_of_cpus(group)

    def reach(self, call: str, prepare: Callable[[], tuple[dict, T]]) -> T:
        """What ``prepare`` gives, once all ranks have prepared the same call.

        prepare: checks this rank's call, and gives (facts, what the work needs). Facts are plain values by the names
        of arguments, which must be equal on all ranks. Raises what ``prepare`` raises; RankError where another rank
        refused or has other facts, and where one did not come in time.
        """
        facts, found, error = {}, None, None
        try:
            facts, found = prepare()
        except Exception as refusal:
            error = refusal
        if not self.is_alone:
            self._compare(call, facts, error)
        if error is not None:
            raise error
        return found

    def _compare(self, call: str, facts: dict, error: Exception | None) -> None:
        """Raise RankError unless all ranks say the same; a rank that refused raises its own error instead."""
        digest = int.from_bytes(blake2b(repr((call, facts)).encode(), digest_size=8).digest(), signed=True)
        own, every = (torch.tensor([error is not None, digest], device="cpu"),
                      torch.empty(self.world, 2, dtype=torch.int64, device="cpu"))
        start, said = time.monotonic(), [None] * self.world
        try:
            dist.all_gather(list(every), own, group=self.group)
            has_refused, digests = every.T.tolist()
            if not any(has_refused) and len(set(digests)) == 1:
                return
            text = f"{type(error).__name__}: {error}" if error else None
            dist.all_gather_object(said, (self.rank, call, facts, text), group=self.group)
        except RuntimeError as failure:  # of gloo: a timeout, or a rank that has ended
            missing = missing_rank(call, self.rank, self.world, time.monotonic() - start, failure)
            if error is None:
                raise missing from failure
            error.add_note(f"The other ranks could not be told: {missing}")
        if error is None:
            raise RankError(_differences(call, said))


def missing_rank(call: str, rank: int, world: int, seconds: float, failure: Exception) -> RankError:
    """The error of a rank that waited for another one."""
    return RankError(f"{call}: rank {rank} waited {seconds:.0f} s for the other {world - 1}, at least one of which did "
                     f"not make the call within {IN_TIME}, or has ended; supported: all ranks make the same calls. "
                     f"torch.distributed says: {failure}")


def _group_of_cpus(group: "dist.ProcessGroup | None") -> "dist.ProcessGroup":
    """The gloo group of the same ranks; made by all of them together, once for each group."""
    group = dist.group.WORLD if group is None else group
    if group not in GROUPS:
        ranks, start = dist.get_process_group_ranks(group), time.monotonic()
        try:
            GROUPS[group] = dist.new_group(ranks, _private.group_timeout(group), "gloo", use_local_synchronization=True)
        except RuntimeError as failure:
            raise missing_rank("the first call", dist.get_rank(group), len(ranks), time.monotonic() - start,
                               failure) from failure
    return GROUPS[group]


def _differences(call: str, said: list[tuple]) -> str:
    """What ranks refused, or else in what they differ; said: (rank, call, facts, refusal) of each."""
    refused = [f"rank {rank} refused {name}: {text}" for rank, name, _, text in sorted(said) if text]
    if refused:
        return f"{call}: {'; '.join(refused)}. A call that one rank refuses is refused on all"
    made = {rank: (name, facts) for rank, name, facts, _ in sorted(said)}
    names = {name for name, _ in made.values()}
    if len(names) > 1:
        what = ", ".join(f"rank {rank} made {name}" for rank, (name, _) in made.items())
        return f"{call}: got calls that differ: {what}; supported: the same call on all ranks"
    differ = [name for name in made[0][1] if len({repr(facts[name]) for _, facts in made.values()}) > 1]
    what = "; ".join(f"{name}: " + ", ".join(f"{facts[name]} on rank {rank}" for rank, (_, facts) in made.items())
                     for name in differ)
    return f"{call}: got arguments that differ: {what}; supported: equal ones on all ranks"
