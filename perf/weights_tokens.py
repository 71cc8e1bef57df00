"""Greedy tokens of a model of codebook weights, as transformers reads its folder: on a CPU, then beside them on a GPU.

    python perf/weights_tokens.py build/e8p4 --device cpu --tokens-file build/e8p4.json
    python perf/weights_tokens.py build/e8p4 --device cuda --tokens-file build/e8p4.json

On the CPU the model is fp32 and each layer multiplies by what its codes decode to; on the GPU it is in its own 16 bits,
with the kernels of its format. Both start from the same question. The GPU generates freely, and then reads the CPU's
tokens: where it would have chosen another one, the line has how much nearer the CPU's own two best were.
"""

import json
import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from provenance import append_result, need, provenance

QUESTION = "Explain in a few sentences what a codebook is in data compression."
RESULTS = "perf/results/weights_tokens.jsonl"


def load(folder: Path, device: str):
    """(model, ids of the question int64 [1, tokens])."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lowbit_attn.linear.hf  # noqa: F401

    dtype = torch.float32 if device == "cpu" else torch.float16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    question = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return model, question["input_ids"].to(device)


@torch.inference_mode()
def greedy(model, ids: torch.Tensor, count: int, given: list[int] | None = None) -> tuple[list[int], list[float]]:
    """(the token chosen at each of ``count`` steps, its logit above the next best); given: tokens that the model reads
    instead of those that it chooses."""
    from transformers import DynamicCache

    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    cache, chosen, margins = DynamicCache(), [], []
    for step in range(count):
        best = model(ids, **{CACHE_ARGUMENT: cache}).logits[0, -1].float().topk(2)
        chosen.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids = torch.tensor([[chosen[-1] if given is None else given[step]]], device=ids.device)
    return chosen, margins


def compare(model, ids: torch.Tensor, reference: dict) -> dict:
    """What a model chooses beside the tokens and margins of a reference."""
    want, margins = reference["tokens"], reference["margins"]
    free, _ = greedy(model, ids, len(want))
    led, _ = greedy(model, ids, len(want), want)
    equal = next((i for i, pair in enumerate(zip(free, want)) if pair[0] != pair[1]), len(want))
    return {"tokens": len(want), "equal_from_the_start": equal,
            "differing": sum(a != b for a, b in zip(led, want)),
            "margins": [round(margin, 4) for a, b, margin in zip(led, want, margins) if a != b]}


def main(
    folder: Annotated[Path, typer.Argument(help="a model that lowbit-attn quantize wrote")],
    tokens_file: Annotated[Path, typer.Option(help="JSON file of the CPU's tokens: written there, read elsewhere")],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    tokens: Annotated[int, typer.Option(help="tokens to generate on the CPU")] = 64,
    output: Annotated[str, typer.Option(help="JSON lines file of the repository")] = RESULTS,
) -> None:
    """Generate on the CPU, or compare the GPU with it."""
    need(gpu=device == "cuda")
    model, ids = load(folder, device)
    format = model.config.quantization_config.format
    if device == "cpu":
        chosen, margins = greedy(model, ids, tokens)
        tokens_file.write_text(json.dumps({"format": format, "tokens": chosen, "margins": margins}))
        print(f"{format}: {len(chosen)} tokens, smallest margin {min(margins):.3f}")
        return
    line = {"format": format, "dtype": str(model.dtype), "arch": os.environ.get("LOWBIT_ATTN_ARCH", "the GPU's own")}
    line |= compare(model, ids, json.loads(tokens_file.read_text()))
    append_result(output, provenance() | line)
    print(line)


if __name__ == "__main__":
    typer.run(main)
