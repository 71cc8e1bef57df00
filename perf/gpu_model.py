"""SmolLM2 through the kernels on a GPU: perplexity of the demo's text, and greedy tokens against the reference.

    python perf/gpu_model.py GGUF --format k4v4        one JSON line in perf/results/model.jsonl for each architecture

The reference path reads the same cache by its dequantized values. With --fp32 only q, K and V are rounded to
16 bit, as on a CPU, so that make demo's perplexities there can be compared. Greedy tokens are compared teacher-forced:
both paths see the tokens that the kernels chose, so one difference does not make the rest incomparable; where the
choice differs, the reference's margin between the two tokens is recorded.
"""

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from provenance import append_result, provenance

STEP_TOKENS = 256  # read one by one, so that every layer's decode kernel is in the perplexity


def greedy_against_reference(model, prompt, cache_options: dict, tokens: int) -> dict:
    """Where the kernels' greedy tokens differ from the reference's on one prefix, with margins and logit errors."""
    from lowbit_attn.integrations.hf import LowBitCache

    caches = [LowBitCache(**cache_options), LowBitCache(**cache_options, path="reference")]
    with torch.inference_mode():
        logits = [model(prompt, past_key_values=cache).logits[0, -1].float() for cache in caches]
        margins, errors = [], []
        for _ in range(tokens):
            mine, theirs = (x.argmax() for x in logits)
            errors.append((logits[0] - logits[1]).abs().max().item())
            if mine != theirs:
                margins.append((logits[1][theirs] - logits[1][mine]).item())
            logits = [model(mine.view(1, 1), past_key_values=cache).logits[0, -1].float() for cache in caches]
    return {"greedy_tokens": tokens, "differing": len(margins), "margins": margins, "max_logit_error": max(errors)}


def stepwise_perplexity(model, ids, cache_options: dict) -> float:
    """Perplexity of the last STEP_TOKENS tokens, each read by itself after the rest was read in chunks."""
    from lowbit_attn import quality
    from lowbit_attn.integrations.hf import LowBitCache

    cache, start = LowBitCache(**cache_options), ids.shape[1] - STEP_TOKENS
    nll = 0.0
    with torch.inference_mode():
        for at in range(0, start, quality.CHUNK):
            logits = model(ids[:, at : min(at + quality.CHUNK, start)], past_key_values=cache).logits[0, -1:].float()
        for at in range(start, ids.shape[1]):
            nll += quality.negative_log_likelihood(logits, ids[0, at : at + 1])
            logits = model(ids[:, at : at + 1], past_key_values=cache).logits[0].float()
    return quality.perplexity(nll, STEP_TOKENS)


def main(
    gguf: Annotated[Path, typer.Argument(help="SmolLM2-135M-Instruct.Q4_1.gguf, as make demo unpacks it")],
    format: Annotated[list[str], typer.Option(help="formats to run")] = ["k4v4"],
    arch: Annotated[list[str], typer.Option(help="hopper or ampere; may be given twice")] = ["hopper", "ampere"],
    cpu_perplexity: Annotated[list[float], typer.Option(help="make demo's value of each format on a CPU")] = [],
    fp32: Annotated[bool, typer.Option("--fp32", help="the model in fp32 instead of fp16")] = False,
    tokens: Annotated[int, typer.Option(help="greedy tokens")] = 64,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = "perf/results/model.jsonl",
) -> None:
    """Score and generate with each format on each architecture's kernels."""
    from lowbit_attn.demo import model as models
    from lowbit_attn.demo import scoring

    model, tokenizer = models.load(gguf, "cuda", torch.float32 if fp32 else None)
    ids = tokenizer(scoring.help_text(), return_tensors="pt").input_ids[:, :2048].cuda()
    prompt = scoring.question(tokenizer, 600).cuda()
    for name in arch:
        os.environ["LOWBIT_ATTN_ARCH"] = name
        for i, fmt in enumerate(format):
            options = dict(format=fmt)
            score, reference = (scoring.score(model, ids, scoring.Case(fmt, fmt, path=path))
                                for path in (None, "reference"))
            line = provenance() | {"arch": name, "format": fmt, "model": "SmolLM2-135M-Instruct",
                                   "dtype": str(model.dtype), "served_by": score.served_by,
                                   "perplexity": round(score.perplexity, 4),
                                   "perplexity_reference": round(reference.perplexity, 4)}
            if i < len(cpu_perplexity):
                line["cpu_perplexity"] = cpu_perplexity[i]
            for path in (None, "reference"):
                value = stepwise_perplexity(model, ids, options | {"path": path})
                line[f"stepwise_perplexity_{path or 'kernels'}"] = round(value, 4)
            line |= greedy_against_reference(model, prompt, options, tokens)
            append_result(output, line)
            print(line)


if __name__ == "__main__":
    typer.run(main)
