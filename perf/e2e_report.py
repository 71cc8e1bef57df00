"""What the end-to-end benchmark says about its results: tables, targets, a generation's rate."""

from collections.abc import Iterator
from typing import NamedTuple

from rich.table import Table

from lowbit_attn.budget import SIXTEEN_BIT

CAPTION = ("Random weights of the model's shape; random K and V through the quantize kernels; one graph a step. Parts "
           "are timed in graphs of their own, append and other by difference; floor = plain reads of the same bytes.")
LONG, MIDDLE = 131072, 32768  # tokens
STEP_SLACK = 0.03
STEP_BOUNDS = {"k4v4": 0.72, "k2v2": 0.66}  # of the 16-bit step at 128K, batch 1
# times 16 bit's tokens a second, each at its largest batch
RATE_BOUNDS = {"k4v4": 3.0, "k2v2": 4.5, "lean": 3.4, "lean-low": 4.5}
SHORT, WEIGHTS_BOUND = 4096, 0.45  # tokens; of the 16-bit step there, batch 1, with e8p4 and k4v4
APPEND_BOUND = 1.10  # append and decode over decode


class Target(NamedTuple):
    """A bound and what was measured; is_upper: the value may not exceed it."""

    what: str
    value: float
    bound: float
    is_upper: bool = True

    @property
    def is_met(self) -> bool:
        return self.value <= self.bound if self.is_upper else self.value >= self.bound


def targets(results: list) -> Iterator[Target]:
    """The project's end-to-end targets, as far as the results hold what they compare."""
    plain = {_case(r): r for r in results if r.format == r.weights == SIXTEEN_BIT}
    for r in results:
        same = plain.get(_case(r))
        if r.format == SIXTEEN_BIT or same is None:
            continue
        if r.weights != SIXTEEN_BIT:
            if (r.weights, r.format, r.seqlen, r.batch) == ("e8p4", "k4v4", SHORT, 1):
                yield Target(f"{r.weights}, {r.format}, {r.seqlen} tokens, batch 1: step over 16 bit's",
                             r.step_ms / same.step_ms, WEIGHTS_BOUND)
            continue
        label = f"{r.format}, {r.seqlen} tokens, batch {r.batch}"
        if r.seqlen == LONG and r.batch == 1 and not r.largest:
            expected = (same.step_ms - same.attention_ms + r.attention_ms) / same.step_ms + STEP_SLACK
            yield Target(f"{label}: step over 16 bit's", r.step_ms / same.step_ms,
                         min(expected, STEP_BOUNDS.get(r.format, expected)))
            yield Target(f"{label}: append and decode over decode", r.append_attention_ms / r.attention_ms,
                         APPEND_BOUND)
        if r.seqlen in (MIDDLE, LONG) and r.largest and r.format in RATE_BOUNDS:
            yield Target(f"{label}: tokens/s over 16 bit's at batch {same.batch}",
                         r.tokens_per_s / same.tokens_per_s, RATE_BOUNDS[r.format], is_upper=False)


def _case(result) -> tuple:
    """What results must have in common to be compared: the largest batches differ by format."""
    return result.seqlen, "largest" if result.largest else result.batch


def target_table(results: list) -> Table:
    table = Table("target", "measured", "bound", "met")
    for target in targets(results):
        table.add_row(target.what, f"{target.value:.3f}", f"{'<=' if target.is_upper else '>='} {target.bound:.3f}",
                      "yes" if target.is_met else "NO")
    return table


def result_table(results: list) -> Table:
    table = Table("weights", "format", "tokens", "batch", "ms/token", "tokens/s", "x 16 bit", "of weights", "attention",
                  "append", "manage", "other", "floor weights", "floor cache", "attention by", caption=CAPTION)
    plain = {_case(r): r.tokens_per_s for r in results if r.format == SIXTEEN_BIT}
    for r in results:
        base = plain.get(_case(r))
        parts = (r.weights_ms, r.attention_ms, r.append_ms, r.manage_ms, r.other_ms, r.floor_weights_ms,
                 r.floor_attention_ms)
        table.add_row(r.weights, r.format, str(r.seqlen), f"{r.batch}{' (largest)' * r.largest}", f"{r.step_ms:.3f}",
                      f"{r.tokens_per_s:.0f}", f"{r.tokens_per_s / base:.2f}" if base else "",
                      *(f"{ms:.3f}" for ms in parts), r.attention_by)
    return table


def generation_lines(runs: dict[str, list]) -> list[dict]:
    """A line for each format from its results at evenly spaced lengths, first to last.

    tokens_per_s: over the whole generation, the step's time linear between the lengths. predicted_tokens_per_s: the
    same, with every step's time put together from parts: weights, append and other of the first length, and decode
    alone at each.
    """
    lines = []
    for format, run in runs.items():
        first = run[0]
        constant = first.weights_ms + first.append_ms + first.other_ms
        rate = first.batch / _mean([r.step_ms for r in run]) * 1e3
        predicted = first.batch / _mean([constant + r.attention_ms for r in run]) * 1e3
        lines.append({"format": format, "batch": first.batch, "tokens_per_s": round(rate, 1),
                      "predicted_tokens_per_s": round(predicted, 1)})
    plain = next((line for line in lines if line["format"] == SIXTEEN_BIT), None)
    for line in lines if plain else ():
        for name in ("tokens_per_s", "predicted_tokens_per_s"):
            line[f"x_16_bit_{name}"] = round(line[name] / plain[name], 3)
    return lines


def _mean(times: list[float]) -> float:
    """Mean of a function that is linear between evenly spaced points."""
    return (sum(times) - (times[0] + times[-1]) / 2) / (len(times) - 1)


def generation_table(lines: list[dict]) -> Table:
    table = Table("format", "batch", "tokens/s", "x 16 bit", "predicted tokens/s", "predicted x 16 bit",
                  title="whole generation", caption=CAPTION)
    for line in lines:
        ratios = (line.get(f"x_16_bit_{name}") for name in ("tokens_per_s", "predicted_tokens_per_s"))
        measured, predicted = (f"{x:.2f}" if x else "" for x in ratios)
        table.add_row(line["format"], str(line["batch"]), f"{line['tokens_per_s']:.0f}", measured,
                      f"{line['predicted_tokens_per_s']:.0f}", predicted)
    return table
