"""Perplexity of a text through vLLM's engine, beside lowbit_attn.quality's: the part quality of perf/engine.py.

Both read the text in chunks of 128 tokens, each of which sees its own tokens in 16 bit and earlier ones packed.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import engine
from engine import Fill

SCORED, CHUNK = 1024, 128  # tokens of the text, and those that are read at once


def lines(model: Path, dtype: str) -> Iterator[dict]:
    """What a row's lines say of a model's folder: vLLM's perplexity, then for our dtypes and ``auto`` our own."""
    yield dict(by="vllm", tokens=SCORED, perplexity=through_engine(model, dtype))
    if engine.is_ours(dtype) or dtype == "auto":
        yield dict(by="lowbit_attn.quality", tokens=SCORED, perplexity=through_transformers(model, dtype))


def text(model: Path) -> list[int]:
    """The first tokens of the help text, as the model's tokenizer has them."""
    from transformers import AutoTokenizer

    from lowbit_attn.codebooks.text import help_text

    return AutoTokenizer.from_pretrained(str(model))(help_text()).input_ids[:SCORED]


def through_engine(model: Path, dtype: str) -> float:
    """Perplexity of the text, whose chunks are steps of vLLM's engine."""
    from vllm import SamplingParams

    llm = engine.engine(model, dtype, SCORED + 1, 1, Fill.prompt, eager=True, max_num_batched_tokens=CHUNK,
                        **({} if engine.is_cpu() else engine.SMALL))
    done, = llm.generate([dict(prompt_token_ids=text(model))],
                         SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
                         use_tqdm=False)
    found = [next(iter(step.values())).logprob for step in done.prompt_logprobs[1:]]
    return math.exp(-sum(found) / len(found))


def through_transformers(model: Path, dtype: str) -> float:
    """Perplexity of the same text by lowbit_attn.quality, in the engine's dtype on the engine's device."""
    import torch

    from lowbit_attn import quality
    from lowbit_attn.demo.model import load_folder

    device, kind = ("cpu", torch.float32) if engine.is_cpu() else ("cuda", torch.bfloat16)
    network, _ = load_folder(model, device, kind)
    tokens = torch.tensor(text(model), device=device)
    return quality.evaluate(network, tokens, cache_options(model, dtype)).perplexity


def cache_options(model: Path, dtype: str) -> dict | None:
    """Options of the transformers cache that holds what a dtype of the engine does; None: 16 bit."""
    if not engine.is_ours(dtype):
        return None
    from transformers import AutoConfig

    from lowbit_attn.integrations.vllm import books, names

    served = names.parse(dtype)
    options = dict(format=served.format.name, sinks=served.sinks)
    if served.format.needs_codebooks:
        config = AutoConfig.from_pretrained(str(model))
        options["codebooks"] = books.find(os.environ.get(names.BOOKS), str(model), config, served.format)
    return options
