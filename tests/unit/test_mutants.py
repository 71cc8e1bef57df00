"""perf/mutants.py: faults that are out of date are errors, and tests that fail, pass or hang are told apart."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from perf_scripts import PERF, script

ROOT = PERF.parent
SMALLEST = 60  # faults


@pytest.fixture(scope="module")
def mutants():
    with script("mutants") as module:
        yield module


def test_every_fault_is_in_its_folder_once_and_names_a_test(mutants):
    faults = mutants.faults()
    assert len(faults) >= SMALLEST and {fault.kind for fault in faults} == {*mutants.KINDS}
    for fault in faults:
        path = ROOT / fault.file(ROOT)
        text = path.read_text().replace(fault.old, fault.new)
        assert fault.new != fault.old and (path.suffix == ".c" or ast.parse(text))
        file, _, name = fault.test.partition("::")
        assert not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(), fault.test
        assert (ROOT / file).exists(), fault.test


def test_a_text_that_is_not_there_once_is_an_error(mutants, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "a/two.py").write_text("y = 2\n")
    fault = mutants.Fault("what", "sign", "a", "x = 1", "x = -1", "test")
    assert fault.file(tmp_path) == "a/one.py"
    for old in ("y = 2", "z = 3"):
        with pytest.raises(ValueError, match="must be once"):
            mutants.Fault("what", "sign", "a", old, "", "test").file(tmp_path)


def test_scores_count_what_needs_a_gpu(mutants):
    lines = [{"file": f"hopper/{name}.py", "seen": seen} for name, seen in (("tile/a", True), ("tile/b", False),
                                                                          ("warp/a", True))]
    shown = [row.split() for row in mutants.table(lines, [("hopper/warp/c.py", None)]).splitlines()]
    assert shown[1:] == [["hopper/tile", "2", "1", "1", "0", "50", "%"], ["hopper/warp", "2", "1", "0", "1", "50", "%"],
                         ["all", "4", "2", "1", "1", "50", "%"]]


TESTS = """import sys, time, value
def test_right(): assert value.X == 1
def test_new(): assert value.X == 1 and "tomllib" not in sys.modules
def test_hangs():
    while value.X != 1: time.sleep(0.1)
"""
RUN = """import json, sys
from pathlib import Path
import mutants
tree, origin = Path(sys.argv[1]), {"commit": "x"}
one = lambda new, test, seconds: mutants.Fault(new, "sign", "src", "X = 1", new, test, seconds)
print(json.dumps([mutants.try_fault(tree, one(*x), origin) for x in json.loads(sys.argv[2])]))
"""


def test_a_test_that_fails_or_hangs_has_seen_the_fault(tmp_path):
    """In a copy of the tree, which is as before afterwards."""
    for folder in ("src", "build", "tests/gpu"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/value.py").write_text("X = 1\n")
    (tmp_path / "tests.py").write_text(TESTS)
    (tmp_path / "tests/gpu/tests.py").write_text(TESTS)
    faults = [("X = 2", "tests.py::test_right", 200), ("X = 0 + 1", "tests.py::test_right", 200),
              ("X = 2", "tests.py::test_hangs", 5), ("X = 0 + 1", "tests/gpu/tests.py::test_new", 200),
              ("X = 2", "tests/gpu/tests.py::test_new", 200)]
    ended = subprocess.run([sys.executable, "-c", RUN, tmp_path, json.dumps(faults)], cwd=PERF, capture_output=True,
                           text=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert [line["seen"] for line in found] == [True, False, True, False, True] and "5 s" in found[2]["how"]
    assert "assert 2 == 1" in found[0]["how"] and {line["file"] for line in found} == {"src/value.py"}
    assert Path(tmp_path / "src/value.py").read_text() == "X = 1\n"
