"""Runs vLLM's engine on a CPU in a process of its own: ``run`` says what, the process answers in JSON.

    python -m serving.engine < asked.json

Every job gets an engine in a process of its own, which does its rounds of prompts one after the other; all are forked
from one that has imported vLLM, which takes longer than a tiny model's job.
"""

import json
import math
import os
import subprocess
import sys
import traceback
from pathlib import Path

VARIABLES = dict(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0",
                 VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE",
                 VLLM_CPU_OMP_THREADS_BIND="nobind", DO_NOT_TRACK="1")
RELEASE = Path(sys.prefix) / "vllm-0.33.0"  # Python of the newer version, which .ci/serving unpacks
MARK = "ANSWER "
DRAFTS = dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3,
                                      prompt_lookup_min=1))
PRIVATE = dict(enable_prefix_caching=False)
WORKSPACE = 400  # tokens of the workspace of steps by plans: contexts of some hundred take several passes
NEAR_TIE = 0.1  # nats that the first of two tokens is ahead, where 8 bits may pick the other
COUNTED = ("preempt", "prefix_cache", "spec_decode")  # parts of the names of metrics that an answer has


def model_drafts(model: str | Path) -> dict:
    """Options of drafts by a model."""
    return dict(speculative_config=dict(method="draft_model", model=str(model), num_speculative_tokens=3))


class EngineError(RuntimeError):
    """The process failed; the message is the end of what it printed."""


def job(model: str | Path, rounds: list[list[list[int]]], dtype: str | None = None, layout: str | None = None,
        tokens: int = 24, scored: bool = False, codebooks: str | Path | None = None, is_static: bool = False,
        **options) -> dict:
    """An engine of its own, and what it is asked: rounds of prompts (token ids), one round after the other.

    dtype: a KV cache dtype of lowbit_attn; None: the engine's own cache. scored: also the perplexity of each prompt.
    codebooks: a file or folder of them; None: what the model's folder has. is_static: steps go by plans, as on a
    GPU. options: of vllm.LLM.
    """
    variables = dict(LOWBIT_ATTN_VLLM=dtype, VLLM_KV_CACHE_LAYOUT=layout,
                     LOWBIT_ATTN_CODEBOOKS=None if codebooks is None else str(codebooks))
    return dict(model=str(model), rounds=rounds, variables=variables, tokens=tokens, scored=scored, options=options,
                is_static=is_static)


def environment(release: Path | None = None) -> dict[str, str]:
    """Of a process with vLLM; release: a folder with another version's Python, instead of the installed one."""
    other = {} if release is None else dict(PYTHONPATH=str(release), VLLM_TARGET_DEVICE="cpu")
    return os.environ | VARIABLES | other


def run(jobs: list[dict], timeout: int = 1800, release: Path | None = None) -> list[dict]:
    """Does jobs, one after the other; EngineError for one that fails. release: as in ``environment``.

    Answers for each job {"version": of vLLM, "tokens", "cached", "gaps", "ppl": [round][prompt], "metrics": by name}:
    what was generated greedily, tokens found in the prefix cache, how far each token's runner-up is behind (nats),
    perplexity.
    """
    done = subprocess.run([sys.executable, "-m", "serving.engine"], input=json.dumps(jobs), capture_output=True,
                          text=True, env=environment(release), cwd=Path(__file__).parents[1], timeout=timeout)
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or len(answers) < len(jobs):
        raise EngineError(f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return [json.loads(answer.removeprefix(MARK)) for answer in answers]


def answer(asked: dict) -> dict:
    """What ``run`` answers for one job."""
    from vllm import LLM, SamplingParams, __version__

    for name, value in asked["variables"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    if asked["is_static"]:
        _plan_steps()
    options = dict(dtype="float32", max_model_len=2048, enforce_eager=True, max_num_seqs=8, block_size=128,
                   max_num_batched_tokens=256, disable_log_stats=False, skip_tokenizer_init=True) | asked["options"]
    llm = LLM(asked["model"], **options)
    found = dict(version=__version__, tokens=[], cached=[], ppl=[], gaps=[])
    sampling = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, logprobs=2, detokenize=False,
                              prompt_logprobs=0 if asked["scored"] else None)
    for prompts in asked["rounds"]:
        done = llm.generate([dict(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)
        found["tokens"].append([list(one.outputs[0].token_ids) for one in done])
        found["cached"].append([one.num_cached_tokens for one in done])
        found["gaps"].append([[_gap(step) for step in one.outputs[0].logprobs] for one in done])
        if asked["scored"]:
            found["ppl"].append([_perplexity(one.prompt_logprobs) for one in done])
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    found["metrics"] = {name.removeprefix("vllm:"): value for name, value in metrics.items()
                        if any(part in name for part in COUNTED)}
    return found


def _plan_steps() -> None:
    """Let steps go by plans, as on a GPU, with torch in the place of kernels and of FlashAttention."""
    import torch
    from unit.mixed import varlen

    from lowbit_attn.integrations.vllm import adapter, gpu, plans

    adapter.LowBitBuilder.is_planned = True
    gpu.varlen, gpu.copy_to = varlen, lambda device: lambda array: torch.from_numpy(array).clone()
    plans.workspace_tokens = lambda tokens: WORKSPACE
    gpu.workspace = lambda shape, dtype: tuple(torch.full((WORKSPACE, *shape[1:]), torch.nan, dtype=dtype)
                                               for _ in range(2))


def _gap(step: dict) -> float:
    first, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
    return first - second


def _perplexity(logprobs: list) -> float:
    found = [next(iter(step.values())).logprob for step in logprobs[1:]]
    return math.exp(-sum(found) / len(found))


def agreement(mine: list[list[int]], theirs: list[list[int]]) -> list[int]:
    """How many first tokens of each prompt are the same."""
    return [next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a)) for a, b in zip(mine, theirs)]


def apart(mine: list[list[int]], theirs: list[list[int]], gaps: list[list[float]]) -> list[float]:
    """Of prompts whose tokens differ: how far ahead their first differing token was in ``theirs``, in nats."""
    return [gaps[row][at] for row, at in enumerate(agreement(mine, theirs)) if at < len(theirs[row])]


def near_ties(mine: dict, theirs: dict, round_mine: int = 0, round_theirs: int = 0) -> list[float]:
    """``apart`` of two jobs' answers, in these rounds."""
    return apart(mine["tokens"][round_mine], theirs["tokens"][round_theirs], theirs["gaps"][round_theirs])


def main() -> None:
    jobs = json.load(sys.stdin)
    import vllm.entrypoints.llm
    import vllm.v1.engine.core  # noqa: F401
    for one in jobs:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                print(MARK + json.dumps(answer(one)), flush=True)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)


if __name__ == "__main__":  # workers of several ranks are spawned, and import this file
    main()
