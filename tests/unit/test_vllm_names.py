"""The plug-in's names, refusals and registration, with no vLLM installed."""

import importlib.metadata
import logging
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lowbit_attn import FORMATS
from lowbit_attn.integrations import vllm as plugin
from lowbit_attn.integrations.vllm import names
from lowbit_attn.integrations.vllm.names import Engine, Layer

ROOT = Path(__file__).parents[2]
LAYER = Layer(head_dim=128, num_heads_kv=8)
NO_KERNELS = {"hopper": set(), "ampere": set()}


def refusal(dtype: str, engine=Engine(), layer=LAYER) -> str:
    return "; ".join(names.why_not(names.parse(dtype), engine, layer))


def test_every_served_dtype_is_a_name_and_is_served():
    for name in names.SERVED:
        served = names.parse(names.dtype_name(name))
        assert served.format.name == name.split("-s")[0]
        for head_dim in (64, 128):
            assert not names.why_not(served, Engine(), Layer(head_dim, 1)), name
    presets = {name for name in FORMATS if not (FORMATS[name].orders_tokens or FORMATS[name].k.weighs_queries)}
    assert presets <= set(names.SERVED), "a preset without an order of tokens that is not served"


def test_names_say_the_sinks():
    for dtype, expected in (("lowbit_k2v2", 0), ("lowbit_k2v2-s32", 32), ("lowbit_kitty", 32), ("lowbit_kitty-s0", 0)):
        assert names.parse(dtype).sinks == expected
    assert names.parse("lowbit_kitty-s0").is_private, "V's window is in the ring"
    assert not names.parse("lowbit_k2v2").is_private
    for dtype, reason in (("k4v4", "supported: lowbit_<format>"), ("lowbit_k5v5", "k5v5"), ("lowbit_lean", "one level"),
                          ("lowbit_k8v4+k4v2", "one level")):
        with pytest.raises(ValueError, match=reason):
            names.parse(dtype)


def test_a_dtype_comes_from_the_flag_or_from_the_variable():
    assert names.asked("lowbit_k4v4", None) == names.asked("auto", "lowbit_k4v4") == names.parse("lowbit_k4v4")
    for flag, variable in (("auto", None), ("lowbit_k4v4", "lowbit_k2v2")):
        with pytest.raises(ValueError, match="supported: one name"):
            names.asked(flag, variable)


@pytest.mark.parametrize("engine,layer,change", [
    (dict(device="xpu"), {}, "device xpu: supported: cpu, cuda"),
    (dict(device="cuda"), {}, "this GPU's compute capability has no kernels, supported: 8.0, 8.9, 9.0"),
    (dict(device="cuda", arch="hopper"), dict(head_dim=32), "head_dim 32, supported: 64, 96, 128, 256"),
    (dict(device="cuda", arch="ampere", dtype=torch.float32), {}, "dtype torch.float32, supported: float16, bfloat16"),
    (dict(block_size=16), {}, "--block-size 16: supported: multiples of 128"),
    (dict(hybrid=False), {}, "drop --disable-hybrid-kv-cache-manager"),
    (dict(layout="LBNHC"), {}, "VLLM_KV_CACHE_LAYOUT=LBNHC: supported: BLHNC, LBHNC"),
    (dict(dcp=2), {}, "--decode-context-parallel-size 2 with --cp-kv-cache-interleave-size 1: supported: 128"),
    (dict(dcp=2, interleave=128, drafts="ngram"), {}, "supported without --speculative-config"),
    (dict(pp=2), {}, "--pipeline-parallel-size 2: not run, supported: 1"),
    (dict(pcp=2), {}, "--prefill-context-parallel-size 2: supported: 1"),
    (dict(connector="NixlConnector"), {}, "--kv-transfer-config with NixlConnector: it was not run with these pages"),
    (dict(drafts="eagle"), {}, "--speculative-config with method eagle: supported: ngram, draft_model"),
    (dict(drafts="draft_model", layout="LBHNC", block_size=1024), {}, "needs VLLM_KV_CACHE_LAYOUT=BLHNC"),
    ({}, dict(sliding_window=64), "--kv-cache-dtype-skip-layers sliding_window"),
    ({}, dict(alibi=True), "ALiBi"),
    ({}, dict(kind="encoder"), "attention of kind encoder: supported: decoder"),
    ({}, dict(shares_kv=True), "a cache for each layer"),
    ({}, dict(head_dim=12), "head_dim"),
])
def test_what_cannot_be_served_says_what_to_change(engine, layer, change):
    assert not refusal("lowbit_k4v4")
    assert change in refusal("lowbit_k4v4", Engine(**engine), Layer(**dict(head_dim=128, num_heads_kv=8) | layer))


@pytest.mark.parametrize("arch", ["hopper", "ampere"])
def test_a_gpu_serves_what_has_kernels(arch):
    """Each name is served or its format's kernels are missing, by name; the defaults of others are served."""
    missing = {}
    for name in names.SERVED:
        for dtype in (torch.float16, torch.bfloat16):
            engine = Engine(device="cuda", arch=arch, dtype=dtype, connector="DecodeBenchConnector")
            if reason := refusal(names.dtype_name(name), engine, Layer(128, 8, num_heads=32)):
                missing[name] = reason
    assert set(missing) <= NO_KERNELS[arch], missing
    assert not refusal("lowbit_k4v4", Engine(device="cuda", arch=arch), Layer(64, 1, num_heads=64))
    for name in NO_KERNELS[arch]:
        assert f"format {name}: no kernel on {arch} reads its codebooks yet" in missing[name]


def test_a_layer_that_stays_in_16_bit_is_not_packed():
    """vLLM gives a layer that --kv-cache-dtype-skip-layers names to this backend with the dtype auto."""
    with pytest.raises(NotImplementedError, match="--kv-cache-dtype-skip-layers: a layer of dtype auto"):
        names.check_dtype("auto", "lowbit_k4v4")
    names.check_dtype("lowbit_k4v4", "lowbit_k4v4")
    names.check_dtype("auto", "auto")  # the variable says the dtype


def test_settings_that_change_the_order_of_steps_and_many_drafts_are_refused():
    served, layer = names.parse("lowbit_k4v4"), names.Layer(128, 8, num_heads=32)
    gpu = dict(device="cuda", arch="hopper", dtype=torch.bfloat16)
    reason, = names.why_not(served, names.Engine(**gpu, unsafe=("--enable-dbo",)), layer)
    assert reason.startswith("--enable-dbo: supported: off")
    reason, = names.why_not(served, names.Engine(**gpu, drafts="ngram", num_drafts=16), layer)
    assert reason == "--speculative-config with 16 drafts: supported on a GPU: up to 15"
    reason, = names.why_not(served, names.Engine(**gpu, drafts="draft_model", num_drafts=15), layer)
    assert reason.endswith("up to 14")
    assert not names.why_not(served, names.Engine(**gpu, drafts="ngram", num_drafts=15), layer)


def test_every_refusal_is_documented():
    text = (ROOT / "docs/serving.md").read_text()
    for flag in ("--block-size", "--no-enable-prefix-caching", "--disable-hybrid-kv-cache-manager", "LBHNC",
                 "--decode-context-parallel-size", "--prefill-context-parallel-size", "--pipeline-parallel-size",
                 "--kv-transfer-config", "--attention-backend", "--speculative-config", "LOWBIT_ATTN_CODEBOOKS",
                 "--tensor-parallel-size", "ALiBi",
                 "--kv-cache-dtype-skip-layers sliding_window", "LOWBIT_ATTN_VLLM"):
        assert flag in text, f"docs/serving.md does not explain {flag}"


def test_blocks_are_dealt_of_formats_without_sinks_windows_and_codebooks():
    dealt = Engine(dcp=2, interleave=128)
    assert not refusal("lowbit_k4v4", dealt) and not refusal("lowbit_k2v2", dealt)
    assert "supported: formats without, as lowbit_k4v4 or lowbit_k2v2-s0" in refusal("lowbit_k2v2-s32", dealt)
    assert "windows in 16 bit are not dealt" in refusal("lowbit_kitty-s0", dealt)
    assert "supported: formats without codebooks" in refusal("lowbit_cq4", dealt)


@pytest.mark.parametrize("dtype", ["lowbit_kitty", "lowbit_k2v2-s32", "lowbit_kitty-s0"])
def test_16_bit_tokens_of_one_sequence_forbid_a_shared_prefix(dtype):
    assert not refusal(dtype)
    assert "pass --no-enable-prefix-caching" in refusal(dtype, Engine(prefix_caching=True))
    assert not refusal("lowbit_k2v2", Engine(prefix_caching=True))
    assert ("or serve lowbit_k2v2-s0" in refusal(dtype, Engine(prefix_caching=True))) == (dtype == "lowbit_k2v2-s32")


def test_formats_that_need_a_calibration():
    assert not refusal("lowbit_cq2") and not refusal("lowbit_cq2", Engine(tp=2, drafts="ngram", num_drafts=3))
    assert "its model has no codebooks, supported: ngram" in refusal("lowbit_cq2", Engine(drafts="draft_model"))
    assert "drop it" in refusal("lowbit_cq2", Engine(skips_layers=True))
    assert "query weights" in refusal("lowbit_kitty-weighted")
    assert "orders tokens" in refusal("lowbit_k4v2-boost")


def test_rows_of_a_draft_model_have_one_more_token():
    assert [Engine(drafts=method, num_drafts=3).max_q_len for method in ("ngram", "draft_model")] == [4, 5]


@pytest.mark.parametrize("name,drafts", [(name, drafts) for name in names.SERVED for drafts in (0, 5)])
def test_blocks_of_one_size_hold_a_ring(name, drafts):
    """Layout LBHNC: the refusal names a block size, and with it the ring has its tokens."""
    served, engine = names.parse(names.dtype_name(name)), Engine(layout="LBHNC", num_drafts=drafts)
    layer = Layer(head_dim=64, num_heads_kv=3)
    reason = "; ".join(names.why_not(served, engine, layer))
    assert "pass --block-size" in reason
    wide = Engine(layout="LBHNC", num_drafts=drafts, block_size=int(reason.split("pass --block-size ")[1].split()[0]))
    assert not names.why_not(served, wide, layer)
    for fitting in (wide, Engine(num_drafts=drafts), Engine(num_drafts=drafts, block_size=384)):
        nbytes = names.ring_bytes(served, fitting, layer)
        assert nbytes % fitting.block_size == 0, "a whole number of bytes for each token of a block"
        tokens = names.ring_tokens(served, nbytes, layer)
        assert tokens - served.sinks >= served.format.window_v + 128 + drafts and (tokens - served.sinks) % 64 == 0


def test_versions_that_were_run():
    cases = {"0.32.0": True, "0.32.1rc2": True, "0.31.0": False, "0.33.0": True, "0.34.0": False, None: False,
             "dev": False}
    for version, expected in cases.items():
        assert plugin.is_tested(version) is expected
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert config["project"]["entry-points"]["vllm.general_plugins"] == {
        "lowbit_attn": "lowbit_attn.integrations.vllm:register"}
    for page in ("README.md", "docs/serving.md"):
        assert "0.32 and 0.33" in (ROOT / page).read_text(), page


def test_another_version_gets_a_warning_and_no_registration(monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.99.0")
    with caplog.at_level(logging.WARNING):
        plugin.register()  # would import vllm next
    assert "vLLM 0.99.0 was not tested with it, supported: 0.32 or newer, below 0.34" in caplog.text


@pytest.fixture
def engine_modules(monkeypatch):
    """Stands for vLLM's registry; the names are those of 0.32 and 0.33."""
    calls = SimpleNamespace(backends=[], dtypes={}, is_cpu=True)
    custom = SimpleNamespace(is_overridden=lambda: any(name == "CUSTOM" for name, _ in calls.backends))
    enum = SimpleNamespace(CPU_ATTN="CPU_ATTN", CUSTOM=custom)

    def register_backend(backend, path):
        calls.backends.append((backend if isinstance(backend, str) else "CUSTOM", path))

    def register_kv_cache_dtype(name):
        return lambda cls: calls.dtypes.setdefault(name, cls)

    parts = {"vllm.platforms": dict(current_platform=SimpleNamespace(is_cpu=lambda: calls.is_cpu)),
             "vllm.v1.attention.backends.registry": dict(AttentionBackendEnum=enum, register_backend=register_backend),
             "vllm.config.cache": dict(register_kv_cache_dtype=register_kv_cache_dtype),
             "vllm.v1.kv_cache_interface": dict(KVQuantMode=SimpleNamespace(CUSTOM="custom"))}
    for name, values in parts.items():
        module = ModuleType(name)
        vars(module).update(values)
        for count in range(1, name.count(".") + 1):
            parent = ".".join(name.split(".")[:count])
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.32.0")
    monkeypatch.delenv(names.VARIABLE, raising=False)
    return calls


def test_registration(engine_modules, monkeypatch):
    calls = engine_modules
    plugin.register()
    plugin.register()
    assert calls.backends == [("CUSTOM", plugin.BACKEND)], "once; a CPU's own stays unless it is asked for ours"
    monkeypatch.setenv(names.VARIABLE, "lowbit_k4v4")
    plugin.register()
    assert ("CPU_ATTN", plugin.BACKEND) in calls.backends
    assert set(calls.dtypes) == set(map(names.dtype_name, names.SERVED))
    assert calls.dtypes["lowbit_k4v4"].name == "lowbit_k4v4" and calls.dtypes["lowbit_k4v4"]().quant_mode() == "custom"
    calls.is_cpu, calls.backends[:] = False, [("CUSTOM", "another plug-in's")]
    plugin.register()
    assert calls.backends[1:] == [("CUSTOM", plugin.BACKEND)], "the variable asks for ours"
    monkeypatch.delenv(names.VARIABLE)
    calls.backends[:] = [("CUSTOM", "another plug-in's")]
    plugin.register()
    assert not calls.backends[1:], "else the other plug-in keeps its own"
    monkeypatch.setenv(names.VARIABLE, "lowbit_k5v5")
    with pytest.raises(ValueError, match="k5v5"):
        plugin.register()
