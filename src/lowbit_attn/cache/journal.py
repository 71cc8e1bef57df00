"""Writes of one call that are all done or all undone."""

import torch


class Journal:
    """What a call writes; whatever raises in its ``with`` block, all that was written there is brought back.

    Targets are views of a cache's tensors. What they held is kept before they are written, so that bringing it back
    copies between memory that exists and allocates nothing.
    """

    def __init__(self):
        self._undo: list[tuple] = []  # functions and their arguments, in the order of the writes

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            for undo, *arguments in reversed(self._undo):
                undo(*arguments)

    def keep(self, target: torch.Tensor) -> None:
        """Remember what a view holds, which is written next."""
        self._undo.append((target.copy_, target.clone()))

    def set(self, owner, **values) -> None:
        """Set attributes of an object."""
        for name, value in values.items():
            self._undo.append((setattr, owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def write(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values into a view."""
        self.keep(target)
        target.copy_(values)

    def fill(self, target: torch.Tensor, value: int, old: int | None = None) -> None:
        """Set a view to one value; old: the one that it is known to hold all over."""
        if old is None:
            self.keep(target)
        else:
            self._undo.append((target.fill_, old))
        target.fill_(value)
