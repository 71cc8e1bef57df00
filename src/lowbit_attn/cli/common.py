"""What the commands share."""

from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lowbit_attn.formats import FORMATS, Format

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LEFT = ("format", "note", "target", "kernel", "side", "plane", "cache")  # columns of words; all others are numbers


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


def format_named(name: str) -> Format:
    """The format of a name of FORMATS; ends the command, with close matches, for another name."""
    try:
        return FORMATS[name]
    except KeyError as error:
        fail(error)
