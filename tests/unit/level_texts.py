"""A level cache beside the keys that its rows were given, so that tests find the positions of what it holds by them."""

import torch

from lowbit_attn.formats.levels import parse
from lowbit_attn.levels import FramePool, LevelCache, windows
from lowbit_attn.levels.frames import frame_sizes
from lowbit_attn.levels.policy import Cumulative

H, R, D, ROWS = 2, 2, 64, 3
HALF = Cumulative(0.05, 0.6)  # heads differ, and some tokens are pruned


def make(name: str = "k8v8+k8v4", frames: int = 60, device: str = "cpu", **options) -> LevelCache:
    sizes = len(frame_sizes(*(fmt.record_bytes(D) for fmt in parse(name).formats))[1])
    pool = FramePool(name, head_dim=D, frames=(frames,) * sizes, device=device)
    return LevelCache(pool, H, **dict(policy=HALF, max_seqlen=2400, sinks=5, max_batch=ROWS, max_q_len=4,
                                      windows=True) | options)


def tokens(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, H, D, generator=generator).half()
    return k, v, torch.randn(count, R * H, D, generator=generator).half()


class Text:
    """A cache beside all keys that its rows were given, from which positions of what it holds are found again."""

    def __init__(self, cache: LevelCache):
        self.cache, self.keys = cache, [torch.zeros(0, H, D, device=cache.device) for _ in range(cache.max_batch)]

    def prefill(self, row: int, count: int, seed: int, **options) -> None:
        k, v, q = (x.to(self.cache.device) for x in tokens(count, seed))
        self.cache.prefill(row, k, v, q, **options)
        self.keys[row] = torch.cat((self.keys[row], k.float()))

    def steps(self, rows: list[int], count: int, seed: int) -> None:
        k, v, q = (x.unflatten(0, (count, len(rows))).to(self.cache.device) for x in tokens(count * len(rows), seed))
        for i in range(count):
            self.cache.append(k[i][:, None], v[i][:, None], rows)
            self.cache.manage(q[i][:, None], torch.full((len(rows), R * H, 1), 6.0, device=q.device), rows)
            for row, mine in zip(rows, k[i]):
                self.keys[row] = torch.cat((self.keys[row], mine[None].float()))

    def positions(self, row: int, head: int) -> torch.Tensor:
        """Of each held token the place of the key that it is nearest to."""
        held, keys = self.cache.gather(row)[head][0], self.keys[row][:, head]
        return torch.cdist(held, keys).argmin(1) if len(keys) else held.new_zeros(0, dtype=torch.int64)

    def check(self) -> None:
        """Positions as the cache knows them, and what any window hides of each level."""
        cache = self.cache
        for row in range(cache.max_batch):
            found = [windows.positions(cache, row, head) for head in range(H)]
            for head, mine in enumerate(found):
                assert torch.equal(mine, self.positions(row, head)), (row, head)
            self._check_hidden(row, found)

    def _check_hidden(self, row: int, found: list[torch.Tensor]) -> None:
        cache = self.cache
        for first in (0, 2, cache.sinks, cache.sinks + 127, cache.sinks + 128, 333, int(cache.n_tok[row]), 2399):
            hidden = windows.hidden(cache, torch.full((row + 1,), first, device=cache.device))
            for head, mine in enumerate(found):
                v = row * H + head
                (high, low), (high_stage, low_stage) = cache.c_pack[:, v].tolist(), cache.n_stage[:, v].tolist()
                parts = mine.split([low, high, low_stage, high_stage, int(cache.n_sink[row]),
                                    len(mine) - low - high - low_stage - high_stage - int(cache.n_sink[row])])
                want = [int((parts[1] < first).sum() + (parts[3] < first).sum()),
                        int((parts[0] < first).sum() + (parts[2] < first).sum())]
                want = [first - cache.sinks] * 2 if first < cache.sinks else want
                assert hidden[:, v].tolist() == want, (row, head, first)
