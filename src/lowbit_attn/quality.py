"""How much a low-bit cache changes a model: perplexity, KL divergence, top-1 agreement, cosine by layer.

A text is read in chunks of 128 tokens under the cache's own semantics: earlier pages packed, sinks and the open
block in 16 bit, each chunk's own tokens in 16 bit; every token but the first is predicted. What a format is compared
with is the same model over a 16-bit cache, read in lockstep, so that no logits need to be kept.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, DynamicCache

from lowbit_attn import model_layers
from lowbit_attn.formats import FORMATS, levels
from lowbit_attn.integrations import served
from lowbit_attn.integrations.hf import CACHE_ARGUMENT, NAME, LowBitCache
from lowbit_attn.integrations.simulator import SimulatedCache

CHUNK = 128
SIXTEEN_BIT = "16 bit"


@dataclass(frozen=True)
class Scores:
    """What a model does with one cache, beside the same model with a 16-bit cache.

    tokens: read; all but the first were predicted. perplexity of them. spread: one standard error of that perplexity
    beside the 16-bit run's, from the chunks' differences; None for a single chunk. kl: mean over positions of
    KL(16 bit || this), in nats. top1: share of positions whose likeliest next token is the same. kl_error, top1_error:
    one standard error of either, over chunks; None for a single chunk. cosine: for each attention layer, the mean over
    positions of the cosine between the attention block's outputs in the two runs (errors of earlier layers included).
    bits_per_element: of packed pages, metadata included; cache_bytes: all that holds the tokens at the end, sinks and
    open blocks included. seconds: of the forward calls.
    """

    tokens: int
    perplexity: float
    spread: float | None
    kl: float
    top1: float
    kl_error: float | None
    top1_error: float | None
    cosine: tuple[float, ...]
    bits_per_element: float
    cache_bytes: int
    seconds: float


class Rounded16Cache(Cache):
    """Mixed into transformers' own cache: K and V are rounded to 16 bit on entry, whatever the model computes in."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        dtype = key_states.dtype
        stored = torch.float16 if dtype == torch.float32 else dtype
        k, v = super().update(key_states.to(stored), value_states.to(stored), layer_idx, *args, **kwargs)
        return k.to(dtype), v.to(dtype)


def evaluate(model, tokens: torch.Tensor, cache_options: Mapping | None,
             on_tokens: Callable[[int], None] = lambda n: None) -> Scores:
    """Scores of one cache: the options of LowBitCache, such as dict(format="k4v4", sinks=32); None: 16 bit.

    model: a causal language model of transformers in eval mode; tokens: int64 [n] or [1, n] on its device.
    """
    return compare(model, tokens, {"": cache_options}, on_tokens)[""]


def compare(model, tokens: torch.Tensor, cases: Mapping[str, Mapping | None],
            on_tokens: Callable[[int], None] = lambda n: None, first_position: int = 0,
            scored_from: int = 0) -> dict[str, Scores]:
    """Scores of several caches by label, over one reading of the 16-bit baseline.

    cases: label -> options of LowBitCache, or of SimulatedCache if "v_step" is one of them; None: 16 bit itself.
    on_tokens is told the tokens of each chunk that all cases have read. first_position: where the rotary embedding has
    the first token. scored_from: tokens, a multiple of 128, that are read and not scored. Raises ValueError for fewer
    than two tokens, or none to score.
    """
    tokens = check_tokens(tokens)
    if scored_from % CHUNK or not 0 <= scored_from < tokens.shape[1] - 1:
        raise ValueError(f"scored_from: got {scored_from}, supported: multiples of {CHUNK} below the "
                         f"{tokens.shape[1] - 1} tokens that are predicted")
    count = tokens.shape[1]
    baseline = _Reader(model, None, count)
    readers = {label: baseline if options is None else _Reader(model, options, count)
               for label, options in cases.items()}
    sums = {label: _Sums() for label in cases}
    with restored_attention(model):
        read = 0
        for chunk, targets in chunks(tokens):
            expected = baseline.read(chunk, first_position + read)
            for label, reader in readers.items():
                step = expected if reader is baseline else reader.read(chunk, first_position + read)
                if read >= scored_from:
                    sums[label].add(step, expected, targets)
            read += chunk.shape[1]
            on_tokens(chunk.shape[1])
    return {label: sums[label].scores(tokens.shape[1], reader) for label, reader in readers.items()}


def check_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """tokens as [1, n]; ValueError unless there are two or more of one text."""
    if tokens.dim() not in (1, 2) or tokens.numel() < 2 or (tokens.dim() == 2 and tokens.shape[0] != 1):
        raise ValueError(f"tokens: got shape {list(tokens.shape)}, supported: [n] or [1, n] with n of 2 or more")
    return tokens.reshape(1, -1)


def chunks(tokens: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(chunk [1, <= 128], the tokens it predicts [<= 128]) of tokens [1, n]; the last chunk predicts one fewer."""
    for begin in range(0, tokens.shape[1], CHUNK):
        chunk = tokens[:, begin : begin + CHUNK]
        yield chunk, tokens[0, begin + 1 : begin + 1 + chunk.shape[1]]


def is_simulated(options: Mapping | None) -> bool:
    """Whether these are options of SimulatedCache, which packs V by steps of ``v_step`` tokens."""
    return options is not None and "v_step" in options


def new_cache(options: Mapping | None, model=None, tokens: int | None = None) -> Cache:
    """An empty cache: LowBitCache(**options), SimulatedCache(**options) if they have a ``v_step``, or for None
    transformers' own with K and V rounded to 16 bit: of the model's layers and windows, without a model of layers that
    keep all tokens. tokens: that it will hold, where that is known."""
    if is_simulated(options):
        return SimulatedCache(**options)
    if options is not None:
        room = {} if model is None or tokens is None else served.room_for(model.config, tokens)
        return LowBitCache(**{**room, **options})
    if model is None:
        return type("Rounded16", (Rounded16Cache, DynamicCache), {})()
    return model_layers.new_cache(model, Rounded16Cache)


def use_cache_kind(model, options: Mapping | None) -> None:
    """Make the model attend with what reads the cache of these options."""
    model.set_attn_implementation("sdpa" if options is None or is_simulated(options) else NAME)


def negative_log_likelihood(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Sum over tokens of -log p(target); logits fp32 [tokens, vocabulary], targets int64 [tokens]."""
    return torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()


def kl_divergence(baseline: torch.Tensor, logits: torch.Tensor) -> float:
    """Sum over tokens of KL(baseline || logits) in nats; both fp32 logits [tokens, vocabulary]."""
    mine, theirs = logits.log_softmax(-1), baseline.log_softmax(-1)
    return torch.nn.functional.kl_div(mine, theirs, reduction="sum", log_target=True).item()


def perplexity(nll: float, tokens: int) -> float:
    return math.exp(nll / tokens)


def spread(perplexity: float, nll: Sequence[float], baseline: Sequence[float], tokens: Sequence[int]) -> float | None:
    """One standard error of a perplexity beside the baseline's on the same text, None for fewer than two chunks.

    nll, baseline: sums of -log p over each chunk's predicted tokens, whose numbers are ``tokens``. What both runs find
    hard cancels: the error is that of the mean difference a token (a ratio of sums over chunks), times the perplexity.
    """
    error = ratio_error([a - b for a, b in zip(nll, baseline, strict=True)], tokens)
    return None if error is None else perplexity * error


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """One standard error of sum(sums) / sum(counts), chunks taken as drawn at random; None for fewer than two."""
    chunks, total = len(counts), sum(counts)
    if chunks < 2:
        return None
    mean = sum(sums) / total
    squares = sum((one - mean * n) ** 2 for one, n in zip(sums, counts, strict=True))
    return math.sqrt(chunks / (chunks - 1) * squares) / total


def agreement(top1: torch.Tensor, baseline: torch.Tensor) -> float:
    """Share of places where both find the same token likeliest."""
    return (top1 == baseline).double().mean().item()


def bits_per_element(options: Mapping | None, model) -> float:
    """Bits of packed pages, metadata included; sinks and the open block are counted by ``cache_bytes``. Where layers
    differ in shape: the mean over the elements of those that keep all tokens, or of all if none does."""
    if options is None:
        return 16.0
    fmt = options["format"]
    fmt = (levels.parse(fmt) or FORMATS[fmt]) if isinstance(fmt, str) else fmt
    layers = model_layers.of_model(model).layers
    packed = [layer for layer in layers if layer.kind.window is None] or layers
    bits = sum(fmt.bits_per_element(layer.head_dim) * layer.channels for layer in packed)
    return bits / sum(layer.channels for layer in packed)


def sixteen_bit_bytes(model, tokens: int) -> int:
    """Bytes of K and V of so many tokens of one sequence in all layers that keep some, in 16 bit."""
    return 2 * tokens * model_layers.of_model(model).channels


def measured_bits(model, nbytes: int, tokens: int) -> float:
    """Bits of a whole cache of so many bytes per element of K and V of the tokens of one sequence in all layers: sinks,
    open blocks and layers that stay in 16 bit included."""
    return 16 * nbytes / sixteen_bit_bytes(model, tokens)


def cache_bytes(cache: Cache) -> int:
    """Bytes that hold K and V of the present tokens of all layers; states of a fixed size are not counted."""
    if isinstance(cache, LowBitCache | SimulatedCache):
        return cache.nbytes
    held = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    return sum(x.nbytes for pair in held for x in pair if x is not None)


@dataclass
class _Step:
    """One chunk: logits fp32 [tokens, vocabulary] and the output of each attention block that keeps K and V, fp32
    [tokens, hidden]."""

    logits: torch.Tensor
    outputs: list[torch.Tensor]


class _Reader:
    """A model with a cache of its own, read chunk by chunk."""

    def __init__(self, model, options: Mapping | None, tokens: int):
        self.model, self.options, self.seconds = model, options, 0.0
        self.cache = new_cache(options, model, tokens)
        self.blocks = model_layers.attention_blocks(model)

    def read(self, chunk: torch.Tensor, first: int) -> _Step:
        """One chunk [1, tokens], whose first token is at position ``first``."""
        outputs = []
        positions = torch.arange(first, first + chunk.shape[1], device=chunk.device)[None]
        use_cache_kind(self.model, self.options)
        hooks = [module.register_forward_hook(
            lambda _, __, out: outputs.append((out if isinstance(out, torch.Tensor) else out[0])[0].float()))
            for module in self.blocks]
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                logits = self.model(chunk, position_ids=positions,
                                    **{CACHE_ARGUMENT: self.cache}).logits[0].float()
        finally:
            for hook in hooks:
                hook.remove()
        self.seconds += time.perf_counter() - start
        return _Step(logits, outputs)


class _Sums:
    """Running sums over positions."""

    def __init__(self):
        self.nll: list[float] = []  # of each chunk, as all of these are
        self.baseline: list[float] = []
        self.predicted: list[int] = []
        self.kl: list[float] = []
        self.same: list[int] = []  # likeliest next tokens
        self.positions: list[int] = []
        self.cosine: list[float] = []

    def add(self, step: _Step, baseline: _Step, targets: torch.Tensor) -> None:
        self.nll.append(negative_log_likelihood(step.logits[: len(targets)], targets))
        self.baseline.append(negative_log_likelihood(baseline.logits[: len(targets)], targets))
        self.predicted.append(len(targets))
        self.kl.append(kl_divergence(baseline.logits, step.logits))
        self.same.append(int((step.logits.argmax(-1) == baseline.logits.argmax(-1)).sum()))
        self.positions.append(step.logits.shape[0])
        cosine = [torch.nn.functional.cosine_similarity(a, b, dim=-1).sum().item()
                  for a, b in zip(step.outputs, baseline.outputs, strict=True)]
        self.cosine = [a + b for a, b in zip(self.cosine, cosine)] if self.cosine else cosine

    def scores(self, tokens: int, reader: _Reader) -> Scores:
        whole, positions = perplexity(sum(self.nll), sum(self.predicted)), sum(self.positions)
        return Scores(tokens, whole, spread(whole, self.nll, self.baseline, self.predicted), sum(self.kl) / positions,
                      sum(self.same) / positions, ratio_error(self.kl, self.positions),
                      ratio_error(self.same, self.positions), tuple(x / positions for x in self.cosine),
                      bits_per_element(reader.options, reader.model), cache_bytes(reader.cache), reader.seconds)


@contextmanager
def restored_attention(model):
    """Afterwards the model attends as it did before."""
    before = model.config._attn_implementation
    try:
        yield
    finally:
        model.set_attn_implementation(before)
