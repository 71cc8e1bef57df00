"""The tests' own house: five packages, none of which imports a test, and formats of tests that no user meets."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import windowed
from seeds import seed_of

from lowbit_attn import FORMATS
from lowbit_attn.formats import FAMILIES

TESTS = Path(__file__).parents[1]
PACKAGES = ("unit", "host", "gpu", "sim", "serving")
FILES = sorted(TESTS.rglob("*.py"))


def imported(text: str) -> set[str]:
    """Last and inner parts of all names that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func) and node.args:
            names |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return {part for name in names for part in str(name).split(".")}


@pytest.mark.parametrize("text", ["import test_x", "import unit.test_x", "from unit import test_x", "import os, test_x",
                                  "from unit.test_x import a", "def f():\n    from test_x import a",
                                  "import_module('unit.test_x')", "pytest.importorskip('test_x')"])
def test_an_imported_test_is_seen(text):
    assert "test_x" in imported(text)


def test_no_test_is_imported():
    assert len(FILES) > 80
    stems = {file.stem for file in FILES if file.stem.startswith("test_")}
    for file in FILES:
        assert not imported(file.read_text()) & stems, f"{file.relative_to(TESTS)}: what tests share is no test"


def test_every_test_is_in_a_package():
    for name in PACKAGES:
        assert (TESTS / name / "__init__.py").exists()
    found = [file for file in FILES if file.name.startswith("test_")]
    for file in found:
        assert file.relative_to(TESTS).parts[0] in PACKAGES, f"{file} is in none of {', '.join(PACKAGES)}"
        assert (file.parent / "__init__.py").exists(), f"{file.parent} is no package"
    assert len({file.name for file in found}) == len(found), "seeds are made of file names"


def test_a_seed_follows_the_name_and_not_the_folder():
    assert seed_of("tests/unit/test_a.py::test_b[x/y::z]") == seed_of("tests/host/test_a.py::test_b[x/y::z]")
    names = ("test_a.py::test_b", "test_a.py::test_c", "test_b.py::test_b", "test_a.py::test_b[1]",
             "test_a.py::test_b[a/1]")
    assert len({seed_of(f"tests/unit/{name}") for name in names}) == 5


def test_formats_of_tests_are_not_the_packages():
    """In a fresh process that has the matrix, and here beside a registration that ends, by an error too."""
    code = "import gpu.matrix as m, lowbit_attn; print('k4v4+w128' in m.FORMATS, 'k4v4+w128' in lowbit_attn.FORMATS)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=TESTS)
    assert answer.stdout == "True False\n"
    assert windowed.FAMILY not in FAMILIES and "k4v4+w128" not in FORMATS
    with pytest.raises(RuntimeError), windowed.registered():
        assert FORMATS["k4v4+w128"] == windowed.FORMATS["k4v4+w128"] and FORMATS["k4v4+w128"].window_v == 128
        raise RuntimeError
    assert windowed.FAMILY not in FAMILIES and "k4v4+w128" not in FORMATS
    assert windowed.FORMATS["k2v2"] == FORMATS["k2v2"] and tuple(windowed.FORMATS) == tuple(FORMATS)
