"""A layer of a transformers cache whose heads hold tokens at two precision levels; all layers share one FramePool."""

from dataclasses import replace

import torch

from lowbit_attn.checks import is_truth
from lowbit_attn.formats.levels import Levels
from lowbit_attn.integrations.layer import FIRST_TOKENS, LowBitLayer
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.levels import LevelCache, windows
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.policy import Policy
from lowbit_attn.levels.view import views_of
from lowbit_attn.plan import plans_of
from lowbit_attn.reference import Attention, attention

TRIM = 512  # tokens from one return of pages that left a window to the next, which waits for the device


class GrowingPool:
    """The FramePool of a model's layers: made by the first one that needs it, and doubled when it might not last."""

    def __init__(self, levels: Levels):
        self.levels, self.pool = levels, None

    def room_for(self, heads: int, tokens: int, head_dim: int, device: torch.device) -> FramePool:
        """The pool, with frames for so many (sequence, KV head) rows to take so many tokens more each, whatever their
        classes; a page's worth of tokens may wait in the ring and the stages before."""
        if self.pool is None or (self.pool.head_dim, self.pool.device) != (head_dim, device):
            sizes = frame_sizes(*(fmt.record_bytes(head_dim) for fmt in self.levels.formats))[1]
            self.pool = FramePool(self.levels, head_dim=head_dim, frames=(1,) * len(sizes), device=device)
        wanted = self.pool.most(heads, tokens + 2 * PAGE_TOKENS)
        if any(need > free for need, free in zip(wanted, self.pool.n_free)):
            self.pool.grow(tuple(max(need, len(mine.ids)) for need, mine in zip(wanted, self.pool.lists)))
        return self.pool


class LevelLayer(LowBitLayer):
    """A LowBitLayer whose ``kv`` is a LevelCache over the pool of all layers.

    policy: None: the levels' own share high, nothing pruned. Under a window, of the cache or with sliding="lowbit" of
    the model, pages that left it are returned every TRIM tokens.
    """

    def __init__(self, format: Levels, pools: GrowingPool, *, policy: Policy | None = None, **options):
        super().__init__(format, **options)
        self.pools, self.policy, self.seen, self.trimmed = pools, policy, None, 0
        self.options = {name: value for name, value in self.options.items() if name != "rotate_keys"}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        before = self.kv
        super().lazy_initialization(key_states, value_states)
        if self.kv is not before:
            before.free(range(before.max_batch))

    def _make_room(self, k: torch.Tensor, tokens: int) -> None:
        heads, held = k.shape[1], min(self.length - pad for pad in self.pads)
        if self.kv is not None and self.length == 0 and self.kv.windows != (self.seen is not None):
            self.kv.free(range(self.batch_size))
            self.kv = None  # of a model before this one, with other windows
        pool = self.pools.room_for(self.batch_size * heads, tokens - held, k.shape[3], self.device)
        if self.kv is None:
            self.kv = LevelCache(pool, heads, policy=self.policy, sinks=self.sinks, max_batch=self.batch_size,
                                 max_seqlen=self.max_seqlen or max(FIRST_TOKENS, tokens), dtype=self.dtype,
                                 windows=self.seen is not None, **self.options)
        self._grow(tokens)

    def _grow(self, tokens: int) -> None:
        if tokens > self.kv.max_seqlen:
            self.kv.extend(max(tokens, 2 * self.kv.max_seqlen))

    def windowed(self, options: Attention) -> Attention:
        options = super().windowed(options)
        self.seen = options.window
        return options

    def _gathered(self, query, k, v, options: Attention, skips) -> torch.Tensor:
        out = torch.zeros_like(query).transpose(1, 2)
        for row, skip in enumerate(skips):
            q = query[row, :, skip:].transpose(0, 1).unflatten(1, (k.shape[1], -1))  # [tokens, num_heads_kv, ratio, D]
            at = int(self.kv.n_tok[row]) + torch.arange(len(q), device=q.device)
            for head, past in enumerate(self.kv.gather(row)):
                keys, values = (torch.cat((old, new[row, head, skip:].float()))[None] for old, new in zip(past, (k, v)))
                places = torch.cat((windows.positions(self.kv, row, head), at))
                mine = slice(head * q.shape[2], (head + 1) * q.shape[2])
                sinks = None if options.sink_logits is None else options.sink_logits[mine]
                out[row, skip:, mine] = attention(
                    q[:, head], keys, values, replace(options, sink_logits=sinks),
                    seen=windows.visible(places, at, options, self.sinks))[0].to(out.dtype)
        return out

    @staticmethod
    def _scored(options: Attention) -> dict:
        return LowBitLayer._scored(options) | dict(keep_sinks=options.keep_sinks)

    def _drop_plans(self) -> None:
        views = views_of(self.kv)
        for view in (*views, *(views.windowed or ())):
            plans_of(view).clear()

    def _manage(self, query: torch.Tensor, lse: torch.Tensor, options: Attention) -> None:
        path = "reference" if self.path == "reference" else None  # other names are of decode's kernels
        self.kv.manage(query, lse, path=path, **self._scored(options))

    def _pack(self) -> None:
        """``manage`` moved what was due; pages that left a window go back."""
        if self.seen is not None and self.length - self.trimmed >= TRIM:
            self.kv.trim(self.seen)
            self.trimmed = self.length

    def _forget(self) -> None:
        self.kv.free(range(self.batch_size))
        self.trimmed = 0


def check_options(levels: Levels, static: bool, rotate_keys: bool, policy: Policy | None, head_dim: int,
                  codebooks=None) -> None:
    """Raise for options of LowBitCache that levels do not serve, and for a policy that is none."""
    is_truth("rotate_keys", rotate_keys)
    for name, value, reason in (("static", static, "whose steps torch.compile does not trace; supported: False"),
                                ("rotate_keys", rotate_keys, "which group K per channel; supported: False")):
        if value:
            raise NotImplementedError(f"{name}: got {value} for levels {levels}, {reason}")
    if codebooks is not None:
        raise ValueError(f"codebooks: got some for levels {levels}, supported: None, for their codes are affine")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy: got {policy!r}, supported: Shares or Cumulative, which decide a block at once")
    levels.check(head_dim)
