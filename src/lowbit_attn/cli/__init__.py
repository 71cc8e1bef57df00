"""The command line, ``lowbit-attn``: prints what other modules find and compute."""

from typing import Annotated

import typer

from lowbit_attn._version import __version__
from lowbit_attn.cli import bench, calibrate, evaluate, kernel, machine, model, quantize
from lowbit_attn.cli.errors import Commands

app = typer.Typer(no_args_is_help=True, add_completion=False, cls=Commands)
for command in (machine.doctor, machine.suggest, kernel.info, model.generate, model.quality, calibrate.calibrate,
                quantize.quantize, bench.bench):
    app.command()(command)
app.command("eval")(evaluate.evaluate)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"lowbit-attn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version,
                                          help="Print the version and exit.")] = False,
) -> None:
    """Decode attention over KV caches of 1 to 8 bits."""
