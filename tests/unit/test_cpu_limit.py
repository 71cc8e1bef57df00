"""Limits in seconds of CPU: a test that waits may take longer than one that computes."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import cpu_limit
import pytest

TESTS = Path(__file__).parents[1]
CASES = '''
import time
import pytest

def compute():
    while True:
        pass

@pytest.fixture
def slow():
    compute()

def test_that_waits():
    time.sleep(3)

def test_that_computes():
    compute()

def test_of_a_slow_fixture(slow):
    pass

@pytest.mark.timeout(600)
def test_with_more_time():
    start = time.process_time()
    while time.process_time() - start < 2:
        pass
'''


def test_time_of_others_is_not_counted(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\ncpu_timeout = 1\ntimeout = 3600\n")
    (tmp_path / "test_limits.py").write_text(CASES)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "cpu_limit", "-rA", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "PYTEST_ADDOPTS": ""}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    outcomes = {line.split("::")[1].split()[0]: line.split()[0] for line in answer.stdout.splitlines()
                if line.split()[:1] and line.split()[0] in ("PASSED", "FAILED", "ERROR") and "::" in line}
    assert outcomes == dict(test_that_waits="PASSED", test_that_computes="FAILED", test_of_a_slow_fixture="ERROR",
                            test_with_more_time="PASSED"), answer.stdout + answer.stderr
    assert "Timeout (>1 s of CPU time), cpu_timeout in pyproject.toml" in answer.stdout


def test_the_suite_has_both_limits():
    options = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["cpu_timeout"] * 10 <= options["timeout"]


def test_slow_tests_are_named(request):
    def report(name, seconds, when="call"):
        return SimpleNamespace(nodeid=name, when=when, user_properties=[("cpu_seconds", seconds)])

    reports = [report("a", 31), report("b", 29), report("c", 120.5), report("d", 99, "setup")]
    assert cpu_limit.slow_tests(reports) == ["120.5 s of CPU: c", "31 s of CPU: a"]
    with cpu_limit.noted(request.node):
        pass
    assert request.node.user_properties.pop()[0] == "cpu_seconds"


def test_a_limit_ends_with_its_test():
    with pytest.raises(pytest.fail.Exception, match="of CPU time"), cpu_limit.limited(0.05):
        while True:
            pass
    with cpu_limit.limited(0.05):
        pass
    sum(range(3_000_000))  # which takes more
