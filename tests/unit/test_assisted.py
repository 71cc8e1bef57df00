"""Assisted generation over a LowBitCache gives the tokens of the same cache without an assistant."""

import copy
import os
import random

import pytest
import torch

pytest.importorskip("transformers")

from tiny_models import build, tokens  # noqa: E402

from lowbit_attn.integrations import hf  # noqa: E402

RUNS = int(os.environ.get("LOWBIT_ATTN_ASSISTED_RUNS", "24"))  # any number may be run
# Two logits closer than this part of the logits' standard deviation may change places: parts of a step are summed in
# another order than single steps. A token that was read from 16 bit instead of a page moves logits 100 times as far.
TIE = 1e-4
MODELS = ("llama", "llama", "llama", "mistral-sliding", "gemma2", "qwen3")


@pytest.fixture(scope="module")
def models():
    return {name: build(name, initializer_range=0.3) for name in sorted(set(MODELS))}


def assistant_of(model, noise: float, seed: int):
    """The model with noise on its weights: drafts are right more or less often."""
    torch.manual_seed(seed)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += noise * weight.std(correction=0) * torch.randn_like(weight)
    twin.set_attn_implementation("eager")
    return twin


def cache_options(draw: random.Random, name: str) -> dict:
    options = dict(format=draw.choice(["k4v4"] * 6 + ["k8v8", "k2v2", "kitty", "kitty-weighted"]))
    if draw.random() < 0.4:
        options["sinks"] = draw.choice([0, 1, 4, 33])
    if draw.random() < 0.3:
        options |= dict(window=draw.choice([16, 100, 150]), keep_sinks=draw.random() < 0.5)
    if name in ("mistral-sliding", "gemma2") and draw.random() < 0.5:
        options["sliding"] = "lowbit"
    if draw.random() < 0.2:
        options["max_q_len"] = draw.choice([2, 5, 16])
    if draw.random() < 0.2:
        options["max_seqlen"] = 400
    return options


def drafting(draw: random.Random, model, seed: int) -> dict:
    """Arguments of ``generate``: prompt lookup, or an assistant with transformers' defaults or others."""
    if draw.random() < 0.3:
        return dict(prompt_lookup_num_tokens=draw.randint(1, 20))
    assistant = assistant_of(model, draw.choice([0.0, 0.02, 0.1, 0.3, 1.0]), seed)
    config = assistant.generation_config
    if draw.random() < 0.7:
        config.num_assistant_tokens = draw.randint(1, 20)
        config.num_assistant_tokens_schedule = draw.choice(["constant", "heuristic", "heuristic_transient"])
        config.assistant_confidence_threshold = draw.choice([0.0, 0.0, 0.4])
    return dict(assistant_model=assistant)


def first_difference(model, cache, ids, mask, new: int, plain, **drafts) -> float | None:
    """None for the plain run's tokens; else the plain run's distance between the two largest logits where the first
    token differs, as a part of their standard deviation."""
    out = model.generate(ids, attention_mask=mask, **{hf.CACHE_ARGUMENT: cache}, do_sample=False, max_new_tokens=new,
                         min_new_tokens=new, **drafts)
    assert out.shape[1] == ids.shape[1] + new and cache.get_seq_length() == out.shape[1] - 1
    if torch.equal(out, plain.sequences):
        return None
    at = int((out != plain.sequences)[0].nonzero()[0]) - ids.shape[1]
    best = plain.logits[at][0].topk(2).values
    return float((best[0] - best[1]) / plain.logits[at].std())


@pytest.mark.parametrize("seed", range(RUNS))
def test_drafts_change_no_token(models, seed):
    draw = random.Random(seed)
    name = draw.choice(MODELS)
    model, options = models[name], cache_options(draw, name)
    length, new, pad = draw.choice([5, 60, 120, 127, 128, 140, 250, 300]), draw.randint(5, 40), 0
    ids = tokens(length) if draw.random() < 0.5 else tokens(max(1, length // 4)).repeat(1, 4)
    drafts = drafting(draw, model, seed)
    model.set_attn_implementation(hf.NAME)
    if draw.random() < 0.4:
        pad = draw.randint(1, 40)
        ids = torch.cat((torch.full((1, pad), 2), ids), 1)
    mask = (torch.arange(ids.shape[1]) >= pad).long()[None]
    plain = model.generate(ids, attention_mask=mask, **{hf.CACHE_ARGUMENT: hf.LowBitCache(**options)}, do_sample=False,
                           max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True, output_logits=True)
    margin = first_difference(model, hf.LowBitCache(**options), ids, mask, new, plain, **drafts)
    assert margin is None or margin < TIE, f"{name} {options} {drafts.keys()}: margin {margin}"
