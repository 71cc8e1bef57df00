"""A layer of a transformers cache whose heads hold tokens at two precision levels; all layers share one FramePool."""

import torch

from lowbit_attn.checks import is_truth
from lowbit_attn.formats.levels import Levels
from lowbit_attn.integrations.layer import FIRST_TOKENS, LowBitLayer
from lowbit_attn.layout import PAGE_TOKENS
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool, frame_sizes
from lowbit_attn.levels.policy import Policy
from lowbit_attn.levels.view import views_of
from lowbit_attn.plan import plans_of
from lowbit_attn.reference import Attention


class GrowingPool:
    """The FramePool of a model's layers: made by the first one that needs it, and doubled when it might not last."""

    def __init__(self, levels: Levels):
        self.levels, self.pool = levels, None

    def room_for(self, heads: int, tokens: int, head_dim: int, device: torch.device) -> FramePool:
        """The pool, with frames for so many (sequence, KV head) rows to take so many tokens more each, whatever their
        classes; a page's worth of tokens may wait in the ring and the stages before."""
        if self.pool is None:
            sizes = frame_sizes(*(fmt.record_bytes(head_dim) for fmt in self.levels.formats))[1]
            self.pool = FramePool(self.levels, head_dim=head_dim, frames=(1,) * len(sizes), device=device)
        wanted = self.pool.most(heads, tokens + 2 * PAGE_TOKENS)
        if any(need > free for need, free in zip(wanted, self.pool.n_free)):
            self.pool.grow(tuple(max(need, len(mine.ids)) for need, mine in zip(wanted, self.pool.lists)))
        return self.pool


class LevelLayer(LowBitLayer):
    """A LowBitLayer whose ``kv`` is a LevelCache over the pool of all layers; windows of the model's own are in 16 bit.

    policy: None: the levels' own share high, nothing pruned.
    """

    def __init__(self, format: Levels, pools: GrowingPool, *, policy: Policy | None = None, **options):
        super().__init__(format, **options)
        self.pools, self.policy = pools, policy
        self.options = {name: value for name, value in self.options.items() if name != "rotate_keys"}

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.kv is not None:
            self.kv.free(range(self.batch_size))  # frames of a batch of another size
        super().lazy_initialization(key_states, value_states)

    def _make_room(self, k: torch.Tensor, tokens: int) -> None:
        heads, held = k.shape[1], min(self.length - pad for pad in self.pads)
        pool = self.pools.room_for(self.batch_size * heads, tokens - held, k.shape[3], self.device)
        if self.kv is None:
            self.kv = LevelCache(pool, heads, policy=self.policy, sinks=self.sinks, max_batch=self.batch_size,
                                 max_seqlen=self.max_seqlen or max(FIRST_TOKENS, tokens), dtype=self.dtype,
                                 **self.options)
        self._grow(tokens)

    def _grow(self, tokens: int) -> None:
        if tokens > self.kv.max_seqlen:
            self.kv.extend(max(tokens, 2 * self.kv.max_seqlen))

    def _windowed(self, options: Attention) -> Attention:
        if options.window is not None:
            raise NotImplementedError(f"sliding: got 'lowbit' for a layer with a window of {options.window} over "
                                      "levels, whose pages hold no positions; supported: '16bit'")
        return options

    def _drop_plans(self) -> None:
        views = views_of(self.kv)
        for view in (*views, *(views.windowed or ())):
            plans_of(view).clear()

    def _manage(self, query: torch.Tensor, lse: torch.Tensor, options: Attention) -> None:
        path = "reference" if self.path == "reference" else None  # other names are of decode's kernels
        self.kv.manage(query, lse, path=path, **self._scored(options))

    def _pack(self) -> None:
        """Nothing: ``manage`` moved what was due."""

    def _forget(self) -> None:
        self.kv.free(range(self.batch_size))


def check_options(levels: Levels, static: bool, window: int | None, rotate_keys: bool, policy: Policy | None,
                  head_dim: int, codebooks=None) -> None:
    """Raise for options of LowBitCache that levels do not serve, and for a policy that is none."""
    is_truth("rotate_keys", rotate_keys)
    for name, value, reason in (("static", static, "whose steps torch.compile does not trace; supported: False"),
                                ("window", window, "whose pages hold no positions; supported: None"),
                                ("rotate_keys", rotate_keys, "which group K per channel; supported: False")):
        if value:
            raise NotImplementedError(f"{name}: got {value} for levels {levels}, {reason}")
    if codebooks is not None:
        raise ValueError(f"codebooks: got some for levels {levels}, supported: None, for their codes are affine")
    if policy is not None and not isinstance(policy, Policy):
        raise TypeError(f"policy: got {policy!r}, supported: Shares or Cumulative, which decide a block at once")
    levels.check(head_dim)
