"""README.md and docs/ say what the code and the results say, and their examples run."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from perf_scripts import script

from lowbit_attn import support

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "perf/results"
DOCS = sorted((ROOT / "docs").glob("*.md"))
SHOWN = [README, *DOCS]  # what a user reads
BLOCKS = {file.relative_to(ROOT).as_posix(): re.findall(r"```python\n(.*?)```", file.read_text(), re.S)
          for file in SHOWN}
EXAMPLES = [name for name, blocks in BLOCKS.items() if blocks]
CUDA = "torch.cuda"  # in a block that needs a GPU
COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")
TARGETS = re.compile(r"<!-- targets: begin \(python perf/targets_table.py --gpu (\w+) --commit (\w+) --kitty (\w+)\) "
                     r"-->\n(.*?)\n<!-- targets: end -->", re.S)

sys.path.append(str(ROOT / "perf"))
import quality  # noqa: E402
import targets_table  # noqa: E402


def test_support_table_is_the_code_s():
    text = (ROOT / "docs/support.md").read_text()
    shown = text[text.index(support.BEGIN) + len(support.BEGIN) : text.index(support.END)].strip()
    assert shown == support.tables(), "run python -m lowbit_attn.support and put its output into docs/support.md"


def measured_commits() -> set[str]:
    """Whole ids of commits that perf/results has lines, or a raw file, of."""
    found = {json.loads(line)["commit"] for file in RESULTS.glob("*.jsonl") for line in file.read_text().splitlines()}
    return found | {name for file in (RESULTS / "raw").iterdir() for name in COMMIT.findall(file.stem)}


def quoted_commits(text: str) -> set[str]:
    return set(COMMIT.findall(text))


def test_commits_that_are_quoted_were_measured():
    """Short ids are the start of a line's; a tree with changes of its own ("+dirty") is no commit."""
    shown = [file for file in SHOWN if file.name != "lessons.md"]  # whose commits are those that kept a change
    found, quoted = measured_commits(), set().union(*(quoted_commits(file.read_text()) for file in shown))
    assert len(quoted) > 10
    untraced = sorted(short for short in quoted if not any(
        commit.startswith(short) and "+" not in commit for commit in found))
    assert not untraced, f"{untraced} are in README.md or docs/, but no line of perf/results is of them"
    assert quoted_commits("at 1e713b8112c, 2048 tokens, 20261122, feedback, bc6f14c") == {"1e713b8112c", "bc6f14c"}
    assert not any(commit.startswith("1e713b8112c") for commit in found)


def test_tables_of_targets_are_the_results():
    found = [(file, *one) for file in SHOWN for one in TARGETS.findall(file.read_text())]
    assert {("README.md", "h200"), ("performance.md", "h100")} <= {(file.name, gpu) for file, gpu, *_ in found}
    for _, gpu, commit, kitty, shown in found:
        lines = targets_table.lines_at(gpu, commit, kitty)
        assert lines, f"no complete run of targets at {commit}, and of kitty at {kitty}, on {gpu}"
        assert shown == targets_table.table_of(lines), (
            f"run python perf/targets_table.py --gpu {gpu} --commit {commit} --kitty {kitty}")


DEMO = {"16 bit": "16 bit", "k4v4": "k4v4", "k4v2, 32 sinks": "k4v2, sinks", "k2v2, no search": "k2v2",
        "k2v2, no search, 32 sinks": "k2v2, sinks", "k2v2, 32 sinks": "k2v2, sinks, search",
        "kitty, search": "kitty, search"}


def quality_table(file: Path, heading: str) -> tuple[list[list[str]], dict[str, dict]]:
    """The rows of the first table under a heading, and by label the lines of the one commit that stands above it."""
    part = file.read_text().split(heading)[1].split("\n## ")[0]
    commit, = quoted_commits(part.split("|")[0])
    found = {line["label"]: line for line in map(json.loads, (RESULTS / "quality.jsonl").read_text().splitlines())
             if line["commit"] == commit and line["preset"] == "table"}
    rows = [row for row in part.splitlines() if row.startswith("|")][2:]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows], found


def bits_all_in(line: dict, found: dict[str, dict]) -> str:
    """Bits per element of the whole cache of a line, from its bytes and the 16-bit line's."""
    return f"{16 * line['cache_bytes'] / found['16 bit']['cache_bytes']:.2f}"


def test_table_of_quality_is_the_results():
    rows, found = quality_table(README, "## Quality of one small model")
    assert [row[0] for row in rows] == list(quality.README_ROWS)
    for label, packed, whole, perplexity, top1 in rows:
        lines = [found[name] for name in quality.README_ROWS[label]]
        for line in lines:
            assert packed == f"{line['bits_per_element']:.2f}" and whole == bits_all_in(line, found), label
        assert perplexity == " / ".join(f"{line['perplexity']:.2f}" for line in lines), label
        assert top1 == " / ".join(f"{100 * line['top1']:.1f}" for line in lines) + " %", label


def test_command_prints_the_table_of_quality(capsys, tmp_path):
    quality.table()
    commit, *rows = capsys.readouterr().out.splitlines()
    text = README.read_text()
    assert commit.removeprefix("commit ") in text and len(rows) == 9 and "\n".join(rows) in text
    (tmp_path / "quality.jsonl").write_text((RESULTS / "quality.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(quality.typer.BadParameter, match="run python perf/quality.py run"):
        quality.table(str(tmp_path / "quality.jsonl"))


def test_table_of_the_demo_is_the_results():
    rows, found = quality_table(ROOT / "docs/performance.md", "## Quality: the demo's table")
    assert [row[0] for row in rows] == list(DEMO)
    for label, *cells in rows:
        line = found[DEMO[label]]
        assert cells == [f"{line['bits_per_element']:.2f}", bits_all_in(line, found), f"{line['cache_bytes']:,}",
                         f"{line['perplexity']:.2f}", f"{100 * line['top1']:.1f} %"], label


def test_first_number_is_the_results():
    """What README's second sentence says of the demo."""
    _, found = quality_table(README, "## Quality of one small model")
    whole, low = found["16 bit"], found["k4v4"]
    sentence = (f"shrinks from {whole['cache_bytes'] / 1e6:.1f} to {low['cache_bytes'] / 1e6:.1f} MB, "
                f"and its perplexity rises from {whole['perplexity']:.2f} to {low['perplexity']:.2f}.")
    assert sentence in " ".join(README.read_text().split())


def test_rows_of_the_closed_loop_are_measured():
    """README's table and docs/serving.md's are what perf/serve_table.py makes of the newest lines."""
    with script("serve_table") as table:
        assert f"\n\n{table.readme('H200')}\n\n" in README.read_text(), "python perf/serve_table.py readme"
        shown = re.search(r"<!-- serve: begin \(python perf/serve_table.py loads\) -->\n(.*?)\n<!-- serve: end -->",
                          (ROOT / "docs/serving.md").read_text(), re.S)[1]
        assert shown == table.loads("H200"), "python perf/serve_table.py loads"
        newest = table.cases("H200")
    for lines in newest.values():
        for line in lines.values():
            assert line.get("syncs_per_mixed_step", 0) <= 0.25, "of vLLM's own, as with auto"
            assert line.get("launches_per_mixed_step", 0) < 32 * 8 + 300


MOST_LINES, MOST_WORDS, INSTALL_BY = 130, 30, 40


def sentences(text: str) -> list[str]:
    """Those of the prose; not of code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    ", "#", "!", "<!--"))]
    parts = re.split(r"\n\s*\n|^- ", "\n".join(lines), flags=re.M)
    return [one for part in parts for one in re.split(r"(?<=[.:!?])\s+", " ".join(part.split())) if one]


def test_readme_is_short():
    text = README.read_text()
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES and lines.index("## Install") < INSTALL_BY
    assert len(sentences(text)) > 40 and not [one for one in sentences(text) if len(one.split()) > MOST_WORDS]
    found = sentences("# A b\n\nOne two.\nThree: four\n\n- five\n- six\n")
    assert found == ["One two.", "Three:", "four", "five", "six"]


@pytest.mark.parametrize("file", [*SHOWN, *map(ROOT.joinpath, ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"))],
                         ids=lambda file: file.name)
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)]+)\)", file.read_text()):
        path, _, heading = target.partition("#")
        there = (file.parent / path).resolve() if path else file
        assert there.is_relative_to(ROOT) and there.exists(), f"{file.name}: {target}"
        names = [re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                 for line in there.read_text().splitlines() if line.startswith("#")] if heading else []
        assert not heading or heading in names, f"{file.name}: {target}"


def test_every_page_of_the_docs_is_linked():
    assert {f"docs/{file.name}" for file in DOCS} <= set(re.findall(r"\]\(([^)#]+)", README.read_text()))


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
    assert len(BLOCKS["README.md"]) == 2 and len(BLOCKS["docs/serving.md"]) >= 5 and len(EXAMPLES) >= 4


def run(file: str, names: dict, has_cuda: bool) -> None:
    """Run a file's blocks one after the other; those that need a GPU only where there is one."""
    from lowbit_attn.integrations.hf import CACHE_ARGUMENT

    for block in BLOCKS[file]:
        if CUDA in block and not has_cuda:
            continue
        if CUDA in block:
            block = "import torch\n" + block
        if "LowBitCache" in block:
            block = re.sub(r"\bcache=", f"{CACHE_ARGUMENT}=", block)  # as is said below the example
        for name in ("tokens", "o", "cache"):  # each block makes its own
            names.pop(name, None)
        exec(compile(block, file, "exec"), names)
        if "tokens" in names:
            assert names["tokens"].shape == (1, 190)
        if "num_pages=64" in block:
            assert names["o"].shape == (2, 1, 32, 128) and names["cache"].n_tok.tolist() == [1001, 78]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("file", EXAMPLES)
def test_examples_run(file, names):
    run(file, names, has_cuda=False)


@pytest.mark.gpu
@pytest.mark.parametrize("file", [name for name in EXAMPLES if any(CUDA in block for block in BLOCKS[name])])
def test_examples_run_on_a_gpu(file, names):
    run(file, names, has_cuda=True)
