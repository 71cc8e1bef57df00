"""Formats of tests alone: uniform ones whose V is packed so many tokens later than K, by names like "k4v4+w128"."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import lowbit_attn
from lowbit_attn.formats import FAMILIES, Family, Format, FormatRegistry


def parse(name: str) -> Format | None:
    """The format of a name, or None if the name is none of these; kernels that serve it serve Kitty's lagging V."""
    if not (match := re.fullmatch(r"(.+)\+w(\d+)", name)):
        return None
    return replace(lowbit_attn.FORMATS[match[1]], name=name, window_v=int(match[2]))


FAMILY = Family("<uniform>+w<128|256>", (), parse)
FORMATS = FormatRegistry([*FAMILIES, FAMILY])  # the package's and these


def register() -> None:
    """Give the package's own FORMATS these names until the process ends: kernels are built and found by name."""
    FAMILIES.append(FAMILY)


@contextmanager
def registered() -> Iterator[None]:
    """Give the package's own FORMATS these names for a while."""
    register()
    try:
        yield
    finally:
        FAMILIES.remove(FAMILY)
