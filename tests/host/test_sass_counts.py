"""Recorded instruction counts of the default kernels against those of kernels built with the same tools."""

import json
import sys
from pathlib import Path

import pytest

from lowbit_attn import compile, kernels, toolchain

sys.path.append(str(Path(__file__).parents[2] / "perf"))
import sass_counts  # noqa: E402

LINES = sass_counts.read()
KEYS = {str(key): key for key in sass_counts.default_keys()}
BUILT_HERE = "dequantize-k-k4v4-float32-d128@sm_90"  # the quickest; of others those that are built already


def test_every_default_kernel_is_recorded_once():
    found = [(line["kernel"], json.dumps(line["tools"])) for line in LINES]
    assert len(set(found)) == len(found) and {name for name, _ in found} == set(KEYS)
    assert all(line["counts"]["EXIT"] > 0 and 24 <= line["registers"] <= 255 for line in LINES)
    for line in LINES:
        is_by_roles = KEYS[line["kernel"]].arithmetic in ("tile", "wgmma") and "sm_90a" in line["kernel"]
        assert ("page_loop" in line) == (line["kernel"].startswith("decode") and not is_by_roles)


def test_differences_name_what_changed():
    line = next(line for line in LINES if line["kernel"] == BUILT_HERE)
    assert list(sass_counts.differences(line, line)) == []
    other = line | {"registers": line["registers"] + 1, "counts": line["counts"] | {"SHF": 0, "NEW": 2}}
    assert list(sass_counts.differences(other, line)) == [
        f"registers {line['registers']} -> {line['registers'] + 1}", "NEW 0 -> 2", f"SHF {line['counts']['SHF']} -> 0"]
    found = list(sass_counts.differences(line | {"page_loop": [9, 8]}, line))
    assert found == ["page loop, its multiplies [] -> [9, 8]"]


def test_other_tools_are_not_compared(monkeypatch):
    key = KEYS[BUILT_HERE]
    versions = next(line["tools"] for line in LINES if line["kernel"] == BUILT_HERE)
    monkeypatch.setattr(compile, "versions", lambda key: versions | {"python": "3.11"})
    assert sass_counts.recorded(key, LINES)
    monkeypatch.setattr(compile, "versions", lambda key: versions | {"nvcc": "1.0", "python": "3.11"})
    assert sass_counts.recorded(key, LINES) is None and sass_counts.compared(key, LINES, True) is None


@pytest.mark.parametrize("name", KEYS)
def test_counts_are_those_recorded(name):
    """Of a kernel that is built, or is the one that is built here, where the tools are those of its record."""
    key, build = KEYS[name], name == BUILT_HERE
    if sass_counts.recorded(key, LINES) is None:
        pytest.skip("no record by the tools that are installed")
    if not build and compile.find(key) is None:
        pytest.skip("not built")
    for tool in ("nvdisasm", "cuobjdump"):
        try:
            toolchain.find_tool(tool)
        except toolchain.ToolMissingError as error:
            pytest.skip(str(error))
    assert sass_counts.compared(key, LINES, build) == [], "python perf/sass_counts.py write records a change"


def test_the_keys_are_shipped():
    shipped = {key for arch in kernels.ARCH_TARGETS for key in kernels.shipped_keys(arch)}
    assert set(KEYS.values()) <= shipped and len(KEYS) >= 20
