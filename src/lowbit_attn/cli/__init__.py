"""The command line, ``lowbit-attn``: prints what other modules find and compute."""

import typer

from lowbit_attn.cli import bench, calibrate, evaluate, kernel, machine, model, quantize

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Decode attention over KV caches of 1 to 8 bits.")
for command in (machine.doctor, machine.suggest, kernel.info, model.generate, model.quality, calibrate.calibrate,
                quantize.quantize, bench.bench):
    app.command()(command)
app.command("eval")(evaluate.evaluate)
