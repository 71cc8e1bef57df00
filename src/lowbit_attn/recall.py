"""Key-value recall: whether a model finds in a compressed prompt what it is asked for afterwards.

A list of "word: digits" lines stands between prose, so that its tokens have left the 16-bit window when the prompt
ends. The prompt is read in one call, that is in 16 bit, and packed once; then each question ("word:") continues a copy
of the cache, and counts where all digits are the likeliest tokens. Perplexity hardly moves when tokens are dropped that
prose never asks for again; this does.
"""

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from lowbit_attn import tokenizing
from lowbit_attn.integrations.hf import CACHE_ARGUMENT
from lowbit_attn.quality import bits_per_element, new_cache, restored_attention, use_cache_kind

PAIRS, ASKED, DIGITS = 12, 10, 4  # lines of a list, questions to a context, digits of a code
BEFORE, AFTER = 100, 900  # characters of prose; what follows the list pushes it out of a window of 128 tokens
SEED = 1
WORDS = """acorn badge barrel blanket bottle branch bucket button camera canyon carpet castle cherry circus coffee
copper cotton cradle curtain diamond dolphin feather fiddle flower fossil goblet hammock helmet jungle
kitten ladder lantern magnet marble meadow mirror needle office orchard oyster paddle parrot pepper pillow
pirate pocket potato puzzle rabbit ribbon rocket saddle shovel silver sparrow spider statue sunset tailor
temple thunder ticket tunnel turtle velvet violin wagon walnut whistle window zipper""".split()


@dataclass(frozen=True)
class RecallScore:
    """questions: asked; right: answered with all digits; tokens: of all contexts; bits_per_element: of packed pages."""

    questions: int
    right: int
    tokens: int
    bits_per_element: float

    @property
    def recall(self) -> float:
        return self.right / self.questions


@dataclass(frozen=True)
class Context:
    """A prompt's text, and the code of each word in it that is asked for."""

    text: str
    codes: dict[str, str]


def contexts(prose: str, questions: int) -> list[Context]:
    """Contexts with this many questions in all, the same for the same prose; ValueError unless prose is long enough."""
    if questions < 1:
        raise ValueError(f"questions: got {questions}, supported: 1 or more")
    if len(prose) <= AFTER:
        raise ValueError(f"text: got {len(prose)} characters, supported: more than {AFTER}")
    rng, made = random.Random(SEED), []
    for first in range(0, questions, ASKED):
        codes = {word: str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for word in rng.sample(WORDS, PAIRS)}
        before, after = (rng.randrange(len(prose) - AFTER) for _ in range(2))
        lines = "".join(f"{word}: {code}\n" for word, code in codes.items())
        asked = rng.sample(sorted(codes), min(ASKED, questions - first))
        made.append(Context(f"{prose[before : before + BEFORE]}\n\nThe list of codes:\n{lines}\n"
                            f"{prose[after : after + AFTER]}\n", {word: codes[word] for word in asked}))
    return made


def recall(model, tokenizer, prose: str, cases: Mapping[str, Mapping | None], questions: int = 160,
           on_questions: Callable[[int], None] = lambda n: None) -> dict[str, RecallScore]:
    """Scores of several caches by label, over the same contexts and questions.

    cases: label -> options of LowBitCache, None: 16 bit; prose: what the contexts are cut from. on_questions is told
    how many questions all cases have answered since the last call.
    """
    made = contexts(prose, questions)
    right, tokens = dict.fromkeys(cases, 0), 0
    with restored_attention(model), torch.inference_mode():
        for context in made:
            ids = tokenizing.tensor(tokenizer, context.text, model.device)
            tokens += ids.shape[1]
            for label, options in cases.items():
                cache = new_cache(options, model, ids.shape[1] + 64)
                use_cache_kind(model, options)
                model(ids, **{CACHE_ARGUMENT: cache}, logits_to_keep=1)
                for word, code in context.codes.items():
                    right[label] += _is_right(model, tokenizer, copy.deepcopy(cache), word, code)
            on_questions(len(context.codes))
    return {label: RecallScore(questions, right[label], tokens, bits_per_element(options, model))
            for label, options in cases.items()}


def question(word: str) -> str:
    """What stands behind a context: the model is to go on with a space and the word's code."""
    return f"\nThe list of codes again:\n{word}:"


def _is_right(model, tokenizer, cache, word: str, code: str) -> bool:
    """Whether every token of the code is the likeliest one behind those before it; the cache gets the question."""
    asked, whole = (tokenizer(text, add_special_tokens=False).input_ids
                    for text in (question(word), f"{question(word)} {code}"))
    ids = torch.tensor([whole[:-1]], device=model.device)
    logits = model(ids, **{CACHE_ARGUMENT: cache}).logits[0, len(asked) - 1 :]
    return logits.argmax(-1).tolist() == whole[len(asked) :]
