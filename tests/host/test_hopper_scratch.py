"""Where the splits of a call leave their sums in scratch, without a GPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

import cutlass.cute as cute  # noqa: E402
from cutlass import Int32, Uint32  # noqa: E402
from cutlass.cute.runtime import make_fake_compact_tensor  # noqa: E402

from host.integers import replace_integers  # noqa: E402
from lowbit_attn.device import ptx  # noqa: E402
from lowbit_attn.hopper import scratch  # noqa: E402
from lowbit_attn.hopper.common import combine  # noqa: E402
from lowbit_attn.hopper.common.abi import Rows  # noqa: E402
from lowbit_attn.hopper.tile import epilogue  # noqa: E402


class Memory:
    """A pointer to 0."""

    def toint(self):
        return 0


@pytest.mark.parametrize("splits", (2, 3, 5, 16, 33, 132))
@pytest.mark.parametrize("rows, live, head_dim", [(4, 4, 128), (4, 1, 64), (8, 7, 96), (64, 64, 256)])
def test_slots_of_scratch_lie_apart(monkeypatch, splits, rows, live, head_dim):
    """Of the second of two places with ``live`` of ``rows`` rows: slots that splits leave, and who merges them."""
    replace_integers(monkeypatch, int, combine, names=("Int32", "Int64", "Uint32"))
    replace_integers(monkeypatch, int, epilogue, names=("Int32", "Uint32"))
    monkeypatch.setattr(combine.cutlass, "select_", lambda chosen, x, y: x if chosen else y)
    monkeypatch.setattr(combine, "o_address", lambda *arguments: None)
    shape, = scratch((1, 1, 1, head_dim), rows, 2, splits).shapes
    partials = SimpleNamespace(shape=shape, iterator=Memory())
    out = combine.Outputs(partials, torch.empty(1, 1, 1, head_dim), None, None, 1, 0)
    size, place_bytes, found = combine.chunks_of_split(out, live * out.chunks), 4 * splits * shape[2], set()
    for split, row in itertools.product(range(splits), range(live)):
        own = epilogue.slot_addresses(out._replace(split_idx=split), Rows(0, 0, 0, live, 1, 1),
                                     combine.Row(row, 0, 0, 0, 0), tuple(range(out.chunks)))
        units = [row * out.chunks + chunk for chunk in range(out.chunks)]
        assert own == tuple(combine.slot(out, unit // size, split, size, unit % size) for unit in units)
        assert all(at.acc % 16 == at.pair % 8 == 0 for at in own)
        found |= {(at.acc + byte, at.pair + byte // 2) for at in own for byte in (0, 8)}
    count = splits * live * out.chunks
    used = {8 * (acc // 8) for acc, _ in found} | {8 * (pair // 8) for _, pair in found}
    assert len(found) == 2 * count and len(used) == 3 * count, "8 bytes of a slot in another"
    assert place_bytes <= min(used) and max(used) + 8 <= 2 * place_bytes


def test_a_slot_is_read_in_two_accesses_of_whole_numbers(tmp_path):
    """Relaxed ones, of GPU scope: others may be writing there; and a sleep is the hardware's."""
    @cute.kernel
    def copy(x: cute.Tensor):
        words, at = cute.make_rmem_tensor(combine.SLOT_WORDS, Uint32), x.iterator.toint()
        combine.load_slot(combine.Slot(at, at + 4 * combine.CHANNELS), words)
        ptx.nanosleep(Int32(words[0]))
        for i in range(combine.SLOT_WORDS):
            x[i] = words[i] + Uint32(1)

    @cute.jit
    def launch(x: cute.Tensor):
        copy(x).launch(grid=(1, 1, 1), block=(1, 1, 1))

    tensor = make_fake_compact_tensor(Uint32, (8,), assumed_align=16)
    made = cute.compile(launch, tensor, options=f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path}").artifacts.PTX
    lines = (made if isinstance(made, str) else made.decode()).splitlines()
    loads = [line.split()[0] for line in lines if line.strip().startswith("ld.") and ".param" not in line]
    assert loads == ["ld.relaxed.gpu.global.v4.b32", "ld.relaxed.gpu.global.v2.b32"]
    assert sum("nanosleep.u32" in line for line in lines) == 1
