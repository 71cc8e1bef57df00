"""Formats by name. A new format is one file and one line in FAMILIES."""

import difflib
import re
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
        if fmt := self.find(name):
            return fmt
        raise UnknownFormatError(name, self)

    def find(self, name: str) -> Format | None:
        """The format of a name, None if no grammar has it."""
        return next(filter(None, (family.parse(name) for family in self._families)), None)

    def __iter__(self):
        return (name for family in self._families for name in family.presets)

    def __len__(self) -> int:
        return sum(len(family.presets) for family in self._families)

    @property
    def grammars(self) -> list[str]:
        return [family.grammar for family in self._families]


# Formats of so many bits a number, for names that other projects give to theirs.
OF_BITS = {1: ("k1v1",), 2: ("k2v2",), 3: ("k4v2",), 4: ("k4v4",), 5: ("k8v4",), 6: ("k8v4",), 8: ("k4v4", "k8v8")}
_FOREIGN = re.compile(r"(?:kv|u?int|mxfp|nvfp|fp|nf|float|hqq|iq|q|w|turbo\w*?)[-_ ]?(\d)(?!\d)"
                      r"|(\d)[-_ ]?bits?\b|(\d)$")
LONGEST_SHOWN = 60  # characters of a wrong name that a message repeats


def suggestions(name: str, registry: FormatRegistry) -> list[str]:
    """Names that a wrong name may stand for: the same in lower case, a preset that is close to it, or the format of as
    many bits as another project's name says (int4, q4_0, fp8)."""
    simple = name.strip().lower()
    if registry.find(joined := re.sub(r"[\s_]", "", simple)):
        return [joined]
    if match := _FOREIGN.match(simple):
        return list(OF_BITS.get(int(next(filter(None, match.groups()))), ()))
    return difflib.get_close_matches(simple[:LONGEST_SHOWN], list(registry), n=3, cutoff=0.5)


def shortened(name: object) -> str:
    """repr of what was given as a name, cut where it is too long for a message."""
    text = repr(name)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN - 3]}..."


class UnknownFormatError(LowBitAttnError, KeyError):
    """A name outside every grammar; the message shows close matches and the presets."""

    def __init__(self, name: object, registry: FormatRegistry):
        close = suggestions(str(name), registry)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        super().__init__(f"format {shortened(name)} is not known{hint} (presets: {', '.join(registry)}; the grammar of "
                         "all names is in docs/formats.md)")

    def __str__(self) -> str:
        return self.args[0]


FORMATS = FormatRegistry(FAMILIES)


def unnamed(fmt: Format) -> list[str]:
    """Why a Format object cannot have kernels, which are built and found by name; empty if FORMATS names it."""
    if fmt.name in FORMATS and FORMATS[fmt.name] == fmt:
        return []
    return [f"format {fmt}: a Format that FORMATS does not give under this name has no kernels, supported: its names"]
