"""Exceptions at every point of a call, one at a time."""

from torch.utils._python_dispatch import TorchDispatchMode


class InjectedError(Exception):
    """Stands for whatever may raise: memory that runs out, a kernel that cannot be built."""


class Faults(TorchDispatchMode):
    """Raises at point ``at`` of a call: points are torch's operations (allocations, copies, writes) and those that the
    tests name, numbered in their order. ``is_off`` within what a device does at once or not at all, and within
    arithmetic that writes nothing of the cache."""

    def __init__(self, at: int | None):
        super().__init__()
        self.at, self.count, self.is_off = at, 0, False

    def point(self, what: str) -> None:
        if self.is_off:
            return
        self.count += 1
        if self.count - 1 == self.at:
            raise InjectedError(what)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.point(str(func))
        return func(*args, **(kwargs or {}))
