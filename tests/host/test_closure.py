"""The source text that kernels are made of: what a fingerprint follows, and what it leaves out."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit_attn import closure, compile

ROOTS = {"hopper": ("hopper", "decode"), "ampere": ("ampere", "decode"), "append": ("device", "append"),
         "quantize": ("device", "quantize"), "read": ("device", "read"), "pair": ("hopper", "pair")}


@pytest.fixture(scope="module")
def reached() -> dict[str, set[tuple[str, str]]]:
    """(module without the package, name) of all that each kind of kernel is made of."""
    found, patch = {}, pytest.MonkeyPatch()
    texts = closure.texts
    with patch.context() as inside:
        for kind, what in ROOTS.items():
            inside.setattr(closure, "texts", lambda *given: found.setdefault(kind, texts(*given)))
            compile.fingerprint.__wrapped__(*what)
    return {kind: {(module.removeprefix("lowbit_attn."), name) for module, name in names}
            for kind, names in found.items()}


def modules(names: set[tuple[str, str]]) -> set[str]:
    return {module for module, _ in names}


def test_kernels_are_not_made_of_each_others_files(reached):
    tops = {kind: {module.split(".")[0] for module in modules(names)} for kind, names in reached.items()}
    assert "ampere" not in tops["hopper"] and "hopper" not in tops["ampere"]
    assert not {"ampere", "hopper"} & (tops["append"] | tops["quantize"] | tops["read"])
    assert not {"device.append", "device.step"} & modules(reached["quantize"])
    for kind in ("hopper", "ampere"):
        assert {m for m in modules(reached[kind]) if m.startswith("device.")} <= {
            "device.numbers", "device.ptx", "device.tokens", "device.tilelang_kernel"}
    for names in reached.values():  # what finds, keeps, launches and loads kernels is not in them
        assert not {"compile", "entries", "closure", "loader", "toolchain", "dispatch", "build"} & modules(names)


def test_limits_of_kernels_count_and_lists_of_them_do_not(reached):
    for kind in ("hopper", "ampere"):
        assert {("kernels.key", name) for name in ("SMEM_LIMIT_BYTES", "FEATURES", "Checks")} <= (
            reached[kind])
        assert {("kernels.registry", name) for name in ("checks", "trace")} <= reached[kind]
    for names in reached.values():
        assert "kernels.shipped" not in modules(names)
        assert not {("kernels.key", "append_key"), ("kernels.registry", "pick")} & names
    assert ("hopper.common.support", "PATHS") in reached["hopper"] and ("emit", "emit_cute") in reached["hopper"]
    assert ("emit", "emit_cute") in reached["pair"] and ("emit", "emit_tilelang") not in reached["pair"]
    assert ("hopper.pair.config", "checks") in reached["pair"]
    assert ("emit", "emit_tilelang") in reached["ampere"] and ("emit", "_link") in reached["ampere"]
    assert {("ampere.config", "checks"), ("ampere.pages", "STEPS")} <= reached["ampere"]
    assert ("formats.affine", "SEARCH_FACTORS") in reached["quantize"]


@pytest.mark.parametrize("kind, program", [("hopper", "lowbit_attn.hopper.decode"),
                                           ("ampere", "lowbit_attn.ampere.decode"),
                                           ("append", "lowbit_attn.device.append")])
def test_every_module_that_a_program_imports_is_reached(reached, kind, program):
    dsl = "cutlass" if kind == "hopper" else "tilelang"
    pytest.importorskip(dsl, reason=f"importing {program} needs it")
    code = (f"import sys, lowbit_attn; before = set(sys.modules); import {program}; "
            "print(*(n for n in set(sys.modules) - before if n.startswith('lowbit_attn.')))")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.removeprefix("lowbit_attn.") for name in answer.stdout.split()}
    files = {name for name in imported if Path(importlib.util.find_spec(f"lowbit_attn.{name}").origin).name
             != "__init__.py"} - {"hopper.scratch"}  # sizes for the host alone, of constants that kernels have too
    assert len(files) > 5 and files <= modules(reached[kind])


def test_finding_the_text_imports_no_kernel():
    code = ("import sys; from lowbit_attn.compile import fingerprint; fingerprint('hopper', 'decode'); "
            "fingerprint('ampere', 'decode'); fingerprint('device', 'append'); print(*sys.modules)")
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split())
    assert "lowbit_attn.closure" in loaded
    assert not loaded & {"tilelang", "cutlass", "tvm_ffi", "lowbit_attn.ampere.decode", "lowbit_attn.device.append"}


PROGRAM = '''"""Text."""
import struct
from sample import parts
from sample.numbers import FIRST as ONE

def kernel():
    """Says what it does."""
    return ONE + parts.used() + struct.calcsize("i")  # the sum

def other():
    return parts.unused()
'''
PARTS = '''FACTORS = {}
FACTORS["a"] = 2
UNUSED = 5

def used():
    from sample.inner import deep
    return deep() + FACTORS["a"]

def unused():
    return UNUSED
'''


@pytest.fixture
def sample(monkeypatch, tmp_path):
    """Writes a package ``sample`` with changes and returns the text that sample.program.kernel is made of."""
    folder = tmp_path / "sample"
    folder.mkdir()
    files = {"__init__": "", "program": PROGRAM, "parts": PARTS, "numbers": "FIRST = 1\nSECOND = 2\n",
             "inner": "DEEP = 3\n\n\ndef deep():\n    return DEEP\n"}
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(closure, "PACKAGE", "sample")

    def text(file: str = "program", old: str = "", new: str = "") -> str:
        for name, content in files.items():
            assert old in content or name != file
            (folder / f"{name}.py").write_text(content.replace(old, new) if name == file and old else content)
        importlib.invalidate_caches()
        closure._parse.cache_clear()
        closure._spec.cache_clear()
        return str(closure.texts([("sample.program", "kernel")]))

    yield text
    closure._parse.cache_clear()
    closure._spec.cache_clear()
    sys.modules.pop("sample", None)


@pytest.mark.parametrize("file, old, new", [
    ("program", "return ONE", "return 2 * ONE"), ("program", "FIRST as ONE", "SECOND as ONE"),
    ("program", "import struct", "import array as struct"), ("program", "import parts", "import numbers as parts"),
    ("parts", '["a"] = 2', '["a"] = 4'), ("parts", "return deep()", "return -deep()"), ("inner", "= 3", "= 4"),
    ("numbers", "= 1", "= 7"),
])
def test_what_a_definition_reaches_counts(sample, file, old, new):
    assert sample(file, old, new) != sample()


@pytest.mark.parametrize("file, old, new", [
    ("program", "Says what it does.", "Tells\n    what it does."), ("program", "  # the sum", ""),
    ("program", "parts.unused()", "3"), ("program", "\ndef other", "\n\n\ndef other"),
    ("parts", "UNUSED = 5", "UNUSED = 6"),
    ("numbers", "SECOND = 2", "SECOND = 3"), ("parts", "return UNUSED", "return 1"),
])
def test_prose_and_other_definitions_do_not_count(sample, file, old, new):
    assert sample(file, old, new) == sample()


def test_sources_are_read_once_a_process(monkeypatch):
    compile.fingerprint("device", "read")
    monkeypatch.setattr(closure, "texts", lambda *a: pytest.fail("sources are read again"))
    assert len(compile.fingerprint("device", "read")) == 16
