"""Codebook formats through vLLM's engine: a tiny model's file, where it is found, and files that are refused."""

import shutil

import pytest

from lowbit_attn.integrations.vllm.books import BESIDE
from serving import engine, models
from serving.engine import DRAFTS, NEAR_TIE, PRIVATE, near_ties

PROMPTS = models.prompts(3, 300)
SHAREABLE = "lowbit_cq4-s0"  # without sinks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("books")


@pytest.fixture(scope="module")
def model(folder):
    return models.tiny(folder / "tiny")


@pytest.fixture(scope="module")
def file(model, folder):
    return models.codebooks(model, folder / "tiny.cq4.safetensors")


@pytest.fixture(scope="module")
def answers(model, file, folder):
    beside = models.tiny(folder / "beside")
    (beside / BESIDE).mkdir()
    shutil.copy(file, beside / BESIDE / "any.safetensors")

    def job(rounds, dtype=SHAREABLE, **options):
        return engine.job(model, rounds, dtype, codebooks=file, **options)

    jobs = dict(
        own=engine.job(model, [PROMPTS]), variable=job([PROMPTS, PROMPTS]), drafts=job([PROMPTS], **DRAFTS),
        wide=job([PROMPTS], layout="LBHNC", block_size=512), ranks=job([PROMPTS], tensor_parallel_size=2),
        sinks=job([PROMPTS], "lowbit_cq4", **PRIVATE), beside=engine.job(beside, [PROMPTS], SHAREABLE))
    return dict(zip(jobs, engine.run(list(jobs.values()))))


def test_the_file_is_found_by_the_variable_and_beside_the_model(answers, measured):
    assert answers["beside"]["tokens"] == answers["variable"]["tokens"][:1]
    for name in ("variable", "sinks"):
        measured[name] = engine.agreement(answers[name]["tokens"][0], answers["own"]["tokens"][0])
        assert min(measured[name]) > 0, "codes of 4 bits keep the first tokens"
    assert answers["variable"]["tokens"][0] != answers["own"]["tokens"][0]


def test_layouts_and_drafts_change_no_token(answers, measured):
    measured |= answers["drafts"]["metrics"]
    assert measured["spec_decode_num_draft_tokens"] > 0
    for name in ("wide", "drafts"):
        assert answers[name]["tokens"][0] == answers["variable"]["tokens"][0]


def test_each_rank_has_the_codebooks_of_its_heads(answers):
    """A KV head a rank; sums of ranks are rounded in another order."""
    assert all(gap < NEAR_TIE for gap in near_ties(answers["ranks"], answers["variable"]))


def test_prefix_hits(answers, measured):
    measured["cached"] = answers["variable"]["cached"][1]
    assert measured["cached"] == [len(prompt) // 128 * 128 for prompt in PROMPTS]
    measured["tokens"] = engine.agreement(answers["variable"]["tokens"][1], answers["variable"]["tokens"][0])
    assert all(gap < 5 * NEAR_TIE for gap in near_ties(answers["variable"], answers["variable"], 1, 0))


def test_files_that_are_refused(model, file, folder):
    """Of another model, of keys before their rotary embedding, of another format, none: before the model is loaded."""
    (refused := folder / "refused").mkdir()
    other = models.codebooks(models.tiny(folder / "other", rope_parameters=dict(rope_theta=500.0, rope_type="default")),
                             refused / "other.safetensors")
    for books, dtype, reason in (
            (other, SHAREABLE, "whose configuration is another one"),
            (models.codebooks(model, folder / "pre.safetensors", rope="pre"), SHAREABLE, "supported: --rope post"),
            (file, "lowbit_cq2-s0", "does not fit cq2"),
            (None, SHAREABLE, "set LOWBIT_ATTN_CODEBOOKS to a file of lowbit-attn calibrate --model MODEL --format c"),
            (refused, SHAREABLE, "'other.safetensors' was learned from")):
        with pytest.raises(engine.EngineError, match=reason):
            engine.run([engine.job(model, [PROMPTS], dtype, codebooks=books)])
