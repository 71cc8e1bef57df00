"""Kernel wheels: made of built kernels by setuptools, installed by pip, found and judged by the loader."""

import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lowbit_attn import compile, entries, environment, kernel_wheel, kernels, loader, prebuilt, promised, toolchain
from lowbit_attn.kernels import KernelKey

pytest.importorskip("build", reason="wheels are made by build")
SHIPPED = kernels.shipped_keys("hopper")
KEYS = [next(key for key in SHIPPED if key.op == op) for op in ("decode", "append", "quantize")]
TOOLS = {"nvidia-cutlass-dsl": "4.8.1", "tilelang": "0.1.15", "nvcc": "13.0.88", "python": "3.11"}


@pytest.fixture
def built(monkeypatch, tmp_path) -> list[KernelKey]:
    """A cache in which KEYS are entered as if they were built; each binary is a few bytes of its own."""
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    monkeypatch.setattr(compile, "versions", lambda key: {n: TOOLS[n] for n in compile.TOOLS[kernels.needs_nvcc(key)]})
    for key in KEYS:
        path = compile.so_path(key)
        entries.make_folders(path.parent)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_bytes(str(key).encode())
        entries.write(unfinished, path, {
            "name": str(key), "key": asdict(key), "fingerprint": compile.fingerprint(key.arch, key.op), "function": "f",
            "tvm_ffi_abi": toolchain.tvm_ffi_abi(), "built_with": compile.versions(key), "smem_bytes": 0, "spills": 0,
            "smem_total_bytes": 0, "registers": 40, "sass": {}, "seconds": 1.0})
    return KEYS


@pytest.fixture
def installed(monkeypatch, tmp_path, built) -> Path:
    """The folder into which pip installed a wheel of KEYS, on a machine whose own cache is empty."""
    wheel = kernel_wheel.pack("hopper", built, tmp_path / "dist")
    site = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel],
                   check=True)
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path / "empty"))
    assert not any(map(compile.find, KEYS))
    monkeypatch.syspath_prepend(str(site))
    return site / prebuilt.PACKAGES["hopper"]


def error_of(key: KernelKey) -> str:
    with pytest.raises(loader.KernelNotBuiltError) as error:
        loader.load.__wrapped__(key)
    return str(error.value)


def test_an_installed_wheel_is_found_without_compiling(installed):
    for key in KEYS:
        found = compile.find(key)
        assert found.path.is_relative_to(installed) and found.path.read_bytes() == str(key).encode()
    assert sum(environment.gather().kernels_built.values()) == len(KEYS)
    assert error_of(KEYS[0]).startswith(f"{KEYS[0]} cannot be loaded from {installed}"), "found, and no real binary"
    other = next(key for key in SHIPPED if key not in KEYS)
    assert f"{other} is not built and LOWBIT_ATTN_NO_JIT is set; run make" in error_of(other)


def test_a_changed_binary_is_refused(installed):
    binary = compile.find(KEYS[1]).path
    binary.write_bytes(binary.read_bytes()[:-1] + b"?")
    assert "is damaged: its sha256 is not its entry's" in error_of(KEYS[1])
    assert compile.find(KEYS[0]) and not compile.find(KEYS[1])


def test_another_binary_interface_is_refused(monkeypatch, installed):
    monkeypatch.setattr(toolchain, "dsl_version", lambda package: "0.2.1")
    assert "lowbit_attn_kernels_hopper has it for apache-tvm-ffi 0.1, here is 0.2" in error_of(KEYS[0])
    for folder in installed.glob("kernels/*/*-ffi0.1"):  # named otherwise, the entry still tells
        folder.rename(folder.with_name(folder.name.replace("0.1", "0.2")))
    assert "is damaged: it is for apache-tvm-ffi 0.1, in the folder of 0.2" in error_of(KEYS[0])


def test_kernels_of_other_sources_are_refused(monkeypatch, installed):
    monkeypatch.setattr(compile, "fingerprint", lambda arch, op: "0" * 16)
    assert "has it of other sources than this lowbit_attn's; install the two of one version" in error_of(KEYS[2])


def test_a_wheel_names_what_its_kernels_need(tmp_path, built):
    text = {}
    for name, keys in (("both", KEYS), ("tilelang", KEYS[1:])):
        with zipfile.ZipFile(kernel_wheel.pack("hopper", keys, tmp_path / name, is_part=name != "both")) as wheel:
            text[name], = (wheel.read(file).decode() for file in wheel.namelist() if file.endswith("/METADATA"))
            code = [file for file in wheel.namelist() if file.endswith(".py")]
            assert code == ["lowbit_attn_kernels_hopper/__init__.py"] and len(wheel.read(code[0]).splitlines()) == 1
    needed = "Requires-Dist: nvidia-cutlass-dsl-libs-cu13==4.8.1"
    assert needed in text["both"] and needed not in text["tilelang"]
    assert "Requires-Dist: lowbit-attn==" in text["tilelang"]
    assert "+part" in text["tilelang"] and "+part" not in text["both"]


def test_two_releases_of_a_runtime_are_not_mixed(built):
    found = [compile.Built(Path("x"), {"built_with": {"nvidia-cutlass-dsl": version}}) for version in ("1", "2")]
    with pytest.raises(kernel_wheel.KernelWheelError, match="1, 2 are mixed"):
        kernel_wheel._needs(found)


def run(*arguments: str):
    app = typer.Typer()
    app.command()(kernel_wheel.main)
    return CliRunner().invoke(app, list(arguments))


def test_command_prints_the_size(monkeypatch, tmp_path, built):
    monkeypatch.setattr(kernels, "shipped_keys", lambda arch: KEYS)
    answer = run("--arch", "hopper", "--out", str(tmp_path))
    assert answer.exit_code == 0, answer.output
    assert "py3-none-linux_x86_64.whl: 3 kernels, 0.0 MB of at most 60\n" in answer.output
    monkeypatch.setattr(kernel_wheel, "pack", lambda *_, is_part: is_part and sized(tmp_path / "a.whl", 4_000_000))
    monkeypatch.setattr(promised, "rotation", lambda keys, number, seed: keys[:number])
    answer = run("--arch", "hopper", "--out", str(tmp_path), "--rotation", "2")
    assert "a.whl: 2 kernels, 4.0 MB of at most 60; all 3 would take about 6.0\n" in answer.output


def sized(path: Path, count: int) -> Path:
    path.write_bytes(bytes(count))
    return path


@pytest.mark.parametrize("change, words", [("missing", "1 of 4 kernels are not built"),
                                           ("large", "MB, supported: at most 0 MB")])
def test_command_makes_all_or_nothing(monkeypatch, tmp_path, built, change, words):
    other = next(key for key in SHIPPED if key not in KEYS)
    monkeypatch.setattr(kernels, "shipped_keys", lambda arch: KEYS + [other] * (change == "missing"))
    monkeypatch.setattr(kernel_wheel, "LIMIT_MB", 0 if change == "large" else 60)
    answer = run("--arch", "hopper", "--out", str(tmp_path / "dist"))
    assert answer.exit_code == 1 and words in answer.output
    assert not (tmp_path / "dist").exists()
    assert run("--arch", "volta").exit_code == 2
