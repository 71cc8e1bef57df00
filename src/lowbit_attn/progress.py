"""A bar for what takes long: how much of it is done, and the time left."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ESTIMATE_SECONDS = 600.0  # whose pace the time left follows: a kernel takes up to a minute


def bar(console: Console, unit: str) -> Progress:
    """A bar that counts units ("tokens", "kernels") and goes when it ends; nothing is drawn where no terminal is."""
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
                    TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(), console=console, transient=True,
                    speed_estimate_period=ESTIMATE_SECONDS)
