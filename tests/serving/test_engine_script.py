"""perf/engine.py with the engine on a CPU: a tiny model, blocks filled by vLLM's connector and by prompts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving import engine

SCRIPT = Path(__file__).parents[2] / "perf" / "engine.py"

pytestmark = pytest.mark.skipif(not engine.RELEASE.is_dir(), reason="vLLM 0.33 is not there; .ci/serving makes it")


@pytest.mark.parametrize("dtype,fill", [("lowbit_k4v4", "dummy"), ("auto", "prompt")])
def test_a_row(dtype, fill, tmp_path, measured):
    output = tmp_path / "engine.jsonl"
    done = subprocess.run([sys.executable, str(SCRIPT), "run", "--tiny", "--part", "steps", "--dtype", dtype, "--fill",
                           fill, "--output", str(output), "--limit", "800"], env=engine.environment(engine.RELEASE),
                          cwd=tmp_path, capture_output=True, text=True)
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert done.returncode == 0, found
    assert [(line["context"], line["batch"]) for line in found] == [(256, 1), (256, 2), (512, 1), (512, 2), (256, 4)]
    for line in found:
        assert line["ms_per_token"] > 0 and not line["preemptions"] and line["fill"] == fill
        assert line["capacity_tokens"] == line["num_blocks"] * line["block_tokens"]
        assert (line["ring_blocks"] > 0) == (dtype != "auto")
    measured["ms_per_token"] = [line["ms_per_token"] for line in found]
