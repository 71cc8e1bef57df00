"""What the commands share."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lowbit_attn.formats import FORMATS, Format

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
# columns of words; all others are numbers
LEFT = ("format", "note", "target", "kernel", "side", "plane", "cache", "task", "metric")


def console() -> Console:
    """Wide enough for the tables when the output is not a terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=140)


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, justify="left" if name in LEFT else "right", no_wrap=name != "note")
    return made


def fail(error: Exception | str, status: int = 2) -> NoReturn:
    """End the command with a message and no traceback."""
    typer.echo(f"error: {error.args[0] if isinstance(error, KeyError) else error}", err=True)
    raise typer.Exit(status)


@contextmanager
def told_refusals(what: str) -> Iterator[None]:
    """End the command, with what a model or its cache refuses and no traceback, where the calls within refuse it."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        fail(f"{what}: {error}")


def format_named(name: str) -> Format:
    """The format of a name of FORMATS; ends the command, with close matches, for another name."""
    try:
        return FORMATS[name]
    except KeyError as error:
        fail(error)


def check_writable(name: str, path: Path) -> None:
    """End the command, before its long run, where it could not write this file."""
    parent = path.absolute().parent
    if not parent.is_dir():
        fail(f"{name}: got {str(path)!r}, supported: a file in a folder that is there, and {str(parent)!r} is not")
    if path.is_dir() or not os.access(path if path.exists() else parent, os.W_OK):
        fail(f"{name}: got {str(path)!r}, which cannot be written, supported: a file in a folder that can be")


def tell_builds() -> None:
    """Print a line for each kernel that is built at its first use, which takes seconds to minutes."""
    logger = logging.getLogger("lowbit_attn")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
