"""lowbit_attn.bench on a CPU: which plain reads count, by the name of the GPU; what its table shows."""

import pytest

from lowbit_attn import bench, budget
from lowbit_attn.cli import bench as shown
from lowbit_attn.cli import common

MIB = 1 << 20
H200, H100, A100_80, A100_40 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"


def no_read(nbytes: int) -> float:
    raise AssertionError("a GPU of the table is not measured for its floor")


@pytest.mark.parametrize("device, tb_per_s", ((H200, 4.8), (H100, 3.35), (A100_80, 2.039), (A100_40, 1.555)))
def test_memory_rates_are_the_datasheets(device, tb_per_s):
    assert budget.gpu_of_device(device).spec_tb_per_s == tb_per_s


@pytest.mark.parametrize("mib, expected", ((8, 0.0), (16, 0.0), (32, 2.24), (128, 3.25), (2048, 4.49), (8192, 4.49)))
def test_an_h200_must_read_as_measured(mib, expected):
    floor = bench.read_floor(mib * MIB, H200, no_read)
    assert floor.tb_per_s == pytest.approx(0.95 * expected) and "an H200 was measured" in floor.of


@pytest.mark.parametrize("device, tb_per_s", ((H100, 3.35), (A100_80, 2.039), (A100_40, 1.555)))
def test_another_gpu_need_not_read_like_an_h200(device, tb_per_s):
    """Nine tenths of its memory's rate are credible, half of it is not; neither would be on an H200."""
    floor = bench.read_floor(2048 * MIB, device, no_read)
    assert 0.5 * tb_per_s < floor.tb_per_s < 0.9 * tb_per_s < bench.read_floor(2048 * MIB, H200, no_read).tb_per_s
    assert f"{tb_per_s:g} TB/s (datasheet)" in floor.of


@pytest.mark.parametrize("device", ("NVIDIA B300", H100 + " MIG 1g.10gb", "NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB"))
def test_an_unknown_gpu_is_its_own_base(device):
    assert budget.gpu_of_device(device) is None
    asked = []
    floor = bench.read_floor(64 * MIB, device, lambda nbytes: asked.append(nbytes) or nbytes * 1e-6 / 2.0)
    assert asked == [512 * MIB] and floor.tb_per_s == pytest.approx(0.85 * 2.0 * 2.71 / 4.16)
    assert f"2.00 TB/s, this GPU's own read of 512 MiB: {device} is not in the table" in floor.of


def test_the_table_shows_the_faster_read_and_what_is_void(monkeypatch):
    line = dict(format="k4v4", us=20.0, read_us=16.0, hinted_read_us=10.0, bytes=1, fp16_us=60.0, fp16_by="sdpa",
                batch=1, heads=32, kv_heads=8, head_dim=128, seqlen=8192, q_len=1, void=False, floor="95 % of a rate")
    out = common.console()
    monkeypatch.setattr(shown, "console", lambda: out)
    with out.capture() as text:
        shown.show([line, line | dict(format="k2v2", hinted_read_us=17.0, void=True)], "here")
    first, second = (next(row for row in text.get().splitlines() if row.startswith(name)) for name in ("k4v4", "k2v2"))
    assert "2.00" in first and "credible" in first and "1.25" in second and "void" in second
    assert "fastest read" in text.get() and "below 95 % of a rate" in text.get()


@pytest.mark.parametrize("device, is_void", ((H200, True), (H100, False), (A100_80, False), ("NVIDIA B300", False)))
def test_a_run_is_judged_by_the_gpu_it_runs_on(device, is_void, monkeypatch):
    """2 GiB at 2.9 TB/s: slow for an H200, not for an H100."""
    nbytes = 2048 * MIB
    monkeypatch.setattr(bench.torch.cuda, "get_device_name", lambda: device)
    for name, fake in (("query_of", lambda case, cache: None), ("call_bytes", lambda case, cache: nbytes),
                       ("graph_us", lambda step: 900.0), ("fp16_us", lambda *case: (2000.0, "sdpa")),
                       ("read_us", lambda size, policy=bench.PLAIN: (size / 2.9e6, "shape"))):
        monkeypatch.setattr(bench, name, fake)
    line = bench.measure(bench.BenchCase("k4v4", 8, 32, 8, 128, 32768), None, "hopper", None)
    assert line["void"] is is_void and line["read_us"] == line["hinted_read_us"] == round(nbytes / 2.9e6, 2)
    assert (device in line["floor"]) == (device == "NVIDIA B300")
