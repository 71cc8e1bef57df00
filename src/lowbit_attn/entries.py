"""Reads and writes the entries of a kernel cache: a .so and a .json of facts beside it, under one name.

An entry counts once its .json is there: it is written last, each file under another name first, synced and renamed.
The folder is the user's alone, and who writes into it holds the kernel's lock.

"sha256" is that of the .so and all other facts; in entries of earlier versions it is that of the .so alone.
"""

import hashlib
import json
import os
from pathlib import Path

from lowbit_attn.errors import DamagedEntryError, UntrustedError

# name -> type of each fact; "key" has the fields of KernelKey, "built_with" the version of each tool
FIELDS = {"name": str, "key": dict, "fingerprint": str, "tvm_ffi_abi": str, "built_with": dict, "function": str,
          "sha256": str, "smem_bytes": int, "smem_total_bytes": int, "registers": int, "spills": int, "sass": dict,
          "seconds": float}
WRITERS_BUT_OWNER = 0o022  # mode bits of a group and of others that may write


def read(file: Path) -> dict:
    """The facts of an entry; DamagedEntryError if they are not whole."""
    try:
        facts = json.loads(file.read_bytes().decode())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedEntryError(f"{file} is damaged: {type(error).__name__}") from error
    if not isinstance(facts, dict):
        raise DamagedEntryError(f"{file} is damaged: it holds no object")
    for name, kind in FIELDS.items():
        if not isinstance(facts.get(name), kind):
            raise DamagedEntryError(f"{file} is damaged: {name} is no {kind.__name__}")
    if not all(isinstance(value, str | None) for value in facts["built_with"].values()):
        raise DamagedEntryError(f"{file} is damaged: built_with has versions that are no text")
    if facts["name"] != f"{file.stem}@{facts['key'].get('target')}":
        raise DamagedEntryError(f"{file} is damaged: it is of {facts['name']}")
    return facts


def check_binary(file: Path, facts: dict) -> Path:
    """The .so of an entry, after its hash; DamagedEntryError if it is another, or gone."""
    path = file.with_suffix(".so")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DamagedEntryError(f"{path} is damaged: {error.strerror}") from error
    if facts["sha256"] not in (digest(content, facts), hashlib.sha256(content).hexdigest()):
        raise DamagedEntryError(f"{path} is damaged: its sha256 is not its entry's")
    return path


def digest(content: bytes, facts: dict) -> str:
    """sha256, in hex, of a .so and its facts."""
    others = {name: value for name, value in facts.items() if name != "sha256"}
    return hashlib.sha256(content + json.dumps(others, sort_keys=True).encode()).hexdigest()


def check_trust(path: Path, root: Path) -> None:
    """Raise UntrustedError unless the user or root owns a file, all folders up to ``root``, and root itself, and
    nobody else may write them. Links are followed, but not out of ``root``."""
    real, top = path.resolve(), root.resolve()
    if not real.is_relative_to(top):
        raise UntrustedError(f"{path} is a link out of {root}; remove it")
    while True:
        found = real.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise UntrustedError(f"{real} belongs to uid {found.st_uid}, neither to you nor to root; chown it, or "
                                 "set LOWBIT_ATTN_CACHE_DIR to a folder of your own")
        if found.st_mode & WRITERS_BUT_OWNER:
            raise UntrustedError(f"{real} can be written by others; run chmod -R go-w {top}, if you trust what is in "
                                 "it, or set LOWBIT_ATTN_CACHE_DIR to a folder of your own")
        if real == top:
            return
        real = real.parent


def forbidden(folder: Path) -> str:
    """Why no library can be loaded from a folder, there or not yet, with the remedy: a mount with noexec; else ""."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    if there is None or not os.statvfs(there).f_flag & os.ST_NOEXEC:
        return ""
    mount = next(one for one in (there.resolve(), *there.resolve().parents) if os.path.ismount(one))
    return (f"{mount} is mounted noexec, so no library in {folder} can be loaded; set LOWBIT_ATTN_CACHE_DIR to a "
            "folder on a file system that is mounted without noexec, or have this one mounted so")


def make_folders(folder: Path) -> None:
    """Create a folder and those above it that are missing for the user alone, whatever the umask."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    for one in reversed(missing):
        one.mkdir(0o700, exist_ok=True)
        one.chmod(0o700)


def write(built: Path, path: Path, facts: dict) -> None:
    """Move a finished .so to ``path`` and write the facts beside it."""
    file = path.with_suffix(".json")
    facts = json.loads(json.dumps(facts))  # as they are read
    text = json.dumps(facts | {"sha256": digest(built.read_bytes(), facts)}, indent=1, sort_keys=True)
    file.unlink(missing_ok=True)
    _move(built, path)
    written = path.with_suffix(".json.tmp")
    written.write_text(text)
    _move(written, file)


def _move(source: Path, target: Path) -> None:
    """Rename, so that after a power cut the target is whole or what it was."""
    source.chmod(0o644)
    _sync(source)
    source.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
