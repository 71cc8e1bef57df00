"""A paper's claim beside what was measured: rows of docs/papers.md, and the lines of perf/results that fill them."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from provenance import ROOT


@dataclass(frozen=True)
class Row:
    """A claim of a paper and what was measured of it here. here: makes the cell from the lines it asks for."""

    where: str
    paper: str
    here: Callable[["Lines"], str]
    why: str


def rates_of(plain: dict, named: Iterable[tuple[str, dict]]) -> str:
    """Tokens a second at the largest batch of 16 bit and of other caches, lines of e2e.jsonl."""
    cells = [f"{plain['tokens_per_s']:.0f} tokens/s at batch {plain['batch']}"]
    cells += [f"{name}: {line['tokens_per_s']:.0f} at {line['batch']}, "
              f"{line['tokens_per_s'] / plain['tokens_per_s']:.2f}x" for name, line in named]
    return "; ".join(cells)


class Lines:
    """Lines of perf/results; remembers of which commits, dates and GPUs those that were asked for are."""

    def __init__(self):
        self.asked: dict[tuple[str, str, str], None] = {}

    def newest(self, file: str, **wanted) -> dict:
        """The last line of FILE.jsonl with these values, of a clean tree; KeyError where there is none."""
        return self.all(file, **wanted)[-1]

    def all(self, file: str, **wanted) -> list[dict]:
        """Every such line, oldest first; all are of the last one's commit."""
        text = (ROOT / f"perf/results/{file}.jsonl").read_text()
        found = [line for line in map(json.loads, text.splitlines()) if not line["commit"].endswith("+dirty")
                 and not line.get("without") and all(line.get(name) == value for name, value in wanted.items())]
        if not found:
            raise KeyError(f"perf/results/{file}.jsonl has no line with {wanted}")
        last = found[-1]
        self.asked[last["commit"], last["date"][:10], last["gpu"].replace("none", "CPU")] = None
        return [line for line in found if line["commit"] == last["commit"]]

    def sources(self) -> Iterator[str]:
        """"commit (date, GPU)" of every line that was asked for, in order."""
        yield from (f"{commit} ({date}, {gpu})" for commit, date, gpu in self.asked)
