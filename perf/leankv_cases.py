"""The caches of the LeanKV paper's figures, and what is measured of each: leankv_figures.py runs them.

A window is the first 1,024 tokens of one of text_quality.py's texts, read in chunks of 128. All caches have 32 sinks.
Pruning alone, which the paper does in 16 bit, is done over levels of 8 bits, whose own KL is below 2e-5.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

SINKS = 32
PRUNED = (10, 20, 40, 60, 80)  # percent, the same of every head
DYNAMIC = (0.02, 0.05, 0.1, 0.2, 0.4)  # of a head's scores, which the dropped tokens have together
EIGHT = "k8v8+k8v4"  # its high level alone is used
ASKED = (20, 40)  # percent pruned, of which recall is asked too
SHARE = 0.95  # of the scores that critical tokens hold
LAST = 64  # queries whose own critical tokens are counted
DECADES = 12  # of the histograms, down from 1
PER_DECADE = 5  # bins


@dataclass(frozen=True)
class Case:
    """One cache: options of LowBitCache; figures of the paper that show it; is_random: tokens are ranked by chance."""

    options: dict
    figures: tuple[str, ...]
    is_random: bool = False


def cases() -> dict[str, Case]:
    """label -> case; the uniform formats beside them are those of text_quality.py."""
    from lowbit_attn.levels.policy import Cumulative, Shares

    def levels(name: str, policy, *figures: str, is_random: bool = False) -> Case:
        return Case(dict(format=name, sinks=SINKS, policy=policy), figures, is_random)

    made = {}
    for percent in PRUNED:
        made[f"pruned {percent} %, static"] = levels(EIGHT, Shares(1 - percent / 100, 0), "8", "10")
    for share in DYNAMIC:
        made[f"pruned, T_l {share}, dynamic"] = levels(EIGHT, Cumulative(share, share), "8")
    for percent in ASKED:
        made[f"pruned {percent} %, random"] = levels(EIGHT, Shares(1 - percent / 100, 0), "8", is_random=True)
    for percent in PRUNED[:-1]:
        kept = 1 - percent / 100
        made[f"lean, {percent} % pruned"] = levels("lean", Shares(kept / 4, 3 * kept / 4), "9", "10")
    for percent in (20, 40, 60, 80):
        made[f"k4v2+k4v1, {percent} % k4v1"] = levels("k4v2+k4v1", Shares(1 - percent / 100), "9", "11")
    for percent in (10, 50):
        made[f"lean, {percent} % high"] = levels("lean", Shares(percent / 100), "9")
    for share in (0.1, 0.5):
        made[f"lean, T_h {share}"] = levels("lean", Cumulative(0, share), "9")
    for name in ("k4v4+k4v2", "k4v4+k2v2"):
        made[name] = levels(name, Shares(0.25), "9")
    return made


def recall_cases() -> dict[str, Case]:
    """label -> case of those that questions are put to."""
    known = cases()
    labels = [f"pruned {percent} %, {how}" for percent in ASKED for how in ("static", "random")]
    return {label: known[label] for label in (*labels, *(f"pruned, T_l {share}, dynamic" for share in DYNAMIC[1:4]))}


@contextmanager
def kept_caches(module) -> Iterator[list]:
    """The caches that ``new_cache`` of a module makes meanwhile, in order."""
    made, make = [], module.new_cache

    def remembered(options, *of_model):
        made.append(make(options, *of_model))
        return made[-1]

    with mock.patch.object(module, "new_cache", remembered):
        yield made


def stored(caches: list, head_dim: int) -> dict:
    """What became of the tokens that left the windows of level caches, over all layers and heads: shares high, low and
    pruned; bits that an element of them takes, dropped ones at 0; the least and the most pruned head's share."""
    counts = torch.stack([torch.stack((*(kv.c_pack + kv.n_stage), kv.n_drop)) for cache in caches
                          for kv in (layer.kv for layer in cache.layers)]).double()  # [layers, 3, rows]
    shares = counts.sum((0, 2)) / counts.sum()
    high, low = (fmt.bits_per_element(head_dim) for fmt in caches[0].layers[0].kv.format.formats)
    by_head = counts.unflatten(0, (len(caches), -1)).sum(0)  # the same layer and head of each cache
    pruned = by_head[:, 2] / by_head.sum(1)
    found = dict(zip(("high", "low", "pruned"), shares.tolist())) | {
        "bits": (shares[0] * high + shares[1] * low).item(), "least_pruned": pruned.min().item(),
        "most_pruned": pruned.max().item()}
    return {name: round(value, 4) for name, value in found.items()}


# ---- attention in 16 bit: distributions, critical tokens (Fig. 1 to 3)


def critical(scores: torch.Tensor) -> torch.Tensor:
    """How few tokens hold SHARE of scores [.., n], none negative: int64 [..]."""
    held = scores.sort(-1, descending=True).values.double().cumsum(-1)
    return (held < SHARE * held[..., -1:]).sum(-1) + 1


def histogram(values: torch.Tensor) -> list[int]:
    """Counts by the decimal logarithm, PER_DECADE bins a decade from 10^-DECADES to 10^2; what is outside joins the
    outermost."""
    bins = (values.double().log10().clamp(min=-DECADES) + DECADES) * PER_DECADE
    most = (DECADES + 2) * PER_DECADE - 1
    return torch.bincount(bins.long().clamp(0, most).flatten(), minlength=most + 1).tolist()


def of_layer(p: torch.Tensor, values: torch.Tensor) -> dict:
    """What one layer's attention does: probabilities p [num_heads, n, n] of a query's tokens, values [num_heads_kv, n,
    head_dim]. A KV head's probabilities are the mean of its query heads'."""
    p = p.float().unflatten(0, (len(values), -1)).mean(1)
    n = p.shape[-1]
    total, own = p.sum(1), p.diagonal(dim1=1, dim2=2)
    later = torch.arange(n - 1, 0, -1)
    mean = ((total - own)[:, :-1] / later).clamp(min=0)  # over later queries; the last token has none
    norms = values.float().norm(dim=-1)
    return {"critical": critical(total).tolist(),
            "critical_of_a_query": [round(x, 1) for x in critical(p[:, -LAST:]).double().mean(1).tolist()],
            "score": quantiles(mean), "norm": quantiles(norms),
            "scores": histogram(mean), "norms": histogram(norms)}


def quantiles(x: torch.Tensor) -> list[float]:
    """The least, the 1st, 50th and 99th percentile and the largest."""
    return [float(f"{value:.3g}") for value in x.flatten().quantile(torch.tensor([0, 0.01, 0.5, 0.99, 1])).tolist()]


def attention_of(model, window: list[int], shown: tuple[int, ...]) -> dict:
    """Each layer's critical tokens and percentiles for one text [n], with the histograms of the layers ``shown``."""
    from transformers import DynamicCache

    from lowbit_attn.integrations.hf import CACHE_ARGUMENT
    from lowbit_attn.model_layers import attention_blocks
    from lowbit_attn.quality import restored_attention

    cache, layers = DynamicCache(), []

    def note(module, _, out) -> None:
        layers.append(of_layer(out[1][0], cache.layers[module.layer_idx].values[0]))

    with restored_attention(model), torch.inference_mode():
        model.set_attn_implementation("eager")
        hooks = [module.register_forward_hook(note) for module in attention_blocks(model)]
        try:
            model(torch.tensor([window]), logits_to_keep=1, **{CACHE_ARGUMENT: cache})
        finally:
            for hook in hooks:
                hook.remove()
    found = {name: [layer[name] for layer in layers] for name in ("critical", "critical_of_a_query", "score", "norm")}
    return found | {f"{name}s": {str(i): layers[i][f"{name}s"] for i in shown} for name in ("score", "norm")}
