"""perf/codebook_quality.py and its lines: the targets are met, lesser codebooks miss them, and docs show the lines."""

import sys
from pathlib import Path

import pytest

from lowbit_attn import FORMATS
from lowbit_attn.codebooks.prompt import PROMPTS as PROMPTS_OF

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "perf"))
import codebook_quality  # noqa: E402
from codebook_quality import CASES, FAR, OTHER_TEXT, SECOND_SEED, TARGETS, Target  # noqa: E402

PROMPTS = {case.label for case in CASES if case.is_prompt}
LINES = codebook_quality.newest()


def test_cases_are_apart_and_have_formats():
    assert len({case.label for case in CASES}) == len(CASES)
    assert all(case.format is None or FORMATS[case.format].needs_codebooks for case in CASES)
    assert [case.reading for case in CASES] == sorted(case.reading for case in CASES)
    assert TARGETS.keys() <= {case.label for case in CASES if case.text == "docs" and not case.seed}
    for case in CASES:
        if case.label in TARGETS:
            others = {other.label for other in CASES} & {case.label + SECOND_SEED, case.label + OTHER_TEXT}
            assert len(others) == (1 if case.is_prompt else 2)  # a prompt's codebooks have no seed


def test_a_target_names_what_is_missed():
    target = Target(0.02, 12.0, 0.9)
    line = dict(kl=0.02, perplexity=12.0, top1=0.9)
    assert target.misses(line) == []
    assert target.misses(dict(kl=0.021, perplexity=12.1, top1=0.8)) == ["kl", "top1", "perplexity"]
    for name, value in (("kl", 0.0201), ("perplexity", 12.01), ("top1", 0.899), ("kl", float("nan"))):
        assert target.misses(line | {name: value}) == [name]


@pytest.mark.parametrize("label", TARGETS)
def test_the_newest_lines_meet_the_targets(label):
    assert TARGETS[label].misses(LINES[label]) == []


@pytest.mark.parametrize("label", TARGETS)
def test_another_seed_or_text_is_within_the_target_too(label):
    """Perplexity and top-1 are the text's own; KL compares. A prompt's codebooks are no case of a seed."""
    others = {label + SECOND_SEED, label + OTHER_TEXT} & LINES.keys()
    assert len(others) == 2 or label in PROMPTS
    assert all(LINES[other]["kl"] <= TARGETS[label].kl for other in others)


def test_the_target_of_a_prompt_is_that_of_its_default():
    (targeted,) = (case for case in CASES if case.is_prompt and case.label in TARGETS)
    options = codebook_quality.options_of(targeted, Path())
    assert options == dict(format="cq2", codebooks="prompt") and PROMPTS_OF["prompt"] == targeted.rope


@pytest.mark.parametrize("label, bar", [("cq2 plain", "cq2"), (f"cq2, no random positions @{FAR}", f"cq2 @{FAR}")])
def test_codebooks_without_the_improvements_miss_the_targets(label, bar):
    assert {"kl", "perplexity"} <= set(TARGETS[bar].misses(LINES[label]))


def test_lines_of_whole_texts_are_there_and_of_one_commit():
    commits = {LINES[case.label]["commit"] for case in CASES if not case.scored_from}
    assert len(commits) == 1 and "+" not in commits.pop()


def test_the_table_of_the_docs_is_of_these_lines():
    table = codebook_quality.table_of(LINES)
    assert table in (ROOT / "docs/codebooks.md").read_text(), "run python perf/codebook_quality.py table"
    assert LINES["cq2"]["commit"][:8] in (ROOT / "docs/codebooks.md").read_text()
    assert codebook_quality.table_of({}).count("\n") == 1
