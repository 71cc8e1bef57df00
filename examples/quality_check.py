"""What low-bit caches cost on your own model and text. No calibration: the text is read, nothing is trained.

    python examples/quality_check.py MODEL TEXT --format k4v4 --format k2v2 --sinks 32
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbit_attn import quality

CLOSE, FAR = 0.01, 0.05  # growth of perplexity, as a share


def main(arguments: list[str] | None = None) -> None:
    """Read the text over each cache; print how perplexity and the likeliest tokens change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name that transformers can load")
    parser.add_argument("text", type=Path, help="a text file, of the kind that you serve")
    parser.add_argument("--format", action="append", help="a format; repeatable; default: k4v4, k4v2, k2v2")
    parser.add_argument("--sinks", type=int, default=32, help="first tokens that stay in 16 bit")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the text to read")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).eval()
    ids = tokenizer(args.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : args.tokens].to(device)
    cases = {name: dict(format=name, sinks=args.sinks) for name in args.format or ("k4v4", "k4v2", "k2v2")}
    whole, *low = quality.compare(model, ids, {"16 bit": None} | cases).values()

    print(f"{ids.shape[1]:,} tokens of {args.text}, first {args.sinks} in 16 bit\n")
    print(f"{'cache':10}  {'bytes':>12}  {'perplexity':>10}  same next token")
    print(f"{'16 bit':10}  {whole.cache_bytes:12,}  {whole.perplexity:10.3f}")
    for name, scores in zip(cases, low):
        print(f"{name:10}  {scores.cache_bytes:12,}  {scores.perplexity:10.3f}  {scores.top1:15.1%}")
    print()
    for name, scores in zip(cases, low):
        print(f"{name}: {verdict(scores.perplexity / whole.perplexity - 1)}")


def verdict(growth: float) -> str:
    """A sentence about how much larger perplexity is."""
    if growth <= CLOSE:
        return f"perplexity changes by {growth:+.1%}: hardly to be told from 16 bit on this text"
    if growth <= FAR:
        return f"perplexity grows by {growth:.1%}: check it on your task"
    return f"perplexity grows by {growth:.1%}: too coarse for this model; try more bits, or more sinks"


if __name__ == "__main__":
    main()
