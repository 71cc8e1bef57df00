"""The record of a long build: a run that was cut off goes on where it was, also on another machine."""

import pytest
import typer
from rich.console import Console

from lowbit_attn import build, compile, promised

KEYS = promised.promised("hopper")[:3]


@pytest.fixture
def built(monkeypatch):
    """The kernels that were built, in turn; nothing is compiled."""
    found = []

    def build_all(keys, *_):
        for key in keys:
            found.append(str(key))
            yield key, "no registers left" if key == KEYS[2] else ""

    monkeypatch.setattr(build, "build_all", build_all)
    monkeypatch.setattr(build, "_missing", lambda tool: "")
    monkeypatch.setattr(compile, "find", lambda key: None)
    return found


def run(record):
    with pytest.raises(typer.Exit) as ended:
        build.build_and_report(KEYS, Console(quiet=True), with_table=False, record=record)
    return ended.value.exit_code


def test_built_kernels_are_passed_over_and_failed_ones_are_not(built, tmp_path):
    assert run(tmp_path / "built.txt") == 1
    assert built == [str(key) for key in KEYS]
    assert run(tmp_path / "built.txt") == 1
    assert built[3:] == [str(KEYS[2])]


def test_a_kernel_of_other_sources_is_built_again(built, tmp_path, monkeypatch):
    run(tmp_path / "built.txt")
    monkeypatch.setattr(compile, "fingerprint", lambda arch, op: "0" * 16)
    run(tmp_path / "built.txt")
    assert built[3:] == [str(key) for key in KEYS]


def test_a_line_that_was_cut_off_says_nothing_and_spoils_nothing(built, tmp_path):
    record = tmp_path / "built.txt"
    run(record)
    record.write_text(record.read_text()[:-5])
    run(record)
    assert built[3:] == [str(key) for key in KEYS[1:]]
    assert build.recorded(record) == {str(key) for key in KEYS[:2]}
