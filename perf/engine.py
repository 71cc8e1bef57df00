"""vLLM's engine with random weights of Llama-3.1-8B's shape: its own KV caches and ours, on one GPU.

    python3 perf/engine.py run --output engine.jsonl                    every row, each in a process of its own
    python3 perf/engine.py run --part steps --dtype auto --dtype lowbit_k4v4 --seconds 560 --output engine.jsonl

Parts. steps: time per output token by context and batch, and tokens/s of the largest batch that the cache holds of
32K tokens each. quality: perplexity of a text that a model of --model reads, through the engine and, for our dtypes,
by lowbit_attn.quality on the same device in the same chunks. A line of JSON for each number is written as soon as it
is there; a row that fails, or takes longer than --limit, leaves a line that says so, and the next begins.

Blocks are filled without prompts by vLLM's DecodeBenchConnector, which writes a constant into them (--fill dummy), or
by prompts of random tokens (--fill prompt). The time per token is that between two lengths of the same request; behind
prompts, whose own time varies by more than steps take, it is that of the steps in which every row gets a token. Lines
of dummy blocks have the latter, too: ms_stepped, and with --prompts the same behind prompts, in the same engine:
ms_prompts.
--ranks 2 is vLLM's --tensor-parallel-size 2; ``ranks`` in a line says it. The server: perf/engine_server.py. The same
tokens of one and of two GPUs: perf/engine_ranks.py.

Engines take long to start. Rows of several commands with the same --turn FILE, on one GPU whose memory --cache-gib
deals out, start together and measure one at a time, none while another one starts.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

LLAMA = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
             num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256,
             max_position_embeddings=132096, rms_norm_eps=1e-5, hidden_act="silu", bos_token_id=1, eos_token_id=2,
             tie_word_embeddings=False, attention_bias=False, mlp_bias=False, torch_dtype="bfloat16",
             rope_parameters=dict(rope_theta=500000.0, rope_type="default"))
TINY = LLAMA | dict(hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=64, vocab_size=512, max_position_embeddings=4096)
DTYPES = ("auto", "lowbit_k4v4", "fp8", "lowbit_k2v2-s32", "lowbit_k2v2", "int4_per_token_head", "lowbit_kitty-pro",
          "lowbit_kcq4vcq2", "turboquant_4bit_nc")
# of an element, about: for the largest batch. turboquant_4bit_nc keeps 4 of 32 layers in 16 bit
OWN_BYTES = {"auto": 2.0, "fp8": 1.0, "int4_per_token_head": 0.54, "turboquant_4bit_nc": 0.71}
CONTEXTS, BATCHES, LARGEST_CONTEXT = (8192, 32768, 131072), (1, 8), 32768
SHORT, LONG = 8, 72  # output tokens, between whose times the steps are counted
SPARE = 128  # tokens that a request has room for behind its prompt
SMALL = dict(gpu_memory_utilization=0.06, kv_cache_memory_bytes=1 << 30)  # of a small model, beside others on a GPU
# NVLink multicast stays off: it can take a shared host's GPUs out of service
MULTICAST_OFF = dict(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1",
                     VLLM_ALLREDUCE_USE_SYMM_MEM="0")
MOST_ROWS = 256
CAPTURED_FROM = 0.7  # of the most rows: between these and BATCHES no step is captured


class Part(StrEnum):
    steps = "steps"
    quality = "quality"


class Fill(StrEnum):
    dummy = "dummy"
    prompt = "prompt"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Dtype = Annotated[str, typer.Option(help="Of the KV cache.")]
Output = Annotated[Path, typer.Option(help="JSON lines, appended to.")]


def write(output: Path, line: dict) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    with open(output, "a") as file:
        file.write(text + "\n")


@app.command()
def run(
    output: Output = Path("engine.jsonl"),
    part: Annotated[list[Part] | None, typer.Option(help="Default: all.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Default: those of the part.")] = None,
    seconds: Annotated[float, typer.Option(help="No row begins later than --limit before that.")] = 1e6,
    limit: Annotated[float, typer.Option(help="Seconds of a row, at most.")] = 240.0,
    model: Annotated[Path | None, typer.Option(help="For the part quality: a folder of a model.")] = None,
    tiny: Annotated[bool, typer.Option(help="A model of two layers, short contexts: a trial on a CPU.")] = False,
    fill: Annotated[Fill, typer.Option()] = Fill.dummy,
    eager: Annotated[bool, typer.Option("--eager", help="Without CUDA graphs.")] = False,
    ranks: Annotated[int, typer.Option(help="GPUs of an engine: vLLM's --tensor-parallel-size.")] = 1,
    context: Annotated[list[int] | None, typer.Option(help="Tokens. Default: 8192, 32768, 131072.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Default: 1, 8.")] = None,
    largest: Annotated[bool, typer.Option(help="The largest batch, too.")] = True,
    cache_gib: Annotated[float, typer.Option(help="Of the KV cache on each GPU; 0: what is left there.")] = 0.0,
    turn: Annotated[Path | None, typer.Option(help="File by which rows of several commands take turns.")] = None,
    prompts: Annotated[list[int] | None, typer.Option(help="Contexts that are timed behind prompts, too.")] = None,
) -> None:
    """Measure rows, one after the other; 0 if every one was measured, else 1."""
    from provenance import provenance

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a row's processes end with this one

    origin, started, failed, done = provenance(), time.monotonic(), 0, 0
    for name in part or [one for one in Part if one is not Part.quality or model]:
        for kind in dtype or DTYPES:
            left = seconds - (time.monotonic() - started)
            if done and left < min(limit, 60.0):
                write(output, origin | dict(part=name, dtype=kind, error="not begun: no time was left"))
                failed += 1
                continue
            flags = [*["--tiny"] * tiny, *["--eager"] * eager, *["--no-largest"] * (not largest),
                     *(["--model", str(model)] if model else []), *(["--turn", str(turn)] if turn else []),
                     *(word for tokens in context or [] for word in ("--context", str(tokens))),
                     *(word for rows in batch or [] for word in ("--batch", str(rows))),
                     *(word for tokens in prompts or [] for word in ("--prompts", str(tokens)))]
            command = [sys.executable, __file__, "row", "--part", name, "--dtype", kind, "--fill", fill, "--output",
                       str(output), "--ranks", str(ranks), "--cache-gib", str(cache_gib), *flags]
            failed += not _row(command, min(limit, left), output, origin | dict(part=name, dtype=kind))
            done += 1
    raise typer.Exit(int(failed > 0))


def _row(command: list[str], limit: float, output: Path, about: dict) -> bool:
    """Run a row's process; write a line if it fails or takes too long. Its workers end with it."""
    with group(command, os.environ | variables(about["dtype"]), stderr=subprocess.PIPE, text=True,
               errors="replace") as process:
        try:
            _, told = process.communicate(timeout=limit)
            reason = f"exit {process.returncode}"
        except subprocess.TimeoutExpired:
            end(process)
            reason, told = f"stopped after {limit:.0f} s", process.communicate()[1]
        except SystemExit:  # of the signal: what it printed so far is written
            end(process)
            write(output, about | dict(error="stopped from outside", told=process.communicate()[1][-1500:]))
            raise
    if reason == "exit 0":
        return True
    write(output, about | dict(error=reason, told=told[-1500:]))
    return False


@contextmanager
def group(command: list[str], environment: dict[str, str], **options):
    """A process in a group of its own, which is ended at the end, whatever the process has started in it."""
    process = subprocess.Popen(command, env=environment, start_new_session=True, **options)
    try:
        yield process
    finally:
        end(process)
        process.wait()


def end(process: subprocess.Popen) -> None:
    """Kill all of a process's group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def variables(dtype: str) -> dict[str, str]:
    """Environment of an engine's process, beside what is set already."""
    found = dict(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
                 VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_WORKER_MULTIPROC_METHOD="spawn",
                 VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")) | MULTICAST_OFF
    if is_cpu():
        found |= dict(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
        found |= dict(LOWBIT_ATTN_VLLM=dtype) if is_ours(dtype) else {}
    return found


def is_cpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def is_ours(dtype: str) -> bool:
    return dtype.startswith("lowbit_")


@app.command()
def row(
    part: Annotated[Part, typer.Option()],
    dtype: Dtype,
    output: Output,
    fill: Annotated[Fill, typer.Option()] = Fill.dummy,
    model: Annotated[Path | None, typer.Option()] = None,
    tiny: Annotated[bool, typer.Option()] = False,
    eager: Annotated[bool, typer.Option("--eager")] = False,
    ranks: Annotated[int, typer.Option()] = 1,
    context: Annotated[list[int] | None, typer.Option()] = None,
    batch: Annotated[list[int] | None, typer.Option()] = None,
    largest: Annotated[bool, typer.Option()] = True,
    cache_gib: Annotated[float, typer.Option()] = 0.0,
    turn: Annotated[Path | None, typer.Option()] = None,
    prompts: Annotated[list[int] | None, typer.Option()] = None,
) -> None:
    """Measure one row in this process."""
    from provenance import provenance

    began, turns = time.perf_counter(), Turns(turn)
    about = dict(part=part, dtype=dtype, fill=fill, is_eager=eager, model="tiny" if tiny else "llama-3.1-8b",
                 ranks=ranks) | provenance()
    if part is Part.quality:
        import engine_quality

        for line in engine_quality.lines(model, dtype):
            write(output, about | dict(model=str(model.name), fill=Fill.prompt, is_eager=True) | line)
        return
    contexts, batches = context or ((256, 512) if tiny else CONTEXTS), batch or ((1, 2) if tiny else BATCHES)
    largest_context = (256 if tiny else LARGEST_CONTEXT) if largest else 0
    most = max(batches) if not largest else 4 if tiny else rows_at_most(dtype)
    folder = model_folder(Path("build/engine-model"), TINY if tiny else LLAMA, dtype)
    memory = dict(kv_cache_memory_bytes=int(cache_gib * 2**30), gpu_memory_utilization=0.1) if cache_gib else {}
    llm = engine(folder, dtype, max(*contexts, largest_context) + SPARE, most, fill, eager, tensor_parallel_size=ranks,
                 **memory)
    about |= capacity(llm) | dict(start_s=round(time.perf_counter() - began, 1))
    turns.wait()
    cases = [(context, batch, False) for context in contexts for batch in batches]
    if largest:
        cases += [(largest_context, min(most, about["num_blocks"] // blocks_of(about, largest_context + SPARE)), True)]
    for context, batch, is_largest in cases:
        case = about | dict(context=context, batch=batch, is_largest=is_largest)
        needed = batch * blocks_of(about, context + SPARE)
        if not 0 < needed <= about["num_blocks"]:
            write(output, case | dict(error=f"{needed} blocks are needed"))
        else:
            write(output, case | measured(llm, context, batch, fill, context in (prompts or ())))


class Turns:
    """Turns of processes by a file's lock: shared while they start, of one alone while it measures, until it ends."""

    def __init__(self, path: Path | None):
        self.file = open(path, "w") if path else None
        self._lock(fcntl.LOCK_SH)

    def wait(self) -> None:
        """Until no other process starts or measures."""
        self._lock(fcntl.LOCK_UN)
        self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> None:
        if self.file:
            fcntl.flock(self.file, kind)


def rows_at_most(dtype: str) -> int:
    """Rows that the engine shall run at once: somewhat more than its cache holds of the largest batch's."""
    import torch

    element = OWN_BYTES.get(dtype)
    if element is None:
        from lowbit_attn.integrations.vllm.names import parse

        element = parse(dtype).format.record(LLAMA["head_dim"]).nbytes / (2 * 128 * LLAMA["head_dim"])
    token = 2 * LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"] * LLAMA["head_dim"] * element
    room = 0.9 * (torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 80e9) - 18e9
    return min(MOST_ROWS, int(1.05 * room / (token * LARGEST_CONTEXT)) // 8 * 8 + 8)


def model_folder(root: Path, config: dict, dtype: str) -> Path:
    """A model without weights, and random codebooks for formats that need them."""
    folder = root / dtype
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if is_ours(dtype):
        from lowbit_attn.integrations.vllm.names import parse
        from lowbit_attn.testing import normal_codebooks

        if (fmt := parse(dtype).format).needs_codebooks:
            file = folder / "lowbit_attn" / f"{fmt}.safetensors"
            file.parent.mkdir(exist_ok=True)
            normal_codebooks(fmt.name, config["num_hidden_layers"], config["num_key_value_heads"],
                             config["head_dim"]).save(file)
    return folder


def engine(folder: Path, dtype: str, length: int, rows: int, fill: Fill = Fill.prompt, eager: bool = False, **options):
    """vLLM's engine over a model's folder, in this process; requests of up to ``length`` tokens, ``rows`` at once."""
    from vllm import LLM

    if dtype.startswith("turboquant_") and not is_cpu():
        take_flash_attention_3()
    on_cpu, ours = is_cpu(), is_ours(dtype)
    options = dict(skip_tokenizer_init=True, dtype="float32" if on_cpu else "bfloat16", max_model_len=length,
                   max_num_seqs=rows, max_num_batched_tokens=8192, enable_prefix_caching=False,
                   disable_log_stats=False) | options
    if not on_cpu:
        options = dict(kv_cache_dtype=dtype, gpu_memory_utilization=0.9) | options
        options |= dict(attention_backend="CUSTOM") if ours else {}
    options |= dict(block_size=128) if ours or on_cpu else {}
    if on_cpu or eager:
        options |= dict(enforce_eager=True)
    else:
        options |= dict(compilation_config=dict(mode=0, cudagraph_mode="FULL_DECODE_ONLY",
                                                cudagraph_capture_sizes=captured(rows)))
    if fill is Fill.dummy:
        options |= dict(kv_transfer_config=dict(kv_connector="DecodeBenchConnector", kv_role="kv_both"))
    if not list(folder.glob("*.safetensors")):
        options |= dict(load_format="dummy")
    return LLM(str(folder), **options)


def take_flash_attention_3() -> None:
    """Let vLLM compute the layers that turboquant leaves in 16 bit as it computes those of ``auto`` on a Hopper GPU.

    It sets FlashAttention 2 for them, since the metadata of FlashAttention 3 once refused to stand beside other layers;
    those of 0.33 pass over them. Of FlashAttention 2 its wheel has PTX alone for such a GPU, which the driver must
    compile first: a row with it was stopped in its first capture, after 155 s.
    """
    from vllm.engine.arg_utils import EngineArgs

    made = EngineArgs.create_engine_config

    def create(self, *arguments, **options):
        config = made(self, *arguments, **options)
        config.attention_config.flash_attn_version = 3
        return config

    EngineArgs.create_engine_config = create


def captured(rows: int) -> list[int]:
    """Batches whose steps are captured."""
    return [*(n for n in BATCHES if n <= rows), *(n for n in range(16, rows + 1, 8) if n >= CAPTURED_FROM * rows)]


def capacity(llm) -> dict:
    """The cache as the engine made it: blocks of so many tokens, groups of layers that each take blocks of a request,
    and blocks that a request takes for its rings."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    rings = sum(any("ring" in name for name in group.layer_names) for group in config.kv_cache_groups)
    size, = {group.kv_cache_spec.block_size for group in config.kv_cache_groups
             if not any("ring" in name for name in group.layer_names)}
    blocks, groups = config.num_blocks - 1, len(config.kv_cache_groups) - rings  # vLLM keeps one block
    return dict(num_blocks=blocks, block_tokens=size, page_groups=groups, ring_blocks=rings,
                capacity_tokens=blocks // groups * size)


def blocks_of(about: dict, tokens: int) -> int:
    """Blocks of a request of so many tokens."""
    return -(-tokens // about["block_tokens"]) * about["page_groups"] + about["ring_blocks"]


def measured(llm, context: int, batch: int, fill: Fill, also_prompts: bool = False) -> dict:
    """Time per output token of a batch of requests behind ``context`` tokens each, SHORT and LONG tokens alike;
    also_prompts: besides, behind prompts."""
    import random

    from vllm import SamplingParams

    draw, most = random.Random(context + batch), llm.llm_engine.model_config.get_vocab_size() - 1
    prompts = [dict(prompt_token_ids=[draw.randint(10, most) for _ in range(context - SPARE // 2)])
               for _ in range(batch)]

    def seconds(tokens: int) -> float:
        started = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
                     use_tqdm=False)
        return time.perf_counter() - started

    seconds(2)
    preempted = _preemptions(llm)
    if fill is Fill.prompt:
        steps = [stepped(llm, prompts) for _ in range(2)]
        return dict(ms_per_token=round(min(steps), 4), ms_of_each=[round(step, 4) for step in steps],
                    tokens_per_s=round(batch / min(steps) * 1e3, 1), preemptions=_preemptions(llm) - preempted)
    pairs = [(seconds(SHORT), seconds(LONG)) for _ in range(2)]
    steps = [(longer - shorter) / (LONG - SHORT) * 1e3 for shorter, longer in pairs]
    found = dict(ms_per_token=round(min(steps), 4), ms_of_each=[round(step, 4) for step in steps],
                 ms_stepped=round(stepped(llm, prompts), 4))
    if also_prompts:
        found |= dict(ms_prompts=round(stepped(llm, prompts, False), 4))
    return found | dict(tokens_per_s=round(batch / min(steps) * 1e3, 1), first_s=round(pairs[0][0], 3),
                        preemptions=_preemptions(llm) - preempted)


def stepped(llm, prompts: list[dict], is_filled: bool = True) -> float:
    """Mean ms of the engine's steps in which all requests get a token, LONG tokens each.

    is_filled: by vLLM's connector, if the engine has it; else its connector is told that it has filled them before.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    inner, ends = llm.llm_engine, []
    for number, prompt in enumerate(prompts):
        name = inner.add_request(f"stepped-{number}", prompt,
                                 SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True, detokenize=False,
                                                output_kind=RequestOutputKind.DELTA))
        if not is_filled:
            inner.engine_core.engine_core.scheduler.connector.connector_scheduler._filled_requests.add(name)
    while inner.has_unfinished_requests():
        if len(inner.step()) == len(prompts):
            ends.append(time.perf_counter())
    return (ends[-1] - ends[0]) / (len(ends) - 1) * 1e3


def _preemptions(llm) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


if __name__ == "__main__":
    app()
