"""The simulated fleet: step times are the measured ones, every request is served, docs/fleet.md has its tables."""

import re
from pathlib import Path

import pytest
from perf_scripts import script
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
SHOWN = dict(re.findall(r"<!-- fleet: begin \(python perf/fleet.py (\w+)\) -->\n(.*?)\n<!-- fleet: end -->",
                        (ROOT / "docs/fleet.md").read_text(), re.S))


@pytest.fixture(scope="module")
def fleet():
    with script("fleet") as module:
        yield module


def test_sizes_are_those_of_the_docs(fleet):
    answer = CliRunner().invoke(fleet.app, ["size"])
    assert answer.exit_code == 0 and answer.output.strip() == SHOWN["size"]


def test_the_docs_have_every_format(fleet):
    assert all(f"\n| {name} | " in SHOWN["run"] for name in fleet.FORMATS_SHOWN)


@pytest.mark.parametrize("name", ("16 bit", "k4v4", "k2v2"))
def test_steps_are_the_measured_ones(fleet, name):
    lines = [line for line in fleet.Lines().all("e2e", model="llama-3.1-8b", commit=fleet.COMMIT)
             if line["format"] == name]
    steps = fleet.Steps(name)
    assert len(lines) >= 5
    for line in lines:
        assert steps.seconds(line["batch"], line["batch"] * line["seqlen"]) * 1e3 == pytest.approx(line["step_ms"], 0.1)
    assert steps.room >= steps.cache_bytes(131072) > steps.cache_bytes(130000)


def test_a_fleet_serves_all_and_more_gpus_serve_sooner(fleet):
    requests = fleet.arrivals(3.0, 20.0, seed=1)
    assert requests == fleet.arrivals(3.0, 20.0, seed=1) != fleet.arrivals(3.0, 20.0, seed=2)
    one, three = (fleet.simulate("16 bit", gpus, requests) for gpus in (1, 3))
    for served in (one, three):
        assert len(served.waits) == len(served.gaps) == len(requests) and not served.queue
        assert all(gpu.free == served.steps.room and not gpu.held for gpu in served.gpus)
    assert sum(three.waits) < sum(one.waits) and sum(three.gaps) < sum(one.gaps)
    assert min(one.waits) > min(request.prompt for request in requests) * 100_000 / fleet.LINK_BYTES_S


def test_a_failed_gpu_loses_no_request(fleet):
    requests = fleet.arrivals(3.0, 20.0, seed=1)
    whole, failed = (fleet.simulate("16 bit", 2, requests, fail) for fail in (None, (10.0, 30.0)))
    assert len(failed.gaps) == len(requests) and sum(failed.gaps) > sum(whole.gaps)
    assert all(gpu.free == failed.steps.room for gpu in failed.gpus)


def test_too_few_gpus_are_named(fleet, monkeypatch):
    requests = fleet.arrivals(3.0, 20.0, seed=1)
    monkeypatch.setattr(fleet.Steps, "seconds", lambda self, batch, tokens: 100.0)
    with pytest.raises(RuntimeError, match="requests have not ended.*take more GPUs"):
        fleet.simulate("k4v4", 1, requests)


def test_the_smallest_fleet(fleet):
    requests = fleet.arrivals(6.0, 30.0, seed=1)
    gpus, found = fleet.least_gpus("16 bit", requests)
    assert gpus > 1 and fleet.late(found) <= fleet.LATE_SHARE < fleet.late(fleet.simulate("16 bit", gpus - 1, requests))
