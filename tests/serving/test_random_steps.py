"""A short walk of ``random_steps``; .ci/serving takes the long one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from serving import engine

STEPS = int(os.environ.get("LOWBIT_ATTN_STEPS", "400"))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("planned", [False, True], ids=["looked-at", "planned"])
def test_random_steps_against_the_engines_own_cache(planned, measured):
    """planned: vLLM 0.33, whose steps go by plans, as on a GPU."""
    if planned and not engine.RELEASE.is_dir():
        pytest.skip(f"{engine.RELEASE} is not there; .ci/serving makes it")
    command = [sys.executable, "-m", "serving.random_steps", "--steps", str(STEPS), *["--planned"] * planned]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1],
                          env=engine.environment(engine.RELEASE if planned else None))
    assert not done.returncode, done.stderr[-6000:]
    measured |= json.loads(done.stdout.splitlines()[-1])
    assert measured["steps"] >= STEPS
    assert measured["free"] == measured["blocks"], "every block of the pool is free again"
    assert measured["widest_gap"] < engine.NEAR_TIE, "a token differs where it should not"
    assert measured["compared"] > 0.5 * measured["tokens"]
    for name in ("aborted", "num_preemptions", "prefix_cache_hits", "spec_decode_num_accepted_tokens"):
        assert measured[name] > 0 or STEPS < 2000, name
    assert 0 < measured["spec_decode_num_accepted_tokens"] < measured["spec_decode_num_draft_tokens"]
