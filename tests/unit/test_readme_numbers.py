"""README.md: numbers in its sentences have lines in perf/results that say the same."""

import json
import re
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
TEXT = " ".join((ROOT / "README.md").read_text().split())
PERFORMANCE = " ".join((ROOT / "docs/performance.md").read_text().split())


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "perf/results" / name).read_text().splitlines()]


def test_cost_of_the_gather():
    """Time of a call over several GPUs less that of a rank's own tokens: one call a graph, an all-gather, peers."""
    costs = {None: [], False: [], True: []}
    for line in lines("parallel.jsonl"):
        costs[line.get("peer_memory")].append(line["us"] - line["local_us"])
    first, gather, peers = costs.values()
    assert list(map(len, costs.values())) == [3, 7, 4]
    assert f"{min(first):.0f} to {max(first):.0f} us a call" in PERFORMANCE
    assert f"{round(min(peers))} to {round(max(peers))} us a call over NVLink, {min(gather):.0f} us and more" in TEXT


@pytest.mark.parametrize("model, words", (
    ("k-channel-200x", r"one key channel 200 times the others puts (?:an output|it) up to (\d) % off"),
    ("k-token-50x", r"one key token 50 times the others (\d) %")))
def test_error_beside_an_outlier(model, words):
    """The largest error of a query row, of all formats and paths."""
    worst = max(max(line["error"]) for line in lines("outliers.jsonl") if line["model"] == model)
    found = re.findall(words, TEXT) + re.findall(words, PERFORMANCE)
    assert found and set(found) == {f"{100 * worst:.0f}"}


@pytest.mark.parametrize("what, most, words", (
    ("the demo's model", 1, r"downloads a (\d+) MB package"), ("demo", 10, r"about (\d+) MB of Python packages"),
    ("kernels", 30, r"all compilers but gcc \(about (\d+) MB\)"), ("test", 10, None)))
def test_sizes_of_downloads_were_measured(what, most, words):
    """The newest line of each; "about" is within so many MB. The tests' own part is a difference."""
    measured = {line["what"]: line["mb"] for line in lines("downloads.jsonl")}
    whole, compilers = map(int, re.search(r"`make test` downloads about (\d+) MB, (\d+) MB of it the", TEXT).groups())
    named = int(re.search(words, TEXT)[1]) if words else whole - compilers
    assert abs(named - measured[what]) <= most, f"{named} is named, {measured[what]} was measured"


def test_gpus_are_those_of_the_results():
    measured = {line["gpu"].removeprefix("NVIDIA ").split(" ")[0] for name in ("decode.jsonl", "gpu_tests.jsonl")
                for line in lines(name)}
    named = re.search(r"\*\*Hardware\*\*: NVIDIA Hopper \((\w+), (\w+)\)", TEXT).groups()
    assert set(named) == measured - {"none"}
    assert not [line for line in lines("decode.jsonl") if "A100" in line["gpu"]], "Ampere has run: README says not"
