"""Host integers in place of the DSL's, in every module of Hopper's kernels that a computation passes through."""

import sys
from types import ModuleType

PACKAGE = ("lowbit_attn.hopper.", "lowbit_attn.device.numbers")


def modules_used(*roots: ModuleType) -> list[ModuleType]:
    """Modules of PACKAGE among ``roots`` and among what they import, or import names from, and so on."""
    found, left = {}, list(roots)
    while left:
        module = left.pop()
        if module.__name__ in found:
            continue
        found[module.__name__] = module
        for value in vars(module).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(name, str) and name.startswith(PACKAGE):
                left.append(sys.modules[name])
    return list(found.values())


def replace_integers(monkeypatch, by: type, *roots: ModuleType, names: tuple[str, ...] = ("Int32",)) -> None:
    """Let the functions of ``roots``, and all that they call, compute with ``by`` where they name the DSL's integers.

    AssertionError: a root lacks one of ``names``, as it has moved or computes with something else.
    """
    for root in roots:
        assert (missing := set(names) - vars(root).keys()) == set(), f"{root.__name__} has no {', '.join(missing)}"
    for module in modules_used(*roots):
        for name in names:
            if name in vars(module):
                monkeypatch.setattr(module, name, by)
