"""One layer of a transformers cache whose rows each learn codebooks from their own first tokens.

The first 1,024 tokens or more of every row are read in 16 bit. The step that brings them ends with codebooks of each
row and a KVCache that holds it; from then on every row is a LowBitLayer of one sequence.
"""

from collections.abc import Sequence

import torch

from lowbit_attn.codebooks import LayerCodebooks
from lowbit_attn.codebooks.calibrate import recipe_of
from lowbit_attn.codebooks.prompt import (
    LEAST_TOKENS,
    PROMPTS,
    attention_squares,
    context,
    frequencies,
    learn_prompt,
    token_weights,
)
from lowbit_attn.formats import Format, Kind
from lowbit_attn.integrations import dense
from lowbit_attn.integrations.handle import Handle
from lowbit_attn.integrations.layer import START_ANEW, LowBitLayer
from lowbit_attn.precision import on_own_defaults
from lowbit_attn.reference import PLAIN, Attention


def blank(format: Format, head_dim: int) -> LayerCodebooks:
    """Codebooks of zeros of one KV head, for a cache that tries options; ValueError for a format without."""
    if not format.needs_codebooks:
        raise ValueError(f"codebooks: got 'prompt' for format {format}, supported: None, for its codes are affine")
    sides = {"k_entries": format.k, "v_entries": format.v}
    entries = {name: torch.zeros(side.entries_shape(1, head_dim), dtype=torch.float16, device="cpu")
               for name, side in sides.items() if side.kind is Kind.CODEBOOK}
    of_keys = {} if "k_entries" not in entries else {
        "k_order": torch.arange(head_dim, dtype=torch.int16, device="cpu")[None],
        "k_weights": torch.ones(1, head_dim, dtype=torch.float32, device="cpu")}
    both = dict.fromkeys(sides) | entries
    return LayerCodebooks(format.name, "post", head_dim, **both, **of_keys)


class RowLayer(LowBitLayer):
    """One sequence with codebooks of its own."""

    def __init__(self, format: Format, books: LayerCodebooks, **options):
        super().__init__(format, **options)
        self.books = books

    def _books(self) -> LayerCodebooks:
        return self.books


class PromptLayer(LowBitLayer):
    """One layer; ``held``: (K, V) [batch, num_heads_kv, tokens, head_dim] in 16 bit until every row has 1,024 tokens,
    ``rows`` afterwards. Options: see LowBitCache."""

    def __init__(self, format: Format, *, codebooks: str, **options):
        super().__init__(format, **options)
        self.given, self.codebooks = options, codebooks
        self.recipe = recipe_of(format, PROMPTS[codebooks] if format.k.kind is Kind.CODEBOOK else "post")
        self.starts: dict[int, int] = {}  # position of each row's first token
        self.rows: list[RowLayer] = []
        self.held = self.moments = self.squares = self.inv_freq = None
        self.max_positions = 0

    def look_at(self, module: torch.nn.Module, head_dim: int) -> None:
        """Learn from the attention module, before the first step, how keys turn; NotImplementedError if they cannot."""
        if self.length == 0:
            self.max_positions = context(module.config)
            self.inv_freq = frequencies(module, head_dim, self.recipe.rope)

    def check_model(self, config) -> None:
        """Nothing: these codebooks are of no model."""

    @on_own_defaults
    def attend(self, handle: Handle, query: torch.Tensor, options: Attention = PLAIN,
               pads: Sequence[int] | None = None) -> torch.Tensor:
        """As in LowBitLayer; a step of one token before the codebooks are learned is refused."""
        is_sliding = options.window is not None and self.sliding == "16bit" and self.held is None and not self.rows
        if self.tail is not None or is_sliding:
            return super().attend(handle, query, options, pads)
        q_len = self._check_handle(handle, query)
        pads = self._check_pads(pads, q_len)
        self._check_room(max(self.length + q_len - pad for pad in pads))
        self.check_whole()
        if self.rows:
            out = torch.cat([self._attend_row(b, row, handle, query, options) for b, row in enumerate(self.rows)])
        else:
            out = self._hold(handle, query, self.windowed(options), pads)
        self.length += q_len
        self.pads, self.handle = pads, None
        return out

    def _attend_row(self, b: int, row: RowLayer, handle: Handle, query, options: Attention) -> torch.Tensor:
        mine = slice(b, b + 1)
        own, _ = row.update(handle.k[mine], handle.v[mine])
        return row.attend(own, query[mine], options)

    def _hold(self, handle: Handle, query, options: Attention, pads: Sequence[int]) -> torch.Tensor:
        """A step in 16 bit; the one that fills every row's first 1,024 tokens ends with the rows' codebooks."""
        q_len = query.shape[2]
        shortest = min(self.length + q_len - pad for pad in pads)
        if q_len == 1 and shortest < LEAST_TOKENS:
            raise NotImplementedError(f"codebooks: 'prompt' with a prompt of {shortest - 1} tokens, supported: "
                                      f"{LEAST_TOKENS} or more in every row, for 256 entries a group are not learned "
                                      "from fewer; or a file of lowbit-attn calibrate")
        k, v = self._entered(handle)
        if self.held is not None:
            k, v = (torch.cat((old, new), 2) for old, new in zip(self.held, (k, v)))
        out = dense.attend(query, k.to(query.dtype), v.to(query.dtype), options, pads, self.sinks)
        starts = self.starts | {b: self._position(b, pad - self.length) for b, pad in enumerate(pads)
                                if self.recipe.rope == "pre" and 0 <= pad - self.length < q_len}
        moments = self._moments(query, k.shape[1], pads)
        if self.moments is not None:
            moments = tuple(a + b for a, b in zip(self.moments, moments))
        squares = self._squares(query, k, options, pads)
        with torch.inference_mode(False):  # else steps outside inference mode that record gradients could not read it
            k, v = k.clone(), v.clone()
            moments, squares = (tuple(x.clone() for x in sums) for sums in (moments, squares))
        if shortest < LEAST_TOKENS:
            self.held, self.moments, self.squares, self.starts = (k, v), moments, squares, starts
            return out
        self.rows = [self._learned(k[b, :, pad:], v[b, :, pad:], moments[0][b] / moments[1][b], starts.get(b, 0),
                                   token_weights(squares[0][b, :, pad:], squares[1][b, pad:]))
                     for b, pad in enumerate(pads)]
        self.held = self.moments = self.squares = None
        return out

    def _squares(self, query: torch.Tensor, k: torch.Tensor, options: Attention, pads: Sequence[int]):
        """``attention_squares`` of all steps up to this, stacked by row; k: all tokens so far."""
        scale = k.shape[3] ** -0.5 if options.softmax_scale is None else options.softmax_scale
        rows = [attention_squares(query[b], k[b], pad, scale) for b, pad in enumerate(pads)]
        now = [torch.stack(sums) for sums in zip(*rows)]
        for sums, before in zip(now, self.squares or ()):
            sums[..., : before.shape[-1]] += before
        return tuple(now)

    def _moments(self, query: torch.Tensor, heads: int, pads: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(sum of q q^T by row and KV head, how many by row) of queries that are neither padding nor of sinks."""
        sums, counts = [], []
        for b, pad in enumerate(pads):
            first = max(0, pad + self.sinks - self.length)
            q = query[b, :, first:].float().unflatten(0, (heads, -1)).flatten(1, 2)
            sums.append(q.mT @ q)
            counts.append(q.shape[1])
        return torch.stack(sums), torch.tensor(counts, dtype=torch.float32, device=query.device)

    def _learned(self, k: torch.Tensor, v: torch.Tensor, moment: torch.Tensor, start: int, weights: torch.Tensor,
                 ) -> RowLayer:
        """A row with codebooks from its tokens [num_heads_kv, tokens, head_dim], which it then holds; start: the
        position of the first; weights: of ``token_weights``."""
        inv_freq = self.inv_freq
        if inv_freq is None:
            inv_freq = torch.zeros(k.shape[2] // 2, dtype=torch.float32, device="cpu")
        with torch.inference_mode(False):
            books = learn_prompt(k, v, moment, inv_freq, self.max_positions, self.sinks, self.recipe, self.format.name,
                                 start, weights)
        row = RowLayer(self.format, books, **self.given)
        row.lazy_initialization(k[None], v[None])
        row.dtype = self.dtype
        row._make_room(k[None], k.shape[1])
        if self.recipe.rope == "pre":
            row.kv.set_first_positions([0], start)
        row.kv.prefill(0, k.transpose(0, 1), v.transpose(0, 1))
        row.length = k.shape[1]
        return row

    def check_whole(self) -> None:
        """Raise RuntimeError if an earlier step stored the tokens of some rows only."""
        held = [row.length for row in self.rows]
        if self.rows and held != [self.length - pad for pad in self.pads]:
            raise RuntimeError(f"{type(self).__name__}: the rows hold {held} tokens of "
                               f"{[self.length - pad for pad in self.pads]}, since an earlier call ended while it "
                               f"stored them; {START_ANEW}")

    # ---- what transformers asks of a layer

    @property
    def nbytes(self) -> int:
        """Bytes that hold the present tokens: each row's pages and codebooks, or all in 16 bit."""
        if self.rows:
            return sum(row.nbytes for row in self.rows)
        return super().nbytes if self.held is None else sum(x.nbytes for x in self.held)

    def grow_for(self, new: int) -> None:
        for row in self.rows:
            row.grow_for(new)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.rows, self.held, self.moments, self.squares, self.starts = [], None, None, None, {}

    def reset(self) -> None:
        """Forget all tokens and codebooks; the next prompt makes others."""
        super().reset()
        self.rows, self.held, self.moments, self.squares, self.starts = [], None, None, None, {}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last -tokens_to_remove tokens, as in LowBitLayer; before the codebooks, a reset is supported."""
        tokens_to_remove = int(tokens_to_remove)
        if self.tail is not None or self.length == 0 or tokens_to_remove == 0:
            return super().crop(tokens_to_remove)
        if not self.rows:
            self._refuse("crop", "with codebooks='prompt', before every row has 1,024 tokens; reset() forgets all")
        for row in self.rows:
            row.crop(tokens_to_remove)
        self.length += tokens_to_remove

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave", "each sequence has codebooks of its own, so pages are not shared")

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._refuse("reorder_cache", "each sequence has codebooks of its own, so pages are not shared between them")
