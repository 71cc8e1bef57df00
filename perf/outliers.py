"""Error of decode's o on keys and values of real models, beside 16-bit attention's over the same cached values.

    python perf/outliers.py capture MODEL.gguf --model NAME --npz FILE   q, k, v of every layer, on the CPU
    python perf/outliers.py measure --npz FILE                    through the numpy emulations of the kernels
    python perf/outliers.py measure --npz FILE --kernels          through the kernels of this GPU
    python perf/outliers.py measure --npz FILE --kernels --keys   the kernels which that needs, built where they are not
    python perf/outliers.py table                                 the newest line of each model, layer, format and path

``measure`` without --npz makes N(0, 1) data with one channel or one token scaled up. An error is |o - want| / |want| of
one query row of one head, o in fp16 and want from fp64 attention over the cache's dequantized values. 16-bit attention
rounds these values, P and o to fp16 and adds in fp32 or better. A line a layer, format and path goes to
perf/results/outliers.jsonl; its "over" says whether the 99th percentile exceeds 3 times 16-bit attention's + 1e-3.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import typer
from provenance import ROOT, append_result, provenance

from lowbit_attn import KVCache, decode, layout, testing

app = typer.Typer(no_args_is_help=True, add_completion=False)

RESULTS = "perf/results/outliers.jsonl"
FORMATS = {"integer": ("k4v4", "k2v2", "k4v2", "k8v4", "kitty-pro"),
           "register": ("k4v4", "k2v2", "k4v2", "k8v4", "k4tv4")}  # path -> formats
ROWS = {"integer": 4, "register": 8}  # path -> query rows of a KV head in a call
DEVICES = {False: "cpu", True: "cuda"}  # by whether kernels compute
LEFT_IN_16_BIT = 64  # tokens captured beyond whole pages
QUERIES = 8  # of a draw
# name -> (what is scaled, factor)
SYNTHETIC = {"normal": ("none", 1), "k-channel-30x": ("channel", 30), "k-channel-100x": ("channel", 100),
             "k-channel-200x": ("channel", 200), "k-token-50x": ("k", 50), "v-token-50x": ("v", 50)}
DRAWS = 4  # of each

Npz = Annotated[list[Path], typer.Option(help="What capture wrote; repeatable.")]
Results = Annotated[str, typer.Option(help="JSON lines file of the repository.")]


class Layer(NamedTuple):
    """fp16 q [queries, num_heads, head_dim]; k, v [tokens, num_heads_kv, head_dim]; q and k after RoPE."""

    model: str
    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    softmax_scale: float


# ---- where q, k and v come from


@app.command()
def capture(
    gguf: Annotated[Path, typer.Argument(help="A model in GGUF that transformers can load.")],
    model: Annotated[str, typer.Option(help="Its name in the results.")],
    npz: Annotated[Path, typer.Option(help="File to write.")],
    tokens: Annotated[int, typer.Option(help="Of the text that are read.")] = 8 * layout.PAGE_TOKENS + LEFT_IN_16_BIT,
    queries: Annotated[int, typer.Option(min=1, help="The last ones, each measured over all saved tokens.")] = 64,
) -> None:
    """Read Python's help texts in one pass and save q, k and v of every layer; of a window, its tokens only."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    from lowbit_attn.demo import model as models
    from lowbit_attn.demo import scoring

    found = {"model": np.array(model)}

    def attention(module, query, key, value, mask, **options):
        window = getattr(module, "sliding_window", None)
        first = max(0, key.shape[2] - window - LEFT_IN_16_BIT) if window else 0
        sides = query[0, :, -queries:], key[0, :, first:], value[0, :, first:]
        for name, side in zip("qkv", sides):
            found[f"{name}{module.layer_idx}"] = side.transpose(0, 1).half().numpy()
        scale = options.get("scaling")
        found[f"scale{module.layer_idx}"] = np.array(query.shape[-1] ** -0.5 if scale is None else scale)
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("captured", attention)
    AttentionMaskInterface.register("captured", sdpa_mask)
    network, tokenizer = models.load(gguf, "cpu")
    network.set_attn_implementation("captured")
    ids = tokenizer(scoring.help_text(), return_tensors="pt").input_ids[:, :tokens]
    with torch.inference_mode():
        logits = network(ids).logits[0].float()
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
    np.savez_compressed(npz, **found)
    print(f"{npz}: {npz.stat().st_size / 1e6:.1f} MB, {ids.shape[1]} tokens, perplexity {loss.exp():.2f}")


def captured(npz: Path) -> Iterator[Layer]:
    """The layers of a captured model."""
    with np.load(npz) as found:
        count = sum(name.startswith("scale") for name in found.files)
        for i in range(count):
            sides = (torch.from_numpy(found[f"{name}{i}"]) for name in "qkv")
            yield Layer(str(found["model"]), i, *sides, float(found[f"scale{i}"]))


def synthetic() -> Iterator[Layer]:
    """N(0, 1) data of which one channel of k, or one token of k or v, is larger; a draw counts as a layer."""
    for name, (what, factor) in SYNTHETIC.items():
        for draw in range(DRAWS):
            generator = torch.Generator().manual_seed(draw)
            q = torch.randn(QUERIES, 8, 128, generator=generator)
            k, v = (torch.randn(5 * layout.PAGE_TOKENS + LEFT_IN_16_BIT, 2, 128, generator=generator) for _ in range(2))
            if what == "channel":
                k[..., 5] *= factor
            elif what in ("k", "v"):
                (k if what == "k" else v)[len(k) // 3] *= factor
            yield Layer(name, draw, q.half(), k.half(), v.half(), 128**-0.5)


# ---- errors


def query_rows(layer: Layer) -> torch.Tensor:
    """q [num_heads_kv, rows, head_dim]: query by query, the query heads of a KV head."""
    (_, num_heads, head_dim), num_heads_kv = layer.q.shape, layer.k.shape[1]
    by_head = layer.q.unflatten(1, (num_heads_kv, num_heads // num_heads_kv)).transpose(0, 1)
    return by_head.reshape(num_heads_kv, -1, head_dim)


def emulated(q: torch.Tensor, cache: KVCache, path: str, softmax_scale: float) -> torch.Tensor:
    """o of the kernels' arithmetic in numpy, from the tests."""
    if (folder := str(ROOT / "tests")) not in sys.path:
        sys.path.append(folder)
    from sim import emulation, integer_emulation

    warp = integer_emulation.Warp if path == "integer" else None
    return emulation.decode(q, cache, 1, 2, softmax_scale=softmax_scale, make_warp=warp)[0]


def by_kernels(q: torch.Tensor, cache: KVCache, path: str, softmax_scale: float) -> torch.Tensor:
    """o of this GPU's kernel."""
    return decode(q, cache, softmax_scale=softmax_scale, path=path)[0]


def errors(layer: Layer, fmt: str, path: str, kernels: bool) -> tuple[np.ndarray, np.ndarray]:
    """(of the path, of 16-bit attention) for each query row of each head; with kernels, all of it on the GPU."""
    tokens, num_heads_kv, head_dim = layer.k.shape
    device, attend = DEVICES[kernels], by_kernels if kernels else emulated
    cache = KVCache(fmt, -(-tokens // layout.PAGE_TOKENS), num_heads_kv, head_dim, torch.float16, device)
    cache.prefill(0, layer.k.to(device), layer.v.to(device))
    rows, (k, v) = query_rows(layer).to(device), cache.gather(0)
    blocks = [attend(q.reshape(1, 1, -1, head_dim), cache, path, layer.softmax_scale)
              for q in rows.split(ROWS[path], 1)]
    ours = torch.cat([o.reshape(num_heads_kv, -1, head_dim) for o in blocks], 1).half()
    q, options = rows.reshape(1, -1, head_dim), testing.Attention(softmax_scale=layer.softmax_scale)
    want, theirs = (testing.attention_fp64(q, k, v, options, rounding)[0][0] for rounding in (None, torch.float16))
    return tuple(((o.double() - want).norm(dim=-1) / want.norm(dim=-1)).cpu().numpy()
                 for o in (ours.reshape(want.shape), theirs))


def percentiles(values: np.ndarray) -> list[float]:
    """50th, 99th, maximum, to three digits."""
    return [float(f"{x:.3g}") for x in (np.median(values), np.quantile(values, 0.99), values.max())]


def is_over(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.quantile(ours, 0.99) > 3 * np.quantile(theirs, 0.99) + 1e-3)


def line_of(layer: Layer, fmt: str, path: str, kernels: bool) -> dict:
    ours, theirs = errors(layer, fmt, path, kernels)
    return {"model": layer.model, "layer": layer.index, "format": fmt, "path": path,
            "by": "kernels" if kernels else "emulation", "tokens": len(layer.k), "rows": len(ours),
            "error": percentiles(ours), "error_16_bit": percentiles(theirs), "over": is_over(ours, theirs),
            "rows_over": int((ours > 3 * theirs + 1e-3).sum())}


def needed_keys(layers: list[Layer]) -> list:
    """The kernels of ``measure --kernels`` on Hopper: of decode, and those that fill and read pages."""
    from lowbit_attn import FORMATS as ALL
    from lowbit_attn import kernels

    keys: dict = {}
    for head_dim in sorted({layer.k.shape[2] for layer in layers}):
        for path, names in FORMATS.items():
            for name in names:
                picked, reasons = kernels.pick("hopper", ALL[name], head_dim, torch.float16, ROWS[path], path)
                if picked is None:
                    raise typer.BadParameter(f"{name} on path {path}: {'; '.join(reasons)}")
                key = kernels.decode_key("hopper", "sm_90a", "float16", head_dim, name, *picked)
                packing = kernels.packing_keys("sm_90a", "float16", head_dim, ALL[name])
                keys |= dict.fromkeys((key, *packing))
    return list(keys)


@app.command()
def measure(
    npz: Npz = [],
    kernels: Annotated[bool, typer.Option("--kernels", help="The GPU's kernels instead of the emulations.")] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Only build and name the kernels which that needs.")] = False,
    output: Results = RESULTS,
) -> None:
    """Append a line for each layer, format and path, and show the table."""
    layers = [layer for file in npz for layer in captured(file)] or list(synthetic())
    if keys:
        from lowbit_attn.build import build_all

        for key, error in build_all(needed_keys(layers)):
            print(key, f"not built: {error}" if error else "built", flush=True)
        return
    torch.set_num_threads(1)
    about, lines = provenance(), []
    for layer in layers:
        for path, names in FORMATS.items():
            for fmt in names:
                lines.append(about | line_of(layer, fmt, path, kernels))
                append_result(output, lines[-1])
    show(lines)


@app.command()
def table(results: Results = RESULTS) -> None:
    """Show the newest lines."""
    lines = [json.loads(line) for line in (ROOT / results).read_text().splitlines()]
    newest = {tuple(line[key] for key in ("model", "layer", "format", "path", "by")): line for line in lines}
    show(list(newest.values()))


def show(lines: list[dict]) -> None:
    """A row for each model, format and path: its layers' median of the 50th percentile, their largest 99th and maximum,
    and the layers over the bound."""
    print(f"{'model':20}{'format':11}{'path':10}{'by':11}{'50th':>8}{'99th':>9}{'max':>9}  16 bit:"
          f"{'50th':>8}{'99th':>9}{'max':>9}  layers over, of")
    groups: dict[tuple, list[dict]] = {}
    for line in lines:
        groups.setdefault(tuple(line[key] for key in ("model", "format", "path", "by")), []).append(line)
    for (model, fmt, path, by), of_layers in groups.items():
        ours, theirs = (np.array([line[name] for line in of_layers]) for name in ("error", "error_16_bit"))
        first, second = ([np.median(x[:, 0]), *x[:, 1:].max(0)] for x in (ours, theirs))
        over = sum(line["over"] for line in of_layers)
        print(f"{model:20}{fmt:11}{path:10}{by:11}{first[0]:8.1e}{first[1]:9.1e}{first[2]:9.1e}"
              f"         {second[0]:8.1e}{second[1]:9.1e}{second[2]:9.1e}  {over:3}, {len(of_layers)}")


if __name__ == "__main__":
    app()
