"""Quality of codebook weights on a small real model, as JSON lines; needs no GPU.

    lowbit-attn quantize --format e8p4 --out build/e8p4
    python perf/weights.py model --folder e8p4=build/e8p4 --folder gptvq2=build/gptvq2
    python perf/weights.py model --folder e8p4=build/e8p4 --cache kcq4vcq2 --codebooks FILE    with a low-bit cache, too
    python perf/weights.py recall --folder e8p4=build/e8p4          codes found again in prompts
    python perf/weights.py layer --format e8p4 --format gptvq2      one decoder layer, in a minute

SmolLM2-135M-Instruct reads the first 2,048 tokens of Python's help texts in chunks of 128 tokens over a 16-bit cache,
in fp32, every token but the first predicted (lowbit_attn.quality): with its own weights, with them rounded to the
nearest of 4 bits a group of 128 and 2 bits a group of 64, and as each folder has them, dequantized. ``recall`` asks the
same models for codes in prompts (lowbit_attn.recall). ``layer`` quantizes three matrices of one decoder layer and says
how far y is off on text that calibration did not see.
"""

import hashlib
import time
from typing import Annotated

import torch
import typer
from provenance import append_result, provenance

app = typer.Typer(no_args_is_help=True, add_completion=False)

MODEL = "SmolLM2-135M-Instruct"
RESULTS = "perf/results/weights.jsonl"
ROUNDED = {"int4 g128": (4, 128), "int2 g64": (2, 64)}  # bits, group
METADATA_BITS = 32  # scale and minimum of a group in fp16
MATRICES = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")  # of a layer
HELD_OUT = 2048  # tokens
SIXTEEN_BIT = "16 bit"

FoldersOption = Annotated[list[str], typer.Option("--folder", help="LABEL=PATH of a quantized model; repeatable.")]
RoundedOption = Annotated[bool, typer.Option(help="Also the model's own weights rounded to nearest.")]
CacheOption = Annotated[str | None, typer.Option(help="Format of the KV cache.")]
BooksOption = Annotated[str | None, typer.Option(help="Its codebooks: a file of lowbit-attn calibrate.")]
SinksOption = Annotated[int | None, typer.Option(help="First tokens that stay in 16 bit; default: the format's.")]
ThreadsOption = Annotated[int, typer.Option(help="CPU threads of torch.")]
OutputOption = Annotated[str, typer.Option(help="JSON lines file of the repository.")]


def round_to_nearest(w: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """W fp32 [n, k] rounded to 2^bits levels between each group's minimum and maximum along k."""
    rounded = []
    for part in w.split(group, 1):
        low, high = part.amin(1, True), part.amax(1, True)
        step = ((high - low) / (2**bits - 1)).clamp(min=1e-12)
        rounded.append(((part - low) / step).round() * step + low)
    return torch.cat(rounded, 1)


def read(model, ids: torch.Tensor, options: dict | None) -> torch.Tensor:
    """Logits fp32 [tokens, vocabulary] over one cache: options of LowBitCache, None: 16 bit."""
    from lowbit_attn import quality
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    cache = quality.new_cache(options)
    quality.use_cache_kind(model, options)
    with torch.inference_mode():
        return torch.cat([model(chunk, **{CACHE_ARGUMENT: cache}).logits[0].float()
                          for chunk, _ in quality.chunks(ids)])


def line_of(logits: torch.Tensor, baseline: torch.Tensor, ids: torch.Tensor) -> dict:
    """Perplexity, mean KL(16 bit || this) in nats, top-1 agreement."""
    from lowbit_attn import quality

    nll = quality.negative_log_likelihood(logits[:-1], ids[0, 1:])
    kl = sum(quality.kl_divergence(a, b) for a, b in zip(baseline.split(128), logits.split(128)))
    return {"perplexity": round(quality.perplexity(nll, ids.shape[1] - 1), 4), "kl": round(kl / len(logits), 5),
            "top1": round(quality.agreement(logits.argmax(-1), baseline.argmax(-1)), 4)}


def options_of(cache: str | None, codebooks: str | None, sinks: int | None) -> dict | None:
    """Options of LowBitCache; None: 16 bit."""
    if cache is None and (codebooks, sinks) != (None, None):
        raise typer.BadParameter("codebooks and sinks are of a --cache, and none is named")
    return cache and dict(format=cache, codebooks=codebooks, sinks=sinks)


def about_cache(options: dict | None) -> dict:
    """What a line says of a cache: its name, and which codebooks it read."""
    if options is None:
        return {"cache": "16 bit"}
    from lowbit_attn.codebooks import Codebooks

    books = options["codebooks"] and Codebooks.load(options["codebooks"])
    learned = books and {"hash": books.hash[:16], "model": books.metadata.get("model")}
    return {"cache": options["format"], "sinks": options["sinks"], "codebooks": learned}


def models_of(model, folders: dict[str, str], with_rounded: bool):
    """(label, bits a weight of the quantized layers, model) of each case, the model itself first; the rounded ones
    overwrite it."""
    from transformers import AutoModelForCausalLM

    import lowbit_attn.linear.hf  # noqa: F401
    from lowbit_attn.linear import VQLinear
    from lowbit_attn.linear.calibration import decoder_layers, linears

    yield SIXTEEN_BIT, 16, model
    for label, path in folders.items():
        quantized = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        weights = [module.vq_weight for module in quantized.modules() if isinstance(module, VQLinear)]
        bits = 8 * sum(w.nbytes for w in weights) / sum(w.n * w.k for w in weights)
        yield label, bits, quantized.dequantize(torch.float32) or quantized
    kept = {module: module.weight.detach().clone() for layer in decoder_layers(model)[1]
            for module in linears(layer).values()}
    for label, (bits, group) in ROUNDED.items() if with_rounded else ():
        for module, weight in kept.items():
            module.weight.data.copy_(round_to_nearest(weight, bits, group))
        yield label, bits + METADATA_BITS / group, model


def loaded(threads: int):
    """(model, tokenizer) with its own weights, in fp32."""
    from lowbit_attn.demo import model as models

    torch.set_num_threads(threads)
    return models.load(models.fetch(models.default_folder()), "cpu")


@app.command(name="model")
def whole_model(
    folder: FoldersOption = [],
    rounded: RoundedOption = True,
    cache: CacheOption = None,
    codebooks: BooksOption = None,
    sinks: SinksOption = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read.")] = 2048,
    threads: ThreadsOption = 2,
    output: OutputOption = RESULTS,
) -> None:
    """Score every case and append a line for each; beside the model's own weights over a 16-bit cache."""
    from lowbit_attn.demo import scoring

    options = options_of(cache, codebooks, sinks)
    model, tokenizer = loaded(threads)
    ids = tokenizer(scoring.help_text(), return_tensors="pt").input_ids[:, :tokens]
    digest = hashlib.sha256(tokenizer.decode(ids[0]).encode()).hexdigest()[:16]
    about = provenance() | {"model": MODEL, "tokens": ids.shape[1], "text_sha256": digest} | about_cache(options)
    baseline = read(model, ids, None)
    for label, bits, case in models_of(model, dict(item.split("=", 1) for item in folder), rounded):
        start = time.perf_counter()
        line = {"label": label, "bits_per_weight": round(bits, 3)} | line_of(read(case, ids, options), baseline, ids)
        append_result(output, about | line)
        print(f"{label:12} {bits:6.2f} bits  perplexity {line['perplexity']:9.3f}  KL {line['kl']:.4f}  "
              f"top-1 {line['top1']:.3f}  {time.perf_counter() - start:.0f} s", flush=True)


@app.command()
def recall(
    folder: FoldersOption = [],
    rounded: RoundedOption = True,
    cache: CacheOption = None,
    codebooks: BooksOption = None,
    sinks: SinksOption = None,
    questions: Annotated[int, typer.Option(min=1, help="Codes that are asked for.")] = 40,
    threads: ThreadsOption = 2,
    output: OutputOption = RESULTS,
) -> None:
    """Ask every case for codes over a 16-bit cache, and over --cache where it is named; a line for each."""
    from lowbit_attn import recall as asking
    from lowbit_attn.demo import scoring

    options = options_of(cache, codebooks, sinks)
    model, tokenizer = loaded(threads)
    caches = {SIXTEEN_BIT: None} | ({} if options is None else {cache: options})
    about = provenance() | {"model": MODEL, "task": "recall"}
    for label, bits, case in models_of(model, dict(item.split("=", 1) for item in folder), rounded):
        scores = asking.recall(case, tokenizer, scoring.help_text(None), caches, questions)
        for name, score in scores.items():
            append_result(output, about | about_cache(caches[name]) | {
                "label": label, "bits_per_weight": round(bits, 3), "questions": score.questions, "right": score.right,
                "tokens": score.tokens})
            print(f"{label:12} {bits:6.2f} bits  cache {name:9} {score.right} of {score.questions}", flush=True)


@app.command()
def layer(
    format: Annotated[list[str], typer.Option(help="A format; repeatable.")] = ["e8p4"],
    index: Annotated[int, typer.Option(help="Which decoder layer.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of the calibration text.")] = 8192,
    rounded: Annotated[bool, typer.Option(help="Also rounded to nearest.")] = True,
    output: OutputOption = RESULTS,
) -> None:
    """Root of the squared error of y beside y, on the text read for calibration and on 2,048 tokens after it."""
    from lowbit_attn.cli.quantize import calibration_text
    from lowbit_attn.demo import model as models
    from lowbit_attn.linear import proxy_error, quantize
    from lowbit_attn.linear.calibration import Walk, linears, sequences

    model, tokenizer = models.load(models.fetch(models.default_folder()), "cpu")
    ids = tokenizer(calibration_text(), return_tensors="pt").input_ids[0]
    moments = []
    for part in (ids[:tokens], ids[tokens : tokens + HELD_OUT]):
        walk = Walk(model, sequences(part, len(part)))
        for before in range(index):
            walk.advance(before)
        moments.append(walk.moments(index))
    about = provenance() | {"model": MODEL, "layer": index, "tokens": tokens, "held_out": HELD_OUT}
    modules = linears(walk.layers[index])
    for label in (*format, *(ROUNDED if rounded else ())):
        errors = []
        for name in MATRICES:
            w = modules[name].weight.detach()
            q = round_to_nearest(w, *ROUNDED[label]) if label in ROUNDED else quantize(
                w, label, moments[0][name]).dequantize()
            errors.append([round(proxy_error(w, q, part[name]) ** 0.5, 4) for part in moments])
        append_result(output, about | {"label": label, "matrices": MATRICES, "errors": errors})
        print(f"{label:12}", *(f"{name} {read:.3f}, held out {held:.3f};" for name, (read, held)
                               in zip(MATRICES, errors)), flush=True)


if __name__ == "__main__":
    app()
