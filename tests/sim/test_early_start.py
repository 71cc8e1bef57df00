"""The interpreter sees what a kernel that starts early may not do before it has waited for the one ahead of it, and
accesses that no tensor has."""

import numpy as np
import pytest
import torch

from sim.ptx import program as ptx

TEXT = """
.visible .entry kernel(
)
{{
\tmov.u64 %rd1, {source};
\tmov.u64 %rd2, {target};
\t{before}
\tgriddepcontrol.wait;
\t{after}
\tret;
}}
"""
READ, WRITE = "ld.global.b32 %r1, [%rd1];", "st.global.b32 [%rd2], %r1;"


def run(before: str, after: str, late: tuple[int, ...] = (0,)) -> list[int]:
    memory = ptx.GlobalMemory([torch.arange(1, 33).int(), torch.zeros(32).int()])
    memory.begin_early(*late)
    source, target = (ptx.GLOBAL_BASE + start for start in memory.starts)
    code = ptx.Program(TEXT.format(source=source, target=target, before=before, after=after))
    ptx.run_grid([ptx.Cta(code, [], memory.memory, (0, 0, 0), (1, 1, 1))], 32)
    return memory.tensor(1, torch.zeros(1).int()).tolist()


def test_what_comes_after_the_wait_is_allowed():
    assert run("", READ + "\n\t" + WRITE) == [1]


def test_what_the_kernel_before_does_not_make_may_be_read_early():
    assert run(READ, WRITE, late=(1,)) == [1]


@pytest.mark.parametrize("before, after, why", [(READ, WRITE, "a read before"),
                                                ("mov.u32 %r1, 5;\n\t" + WRITE, READ, "a write before")])
def test_faults_are_seen(before, after, why):
    with pytest.raises(AssertionError, match=why):
        run(before, after)


@pytest.mark.parametrize("tensor, size, bytes_behind", [(0, 4, 128), (0, 16, 128), (1, 4, -4)])
def test_an_access_beyond_a_tensor_is_seen(tensor, size, bytes_behind):
    memory = ptx.GlobalMemory([torch.arange(1, 33).int(), torch.zeros(32).int()])
    at = np.array([ptx.GLOBAL_BASE + memory.starts[tensor] + bytes_behind], np.uint64)
    for touch in (lambda: memory.memory.read(at, size), lambda: memory.memory.write(at, np.zeros((1, size), np.uint8))):
        with pytest.raises(AssertionError, match="beyond a tensor"):
            touch()
