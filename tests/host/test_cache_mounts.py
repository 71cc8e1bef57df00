"""A kernel cache from which no library can be loaded: the message names what forbids it and a remedy that can work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowbit_attn import compile, emit, entries, environment, kernels, loader
from lowbit_attn.formats import FORMATS

KEY = kernels.dequantize_key("sm_90a", 64, FORMATS["k4v4"], "v")


@pytest.fixture
def noexec(monkeypatch, tmp_path) -> Path:
    """A cache folder that seems to be on a file system mounted noexec."""
    seen = os.statvfs

    def statvfs(path):
        flags = os.ST_NOEXEC * Path(path).is_relative_to(tmp_path)
        return SimpleNamespace(f_flag=seen(path).f_flag & ~os.ST_NOEXEC | flags)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT", raising=False)
    return tmp_path / "cache" / "kernels"


def test_a_noexec_cache_is_told_before_a_kernel_is_built(monkeypatch, noexec):
    pytest.importorskip("tvm_ffi")
    monkeypatch.setattr(emit, "emit", lambda *_: pytest.fail("it was built"))
    with pytest.raises(loader.KernelNotBuiltError, match="is mounted noexec.*set LOWBIT_ATTN_CACHE_DIR to a folder"):
        loader.load.__wrapped__(KEY)
    assert "is mounted noexec" in environment._survey().problem


@pytest.mark.parametrize("said, words", [
    ("libcute_dsl_runtime.so: cannot open shared object file", "its runtime library is not installed"),
    ("libcudart.so.13: cannot open shared object file: No such file", "it needs the library libcudart.so.13: install"),
    ("k.so: cannot open shared object file: No such file", "remove it to have it built again"),
    ("k.so: failed to map segment from shared object", "SELinux or another protection.*LOWBIT_ATTN_CACHE_DIR"),
    ("k.so: file too short", "remove it to have it built again")])
def test_a_remedy_can_work(said, words, tmp_path, monkeypatch):
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT", raising=False)
    assert re.search(words, loader._remedy(tmp_path / "k.so", said))
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert "unset LOWBIT_ATTN_NO_JIT and remove" in loader._remedy(tmp_path / "k.so", "file too short")


def test_a_noexec_cache_is_told_when_a_built_kernel_is_opened(noexec):
    built = compile.Built(noexec / "kernel.so", {"function": "f"})
    with pytest.raises(loader.KernelNotBuiltError, match="cannot be loaded from .* is mounted noexec"):
        loader._open(KEY, built)


def test_other_folders_forbid_nothing(tmp_path):
    if not os.statvfs(tmp_path).f_flag & os.ST_NOEXEC:
        assert entries.forbidden(tmp_path / "not" / "there") == ""


def test_a_real_noexec_mount(tmp_path):
    """In a mount namespace of its own, where that is allowed."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare here")
    code = ("from pathlib import Path; from lowbit_attn import entries; "
            f"print(entries.forbidden(Path({str(tmp_path)!r})))")
    done = subprocess.run(["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o noexec none '{tmp_path}' && exec \"$@\"",
                           "sh", sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.strip()[:100]}")
    assert done.stdout.startswith(f"{tmp_path} is mounted noexec")
