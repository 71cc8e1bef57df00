"""vLLM's engine over low-bit pages with a tiny model: layouts, drafts, prefix hits, preemption, ranks, refusals."""

import pytest

from serving import engine, models
from serving.engine import DRAFTS, NEAR_TIE, PRIVATE, near_ties

PROMPTS, REPEATING = models.prompts(3, 300), models.repeating(3, 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return models.tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def answers(model):
    """Of jobs by name, run in one process."""
    def job(rounds, dtype=None, **options):
        return engine.job(model, rounds, dtype, **options)

    jobs = dict(
        own=job([PROMPTS, REPEATING]),
        k8v8=job([PROMPTS], "lowbit_k8v8"), k8v8_drafts=job([REPEATING], "lowbit_k8v8", **DRAFTS),
        k8v8_ranks=job([PROMPTS], "lowbit_k8v8", tensor_parallel_size=2),
        k4v4=job([PROMPTS, PROMPTS, REPEATING], "lowbit_k4v4"), k4v4_drafts=job([REPEATING], "lowbit_k4v4", **DRAFTS),
        k4v4_wide=job([PROMPTS], "lowbit_k4v4", layout="LBHNC", block_size=512),
    )
    for name in ("k2v2-s32", "kitty"):
        jobs[name] = job([REPEATING], f"lowbit_{name}", **PRIVATE)
        jobs[f"{name}_drafts"] = job([REPEATING], f"lowbit_{name}", **PRIVATE, **DRAFTS)
    return dict(zip(jobs, engine.run(list(jobs.values()))))


@pytest.mark.timeout(1800)
def test_8_bits_give_the_engines_own_tokens(answers, measured):
    measured["tokens"] = engine.agreement(answers["k8v8"]["tokens"][0], answers["own"]["tokens"][0])
    measured["gaps"] = near_ties(answers["k8v8"], answers["own"])
    assert all(gap < NEAR_TIE for gap in measured["gaps"])
    assert sum(measured["tokens"]) > 24


def test_8_bits_with_drafts(answers, measured):
    found = answers["k8v8_drafts"]
    measured |= {name: found["metrics"][f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}
    assert 0 < measured["accepted"] < measured["draft"], "some drafts are accepted, some rejected"
    assert all(gap < NEAR_TIE for gap in near_ties(found, answers["own"], 0, 1))


@pytest.mark.timeout(600)
def test_a_preempted_request_goes_on_as_before(model, measured):
    """15 blocks: three and two rings for each prompt, none for the one that grows past its third."""
    jobs = [engine.job(model, [PROMPTS], "lowbit_k8v8", max_model_len=1024, **options)
            for options in ({}, dict(num_gpu_blocks_override=16))]
    whole, preempted = engine.run(jobs)
    measured["preemptions"] = preempted["metrics"]["num_preemptions"]
    assert measured["preemptions"] > 0 and not whole["metrics"]["num_preemptions"]
    assert all(gap < NEAR_TIE for gap in near_ties(preempted, whole))


def test_two_ranks(answers):
    """A KV head a rank; sums of ranks are rounded in another order."""
    assert all(gap < NEAR_TIE for gap in near_ties(answers["k8v8_ranks"], answers["k8v8"]))


def test_4_bits_are_the_same_in_both_layouts(answers):
    assert answers["k4v4_wide"]["tokens"][0] == answers["k4v4"]["tokens"][0]


@pytest.mark.parametrize("name,round", [("k4v4", 2), ("k2v2-s32", 0), ("kitty", 0)])
def test_drafts_change_no_token(answers, measured, name, round):
    drafts = answers[f"{name}_drafts"]
    measured |= {name: drafts["metrics"][f"spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}
    assert measured["draft"] > measured["accepted"]
    assert drafts["tokens"][0] == answers[name]["tokens"][round]


def test_prefix_hits(answers, measured):
    """The prompts again: their first blocks are found, and what follows was cut otherwise."""
    measured["cached"] = answers["k4v4"]["cached"][1]
    assert measured["cached"] == [len(prompt) // 128 * 128 for prompt in PROMPTS]
    measured["tokens"] = engine.agreement(answers["k4v4"]["tokens"][1], answers["k4v4"]["tokens"][0])
    assert all(gap < 5 * NEAR_TIE for gap in near_ties(answers["k4v4"], answers["k4v4"], 1, 0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype,options,reason", [
    ("lowbit_kitty", {}, "pass --no-enable-prefix-caching"),
    ("lowbit_k4v4", dict(layout="LBHNC"), "pass --block-size 512"),
    ("lowbit_cq2", PRIVATE, "set LOWBIT_ATTN_CODEBOOKS"),
    ("lowbit_k5v5", {}, "k5v5"),
])
def test_refusals_come_before_the_model(model, dtype, options, reason):
    with pytest.raises(engine.EngineError, match=reason):
        engine.run([engine.job(model, [PROMPTS], dtype, **options)])
