"""``lowbit-attn quantize``: a transformers model's linear layers to codebook weights, in fp32."""

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lowbit_attn import tokenizing
from lowbit_attn.cli.calibrate import SEEDS
from lowbit_attn.cli.common import check_folder, console, fail, read_text
from lowbit_attn.cli.model import DEMO, ModelOption, load_on_cpu
from lowbit_attn.demo.model import DTYPE

TEXT_HELP = "A text file of the kind that the model reads; default: Python's help texts, without those of `quality`."


def quantize(
    out: Annotated[Path, typer.Option(help="Folder to write: empty, or of the same run broken off earlier.")],
    model: ModelOption = DEMO,
    format: Annotated[str, typer.Option(help="e8p4, e8p2, gptvq2, aqlm_2x8 or aqlm_2x12.")] = "e8p4",
    text: Annotated[Path | None, typer.Option(help=TEXT_HELP)] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text to read: 2,048 or more.")] = 8192,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Of random signs and of k-means.")] = 0,
    device: Annotated[str, typer.Option(help="Where it works: cpu or cuda. Each rounds a little otherwise.")] = "cpu",
) -> None:
    """Write a model with linear layers in 2 to 4 bits; transformers loads it after import lowbit_attn.linear.hf."""
    from lowbit_attn.linear import calibration, checkpoint, format_named, targets

    try:
        if format_named(format).book_size == 65536 and not format.startswith("e8p"):
            fail(f"format: got {format!r}, supported: e8p4, e8p2, gptvq2, aqlm_2x8, aqlm_2x12")
    except ValueError as error:
        fail(error)
    if tokens < calibration.MIN_TOKENS:
        fail(f"tokens: got {tokens}, supported: {calibration.MIN_TOKENS} or more for calibration")
    written = calibration_text() if text is None else read_text("text", text)
    check_folder("out", out)
    if device not in ("cpu", "cuda") or device == "cuda" and not torch.cuda.is_available():
        fail(f"device: got {device!r}, supported: cpu" + ", cuda" * torch.cuda.is_available())
    network, tokenizer = load_on_cpu(model)
    ids = tokenizing.tensor(tokenizer, written)[0]
    start, out_console = time.perf_counter(), console()
    with Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} layers"),
                  TimeElapsedColumn(), TimeRemainingColumn(), console=out_console) as bar:
        task = bar.add_task("reading the text", total=None)

        def on_layer(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        try:
            made = checkpoint.quantize_model(network.to(device), tokenizer, ids, format, out, tokens, seed, on_layer,
                                             DTYPE if model == DEMO else None)
        except (ValueError, NotImplementedError) as error:
            bar.stop()
            fail(error)
    nbytes = (out / "model.safetensors").stat().st_size
    layers = ""
    if made:  # else an earlier call wrote the whole model
        left = f" ({targets.named(made.left)})" if made.left else ""
        layers = (f" Decoder layers: {made.bits_per_weight:.2f} bits a weight; {made.share_left:.1%} of their weights "
                  f"stay unquantized{left}.")
    out_console.print(f"{out}: {nbytes:,} bytes in {format} after {time.perf_counter() - start:.0f} s.{layers} Load it "
                      "with\n"
                      f"  import lowbit_attn.linear.hf\n"
                      f"  model = AutoModelForCausalLM.from_pretrained({str(out)!r})", soft_wrap=True, markup=False)


def calibration_text() -> str:
    """Python's help texts but the 40 that ``quality`` and the demo read, and without any line of those."""
    from lowbit_attn.codebooks.text import TOPICS, help_text

    read = set(help_text(TOPICS).splitlines()) - {""}
    rest = help_text(None)[len(help_text(TOPICS)) :]
    return "\n".join(line for line in rest.splitlines() if line not in read).lstrip()
