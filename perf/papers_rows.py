"""What four papers claim, and which measured lines stand beside it: the rows of papers.py."""

from itertools import product

import leankv_rows
from paper_lines import Lines, Row, rates_of

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
ONE = dict(arch="hopper", batch=1, heads=32, kv_heads=8, head_dim=128, seqlen=131072, q_len=1, dtype="float16")
EIGHT = ONE | dict(batch=8, seqlen=32768)
WIDE = EIGHT | dict(heads=64)
MHA = ONE | dict(kv_heads=32)
LLAMA = EIGHT | dict(kv_heads=32, seqlen=4096)  # VQ-LLM's: Llama-7B, batch 8


def _gain(lines: Lines, case: dict, fmt: str, gpu: str = H100) -> str:
    line = lines.newest("decode", gpu=gpu, format=fmt, **case)
    return f"{line['fp16_us'] / line['us']:.1f}x"


def _gains(case: dict):
    return lambda lines: f"{_gain(lines, case, 'k4v4')} (4 bits), {_gain(lines, case, 'k2v2')} (2 bits), q_len 1"


def _groups(lines: Lines) -> str:
    cells = []
    for fmt in ("k4v4", "k2v2"):
        narrow, wide = (lines.newest("decode", gpu=H200, format=fmt, **case)["us"] for case in (EIGHT, WIDE))
        cells.append(f"{wide / narrow:.2f} ({fmt})")
    return f"twice the query heads, 4 to 8 a KV head: time x {' and '.join(cells)}"


def _step(lines: Lines) -> str:
    plain, four, two = (lines.newest("e2e", model="llama-3.1-8b", format=fmt, seqlen=131072, batch=1, largest=False,
                                     weights=None) for fmt in ("16 bit", "k4v4", "k2v2"))
    return (f"{plain['step_ms'] / four['step_ms']:.2f}x (4 bits), {plain['step_ms'] / two['step_ms']:.2f}x (2 bits); "
            f"{plain['weights_ms']:.2f} of 16 bit's {plain['step_ms']:.2f} ms are weights")


def _rates(seqlen: int):
    def cell(lines: Lines) -> str:
        case = dict(model="llama-3.1-8b", seqlen=seqlen, largest=True)
        case["commit"] = lines.newest("e2e", format="k2v2", **case)["commit"]  # all of one run
        plain, four, two = (lines.newest("e2e", format=fmt, **case) for fmt in ("16 bit", "k4v4", "k2v2"))
        return rates_of(plain, (("4 bits", four), ("2 bits", two)))
    return cell


def _pack(lines: Lines) -> str:
    cells = []
    for name, fmt, search in (("4 bits", "k4v4", False), ("2 bits, range search on K", "k2v2", True)):
        k = lines.newest("pack", gpu=H100, format=fmt, side="k", search=search)
        v = lines.newest("pack", gpu=H100, format=fmt, side="v")
        cells.append(f"{(k['us'] + v['us']) / 1000:.3f} ms ({name})")
    return f"K and V, 8 heads: {', '.join(cells)}"


def _append(lines: Lines) -> str:
    line = lines.newest("append", gpu=H100, format="k4v4", batch=64)
    return f"{line['us'] / 1000:.4f} ms for 64 sequences, on top of decode"


def _quality(lines: Lines, label: str) -> float:
    return lines.newest("quality", preset="table", label=label)["perplexity"]


def _perplexities(*labels: str):
    return lambda lines: "perplexity " + ", ".join(f"{_quality(lines, label):.2f} ({label})" for label in labels)


def _boost_rates(lines: Lines) -> str:
    cells = [f"{_quality(lines, label):.2f} ({rate})" for label, rate in
             (("k2v2, sinks", "none"), ("kitty", "12.5 %"), ("kitty-pro", "25 %"))]
    every = lines.newest("quality", preset="boost", label="kitty-b64")["perplexity"]
    random = lines.newest("quality", preset="boost", label="kitty-b16-random")["perplexity"]
    return f"perplexity {', '.join(cells)}, {every:.2f} (all); {random:.2f} (25 %, random channels)"


def _memory(lines: Lines) -> str:
    per = {}
    for fmt in ("16 bit", "kitty", "kitty-pro"):
        line = lines.newest("e2e", model="qwen3-8b", format=fmt, seqlen=9216)
        per[fmt] = line["layer_bytes"] / line["batch"], line["batch"]
    size, batch = per["16 bit"]
    return "; ".join(f"{fmt}: {size / per[fmt][0]:.1f}x fewer bytes a sequence, batch {per[fmt][1]} instead of {batch}"
                     for fmt in ("kitty", "kitty-pro"))


def _generation(lines: Lines) -> str:
    cells = []
    for fmt in ("kitty", "kitty-pro"):
        line = lines.newest("e2e", model="qwen3-8b", format=fmt, generated=8192)
        long = lines.newest("e2e", model="qwen3-8b", format=fmt, seqlen=9216)
        plain = next(one for one in lines.all("e2e", model="qwen3-8b", seqlen=9216, format="16 bit",
                                              commit=long["commit"]))
        cells.append(f"{fmt} {line['x_16_bit_tokens_per_s']:.2f}x over the whole, "
                     f"{long['tokens_per_s'] / plain['tokens_per_s']:.2f}x at its end")
    return "; ".join(cells)


def _codebook_over_int4(lines: Lines) -> str:
    cells = []
    for name, case, gpu in (("batch 8, 32K, H100", EIGHT, H100), ("batch 1, 128K, H100", ONE, H100),
                            ("batch 8, 4,096, 32 KV heads, H200", LLAMA, H200)):
        ours = lines.newest("decode", gpu=gpu, format="cq4", **case)
        int4 = lines.newest("decode", gpu=gpu, format="k4v4", commit=ours["commit"], **case)
        cells.append(f"{ours['us'] / int4['us']:.2f}x ({name})")
    return ", ".join(cells)


def _codebook_saves(lines: Lines) -> str:
    cells = []
    for name, case, gpu in (("batch 8, 4,096, 32 KV heads, H200", LLAMA, H200), ("batch 8, 32K, H100", EIGHT, H100)):
        line = lines.newest("decode", gpu=gpu, format="cq4", path="codebook", **case)
        cells.append(f"{100 - 100 * line['us'] / line['fp16_us']:.1f} % ({name})")
    return "less time: " + ", ".join(cells)


STEPS = {"global": "global memory", "shared": "shared memory, entry order", "banks": "a bank a group",
         "rotated": "rotated", "table": "K table"}


def _steps(lines: Lines, fmt: str, case: dict) -> dict[str, dict]:
    asked = {key: case[key] for key in ("batch", "kv_heads", "seqlen")}
    last = lines.newest("vq_steps", gpu=H200, format=fmt, step="default", **asked)
    return {step: lines.newest("vq_steps", gpu=H200, format=fmt, step=step, commit=last["commit"], **asked)
            for step in (*STEPS, "default")}


def _lookups_over_fp16(lines: Lines) -> str:
    found = _steps(lines, "cq2", LLAMA)
    cells = [f"{found[step]['us'] / found[step]['fp16_us']:.2f} ({STEPS[step]})" for step in STEPS]
    return "cq2 over 16 bit, batch 8, 4,096, 32 KV heads: " + ", ".join(cells)


def _steps_gain(lines: Lines) -> str:
    cells = []
    for name, case in (("1,024", LLAMA | dict(seqlen=1024)), ("4,096", LLAMA), ("32K, 8 KV heads", EIGHT)):
        for fmt in ("cq2", "cq4"):
            found = _steps(lines, fmt, case)
            cells.append(f"{100 - 100 * found['default']['us'] / found['global']['us']:.0f} % ({fmt}, {name})")
    return "decode over codebooks in global memory, batch 8: " + ", ".join(cells)


def _step_times(fmt: str):
    def cell(lines: Lines) -> str:
        found = _steps(lines, fmt, EIGHT)
        cells = [f"{found[step]['us']:.0f} ({name})" for step, name in STEPS.items()
                 if (fmt, step) != ("cq4", "table")]
        return f"{fmt}, batch 8, 32K, us: {', '.join(cells)}; a read {found['default']['read_us']:.0f}"
    return cell


def _four_over_two(lines: Lines) -> str:
    cells = []
    for step in ("global", "shared", "rotated", "default"):
        four, two = (_steps(lines, fmt, LLAMA)[step]["us"] for fmt in ("cq4", "cq2"))
        cells.append(f"{four / two:.2f} ({STEPS.get(step, 'as shipped')})")
    return "batch 8, 4,096, 32 KV heads: " + ", ".join(cells)


def _weights_saves(lines: Lines) -> str:
    cells = []
    for n, k in ((8192, 28672), (4096, 4096)):
        of = {fmt: lines.newest("linear", gpu=H200, format=fmt, n=n, k=k, m=1)
              for fmt in ("e8p4", "gptvq2", "aqlm_2x8", "aqlm_2x12")}
        cells.append(f"{n} x {k}: " + ", ".join(f"{fmt} {x['us'] / x['int4_us']:.2f}x" for fmt, x in of.items()))
    return "of torch's GeMV in 4 bits (H200), " + "; ".join(cells)


def _weights_and_cache(lines: Lines) -> str:
    cells = []
    for gpu, tokens in product((H100, H200), (4096, 131072)):
        plain = lines.newest("e2e_weights", gpu=gpu, format="16 bit", seqlen=tokens, batch=1, weights=None)
        both = lines.newest("e2e_weights", gpu=gpu, format="k4v4", seqlen=tokens, batch=1, weights="e8p4")
        cells.append(f"{plain['step_ms'] / both['step_ms']:.1f}x ({tokens >> 10}K, {gpu.split()[1]})")
    return "a step of Llama-3.1-8B's shape, weights in e8p4 and cache in k4v4, one sequence: " + ", ".join(cells)


def _codebook_quality(lines: Lines) -> str:
    kl = {label: lines.newest("quality", preset="codebooks", label=label, tokens=2048)["kl"] for label in
          ("cq4", "cq2", "cq2 plain")}
    int4 = lines.newest("quality", preset="table", label="k4v4, sinks")["kl"]
    return (f"KL {kl['cq4']:.4f} (cq4) and {int4:.4f} (k4v4) with 32 sinks; 2 bits {kl['cq2']:.4f}, "
            f"{kl['cq2 plain']:.4f} with k-means alone")


PAPERS = {
    "bitdecoding": (
        Row("Fig. 2c", "tensor cores gain as n_group grows, CUDA cores do not", _groups,
            "reading K and V is the bound, not multiplies; at 2 bits 8 rows of a KV head take the register path"),
        Row("Fig. 12, H100, one sequence", "up to 3.5x FlashDecoding-v2 (q_len 4)", _gains(ONE),
            "the baseline is cuDNN's attention, the best of torch's, at the rate of memory"),
        Row("Fig. 12, H100, batches", "up to 9.0x FlashDecoding-v2", _gains(EIGHT),
            "2 bits with their scales are 7.1x fewer bytes: more than that needs a baseline below memory's rate"),
        Row("Fig. 12, MHA", "in the same figure", _gains(MHA), "as above"),
        Row("Fig. 13, one sequence, 128K", "3.3x a step (Llama-3.1-8B, A100)", _step,
            "attention alone gains as above; the weights of a step do not shrink"),
        Row("Fig. 13, batches, 4K", "900 (4 bits) and 1,200 tokens/s (2 bits) beside less than 300", _rates(4096),
            "at the largest batch the multiplies of the weights are a third of a step and more"),
        Row("Table 2, throughput, 32K", "49.25, 147.21 (2.98x), 209.48 tokens/s (4.25x)", _rates(32768),
            "each at its own largest batch, a step one CUDA graph"),
        Row("Table 2, accuracy", "LongBench 48.25, 48.16 (4 bits), 47.38 (2 bits)",
            _perplexities("16 bit", "k4v4", "k2v2, sinks, search", "k2v2"),
            "a model of 135M parameters and perplexity: small models exaggerate losses"),
        Row("Table 3, 128K", "Qpack 0.0599 ms (4 bits), 0.1114 ms (2 bits), torch 1.163 ms", _pack,
            "the paper does not say how many heads; ours takes 1.03 and 1.26 of a copy of the same bytes"),
        Row("Table 3, a step", "Qpack_fusion 0.008 and 0.009 ms", _append,
            "a launch of its own, which also stores the new token"),
        Row("Table 4", "0.61 ms at 128K; without lop3 1.63, warps 0.88, async 1.09, all 2.13 ms",
            lambda lines: f"{lines.newest('decode', gpu=H100, format='k4v4', **ONE)['us'] / 1000:.3f} ms at 128K; "
                          "kernels without these steps are not built",
            "the default path has other steps: codes are multiplied as they are ([deviations](deviations.md))"),
    ),
    "kitty": (
        Row("Table 1", "KIVI with 4 bits as 16 bit, with 2 bits far below (GSM8K 94.4 and 89.1 of 94.8)",
            _perplexities("16 bit", "k4v4", "KIVI (groups of 32, simulator)"), "another measure, another model"),
        Row("Table 2, sinks", "32 tokens in 16 bit give KIVI-2 8.3 points back",
            _perplexities("KIVI (groups of 32, simulator)", "KIVI, sinks (simulator)"), "the same direction"),
        Row("Table 2, K4V2", "4-bit keys recover more than 4-bit values",
            leankv_rows.kl_of("k2v2", "k4v2", "k2v4"), "the same; 4-bit values beside 2-bit keys hardly help"),
        Row("Table 3", "Kitty near, Kitty-Pro at 16 bit's accuracy",
            _perplexities("16 bit", "kitty", "kitty, search", "kitty-pro", "kitty-pro, search"),
            "range search on K is this package's ([formats](formats.md))"),
        Row("Fig. 4", "accuracy rises with the share of boosted channels; random ones help little", _boost_rates,
            "head_dim is 64 here: 12.5 % are 8 channels"),
        Row("Fig. 5a", "8x the batch in the same memory (Qwen3-8B, 8,192 new tokens)", _memory,
            "sinks and a window of V stay in 16 bit; an H200 has room for 95 sequences in 16 bit"),
        Row("Fig. 5b", "2.1x to 4.1x the tokens/s of 16 bit", _generation, "a real generation after a prompt of 1,024"),
    ),
    "vq-llm": (
        Row("Fig. 16, attention", "CQ-4 takes 1.01x the time of 4-bit integers", _codebook_over_int4,
            "lookups from shared memory without bank conflicts, codes in the order of the fragments"),
        Row("Sec. VII-F", "66.4 % less time than the best 16-bit attention at batch 8, 4,096 (RTX 4090)",
            _codebook_saves, "of 64 us some 15 are a call's start and end; one query row costs the lookups of four"),
        Row("Fig. 16, weights", "0.88x of AWQ's GeMV in 4 bits", _weights_saves,
            "a large product is bound by the bytes, a small one by launches and transforms; AWQ's kernel was not run"),
        Row("Fig. 17, speed", "about 2.2x of 16 bit end to end, weights and cache in 4 bits", _weights_and_cache,
            "small products wait for the transforms beside them"),
        Row("Fig. 17, quality", "2.5 points of arc-challenge above qServe in 4 bits", _codebook_quality,
            "our calibration: query weights, page means, random positions ([codebooks](codebooks.md))"),
        Row("Fig. 4", "CQ-2 with codebooks in global memory is slower than 16-bit attention; in shared memory less so",
            _lookups_over_fp16, "every step here has the paper's O3: codebooks come once a block, whose other data "
            "leave them room"),
        Row("Fig. 13, attention", "46 % less time than codebooks in global memory on average, 54 % at most (RTX 4090)",
            _steps_gain, "steps differ in lookups alone, not in dataflow"),
        Row("Fig. 15 left, Table IV", "CQ-2: shared memory slower than global; O1 (the most used entries there) pays, "
            "O2 (in registers) little, O3 (one load a block) most, O4 (shuffles) little", _step_times("cq2"),
            "all entries of all groups are in shared memory, so O1 and O2 have nothing to choose; in entry order some "
            "three lanes meet in a bank, in a bank a group four, rotated none"),
        Row("Fig. 15 left, CQ-4", "as CQ-2, not shown", _step_times("cq4"),
            "twice the lookups; eight lanes of K meet in a bank a group"),
        Row("Fig. 15 right", "CQ-4 over CQ-2, in a figure alone", _four_over_two,
            "twice the lookups, of half the size; twice the bytes of codes"),
        Row("Table V, CQ-2", "64 KB of codebooks a block, below 1 entry beyond 3 sigma, 3 shuffles",
            lambda lines: "64 KB a side, all in shared memory; no entry is cached apart; no shuffle",
            "the query operand and the weights undo the order of lookups"),
        Row("Fig. 14", "the same steps for products of weights", lambda lines: "not built as steps",
            "products of codebook weights have one form each ([weights](weights.md))"),
    ),
    "leankv": leankv_rows.ROWS,
}
