"""Exceptions are public: one base, importable from lowbit_attn, in the table of docs/errors.md."""

import ast
import builtins
import re
from pathlib import Path

import pytest

import lowbit_attn
from lowbit_attn import ampere, errors, hopper

ROOT = Path(__file__).parents[2]
FOLDERS = [Path(package.__file__).parent for package in (lowbit_attn, hopper, ampere)]
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.M)
BEFORE = {"PageExhaustedError": RuntimeError, "CacheFaultError": RuntimeError, "CacheFileError": ValueError,
          "CodebookFileError": ValueError, "FolderError": ValueError, "KernelNotBuiltError": RuntimeError,
          "KernelCheckError": RuntimeError, "LayoutMismatchError": ValueError, "UnknownFormatError": KeyError,
          "UntrustedError": PermissionError, "TextError": ValueError, "ToolMissingError": RuntimeError}


def is_exception(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, BaseException)


def defined(texts) -> set[str]:
    """Public classes in source texts that derive from an exception, of Python or of a class that does so."""
    bases = {}
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
    found, size = set(), -1
    while size != len(found):
        size = len(found)
        found |= {name for name, parents in bases.items() if any(is_exception(x) or x in found for x in parents)}
    return {name for name in found if not name.startswith("_")}


EXCEPTIONS = defined(path.read_text() for folder in FOLDERS for path in folder.rglob("*.py"))


def test_exceptions_are_found_by_their_bases():
    text = "class A(ValueError): 1\nclass B(x.A): 1\nclass _C(A): 1\nclass D(int): 1\nclass E(UserWarning): 1"
    assert defined([text]) == {"A", "B", "E"} and len(EXCEPTIONS) >= 20


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_an_exception_is_public_and_documented(name):
    kind = getattr(lowbit_attn, name)
    assert name in lowbit_attn.__all__ and issubclass(kind, errors.LowBitAttnError | Warning)
    stated = dict(ROW.findall((ROOT / "docs/errors.md").read_text()))[name]
    assert stated in [base.__name__ for base in kind.__mro__[1:]]
    assert name == "LowBitAttnError" or any(is_exception(base.__name__) and base not in (Exception, BaseException)
                                            for base in kind.__mro__[1:])


def test_the_table_names_nothing_else():
    assert sorted(dict(ROW.findall((ROOT / "docs/errors.md").read_text()))) == sorted(EXCEPTIONS)


def test_bases_that_callers_caught_are_kept():
    for name, base in BEFORE.items():
        assert issubclass(getattr(lowbit_attn, name), base)
    with pytest.raises(errors.LowBitAttnError) as caught:
        lowbit_attn.FORMATS["int4"]
    assert isinstance(caught.value, KeyError)
