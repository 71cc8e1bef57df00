"""An answer about a long document, with transformers, over a 16-bit cache and over a low-bit one.

    python examples/hf_long_document.py MODEL DOCUMENT "What does the document say about pages?"
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache


def main(arguments: list[str] | None = None) -> None:
    """Answer twice, and print both answers with the bytes and seconds that they took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name that transformers can load")
    parser.add_argument("document", type=Path, help="a text file")
    parser.add_argument("question")
    parser.add_argument("--format", default="k4v4")
    parser.add_argument("--sinks", type=int, default=32, help="first tokens that stay in 16 bit")
    parser.add_argument("--tokens", type=int, default=80, help="length of the answer at most")
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").to(device).eval()
    ids = prompt(tokenizer, args.document.read_text(encoding="utf-8"), args.question).to(device)
    print(f"The document and the question have {ids.shape[1]:,} tokens.\n")

    model.set_attn_implementation("sdpa")
    whole = answer(model, tokenizer, ids, args.tokens)
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * (ids.shape[1] + whole[1] - 1)
    show("16 bit", *whole, size)

    model.set_attn_implementation("lowbit")
    cache = LowBitCache(args.format, sinks=args.sinks)
    low = answer(model, tokenizer, ids, args.tokens, **{CACHE_ARGUMENT: cache})
    show(f"{args.format}, {args.sinks} sinks", *low, cache.nbytes)
    print("The answers are the same." if low[0] == whole[0] else "The answers differ.")


def prompt(tokenizer, document: str, question: str) -> torch.Tensor:
    """Token ids of the document and the question, in the model's chat template if it has one."""
    text = f"{document}\n\n{question}"
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                             add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).input_ids


@torch.inference_mode()
def answer(model, tokenizer, ids: torch.Tensor, tokens: int, **cache) -> tuple[str, int, float]:
    """(text, number of its tokens, seconds)."""
    start = time.perf_counter()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
                         pad_token_id=0, **cache)
    new = out[0, ids.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True), len(new), time.perf_counter() - start


def show(name: str, text: str, tokens: int, seconds: float, nbytes: int) -> None:
    print(f"{name}: {nbytes:,} bytes of KV cache, {tokens} tokens in {seconds:.1f} s\n  {text.strip()}\n")


if __name__ == "__main__":
    main()
