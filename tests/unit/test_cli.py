"""``lowbit-attn doctor``, ``suggest`` and ``info``, the arithmetic of budget.py, and the facts of environment.py."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lowbit_attn import FORMATS, KVCache, budget, compile, entries, environment, kernels, toolchain
from lowbit_attn.budget import GPUS, LayerGroup, Model
from lowbit_attn.cli import app
from lowbit_attn.environment import Gpu, Tool
from lowbit_attn.formats import levels
from lowbit_attn.levels import FramePool, LevelCache
from lowbit_attn.levels.frames import frame_sizes
from lowbit_attn.testing import normal_codebooks

MODEL = Model(layers=32, num_heads=32, num_heads_kv=8, head_dim=128)
SHAPE = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128")


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "160"})


# ---- budget


@pytest.mark.parametrize("name", (*FORMATS, "k4v4-g32-vg32", "k2tv2"))
@pytest.mark.parametrize("ctx, sinks", [(0, 0), (1, 0), (127, 0), (128, 0), (300, 0), (300, 32), (500, 300)])
def test_size_is_that_of_a_real_cache(name, ctx, sinks):
    books = normal_codebooks(name, 1, 2, 64).layer(0) if FORMATS[name].needs_codebooks else None
    cache = KVCache(name, 8, 2, 64, sinks=sinks, codebooks=books)
    cache.prefill(0, *torch.randn(2, ctx, 2, 64))
    want = budget.sequence_bytes(FORMATS[name], 2, 64, ctx, sinks) + 2 * FORMATS[name].shared_bytes(64)
    assert want == cache.nbytes


def test_sixteen_bit_size():
    assert budget.sequence_bytes(None, 8, 128, 1000) == 1000 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("mib, tb_per_s", [(16, 1.7), (32, 2.24), (64, 2.71), (128, 3.25), (256, 3.77), (512, 4.16),
                                           (2048, 4.49), (8192, 4.49)])
def test_h200_reads_as_measured(mib, tb_per_s):
    nbytes = mib * 2**20
    assert nbytes / GPUS["h200"].read_us(nbytes) * 1e-6 == pytest.approx(tb_per_s, rel=1e-9)


@pytest.mark.parametrize("name", GPUS)
def test_reading_more_takes_longer(name):
    times = [GPUS[name].read_us(2.0**e) for e in range(10, 40)]
    assert times == sorted(times) and len(set(times)) == len(times)
    assert GPUS[name].read_us(GPUS[name].peak_tb_per_s * 1e12) == pytest.approx(1e6)


@pytest.mark.parametrize("batch, ctx, us, format", [
    (1, 8192, 7.5, "k4v4"), (1, 32768, 15.7, "k4v4"), (1, 131072, 43.1, "k4v4"), (8, 32768, 74.8, "k4v4"),
    (1, 131072, 27.2, "k2v2"), (8, 32768, 45.0, "k2v2"), (64, 4096, 74.8, "k4v4"),
])
def test_floor_is_near_the_measured_plain_reads(batch, ctx, us, format):
    """One layer of 32/8 heads: a plain read of the packed bytes, measured in the design study."""
    layer = batch * budget.sequence_bytes(FORMATS[format], 8, 128, ctx)
    assert budget.floor_us(GPUS["h200"], LayerGroup(1, 32, 8, 128), layer) == pytest.approx(us, rel=0.15)


def test_only_measured_rates_are_called_measured():
    assert {name for name, gpu in GPUS.items() if gpu.source == "measured"} == {"h200"}
    assert all(gpu.source == "datasheet" for name, gpu in GPUS.items() if name != "h200")


def test_rows():
    plain, int4 = budget.suggest(MODEL, 131072, 8, GPUS["h100"], ["k4v4"])
    assert plain.format == "16 bit" and plain.bits == 16 and plain.ratio == 1 and plain.reason == ""
    assert plain.cache_gb == pytest.approx(8 * 32 * 131072 * 8 * 128 * 4 / 1e9)
    assert (int4.bits, int4.ratio) == (4.25, pytest.approx(16 / 4.25))
    assert int4.floor_ms == pytest.approx(int4.cache_gb / 3.35, rel=1e-9)  # GB over TB/s is ms
    assert (plain.fits, int4.fits) == (False, True)
    assert (plain.max_batch, int4.max_batch) == (4, 17)
    assert plain.step_ratio is None and int4.step_ratio is None


def test_weights_leave_less_room_and_less_gain():
    with_weights = Model(32, 32, 8, 128, weights_gb=60)
    _, alone = budget.suggest(MODEL, 32768, 4, GPUS["h100"], ["k4v4"])
    _, beside = budget.suggest(with_weights, 32768, 4, GPUS["h100"], ["k4v4"])
    assert beside.max_batch < alone.max_batch and beside.ratio == alone.ratio
    cache_ms, weights_ms = 4 * 32 * 32768 * 8 * 128 * 4 / 3.35e9, 60 / 3.35
    assert beside.step_ratio == pytest.approx((cache_ms + weights_ms) / (cache_ms / alone.ratio + weights_ms))
    assert 1 < beside.step_ratio < alone.ratio
    _, none = budget.suggest(Model(32, 32, 8, 128, weights_gb=90), 32768, 1, GPUS["h100"], ["k4v4"])
    assert none.max_batch == 0 and not none.fits


@pytest.mark.parametrize("ctx, batch, weights, gpu, words", [
    (100, 1, None, "h100", "no full page"), (200, 1, None, "h200", "too small"), (4096, 1, 140.0, "h200", "weights"),
    (131072, 8, 16.0, "h200", ""),
])
def test_where_nothing_is_gained(ctx, batch, weights, gpu, words):
    row = budget.suggest(Model(32, 32, 8, 128, weights), ctx, batch, GPUS[gpu], ["k4v4"])[1]
    assert words in row.reason and bool(words) == bool(row.reason)


def test_many_query_rows_read_a_page_again():
    few, many = (budget.floor_us(GPUS["h100"], LayerGroup(1, heads, 1, 128), 1e9) for heads in (64, 65))
    assert many == 2 * few


def test_a_format_that_does_not_fit_the_head_says_so():
    row = budget.suggest(Model(1, 8, 8, 96), 4096, 1, GPUS["h100"], ["k4v1"])[1]
    assert "multiple of 64 rows" in row.reason and row.cache_gb == 0 and not row.fits


@pytest.mark.parametrize("text, tokens", [("4096", 4096), ("128K", 131072), ("128k", 131072), ("1M", 1048576)])
def test_contexts(text, tokens):
    assert budget.parse_tokens(text) == tokens


@pytest.mark.parametrize("call, words", [
    (lambda: budget.parse_tokens("lots"), "ctx: got 'lots', supported"),
    (lambda: budget.parse_tokens("0"), "ctx: got '0', supported"),
    (lambda: budget.parse_tokens("-5"), "ctx: got '-5', supported"),
    (lambda: budget.gpu_named("b300"), "gpu: got 'b300', supported: h200, h100"),
    (lambda: budget.gpu_named("h20"), "did you mean h200"),
    (lambda: Model(0, 8, 8, 64), "layers: got 0, supported: 1"),
    (lambda: Model(1, 9, 8, 64), "heads: got 9, supported: multiples of kv-heads = 8"),
    (lambda: Model(1, 8, 8, 64, -1.0), "weights-gb: got -1.0, supported: 0"),
    (lambda: budget.suggest(MODEL, 10, 0, GPUS["h100"]), "batch: got 0, supported: 1"),
    (lambda: budget.suggest(MODEL, 10, 1, GPUS["h100"], sinks=-1), "sinks: got -1, supported: 0"),
    (lambda: budget.suggest(MODEL, 10, 1, GPUS["h100"], sinks=1 << 31), "sinks: got 2147483648, supported: 0 to"),
    (lambda: budget.suggest(MODEL, 1 << 40, 1, GPUS["h100"]), "ctx: got 1099511627776, supported: 1 to"),
])
def test_bad_budgets(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


@pytest.mark.parametrize("name", ("H200", "h200", "RTX 4090", "rtx-4090"))
def test_gpu_names(name):
    assert budget.gpu_named(name) in GPUS.values()


# ---- environment


HOPPER = Gpu("NVIDIA H200", "9.0", 150 * 10**9, "hopper", "sm_90a", "")
OLD = Gpu("Tesla V100", "7.0", 16 * 10**9, "", "", "device: compute capability 7.0, supported: 9.0, 8.0, 8.9")
TOOLS = {name: Tool("1.0") for name in ("gcc", "nvcc", "tilelang", "cutedsl", "nvdisasm", "cuobjdump")}


@pytest.mark.parametrize("gpus, tools, built, words", [
    ((), TOOLS, {}, "torch reference on the CPU"),
    ((OLD,), TOOLS, {}, "reference' only: device: compute capability 7.0"),
    ((HOPPER,), TOOLS, {}, "hopper kernels for sm_90a on NVIDIA H200; 0 built, others are built at first use"),
    ((HOPPER,), TOOLS | {"nvcc": Tool(None)}, {"sm_90a": 5}, "the 5 built hopper kernels"),
    ((HOPPER,), TOOLS | {"cutedsl": Tool(None)}, {"sm_80": 5}, "no sm_90a kernels are built, and building needs cute"),
])
def test_what_will_be_used(gpus, tools, built, words):
    assert words in environment.will_use(gpus, tools, built)


def test_missing_tools_come_with_a_remedy(monkeypatch):
    def missing(name):
        raise toolchain.ToolMissingError(f"{name} not found; {toolchain.REMEDIES[name]}")

    monkeypatch.setattr(toolchain, "find_tool", missing)
    monkeypatch.setattr(toolchain, "dsl_version", lambda package: None)
    found = environment.gather()
    assert "pip install 'cuda-toolkit[nvcc,cccl]>=13.0.2,<13.1'" in found.tools["nvcc"].remedy
    assert toolchain.PACKAGE_REMEDY == found.tools["tilelang"].remedy and found.tools["cutedsl"].version is None
    shown = run("doctor").output
    assert "nvcc is missing: pip install" in shown and toolchain.PACKAGE_REMEDY in shown


NO_DSL, NO_NVCC = Tool(None, remedy="pip install dsls"), Tool(None, remedy="pip install nvcc")
TRY = {"cpu": "Try it on the CPU", "gpu": "See what your model gains"}


@pytest.mark.parametrize("gpus, tools, kept, driver, runtime, beginnings", [
    ((HOPPER,), {}, {"built": {"sm_90a": 5}}, "580", "13.0", ("Time it", TRY["gpu"])),
    ((HOPPER,), {}, {}, "580", "13.0", ("Install a kernel wheel of hopper, or build the kernels ahead (make hopper",
                                        "Time it", TRY["gpu"])),
    ((HOPPER,), {"nvcc": NO_NVCC, "tilelang": NO_DSL, "cutedsl": NO_DSL}, {"problem": "not yours"}, "580", "13.0",
     ("The kernel cache cannot be used: not yours", "cutedsl is missing: pip install dsls",
      "nvcc is missing: pip install nvcc", "Install a kernel wheel", "Time it", TRY["gpu"])),
    ((replace(HOPPER, arch="ampere", target="sm_80"),), {"cutedsl": NO_DSL}, {"built": {"sm_80": 1}}, "580", "13.0",
     ("Time it", TRY["gpu"])),
    ((), {}, {}, None, None, (TRY["cpu"],)),
    ((), {"nvcc": NO_NVCC}, {}, "580", None, ("This torch is for CPUs, and a driver is there",
                                              "Only to build kernels here for another machine: nvcc is missing",
                                              TRY["cpu"])),
    ((OLD,), {"nvcc": NO_NVCC}, {}, "580", "13.0", ("Only to build kernels here for another", TRY["cpu"])),
])
def test_what_to_do_next_is_in_order(gpus, tools, kept, driver, runtime, beginnings):
    steps = environment.next_steps(gpus, TOOLS | tools, environment.Kept(**kept), driver, runtime)
    assert len(steps) == len(beginnings)
    for step, beginning in zip(steps, beginnings):
        assert step.startswith(beginning)


def test_doctor_ends_with_what_to_do_next():
    lines = run("doctor").output.strip().splitlines()
    at = lines.index("what to do next, in this order:")
    steps = environment.gather().next_steps
    assert lines[at + 1 :] == [f"  {number}. {step}" for number, step in enumerate(steps, 1)] and steps


def test_a_program_that_does_not_run_is_missing(monkeypatch, tmp_path):
    broken = tmp_path / "program"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_tool", lambda name: str(broken))
    for name, tool in environment.gather().tools.items():
        if name not in environment.DSLS:
            assert tool == Tool(None, str(broken), f"{broken} does not run; {toolchain.REMEDIES[name]}")


@pytest.mark.parametrize("script, version", [("echo 'Cuda compilation tools, release 13.0, V13.0.88'", "13.0.88"),
                                             ("exit 1", None)])
def test_nvcc_is_asked_for_its_version(monkeypatch, tmp_path, script, version):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(toolchain, "find_tool", lambda name: str(nvcc))
    tool = environment.gather().tools["nvcc"]
    assert (tool.version, tool.path) == (version, str(nvcc))
    assert bool(tool.remedy) == (version is None)


def enter(key: kernels.KernelKey, facts: dict | None = None) -> Path:
    """Put an entry into the kernel cache as if the kernel had been built."""
    path = compile.so_path(key)
    entries.make_folders(path.parent)
    built = path.with_suffix(".tmp")
    built.write_bytes(b"binary")
    entries.write(built, path, {
        "name": str(key), "key": asdict(key), "fingerprint": "", "tvm_ffi_abi": "0.1", "function": "f", "sass": {},
        "built_with": compile.versions(key), "smem_bytes": 0, "smem_total_bytes": 777, "registers": 181, "spills": 0,
        "seconds": 1.0} | (facts or {}))
    return path


DECODE = kernels.decode_key("ampere", "sm_80", "float16", 128, "k4v4", "register", 8)


def test_built_kernels_are_counted_by_target(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))
    assert environment.gather().kernels_built == {}
    gone = enter(DECODE).parents[2]
    gone.rename(gone.with_name("old"))  # of other sources
    enter(DECODE)
    enter(replace(DECODE, rows=16), {"key": {"op": "decode", "target": "sm_80", "gone": 1}})  # of another version
    enter(replace(DECODE, dtype="bfloat16"), {"built_with": {"tilelang": "0"}})
    enter(replace(DECODE, rows=64)).unlink()
    enter(replace(DECODE, head_dim=64)).with_suffix(".json").write_text("{")
    monkeypatch.setattr(compile, "versions", lambda key: {"tilelang": "1", "nvcc": "1", "python": "1"})
    enter(replace(DECODE, head_dim=256))
    found = environment.gather()
    assert (found.kernels_built, found.kernels_damaged) == ({"sm_80": 1}, 2)  # by the tools here
    monkeypatch.setattr(compile, "versions", lambda key: {"tilelang": None, "nvcc": None, "python": "3"})
    found = environment.gather()
    assert (found.kernels_built, found.kernels_stale, found.kernels_damaged) == ({"sm_80": 3}, 2, 2)
    assert (found.cache_dir, found.cache_problem) == (str(tmp_path / "kernels"), "")
    assert "3 for sm_80; 2 of other sources or tools; 2 damaged or not trusted" in run("doctor").output


# ---- the commands


def test_doctor():
    result = run("doctor")
    assert result.exit_code == 0
    for words in ("lowbit_attn", torch.__version__, "nvcc", "tilelang", "cutedsl", "kernels", "cache", "will use"):
        assert words in result.output
    shown = json.loads(run("doctor", "--json").output)
    assert shown == json.loads(json.dumps(asdict(environment.gather())))


def test_suggest():
    result = run("suggest", *SHAPE, "--ctx", "128K", "--batch", 8, "--gpu", "h200", "--heads", 32, "--weights-gb", 16)
    assert result.exit_code == 0
    lines = {line.split("  ")[0].strip(): line for line in result.output.splitlines()}
    assert {"16 bit", *FORMATS, *levels.PRESETS} <= lines.keys()
    assert "137.44" in lines["16 bit"] and "36.51" in lines["k4v4"] and "4.25" in lines["k4v4"]
    assert "4.49 TB/s (measured)" in result.output
    assert "datasheet" in run("suggest", *SHAPE, "--ctx", "8K", "--gpu", "a100").output


def test_levels_pay_somewhere_whatever_the_sinks():
    for sinks in (0, 32, 1 << 23, 1 << 30):
        pair = levels.parse("lean")
        found = budget.pays_from(pair, 128, sinks)
        sizes = [(budget.level_bytes(pair, 1, 128, n, sinks), budget.sequence_bytes(pair.high, 1, 128, n, sinks))
                 for n in (found - 128, found)]
        assert sizes[0][0] >= sizes[0][1] and sizes[1][0] < sizes[1][1]


def test_suggest_says_from_which_length_levels_pay():
    short, long = (run("suggest", *SHAPE, "--ctx", ctx, "--sinks", 32, "--format", "lean-low").output
                   for ctx in ("4K", "32K"))
    assert "larger than" in short and "larger than" not in long
    row = budget.suggest(MODEL, 4096, 1, GPUS["h200"], ["lean-low"], sinks=32)[1]
    assert row.reason == "larger than k4v4 below 4,608 tokens: 16-bit buffers" and row.cache_gb
    for shown in (short, long):
        assert "lean-low: 245,760 bytes of 16-bit buffers a KV head, whatever the length; smaller than k4v4" in shown
    refused = run("suggest", *SHAPE, "--ctx", "4K", "--format", "k4tv4+k2v2")
    assert refused.exit_code != 0 and "K per token of 4 bits" in refused.output


@pytest.mark.parametrize("name", ("lean", "lean-low", "k4v4+k2v2-high10"))
@pytest.mark.parametrize("n", (20, 300, 1000))
def test_info_of_levels_says_what_a_cache_holds(name, n):
    """Tokens and bytes are those of a cache after such a prompt."""
    pair, heads, head_dim = levels.parse(name), 2, 64
    sizes = len(frame_sizes(*(fmt.record_bytes(head_dim) for fmt in pair.formats))[1])
    cache = LevelCache(FramePool(name, head_dim=head_dim, frames=(40,) * sizes), heads, max_seqlen=1000)
    free = cache.pool.n_free
    cache.prefill(0, *torch.randn(2, n, heads, head_dim))
    counts = cache.counts_of(0)
    shown = json.loads(run("info", name, "--kv-heads", heads, "--heads", 4, "--head-dim", head_dim, "--seqlen", n,
                           "--json").output)
    tokens = shown["tokens"]
    for part, held in zip(("high", "low", "staged", "pruned"), counts):
        assert (held == tokens[part]).all(), part
    assert tokens["sinks"] == int(cache.n_sink[0]) and sum(tokens.values()) == n
    assert tokens["recent"] == n - tokens["sinks"] - int(cache.n_out[0])
    buffers = sum(getattr(cache, x).nbytes for x in ("hi_k", "hi_v", "lo_k", "lo_v", "ring_k", "ring_v"))
    assert heads * shown["buffer_bytes"] == buffers
    taken = sum((one - two) * size for one, two, size in zip(free, cache.pool.n_free, cache.pool.frame_bytes))
    assert 0 <= shown["layer_bytes"] - buffers - taken <= 2 * heads * sum(cache.pool.frame_bytes)
    assert "a KV head" in run("info", name, "--seqlen", n).output


def test_suggest_json():
    shown = json.loads(run("suggest", *SHAPE, "--ctx", "128K", "--batch", 8, "--gpu", "h100", "--format", "k4v4",
                           "--format", "k2v2-g32", "--json").output)
    assert [row["format"] for row in shown["rows"]] == ["16 bit", "k4v4", "k2v2-g32"]
    assert (shown["ctx"], shown["batch"], shown["read_source"]) == (131072, 8, "datasheet")
    want = budget.suggest(Model(32, 8, 8, 128), 131072, 8, GPUS["h100"], ["k4v4"])[1]
    assert shown["rows"][1] == json.loads(json.dumps(asdict(want)))


@pytest.mark.parametrize("args, words", [
    (("--ctx", "128K", "--gpu", "b300"), "supported: h200, h100, a100, a10040gb, l40s, rtx4090"),
    (("--ctx", "128K", "--format", "k4v5"), "did you mean k4v4"),
    (("--ctx", "many"), "ctx: got 'many'"),
    (("--ctx", "1K", "--heads", "9"), "heads: got 9"),
    (("--ctx", "1K", "--batch", "0"), "'--batch': Input should be greater than or equal to 1"),
    (("--ctx", "1K", "--sinks", "9" * 20), f"sinks: got {'9' * 20}, supported: 0 to"),
    (("--ctx", "9" * 30), "ctx: got"),
])
def test_suggest_refuses(args, words):
    result = run("suggest", *SHAPE, *args)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


@pytest.mark.parametrize("call", json.loads(budget.MEASURED.read_text())["calls"], ids=str)
def test_measured_calls_come_back(call):
    """A model of one layer in the shape of a measured call takes the measured time."""
    model = Model(1, call["heads"], call["kv_heads"], call["head_dim"])
    gpu = next(gpu for gpu in GPUS.values() if gpu.name == call["gpu"])
    row = budget.suggest(model, call["seqlen"], call["batch"], gpu, [call["format"]])[1]
    assert row.measured_ms == pytest.approx(call["us"] * 1e-3) and row.measured_ms > row.floor_ms
    assert call["rows"] == call["heads"] // call["kv_heads"] and len(call["commit"]) == 12


def test_what_was_not_measured_has_no_time():
    for model, gpu, name in ((MODEL, "a100", "k4v4"), (MODEL, "h200", "k1v1"), (Model(1, 8, 8, 64), "h200", "k4v4"),
                             (Model(1, 128, 8, 128), "h200", "k4v4")):
        assert budget.suggest(model, 32768, 1, GPUS[gpu], [name])[1].measured_ms is None
    # less than the smallest call has none, much takes time in proportion to the largest
    small, large, larger = (budget.suggest(MODEL, ctx, batch, GPUS["h200"], ["k4v4"])[1].measured_ms
                            for ctx, batch in ((4096, 1), (131072, 16), (131072, 32)))
    assert small is None and larger == pytest.approx(2 * large, rel=0.01)


@pytest.mark.parametrize("ratio", range(1, 17))
def test_a_time_is_of_as_many_query_rows_as_asked(ratio, monkeypatch):
    """Each ratio's calls have a time of their own; no other is ever shown, and where there is none it says so."""
    like = json.loads(budget.MEASURED.read_text())["calls"][0] | {"format": "k4v4", "seqlen": 8192, "batch": 1}
    calls = [like | {"rows": rows, "heads": 8 * rows, "us": 1000.0 + rows} for rows in (1, 4, 7)]
    monkeypatch.setattr(budget, "_calls", lambda: {"date": "2000-01-01", "calls": calls})
    model = Model(1, 8 * ratio, 8, 128)
    found = budget.suggest(model, 8192, 1, GPUS["h200"], ["k4v4"])[1].measured_ms
    assert found == (pytest.approx(1 + ratio * 1e-3) if ratio in (1, 4, 7) else None)
    shown = run("suggest", *SHAPE[2:], "--layers", 1, "--heads", 8 * ratio, "--ctx", "8K", "--format", "k4v4")
    assert (f"no call of {ratio} query rows" in shown.output) == (found is None)
    assert (f"{1 + ratio * 1e-3:.3f}" in shown.output) == (found is not None)


def test_info_shows_the_dispatchers_pick():
    shown = json.loads(run("info", "k4v4", "--arch", "hopper", "--heads", 64, "--q-len", 8, "--json").output)
    want, _ = kernels.pick("hopper", FORMATS["k4v4"], 128, torch.float16, 64)
    one, = shown["served"]
    assert (one["path"], one["kernel_rows"]) == want and one["passes"] == 1 and one["target"] == "sm_90a"
    assert shown["record_bytes"] == 17408 and shown["bytes_per_token"] == 8 * 17408 / 128
    assert [(p["side"], p["name"], p["offset"], p["bytes"]) for p in shown["planes"]] == [
        ("K", "codes", 0, 8192), ("K", "meta", 8192, 512), ("V", "codes", 8704, 8192), ("V", "meta", 16896, 512)]
    many, = json.loads(run("info", "kitty", "--arch", "hopper", "--heads", 64, "--q-len", 8, "--json").output)["served"]
    assert many["passes"] == 64 // many["kernel_rows"] > 1


def test_info_reads_the_entry(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))
    enter(DECODE)
    built, other = json.loads(run("info", "k4v4", "--arch", "ampere", "--json").output)["served"]
    assert (built["is_built"], built["registers"], built["smem_bytes"]) == (True, 181, 777)
    assert (other["target"], other["is_built"], other["registers"]) == ("sm_89", False, None)
    assert "181" in run("info", "k4v4").output


@pytest.mark.parametrize("args, words", [
    (("k4v5",), "did you mean k4v4"), (("k4v1", "--head-dim", "96"), "multiple of 64 rows"),
    *((("k4v4", f"--{name}", value), f"{name}: got {value}, supported: 1 or more") for name in ("batch", "seqlen")
      for value in ("0", "-1")),
    (("k4v4", "--heads", "9"), "heads: got 9"), (("k4v4", "--q-len", "17"), "q-len: got 17, supported: 1 to 16"),
    (("k4v4", "--arch", "volta"), "arch: got volta, supported: hopper, ampere"),
    (("k4v4", "--feature", "alibi"), "feature: got alibi, supported: softcap, window"),
    (("k4v4", "--dtype", "float8"), "dtype: got float8, supported: float16, bfloat16"),
])
def test_info_refuses(args, words):
    result = run("info", *args)
    assert result.exit_code == 2 and words in result.output and "Traceback" not in result.output


def test_info_says_why_not():
    for args, words in ((("kitty", "--path", "tile"), "hopper tile path: format kitty, supported"),
                        (("k4v4", "--path", "fast"), "path: 'fast' is not known on hopper, supported: "),
                        (("k4v4", "--head-dim", "32"), "head_dim 32, supported: 64, 96, 128, 256")):
        shown = run("info", "--arch", "hopper", *args).output
        assert "sm_90a: not served" in shown and words in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_bench_needs_a_gpu():
    result = run("bench", "--format", "k4v4")
    assert result.exit_code == 1 and "bench: needs a CUDA device" in result.output
    assert "did you mean" in run("bench", "--format", "k4v5").output


def test_the_entry_point_is_installed():
    program = Path(sys.executable).parent / "lowbit-attn"
    answer = subprocess.run([program, "suggest", *SHAPE, "--ctx", "8K"], capture_output=True, text=True)
    assert answer.returncode == 0 and "k4v4" in answer.stdout
