"""What the commands share."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lowbit_attn import atomic_file, extras, text_file
from lowbit_attn.formats import FORMATS, Format, shortened

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
PLOTS = (".png", ".svg", ".pdf")
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


def format_named(name: str, also: str = "") -> Format:
    """The format of a name of FORMATS; ends the command, with close matches, for another name.

    also: what else the command takes, for the message.
    """
    try:
        return FORMATS[name]
    except KeyError as error:
        fail(f"{error.args[0]}{also and f'; {also}'}")


def is_file(path: Path) -> bool:
    """Whether there is a file: False, too, for a name that no file can have."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_text(name: str, path: Path) -> str:
    """The text of a file of the user's; ends the command, before its work, for what is no text in UTF-8."""
    try:
        return text_file.read(path, name)
    except ValueError as error:
        fail(error)


def one_line(error: BaseException, most: int = 300) -> str:
    """The type and the message of another library's error, on one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said if len(said) <= most else said[: most - 3] + '...'}"


def one_of(name: str, got: str, supported: Iterable[str]) -> None:
    """End the command for a word that is none of the supported ones."""
    supported = tuple(supported)
    if got not in supported:
        fail(f"{name}: got {shortened(got)}, supported: {', '.join(supported)}")


def check_writable(name: str, path: Path, append: bool = False) -> None:
    """End the command, before its long run, where it could not write this file."""
    try:
        atomic_file.check_writable(name, path, append)
    except ValueError as error:
        fail(error)


def check_folder(name: str, path: Path) -> None:
    """End the command, before its long run, where it could not make or fill this folder; none is left behind."""
    made: list[Path] = []
    try:
        for folder in reversed((path.absolute(), *path.absolute().parents)):
            if not folder.is_dir():
                folder.mkdir()
                made.append(folder)
        atomic_file.check_writable(name, path / "x")
    except (OSError, ValueError) as error:
        fail(f"{name}: got {str(path)!r}, supported: a folder that can be made and written "
             f"({getattr(error, 'strerror', None) or error})")
    finally:
        for folder in reversed(made):
            folder.rmdir()


def check_plot(name: str, path: Path) -> None:
    """End the command, before its long run, where it could not draw into this file."""
    if path.suffix.lower() not in PLOTS:
        fail(f"{name}: got {str(path)!r}, supported: names that end in {', '.join(PLOTS)}")
    check_writable(name, path, append=True)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        fail(f"{name}: {error}; {extras.remedy('demo')}")


@contextmanager
def writing(name: str, path: Path) -> Iterator[None]:
    """End the command in one line where what was computed cannot be written after all, as on a full disk."""
    try:
        yield
    except OSError as error:
        fail(f"{name}: {str(path)!r} could not be written ({error.strerror or error})", 1)


def tell_builds() -> None:
    """Print a line for each kernel that is built at its first use, which takes seconds to minutes."""
    logger = logging.getLogger("lowbit_attn")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
