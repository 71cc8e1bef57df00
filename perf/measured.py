"""Writes the decode times that `lowbit-attn suggest` shows, from the newest lines of perf/results/decode.jsonl.

    python perf/measured.py        src/lowbit_attn/measured.json

One call a GPU, format and size: of the presets targets and kitty those with few sequences of equal length, on the
decode path that the library takes today. rows: query rows of a KV head, which a shown time must have in common with
what is asked.
"""

import json

from bench import PRESETS
from decode_results import newest, read_lines

from lowbit_attn.budget import GPUS, MEASURED, Gpu

MOST_SEQUENCES = 8


def calls() -> list[dict]:
    """The calls of every GPU, in the order of their bytes."""
    return [call for gpu in GPUS.values() for call in calls_of(gpu, read_lines(gpu=gpu))]


def calls_of(gpu: Gpu, lines: list[dict]) -> list[dict]:
    """The calls of one GPU among its lines."""
    cases = [case for preset in ("targets", "kitty") for case in PRESETS[preset] if case.ragged is None
             and case.batch <= MOST_SEQUENCES]
    found = [(case, newest(lines, case)) for case in dict.fromkeys(cases)]
    kept = [{"gpu": gpu.name, "rows": case.rows} | {name: line[name] for name in (
        "arch", "format", "batch", "heads", "kv_heads", "head_dim", "seqlen", "us", "commit", "date", "bytes")}
        for case, line in found if line]
    return sorted(kept, key=lambda call: (call["format"], call.pop("bytes")))


def text_of(found: list[dict]) -> str:
    """measured.json, a call a line."""
    latest = max(call["date"] for call in found)[:10]
    rows = ",\n".join("  " + json.dumps({name: x for name, x in call.items() if name != "date"}) for call in found)
    command = "python perf/bench.py --preset targets, --preset kitty; python perf/measured.py"
    return f'{{\n "command": {json.dumps(command)},\n "date": "{latest}",\n "calls": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    MEASURED.write_text(text_of(calls()))
