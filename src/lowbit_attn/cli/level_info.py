"""``lowbit-attn info`` of two levels: where a head's tokens are at a length, and what each level's page takes."""

import json
from dataclasses import asdict, dataclass

import typer

from lowbit_attn import budget
from lowbit_attn.cli.common import console, fail, table
from lowbit_attn.formats.levels import Levels
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.levels.frames import frame_sizes
from lowbit_attn.levels.policy import Shares
from lowbit_attn.levels.state import WINDOW, buffer_bytes


@dataclass(frozen=True)
class Held:
    """Tokens of one KV head after a prompt: sinks, recent and staged ones in 16 bit, in high and low pages, pruned."""

    sinks: int
    high: int
    low: int
    staged: int
    pruned: int
    recent: int


def held(pair: Levels, seqlen: int, sinks: int | None = None) -> Held:
    """Where the tokens of a prompt of this length are, by the levels' own shares: every head has the same numbers."""
    sinks = min(seqlen, pair.sinks if sinks is None else sinks)
    left = max(0, seqlen - sinks - WINDOW) // PAGE_TOKENS * PAGE_TOKENS
    high, kept = Shares(pair.percent / 100).counts(left)
    pages = [n // PAGE_TOKENS * PAGE_TOKENS for n in (high, kept - high)]
    return Held(sinks, *pages, kept - sum(pages), left - kept, seqlen - sinks - left)


def show(pair: Levels, kv_heads: int, head_dim: int, batch: int, seqlen: int, as_json: bool) -> None:
    """Print where tokens are, the levels' pages and frames, and from which length on the pair is smaller."""
    try:
        pair.check(head_dim)
        records = [fmt.record_bytes(head_dim) for fmt in pair.formats]
    except ValueError as error:
        fail(error)
    per_low, frames = frame_sizes(*records)
    buffers, tokens = buffer_bytes(pair.sinks, head_dim), held(pair, seqlen)
    nbytes = budget.level_bytes(pair, kv_heads, head_dim, seqlen, pair.sinks)
    least = budget.pays_from(pair, head_dim, pair.sinks)
    if as_json:
        typer.echo(json.dumps({
            "levels": pair.name, "formats": [fmt.name for fmt in pair.formats], "record_bytes": records,
            "frame_bytes": frames, "low_records_a_frame": per_low, "buffer_bytes": buffers,
            "bits_per_element": pair.bits_per_element(head_dim), "seqlen": seqlen, "tokens": asdict(tokens),
            "layer_bytes": batch * nbytes, "pays_from": least}, indent=1))
        return
    out, shown = console(), table("a KV head", *asdict(tokens))
    shown.add_row("tokens", *(f"{n:,}" for n in asdict(tokens).values()))
    out.print(f"{pair}: {pair.percent} % of the tokens in {pair.high}, the others in {pair.low}; a prompt of "
              f"{seqlen:,} tokens, 16 bit but for high and low:", soft_wrap=True)
    out.print(shown)
    parts = table("level", "format", "record B", "bits/elt", "records a frame")
    for level, fmt, record, count in zip(("high", "low"), pair.formats, records, (1, per_low)):
        parts.add_row(level, fmt.name, f"{record:,}", f"{fmt.bits_per_element(head_dim):.3f}", str(count))
    out.print(parts)
    out.print(f"Frames of {' and '.join(f'{size:,}' for size in frames)} bytes; {buffers:,} bytes of 16-bit buffers a "
              f"KV head, whatever the length; {batch * nbytes:,} bytes a layer, smaller than {pair.high} from "
              f"{least:,} tokens on.", soft_wrap=True)
    out.print(f"Kernels: lowbit-attn info {pair.high} and {pair.low}, a launch each, or one for both. "
              "counts_of(seq) of a LevelCache gives these numbers of a cache in use.", soft_wrap=True)
