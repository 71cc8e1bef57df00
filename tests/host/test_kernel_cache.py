"""The kernel cache: where it is, what it trusts and takes, and what it says when a kernel cannot be built or loaded."""

import errno
import json
import logging
import os
import shutil
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from lowbit_attn import compile, emit, entries, environment, kernels, loader, sass, toolchain
from lowbit_attn.cli import app
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey

KEY = kernels.dequantize_key("sm_90a", 64, FORMATS["k4v4"], "v")
CUTE = KernelKey("read", "device", "sm_90", "uint32", 0, variant="256x8")
FACTS = {"registers": 40, "spills": 0, "smem_total_bytes": 0, "sass": {}}


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache folder; the suite's own stays as it is."""
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT", raising=False)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def emitted(monkeypatch, cache) -> list[KernelKey]:
    """Kernels that were emitted; each is 8 KiB of bytes that no tool made, and loading gives its path."""
    made = []

    def write(key: KernelKey, path: Path) -> tuple[str, int]:
        made.append(key)
        path.write_bytes(os.urandom(8192))
        return "function", 0

    monkeypatch.setattr(emit, "require", lambda key: None)
    monkeypatch.setattr(emit, "emit", write)
    monkeypatch.setattr(compile, "check", lambda key, path, smem_bytes: FACTS)
    monkeypatch.setattr(loader, "_open", lambda key, built: built.path)
    monkeypatch.setattr(compile, "versions", lambda key: dict.fromkeys(compile.TOOLS[kernels.needs_nvcc(key)], "1"))
    return made


def load(key: KernelKey = KEY):
    return loader.load.__wrapped__(key)


def error_of(key: KernelKey = KEY) -> str:
    """What loading a kernel fails with: one line."""
    with pytest.raises(loader.KernelNotBuiltError) as error:
        load(key)
    assert "\n" not in str(error.value)
    return str(error.value)


def doctor() -> dict:
    return json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)


# ---- where


def test_relative_folder_is_fixed_at_first_use(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = f"relative-{tmp_path.name}"
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", name)
    assert compile.cache_dir() == tmp_path / name / "kernels"
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert compile.cache_dir() == tmp_path / name / "kernels"


def test_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", "~/x")
    assert compile.cache_dir() == tmp_path / "x" / "kernels"


def test_without_a_home_folder_the_variable_is_named(monkeypatch):
    def no_home(name):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOWBIT_ATTN_CACHE_DIR", raising=False)
    monkeypatch.setattr(compile, "user_cache_dir", no_home)
    assert "set LOWBIT_ATTN_CACHE_DIR" in error_of()
    monkeypatch.setattr(compile, "user_cache_dir", lambda name: "~/.cache")
    assert "set LOWBIT_ATTN_CACHE_DIR" in error_of()
    assert "LOWBIT_ATTN_CACHE_DIR" in doctor()["cache_problem"]
    assert CliRunner().invoke(app, ["info", "k4v4"]).exit_code == 0


@pytest.mark.parametrize("folder", ("file", "file/below"))
def test_folder_that_cannot_be_made(monkeypatch, tmp_path, emitted, folder):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path / folder))
    assert "set LOWBIT_ATTN_CACHE_DIR to another folder" in error_of()
    assert not emitted


@pytest.mark.parametrize("umask", (0, 0o777))
def test_folders_are_the_users_alone_whatever_the_umask(cache, emitted, umask):
    before = os.umask(umask)
    try:
        path = load()
    finally:
        os.umask(before)
    for folder in (*path.parents[:4], cache.parent):
        assert folder.stat().st_mode & 0o777 == 0o700, folder
    assert {file.stat().st_mode & 0o777 for file in (path, path.with_suffix(".json"))} == {0o644}


# ---- whom it trusts


def give_away(monkeypatch, path: Path) -> None:
    """Make a file another user's."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)


@pytest.mark.parametrize("level", range(5))
@pytest.mark.parametrize("what", ("group", "others", "owner"))
def test_what_others_may_write_is_not_loaded(monkeypatch, cache, emitted, what, level):
    path = load()
    assert path.parents[3] == cache
    target = (path, *path.parents)[level]
    if what == "owner":
        give_away(monkeypatch, target)
    else:
        target.chmod(target.stat().st_mode | {"group": 0o020, "others": 0o002}[what])
    assert compile.find(KEY) is None
    assert doctor()["kernels_damaged"] == 1
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    message = error_of()
    assert ("neither to you nor to root" if what == "owner" else "chmod -R go-w") in message and str(target) in message
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT")
    if level:  # nor is anything built there
        assert "LOWBIT_ATTN_CACHE_DIR" in error_of() and len(emitted) == 1


def test_links_are_followed_within_the_cache_only(monkeypatch, tmp_path, cache, emitted):
    path = load()
    moved = path.with_name("moved.so")
    path.rename(moved)
    path.symlink_to(moved)
    assert compile.find(KEY)
    outside = tmp_path / "outside.so"
    moved.rename(outside)
    path.unlink()
    path.symlink_to(outside)
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert "is a link out of" in error_of()


def test_cache_behind_a_link(monkeypatch, tmp_path, cache, emitted):
    load()
    (tmp_path / "link").symlink_to(cache.parent)
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path / "link"))
    assert compile.find(KEY)
    cache.chmod(0o777)
    assert compile.find(KEY) is None


# ---- damage


def whole(path: Path) -> dict:
    return json.loads(path.with_suffix(".json").read_text())


DAMAGE = {
    "empty": lambda text: b"", "cut": lambda text: text[: len(text) // 2], "list": lambda text: b"[]",
    "null": lambda text: b"null", "not UTF-8": lambda text: b"\x80\x00", "no field": lambda text: b"{}",
    "deep": lambda text: b"[" * 100_000,
    "wrong type": lambda text: json.dumps(json.loads(text) | {"registers": "many"}).encode(),
    "key a list": lambda text: json.dumps(json.loads(text) | {"key": []}).encode(),
    "other kernel": lambda text: json.dumps(json.loads(text) | {"name": "read@sm_90"}).encode(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_facts_are_told_and_built_again(monkeypatch, emitted, name):
    file = load().with_suffix(".json")
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    assert doctor()["kernels_damaged"] == 1
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert f"{file} is damaged" in error_of()
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT")
    load()
    assert len(emitted) == 2 and doctor()["kernels_damaged"] == 0


@pytest.mark.parametrize("size", (0, 3000, None))
def test_cut_binary_is_never_opened(monkeypatch, emitted, size):
    path = load()
    path.unlink() if size is None else os.truncate(path, size)
    assert doctor()["kernels_damaged"] == 1
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert f"{path} is damaged" in error_of()
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT")
    assert load().stat().st_size == 8192 and len(emitted) == 2


def test_files_are_synced_before_they_get_their_names(monkeypatch, emitted):
    events = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), sync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append(to), replace(path, to))[1])
    path = load()
    want = []
    for unfinished, file in ((path.with_suffix(".tmp"), path),
                             (path.with_suffix(".json.tmp"), path.with_suffix(".json"))):
        want += [str(unfinished), file, str(path.parent)]
    assert events == want


# ---- what is taken


def test_two_versions_of_the_package_share_a_cache(monkeypatch, emitted):
    real = compile.fingerprint
    for version in ("a", "b", "a", "b"):
        monkeypatch.setattr(compile, "fingerprint", lambda arch, op: real(arch, op)[:-1] + version)
        load()
    assert len(emitted) == 2


def test_kernel_of_other_tools_is_built_again_where_those_are_installed(monkeypatch, emitted):
    load()
    own = compile.versions(KEY)
    for other in ("tilelang", "nvcc", "python"):
        monkeypatch.setattr(compile, "versions", lambda key: own | {other: "2"})
        assert compile.find(KEY) is None and doctor()["kernels_stale"] == 1
        assert f"{other} 1, here is 2" in compile.look(KEY)[1][0]
    load()
    assert len(emitted) == 2 and doctor()["kernels_stale"] == 1
    monkeypatch.setattr(compile, "versions", lambda key: own)  # both stay
    load()
    assert len(emitted) == 2


def test_kernel_of_other_tools_is_taken_where_none_can_build_it(monkeypatch, emitted):
    path = load()
    own = compile.versions(KEY)
    monkeypatch.setattr(compile, "versions", lambda key: own | {"tilelang": None, "nvcc": "2", "python": "2"})
    assert compile.find(KEY).path == path
    monkeypatch.setattr(compile, "versions", lambda key: own | {"nvcc": None})
    assert compile.find(KEY).path == path


def test_without_building_a_tilelang_kernel_of_other_tools_is_taken(monkeypatch, emitted):
    paths = {key: load(key) for key in (KEY, CUTE)}
    monkeypatch.setattr(compile, "versions", lambda key: dict.fromkeys(compile.TOOLS[kernels.needs_nvcc(key)], "2"))
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert load(KEY) == paths[KEY]
    assert "nvidia-cutlass-dsl 1, here is 2" in error_of(CUTE)


def test_abi_of_tvm_ffi_is_its_minor_version(monkeypatch, emitted):
    installed = dict(zip(("0.1.12", "0.1.15.post2", "0.2.0"), (1, 1, 2)))
    for version, built in installed.items():
        monkeypatch.setattr(toolchain, "dsl_version", lambda package: version)
        load()
        assert len(emitted) == built, version


def test_tvm_ffi_is_declared(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared, = [text for text in project["dependencies"] if text.startswith(toolchain.TVM_FFI)]
    assert declared == toolchain.TVM_FFI_NEEDED
    assert f"<{float(toolchain.TVM_FFI_ABI) + 0.1:.1f}" in declared


def test_prebuilt_package_is_searched(monkeypatch, tmp_path, cache, emitted):
    load()
    package = tmp_path / "site" / "lowbit_attn_kernels_ampere"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no code of it runs')")
    shutil.move(cache, package / "kernels")
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert "is not built" in error_of()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert load().is_relative_to(package) and doctor()["kernels_built"] == {"sm_90": 1}
    os.truncate(load(), 9)
    assert "is damaged" in error_of()


# ---- building


def test_processes_that_start_together_build_once(monkeypatch, emitted):
    quick = emit.emit
    monkeypatch.setattr(emit, "emit", lambda key, path: (time.sleep(0.3), quick(key, path))[1])
    builders = [threading.Thread(target=compile.build, args=(KEY,)) for _ in range(3)]
    for one in builders:
        one.start()
    for one in builders:
        one.join()
    assert len(emitted) == 1
    compile.build(KEY, force=True)
    assert len(emitted) == 2


def test_waiting_is_told_and_ends(monkeypatch, caplog, emitted):
    path = compile.so_path(KEY)
    entries.make_folders(path.parent)
    path.with_suffix(".builder").write_text("process 7 on elsewhere")
    held, done = threading.Event(), threading.Event()

    def hold():
        with FileLock(path.with_suffix(".lock")):
            held.set()
            done.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(30)
    monkeypatch.setattr(compile, "LOCK_QUIET_SECONDS", 0.05)
    monkeypatch.setenv("LOWBIT_ATTN_LOCK_SECONDS", "0.2")
    with caplog.at_level(logging.WARNING, "lowbit_attn"):
        message = error_of()
    done.set()
    holder.join()
    assert "process 7 on elsewhere" in message and "LOWBIT_ATTN_LOCK_SECONDS" in message
    assert "being built by process 7 on elsewhere; waiting up to 0.2 s" in caplog.text
    monkeypatch.setenv("LOWBIT_ATTN_LOCK_SECONDS", "soon")
    assert "LOWBIT_ATTN_LOCK_SECONDS: got 'soon'" in error_of()


@pytest.mark.parametrize("error, words", [
    (OSError(errno.ENOSPC, "No space left on device", "/x"), "free space"),
    (OSError(errno.EROFS, "Read-only file system", "/x"), "LOWBIT_ATTN_CACHE_DIR"),
    (toolchain.ToolFailedError("nvcc", "note\nk.cu(3): error: boom\nmore"), "nvcc failed: k.cu(3): error: boom; "),
    (toolchain.ToolFailedError("gcc", "ld: final link failed: No space left on device"), "free space"),
    (AttributeError("module 'tilelang' has no attribute 'lower'"), "tested with"),
    (ImportError("cannot import name 'lower'"), toolchain.PACKAGE_REMEDY),
    (RuntimeError("__glob" + "al__ void f()\n" * 1000), "details are in"),
])
def test_failed_build_is_one_line_with_a_remedy(monkeypatch, emitted, error, words):
    def fail(key, path):
        raise error

    monkeypatch.setattr(emit, "emit", fail)
    message = error_of()
    assert words in message and len(message) < 800 and str(KEY) in message
    log = compile.so_path(KEY).with_suffix(".log").read_text()
    assert type(error).__name__ in log and getattr(error, "output", "") in log


@pytest.mark.parametrize("tool", ("gcc", "nvcc", "nvdisasm", "cuobjdump", "tilelang", "tvm_ffi"))
def test_missing_tool_is_told_before_anything_is_compiled(monkeypatch, cache, tool):
    def must_not_run(key, path):
        raise AssertionError("compiled without its tools")

    found = toolchain.find_tool
    monkeypatch.setattr(emit, "emit", must_not_run)
    monkeypatch.setattr(toolchain, "package_dir", lambda name, remedy="pip install x": Path(name))
    monkeypatch.setattr(toolchain, "find_tool", lambda name: name)
    if tool in ("tilelang", "tvm_ffi"):
        monkeypatch.undo()
        monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(cache.parent))
        monkeypatch.setitem(sys.modules, tool, None)
    else:
        monkeypatch.setattr(toolchain, "_tool_folders", lambda: iter(()))
        monkeypatch.delenv("CUDA_HOME", raising=False)
        monkeypatch.setattr(toolchain.shutil, "which", lambda name: None if name == tool else name)
        monkeypatch.setattr(toolchain, "find_tool", found)
    message = error_of()
    assert tool in message and "install" in message


def test_wrong_cuda_home_is_told_by_build_and_doctor(monkeypatch, cache):
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setattr(toolchain, "package_dir", lambda name, remedy="": Path(name))
    assert "CUDA_HOME is /nonexistent, which has no bin/nvcc" in error_of()
    nvcc = environment.gather().tools["nvcc"]
    assert nvcc.version is None and "CUDA_HOME is /nonexistent" in nvcc.remedy


def test_binary_that_does_not_open(monkeypatch, emitted):
    path = load()
    monkeypatch.undo()
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(path.parents[4]))
    pytest.importorskip("tvm_ffi", reason="loading a kernel needs apache-tvm-ffi")
    facts = whole(path)
    message = ""
    try:
        loader._open(KEY, compile.Built(path, facts))
    except loader.KernelNotBuiltError as error:
        message = str(error)
    assert f"cannot be loaded from {path}" in message and "\n" not in message


def test_doctor_compares_the_dsls_with_the_tested_ones(monkeypatch):
    monkeypatch.setattr(toolchain, "dsl_version", lambda package: "0.0.1")
    first, beyond = toolchain.tested_range("tilelang")
    assert f"tested from {first} to below {beyond}" in environment.gather().tools["tilelang"].remedy
    assert "tilelang is 0.0.1: tested from" in CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "160"}).output
    monkeypatch.setattr(toolchain, "dsl_version", lambda package: toolchain.tested_range(package)[0] + ".post1")
    assert not any(environment.gather().tools[name].remedy for name in ("tilelang", "cutedsl"))


@pytest.mark.parametrize("version, is_tested", [("0.1.14", False), ("0.1.15", True), ("0.1.15.post2", True),
                                                ("0.1.16", False), ("0.1.16rc1", False), ("0.2", False), ("1", False)])
def test_a_range_has_its_first_version_and_not_its_last(version, is_tested):
    assert toolchain.is_tested(version, ("0.1.15", "0.1.16")) == is_tested


def test_every_dsl_has_a_tested_range_that_has_the_one_here():
    assert toolchain.tested_range("torch-not-there") is None and toolchain.tested_range("tile") is None
    here = {name: toolchain.dsl_version(name) for name in environment.DSLS.values()}
    if None in here.values():
        pytest.skip("both DSLs are not installed")
    for name, version in here.items():
        assert toolchain.is_tested(version, toolchain.tested_range(name)), name


# ---- a real kernel


def test_kernel_is_built_and_loaded_from_a_relative_folder(monkeypatch, tmp_path):
    try:
        emit.require(KEY)
    except toolchain.ToolMissingError as error:
        pytest.skip(f"building needs a tool: {error}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOWBIT_ATTN_NO_JIT", raising=False)
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", f"real-{tmp_path.name}")
    kernel = load()
    with pytest.raises(Exception, match="dequantize"):
        kernel(1)
    built = compile.find(KEY)
    assert built.facts["built_with"]["tilelang"] == toolchain.dsl_version("tilelang")
    assert built.facts["registers"] == next(iter(sass.inspect(built.path))).registers
    assert sorted(file.suffix for file in built.path.parent.iterdir()) == [".json", ".lock", ".so"]
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    assert load()
