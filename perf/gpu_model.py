"""SmolLM2 through the kernels on a GPU: perplexity of the demo's texts, and greedy tokens against the reference.

    python perf/gpu_model.py GGUF --format k4v4        one JSON line in perf/results/model.jsonl for each architecture

The reference path reads the same cache by its dequantized values. With --fp32 only q, K and V are rounded to
16 bit, as on a CPU, where --device cpu gives the same texts' perplexities. Greedy tokens are compared teacher-forced:
both paths see the tokens that the kernels chose, so one difference does not make the rest incomparable; where the
choice differs, the reference's margin between the two tokens is recorded.
"""

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance

TEXT_TOKENS = 2048
STEP_TOKENS = 256  # read one by one, so that every layer's decode kernel is in the perplexity


def greedy_against_reference(model, prompt, cache_options: dict, tokens: int) -> dict:
    """Where the kernels' greedy tokens differ from the reference's on one prefix, with margins and logit errors."""
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache

    caches = [LowBitCache(**cache_options), LowBitCache(**cache_options, path="reference")]
    with torch.inference_mode():
        logits = [model(prompt, **{CACHE_ARGUMENT: cache}).logits[0, -1].float() for cache in caches]
        margins, errors = [], []
        for _ in range(tokens):
            mine, theirs = (x.argmax() for x in logits)
            errors.append((logits[0] - logits[1]).abs().max().item())
            if mine != theirs:
                margins.append((logits[1][theirs] - logits[1][mine]).item())
            logits = [model(mine.view(1, 1), **{CACHE_ARGUMENT: cache}).logits[0, -1].float() for cache in caches]
    return {"greedy_tokens": tokens, "differing": len(margins), "margins": margins, "max_logit_error": max(errors)}


def stepwise_perplexity(model, ids, cache_options: dict) -> float:
    """Perplexity of the last STEP_TOKENS tokens, each read by itself after the rest was read in chunks."""
    from lowbit_attn import quality
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache

    cache, start = LowBitCache(**cache_options), ids.shape[1] - STEP_TOKENS
    nll = 0.0
    with torch.inference_mode():
        for at in range(0, start, quality.CHUNK):
            chunk = ids[:, at : min(at + quality.CHUNK, start)]
            logits = model(chunk, **{CACHE_ARGUMENT: cache}).logits[0, -1:].float()
        for at in range(start, ids.shape[1]):
            nll += quality.negative_log_likelihood(logits, ids[0, at : at + 1])
            logits = model(ids[:, at : at + 1], **{CACHE_ARGUMENT: cache}).logits[0].float()
    return quality.perplexity(nll, STEP_TOKENS)


def text_perplexity(model, texts: torch.Tensor, case) -> tuple[float, str]:
    """Over all of texts [count, tokens], each through a cache of its own; and what serves its decode calls."""
    from lowbit_attn.demo import scoring

    scores = [scoring.score(model, ids[None], case) for ids in texts]
    return math.exp(sum(math.log(score.perplexity) for score in scores) / len(scores)), scores[0].served_by


def compare_paths(model, texts: torch.Tensor, prompt: torch.Tensor, case, tokens: int) -> dict:
    """What the kernels give beside the reference path on the same device; tokens 0: of the texts alone."""
    line = {"perplexity_reference": round(text_perplexity(model, texts, replace(case, path="reference"))[0], 4)}
    if not tokens:
        return line
    options = dict(format=case.format, codebooks=case.codebooks)
    for path in (None, "reference"):
        value = stepwise_perplexity(model, texts[:1], options | dict(path=path))
        line[f"stepwise_perplexity_{path or 'kernels'}"] = round(value, 4)
    return line | greedy_against_reference(model, prompt, options, tokens)


def main(
    gguf: Annotated[Path, typer.Argument(help="SmolLM2-135M-Instruct.Q4_1.gguf, as make demo unpacks it")],
    format: Annotated[list[str], typer.Option(help="formats to run")] = ["k4v4"],
    arch: Annotated[list[str], typer.Option(help="hopper or ampere; may be given twice")] = ["hopper", "ampere"],
    device: Annotated[str, typer.Option(help="cuda; or cpu, for the texts' perplexity there alone")] = "cuda",
    fp32: Annotated[bool, typer.Option("--fp32", help="the model in fp32 instead of fp16")] = False,
    texts: Annotated[int, typer.Option(help="stretches of 2,048 tokens of Python's help texts", min=1,
                                           max=50)] = 8,
    tokens: Annotated[int, typer.Option(help="greedy tokens; 0: the texts alone")] = 64,
    codebooks: Annotated[Path | None, typer.Option(help="folder of smollm2.FORMAT.safetensors, which lowbit-attn "
                                                        "calibrate made, for formats that need some")] = None,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/model.jsonl",
) -> None:
    """Score and generate with each format on each architecture's kernels."""
    need(gpu=device == "cuda")
    from lowbit_attn.demo import model as models
    from lowbit_attn.demo import scoring

    model, tokenizer = models.load(gguf, device, torch.float32 if fp32 else None)
    ids = tokenizer(scoring.help_text(None), return_tensors="pt").input_ids[0].to(device)
    stretches = ids[: texts * TEXT_TOKENS].view(texts, TEXT_TOKENS)
    prompt = scoring.question(tokenizer, 600).to(device)
    for name in arch if device == "cuda" else ["cpu"]:
        if device == "cuda":
            os.environ["LOWBIT_ATTN_ARCH"] = name
        for fmt in format:
            file = codebooks and codebooks / f"smollm2.{fmt}.safetensors"
            case = scoring.Case(fmt, fmt, codebooks=str(file) if file and file.is_file() else None)
            value, served_by = text_perplexity(model, stretches, case)
            line = provenance() | {"arch": name, "format": fmt, "model": "SmolLM2-135M-Instruct",
                                   "dtype": str(model.dtype), "served_by": served_by, "texts": texts,
                                   "perplexity": round(value, 4)}
            if device == "cuda":
                line |= compare_paths(model, stretches, prompt, case, tokens)
            append_result(output, line)
            print(line)


if __name__ == "__main__":
    typer.run(main)
