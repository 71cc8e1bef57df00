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
from lowbit_attn import FORMATS, extras
from lowbit_attn.kernels import registry

ROOT = Path(__file__).parents[2]
SOURCES = {"lowbit_attn": ROOT / "src/lowbit_attn", "lowbit_attn.hopper": ROOT / "hopper",
           "lowbit_attn.ampere": ROOT / "ampere"}
# Folders and files of the package, from the lowest: each imports from lower lines alone, and from itself. A folder's
# part that is named apart is not in it. "": the public names, lowbit_attn/__init__.py
LAYERS = (
    ("errors",),
    ("atomic_file", "extras"),
    ("_private", "_version", "layout", "checks", "precision", "cache.journal", "cache.pages", "toolchain", "closure",
     "entries", "cache.view", "progress", "tensor_file", "text_file", "tokenizing", "model_dtype", "model_layers"),
    ("agreement", "dealing", "codebooks", "formats", "linear", "reference"),
    ("cache.rope",),
    ("cache.attached", "cache.significance", "levels.frames"),
    ("cache.saved", "cache.backend", "levels.policy"),
    ("cache.copies", "cache.extend", "registers", "subnormals", "sass", "prebuilt", "levels.moves",
     "levels.windows"),
    ("cache.state", "kernels.key"),
    ("cache.reads",),
    ("cache.kv_cache", "scratch", "device", "kernels.support", "kernels.linear", "kernels.all_reduce", "levels.state"),
    ("ampere", "hopper.common", "device.linear", "cache", "cache.held"),
    ("levels.view", "levels.step"),
    ("levels.level_cache",),
    ("levels", "hopper.tile", "hopper.warp"),
    ("hopper.arith", "hopper.arith.codebook", "hopper.arith.fp16", "hopper.arith.int8", "hopper.schedule",
     "hopper.wgmma"),
    ("hopper.pair",),
    ("hopper",),
    ("kernels.registry",),
    ("kernels.shipped",),
    ("kernels",),
    ("emit", "support"),
    ("compile", "promised"),
    ("loader", "build", "kernel_wheel"),
    ("plan",),
    ("dispatch",),
    ("ops", "environment", "exchange", "linear_transforms", "levels.pair", "levels.manage"),
    ("all_reduce",),
    ("levels.decode", "linear_kernels"),
    ("paged",),
    ("paged_static", "paged_plan"),
    ("paged_attention", "paged_reference", "paged_kernels"),
    ("paged_steps",),
    ("paged_ranks",),
    ("api",),
    ("",),
    ("integrations", "testing", "parallel_decode", "budget", "loading"),
    ("parallel",),
    ("bench", "quality"),
    ("demo", "recall"),
    ("evaluation",),
    ("cli",),
    ("__main__", "cli.__main__", "demo.__main__"),
)
RANKS = {name: rank for rank, names in enumerate(LAYERS) for name in names}

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


def dynamic_imports(path: Path) -> list[str]:
    """Calls in a file that import what only a running program knows."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [ast.unparse(call) for call in calls if re.search(r"\bimport_module$|\b__import__$|\bexec_module$|\brunpy\b",
                                                              ast.unparse(call.func))]


def part(module: str) -> str:
    return module.removeprefix("lowbit_attn").lstrip(".").split(".")[0]


def layer(module: str) -> str:
    """The name in ``LAYERS`` of a module, or of what is in one."""
    inside = module.removeprefix("lowbit_attn").lstrip(".")
    if f"lowbit_attn.{part(module)}" not in MODULES:
        return ""  # a public name
    found = [name for name in RANKS if name and f"{inside}.".startswith(f"{name}.")]
    assert found, f"{module} is not in LAYERS: name there what it stands on"
    return max(found, key=len)


def edges(module: str, path: Path) -> set[str]:
    """Layers that a module imports from, wherever in it and by whatever means."""
    names = {name for name in imports(path) if name.split(".")[0] == "lowbit_attn"}
    return {layer(name) for name in (*names, *(registry.MODULES.values() if dynamic_imports(path) else ()))}


def public_names() -> set[str]:
    return set(lowbit_attn.__all__)


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
    mine = layer(module)
    for theirs in edges(module, MODULES[module]) - {mine}:
        assert RANKS[theirs] < RANKS[mine], f"{module} imports from {theirs or 'the package'}, not below {mine}"
        assert {mine.split(".")[0], theirs.split(".")[0]} != {"hopper", "ampere"}, f"{module}: architectures are apart"


def test_modules_are_imported_by_name_from_one_table_alone():
    found = {module: calls for module, path in MODULES.items() if (calls := dynamic_imports(path))}
    assert found == {"lowbit_attn.kernels.registry": ["import_module(MODULES[name])"]}
    assert set(registry.MODULES.values()) <= set(MODULES)
    assert {"ampere", "device", "hopper"} <= edges("registry", MODULES["lowbit_attn.kernels.registry"])


def test_every_layer_is_there():
    assert sum(map(len, LAYERS)) == len(RANKS), "a name is in two layers"
    assert {layer(module) for module in MODULES} == set(RANKS)


KERNELS = [name for name in MODULES if part(name) in ("ampere", "device", "hopper")]
# words of no field, for which it has terms: store_partial, prefetch, mask, barrier, work item, row_max, residual, mixed
HOME_MADE = {"ask", "asks", "home", "leave", "leaves", "look", "looks", "meet", "meets", "plain", "sight", "take",
             "taker", "takers", "takes", "third", "turn", "turns"}


def home_made_words(path: Path) -> set[str]:
    """Names in a file, and the file's own, of which a word is in HOME_MADE."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {path.stem} | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if HOME_MADE & set(name.lower().split("_"))}


@pytest.mark.parametrize("module", KERNELS)
def test_names_are_the_fields_terms(module):
    assert not home_made_words(MODULES[module])


def test_home_made_words_would_be_found(tmp_path):
    path = tmp_path / "third.py"
    path.write_text("class Look:\n    def leave(self, sight): self.left = 1\nSPLITS_MEET = returned = True\n")
    assert home_made_words(path) == {"third", "Look", "leave", "sight", "SPLITS_MEET"}


@pytest.mark.parametrize("path", [*MODULES.values(), *(ROOT / "perf").glob("*.py")], ids=lambda path: path.stem)
def test_docstrings_stand_alone(path):
    """They begin with what a thing is or does, not in the middle of a sentence that its name began."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            assert not text.startswith(("Of ", "The same", "By ")), f"{path}: {text.splitlines()[0]}"


def test_constants_of_softmax_are_in_one_file():
    found = [path for path in (*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "perf").glob("*.py"))
             if re.search(r"1\.4426|0\.6931", path.read_text()) and path != Path(__file__)]
    assert found == [MODULES["lowbit_attn.registers"]]


def test_a_name_of_hopper_means_one_thing():
    classes = Counter(node.name for name, path in MODULES.items() if part(name) == "hopper"
                      for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
    assert len(classes) > 40 and not [name for name, count in classes.items() if count > 1 and name != "Smem"]


# What the default kernel (Hopper, int8, splits) is made of: steps and facts of its arithmetic and of its schedule.
DEFAULT_KERNEL = tuple(f"lowbit_attn.hopper.{name}" for name in ("arith.int8.config", "arith.int8.steps",
                                                                  "schedule.config", "schedule.splits"))


def imported_with(path: Path) -> set[str]:
    """Modules that a file imports when it is imported: not those of functions, which other kernels use."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {name if (name := f"{node.module}.{alias.name}") in MODULES else node.module
                      for alias in node.names}
    return found & set(MODULES)


def test_the_default_kernel_is_read_in_few_files():
    """At most 13 files and 2,890 lines of Hopper; 18 and 3,570 with what they stand on, which no format is among.

    The first is the count by which hopper.register.decode had 29 files and 4,885 lines at dcb2272 (with files outside
    hopper/ 39 and 6,451): modules imported by name, so a package's __init__ only where a file imports from it.
    """
    closure, waiting = set(), list(DEFAULT_KERNEL)
    while waiting:
        if (module := waiting.pop()) not in closure:
            closure.add(module)
            waiting += imported_with(MODULES[module])
    hopper = {module for module in closure if part(module) == "hopper"}
    lines = {module: len(MODULES[module].read_text().splitlines()) for module in closure}
    assert len(hopper) <= 13 and sum(lines[module] for module in hopper) <= 2_890, lines
    assert len(closure) <= 18 and sum(lines.values()) <= 3_570, lines
    assert {module.removeprefix("lowbit_attn.") for module in closure - hopper} == {
        "device.numbers", "device.ptx", "formats.spec", "layout", "registers"}


def test_files_and_kernels_functions_are_short():
    for path in (*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "perf").glob("*.py")):
        text = path.read_text()
        assert len(text.splitlines()) <= 450, path
        if {path.parts[len(ROOT.parts)], path.parent.name} & {"hopper", "linear"}:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_upward_imports_would_be_seen(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("from lowbit_attn import KVCache\ndef f(x):\n    import lowbit_attn.kernels.support\n"
                    "    from lowbit_attn.hopper.arith.int8 import steps\n    from lowbit_attn.hopper import PATHS\n")
    assert edges("x", path) == {"", "kernels.support", "hopper.arith.int8", "hopper"}
    for call in ("import_module(x)", "importlib.import_module('lowbit_attn.' + x)", "__import__(x)"):
        path.write_text(f"def f(x):\n    return {call}\n")
        assert dynamic_imports(path) == [call] and {"hopper", "ampere"} <= edges("x", path)
    named = {"lowbit_attn.kernels.registry.pick": "kernels.registry", "lowbit_attn.kernels.pick": "kernels",
             "lowbit_attn.hopper.warp.config": "hopper.warp", "lowbit_attn.decode": "", "lowbit_attn": ""}
    assert {name: layer(name) for name in named} == named


def test_the_core_stands_on_nothing_else():
    assert not imports(MODULES["lowbit_attn.layout"]) - {"hashlib"}
    for module in ("formats", "formats.uniform", "formats.affine", "formats.contract", "formats.packing",
                   "formats.spec", "cache.kv_cache", "reference", "api"):
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
        if path not in (SOURCES["lowbit_attn"] / "device/ptx.py", Path(__file__)):
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
    assert config["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "lowbit_attn._version.__version__"}
    assert metadata.version("lowbit-attn") == lowbit_attn.__version__, "install again: pip install -e ."
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest[1] == lowbit_attn.__version__


# where a module is named otherwise
DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "lm_eval": "lm-eval", "tvm_ffi": "apache-tvm-ffi"}
WITH_TORCH = {"torch", "triton"}
HOST_OF_A_PLUGIN = {"vllm"}  # who imports the plug-in has it


def test_what_is_imported_is_declared():
    """Core dependencies are what the core imports; everything else is in an extra, and the commands' packages are in
    every extra that runs a command."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name: {re.match(r"[\w-]+", one)[0] for one in ones}
                for name, ones in {"core": project["dependencies"], **project["optional-dependencies"]}.items()}
    for module, path in MODULES.items():
        tops = {name.split(".")[0] for name in imports(path)} - {*sys.stdlib_module_names, "lowbit_attn"} - WITH_TORCH
        if ".integrations." in module:
            tops -= HOST_OF_A_PLUGIN
        missing = {DISTRIBUTIONS.get(top, top) for top in tops} - set().union(*declared.values())
        assert not missing, f"{module} imports {missing}, which pyproject.toml does not name"
    assert declared["core"] == {"torch", "numpy", "filelock", "platformdirs", "apache-tvm-ffi", "safetensors"}
    for extra in ("kernels", "demo", "test", "eval"):
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
    assert answer.stderr == f"lowbit-attn: {name} is not installed: {extras.remedy('cli')}\n"
    assert "Traceback" in without("torch").stderr, "another package's absence is no matter of the extra"


def test_licence_and_types_are_in_the_package():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["license"] == "Apache-2.0" and config["project"]["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:5] == ["Apache", "License", "Version", "2.0,", "January"] and "END OF TERMS" in text
    shipped = config["tool"]["setuptools"]["package-data"]["lowbit_attn"]
    assert "py.typed" in shipped and (SOURCES["lowbit_attn"] / "py.typed").is_file()
