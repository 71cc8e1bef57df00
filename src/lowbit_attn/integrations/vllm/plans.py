"""Plans of vLLM's steps: from the lengths that vLLM has on the host, and one kernel, without waiting for the device."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lowbit_attn import _private
from lowbit_attn.paged import Step
from lowbit_attn.paged_plan import BatchPlan, PlanBuffers, TokenLayout, make_plan
from lowbit_attn.paged_steps import launch, rows_in_memory, workspace_tokens

asks_for_checks = _private.environment("LOWBIT_ATTN_CHECK")


class Planner:
    """Plans of one group of layers, in buffers whose addresses stay.

    where: of the layers' stores. rows, tokens: the most of a step. threshold: the most new tokens of a decode row.
    sizes: rows for which CUDA graphs are captured, ascending: other steps use the same sizes, so that few kernel
    launches are planned. is_draft: of a draft model, whose rows have a token more than the lengths that vLLM has on the
    host: its steps with chunks read the device's lengths, and wait for them.
    """

    def __init__(self, where: TokenLayout, rows: int, tokens: int, threshold: int, sizes: Sequence[int],
                 device: torch.device, copy: Callable[[np.ndarray], torch.Tensor], is_draft: bool = False):
        self.buffers = PlanBuffers(where, rows, tokens, device)
        self.threshold, self.sizes, self.copy = threshold, sorted(sizes), copy
        self.capacity, self.is_draft = workspace_tokens(tokens), is_draft

    def plan(self, step: Step, common) -> BatchPlan:
        """The plan of a step, entered into the buffers. common: vLLM's CommonAttentionMetadata; of its lengths on the
        host those of rows with more than ``threshold`` new tokens are exact."""
        q_lens = np.diff(common.query_start_loc_cpu.numpy())
        has_chunks = bool((q_lens > self.threshold).any())
        lens = common.seq_lens.cpu() if has_chunks and self.is_draft else common.seq_lens_cpu_upper_bound
        if lens is None and has_chunks:
            raise RuntimeError("lowbit_attn: this vLLM gives no sequence lengths on the host for a step with chunks of "
                               "prompts, supported: vLLM 0.33")
        lens = np.zeros_like(q_lens) if lens is None else lens.numpy()
        if has_chunks and asks_for_checks() == b"1":
            self._check(q_lens, lens, common)
        room = min(rows_in_memory(step.table), self.buffers.rows)
        plan = make_plan(self.buffers, q_lens, lens, self.threshold, self.capacity, self.copy,
                         lambda rows: self._bucket(rows, room), common.num_actual_tokens)
        launch(plan, step)
        return plan

    def _bucket(self, rows: int, room: int) -> int:
        """The smallest captured size that holds so many rows, within the memory of tables; else the number itself. Of
        several ranks the number itself, too, since what padded rows leave would be merged."""
        at = bisect_left(self.sizes, rows)
        if self.buffers.layout.world > 1 or at == len(self.sizes) or self.sizes[at] > room:
            return rows
        return self.sizes[at]

    def _check(self, q_lens: np.ndarray, lens: np.ndarray, common) -> None:
        """Compare the host's lengths of chunks with the device's, which waits for it: for tests."""
        there = common.seq_lens.cpu().numpy()
        wrong = (q_lens > self.threshold) & (lens[: len(q_lens)] != there[: len(q_lens)])
        if wrong.any():
            raise RuntimeError(f"lowbit_attn: rows {np.flatnonzero(wrong).tolist()} have "
                               f"{there[:len(q_lens)][wrong].tolist()} tokens on the device and "
                               f"{lens[:len(q_lens)][wrong].tolist()} on the host")
