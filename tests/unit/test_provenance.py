"""perf/provenance.py: when the tree that was measured is the commit that a line names."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "perf"))
import provenance  # noqa: E402


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clone with one commit of a source and a results file."""
    for name in ("src/code.py", "perf/results/decode.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -q -m first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv("LOWBIT_ATTN_COMMIT", raising=False)
    return tmp_path


def test_results_of_the_run_before_are_no_change(repository):
    head = provenance.commit()
    assert len(head) == 12
    provenance.append_result("perf/results/decode.jsonl", {"us": 1})
    assert provenance.commit() == head
    (repository / "src/code.py").write_text("2\n")
    assert provenance.commit() == head + "+dirty"
