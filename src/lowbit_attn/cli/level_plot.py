"""``lowbit-attn info LEVELS --plot FILE``: where a model's tokens are after a text, by layer and head."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from lowbit_attn import progress, tokenizing
from lowbit_attn.cli.common import check_plot, console, fail, read_text, told_refusals, writing
from lowbit_attn.cli.model import full_name, load
from lowbit_attn.formats.levels import Levels
from lowbit_attn.levels.level_cache import LevelCounts
from lowbit_attn.levels.policy import Cumulative

PlotOption = Annotated[Path | None, typer.Option(help="Of levels: read a text with a model, and draw how many tokens "
                                                      "each head has in each level into this PNG or SVG.")]
TextOption = Annotated[Path | None, typer.Option(help="The text of --plot; default: Python's help texts.")]
TokensOption = Annotated[int, typer.Option(min=2, help="Tokens of the text of --plot.")]
ThresholdsOption = Annotated[str | None, typer.Option(help="Cumulative thresholds T_l,T_h of --plot, as 0,0.5: heads "
                                                           "then differ; default: the levels' own share.")]


def thresholds_named(text: str | None) -> Cumulative | None:
    """The policy of an option, or None; ends the command if it is none."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
        return Cumulative(low, high)
    except ValueError as error:
        fail(f"thresholds: got {text!r} ({error}), supported: T_l,T_h, two numbers from 0 to 1, ascending")


def check(plot: Path, text: Path | None) -> None:
    """End the command where its files cannot be read or written."""
    if text is not None:
        read_text("text", text)
    check_plot("plot", plot)


def make(pair: Levels, plot: Path, model: str, text: Path | None, tokens: int, policy: Cumulative | None) -> None:
    """Read the text and draw its tokens; say where the drawing is."""
    from lowbit_attn.demo import figures
    from lowbit_attn.demo.scoring import help_text

    written = help_text() if text is None else read_text("text", text)
    network, tokenizer = load(model)
    ids = tokenizing.tensor(tokenizer, written, network.device)[:, :tokens]
    if not ids.shape[1]:
        fail("text: got no tokens, supported: one or more")
    with told_refusals("model"):
        counts = read(network, ids, dict(format=pair.name, policy=policy))
    if not counts:
        fail(f"model: no layer of {model!r} keeps its tokens in levels, supported: models with full attention")
    about = (f"{full_name(model)}, {ids.shape[1]:,} tokens of {text or 'help texts'} over {pair}, "
             f"{policy or 'equal shares'}; {figures.where(network.device.type)}")
    with writing("plot", plot):
        draw(plot, counts, about)
    console().print(f"Tokens by layer and head: {plot}", soft_wrap=True, markup=False)


def read(network, ids: torch.Tensor, options: dict) -> dict[int, LevelCounts]:
    """Counts of each layer whose cache has levels, after ids [1, n] were read in chunks."""
    from lowbit_attn import quality
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    cache = quality.new_cache(options, network, ids.shape[1])
    quality.use_cache_kind(network, options)
    with progress.bar(console(), "tokens") as bar, torch.inference_mode():
        reading = bar.add_task("reading", total=ids.shape[1])
        for chunk in ids.split(quality.CHUNK, 1):
            network(chunk, **{CACHE_ARGUMENT: cache}, use_cache=True)
            bar.advance(reading, chunk.shape[1])
    return {i: layer.kv.counts_of(0) for i, layer in enumerate(cache.layers) if getattr(layer, "kv", None) is not None}


def draw(path: Path, counts: dict[int, LevelCounts], about: str) -> None:
    """Four panels, tokens high, low, staged and pruned: a row a layer, a column a KV head."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LevelCounts._fields), figsize=(12, 1.6 + 0.16 * len(counts)),
                                     layout="constrained", sharey=True)
    for name, axes in zip(LevelCounts._fields, panels):
        grid = torch.stack([getattr(one, name) for one in counts.values()]).cpu().numpy()
        image = axes.imshow(grid, aspect="auto", cmap="viridis", vmin=0, vmax=max(1, int(grid.max())))
        axes.set(title=f"{name}, {int(grid.sum()):,} in all", xlabel="KV head")
        axes.set_xticks(range(grid.shape[1]))
        figure.colorbar(image, ax=axes)
    panels[0].set(ylabel="layer")
    panels[0].set_yticks(range(len(counts)), [str(i) for i in counts])
    figure.suptitle(about, fontsize=9)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
