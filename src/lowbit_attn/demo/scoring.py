"""Reading a text through a cache: perplexity, top-1 agreement, bytes and speed; and greedy answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache

from lowbit_attn import FORMATS, KVCache, dispatch, kernels, quality, tokenizing, why_not
from lowbit_attn.codebooks.text import help_text
from lowbit_attn.formats import Format, levels
from lowbit_attn.integrations.hf import CACHE_ARGUMENT, LowBitCache

QUESTION = "Using the text above, explain the assert statement in Python in a few sentences."


@dataclass(frozen=True)
class Case:
    """One row of the demo; format None is the 16-bit baseline."""

    label: str
    format: str | None = None
    sinks: int = 0
    range_search: bool | None = None
    path: str | None = None  # the dispatcher's choice
    codebooks: str | None = None  # a file, for a format that needs one

    @property
    def formats(self) -> tuple[Format, ...]:
        """The format, both of a pair of levels, or none."""
        if self.format is None:
            return ()
        pair = levels.parse(self.format)
        return (FORMATS[self.format],) if pair is None else pair.formats

    @property
    def options(self) -> dict | None:
        """Arguments of LowBitCache; None: 16 bit."""
        return None if self.format is None else dict(format=self.format, sinks=self.sinks, codebooks=self.codebooks,
                                                     range_search=self.range_search, path=self.path)


CASES = (
    Case("16 bit"),
    Case("k4v4", "k4v4"),
    Case("k4v2, 32 sinks", "k4v2", sinks=32),
    Case("k2v2, no search", "k2v2", range_search=False),
    Case("k2v2, no search, 32 sinks", "k2v2", sinks=32, range_search=False),
    Case("k2v2, 32 sinks", "k2v2", sinks=32),
    Case("kitty, search", "kitty", sinks=32),
    Case("cq2, 32 sinks", "cq2", sinks=32),
    Case("k4v2-boost, 32 sinks", "k4v2-boost", sinks=32),
    Case("lean, 32 sinks", "lean", sinks=32),
    Case("lean-low, 32 sinks", "lean-low", sinks=32),
    Case("k2tv2 (keys per token)", "k2tv2", range_search=False),
)
LEAST_LEVEL_TOKENS = 2048  # below it, most bytes of a cache of levels are its 16-bit buffers
ANSWERED = ("16 bit", "k4v4", "k2v2, 32 sinks", "k2tv2 (keys per token)")


def cases_of(tokens: int) -> tuple[list[Case], str]:
    """(the rows of the demo for a text of so many tokens, which rows that leaves out and why, or "")."""
    out = [case for case in CASES if tokens < LEAST_LEVEL_TOKENS and case.format and levels.parse(case.format)]
    reason = (f"{' and '.join(case.label for case in out)}: below {LEAST_LEVEL_TOKENS:,} tokens, most of their bytes "
              "are 16-bit buffers of a fixed size (the demo without --quick has them)")
    return [case for case in CASES if case not in out], reason if out else ""


@dataclass
class Score:
    """What one case gave; ``top1`` is the likeliest next token at each place."""

    case: Case
    bits_per_element: float
    cache_bytes: int
    perplexity: float
    tokens_per_s: float
    served_by: str
    top1: torch.Tensor = field(repr=False)
    nll: tuple[float, ...]  # sums of -log p over the predicted tokens of each chunk, ...
    predicted: tuple[int, ...]  # ... and how many those are
    agreement: float = 1.0


def score(model, ids: torch.Tensor, case: Case, on_tokens: Callable[[int], None] = lambda n: None) -> Score:
    """Read ids [1, tokens] in chunks of 128 through a fresh cache; every token but the first is predicted."""
    cache = quality.new_cache(case.options, model)
    quality.use_cache_kind(model, case.options)
    nll, top1, predicted = [], [], []
    start = time.perf_counter()
    for chunk, targets in quality.chunks(ids):
        with torch.inference_mode():
            logits = model(chunk, **{CACHE_ARGUMENT: cache}).logits[0].float()
        nll.append(quality.negative_log_likelihood(logits[: len(targets)], targets))
        predicted.append(len(targets))
        top1.append(logits.argmax(-1))
        on_tokens(chunk.shape[1])
    seconds = time.perf_counter() - start
    return Score(case, quality.bits_per_element(case.options, model), quality.cache_bytes(cache),
                 quality.perplexity(sum(nll), ids.shape[1] - 1), ids.shape[1] / seconds, served_by(cache, model),
                 torch.cat(top1), tuple(nll), tuple(predicted))


def served_by(cache: Cache, model) -> str:
    """Which implementation decodes over this cache, as the dispatcher decides."""
    if not isinstance(cache, LowBitCache):
        return "transformers cache and sdpa attention"
    kv, num_heads = cache.layers[0].kv, model.config.num_attention_heads
    if why_not(kv, num_heads):
        return "reference in torch"
    arch, target = dispatch.target_of(kv.device)
    path = next(p for p in kernels.arch_package(arch).PATHS if not why_not(kv, num_heads, path=p))
    return f"{path} path of {arch}, built for {target}"


def pick_device(num_heads: int = 9, num_heads_kv: int = 3, head_dim: int = 64) -> tuple[str, list[str]]:
    """("cuda", []) if there is a GPU whose kernels serve every case for the model's shape, else ("cpu", reasons).

    Caches of codebooks are not asked about: torch reads them on any device. Of levels, the formats of both are.
    """
    if not torch.cuda.is_available():
        return "cpu", ["no CUDA device is visible to torch"]
    reasons = []
    for name in dict.fromkeys(fmt.name for case in CASES for fmt in case.formats):
        if FORMATS[name].needs_codebooks:
            continue
        kv = KVCache(name, 1, num_heads_kv, head_dim, device="cuda")
        reasons += [f"{name}: {reason}" for reason in why_not(kv, num_heads)]
    return ("cpu" if reasons else "cuda"), reasons


def answer(model, prompt: torch.Tensor, case: Case, tokens: int,
           on_tokens: Callable[[int], None] = lambda n: None) -> list[int]:
    """The first ``tokens`` greedy tokens after prompt [1, tokens], by model.generate on a fresh cache."""
    quality.use_cache_kind(model, case.options)
    with torch.inference_mode():
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt),
                             **{CACHE_ARGUMENT: quality.new_cache(case.options, model)}, do_sample=False,
                             max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, streamer=_Counter(on_tokens))
    return out[0, prompt.shape[1] :].tolist()


def question(tokenizer, context_tokens: int) -> torch.Tensor:
    """A chat prompt [1, tokens]: the start of the help text and a question about it."""
    start = tokenizer(help_text(), add_special_tokens=False).input_ids[:context_tokens]
    message = f"{tokenizer.decode(start)}\n\n{QUESTION}"
    return torch.tensor([tokenizing.chat(tokenizer, message)])


class _Counter:
    """A transformers streamer that only counts new tokens: its first call brings the prompt."""

    def __init__(self, on_tokens: Callable[[int], None]):
        self.on_tokens, self.calls = on_tokens, 0

    def put(self, value: torch.Tensor) -> None:
        if self.calls:
            self.on_tokens(1)
        self.calls += 1

    def end(self) -> None:
        pass
