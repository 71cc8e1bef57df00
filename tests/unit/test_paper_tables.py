"""docs/kernels.md: from each step of the papers to what does it; every name that the tables give is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TEXT = (ROOT / "docs/kernels.md").read_text()
HOPPER, AMPERE, PACKAGE = ROOT / "hopper", ROOT / "ampere", ROOT / "src/lowbit_attn"
FOLDERS = {"BitDecoding": (HOPPER, AMPERE, PACKAGE), "Kitty": (PACKAGE, HOPPER, AMPERE),
           "VQ-LLM": (PACKAGE, HOPPER, AMPERE)}  # of the columns
STEPS = {  # of which there must be a row
    "BitDecoding": ("4.1.1", "4.1.2", "4.1.3", "4.1.4", "4.2", "4.3", "Algorithm 2", "Algorithm 3", "combine kernel"),
    "VQ-LLM": ("V codebook cache", "VI-A", "VI-B", "Algorithm 1", "Algorithm 2"),
    "Kitty": ("3.2", "3.3", "4.1", "4.2", "4.3 step 1", "4.3 step 2", "4.3 step 3", "Algorithm 1"),
}
REFERENCE = re.compile(r"`([\w/]+\.py): ([\w., ]+)`")


def rows_of(paper: str) -> list[list[str]]:
    """Cells of the paper's table, without its header."""
    part = TEXT.split(f"### {paper}\n")[1].split("\n#")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in part.splitlines() if row.startswith("|")][2:]


def targets_of(node: ast.stmt) -> list[str]:
    """Names that a statement binds: a definition's, or an assignment's."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return []
    assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [one for target in assigned for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [one.id for one in flat if isinstance(one, ast.Name)]


def defined_in(path: Path) -> set[str]:
    """What a module defines at its top, and as "Class.name" what its classes do."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        names.update(targets_of(node))
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            names.update(f"{node.name}.{name}" for name in targets_of(inner))
    return names


@pytest.mark.parametrize("paper", FOLDERS)
def test_every_name_is_where_its_column_says(paper):
    seen = 0
    for step, *cells in rows_of(paper):
        assert len(cells) == 3, step
        for folder, cell in zip(FOLDERS[paper], cells, strict=True):
            found = REFERENCE.findall(cell)
            rest = REFERENCE.sub("", cell).strip(", ")
            assert (found and not rest) or (not found and cell.startswith("-")), f"{step}: {cell!r}"
            for file, names in found:
                path = folder / file
                assert path.is_file(), f"{step}: no {path.relative_to(ROOT)}"
                missing = set(names.split(", ")) - defined_in(path)
                assert not missing, f"{step}: {path.relative_to(ROOT)} has no {sorted(missing)}"
                seen += len(names.split(", "))
    assert seen > 20


@pytest.mark.parametrize("paper", STEPS)
def test_every_step_has_a_row(paper):
    steps = [row[0] for row in rows_of(paper)]
    assert not [wanted for wanted in STEPS[paper] if not any(wanted in step for step in steps)]
    assert all(any(REFERENCE.search(cell) for cell in row) for row in rows_of(paper))
    assert len(steps) == len(set(steps))


def test_files_of_the_reading_order_are_there():
    part = TEXT.split("## Reading order\n")[1]
    folders = (ROOT, PACKAGE, HOPPER / "tile", HOPPER / "warp")
    names = re.findall(r"`([\w/]+\.py)`", part)
    assert len(names) > 20
    for name in names:
        in_tests = name.startswith("tests/") and any((ROOT / "tests").rglob(Path(name).name))
        assert in_tests or any((folder / name).is_file() for folder in folders), name


def test_a_name_that_is_gone_would_be_found(tmp_path):
    module = tmp_path / "m.py"
    module.write_text("A, B = 1, 2\nC: int = 3\n\ndef f():\n    hidden = 1\n\n"
                      "class D:\n    e: int\n    def g(self): ...\n")
    assert defined_in(module) == {"A", "B", "C", "f", "D", "D.e", "D.g"}
