"""The life of a LevelCache at random, against lists of tokens: every token is there, once, in every head."""

import copy

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lowbit_attn import PageExhaustedError
from lowbit_attn.levels import LevelCache
from lowbit_attn.levels.frames import FramePool
from lowbit_attn.levels.policy import Cumulative, Shares

H, D, ROWS, LONGEST = 2, 32, 2, 900
VALUES = torch.rand(2, 4096, H, D, generator=torch.Generator().manual_seed(0)).mul(2).sub(1).half()
ATOL = (3 / 255, 3 / 15)  # of 8-bit K and 4-bit V over [-1, 1]


class LevelLife(RuleBasedStateMachine):
    done = 0

    @initialize(sinks=st.sampled_from((0, 5)), policy=st.sampled_from((Shares(0.25), Shares(0.6), Cumulative(0, 0.7))),
                frames=st.sampled_from((12, 60)))
    def start(self, sinks, policy, frames):
        pool = FramePool("k8v8+k8v4", head_dim=D, frames=(frames, frames))
        self.cache = LevelCache(pool, H, policy=policy, sinks=sinks, max_batch=ROWS, max_seqlen=LONGEST, max_q_len=4)
        self.rows, self.next = [[] for _ in range(ROWS)], 0

    def fresh(self, count):
        ids = [(self.next + i) % VALUES.shape[1] for i in range(count)]
        self.next += count
        return ids

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(0, 400), scored=st.booleans())
    def prefill(self, row, count, scored):
        if len(self.rows[row]) + count > LONGEST:
            return
        ids, q = self.fresh(count), torch.randn(count, 2 * H, D) if scored else None
        try:
            self.cache.prefill(row, *VALUES[:, ids], q)
        except PageExhaustedError:
            return
        self.rows[row] += ids

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(1, 4), times=st.integers(1, 60))
    def steps(self, row, count, times):
        for _ in range(times):
            if len(self.rows[row]) + count > LONGEST:
                return
            ids = self.fresh(count)
            try:
                self.cache.append(*VALUES[:, ids].unsqueeze(1), [row])
            except PageExhaustedError:
                assert self.cache.waits[row]
                return
            self.rows[row] += ids
            self.cache.manage(torch.randn(1, count, 2 * H, D), torch.randn(1, 2 * H, count) + 6, [row])

    @rule(row=st.integers(0, ROWS - 1), count=st.integers(1, 30))
    def rewind(self, row, count):
        held = len(self.rows[row]) - (self.cache.first_recent(row) if int(self.cache.n_out[row]) else 0)
        if count <= held:
            self.cache.rewind([row], count)
            del self.rows[row][-count:]

    @rule(row=st.integers(0, ROWS - 1))
    def free(self, row):
        self.cache.free([row])
        self.rows[row] = []

    @rule(src=st.integers(0, ROWS - 1), cut=st.integers(0, 40))
    def share(self, src, cut):
        dst, cache = (src + 1) % ROWS, self.cache
        self.free(dst)
        count = max(len(self.rows[src]) - cut, cache.first_recent(src) if int(cache.n_out[src]) else 0)
        try:
            cache.share(src, dst, count)
        except PageExhaustedError:
            return
        self.rows[dst] = self.rows[src][:count]

    @rule()
    def copy(self):
        self.cache = copy.deepcopy(self.cache)

    @invariant()
    def every_token_is_there_once(self):
        if not hasattr(self, "rows"):
            return
        LevelLife.done += 1
        self.cache.pool.check(self.cache)
        for row, ids in enumerate(self.rows):
            assert int(self.cache.n_tok[row]) == len(ids)
            for head, held in enumerate(self.cache.gather(row)):
                k, v = (x[ids, head].float() for x in VALUES)
                assert len(held[0]) == len(ids)
                if ids:
                    place = torch.cdist(held[0], k).argmin(1)
                    assert place.sort().values.tolist() == list(range(len(ids)))
                    for got, want, atol in zip(held, (k[place], v[place]), ATOL):
                        assert (got - want).abs().max() <= atol


def test_a_level_cache_at_random():
    run_state_machine_as_test(LevelLife, settings=settings(
        max_examples=15, stateful_step_count=25, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
    assert LevelLife.done > 200
