"""What the demo shows: rows as they finish, answers side by side, a plot, and the same numbers as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowbit_attn import FORMATS
from lowbit_attn.demo import figures

COLUMNS = (("KV cache", 28, "left"), ("bits/element", 12, "right"), ("cache bytes", 12, "right"),
           ("bits all-in", 11, "right"),
           ("perplexity", 10, "right"), ("top-1 as 16 bit", 15, "right"), ("tokens/s", 8, "right"))


@dataclass(frozen=True)
class Row:
    """One line of the table and one entry of the JSON file."""

    label: str
    format: str | None
    sinks: int
    range_search: bool | None
    bits_per_element: float
    cache_bytes: int
    perplexity: float
    agreement: float
    tokens_per_s: float
    served_by: str
    spread: float | None = None  # one standard error of the perplexity beside the 16-bit row's

    def cells(self, sixteen_bit_bytes: int) -> tuple[str, ...]:
        """Texts of the table's columns; sixteen_bit_bytes: what the 16-bit cache of the same tokens takes."""
        all_in = 16 * self.cache_bytes / sixteen_bit_bytes
        return (self.label, f"{self.bits_per_element:.2f}", f"{self.cache_bytes:,}", f"{all_in:.2f}",
                f"{self.perplexity:.2f}", f"{self.agreement:.1%}", f"{self.tokens_per_s:.0f}")


def line(cells: Sequence[str], style: str = "") -> Table:
    """One line of fixed columns, so that rows can be printed as they come."""
    table = Table.grid(padding=(0, 2))
    for _, width, side in COLUMNS:
        table.add_column(width=width, justify=side, no_wrap=True)
    table.add_row(*cells, style=style)
    return table


def header() -> Table:
    return line([name for name, _, _ in COLUMNS], "bold")


def notes(rows: Sequence[Row], config) -> list[str]:
    """What the table's numbers need to be read well. config: the model's, of transformers."""
    told = []
    for row in rows:
        if row.format == "k2tv2":
            told.append(f"{row.label}: why keys are packed per channel elsewhere; a few large channels spoil the scale "
                        "that a token's channels share")
        elif row.format and row.format in FORMATS and FORMATS[row.format].needs_codebooks:
            head_dim = config.hidden_size // config.num_attention_heads
            books = config.num_hidden_layers * config.num_key_value_heads * FORMATS[row.format].shared_bytes(head_dim)
            bits = 16 * (row.cache_bytes - books) / rows[0].cache_bytes
            told.append(f"{row.label}: {books:,} of its bytes are codebooks, the same for any number of tokens and "
                        f"sequences; without them {bits:.2f} bits all-in")
    return told


def first_difference(tokens: Sequence[int], baseline: Sequence[int]) -> int | None:
    """Index of the first token that differs; None if there is none in their common length."""
    return next((i for i, (a, b) in enumerate(zip(tokens, baseline)) if a != b), None)


def show_answers(console: Console, answers: dict[str, list[int]], decode) -> None:
    """Answers side by side; the first one is the baseline. The first token that differs stands in >>marks<<."""
    baseline = next(iter(answers.values()))

    def shown(tokens) -> str:
        return decode(tokens).replace("\n", "⏎")

    table = Table(title="The same question, greedy", show_lines=True)
    cells = []
    for label, tokens in answers.items():
        table.add_column(label, ratio=1, overflow="fold")
        at = first_difference(tokens, baseline)
        if at is None:
            note = "" if tokens is baseline else "\n[the same tokens]"
            cells.append(Text(shown(tokens)) + Text(note, "dim"))
        else:
            cells.append(Text(shown(tokens[:at])) + Text(f">>{shown(tokens[at : at + 1])}<<", "bold red")
                         + Text(shown(tokens[at + 1 :])) + Text(f"\n[differs from token {at + 1} on]", "dim"))
    table.add_row(*cells)
    console.print(table)


def save_json(path: Path, rows: Sequence[Row], **about) -> None:
    """about: what else the run was (tokens, device, answers); rows: the table."""
    path.write_text(json.dumps({**about, "rows": [vars(row) for row in rows]}, indent=2) + "\n")


def save_plot(path: Path, rows: Sequence[Row], tokens: int, device: str = "cpu") -> None:
    """Perplexity against bits per element of the whole cache, one point a row; the first row is the 16-bit one.
    device: that computed, a torch device's name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.set_title(f"SmolLM2-135M-Instruct, {tokens:,} tokens of Python's help text; {figures.where(device)}",
                   fontsize=9)
    figures.draw_perplexity(axes, [
        figures.Point(row.label, figures.bits_all_in(row.cache_bytes, rows[0].cache_bytes), row.perplexity, row.spread)
        for row in rows])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
