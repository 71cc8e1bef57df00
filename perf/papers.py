"""The papers' tables and figures beside the newest lines of perf/results: the tables of docs/papers.md. Needs no GPU.

    python perf/papers.py bitdecoding     BitDecoding, arXiv 2503.18773
    python perf/papers.py kitty           Kitty
    python perf/papers.py vq-llm          VQ-LLM
    python perf/papers.py leankv          LeanKV

What is quoted of a paper stands in papers_rows.py; what stands beside it is read from lines, whose commits are named
below each table. docs/papers.md has the output between two comments, which a test compares.
"""

from typing import Annotated

import typer
from paper_lines import Lines
from papers_rows import PAPERS

HEAD = "| where | paper | here | why they differ |\n|---|---|---|---|"


def table_of(paper: str) -> str:
    """A paper's rows as Markdown, and below them what they were measured at."""
    lines = Lines()
    rows = [f"| {row.where} | {row.paper} | {row.here(lines)} | {row.why} |" for row in PAPERS[paper]]
    return "\n".join((HEAD, *rows, "", f"Measured at {'; '.join(lines.sources())}."))


def main(paper: Annotated[str, typer.Argument(help="bitdecoding, kitty, vq-llm or leankv")]) -> None:
    """Print a paper's table."""
    if paper not in PAPERS:
        raise typer.BadParameter(f"got {paper!r}, supported: {', '.join(PAPERS)}")
    print(table_of(paper))


if __name__ == "__main__":
    typer.run(main)
