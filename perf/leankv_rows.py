"""What the LeanKV paper claims, and which measured lines stand beside it: rows of papers.py, numbers of its figures."""

from itertools import pairwise
from math import log, log10

from leankv_plots import (
    BATCHES,
    LENGTHS,
    TEXTS,
    critical_by_head,
    critical_by_layer,
    extremes,
    gains,
    mean,
    of_case,
    rates,
    recalls,
    requests,
    spans,
    steps,
    uniform_kl,
)
from paper_lines import Lines, Row, rates_of
from text_quality import SMOLLM2, WINDOWS

QWEN = "qwen2.5-coder-1.5b"
QWEN_LEVELS = ("lean, 10 % high", "k4v4+k4v2", "pruned 20 %, static")


def milli(kl: float) -> str:
    """KL in thousandths of a nat, two digits of it."""
    return f"{1e3 * kl:.2f}" if kl < 0.01 else f"{1e3 * kl:.0f}"


def kl_of(*labels: str):
    """A cell: KL of uniform formats with 32 sinks, over all windows of three texts."""
    def cell(lines: Lines) -> str:
        found = [mean(lines.newest("texts", model=SMOLLM2, label=label, text=text, window=window)["kl"]
                      for text in TEXTS for window in range(WINDOWS)) for label in labels]
        return "KL, 1e-3 nats: " + ", ".join(f"{milli(kl)} ({label})" for label, kl in zip(labels, found))
    return cell


def of_two(values: list[float], digits: int = 1) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def distributions(lines: Lines) -> str:
    return (f"decades between extremes: scores {extremes(lines, 'score'):.1f}, norms of V "
            f"{extremes(lines, 'norm'):.1f}; from the 1st to the 99th percentile of a layer "
            f"{of_two(spans(lines, 'score'))} and {of_two(spans(lines, 'norm'))}")


def by_layer(lines: Lines) -> str:
    found, of_query = critical_by_layer(lines), critical_by_layer(lines, "critical_of_a_query")
    tokens, errors = zip(*found)
    return (f"of {requests(lines)[0]['tokens']:,} tokens {of_two(tokens, 0)} by layer, of a single query "
            f"{of_two([one for one, _ in of_query], 0)}; requests differ by {of_two(errors, 0)} (standard deviation)")


def by_head(lines: Lines) -> str:
    cells = []
    for layer in requests(lines)[0]["scores"]:
        means, errors = zip(*critical_by_head(lines, int(layer)))
        cells.append(f"{', '.join(f'{one:.0f} ± {error:.0f}' for one, error in zip(means, errors))} (layer {layer})")
    return "tokens by KV head: " + "; ".join(cells)


def case_cells(lines: Lines, *labels: str) -> str:
    return ", ".join(f"{of_case(lines, label, 'pruned'):.0%}: {milli(of_case(lines, label, 'kl'))}" for label in labels)


def dynamic(lines: Lines) -> str:
    static = case_cells(lines, *(f"pruned {n} %, static" for n in (20, 40, 60)))
    labels = [f"pruned, T_l {share}, dynamic" for share in (0.02, 0.05, 0.1, 0.2)]
    random = case_cells(lines, *(f"pruned {n} %, random" for n in (20, 40)))
    least, most = (of_case(lines, labels[1], f"{which}_pruned") for which in ("least", "most"))
    return (f"KL, 1e-3 nats, by share pruned: static {static}; dynamic {case_cells(lines, *labels)} (at the second of "
            f"heads {least:.0%} to {most:.0%}); random {random}")


def found_again(lines: Lines) -> str:
    cells = []
    for how in ("static", "dynamic", "random"):
        found = sorted((line["pruned"], line["right"], line["questions"]) for line in recalls(lines, how))
        cells.append(f"{how} " + ", ".join(f"{pruned:.0%}: {right} of {asked}" for pruned, right, asked in found))
    return "codes found again, by share pruned: " + "; ".join(cells)


def of_pairs(lines: Lines, *labels: str) -> str:
    """Packed bytes of 16 bit and KL of caches of two levels."""
    return ", ".join(f"{of_case(lines, label, 'bits') / 16:.1%}, {milli(of_case(lines, label, 'kl'))} ({label})"
                     for label in labels)


def of_formats(lines: Lines, *labels: str) -> str:
    bits = [lines.newest("texts", model=SMOLLM2, label=label)["bits_per_element"] for label in labels]
    return ", ".join(f"{one / 16:.1%}, {milli(uniform_kl(lines, label))} ({label})" for one, label in zip(bits, labels))


def equal_bits(lines: Lines, kl: float) -> float:
    """Bits of an element at which k8v4, k4v4, k4v2 and k2v2, joined by lines over log KL, have this KL."""
    found = [(lines.newest("texts", model=SMOLLM2, label=label)["bits_per_element"], log(uniform_kl(lines, label)))
             for label in ("k8v4", "k4v4", "k4v2", "k2v2")]
    for (more, less_kl), (fewer, more_kl) in pairwise(found):
        if less_kl <= log(kl) <= more_kl:
            return more + (fewer - more) * (log(kl) - less_kl) / (more_kl - less_kl)
    raise ValueError(f"kl: got {kl}, supported: between those of k8v4 and k2v2")


def of_qwen(lines: Lines) -> str:
    """KL and packed bytes of formats and levels, critical tokens and spans of a larger model, over one text."""
    formats = [lines.newest("texts", model=QWEN, label=label) for label in ("k8v4", "k4v4", "k4v2", "k2v4")]
    mixed = [lines.newest("leankv_figures", model=QWEN, task="text", label=label) for label in QWEN_LEVELS]
    looked = lines.newest("leankv_figures", model=QWEN, task="attention")
    cells = [f"{line['bits_per_element'] / 16:.1%}, {milli(line['kl'])} ({line['label']})" for line in formats]
    cells += [f"{line['bits'] / 16:.1%}, {milli(line['kl'])} ({line['label']})" for line in mixed]
    span = {name: [log10(layer[3] / layer[1]) for layer in looked[name]] for name in ("score", "norm")}
    tokens = of_two([mean(heads) for heads in looked["critical"]], 0)
    return (f"of 16 bit's bytes, KL in 1e-3 nats: {', '.join(cells)}; 95 % of the scores of {looked['tokens']} tokens "
            f"are in {tokens} by layer; from the 1st to the 99th percentile of a layer {of_two(span['score'])} decades "
            f"(scores) and {of_two(span['norm'])} (norms of V)")


def pareto(lines: Lines) -> str:
    saved = {label: 1 - of_case(lines, label, "bits") / equal_bits(lines, of_case(lines, label, "kl"))
             for label in ("k4v4+k4v2", "lean, 10 % high", "lean, 50 % high")}
    return (f"of 16 bit's bytes, KL in 1e-3 nats: {of_formats(lines, 'k8v4', 'k4v4', 'k4v2', 'k2v2')}; "
            f"{of_pairs(lines, *saved, 'lean, 20 % pruned')}; fewer bytes than uniform formats at equal KL: "
            f"{', '.join(f'{one:.0%} ({label})' for label, one in saved.items())}")


def pruning(lines: Lines) -> str:
    eight = case_cells(lines, *(f"pruned {n} %, static" for n in (10, 20, 40, 80)))
    lean = case_cells(lines, *(f"lean, {n} % pruned" for n in (10, 20, 40)))
    return f"KL, 1e-3 nats, by share pruned: stored in 8 bits {eight}; lean {lean}"


def one_bit(lines: Lines) -> str:
    mixed = [f"{n} %: {milli(of_case(lines, f'k4v2+k4v1, {n} % k4v1', 'kl'))}" for n in (20, 40, 60, 80)]
    ends = milli(uniform_kl(lines, "k4v2")), milli(uniform_kl(lines, "k4v1"))
    return f"KL, 1e-3 nats, by share in k4v1: none {ends[0]}, {', '.join(mixed)}, all {ends[1]}"


def lean(lines: Lines, label: str, task: str = "text") -> dict:
    return lines.newest("leankv", model=SMOLLM2, task=task, label=label)


def memory(lines: Lines) -> str:
    plain = lean(lines, "16 bit")["perplexity"]
    return "; ".join(f"{name}: {lean(lines, name)['bits_per_element_at_128'] / 16:.1%} of 16 bit, perplexity "
                     f"{lean(lines, name)['perplexity']:.2f}" for name in ("lean", "lean-low")) + f" ({plain:.2f})"


def speed(lines: Lines) -> str:
    cells, gpu = [], steps(lines, format="lean", seqlen=1024)["gpu"]
    for seqlen in LENGTHS:
        found = gains(lines, gpu, seqlen)
        cells.append(f"{seqlen >> 10}K " + ", ".join(f"{faster:.1f}x at {fewer:.1f}x fewer bytes ({name})"
                                                     for name, (fewer, faster) in found.items()))
    return f"batch 8: {'; '.join(cells)}"


def management(lines: Lines) -> str:
    at = [steps(lines, format="lean", seqlen=1024, batch=batch, largest=False) for batch in BATCHES]
    parts = [f"{share_of(line, 'manage')} (batch {line['batch']})" for line in at]
    whole = rates(lines)["lean"]
    return (f"`manage` of lean at 1K tokens: {', '.join(parts)}; append {share_of(at[-1], 'append')} and attention "
            f"{share_of(at[-1], 'attention')} at batch {at[-1]['batch']}; at the largest batch of 32K `manage` "
            f"{share_of(whole, 'manage')}")


def share_of(step: dict, part: str) -> str:
    """A part of a step, percent."""
    return f"{100 * step[f'{part}_ms'] / step['step_ms']:.1f} %"


def throughput(lines: Lines) -> str:
    found = rates(lines)
    named = [(name, found[name]) for name in ("k4v4", "lean", "lean-low")]
    return rates_of(found["16 bit"], named) + ", 32K tokens each"


ROWS = (
    Row("Fig. 1", "scores span seven orders of magnitude, norms of values at most two", distributions,
        "the same: keys decide over decades, values within one or two"),
    Row("Fig. 2", "tokens that hold 95 % of the scores vary considerably across layers", by_layer,
        "short texts: each token has some score from itself and its neighbours; what one query needs differs more"),
    Row("Fig. 3", "and across heads of a layer, and for a head across requests", by_head,
        "the same in kind; three texts differ less than a thousand articles"),
    Row("Table 1", "as 16 bit with 18.9 to 28.9 % of the memory, 5 % less with 7.6 to 20.6 %", memory,
        "pages of 128 tokens, 32 sinks; nothing is pruned"),
    Row("Fig. 7", "K8V4 as 16 bit, K4V8 less; K4V2 keeps 78 % of GSM8K and more, K2V4 nearly nothing",
        kl_of("k8v4", "k4v8", "k4v2", "k2v4"),
        "the same direction; K per channel here, per token there, so K2V4 is not ruined"),
    Row("Fig. 8, KL", "dynamic shares of heads lose less than equal ones, the more the more is pruned", dynamic,
        "a peaked head holds its scores in few tokens and loses most others, which later text asks for; texts, not "
        "GSM8K: equal shares stay the default"),
    Row("Fig. 8, recall", "clearest where a task asks for what was read", found_again,
        "what is asked for only later has low scores before: chance keeps more of it than scores do, and thresholds "
        "prune more of such a prompt than of prose"),
    Row("Fig. 9", "levels need less than K4V4's memory for 16 bit's accuracy", pareto,
        "levels fill the gap between k4v4 and k4v2; in texts this short a seventh of the packed tokens or more wait in "
        "16-bit stages, which flatters them"),
    Row("Fig. 10", "models differ in how much may be pruned; GQA and large ones least", pruning,
        "one model, three query heads a KV head; KL grows from the first tokens that go: nothing is pruned by default"),
    Row("Fig. 11", "small models lose already with all tokens in K4V2", one_bit,
        "a fifth of the tokens in k4v2 keep most of what 1-bit values lose; 16-bit stages flatter the mixed rows"),
    Row("Fig. 1 to 3, 7 to 9, on Qwen2.5-Coder-1.5B", "the same of models of 7B to 70B parameters",
        of_qwen, "the same in kind, of one text of code: K needs the bits, heads of a layer keep most tokens; levels "
        "take 5 and 7 % fewer bytes than uniform formats at equal KL, and a fifth of the tokens pruned costs as much "
        "as k4v2"),
    Row("Fig. 12", "memory management below 0.9 % of a step", management,
        "below it up to batch 8; scoring reads the recent keys of every sequence and head, in every eighth step"),
    Row("Fig. 13", "nearly as much faster as bytes are fewer: 1.7x at K8V8, 2x fewer", speed,
        "the baseline reads at the rate of memory, and so do these, but for starts and ends at 4K"),
    Row("Fig. 14", "2.0x to 2.5x the tokens/s of vLLM at equal accuracy, 3.0x to 6.9x at 5 % less; batch 62 and 177 "
        "instead of 22", throughput,
        "each at its largest batch in equal memory, near 16 bit's quality, nothing pruned; k4v4 does as much as lean"),
)
