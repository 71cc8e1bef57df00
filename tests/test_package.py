"""The packaging guard and the house rules that a machine can check."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

import lowbit_attn
from lowbit_attn import FORMATS

ROOT = Path(__file__).parent.parent
SOURCES = {"lowbit_attn": ROOT / "src/lowbit_attn", "lowbit_attn.hopper": ROOT / "hopper",
           "lowbit_attn.ampere": ROOT / "ampere"}
# What each part of the package stands on; it may import parts of a lower rank, or its own.
RANKS = {"layout": 0, "registers": 0, "checks": 0, "precision": 0, "journal": 0, "formats": 1, "pages": 2,
         "backend": 2, "copies": 2, "extend": 2, "state": 2, "cache": 2, "paging": 2, "reference": 2,
         "significance": 2, "policy": 2, "frames": 2, "levels": 2, "level_state": 2, "level_moves": 2,
         "leankv": 3, "device": 3, "kernels": 3, "hopper": 4, "ampere": 4,
         "dispatch": 6, "ops": 7, "api": 7, "": 8, "integrations": 9, "testing": 9, "parallel": 9,
         "environment": 9, "budget": 9, "bench": 10, "quality": 10, "recall": 10, "cli": 10, "demo": 10, "__main__": 11}
# the folders of hopper/: a file may import from its own folder and from those of a lower rank; "": hopper/ itself
HOPPER_RANKS = {"common": 0, "tile": 1, "warp": 1, "arith.fp16": 2, "arith.int8": 2, "arith": 2, "schedule": 2, "": 3}
BETWEEN = 5  # a part not named above stands between the kernels and dispatch (finding, building, loading them)


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for package, folder in SOURCES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(p for p in parts if p != "__init__")))] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dynamic_imports(path: Path) -> set[str]:
    """What a file names to ``import_module``, up to the first part that is known at run time alone."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            first = node.args[0].values[0] if isinstance(node.args[0], ast.JoinedStr) else node.args[0]
            names.add(first.value if isinstance(first, ast.Constant) else "")
    return names


def hopper_folder(module: str) -> str:
    """The folder of ``HOPPER_RANKS`` that a module, or a name in it, is in."""
    inside = module.removeprefix("lowbit_attn.hopper").lstrip(".")
    longest_first = sorted(HOPPER_RANKS, key=len, reverse=True)
    return next((name for name in longest_first if f"{inside}.".startswith(f"{name}.")), "")


def part(module: str) -> str:
    return module.removeprefix("lowbit_attn").lstrip(".").split(".")[0]


def public_names() -> set[str]:
    return set(lowbit_attn.__all__)


def rank(name: str) -> int:
    return RANKS.get(name, BETWEEN)


def test_every_folder_of_modules_is_a_listed_package():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(packages) == folders
    for path in MODULES.values():
        assert (path.parent / "__init__.py").exists(), f"{path} is in no package"


def test_the_package_imports_from_its_folders():
    for name, folder in SOURCES.items():
        module = __import__(name, fromlist=["x"])
        assert Path(module.__file__).parent == folder


def test_import_brings_no_dsl_and_no_transformers():
    """In a fresh process; ``import lowbit_attn`` must work where only torch and numpy are installed."""
    code = "import sys; before = set(sys.modules); import lowbit_attn; print(*(set(sys.modules) - before))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    loaded = {name.split(".")[0] for name in answer.stdout.split()}
    assert {"lowbit_attn", "torch"} <= loaded
    heavy = {"tilelang", "tvm", "tvm_ffi", "cutlass", "nvidia_cutlass_dsl", "triton", "transformers", "typer", "rich"}
    assert not loaded & heavy, f"import lowbit_attn brings {sorted(loaded & heavy)}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    mine = part(module)
    for name in imports(MODULES[module]):
        if name.split(".")[0] != "lowbit_attn" or not mine and module == "lowbit_attn":
            continue
        theirs = part(name)
        if theirs in public_names() or theirs == "":
            theirs = ""  # a public name, imported from the package itself
        assert theirs == mine or rank(theirs) <= rank(mine), f"{module} imports {name}, which stands on it"
        assert {mine, theirs} != {"hopper", "ampere"}, f"{module} imports {name}: the architectures are apart"


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) == "hopper"])
def test_folders_of_hopper_import_one_way(module):
    mine = hopper_folder(module)
    assert not dynamic_imports(MODULES[module]), f"{module} imports what no guard sees"
    for name in imports(MODULES[module]):
        if part(name) == "hopper" and (theirs := hopper_folder(name)) != mine:
            assert HOPPER_RANKS[theirs] < HOPPER_RANKS[mine], f"{module} imports {name}, which is not below it"


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) == "hopper"])
def test_docstrings_stand_alone(module):
    """They begin with what a thing is or does, not in the middle of a sentence that its name began."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            assert not text.startswith(("Of ", "The same", "By ")), f"{module}: {text.splitlines()[0]}"


def test_a_name_of_hopper_means_one_thing():
    classes = Counter(node.name for name, path in MODULES.items() if part(name) == "hopper"
                      for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert len(classes) > 40 and not [name for name, count in classes.items() if count > 1 and name != "Smem"]


def test_upward_imports_would_be_seen(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('def f(x):\n    from lowbit_attn.hopper.arith.int8 import steps\n'
                    '    return import_module(f"lowbit_attn.{x}"), import_module("lowbit_attn.device")\n')
    assert imports(path) == {"lowbit_attn.hopper.arith.int8.steps"}
    assert dynamic_imports(path) == {"lowbit_attn.", "lowbit_attn.device"}
    assert [hopper_folder(f"lowbit_attn.hopper{name}") for name in ("", ".config", ".warp.config", ".arith.int8.steps",
                                                                   ".arith", ".PATHS")] == [
        "", "", "warp", "arith.int8", "arith", ""]


def test_the_core_stands_on_nothing_else():
    assert not imports(MODULES["lowbit_attn.layout"]) - {"hashlib"}
    for module in ("formats", "formats.uniform", "formats.affine", "formats.contract", "formats.packing",
                   "formats.spec", "cache", "reference", "api"):
        for name in imports(MODULES[f"lowbit_attn.{module}"]):
            allowed = {*sys.stdlib_module_names, "torch", "numpy", "lowbit_attn"}
            assert name.split(".")[0] in allowed, f"{module} imports {name}"


FORMAT_CLASSES = {"PerChannel", "PerToken", "Boosted"}


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) != "formats"])
def test_formats_are_known_by_their_spec(module):
    """Classes of sides are named in formats/ alone: everything else reads a SideSpec or a Side's kind."""
    named = {name.split(".")[-1] for name in imports(MODULES[module])} & FORMAT_CLASSES
    assert not named, f"{module} imports {', '.join(sorted(named))}, supported outside formats/: SideSpec, Kind"


@pytest.mark.parametrize("module", MODULES)
def test_no_file_uses_both_dsls(module):
    tops = {name.split(".")[0] for name in imports(MODULES[module])}
    if module not in ("lowbit_attn.emit",):
        assert not ({"cutlass"} & tops and {"tilelang"} & tops)
    if part(module) == "hopper":
        assert "tilelang" not in tops
    if part(module) == "ampere":
        assert "cutlass" not in tops


# Signatures and calls, not words: a regular expression that reads generated source is no CUDA text.
CUDA_TEXT = (r"__global__\s+\w+\s+\w", r"__device__\s+\w", r"__shared__\s+\w+\s+\w", r"__launch_bounds__\(\w",
             r"asm\s+volatile", r"\bT\.import_source\b", r"\bCUDASourceCodeKernel\b",
             r"\bload_inline\b", r"\bRawKernel\b", r"\bcpp_extension\b",
             r"#include\s*<(cuda_fp16|cuda_bf16|cute/|cutlass/)")


def texts() -> list[Path]:
    folders = [*SOURCES.values(), ROOT / "tests", ROOT / "perf"]
    suffixes = (".py", ".c", ".h", ".cpp", ".cu", ".cuh")
    return [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]


def test_no_cuda_text_in_the_tree():
    files = texts()
    assert len(files) > 20
    for path in files:
        assert path.suffix not in (".cu", ".cuh", ".cpp"), path
        text = path.read_text()
        for pattern in CUDA_TEXT:
            found = re.search(pattern, text) if path != Path(__file__) else None
            assert not found, f"{path} contains {found[0]}"


def test_cuda_text_would_be_found():
    kernel = "__glo" + "bal__ void decode(half* q) { __sha" + "red__ float s[32]; asm  vol" + "atile(\"\"); }"
    assert [bool(re.search(pattern, kernel)) for pattern in CUDA_TEXT[:5]] == [True, False, True, False, True]


def test_inline_ptx_is_in_one_file():
    for path in texts():
        if path.name != "ptx.py" and path != Path(__file__):
            found = re.search(r"inline_asm|llvm\.asm|inline_ptx", path.read_text())
            assert not found, f"{path} contains {found[0]}"


def test_public_names():
    assert len(public_names()) == len(lowbit_attn.__all__)
    for name in lowbit_attn.__all__:
        assert getattr(lowbit_attn, name).__doc__, f"{name} has no docstring"
    assert {"KVCache", "decode", "merge_states", "why_not", "FORMATS"} <= public_names()
    assert "k4v4" in FORMATS


def test_versions_agree():
    """``__version__`` is the only place: the package's metadata and the newest entry of the change log follow it."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["dynamic"] == ["version"]
    assert config["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lowbit_attn.__version__"}
    assert metadata.version("lowbit-attn") == lowbit_attn.__version__, "install again: pip install -e ."
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == lowbit_attn.__version__


DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}  # where a module is named otherwise
WITH_TORCH = {"torch", "triton"}


def test_what_is_imported_is_declared():
    """Core dependencies are what the core imports; everything else is in an extra, and the commands' packages are in
    every extra that runs a command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name: {re.match(r"[\w-]+", one)[0] for one in ones}
                for name, ones in {"core": project["dependencies"], **project["optional-dependencies"]}.items()}
    for module, path in MODULES.items():
        tops = {name.split(".")[0] for name in imports(path)} - {*sys.stdlib_module_names, "lowbit_attn"} - WITH_TORCH
        missing = {DISTRIBUTIONS.get(top, top) for top in tops} - set().union(*declared.values())
        assert not missing, f"{module} imports {missing}, which pyproject.toml does not name"
    assert declared["core"] == {"torch", "numpy", "filelock", "platformdirs", "apache-tvm-ffi"}
    for extra in ("kernels", "demo", "test"):
        assert declared["cli"] <= declared[extra], extra


WITHOUT = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
from lowbit_attn.__main__ import main
sys.argv = ["lowbit-attn", "doctor"]
main()
"""


def without(*hidden: str) -> subprocess.CompletedProcess:
    """``lowbit-attn doctor`` where these packages are not installed."""
    return subprocess.run([sys.executable, "-c", WITHOUT.format(hidden=hidden)], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_command_without_its_packages_says_what_to_install(name):
    answer = without(name)
    assert answer.returncode == 1 and not answer.stdout
    assert answer.stderr == f"lowbit-attn: {name} is not installed: pip install 'lowbit-attn[cli]'\n"
    assert "Traceback" in without("torch").stderr, "another package's absence is no matter of the extra"


def test_licence_and_types_are_in_the_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["license"] == "Apache-2.0" and config["project"]["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"] and "END OF TERMS" in text
    shipped = config["tool"]["setuptools"]["package-data"]["lowbit_attn"]
    assert "py.typed" in shipped and (SOURCES["lowbit_attn"] / "py.typed").is_file()
