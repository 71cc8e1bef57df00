"""Codebooks from what a model's layers stored of a text, with their errors on pages that they were not learned from.

Three things that plain k-means lacks make codes of 2 bits as good as affine ones of 2.5 (docs/codebooks.md): channels
of K weighted by the second moment of the queries and dealt out evenly over groups (the eigenvalue allocation of
optimized product quantization, Ge et al. 2013), the mean of each page taken off K, and keys turned on to random
positions, up to the model's context, before they are clustered.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from lowbit_attn.codebooks.capture import LayerSample, Sample, turned
from lowbit_attn.codebooks.file import ENTRIES, ROPES
from lowbit_attn.codebooks.kmeans import ITERATIONS, gathered, kmeans, nearest
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.precision import on_own_defaults

HELD_OUT = 9  # one page of so many is kept for the errors
RANDOM_COPIES = 2  # of every key, at random positions, beside the key where it stood
LEAST_WEIGHT = 1e-3  # of a channel, beside a mean of 1: no query moment divides by zero
LEAST_NORM = 1e-6
SHARED = 4  # codebooks of K of a head, where groups share them
FP16_MOST = 65504.0
WARN_LOGIT_ERROR, WARN_VALUE_ERROR = 0.5, 0.15


@dataclass(frozen=True)
class Recipe:
    """What is learned, and how.

    k_vec_size, v_vec_size: channels a code, None: the side has no codebook. v_norm: values are divided by their root
    mean square first. rope: keys are clustered as they are after ("post") or before ("pre") their rotary embedding.
    k_shared: of K a head has SHARED codebooks, that of number t for its groups t, t + SHARED, ..., and channels that
    turn together lie in groups half a head apart: what Hopper's kernels of keys before their rotary embedding read.
    The rest are the three improvements, each of which can be left out to see what it is worth: weights of K's channels,
    groups of even importance, the mean of a page, random positions.
    """

    k_vec_size: int | None
    v_vec_size: int | None
    v_norm: bool = True
    rope: str = "post"
    iterations: int = ITERATIONS
    seed: int = 0
    k_shared: bool = False
    is_weighted: bool = True
    is_balanced: bool = True
    has_page_mean: bool = True
    has_random_positions: bool = True

    def __post_init__(self):
        if self.rope not in ROPES:
            raise ValueError(f"rope: got {self.rope!r}, supported: {', '.join(ROPES)}")

    @property
    def steps(self) -> int:
        """Iterations of k-means a layer."""
        return self.iterations * sum(size is not None for size in (self.k_vec_size, self.v_vec_size))


@dataclass
class Learned:
    """Codebooks of one layer, fields as in LayerCodebooks; and what is known of them.

    logit_error: mean square error of a logit, in nats^2, on held-out pages at the recipe's positions, None without K.
    value_error: |dV|^2 / |V|^2 there, None without V; both None where no page was held out. unused: entries that no
    vector chose, which repeat or approximate others and are never written.
    """

    k_entries: torch.Tensor | None = None
    v_entries: torch.Tensor | None = None
    k_order: torch.Tensor | None = None
    k_weights: torch.Tensor | None = None
    logit_error: float | None = None
    value_error: float | None = None
    unused: int = 0
    warnings: list[str] = field(default_factory=list)


@on_own_defaults
def learn_layers(sample: Sample, recipe: Recipe, device="cpu", on_step: Callable[[], None] = lambda: None,
                 ) -> list[Learned]:
    """Codebooks of every layer of a sample; on_step after each of ``recipe.steps``, from any thread.

    On the CPU as many layers are learned at once as torch has threads, each by one: steps of k-means are too small to
    be shared. On a GPU one after another. Neither changes the result.
    """
    held = torch.arange(sample.pages) % HELD_OUT == HELD_OUT - 1
    if not held.any() and sample.pages > 1:
        held[-1] = True

    def one(i: int) -> Learned:
        offsets = random_offsets(sample, recipe, i)
        learned = learn_layer(sample.layers[i], sample.first, offsets, held, recipe, device, on_step)
        learned.warnings = _warnings(i, learned)
        return learned

    threads = torch.get_num_threads() if torch.device(device).type == "cpu" else 1
    if threads == 1:
        return [one(i) for i in range(len(sample.layers))]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(one, range(len(sample.layers))))
    finally:
        torch.set_num_threads(threads)


@on_own_defaults
def random_offsets(sample: Sample, recipe: Recipe, layer: int) -> torch.Tensor:
    """Positions by which each page of a layer is turned on, for each of its copies: int64 [copies, pages].

    The first copy stays where it stood, as the others do not in a recipe with random positions.
    """
    stays = torch.zeros(1, sample.pages, dtype=torch.int64)
    most = sample.max_positions - int(sample.first.max()) - PAGE_TOKENS
    if recipe.rope == "pre" or not recipe.has_random_positions or most <= 0:
        return stays
    generator = torch.Generator().manual_seed(recipe.seed * 1009 + layer)
    return torch.cat((stays, torch.randint(most + 1, (RANDOM_COPIES, sample.pages), generator=generator)))


@on_own_defaults
def learn_layer(layer: LayerSample, first: torch.Tensor, offsets: torch.Tensor, held: torch.Tensor, recipe: Recipe,
                device="cpu", on_step: Callable[[], None] = lambda: None) -> Learned:
    """Codebooks of one layer from the pages that are not ``held``; its errors on those that are.

    first, held: by page, the position of its first token, whether it is held out. offsets: as of ``random_offsets``;
    the errors are those of the last copy.
    """
    learned = Learned()
    if recipe.k_vec_size is not None:
        _learn_keys(learned, layer, first, offsets, held, recipe, device, on_step)
    if recipe.v_vec_size is not None:
        _learn_values(learned, layer, held, recipe, device, on_step)
    return learned


def _learn_keys(learned: Learned, layer: LayerSample, first, offsets, held, recipe: Recipe, device, on_step) -> None:
    inv_freq, shifts = layer.inv_freq.to(device), [_shift(first, recipe.rope, one) for one in offsets]
    copies = [_without_mean(turned(layer.keys.to(device), inv_freq, shift), recipe) for shift in shifts]
    heads, head_dim = layer.keys.shape[1], layer.keys.shape[3]
    if recipe.k_shared and head_dim % (2 * SHARED * recipe.k_vec_size):
        raise ValueError(f"k_shared: got head_dim {head_dim} with codes of {recipe.k_vec_size} channels, supported: "
                         f"multiples of {2 * SHARED * recipe.k_vec_size}")
    weight = (channel_weights(layer.q_moment) if recipe.is_weighted
              else torch.ones(heads, head_dim, dtype=torch.float32))
    squares = sum(keys[~held].square().mean((0, 2)) for keys in copies) / len(copies)
    order = (balanced_order(squares.cpu() * weight, recipe.k_vec_size, recipe.k_shared) if recipe.is_balanced
             else torch.arange(head_dim).expand(heads, head_dim))
    factors, place = weight.sqrt(), order[None, :, None].to(device)
    stored = [(keys * factors[:, None].to(device)).gather(3, place.expand_as(keys)) for keys in copies]
    tokens = None if layer.token_weights is None else layer.token_weights[~held].repeat(len(copies), 1, 1)
    learned.k_entries, learned.unused = _clustered(torch.cat([keys[~held] for keys in stored]), recipe.k_vec_size,
                                                   recipe, on_step, tokens, recipe.k_shared)
    learned.k_order, learned.k_weights = order, factors
    if held.any():
        keys = stored[-1][held]
        error = _decoded(keys, learned.k_entries) - keys
        error = error.gather(3, order.argsort(-1)[None, :, None].expand_as(error).to(device))
        error = turned(error / factors[:, None].to(device), inv_freq, -shifts[-1][held])
        squares = torch.einsum("phtd,hde,phte->", error, layer.q_moment.to(device), error)
        learned.logit_error = layer.scaling**2 * squares.item() / error[..., 0].numel()


def _without_mean(keys: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Keys [pages, heads, tokens, head_dim] without the mean of each page, as fp16 would hold it."""
    return keys - keys.mean(2, keepdim=True).half().float() if recipe.has_page_mean else keys


def _learn_values(learned: Learned, layer: LayerSample, held, recipe: Recipe, device, on_step) -> None:
    values = layer.values.to(device).float()
    norms = root_mean_square(values) if recipe.v_norm else torch.ones_like(values[..., :1])
    stored = values / norms
    tokens = None if layer.token_weights is None else layer.token_weights[~held]
    learned.v_entries, unused = _clustered(stored[~held], recipe.v_vec_size, recipe, on_step, tokens)
    learned.unused += unused
    if held.any():
        error = (_decoded(stored[held], learned.v_entries) - stored[held]) * norms[held]
        learned.value_error = (error.square().sum() / values[held].square().sum().clamp(min=LEAST_NORM)).item()


def root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """[..., 1] of values [..., head_dim], as fp16 would hold it, in fp32."""
    return values.square().mean(-1, keepdim=True).sqrt().clamp(LEAST_NORM, FP16_MOST).half().float()


def channel_weights(q_moment: torch.Tensor) -> torch.Tensor:
    """Mean square of the queries by channel, [num_heads_kv, head_dim], of a mean near 1, from their second moments.

    Channels d and d + head_dim / 2 turn together, so they have one weight: then a rotation does not change it.
    """
    squares = q_moment.diagonal(dim1=1, dim2=2)
    paired = (squares + squares.roll(squares.shape[-1] // 2, -1)) / 2
    return paired / paired.mean(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) + LEAST_WEIGHT


@on_own_defaults
def balanced_order(importance: torch.Tensor, vec_size: int, in_pairs: bool = False) -> torch.Tensor:
    """Deal channels out so that groups of ``vec_size`` have nearly equal products of importance.

    importance: [heads, head_dim], not negative. Returns int64 [heads, head_dim]: group y has the channels at places
    vec_size y to vec_size y + vec_size - 1. The most important channel left goes to the group with the least product
    of those that have room, as optimized product quantization allots eigenvalues. in_pairs: channels d and
    d + head_dim / 2 are dealt out together, to the same places of groups half a head apart; groups of like strongest
    channels are SHARED apart.
    """
    logs = importance.double().clamp(min=1e-12).log()
    if in_pairs:
        logs = sum(logs.chunk(2, -1))
    logs = logs - logs.min(-1, keepdim=True).values
    order = torch.tensor([_dealt(head.tolist(), vec_size) for head in logs])
    if not in_pairs:
        return order
    like = order.unflatten(1, (SHARED, -1, vec_size)).transpose(1, 2).flatten(1)  # groups by their strongest channels
    return torch.cat((like, like + like.shape[1]), 1)


def _dealt(logs: list[float], vec_size: int) -> list[int]:
    groups: list[list[int]] = [[] for _ in range(len(logs) // vec_size)]
    products = [0.0] * len(groups)
    for channel in sorted(range(len(logs)), key=lambda d: -logs[d]):
        least = min((g for g in range(len(groups)) if len(groups[g]) < vec_size), key=products.__getitem__)
        groups[least].append(channel)
        products[least] += logs[channel]
    return [channel for group in groups for channel in group]


def _shift(first: torch.Tensor, rope: str, offsets: torch.Tensor) -> torch.Tensor:
    """How far each key is turned before it is clustered: int64 [pages, 1, 128 or 1]."""
    if rope == "pre":
        return -(first[:, None] + torch.arange(PAGE_TOKENS))[:, None]
    return offsets[:, None, None]


def _grouped(stored: torch.Tensor, vec_size: int) -> torch.Tensor:
    """[pages, heads, tokens, head_dim] as [heads * groups, pages * tokens, vec_size]."""
    pages, heads, tokens, head_dim = stored.shape
    split = stored.unflatten(3, (head_dim // vec_size, vec_size)).permute(1, 3, 0, 2, 4)
    return split.reshape(heads * (head_dim // vec_size), pages * tokens, vec_size)


def _clustered(stored: torch.Tensor, vec_size: int, recipe: Recipe, on_step, token_weights: torch.Tensor | None,
               shares: bool = False) -> tuple[torch.Tensor, int]:
    """(entries fp16 [heads, groups, 256, vec_size] on the CPU, the most used first; how many no vector chose).

    token_weights: as in LayerSample, of the tokens of ``stored`` [pages, heads, 128, head_dim]. shares: groups
    SHARED apart have the same entries, of the vectors of all of them.
    """
    heads, groups, vectors = stored.shape[1], stored.shape[3] // vec_size, _grouped(stored, vec_size)
    if token_weights is not None:
        token_weights = token_weights.to(stored.device).transpose(0, 1).flatten(1)  # [heads, tokens]
        token_weights = token_weights.repeat_interleave(groups, 0)
    if shares:
        vectors, token_weights = (None if x is None else _together(x, heads) for x in (vectors, token_weights))
    clusters = kmeans(vectors, ENTRIES, recipe.iterations, recipe.seed, on_step, token_weights)
    entries = clusters.entries.clamp(-FP16_MOST, FP16_MOST).half().cpu().unflatten(0, (heads, -1))
    return entries.repeat(1, groups // entries.shape[1], 1, 1), clusters.unused


def _together(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * groups, vectors, ...] as [heads * SHARED, vectors of groups SHARED apart, ...]."""
    return x.unflatten(0, (heads, -1, SHARED)).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _decoded(stored: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """What is read back of stored [pages, heads, tokens, head_dim]."""
    pages, heads, tokens, head_dim = stored.shape
    books = entries.flatten(0, 1).to(stored.device).float()
    found = gathered(books, nearest(_grouped(stored, entries.shape[-1]), books)[0])
    return found.view(heads, -1, pages, tokens, entries.shape[-1]).permute(2, 0, 3, 1, 4).reshape(stored.shape)


def _warnings(layer: int, learned: Learned) -> list[str]:
    out = []
    for what, got, limit in (("a logit's mean square error", learned.logit_error, WARN_LOGIT_ERROR),
                             ("V's relative square error", learned.value_error, WARN_VALUE_ERROR)):
        if got is not None and not got <= limit:
            out.append(f"layer {layer}: {what} on held-out text is {got:.3g}, above {limit:g}")
    return out
