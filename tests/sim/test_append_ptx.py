"""The compiled append without a GPU: its PTX, run thread by thread on the CPU, stores tokens and moves counters.

Steps that pack nothing, of every kind of batch: one that fits a warp, a block of threads, several of them. Blocks of
threads run one after the other in any order, so the one that moves the counters must be the last to have read them.
Rings and sinks have rows in an order of their own, with room between them.
"""

import numpy as np
import pytest
import torch

from lowbit_attn import kernels, sass, toolchain
from lowbit_attn.formats import FORMATS
from sim.ptx import build
from sim.ptx.steps import RINGS, run_step

SLOTS, SINKS, ENTRIES, ROOM = 256, 4, 8, 1000
NUMBERS = {"num_sinks": SINKS, "window_k": 0, "window_v": 0, "page_stride": 1, "head_stride": 1}


def step_key(name: str, head_dim: int) -> kernels.KernelKey:
    """The step's kernel of a format for fp16 tokens on sm_90."""
    return kernels.append_key("sm_90", "float16", head_dim, FORMATS[name], None)


class Cache:
    """The tensors of a cache that a step touches, and what the step must make of them."""

    def __init__(self, draw: np.random.Generator, head_dim: int, batch: int, tokens: int, heads: int, seqs: int):
        ints = dict(dtype=np.int32)
        self.x = [draw.integers(1, 60000, (batch, tokens, heads, head_dim)).astype(np.uint16) for _ in range(2)]
        self.rows = draw.permutation(seqs)[:batch].astype(np.int32)
        if batch > 3:
            self.rows[draw.integers(batch)], self.rows[draw.integers(batch)] = -1, seqs + 3
        rings = seqs + 2
        self.ring_rows = draw.permutation(rings)[:batch].astype(np.int32)
        n_tok = draw.integers(0, 120, seqs).astype(np.int32)
        room = draw.choice([ROOM, tokens, tokens - 1, -1], seqs, p=(0.6, 0.2, 0.1, 0.1))  # -1: a freed row
        self.state = {
            "n_tok": n_tok, "n_sink": np.minimum(n_tok, SINKS), "n_qk": np.zeros(seqs, **ints),
            "n_qv": np.zeros(seqs, **ints), "ring_start": np.zeros(seqs, **ints), "faults": np.zeros(seqs + 1, **ints),
            "arrivals": np.zeros(seqs, **ints), "limit": np.where(room < 0, 0, n_tok + room).astype(np.int32),
            "table": np.zeros((seqs, ENTRIES), **ints), "pool": np.zeros(64, np.uint32),
            **{name: np.zeros((rings, heads + 1, SINKS if name in RINGS[:2] else SLOTS, head_dim), np.uint16)
               for name in RINGS}}

    def expected(self) -> dict[str, np.ndarray]:
        want = {name: x.copy() for name, x in self.state.items()}
        tokens, seqs = self.x[0].shape[1], len(self.state["limit"])
        for i, (row, ring_row) in enumerate(zip(self.rows, self.ring_rows)):
            if not 0 <= row < seqs:
                want["faults"][-1] = 1
            elif self.state["limit"][row] - self.state["n_tok"][row] < tokens:
                want["faults"][row] = 1
            else:
                for t in range(tokens):
                    position = self.state["n_tok"][row] + t
                    for x, side in zip(self.x, "kv"):
                        if position < SINKS:
                            want[f"sink_{side}"][ring_row, :-1, position] = x[i, t]
                        else:
                            want[f"ring_{side}"][ring_row, :-1, (position - SINKS) % SLOTS] = x[i, t]
                want["n_tok"][row] += tokens
                want["n_sink"][row] = min(want["n_tok"][row], SINKS)
        return want


def run(case: Cache, order) -> dict[str, np.ndarray]:
    """The step on the CPU; order: of the blocks of threads."""
    x = {"x_k": case.x[0], "x_v": case.x[1], "rows": case.rows, "ring_rows": case.ring_rows}
    state, x = ({name: torch.from_numpy(values) for name, values in some.items()} for some in (case.state, x))
    after = run_step(step_key("k4v4", case.x[0].shape[3]), state, x, NUMBERS, order)
    return {name: found.numpy() for name, found in after.items()}


@pytest.mark.parametrize("head_dim, batch, tokens, heads, seqs", [
    (128, 1, 1, 2, 1), (128, 1, 3, 8, 4), (128, 5, 2, 3, 9), (128, 32, 1, 1, 40), (128, 33, 1, 1, 40),
    (128, 40, 16, 1, 64), (128, 257, 1, 1, 300), (96, 5, 2, 3, 9)])
def test_step_of_every_batch_size(head_dim, batch, tokens, heads, seqs):
    draw = np.random.default_rng(batch + tokens)
    case = Cache(draw, head_dim, batch, tokens, heads, seqs)
    want, found = case.expected(), run(case, draw.permutation)
    for name in want:
        assert np.array_equal(found[name], want[name]), name


@pytest.mark.parametrize("name", ["k4v4", "k2v2"])
def test_rows_of_no_power_of_two_spill_no_registers(name):
    try:
        toolchain.find_tool("nvdisasm"), toolchain.find_tool("cuobjdump")
    except toolchain.ToolMissingError as error:
        pytest.skip(str(error))
    kernel, = sass.inspect_bytes(build.compiled(step_key(name, 96), "cubin"))
    assert [op for op in sass.SPILLS if kernel.ops[op]] == []
