"""SmolLM2-135M through vLLM over low-bit pages: tokens and perplexity, against its own cache and transformers."""

from pathlib import Path

import pytest
import torch

from lowbit_attn import FORMATS, quality
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.codebooks.calibrate import calibrate, tokens_to_read
from lowbit_attn.codebooks.text import help_text, mixture, tokenized
from lowbit_attn.demo.model import load_folder
from lowbit_attn.integrations.vllm import names
from serving import engine, models
from serving.engine import DRAFTS, PRIVATE, near_ties

LENGTHS, NEW, SCORED = (400, 537), 40, 1024
SCORES = {name: {} if not names.parse(names.dtype_name(name)).is_private else PRIVATE for name in names.SERVED}

pytestmark = pytest.mark.timeout(5400)


@pytest.fixture(scope="module")
def model():
    return models.smollm2()


@pytest.fixture(scope="module")
def text(model) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)(help_text()).input_ids


@pytest.fixture(scope="module")
def answers(model, text):
    prompts = [text[3000 * i : 3000 * i + length] for i, length in enumerate(LENGTHS)]

    def job(dtype=None, rounds=1, **options):
        return engine.job(model, rounds * [prompts], dtype, tokens=NEW, **options)

    jobs = dict(own=job(), k8v8=job("lowbit_k8v8"), k4v4=job("lowbit_k4v4", 2),
                k4v4_wide=job("lowbit_k4v4", layout="LBHNC", block_size=512),
                k4v4_drafts=job("lowbit_k4v4", **DRAFTS), k2v2=job("lowbit_k2v2"))
    return dict(zip(jobs, engine.run(list(jobs.values()), timeout=5000)))


def test_8_bits_give_the_engines_own_tokens(answers, measured):
    """But where the two likeliest tokens are nearly even: the first prompt has such a place."""
    measured["tokens"] = engine.agreement(answers["k8v8"]["tokens"][0], answers["own"]["tokens"][0])
    measured["gaps"] = near_ties(answers["k8v8"], answers["own"])
    assert all(gap < 0.05 for gap in measured["gaps"])
    assert NEW in measured["tokens"]


def test_4_bits_are_the_same_in_both_layouts_and_with_drafts(answers, measured):
    measured |= answers["k4v4_drafts"]["metrics"]
    assert measured["spec_decode_num_draft_tokens"] > 0
    for name in ("k4v4_wide", "k4v4_drafts"):
        measured[name] = engine.agreement(answers[name]["tokens"][0], answers["k4v4"]["tokens"][0])
        assert measured[name] == [NEW] * len(LENGTHS)


def test_prefix_hits(answers, measured):
    measured["cached"] = answers["k4v4"]["cached"][1]
    assert measured["cached"] == [length // 128 * 128 for length in LENGTHS]
    measured["tokens"] = engine.agreement(answers["k4v4"]["tokens"][1], answers["k4v4"]["tokens"][0])
    assert all(gap < 0.5 for gap in near_ties(answers["k4v4"], answers["k4v4"], 1, 0))


def test_2_bits_differ(answers, measured):
    """What these tests would see: a cache that is worse gives other tokens."""
    measured["tokens"] = engine.agreement(answers["k2v2"]["tokens"][0], answers["own"]["tokens"][0])
    assert answers["k2v2"]["tokens"][0] != answers["own"]["tokens"][0]


@pytest.fixture(scope="module")
def books(model) -> dict[str, Path]:
    """A codebook file of each format that needs one, made once, from 2,048 tokens."""
    made = models.SMOLLM2.with_name("smollm2-codebooks")
    made.mkdir(exist_ok=True)
    files = {name: made / f"smollm2.{name}.safetensors" for name in names.SERVED
             if names.parse(names.dtype_name(name)).format.needs_codebooks}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        network, tokenizer = load_folder(model, "cpu", torch.float32)
        for name in missing:
            ids = tokenized(tokenizer, mixture(), tokens_to_read(2048))
            calibrate(network, ids, FORMATS[name]).save(files[name])
    return files


def test_perplexity_is_that_of_transformers(model, text, books, measured):
    """Chunks of 128 tokens, here and there; within 1 % for every dtype that is served."""
    jobs = {"16 bit": engine.job(model, [[text[:SCORED]]], tokens=1, scored=True, max_num_batched_tokens=128,
                                 enable_prefix_caching=False)}
    for name, options in SCORES.items():
        jobs[name] = engine.job(model, [[text[:SCORED]]], names.dtype_name(name), tokens=1, scored=True,
                                codebooks=books.get(name), max_num_batched_tokens=128, **options)
    found = {name: answer["ppl"][0][0] for name, answer in zip(jobs, engine.run(list(jobs.values()), timeout=5000))}
    cases = {"16 bit": None}
    for name in SCORES:
        served = names.parse(names.dtype_name(name))
        cases[name] = dict(format=served.format.name, sinks=served.sinks)
        if name in books:
            cases[name]["codebooks"] = Codebooks.load(books[name])
    ours = quality.compare(load_folder(model, "cpu", torch.float32)[0], torch.tensor(text[:SCORED]), cases)
    for name in jobs:
        measured[name] = [round(found[name], 3), round(ours[name].perplexity, 3)]
    apart = {name: abs(found[name] / ours[name].perplexity - 1) for name in jobs}
    assert all(value < 0.01 for value in apart.values()), apart
