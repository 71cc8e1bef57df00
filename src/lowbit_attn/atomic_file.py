"""Files that are written whole or not at all, a check that a path can be written, and locks between processes.

A file is written under its own name in a private folder beside its target, and then renamed. The folder's name is
random and its mode is 0700, so neither a second writer nor a planted link can meet it. A lock in the folder is held
while the file is written: the next write to the same target removes folders whose lock is free, which a killed process
has left.
"""

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX, SUFFIX = ".lowbit_attn-", ".part"  # of the private folders
LOCK = ".lock"  # of a private folder, in it
YOUNG_SECONDS = 60.0  # a folder without its lock may be one that is being made


class OutputPathError(ValueError):
    """A path that cannot be written; the message names the argument, the path and the reason."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike, mode: int | None = None) -> Iterator[Path]:
    """Give the path of a new file, which replaces ``path`` when the block ends; if it raises, ``path`` stays as it was.

    mode: of the file; None: what the user's umask gives. The data are synced before the rename. A link at ``path`` is
    replaced, not followed. Raises OutputPathError where ``path`` is a folder or a device, OSError where it cannot be
    written.
    """
    path = Path(path)
    check_kind("path", path)
    remove_leftovers(path.parent, path.name)
    folder, lock = _private_folder(path)
    try:
        part = folder / path.name
        yield part
        part.chmod(stat.S_IMODE(os.fstat(lock).st_mode) if mode is None else mode)
        _sync(part)
        os.replace(part, path)
        with contextlib.suppress(OSError):  # some file systems cannot sync a folder
            _sync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def write_text(path: str | os.PathLike, text: str, mode: int | None = None) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path, mode) as part:
        part.write_text(text, encoding="utf-8")


def check_writable(name: str, path: str | os.PathLike, append: bool = False) -> None:
    """Raise OutputPathError unless ``path`` can be written now: call it before long work whose result goes there.

    name: the argument that named the path, for the message. append: the file will be opened for appending, where
    otherwise it is replaced. What is at ``path`` stays as it is. A full disk is not seen.
    """
    path = Path(path)
    try:
        check_kind(name, path)
        if append and path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC))
            return
        folder, lock = _private_folder(path)
        try:
            (folder / path.name).touch()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    except OutputPathError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL or a character that the file system cannot encode
        reason = getattr(error, "strerror", None) or error
        raise OutputPathError(f"{name}: got {str(path)!r}, which cannot be written ({reason}), supported: a file in a "
                              "folder that can be written") from None


def check_kind(name: str, path: Path) -> None:
    """Raise OutputPathError where ``path`` is a folder, a device, a pipe or a socket, or lies in no folder."""
    if not path.name:
        raise OutputPathError(f"{name}: got {str(path)!r}, supported: the name of a file")
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        kind = stat.S_IFREG
    except NotADirectoryError:
        raise OutputPathError(f"{name}: got {str(path)!r}, supported: a file in a folder that is there, and "
                              f"{str(path.parent)!r} is no folder") from None
    if not stat.S_ISREG(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a device, a pipe or a socket"
        raise OutputPathError(f"{name}: got {str(path)!r}, which is {what}, supported: a file")
    if not path.absolute().parent.is_dir():
        raise OutputPathError(f"{name}: got {str(path)!r}, supported: a file in a folder that is there, and "
                              f"{str(path.absolute().parent)!r} is not")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file ``path`` during a block, and remove it at its end; False where another process holds it.

    It does not wait. The system frees the lock of a process that ends, however it ends.
    """
    lock = _hold(path)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of writes to the file ``name`` in a folder; None: of writes to any file."""
    for found in folder.glob(f"{PREFIX}{'*' if name is None else _mark(name)}-*{SUFFIX}"):
        with contextlib.suppress(OSError):  # another process may remove it first
            about = found.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
                continue
            if (found / LOCK).exists():
                if (lock := _hold(found / LOCK, create=False)) is not None:
                    shutil.rmtree(found, ignore_errors=True)
                    os.close(lock)
            elif time.time() - about.st_mtime > YOUNG_SECONDS:
                shutil.rmtree(found, ignore_errors=True)


def _private_folder(path: Path) -> tuple[Path, int]:
    """(a new folder beside ``path``, the descriptor of its lock, which is held)."""
    while True:
        folder = path.with_name(f"{PREFIX}{_mark(path.name)}-{secrets.token_hex(8)}{SUFFIX}")
        folder.mkdir(0o700)
        try:
            lock = _hold(folder / LOCK)
        except FileNotFoundError:
            continue  # removed as a leftover
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if lock is not None:
            return folder, lock


def _hold(path: Path, create: bool = True) -> int | None:
    """The descriptor of a lock file that is now held; None where another process, or thread, holds it."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path, follow_symlinks=False)):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass  # its last holder removed it
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _mark(name: str) -> str:
    """What marks the private folders of a target: short, so that a long name leaves room for it."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
