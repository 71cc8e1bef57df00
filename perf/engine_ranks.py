"""Whether vLLM's engine gives the same tokens on one GPU and, by --tensor-parallel-size, on several.

    python3 perf/engine_ranks.py check --ranks 2 --output engine.jsonl       a tiny model with random weights
    python3 perf/engine_ranks.py check --ranks 2 --deal --output ...         one KV head, its tokens dealt to ranks
    python3 perf/engine.py run --part steps --ranks 2 --dtype lowbit_k4v4    its time a token: another script

Each engine runs in processes of its own, all of which end with it. Ranks add up their parts in another order, so
tokens may differ where the two likeliest are nearly even: a line of JSON has how many first tokens of each prompt are
the same, and how far ahead of the second, in nats, a token was that differs. --deal is vLLM's
--decode-context-parallel-size, which it has for models with fewer KV heads than ranks.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import engine
import typer
from engine import Fill

# 12 query heads over 4 KV heads: they can be dealt to two and to four ranks
MODEL = engine.TINY | dict(hidden_size=768, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=12,
                           num_key_value_heads=4, head_dim=64, vocab_size=2048)
DEALT = MODEL | dict(num_key_value_heads=1)
LENGTHS = (70, 128, 300, 389, 517, 640, 777, 1001)  # tokens of the prompts
NEW = 160  # tokens behind each: more than a block
NEAR_TIE = 0.125  # nats: one step of bfloat16 at logits of 16 to 32
BLOCK = 128  # tokens that are dealt to a rank at once

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def model_folder(folder: Path, model: dict = MODEL) -> Path:
    """A model with random weights, such that attention matters and next tokens are far from even."""
    import torch
    from safetensors.torch import save_file

    draw, width, ffn = torch.Generator().manual_seed(3), model["hidden_size"], model["intermediate_size"]
    q, kv = (model[name] * model["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"embed_tokens": (model["vocab_size"], width), "norm": (width,)}
    for layer in range(model["num_hidden_layers"]):
        parts = {"self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
                 "self_attn.o_proj": (width, q), "mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width),
                 "mlp.down_proj": (width, ffn), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes = {f"model.{name}": shape for name, shape in shapes.items()} | {"lm_head": (model["vocab_size"], width)}
    scale = {"model.embed_tokens": 1.0, "lm_head": 3 * width**-0.5}  # else 1 / sqrt(inputs)
    weights = {name: torch.ones(shape) if len(shape) == 1 else
               torch.randn(shape, generator=draw) * scale.get(name, shape[1]**-0.5) for name, shape in shapes.items()}
    save_file({f"{name}.weight": x.bfloat16() for name, x in weights.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model))
    return folder


@app.command()
def answer(
    model: Annotated[Path, typer.Option(help="Folder of a model.")],
    dtype: engine.Dtype,
    ranks: Annotated[int, typer.Option()],
    result: Annotated[Path, typer.Option(help="File that the answer is written to.")],
    deal: Annotated[bool, typer.Option("--deal")] = False,
    eager: Annotated[bool, typer.Option("--eager")] = False,
) -> None:
    """Generate greedily behind random prompts, in this process; write tokens, and how far each is ahead."""
    import random

    from vllm import SamplingParams

    began, draw = time.perf_counter(), random.Random(1)
    dealt = dict(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=BLOCK) if deal else {}
    llm = engine.engine(model, dtype, max(LENGTHS) + NEW, len(LENGTHS), Fill.prompt, eager, tensor_parallel_size=ranks,
                        **dealt, **({} if engine.is_cpu() else engine.SMALL))
    started = time.perf_counter() - began
    prompts = [dict(prompt_token_ids=[draw.randrange(3, MODEL["vocab_size"]) for _ in range(n)]) for n in LENGTHS]
    done = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=2,
                                                detokenize=False), use_tqdm=False)
    ahead = [[ahead_of_second(step) for step in one.outputs[0].logprobs] for one in done]
    result.write_text(json.dumps(dict(tokens=[list(one.outputs[0].token_ids) for one in done], ahead=ahead,
                                      start_s=round(started, 1))))


def ahead_of_second(step: dict) -> float:
    first, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return first - second


def compared(one: dict, several: dict) -> dict:
    """Compare two answers: first tokens of each prompt that are the same, and how far ahead each was that differs."""
    same = [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
            for a, b in zip(one["tokens"], several["tokens"])]
    gaps = [one["ahead"][row][at] for row, at in enumerate(same) if at < len(one["tokens"][row])]
    distinct = len({token for row in one["tokens"] for token in row})
    return dict(same_tokens=same, of=[len(row) for row in one["tokens"]], gaps=[round(gap, 4) for gap in gaps],
                distinct_tokens=distinct, start_s=[one["start_s"], several["start_s"]])


@app.command()
def check(
    output: engine.Output = Path("engine.jsonl"),
    ranks: Annotated[int, typer.Option()] = 2,
    dtype: engine.Dtype = "lowbit_k4v4",
    limit: Annotated[float, typer.Option(help="Seconds of the engines, at most.")] = 150.0,
    deal: Annotated[bool, typer.Option("--deal", help="Deal a sequence's blocks to the ranks.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Without CUDA graphs.")] = False,
) -> None:
    """Compare; 0 if no token differs but at near-ties, else 1."""
    from provenance import provenance

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that an engine's processes end with this one
    model = DEALT if deal else MODEL
    about = dict(part="ranks", dtype=dtype, ranks=ranks, dealt=ranks if deal else 1, is_eager=eager,
                 model=f"random {model['num_attention_heads']}/{model['num_key_value_heads']}") | provenance()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
        folder = model_folder(Path(scratch), model)
        processes = {}
        for count in (1, ranks):
            flags = ["--eager"] * eager + ["--deal"] * (deal and count > 1)
            processes[count] = running.enter_context(started(folder, dtype, count, flags))
        until = time.monotonic() + limit
        with suppress(SystemExit):  # of the signal: what the engines printed so far is written
            for process in processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        if failed := [count for count, process in processes.items() if process.returncode != 0]:
            told = "\n".join(f"{count} ranks: {(folder / f'{count}.log').read_text()[-700:]}" for count in failed)
            engine.write(output, about | dict(error=f"no answer of {failed} ranks", told=told))
            raise typer.Exit(1)
        found = compared(*(json.loads((folder / f"{count}.json").read_text()) for count in processes))
    engine.write(output, about | found)
    raise typer.Exit(int(any(gap > NEAR_TIE for gap in found["gaps"])))


@contextmanager
def started(model: Path, dtype: str, ranks: int, flags: list[str] = []) -> Iterator[subprocess.Popen]:
    """The process of an engine of so many ranks, which writes RANKS.json into the model's folder; flags: of answer."""
    command = [sys.executable, __file__, "answer", "--model", str(model), "--dtype", dtype, "--ranks", str(ranks),
               "--result", str(model / f"{ranks}.json"), *flags]
    with open(model / f"{ranks}.log", "w") as log, \
         engine.group(command, os.environ | engine.variables(dtype), stdout=log, stderr=log) as process:
        yield process


if __name__ == "__main__":
    app()
