"""A part of the interpreter's cases, for runs that cannot take all: consecutive seeds take others, until all were."""

from collections import defaultdict


def left_out(items: list, parts: int, seed: int) -> list:
    """Of each file ..._ptx.py every ``parts``-th case stays, and one at least."""
    cases = defaultdict(list)
    for item in items:
        if item.path.stem.endswith("_ptx"):
            cases[item.path].append(item)
    found = []
    for number, own in enumerate(cases.values()):
        step = min(parts, len(own))
        found += [item for i, item in enumerate(own) if (i - seed - number) % step]
    return found
