"""perf/bench.py's cases, perf/roofline.py's counts and perf/plots.py's plots, on a CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch
import typer

from lowbit_attn import FORMATS, KVCache, kernels
from lowbit_attn import bench as timing
from lowbit_attn.bench import BenchCase, cache_tokens
from lowbit_attn.budget import GPUS, MEASURED

sys.path.append(str(Path(__file__).parents[2] / "perf"))
import measured  # noqa: E402
import plots  # noqa: E402
import roofline  # noqa: E402
import stalls  # noqa: E402
import targets_table  # noqa: E402
from bench import PRESETS  # noqa: E402
from decode_results import newest, path_of, read_lines  # noqa: E402
from page_loop import PageLoop, find_loop  # noqa: E402

CASES = [case for cases in PRESETS.values() for case in cases]
RAGGED = BenchCase("k4v4", 3, 8, 2, 64, 640, ragged=(256, 1024))


def test_suggest_shows_the_newest_measurements():
    assert measured.text_of(measured.calls()) == MEASURED.read_text(), "run python perf/measured.py"


def test_ragged_lengths_have_the_sum():
    for case in (PRESETS["targets"][7], PRESETS["targets"][15], RAGGED):
        low, high = case.ragged
        assert len(case.lengths) == case.batch and sum(case.lengths) == case.batch * case.seqlen
        assert (min(case.lengths), max(case.lengths)) == (low, high) and len(set(case.lengths)) > 2
        assert case.lengths == BenchCase.from_line(case.line).lengths and f"L{low}-{high}" in str(case)
    assert PRESETS["targets"][7].lengths != tuple(sorted(PRESETS["targets"][7].lengths))
    assert BenchCase("k4v4", 2, 8, 2, 64, 512).lengths == (512, 512)


@pytest.mark.parametrize("batch, seqlen, ragged", ((1, 512, (256, 1024)), (3, 256, (256, 1024)), (2, 512, (256, 1024)),
                                                   (3, 500, (256, 1024)), (3, 512, (1024, 256))))
def test_impossible_lengths_are_refused(batch, seqlen, ragged):
    with pytest.raises(ValueError, match="ragged: got .* supported: multiples of 128"):
        BenchCase("k4v4", batch, 8, 2, 64, seqlen, ragged=ragged)


def test_every_case_has_kernels_and_a_line_of_its_own():
    assert len(PRESETS["targets"]) == 16 and len(PRESETS["lengths"]) == 16 and len(PRESETS["formats"]) == 12
    for case in CASES:
        assert BenchCase.from_line(case.line) == case and hash(case) == hash(BenchCase.from_line(case.line))
        for arch in kernels.ARCH_TARGETS:
            grid = roofline.launch(case, arch, 132)
            assert grid is not None and grid.row_blocks * grid.key.rows >= case.rows, (str(case), arch)
    early = PRESETS["first"][0].line
    del early["dtype"]
    assert BenchCase.from_line(early) == PRESETS["first"][0]
    for preset in PRESETS.values():
        assert len({str(case) for case in preset}) == len(preset)


@pytest.mark.parametrize("case, sinks", (
    (BenchCase("k4v4", 2, 8, 2, 64, 512), 0), (BenchCase("k2v2-g32", 1, 4, 2, 128, 384, 4), 0), (RAGGED, 0),
    (BenchCase("k4v2", 2, 4, 4, 96, 512, dtype="bfloat16"), 32), (BenchCase("kitty", 2, 4, 2, 128, 512), 32),
), ids=str)
def test_bytes_are_the_cache_s(case, sinks):
    lengths = [cache_tokens(n) for n in case.lengths]
    cache = KVCache(case.format, sum(lengths) // 128, case.num_heads_kv, case.head_dim, getattr(torch, case.dtype),
                    sinks=sinks, max_batch=case.batch, max_seqlen=max(lengths), max_q_len=case.q_len)
    for row, length in enumerate(lengths):
        cache.prefill(row, *torch.randn(2, length, case.num_heads_kv, case.head_dim))
    found = roofline.traffic(case, 1, sinks)
    sides = {name: nbytes for name, nbytes in found.items() if name[:2] in ("k ", "v ")}
    assert sum(sides.values()) + found["16-bit tokens"] == cache.nbytes
    record = FORMATS[case.format].record(case.head_dim)
    for side, planes, packed in (("k", record.k_planes, cache.n_qk), ("v", record.v_planes, cache.n_qv)):
        pages = int(packed.sum()) // 128
        for plane in planes:
            assert sides[f"{side} {plane.name}"] == pages * case.num_heads_kv * plane.nbytes
    assert found["page table"] == cache.table.element_size() * int((cache.table >= 0).sum())
    assert found["q"] == found["o"] == case.batch * case.q_len * case.num_heads * case.head_dim * 2
    assert roofline.packed(case, max(lengths) - sinks)[0] == cache.table.shape[1]


@pytest.fixture
def timing_on_cpu(monkeypatch):
    """lowbit_attn.bench with the cache and the tensors of its calls on a CPU, and no timer."""
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device=None, **rest: randn(*shape, **rest))
    monkeypatch.setattr(timing, "KVCache", lambda *shape, **rest: KVCache(*shape[:5], "cpu", **rest))
    monkeypatch.setattr(timing, "graph_us", lambda step: step() and 2.0)
    monkeypatch.setattr(timing, "read_us", lambda nbytes, policy=timing.PLAIN: (1.0, "none"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(timing, "fp16_us", lambda *case: (3.0, "none"))


@pytest.mark.parametrize("case", (RAGGED, BenchCase("k2v2", 2, 4, 2, 64, 384, dtype="bfloat16")), ids=str)
def test_a_case_is_measured_over_its_own_cache(case, timing_on_cpu):
    cache = timing.make_cache(case)
    assert cache.n_tok.tolist() == [n - 64 for n in case.lengths] and str(cache.dtype) == f"torch.{case.dtype}"
    assert (cache.n_tok - cache.n_qk).tolist() == [64] * case.batch and cache.num_pages == int(cache.n_qk.sum()) // 128
    line = timing.measure(case, cache, "hopper", None)
    found = roofline.traffic(case, 1)
    rest = ("lse", "page table", "counters", "partial results")
    assert line["bytes"] == sum(nbytes for name, nbytes in found.items() if name not in rest)
    assert BenchCase.from_line(json.loads(json.dumps(line))) == case and line["us"] == 2.0
    assert ("equal lengths" in line.get("note", "")) == (case is RAGGED)


def test_partial_results_are_those_of_several_splits():
    case = PRESETS["targets"][0]
    grid = roofline.launch(case, "hopper", 132)
    assert (kernels.path_name(grid.key), grid.splits, grid.row_blocks) == ("integer", 8, 1)
    assert roofline.traffic(case, 8)["partial results"] == 2 * 8 * 32 * (128 + 1) * 4
    assert roofline.traffic(case, 1)["partial results"] == 0
    assert roofline.launch(PRESETS["targets"][7], "hopper", 132).splits == 1
    assert roofline.launch(BenchCase("k4v4", 1, 8, 8, 128, 128 * 13), "hopper", 132).splits == 2  # a cluster
    wide = BenchCase("k4v4", 1, 8, 8, 256, 128 * 13)  # too wide for clusters
    assert roofline.launch(wide, "hopper", 132).splits == 3  # of 4 pages each


def test_every_page_is_on_some_sm():
    for case, is_even in ((PRESETS["targets"][4], False), (PRESETS["targets"][7], True)):
        grid = roofline.launch(case, "hopper", 132)
        assert roofline.kernels.is_even(grid.key) == is_even
        pages = case.num_heads_kv * sum(cache_tokens(n) // 128 for n in case.lengths)
        load = roofline.pages_by_sm(case, grid, 132)
        assert len(load) == 132 and pages / 4 <= sum(load) < 1.1 * pages / 4
    assert roofline.scheduler_pages(31, 12, False) == 3 + 3 + 2 and roofline.scheduler_pages(5, 4, True) == 5
    assert roofline.scheduler_pages(5, 2, False) == 3


def test_prediction_is_the_larger_bound_and_the_fixed_costs():
    case, gpu = PRESETS["targets"][4], GPUS["h200"]
    grid = roofline.launch(case, "hopper", 132)
    light, heavy, unknown = (roofline.predict(case, grid, gpu, 132, 1.75, 5.5, loop)
                             for loop in (PageLoop(900, 64), PageLoop(9000, 64), None))
    assert light.us == unknown.us == light.read_us + 5.5 == gpu.read_us(light.nbytes) + 5.5 > 75
    assert heavy.us == heavy.issue_us + 5.5 and heavy.issue_us == pytest.approx(10 * light.issue_us)
    assert unknown.issue_us is None and unknown.busiest == light.busiest == pytest.approx(132 / 128)


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0020*/              @!P0 BRA `(.L_x_1) ;
        /*0030*/               @P1 EXIT ;
        /*0040*/                   IMMA.16832.U8.S8 R4, R8.ROW, R10.COL, R4 ;
        /*0050*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0060*/                   NOP ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
.L_x_2:
        /*0080*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0090*/              @!P0 BRA `(.L_x_2) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*00c0*/                   BRA `(.L_x_1) ;
"""


NESTED = """
.L_x_1:
        /*0010*/                   MOV R1, R2 ;
.L_x_2:
        /*0020*/                   IMMA.16832.U8.S8 R4, R8.ROW, R10.COL, R4 ;
        /*0030*/                   IMMA.16832.U8.S8 R4, R8.ROW, R10.COL, R4 ;
        /*0040*/              @!P0 BRA `(.L_x_2) ;
        /*0050*/                   HMMA.16816.F32 R4, R8, R10, R4 ;
        /*0060*/               @P2 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
"""


def test_page_loop_is_the_one_that_multiplies_a_page():
    for codes in (2, 5):
        assert find_loop(SASS, codes) == PageLoop(instructions=6, multiplies=2)
    assert find_loop(NESTED, 2) == PageLoop(instructions=3, multiplies=2), "a loop over items is around it"
    assert find_loop(NESTED, 3) == PageLoop(instructions=6, multiplies=3), "one with fewer is of something else"
    with pytest.raises(ValueError, match="no loop"):
        find_loop(SASS.replace("MMA", "FMA"), 2)


def test_roofline_shows_the_newest_measured_time(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOWBIT_ATTN_CACHE_DIR", str(tmp_path))  # nothing is built there
    results = write(tmp_path, lines_of("lengths", us=100.0) + lines_of("lengths", us=50.0, commit="newer"))
    roofline.main("lengths", results=results)
    shown = capsys.readouterr().out
    assert shown.count("newer") == 16 and "first" not in shown and shown.count("integer r4") == 16
    with pytest.raises(typer.BadParameter, match="'none', supported: first"):
        roofline.main("none")


def lines_of(preset: str, us: float = 20.0, commit: str = "first", gpu: str = "NVIDIA H200") -> list[dict]:
    """Invented lines of all cases, each a little slower than the one before."""
    about = dict(commit=commit, date="2026-11-22T00:00", gpu=gpu, arch="hopper", void=False)
    return [about | case.line | dict(path=path_of(case, "hopper"), us=us + i, read_us=0.8 * us, fp16_us=3 * us)
            for i, case in enumerate(PRESETS[preset])]


def write(folder: Path, lines: list[dict]) -> str:
    file = folder / "decode.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_newest_is_of_the_path_that_is_taken():
    lines = lines_of("targets")
    tile = lines[0] | dict(path="tile")
    assert newest([*lines, tile], PRESETS["targets"][0]) == lines[0] and newest([tile], PRESETS["targets"][0]) is None


def test_plots_are_of_the_newest_complete_commit(tmp_path):
    pytest.importorskip("matplotlib")
    old, new = (lines_of("lengths", us, commit) for us, commit in ((20.0, "first"), (10.0, "second")))
    lines = old + new + new[:3] + lines_of("lengths", 1.0, "third")[1:] + lines_of("targets", commit="third")
    found = plots.complete(lines, PRESETS["lengths"], None)
    assert [line["us"] for line in found] == [10.0 + i for i in range(16)]
    axes, = (figure := plots.lengths_figure(found)).axes
    assert "NVIDIA H200" in figure.get_suptitle() and "commit second" in figure.get_suptitle()
    assert "(us)" in axes.get_ylabel()
    curves = {curve.get_label(): list(curve.get_ydata()) for curve in axes.get_lines()}
    assert curves["k2v2"] == [18.0 + i for i in range(8)] and set(curves["plain read of k4v4's bytes"]) == {8.0}
    assert set(curves["16 bit"]) == {30.0} and len(curves) == 5
    bars, = plots.targets_figure(lines_of("targets")).axes[0].containers
    assert [bar.get_width() for bar in bars] == [pytest.approx(16 / (20 + i)) for i in range(16)]
    plots.main(results=write(tmp_path, lines), folder=str(tmp_path / "plots"))
    for name in ("lengths", "targets"):
        assert (tmp_path / "plots" / f"decode-{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / "plots" / f"decode-{name}.svg").read_text()


def test_read_is_the_faster_one_or_says_that_it_is_plain():
    pytest.importorskip("matplotlib")
    early = lines_of("targets")
    both = [line | {"hinted_read_us": line["read_us"] * (1.1 if i % 2 else 0.9)} for i, line in enumerate(early)]
    reads, name = timing.fastest_reads(both)
    assert reads == [16.0 * (1 if i % 2 else 0.9) for i in range(16)] and name == "read"
    assert timing.fastest_reads([*both[:15], early[15]]) == ([16.0] * 16, "plain read")
    for lines, words in ((both, "of the fastest read"), (early, "of a plain read")):
        axes, = plots.targets_figure(lines).axes
        want = [read / line["us"] for read, line in zip(timing.fastest_reads(lines)[0], lines)]
        assert words in axes.get_xlabel() and [bar.get_width() for bar in axes.containers[0]] == pytest.approx(want)
    lengths = [line | {"hinted_read_us": 7.0} for line in lines_of("lengths")]
    labels = [curve.get_label() for curve in plots.lengths_figure(lengths).axes[0].get_lines()]
    assert "read of k4v4's bytes" in labels and not any("plain" in label for label in labels)


def test_table_of_targets_is_of_the_fastest_read():
    lines = [line | {"hinted_read_us": 8.0 + i} for i, line in enumerate(lines_of("targets"))]
    rows = targets_table.table_of(lines).splitlines()
    assert len(rows) == 2 + 8 and rows[0] == "| case: us, x 16 bit, x read | 16 bit | k4v4 | k2v2 |"
    assert rows[2] == "| GQA 32/8, batch 1, 8K | 60.0 us | 20.0 us, 3.0x, 2.50 | 28.0 us, 2.1x, 1.75 |"
    assert rows[9].startswith("| GQA 32/8, batch 64, ragged 1K to 16K | 60.0 us | 27.0 us, 2.2x, 1.80 |")
    assert all(row.count("|") == 5 for row in rows)
    early = targets_table.table_of([line | {"void": True} for line in lines_of("targets")])
    assert "x plain read" in early and "20.0 us, 3.0x, 1.25 (void)" in early


def test_table_of_targets_has_kittys_columns_of_one_commit(tmp_path, monkeypatch):
    lines = lines_of("targets") + lines_of("kitty", us=10.0, commit="second")
    monkeypatch.setattr(targets_table, "read_lines", lambda gpu: lines)
    found = targets_table.lines_at("h200", "first", "second")
    rows = targets_table.table_of(found).splitlines()
    assert len(found) == 16 + 4 and rows[0].endswith("x plain read | 16 bit | k4v4 | k2v2 | kitty | kitty-pro |")
    assert len(rows) == 2 + 8 and rows[2].endswith("| - | - |")
    assert rows[6].startswith("| GQA 32/8, batch 8, 32K |")
    assert rows[6].endswith("| 11.0 us, 2.7x, 1.38 | 12.0 us, 2.5x, 1.50 |")
    assert targets_table.lines_at("h200", "first", None) == found[:16]
    assert targets_table.lines_at("h200", "first", "third") == targets_table.lines_at("h200", "third", "second") == []
    with pytest.raises(typer.BadParameter, match="has not all cases"):
        targets_table.main(commit="third")


H100 = "NVIDIA H100 80GB HBM3"


def test_gpus_are_not_mixed(tmp_path):
    """Newer lines of another GPU, of one commit, change nothing; asked for by name they are drawn apart."""
    pytest.importorskip("matplotlib")
    own, other = lines_of("targets"), lines_of("targets", us=50.0, gpu=H100)
    file = write(tmp_path, own + other[:5] + lines_of("lengths") + lines_of("lengths", gpu=H100) + other[5:])
    assert read_lines(file) == own + lines_of("lengths")
    assert {line["gpu"] for line in read_lines(file, gpu=GPUS["h100"])} == {H100}
    with pytest.raises(ValueError, match="got those of NVIDIA H100 80GB HBM3, NVIDIA H200, supported: one kind"):
        plots.complete(own[:8] + other[8:], PRESETS["targets"], None)
    plots.main(results=file, folder=str(tmp_path / "plots"), gpu="h100")
    assert {path.name for path in (tmp_path / "plots").glob("*.svg")} == {
        "decode-lengths-h100.svg", "decode-targets-h100.svg"}
    assert H100 in plots.title_of(other)
    with pytest.raises(typer.BadParameter, match="gpu: got 'b300', supported: h200, h100"):
        plots.main(results=file, folder=str(tmp_path), gpu="b300")


def test_suggest_s_calls_are_of_one_gpu_each():
    lines = [line | {"bytes": i} for i, line in enumerate(lines_of("targets", gpu=H100))]
    calls = measured.calls_of(GPUS["h100"], lines)
    assert len(calls) == 12 and {call["gpu"] for call in calls} == {"H100 SXM"}
    assert {(call["rows"], call["heads"] // call["kv_heads"]) for call in calls} == {(1, 1), (4, 4), (8, 8)}


def test_plots_say_what_to_run(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(typer.Exit):
        plots.main(commit="first", results=write(tmp_path, lines_of("lengths")), folder=str(tmp_path))
    shown = capsys.readouterr()
    assert "decode-lengths.svg" in shown.out and not (tmp_path / "decode-targets.svg").exists()
    assert "python perf/bench.py --preset targets --arch hopper" in shown.err and "preset lengths" not in shown.err


def test_stalls_are_read_from_a_source_page():
    lines = ['"Kernel Name","decode",', '"#","Source","Warp Stall Sampling (All Samples)","Instructions Executed",'
             '"stall_wait","stall_wait (Not Issued)","stall_math"',
             '"0","@!P0  FADD.FTZ R1, R2, R3 ","1,007","16","5","4","2"', '"1","EXIT ","0","16","","",""']
    rows = stalls.read_lines(lines)
    assert [stalls.opcode(row[stalls.SOURCE]) for row in rows] == ["FADD", "EXIT"]
    assert stalls.waits(rows[0]) == {"wait": 5, "math": 2} and stalls.number(rows[0][stalls.SAMPLES]) == 1007
    with pytest.raises(RuntimeError, match="no kernel"):
        stalls.read_lines(lines[:1])
