"""perf/peers.py: on the CPU, peers that run there are right over their own values; the others say why they are not."""

import json
import re
import sys

import pytest
import torch
import typer
from perf_scripts import PERF, script
from typer.testing import CliRunner

pytest.importorskip("transformers")

SHAPE = "2,8,2,64,320"


@pytest.fixture(scope="module")
def peers():
    with script("peers") as module:
        yield module


@pytest.fixture(scope="module")
def case(peers):
    return sys.modules["peer_case"]


def measured(peers, name: str) -> dict:
    return peers.measured(name, peers.Shape.parse(SHAPE), "cpu")


@pytest.mark.parametrize("name, least", [("sdpa math", 16), ("sdpa flash", 16), ("kivi-like 4", 4.9),
                                         ("kivi-like 2", 2.9), ("lowbit k4v4", 4.3), ("lowbit k2v2", 2.3)])
def test_peers_of_a_cpu(peers, name, least):
    """Errors are of fp16 arithmetic, whatever the format loses; times are marked as a CPU's."""
    line = measured(peers, name)
    assert line["launch"] == "cpu" and line["us"] > 0 and "read_us" not in line
    assert 1e-5 < line["error"] < 1e-3
    assert least <= 8 * line["bytes"] / (2 * 2 * 2 * 320 * 64) <= 16


@pytest.mark.parametrize("backend, module", [("quanto", "optimum.quanto"), ("hqq", "hqq")])
@pytest.mark.parametrize("bits", [4, 2])
def test_quantized_caches_of_transformers(peers, backend, module, bits):
    pytest.importorskip(module)
    line = measured(peers, f"transformers {backend} {bits}")
    assert line["error"] < 1e-3 and bits <= 8 * line["bytes"] / (2 * 2 * 2 * 320 * 64) < bits + 1.5
    assert "every 128th step" in line["note"]


GPU_ONLY = ["flashinfer fp16", "flashinfer fp8", "flashinfer nvfp4", "flash-attn 4", "flash-attn 2",
            "vllm int4_per_token_head", "vllm turboquant_k8v4", "vllm turboquant_4bit_nc", "vllm turboquant_3bit_nc"]


@pytest.mark.parametrize("name", GPU_ONLY)
@pytest.mark.skipif(torch.cuda.is_available(), reason="they may run")
def test_peers_of_a_gpu_say_that_they_need_one(peers, name):
    line = measured(peers, name)
    assert line["reason"] == "torch sees no CUDA device" and "us" not in line and line["seqlen"] == 320


def test_a_peer_that_is_not_installed_says_so(peers, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("flashinfer", "flash_attn", "flash_attn.cute", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in GPU_ONLY:
        assert "cannot be imported" in measured(peers, name)["reason"]


def test_ways_that_do_not_run_are_named_beside_those_that_do(peers, case):
    attention, q = sys.modules["peer_attention"], torch.zeros(1, 1, 8)

    def step(value: int):
        if value % 2:
            raise RuntimeError(f"odd {value}\nmore")
        return case.Step(lambda: q, q, q, 0, note=f"n: {value}")

    found = attention.those_that_run(step, (1, 2, 4), "n")
    assert [one.note for one in found] == [f"n: {n}; not with n 1: RuntimeError: odd 1" for n in (2, 4)]
    with pytest.raises(case.Unavailable, match="not with n 1: RuntimeError: odd 1; not with n 3"):
        attention.those_that_run(step, (1, 3), "n")


def test_an_error_is_seen(case):
    """A step that reads other values than it says it keeps."""
    shape = case.Shape.parse(SHAPE)
    data = case.data_of(shape, "cpu")

    def call(k=data.k):
        return torch.stack([case.attention_fp64(q, *kv) for q, *kv in zip(data.q, k, data.v)])

    exact = case.Step(call, data.k, data.v, 0)
    assert case.error_of(exact, data.q) < 1e-12
    assert case.error_of(case.Step(lambda: call(data.k.roll(1, 2)), data.k, data.v, 0), data.q) > 0.5
    with pytest.raises(RuntimeError, match="o: got shape"):
        case.error_of(case.Step(lambda: data.q[:1], data.k, data.v, 0), data.q)


@pytest.mark.parametrize("nbits", [4, 2])
def test_kivis_codes_lose_at_most_half_a_step(peers, nbits):
    caches = sys.modules["peer_caches"]
    x = torch.randn(1, 2, 64, 96).half()
    codes, scale, low = caches._quantized(x, nbits)
    assert codes.dtype == torch.uint8 and codes.numel() == x.numel() * nbits // 8
    gone = (caches._dequantized(codes, scale, low, nbits) - x).unflatten(-1, (-1, 32)).abs()
    assert (gone <= 0.51 * scale + 4e-3).all() and gone.max() > 0


def test_nvfp4_has_the_nearest_of_its_values(peers):
    """Of a group all 16 codes are tried: none is nearer than the one that is taken."""
    attention = sys.modules["peer_attention"]
    x = torch.randn(3, 5, 64).half()
    x[0, 0, :16] = 0
    found = attention.nvfp4(x)
    assert found.codes.shape == (3, 5, 32) and found.scales.shape == (3, 5, 4) and found.values.shape == x.shape
    every = torch.tensor([*attention.E2M1, *(-level for level in attention.E2M1)])
    codes = torch.stack((found.codes & 15, found.codes >> 4), -1).flatten(-2).long()
    scales = found.scales.float().repeat_interleave(16, -1)
    assert torch.equal(found.values, (every[codes] * scales).half())
    gone = (every * scales[..., None] - x.float()[..., None]).abs()
    assert torch.allclose((found.values.float() - x.float()).abs(), gone.amin(-1), atol=2e-3)
    assert (found.values[0, 0, :16] == 0).all()


def test_a_process_that_dies_is_a_line_with_its_reason(peers, monkeypatch):
    other = "1,2,2,64,256"
    found = peers.in_a_process("sdpa math", [SHAPE, other], "cpu")
    assert [line["seqlen"] for line in found] == [320, 256] and all(line["error"] < 1e-3 for line in found)
    lines = peers.in_a_process("sdpa math", [SHAPE, other], "no-such-device")
    assert all(line["reason"].startswith("ended with 1: ") for line in lines)
    assert [line["batch"] for line in lines] == [2, 1]
    (line,) = peers.in_a_process("nobody", [SHAPE], "cpu")
    assert line["reason"].startswith("ended with 1: KeyError")
    monkeypatch.setattr(peers, "LIMIT_S", 0.01)
    assert peers.in_a_process("sdpa math", [SHAPE], "cpu")[0]["reason"] == "no answer in 0.01 s"


@pytest.mark.parametrize("text", ["1,2,3", "8,32,5,128,1024", "0,32,8,128,1024", "a,b,c,d,e"])
def test_shapes_are_checked(case, text):
    with pytest.raises(ValueError, match="shape: got"):
        case.Shape.parse(text)


def test_run_needs_a_gpu_or_dry(peers, tmp_path, monkeypatch):
    answer = CliRunner().invoke(peers.app, ["run", "--peer", "nobody"], env={"COLUMNS": "160"})
    assert answer.exit_code == 2 and "nobody" in answer.output
    if not torch.cuda.is_available():
        with pytest.raises(typer.BadParameter, match="needs a CUDA device"):
            peers.run(list(peers.SHAPES), [], False, str(tmp_path / "none"))
    monkeypatch.setattr(peers, "in_a_process", lambda name, shapes, device: [measured(peers, name)])
    answer = CliRunner().invoke(peers.app, ["run", "--dry", "--peer", "sdpa math", "--peer", "flash-attn 2",
                                            "--output", str(tmp_path / "none")])
    assert answer.exit_code == 0 and "no times of a GPU" in answer.output and not list(tmp_path.iterdir())


def test_table_has_the_newest_line_of_each(peers, tmp_path, capsys):
    shape = peers.Shape.parse(SHAPE).line
    line = dict(gpu="G", commit="a", peer="sdpa math", us=10.0, read_us=5.0, bytes=2e6, error=2e-4, launch="graph")
    lines = [line | shape | {"us": 99.0}, line | shape,
             {"gpu": "G", "commit": "b", "peer": "x", "reason": "none"} | shape]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    peers.table(str(path))
    out = capsys.readouterr().out
    assert "2.00" in out and "99.0" not in out and "G, commits a, b" in out and "none" in out


def test_the_docs_have_the_newest_lines(peers, capsys):
    peers.table(peers.RESULTS, as_markdown=True)
    text = (PERF.parent / "docs/performance.md").read_text()
    shown = re.search(r"<!-- peers: begin .*?-->\n(.*?)\n<!-- peers: end -->", text, re.DOTALL)[1]
    assert capsys.readouterr().out.strip() == shown, "put the table of python perf/peers.py table --markdown there"
