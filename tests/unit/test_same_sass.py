"""The comparison of kernels of two commits: what counts as a difference, and which kernels are compared."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit_attn import compile, kernels, sass

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "perf"))

import same_sass  # noqa: E402
import same_sass_side  # noqa: E402

NAMES = [f"decode-{path}-{fmt}-{dtype}-d{head_dim}@sm_90a" for path in ("integer", "register")
         for fmt in ("k4v4", "k2v2", "kitty") for dtype in ("float16", "bfloat16") for head_dim in (64, 128)]


def cubin(text: bytes, name: str, constants: bytes = bytes(16)) -> bytes:
    """An ELF file for CUDA with the sections that are compared, and one of line numbers that is not."""
    parts = {f".text.{name}": text, f".nv.constant0.{name}": constants, ".debug_line": name.encode(),
             ".shstrtab": b""}
    strings, names = b"\0", []
    for part in parts:
        names.append(len(strings))
        strings += part.encode() + b"\0"
    parts[".shstrtab"] = strings
    body, headers, at = b"", b"", 64
    for where, content in zip(names, parts.values()):
        headers += struct.pack("<IIQQQQIIQQ", where, 1, 0, 0, at + len(body), len(content), 0, 0, 1, 0)
        body += content
    start = struct.pack("<4sBBBB8xHHIQQQIHHHHHH", sass.ELF_MAGIC[:4], 2, 1, 1, 0, 2, sass.EM_CUDA, 1, 0, 0,
                        at + len(body), 0, 64, 0, 0, 64, len(parts), len(parts) - 1)
    return start + body + headers


def built(folder: Path, *content, registers: int = 128, smem_bytes: int = 1024) -> dict:
    path = folder / f"{len(list(folder.iterdir()))}.so"
    path.write_bytes(b"host code" + cubin(*content) + b"more")
    return {"file": str(path), "registers": registers, "smem_bytes": smem_bytes}


def test_sections_of_a_cubin():
    assert dict(sass.sections(cubin(b"abc", "f"))) == {
        ".text.f": b"abc", ".nv.constant0.f": bytes(16), ".debug_line": b"f",
        ".shstrtab": b"\0.text.f\0.nv.constant0.f\0.debug_line\0.shstrtab\0"}


def test_names_and_line_tables_may_differ(tmp_path):
    assert same_sass.differences(built(tmp_path, b"code", "old_name"), built(tmp_path, b"code", "new")) == []


def test_what_may_not_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(sass, "disassembly", lambda elf: ".text.f:\n        /*0000*/   " + (
        "IADD3 R1 ;" if b"other" in elf else "NOP ;"))
    base = built(tmp_path, b"code", "f")
    assert same_sass.differences(base, built(tmp_path, b"code", "f", registers=130)) == [
        "registers: base 128, now 130"]
    assert same_sass.differences(base, built(tmp_path, b"code", "f", smem_bytes=2048)) == [
        "smem_bytes: base 1024, now 2048"]
    assert same_sass.differences(base, built(tmp_path, b"code", "f", bytes(20))) == ["constants, or parameters, differ"]
    shown = same_sass.differences(base, built(tmp_path, b"other", "f"))
    assert [line.split() for line in shown if line[0] in "+-"][2:] == [["-", "NOP", ";"], ["+", "IADD3", "R1", ";"]]
    assert same_sass.differences(base, built(tmp_path, b"coda", "f")) == [
        "the same instructions with other scheduling bits"]
    assert same_sass.differences(base, {"error": "STL x2"}) == ["base: builds", "now: STL x2"]
    assert same_sass.differences({"error": "STL x2"}, {"error": "STL x2"}) == []


def test_kernels_of_both_sides_are_matched_by_name():
    base, head = ["decode-integer-a", "decode-small-a", "quantize-k"], ["decode-int8-a", "decode-small-a", "append-x"]
    rules = ["/^decode-integer/decode-int8/"]
    pairs, alone = same_sass.chosen(base, head, rules, "", None)
    assert pairs == {"decode-integer-a": "decode-int8-a", "decode-small-a": "decode-small-a"}
    assert alone == ["base alone: quantize-k", "now alone: append-x"]
    assert same_sass.chosen(base, head, rules, "^decode", None) == (pairs, [])
    assert same_sass.chosen(base, head, rules, "", "quantize|append")[1] == []
    assert same_sass.chosen(base, head, [], "^decode", None) == (
        {"decode-small-a": "decode-small-a"}, ["base alone: decode-integer-a", "now alone: decode-int8-a"])


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_has_every_value_of_every_property(seed):
    chosen = same_sass.sampled(NAMES, 8, seed)
    assert len(set(chosen)) == 8
    assert set().union(*map(same_sass.properties, chosen)) >= {x for name in NAMES for x in same_sass.properties(name)
                                                               if not isinstance(x[0], tuple)}
    assert same_sass.sampled(NAMES, 100, seed)[:8] == chosen


def test_a_package_is_put_together_from_a_working_tree(tmp_path):
    """As it is installed: with the architectures' folders inside, and importable in front of the installed one."""
    (tmp_path / "tree").mkdir()
    package = same_sass.assemble(same_sass.export(None, tmp_path / "tree"), tmp_path / "package")
    code = "import lowbit_attn.hopper, lowbit_attn.ampere; print(lowbit_attn.hopper.__file__)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env={"PYTHONPATH": str(package), "PATH": ""}, cwd="/")
    assert Path(answer.stdout.strip()) == package / "lowbit_attn/hopper/__init__.py"
    assert same_sass.content_hash(package) == same_sass.content_hash(package)


def test_a_side_lists_the_kernels_of_its_own_tests(tmp_path):
    """The matrix comes from the side's tests, or, where these are older, from its package."""
    (tmp_path / "tree").mkdir()
    package = same_sass.assemble(same_sass.export(None, tmp_path / "tree"), tmp_path / "package")
    shutil.rmtree(tmp_path / "tree")
    side = same_sass.Side(package, tmp_path)
    assert side.run("list", str(side.listed)).wait() == 0
    names = json.loads(side.listed.read_text())
    assert "decode-int8-splits-k4v4+w128-float16-d128-r4@sm_90a" in names and len(names) > 500
    old = package / "lowbit_attn/gpu_matrix.py"
    old.write_text("def keys(arch):\n    return [f'old-{arch}']\n")
    (package / "windowed.py").unlink()
    assert side.run("list", str(side.listed)).wait() == 0
    assert {"old-hopper", "old-ampere"} <= set(json.loads(side.listed.read_text()))


def test_a_side_tells_of_a_build_whatever_its_package_calls_it(monkeypatch):
    """``build`` gave an entry's facts once, and gives them with their path now."""
    key, facts = next(iter(same_sass_side.known().values())), {"registers": 128, "smem_total_bytes": 1024}
    monkeypatch.setattr(compile, "so_path", lambda key: Path("kernel.so"))
    for found in (facts, compile.Built(Path("kernel.so"), facts)):
        monkeypatch.setattr(compile, "build", lambda key, found=found: found)
        assert same_sass_side.built(key) == {"file": "kernel.so", "registers": 128, "smem_bytes": 1024}

    def broken(key):
        raise compile.KernelCheckError(f"{key}: STL x2")

    monkeypatch.setattr(compile, "build", broken)
    assert same_sass_side.built(key) == {"error": "STL x2"}


def test_names_of_older_packages_are_known(monkeypatch):
    now = same_sass_side.known()
    monkeypatch.setattr(kernels, "shipped", kernels.shipped_keys)
    monkeypatch.delattr(kernels, "shipped_keys")
    assert same_sass_side.known() == now
