"""Writes the decode times that `lowbit-attn suggest` shows, from the newest lines of perf/results/decode.jsonl.

    python perf/measured.py        src/lowbit_attn/measured.json

One call a format and size: of the presets targets and kitty those with few sequences of equal length, as many query
heads a KV head as most models have or fewer, on the decode path that the library takes today.
"""

import json

from bench import PRESETS
from decode_results import newest, read_lines

from lowbit_attn.budget import GPUS, MEASURED

MOST_SEQUENCES, MOST_HEADS = 8, 4  # query heads a KV head
NAMES = {"NVIDIA H200": GPUS["h200"].name}


def calls() -> list[dict]:
    """The calls in the order of their bytes."""
    cases = [case for preset in ("targets", "kitty") for case in PRESETS[preset] if case.ragged is None
             and case.batch <= MOST_SEQUENCES and case.num_heads <= MOST_HEADS * case.num_heads_kv]
    lines = read_lines()
    found = [newest(lines, case) for case in dict.fromkeys(cases)]
    kept = [{"gpu": NAMES[line["gpu"]]} | {name: line[name] for name in (
        "arch", "format", "batch", "heads", "kv_heads", "head_dim", "seqlen", "us", "commit", "date", "bytes")}
        for line in found if line and line["gpu"] in NAMES]
    return sorted(kept, key=lambda call: (call["format"], call.pop("bytes")))


def text_of(found: list[dict]) -> str:
    """measured.json, a call a line."""
    latest = max(call["date"] for call in found)[:10]
    rows = ",\n".join("  " + json.dumps({name: x for name, x in call.items() if name != "date"}) for call in found)
    command = "python perf/bench.py --preset targets, --preset kitty; python perf/measured.py"
    return f'{{\n "command": {json.dumps(command)},\n "date": "{latest}",\n "calls": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    MEASURED.write_text(text_of(calls()))
