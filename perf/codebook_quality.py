"""Quality of codebook formats on a small real model, as JSON lines beside those of quality.py; needs no GPU.

    python perf/codebook_quality.py learn     codebooks of every case, into build/codebooks; goes on where it ended
    python perf/codebook_quality.py run       scores of every case that this commit has no line of
    python perf/codebook_quality.py table     the newest lines as the table of docs/codebooks.md

SmolLM2-135M-Instruct reads 2,048 tokens in chunks of 128, in fp32, over each cache (lowbit_attn.quality): Python's help
texts as the demo does ("docs") and a second text ("gpl"). Codebooks come from the mixture of lowbit-attn calibrate.
"""

import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
import typer
from provenance import ROOT, append_result, commit, provenance

app = typer.Typer(no_args_is_help=True, add_completion=False)

MODEL, PRESET, RESULTS = "SmolLM2-135M-Instruct", "codebooks", "perf/results/quality.jsonl"
FOLDER = Path("build/codebooks")
SECOND_TEXT = Path("/usr/share/common-licenses/GPL-3")  # of Debian; no licence of the mixture shares a line with it
TOKENS, LEARNED_TOKENS, FAR, TOGETHER = 2048, 8192, 6000, 3
SECOND_SEED, OTHER_TEXT = ", seed 1", ", gpl"
PLAIN = dict(is_weighted=False, is_balanced=False, has_page_mean=False, has_random_positions=False)


@dataclass(frozen=True)
class Case:
    """One cache on one text; left_out: improvements of the Recipe of K that the codebooks do without."""

    label: str
    format: str | None = None
    rope: str = "post"
    left_out: tuple[str, ...] = ()
    text: str = "docs"
    first_position: int = 0
    scored_from: int = 0
    seed: int = 0
    is_prompt: bool = False
    k_shared: bool = False

    @property
    def reading(self) -> tuple:
        """Cases of one reading share a 16-bit baseline."""
        return self.text, self.first_position, self.scored_from


def _cases() -> list[Case]:
    docs = [Case("16 bit"), Case("cq4", "cq4"), Case("kcq4vcq2", "kcq4vcq2"), Case("cq2", "cq2"),
            Case("kcq2vcq1", "kcq2vcq1"), Case("cq2 pre-RoPE", "cq2", "pre")]
    far = [Case(f"16 bit @{FAR}"), Case(f"cq2 @{FAR}", "cq2")]
    far = [replace(case, first_position=FAR) for case in far]
    half = [Case("16 bit, second half"), Case("cq2, second half", "cq2"),
            Case("cq2 from the prompt, second half", "cq2", is_prompt=True),
            Case("cq2 pre-RoPE from the prompt, second half", "cq2", "pre", is_prompt=True)]
    half = [replace(case, scored_from=TOKENS // 2) for case in half]
    second_seed = [replace(case, label=f"{case.label}{SECOND_SEED}", seed=1) for case in (*docs, *far)
                   if case.format]
    lesser = [Case("cq2 plain", "cq2", left_out=tuple(PLAIN)),
              Case(f"cq2, no random positions @{FAR}", "cq2", left_out=("has_random_positions",), first_position=FAR)]
    second_text = [replace(case, label=f"{case.label}{OTHER_TEXT}", text="gpl") for case in (*docs, *far, *half)]
    return sorted((*docs, *far, *half, *second_seed, *lesser, *second_text), key=lambda case: case.reading)


CASES = _cases()
# beside the table: codebooks of K as kernels of keys before their rotary embedding read them
SHARED_CASE = Case("cq2 pre-RoPE, shared codebooks", "cq2", "pre", k_shared=True)


@dataclass(frozen=True)
class Target:
    """What a line of the text "docs" must have; kl in nats, top1 a share of the tokens."""

    kl: float
    perplexity: float = float("inf")
    top1: float = 0.0

    def misses(self, line: dict) -> list[str]:
        """Names of what a line does not reach."""
        return [name for name, is_met in (("kl", line["kl"] <= self.kl), ("top1", line["top1"] >= self.top1),
                                          ("perplexity", line["perplexity"] <= self.perplexity)) if not is_met]


TARGETS = {"cq4": Target(0.0035, 11.97), "kcq4vcq2": Target(0.010, 12.06), "cq2": Target(0.021, 12.18, 0.93),
           "kcq2vcq1": Target(0.045, 12.5), "cq2 pre-RoPE": Target(0.013, 12.15), f"cq2 @{FAR}": Target(0.021, 12.2),
           "cq2 pre-RoPE from the prompt, second half": Target(0.0095)}  # of what codebooks="prompt" makes


# ---- codebooks

@dataclass(frozen=True)
class Side:
    """Codebooks of one side of all layers: what several formats share."""

    name: str
    vec_size: int
    rope: str = "post"
    left_out: tuple[str, ...] = ()
    seed: int = 0
    k_shared: bool = False

    @property
    def recipe(self):
        from lowbit_attn.codebooks.learn import Recipe

        k, v = (self.vec_size, None) if self.name == "K" else (None, self.vec_size)
        return Recipe(k, v, rope=self.rope, seed=self.seed, k_shared=self.k_shared,
                      **dict.fromkeys(self.left_out, False))

    @property
    def file(self) -> str:
        return "-".join((f"{self.name}{self.vec_size}", self.rope, f"seed{self.seed}", *["shared"] * self.k_shared,
                         *self.left_out)) + ".pt"


def sides(case: Case) -> tuple[Side, Side]:
    """The sides of a case's codebooks; V has no positions and none of the improvements."""
    from lowbit_attn import FORMATS

    fmt = FORMATS[case.format]
    return (Side("K", fmt.k.vec_size, case.rope, case.left_out, case.seed, case.k_shared),
            Side("V", fmt.v.vec_size, seed=case.seed))


def load_model(folder: Path):
    """(model, tokenizer) in fp32; kept beside the codebooks as torch saves them, which loads in seconds."""
    from lowbit_attn.demo import model as models

    kept = folder / "model.pt"
    if not kept.exists():
        torch.save(models.load(models.fetch(models.default_folder()), "cpu"), kept)
    return torch.load(kept, weights_only=False)


def sample_of(folder: Path):
    """What the model stored of the mixture, captured once."""
    path = folder / "sample.pt"
    if not path.exists():
        from lowbit_attn.codebooks import calibrate, capture, text

        start = time.process_time()
        model, tokenizer = load_model(folder)
        print(f"loaded in {time.process_time() - start:.0f} s of CPU time", flush=True)
        start = time.process_time()
        ids = text.tokenized(tokenizer, text.mixture(), calibrate.tokens_to_read(LEARNED_TOKENS))
        sample = capture.captured(model, ids)
        print(f"{len(ids)} tokens read in {time.process_time() - start:.0f} s of CPU time", flush=True)
        torch.save((sample, calibrate.about_model(model, MODEL)), path)
    return torch.load(path, weights_only=False)


@app.command()
def learn(
    folder: Annotated[Path, typer.Option(help="Where codebooks are kept.")] = FOLDER,
    seconds: Annotated[float, typer.Option(help="No new side is begun after so long; exit status 3.")] = 1e9,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
) -> None:
    """Learn what is not there of the sides of all cases."""
    from lowbit_attn.codebooks.learn import learn_layers

    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    sample, _ = sample_of(folder)
    wanted = dict.fromkeys(side for case in (*CASES, SHARED_CASE) if case.format and not case.is_prompt
                           for side in sides(case))
    for side in wanted:
        if (folder / side.file).exists():
            continue
        if time.monotonic() > end:
            raise typer.Exit(3)
        start = time.process_time()
        layers = learn_layers(sample, side.recipe)
        torch.save(layers, folder / "part")
        (folder / "part").rename(folder / side.file)
        print(f"{side.file:60} {time.process_time() - start:5.1f} s of CPU time", flush=True)


def codebooks_of(case: Case, folder: Path):
    """Codebooks of a case from its sides' files."""
    from lowbit_attn.codebooks import Codebooks

    sample, about = torch.load(folder / "sample.pt", weights_only=False)
    k, v = (torch.load(folder / side.file, weights_only=False) for side in sides(case))
    stacked = {name: torch.stack([getattr(layer, name) for layer in k]) for name in
               ("k_entries", "k_order", "k_weights")}
    if case.rope == "pre":
        stacked["rope_inv_freq"] = torch.stack([layer.inv_freq for layer in sample.layers])
    return Codebooks(case.format, case.rope, sample.layers[0].keys.shape[-1],
                     v_entries=torch.stack([layer.v_entries for layer in v]), **stacked, metadata=about)


# ---- scores

def options_of(case: Case, folder: Path) -> dict | None:
    """Options of LowBitCache; None: 16 bit."""
    if case.format is None:
        return None
    prompt = "prompt" if case.rope == "pre" else "prompt-post"
    return dict(format=case.format, codebooks=prompt if case.is_prompt else codebooks_of(case, folder))


@app.command()
def run(
    folder: Annotated[Path, typer.Option(help="Where ``learn`` kept the codebooks.")] = FOLDER,
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read.")] = TOKENS,
    seconds: Annotated[float, typer.Option(help="No new reading is begun after so long; exit status 3.")] = 1e9,
    threads: Annotated[int, typer.Option(help="CPU threads of torch.")] = 1,
    only: Annotated[list[str], typer.Option(help="Only the case of this label; repeatable.")] = [],
    output: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS,
) -> None:
    """Score the cases that this commit has no line of yet, and append a line for each."""
    from lowbit_attn import quality

    torch.set_num_threads(threads)
    if unknown := set(only) - {case.label for case in (*CASES, SHARED_CASE)}:
        raise typer.BadParameter(f"{sorted(unknown)}, supported: {', '.join(c.label for c in CASES)}, "
                                 f"{SHARED_CASE.label}",
                                 param_hint="--only")
    done = {line["label"] for line in lines_of(output) if line["commit"] == commit() and line["tokens"] == tokens}
    cases = [case for case in (*CASES, SHARED_CASE) if case.label not in done and (not only or case.label in only)]
    end, loaded = time.monotonic() + seconds, None
    for _, reading in groupby(cases, lambda case: case.reading):
        reading = list(reading)
        for start in range(0, len(reading), TOGETHER):
            if time.monotonic() > end:
                raise typer.Exit(3)
            loaded = loaded or load_model(folder)
            model, tokenizer = loaded
            some = reading[start : start + TOGETHER]
            ids = tokenizer(text_of(some[0]), return_tensors="pt").input_ids[:, :tokens]
            options = {case.label: options_of(case, folder) for case in some}
            scores = quality.compare(model, ids, options, first_position=some[0].first_position,
                                     scored_from=some[0].scored_from)
            for case in some:
                _append(output, case, ids, options[case.label], scores[case.label], tokenizer)


def text_of(case: Case) -> str:
    from lowbit_attn.codebooks.text import help_text

    return help_text() if case.text == "docs" else SECOND_TEXT.read_text()


def _append(output: str, case: Case, ids, options: dict | None, score, tokenizer) -> None:
    values = {name: round(value, 4) for name, value in asdict(score).items() if isinstance(value, float)}
    books = None if options is None or case.is_prompt else options["codebooks"]
    text = tokenizer.decode(ids[0])
    line = provenance() | {"preset": PRESET, "model": MODEL, "tokens": ids.shape[1]} | asdict(case) | values | {
        "kl": round(score.kl, 5), "cache_bytes": score.cache_bytes, "lowest_cosine": round(min(score.cosine), 4),
        "codebooks": books and {"hash": books.hash[:16], "bytes": books.nbytes},
        "text_sha256": hashlib.sha256(text.encode()).hexdigest()[:16], "learned_tokens": LEARNED_TOKENS}
    append_result(output, line)
    print(f"{case.label:32} {line['bits_per_element']:6.3f} bits  perplexity {line['perplexity']:8.4f}  "
          f"KL {line['kl']:.5f}  top-1 {line['top1']:.4f}  {line['seconds']:.0f} s", flush=True)


def lines_of(path: str = RESULTS) -> list[dict]:
    file = ROOT / path
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in lines if line["preset"] == PRESET]


def newest(results: str = RESULTS) -> dict[str, dict]:
    """The last line of each label, of the most tokens that were read."""
    lines = lines_of(results)
    most = max((line["tokens"] for line in lines), default=0)
    return {line["label"]: line for line in lines if line["tokens"] == most}


def table_of(lines: dict[str, dict]) -> str:
    """A row a cache, as Markdown; the second seed's and the second text's KL stand beside the first's."""
    def kl(label: str) -> str:
        return f"{lines[label]['kl']:.4f}" if label in lines else ""

    rows = ["| cache | bits | perplexity | KL | target KL | top-1 | KL, seed 1 | KL, gpl |",
            "|---|---|---|---|---|---|---|---|"]
    for case in CASES:
        if case.label in lines and case.text == "docs" and not case.label.endswith(SECOND_SEED):
            line, target = lines[case.label], TARGETS.get(case.label)
            cells = (case.label, f"{line['bits_per_element']:.2f}", f"{line['perplexity']:.3f}", kl(case.label),
                     f"{target.kl:.4f}" if target else "", f"{line['top1']:.3f}", kl(case.label + SECOND_SEED),
                     kl(case.label + OTHER_TEXT))
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


@app.command()
def table(results: Annotated[str, typer.Option(help="JSON lines file of the repository.")] = RESULTS) -> None:
    """Print the table of docs/codebooks.md, and the commits of its lines."""
    lines = newest(results)
    print(f"{table_of(lines)}\n\ncommits: {', '.join(sorted({line['commit'] for line in lines.values()}))}")


if __name__ == "__main__":
    app()
