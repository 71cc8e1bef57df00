"""The README says what the code says, and its examples run."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from lowbit_attn import budget, support

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "perf/results"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")
TARGETS = re.compile(r"<!-- targets: begin \(python perf/targets_table.py --gpu (\w+) --commit (\w+)\) -->\n"
                     r"(.*?)\n<!-- targets: end -->", re.S)

sys.path.append(str(ROOT / "perf"))
import targets_table  # noqa: E402


def test_support_table_is_the_code_s():
    text = README.read_text()
    shown = text[text.index(support.BEGIN) + len(support.BEGIN) : text.index(support.END)].strip()
    assert shown == support.tables(), "run python -m lowbit_attn.support and put its output into README.md"


def measured_commits() -> set[str]:
    """Whole ids of commits that perf/results has lines, or a raw file, of."""
    found = {json.loads(line)["commit"] for file in RESULTS.glob("*.jsonl") for line in file.read_text().splitlines()}
    return found | {name for file in (RESULTS / "raw").iterdir() for name in COMMIT.findall(file.stem)}


def quoted_commits(text: str) -> set[str]:
    return set(COMMIT.findall(text))


def test_commits_that_are_quoted_were_measured():
    """Short ids are the start of a line's; a tree with changes of its own ("+dirty") is no commit."""
    found, quoted = measured_commits(), quoted_commits(README.read_text())
    assert len(quoted) > 10
    untraced = sorted(short for short in quoted if not any(
        commit.startswith(short) and "+" not in commit for commit in found))
    assert not untraced, f"{untraced} are in README.md, but no line of perf/results is of them"
    assert quoted_commits("at 1e713b8112c, 2048 tokens, 20261122, feedback, bc6f14c") == {"1e713b8112c", "bc6f14c"}
    assert not any(commit.startswith("1e713b8112c") for commit in found)


def test_tables_of_targets_are_the_results():
    found = TARGETS.findall(README.read_text())
    assert "h200" in [gpu for gpu, _, _ in found]
    for gpu, commit, shown in found:
        lines = targets_table.complete(targets_table.read_lines(gpu=budget.GPUS[gpu]), targets_table.PRESETS["targets"],
                                       commit)
        assert lines, f"no complete run of targets at {commit} on {gpu}"
        assert shown == targets_table.table_of(lines), f"run python perf/targets_table.py --gpu {gpu} --commit {commit}"


QUALITY = {  # a row of README's table -> its lines of preset table
    "16 bit": ["16 bit"], "k4v4": ["k4v4"], "k4v2, 32 sinks": ["k4v2, sinks"], "k2v2 without search": ["k2v2"],
    "the same, 32 sinks": ["k2v2, sinks"], "the same, 32 sinks, key search": ["k2v2, sinks, search"],
    "KIVI, groups of 32 (simulator), 32 sinks": ["KIVI, sinks (simulator)"],
    "kitty, without / with key search": ["kitty", "kitty, search"],
    "kitty-pro, without / with key search": ["kitty-pro", "kitty-pro, search"],
}


DEMO = {"16 bit": "16 bit", "k4v4": "k4v4", "k4v2": "k4v2", "k2v2": "k2v2", "k2v2, 32 sinks": "k2v2, sinks",
        "k2v2, 32 sinks, key search": "k2v2, sinks, search"}


def quality_table(heading: str) -> tuple[list[list[str]], dict[str, dict]]:
    """The rows of the first table under a heading, and by label the lines of the one commit that stands above it."""
    part = README.read_text().split(heading)[1].split("\n## ")[0]
    commit, = quoted_commits(part.split("|")[0])
    found = {line["label"]: line for line in map(json.loads, (RESULTS / "quality.jsonl").read_text().splitlines())
             if line["commit"] == commit and line["preset"] == "table"}
    rows = [row for row in part.splitlines() if row.startswith("|")][2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows], found


def test_table_of_quality_is_the_results():
    rows, found = quality_table("## Quality of one small model")
    assert [row[0] for row in rows] == list(QUALITY)
    for label, _, perplexity, top1 in rows:
        lines = [found[name] for name in QUALITY[label]]
        assert perplexity == " / ".join(f"{line['perplexity']:.2f}" for line in lines), label
        assert top1 == " / ".join(f"{100 * line['top1']:.1f}" for line in lines) + " %", label


def test_table_of_the_demo_is_the_results():
    rows, found = quality_table("## Try it")
    assert [row[0] for row in rows] == list(DEMO)
    for label, *cells in rows:
        line = found[DEMO[label]]
        assert cells == [f"{line['bits_per_element']:.2f}", f"{line['cache_bytes']:,}", f"{line['perplexity']:.2f}",
                         f"{100 * line['top1']:.1f} %"], label


@pytest.fixture
def names(tmp_path):
    """What the examples take as given: a model's path and tokenized inputs."""
    transformers = pytest.importorskip("transformers", reason="the five-line example needs transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, head_dim=64, eos_token_id=None,
                                      pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.randint(0, 64, (1, 150))
    return {"path": tmp_path, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


def test_there_are_examples():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block, names):
    if "torch.cuda" in block:
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        block = "import torch\n" + BLOCKS[0] + block  # goes on from the five lines
    if "LowBitCache" in block:
        from lowbit_attn.integrations.hf import CACHE_ARGUMENT

        block = re.sub(r"\bcache=", f"{CACHE_ARGUMENT}=", block)  # as the README says below the example
    exec(compile(block, str(README), "exec"), names)
    if "tokens" in names:
        assert names["tokens"].shape == (1, 190)
    else:
        assert names["o"].shape == (2, 1, 32, 128) and names["cache"].n_tok.tolist() == [1001, 78]
