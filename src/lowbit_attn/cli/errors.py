"""The last resort of every command: an error that no check foresaw ends in one line instead of a traceback."""

import os
from contextlib import contextmanager

import typer
from typer.core import TyperGroup

from lowbit_attn.cli.common import one_line

VARIABLE = "LOWBIT_ATTN_TRACEBACK"  # set to 1: such an error keeps its traceback
FORESEEN = (typer.Exit, typer.Abort, BrokenPipeError)


class Commands(TyperGroup):
    """A group of commands whose unforeseen errors end in one line."""

    def invoke(self, ctx):
        with last_resort():
            return super().invoke(ctx)


@contextmanager
def last_resort():
    """End the program with status 1 and one line, which names its type, for an error that is not foreseen."""
    try:
        yield
    except FORESEEN:
        raise
    except Exception as error:
        if hasattr(error, "exit_code") or os.environ.get(VARIABLE, "0") not in ("", "0"):  # of a wrong option: typer's
            raise
        typer.echo(f"error: {one_line(error)} (not foreseen: please report it, with the traceback that "
                   f"{VARIABLE}=1 shows)", err=True)
        raise typer.Exit(1) from None
