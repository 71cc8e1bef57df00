"""Formats by name. A new format is one file and one line in FAMILIES."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lowbit_attn.errors import LowBitAttnError
from lowbit_attn.formats import boosted_values, codebook, kitty, uniform
from lowbit_attn.formats.contract import Format, Record, Side
from lowbit_attn.formats.spec import Kind, Plane, Scope, SideSpec

__all__ = ["FAMILIES", "FORMATS", "Family", "Format", "FormatRegistry", "Kind", "Plane", "Record",
           "Scope", "Side", "SideSpec"]


@dataclass(frozen=True)
class Family:
    """Formats that share a grammar: ``parse(name)`` gives the Format, or None if the name is not in it."""

    grammar: str
    presets: tuple[str, ...]
    parse: Callable[[str], Format | None]


FAMILIES: list[Family] = [
    Family(uniform.GRAMMAR, uniform.PRESETS, uniform.parse),
    Family(kitty.GRAMMAR, kitty.PRESETS, kitty.parse),
    Family(codebook.GRAMMAR, codebook.PRESETS, codebook.parse),
    Family(boosted_values.GRAMMAR, boosted_values.PRESETS, boosted_values.parse),
]


class FormatRegistry(Mapping[str, Format]):
    """FORMATS[name] accepts every name of every family's grammar; iteration gives the presets."""

    def __init__(self, families: list[Family]):
        self._families = families

    def __getitem__(self, name: str) -> Format:
        for family in self._families:
            if fmt := family.parse(name):
                return fmt
        raise UnknownFormatError(name, self)

    def __iter__(self):
        return (name for family in self._families for name in family.presets)

    def __len__(self) -> int:
        return sum(len(family.presets) for family in self._families)

    @property
    def grammars(self) -> list[str]:
        return [family.grammar for family in self._families]


class UnknownFormatError(LowBitAttnError, KeyError):
    """A name outside every grammar; the message shows the grammars and close matches."""

    def __init__(self, name: object, registry: FormatRegistry):
        close = difflib.get_close_matches(str(name), list(registry), n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        super().__init__(f"format {name!r} is not known{hint} (grammar: {', '.join(registry.grammars)}; "
                         f"presets: {', '.join(registry)})")

    def __str__(self) -> str:
        return self.args[0]


FORMATS = FormatRegistry(FAMILIES)


def unnamed(fmt: Format) -> list[str]:
    """Why a Format object cannot have kernels, which are built and found by name; empty if FORMATS names it."""
    if fmt.name in FORMATS and FORMATS[fmt.name] == fmt:
        return []
    return [f"format {fmt}: a Format that FORMATS does not give under this name has no kernels, supported: its names"]
