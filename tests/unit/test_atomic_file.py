"""Writes that are whole or not at all: unique temporary names, links, killed writers, paths that cannot be written."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lowbit_attn import atomic_file
from lowbit_attn.atomic_file import OutputPathError, check_writable, locked, replacing, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_child(work) -> int:
    """The process id of a child that does this work."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    finally:
        os._exit(1)


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "x.txt"
    write_text(path, "old")
    with replacing(path) as part:
        part.write_text("new")
        assert path.read_text() == "old" and part.name == path.name
    assert path.read_text() == "new" and names(tmp_path) == ["x.txt"]
    with pytest.raises(ZeroDivisionError), replacing(path) as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "new" and names(tmp_path) == ["x.txt"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_is_the_umasks(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "x", "a")
        write_text(tmp_path / "y", "a", mode=0o640)
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~umask
    assert (tmp_path / "y").stat().st_mode & 0o777 == 0o640


def test_threads_that_write_one_path_do_not_meet(tmp_path):
    path, failures = tmp_path / "x.txt", []

    def work(text: str) -> None:
        for _ in range(30):
            try:
                write_text(path, text)
                assert path.read_text() in ("a" * 4096, "b" * 4096)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(letter * 4096,)) for letter in "ab" * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and names(tmp_path) == ["x.txt"]


def test_planted_links_are_not_followed(tmp_path, monkeypatch):
    """Neither one at the target, nor one under a private folder's name that somebody has guessed."""
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    path = tmp_path / "x.txt"
    path.symlink_to(victim)
    write_text(path, "new")
    assert victim.read_text() == "precious" and not path.is_symlink()
    monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda count: "0")
    planted = tmp_path / f"{atomic_file.PREFIX}{atomic_file._mark('x.txt')}-0{atomic_file.SUFFIX}"
    (tmp_path / "folder").mkdir()
    planted.symlink_to(tmp_path / "folder")
    with pytest.raises(FileExistsError):
        write_text(path, "newer")
    assert names(tmp_path / "folder") == [] and path.read_text() == "new" and planted.is_symlink()


def test_what_a_killed_writer_left_is_removed_by_the_next_write(tmp_path):
    path = tmp_path / "x.txt"

    def work() -> None:
        with replacing(path) as part:
            part.write_text("half")
            time.sleep(600)

    pid = in_child(work)
    while not list(tmp_path.glob(".*/x.txt")):
        time.sleep(0.005)
    write_text(tmp_path / "other.txt", "a")
    write_text(path, "b")
    assert len(names(tmp_path)) == 3, "the folder of a living writer was removed"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    write_text(tmp_path / "other.txt", "a")
    assert len(names(tmp_path)) == 3, "of another target"
    write_text(path, "c")
    assert names(tmp_path) == ["other.txt", "x.txt"] and path.read_text() == "c"


def test_folder_without_a_lock_is_removed_when_it_is_old(tmp_path):
    left = tmp_path / f"{atomic_file.PREFIX}{atomic_file._mark('x')}-1{atomic_file.SUFFIX}"
    left.mkdir()
    write_text(tmp_path / "x", "a")
    assert left.exists()
    os.utime(left, (0, 0))
    atomic_file.remove_leftovers(tmp_path)
    assert names(tmp_path) == ["x"]


def test_a_lock_is_one_process_at_a_time(tmp_path):
    path = tmp_path / "run.lock"
    with locked(path) as is_mine:
        assert is_mine and path.exists()
        with locked(path) as is_mine:
            assert not is_mine
        assert path.exists()
    assert not path.exists()

    def work() -> None:
        with locked(path):
            time.sleep(600)

    pid = in_child(work)
    while not path.exists():
        time.sleep(0.005)
    time.sleep(0.05)
    with locked(path) as is_mine:
        assert not is_mine
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with locked(path) as is_mine:
        assert is_mine


@pytest.mark.parametrize("append", [False, True])
def test_paths_that_cannot_be_written_are_refused_by_name(tmp_path, append):
    (tmp_path / "file").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    refused = {tmp_path: "which is a folder", Path("/dev/null"): "a device", tmp_path / "pipe": "a pipe",
               tmp_path / "no/x": "is not", tmp_path / "file/x": "is no folder", tmp_path / ("n" * 256): "too long",
               tmp_path / "nul\0": "cannot be written", tmp_path / "\ud800": "cannot be written",
               Path("/proc/x"): "cannot be written", Path(""): "the name of a file", Path("/"): "the name of a file"}
    for path, words in refused.items():
        with pytest.raises(OutputPathError, match=words) as error:
            check_writable("out", path, append)
        assert str(error.value).startswith("out: got ")
    for path in (tmp_path / "new", tmp_path / ("n" * 255), tmp_path / "file"):
        check_writable("out", path, append)
    assert names(tmp_path) == ["file", "pipe"] and (tmp_path / "file").read_text() == "a"
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(OutputPathError):
            write_text(path, "a")
    write_text(tmp_path / ("n" * 255), "a")
