"""vLLM 0.33: its own Python over 0.32's compiled parts for CPUs, since 0.33 has none. Its flags name our dtypes.

.ci/serving unpacks it beside the environment; nothing of it is part of this repository.
"""

import pytest

from serving import engine, models
from serving.engine import DRAFTS, NEAR_TIE, PRIVATE, RELEASE, model_drafts, near_ties

PROMPTS, REPEATING = models.prompts(2, 300), models.repeating(2, 300)

pytestmark = pytest.mark.skipif(not RELEASE.is_dir(), reason=f"{RELEASE} is not there; .ci/serving makes it")


def job(model, rounds, dtype=None, **options):
    flags = {} if dtype is None else dict(kv_cache_dtype=dtype, attention_backend="CUSTOM")
    return engine.job(model, rounds, dtype, **flags, **options)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    model = models.tiny(tmp_path_factory.mktemp("tiny"))
    file = models.codebooks(model, tmp_path_factory.mktemp("books") / "tiny.cq4.safetensors")
    jobs = dict(own=job(model, [PROMPTS]), k8v8=job(model, [PROMPTS], "lowbit_k8v8"),
                k4v4=job(model, [PROMPTS, PROMPTS, REPEATING], "lowbit_k4v4"),
                k4v4_drafts=job(model, [REPEATING], "lowbit_k4v4", **DRAFTS),
                k4v4_model=job(model, [REPEATING], "lowbit_k4v4", **model_drafts(model)),
                kitty=job(model, [PROMPTS], "lowbit_kitty", **PRIVATE),
                k4v4_static=job(model, [PROMPTS, PROMPTS, REPEATING], "lowbit_k4v4", is_static=True),
                k4v4_static_drafts=job(model, [REPEATING], "lowbit_k4v4", is_static=True, **DRAFTS),
                k4v4_static_model=job(model, [REPEATING], "lowbit_k4v4", is_static=True, **model_drafts(model)),
                kitty_static=job(model, [PROMPTS], "lowbit_kitty", is_static=True, **PRIVATE),
                cq4=job(model, [PROMPTS], "lowbit_cq4", codebooks=file, **PRIVATE))
    return dict(zip(jobs, engine.run(list(jobs.values()), release=RELEASE)))


def test_the_flags_of_0_33_serve(answers, measured):
    measured["vllm"], = {answer["version"] for answer in answers.values()}
    assert f"vllm-{measured['vllm']}" == RELEASE.name
    for name in ("k8v8", "k4v4", "kitty", "cq4"):
        measured[name] = engine.agreement(answers[name]["tokens"][0], answers["own"]["tokens"][0])
    assert all(gap < NEAR_TIE for gap in near_ties(answers["k8v8"], answers["own"]))
    assert sum(measured["k8v8"]) > 24 and answers["kitty"]["tokens"][0] != answers["own"]["tokens"][0]


def test_drafts_and_prefix_hits_of_0_33(answers, measured):
    for name in ("k4v4_drafts", "k4v4_model"):
        counts = answers[name]["metrics"]
        measured[name] = [counts[f"spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted")]
        assert answers[name]["tokens"][0] == answers["k4v4"]["tokens"][2] and measured[name][1] > 0
    measured["cached"] = answers["k4v4"]["cached"][1]
    assert measured["cached"] == [len(prompt) // 128 * 128 for prompt in PROMPTS]


def test_steps_as_on_a_gpu_give_the_same_tokens(answers):
    """Even steps in memory that stays, entered without a look at a value by the host."""
    for name in ("k4v4", "k4v4_drafts", "k4v4_model", "kitty"):
        static = answers[name.replace("k4v4", "k4v4_static").replace("kitty", "kitty_static")]
        assert static["tokens"] == answers[name]["tokens"] and static["cached"] == answers[name]["cached"], name


def test_a_flag_without_the_variable_is_refused_on_a_cpu(tmp_path):
    """vLLM's own backend for CPUs, which alone it takes there, knows no dtype of ours."""
    asked = engine.job(models.tiny(tmp_path), [PROMPTS], kv_cache_dtype="lowbit_k4v4", attention_backend="CUSTOM")
    with pytest.raises(engine.EngineError, match="--kv-cache-dtype lowbit_k4v4 is not supported by the CPU"):
        engine.run([asked], release=RELEASE)
