"""Whether requests that share steps with others get the tokens that each gets alone, in vLLM's engine on one GPU.

    python3 perf/engine_mixed.py --model FOLDER --dtype lowbit_k4v4 --output engine.jsonl

Prompts of 60 to 1,500 tokens of a text arrive while others decode, so that nearly every step has decode rows beside
chunks of prompts (--long-prefill-token-threshold), and with --drafts N n-gram drafts of unlike number. Alone, each
prompt goes in the same chunks. Greedy tokens may differ where the two likeliest are nearly even: a line of JSON has how
many first tokens of each request are the same, and how far ahead of the second, in nats, a token was that differs.
"""

import random
from pathlib import Path
from typing import Annotated

import engine
import typer
from engine_ranks import NEAR_TIE, ahead_of_second, compared

NEW, REQUESTS, CHUNK = 48, 24, 256
COUNTED = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Runs of tokens of this repository's documents, each with some of its tokens twice, so that drafts are found."""
    from provenance import ROOT
    from transformers import AutoTokenizer

    text = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens, draw = AutoTokenizer.from_pretrained(model)(text[:400_000])["input_ids"], random.Random(4)
    found = []
    for _ in range(count):
        length, start = draw.randrange(60, 1500), draw.randrange(len(tokens) - 1500)
        run = tokens[start : start + length]
        found.append(run[: length // 2] + run[length // 4 : length // 2] + run[length // 2 :])
    return found


def answers(llm, prompts: list[list[int]], at_once: bool) -> dict:
    """Greedy tokens behind each prompt, and how far each was ahead of the second."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2, detokenize=False)
    inner, done, waiting = llm.llm_engine, {}, list(enumerate(prompts))
    while waiting or inner.has_unfinished_requests():
        # one a step arrives while others decode; alone, the next one when the last one has ended
        if waiting and (at_once or not inner.has_unfinished_requests()):
            number, prompt = waiting.pop(0)
            inner.add_request(f"{number}", dict(prompt_token_ids=prompt), asked)
        for output in inner.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = output.outputs[0]
    ordered = [done[number] for number in range(len(prompts))]
    return dict(tokens=[list(one.token_ids) for one in ordered], start_s=0.0,
                ahead=[[ahead_of_second(step) for step in one.logprobs] for one in ordered])


def main(
    model: Annotated[Path, typer.Option(exists=True, help="Folder of a model with its tokenizer.")],
    dtype: engine.Dtype = "lowbit_k4v4",
    output: engine.Output = Path("engine.jsonl"),
    drafts: Annotated[int, typer.Option(help="N-gram drafts a step, at most.")] = 0,
    eager: Annotated[bool, typer.Option("--eager")] = False,
    default_compile: Annotated[bool, typer.Option("--default-compile", help="vLLM's default mode.")] = False,
) -> None:
    """Compare; 0 if no token differs but at near-ties, else 1."""
    import os

    from provenance import provenance

    os.environ.update(engine.variables(dtype))
    options = dict(long_prefill_token_threshold=CHUNK, **({} if engine.is_cpu() else engine.SMALL))
    if drafts:
        options |= dict(speculative_config=dict(method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=4,
                                                prompt_lookup_min=2))
    if default_compile:
        options |= dict(compilation_config={})
    llm = engine.engine(model, dtype, 2048, REQUESTS, eager=eager, **options)
    prompts = prompts_of(model, REQUESTS)
    found = compared(answers(llm, prompts, False), answers(llm, prompts, True))
    drafted = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in COUNTED}
    about = dict(part="mixed", dtype=dtype, model=model.name, drafts=drafts, is_eager=eager, metrics=drafted)
    engine.write(output, about | provenance() | found)
    raise typer.Exit(int(any(gap > NEAR_TIE for gap in found["gaps"])))


if __name__ == "__main__":
    typer.run(main)
