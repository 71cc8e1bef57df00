"""The sanitizers see kernels run, and no compiler."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from perf_scripts import script

GLOBAL = "__" + "global__"  # no CUDA text in the tree
FOUND = f"""========= COMPUTE-SANITIZER
tests/gpu/test_gpu.py::test_a PASSED
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress_v2.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: driver.py:1
=========
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress_v2.
=========
========= Invalid {GLOBAL} read of size 4 bytes
=========     at kernel+0x10
=========     Address 0x7f0000000000 is out of bounds
=========
========= ERROR SUMMARY: 3 errors
"""

RACES = """========= COMPUTE-SANITIZER
tests/gpu/test_gpu.py::test_a PASSED                                                   [ 50%]
tests/gpu/test_gpu.py::test_b ========= Error: Race reported between Read access at {0}+0xb00
=========     and Write access at {0}+0x2770 [512 hazards]
=========
PASSED                                                                                 [100%]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.fixture
def sanitize(monkeypatch, tmp_path):
    """The script, whose runs end as ``outcomes`` says and are listed in ``runs``."""
    with script("sanitize") as found:
        found.runs, found.outcomes, found.output = [], [], str(tmp_path / "sanitizer.jsonl")

        def run(command, env=None, **_):
            found.runs.append((command, env or {}))
            return found.outcomes.pop(0)

        monkeypatch.setattr(found, "subprocess", SimpleNamespace(run=run))
        monkeypatch.setattr(found, "provenance", dict)
        yield found


def ended(text: str, status: int = 0) -> SimpleNamespace:
    return SimpleNamespace(stdout=text, stderr="", returncode=status)


def test_kernels_are_built_before_a_tool_runs(sanitize):
    clean = ended("tests/gpu/test_gpu.py::test_a PASSED\n========= ERROR SUMMARY: 0 errors\n")
    sanitize.outcomes += [clean, clean]
    with pytest.raises(typer.Exit) as exit:
        sanitize.main(["memcheck"], output=sanitize.output)
    (alone, its_own), (under, env) = sanitize.runs
    assert exit.value.exit_code == 0 and under == ["compute-sanitizer", "--tool", "memcheck", *alone]
    assert "LOWBIT_ATTN_NO_JIT" not in its_own and env["LOWBIT_ATTN_NO_JIT"] == "1"


def test_no_tool_runs_what_fails_without_one(sanitize, capsys):
    sanitize.outcomes.append(ended("1 failed", 1))
    with pytest.raises(typer.Exit) as exit:
        sanitize.main(["memcheck"], output=sanitize.output)
    assert exit.value.exit_code == 1 and len(sanitize.runs) == 1 and "1 failed" in capsys.readouterr().out


def test_errors_are_told_by_kind(sanitize, capsys):
    sanitize.outcomes += [ended(""), ended(FOUND)]
    with pytest.raises(typer.Exit) as exit:
        sanitize.main(["memcheck"], output=sanitize.output)
    assert exit.value.exit_code == 1 and capsys.readouterr().out.splitlines()[-2:] == [
        "2 x Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call to cuGetProcAddress_v2.",
        f"1 x Invalid {GLOBAL} read of size 4 bytes"]


@pytest.mark.parametrize("kernel, ours", [("nvjet_sm90_hss_8x64", 0), ("kernel_cutlass_decode", 1)])
def test_hazards_in_a_kernel_of_cublas_are_counted_apart(sanitize, kernel, ours):
    """And a test passes whose line a tool has broken."""
    sanitize.outcomes += [ended(""), ended(RACES.format(kernel))]
    with pytest.raises(typer.Exit) as exit:
        sanitize.main(["racecheck"], output=sanitize.output)
    line = json.loads(Path(sanitize.output).read_text())
    assert exit.value.exit_code == ours and (line["errors"], line["errors_of_cublas"], line["passed"]) == (
        ours, 1 - ours, 2)
