"""What can be said of built kernels without a GPU: names, entries, static checks, loading and argument errors."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import typer
import windowed
from gpu import build as gpu_build
from gpu import matrix
from typer.testing import CliRunner

import lowbit_attn
from lowbit_attn import build, compile, emit, kernels, loader, sass, toolchain
from lowbit_attn.formats import FORMATS, Kind
from lowbit_attn.kernels.linear import linear_keys
from lowbit_attn.sass import KernelSass

SHIPPED = list(dict.fromkeys(key for arch in kernels.SHIPPED_TARGETS for key in kernels.shipped_keys(arch)))


def test_names_are_unique_and_every_target_decodes():
    assert len({str(key) for key in SHIPPED}) == len(SHIPPED)
    for arch, targets in kernels.SHIPPED_TARGETS.items():
        assert {key.target for key in SHIPPED if key.op == "decode" and key.arch == arch} == set(targets)


def found(ops: dict[str, int], smem: int = 0) -> KernelSass:
    return KernelSass("k", "sm_80", 100, 0, smem, Counter(ops))


def test_sass_checks_see_what_is_missing():
    kernel = found({"HMMA": 40, "LDSM": 2})
    assert kernel.missing(("HMMA", "LDSM|LDS")) == []
    assert kernel.missing(("HGMMA", "UBLKCP|UTMALDG")) == ["HGMMA", "UBLKCP|UTMALDG"]


@pytest.mark.parametrize("ops, smem, message", [
    ({"HMMA": 1, "LDL": 3}, 0, "LDL x3"), ({}, 0, "no HMMA"),
    ({"HMMA": 1}, 200_000, "limit 166912"), ({"HMMA": 1}, 512, "planned 0"),
])
def test_a_kernel_that_breaks_a_check_is_not_kept(monkeypatch, tmp_path, ops, smem, message):
    key = kernels.decode_key("ampere", "sm_80", "float16", 64, "k4v4", "tile", 8)
    monkeypatch.setattr(kernels, "checks", lambda key: kernels.Checks(("HMMA",), smem_bytes=0))
    monkeypatch.setattr(sass, "inspect", lambda path: [found(ops, smem)])
    path = tmp_path / "k.so"
    path.touch()
    with pytest.raises(compile.KernelCheckError, match=message):
        compile.check(key, path, 0)
    assert not path.exists()


def test_loader_refuses_to_compile_when_told_so(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOWBIT_ATTN_NO_JIT", "1")
    with pytest.raises(loader.KernelNotBuiltError, match="make ampere"):
        loader.load.__wrapped__(kernels.decode_key("ampere", "sm_80", "float16", 64, "k4v4", "register", 8))


def test_a_kernel_that_cannot_be_built_leaves_the_others(monkeypatch):
    keys = [key for key in SHIPPED if key.op == "quantize"][:3]

    def refuse_second(key, force):
        if key == keys[1]:
            raise compile.KernelCheckError(f"{key}: LDL x3")

    monkeypatch.setattr(compile, "build", refuse_second)
    assert build._build_each(keys) == ["", f"KernelCheckError: {keys[1]}: LDL x3", ""]


@pytest.mark.parametrize("name, side", [("k4v4", "k"), ("k2v2", "v"), ("k4tv4", "k")])
def test_targets_of_one_source_share_its_text(monkeypatch, name, side):
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    one, other = (kernels.quantize_key(target, "float16", 64, FORMATS[name], side) for target in ("sm_80", "sm_90"))
    assert emit.same_source(one) == emit.same_source(other)
    monkeypatch.setattr(emit, "_LOWERED", {})
    first = emit._lower(one, kernels.trace(one))
    assert emit._lower(other, None) is first
    emit._LOWERED.clear()
    assert emit._lower(other, kernels.trace(other)).kernel_source == first.kernel_source


def test_decode_kernels_of_two_targets_share_their_text_where_their_sizes_are_the_same(monkeypatch):
    eight, sixty_four = (
        [kernels.decode_key("ampere", target, "float16", 64, "k4v4", "register", rows) for target in ("sm_80", "sm_89")]
        for rows in (8, 64))
    assert len(set(map(emit.source_of, eight))) == 2 and len(set(map(emit.source_of, sixty_four))) == 1
    pytest.importorskip("tilelang", reason="TileLang is not installed")
    monkeypatch.setattr(emit, "_LOWERED", {})
    first, other = sixty_four
    lowered = emit._lower(first, kernels.trace(first))
    emit.hand_on(first, eight[0])
    assert len(emit._LOWERED) == 1, "a kernel of other sizes has a text of its own"
    emit.hand_on(first, other)
    assert emit._lower(other, None) is lowered
    emit._LOWERED.clear()
    assert emit._lower(other, kernels.trace(other)).kernel_source == lowered.kernel_source


def test_the_kernels_of_the_gpu_tests_are_built_by_themselves(monkeypatch):
    """Both architectures' keys of the matrix or of a sample, each once, where every process knows their formats."""
    asked = []
    monkeypatch.setattr(build, "build_and_report", lambda keys, *arguments, **kwargs: asked.append((keys, kwargs)))
    monkeypatch.setattr(windowed, "register", lambda: asked.append("registered"))
    app = typer.Typer()
    app.command()(gpu_build.main)
    fast, sample = ({key for arch in kernels.ARCH_TARGETS for key in keys_of(arch)}
                    for keys_of in (matrix.keys, lambda arch: matrix.sample_keys(arch, 3, 14)))
    for arguments, wanted in (([], fast), (["--seed", "3", "--cases", "14"], sample)):
        asked.clear()
        assert CliRunner().invoke(app, arguments).exit_code == 0
        first, (keys, options) = asked
        assert first == "registered" and options == {"initializer": windowed.register}
        assert len(keys) == len(wanted) and set(keys) == wanted


def test_a_pool_calls_its_initializer_in_every_process(monkeypatch):
    made = {}

    def pool(jobs, **kwargs):
        made.update(kwargs)
        return ThreadPoolExecutor(1)

    monkeypatch.setattr(build, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(compile, "build", lambda key, force: None)
    assert list(build.build_all(SHIPPED[:1], initializer=windowed.register)) == [(SHIPPED[0], "")]
    assert made == {"initializer": windowed.register}


def test_missing_tool_names_the_remedy(monkeypatch):
    monkeypatch.setattr(toolchain, "_tool_folders", lambda: iter(()))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(toolchain.ToolMissingError, match=r"pip install 'cuda-toolkit\[nvcc,cccl\]>=13.0.2,<13.1'"):
        toolchain.find_tool("nvcc")


def test_without_nvcc_the_build_says_so_and_skips(monkeypatch, tmp_path):
    def find_tool(name):
        if name == "nvcc":
            raise toolchain.ToolMissingError(f"nvcc not found; {toolchain.NVCC_REMEDY}")
        return name

    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))
    built = []
    monkeypatch.setattr(toolchain, "find_tool", find_tool)
    monkeypatch.setattr(build, "ProcessPoolExecutor", lambda jobs, **kwargs: ThreadPoolExecutor(1))
    monkeypatch.setattr(compile, "build", lambda key, force: built.append(key))
    monkeypatch.setattr(build, "_table", lambda keys: f"a table of {len(keys)}")
    app = typer.Typer()
    app.command()(build.main)
    answer = CliRunner().invoke(app, ["--arch", "ampere"])
    assert answer.exit_code == 0, answer.output
    shown, others = " ".join(answer.output.split()), linear_keys("sm_80") + linear_keys("sm_89")
    skipped = len(kernels.shipped_keys("ampere")) - len(others)
    assert f"{skipped} TileLang kernels skipped" in shown and "pip install" in shown
    assert set(others) <= set(built) and not any(map(kernels.needs_nvcc, built))
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("key", SHIPPED, ids=str)
def test_built_kernel_has_no_spills_and_fits(key):
    built = compile.find(key)
    if not built:
        pytest.skip("not built here: make hopper, make ampere")
    entry = built.facts
    may_spill = not set(sass.SPILLS) & set(kernels.checks(key).forbid)  # of all checks of its machine code
    assert (entry["spills"] == 0 or may_spill) and 0 < entry["registers"] <= 255
    assert entry["smem_total_bytes"] <= kernels.SMEM_LIMIT_BYTES[key.target]


@pytest.mark.parametrize("key", [k for k in SHIPPED if k.op == "quantize"], ids=str)
def test_built_kernel_checks_its_arguments_before_any_launch(key):
    if not compile.find(key):
        pytest.skip("not built here: make hopper, make ampere")
    pytest.importorskip("tvm_ffi", reason="loading a kernel needs apache-tvm-ffi")
    kernel = loader.load(key)
    side = FORMATS[key.format].specs(key.head_dim)["kv".index(key.variant[0])]
    groups = key.head_dim // max(side.group_size, 1)
    books = [torch.zeros(1, groups, 256 * side.group_size, dtype=torch.float16)] * (side.kind is Kind.CODEBOOK)
    with pytest.raises(Exception, match="dtype"):
        kernel(torch.zeros(1, 1, 128, key.head_dim, dtype=torch.float64), torch.zeros(1, dtype=torch.int32),
               torch.zeros(99, 32, dtype=torch.uint32), torch.zeros(99, 64, dtype=torch.uint16), *books, 1, 1)


def test_why_not_names_what_is_supported():
    cache = lowbit_attn.KVCache("k4v4", 2, 1, 128)
    reason, = lowbit_attn.why_not(cache, 4)
    assert reason == "device: cpu has no kernels, supported: a CUDA device, or path='reference'"
