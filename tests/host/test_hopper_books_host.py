"""Codebook sides of Hopper's tile path on the host: which code a lane takes in each step, and no bank twice."""

import random
from itertools import product

import numpy as np
import pytest

from lowbit_attn.formats import FORMATS
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.hopper.tile import config
from lowbit_attn.hopper.tile.book_side import QUAD

SIDES = {(name, d, side): spec for name, d in (*product(("cq2", "cq4"), (64, 128)), ("cq1", 128))
         for side, spec in zip("kv", config.plan_sides(FORMATS[name], d, "float16"))}
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
BANKS, BANK = 32, 4  # bytes of a bank

sides = pytest.mark.parametrize("side", SIDES.values(), ids=map(str, SIDES))


def accesses(side) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(byte of the codes, token, group) of all lanes, of each lookup of a page; dequant_keys and dequant_values."""
    found = []
    for run, block in product(range(side.runs), range(side.blocks_a_run)):
        start, own = run * 512 + LANES * order.RUN, order.RUN // side.blocks_a_run
        if side.transposed:
            number, part = run // side.parts_a_block * side.blocks_a_run + block, run % side.parts_a_block
            for step, half, e in product(range(side.steps), (0, 1), (0, 1)):
                byte = start + block * own + side.value_word(step, T) * QUAD + 2 * half + e
                group = side.groups // side.parts_a_block * part + side.value_group(step, G, T)
                found.append((byte, 16 * number + 8 * half + 2 * T + e, group))
        else:
            for atom, step in product(range(side.atoms), range(side.steps)):
                byte = start + block * own + side.steps * atom + side.key_byte(step, G)
                group = side.groups // side.atoms * atom + side.key_group(step, G, T)
                found.append((byte, 8 * (run * side.blocks_a_run + block) + G, group))
    return found


def conflicts(address: np.ndarray, size: int) -> int:
    """Most different accesses of ``size`` bytes that ask one bank for different words, of lanes served at once."""
    most = 0
    for first in range(0, 32, 128 // size):
        words = (address[first : first + 128 // size, None] + np.arange(0, size, BANK)) // BANK
        most = max(most, *np.bincount(np.unique(words) % BANKS))
    return most


@sides
def test_each_code_is_looked_up_once_where_the_order_has_it(side):
    seen = set()
    for byte, token, group in accesses(side):
        want = order.code_at(byte, side.groups, side.transposed)
        assert np.array_equal(token, want[0]) and np.array_equal(group, want[1])
        seen |= set(byte.tolist())
    assert seen == set(range(128 * side.groups))


@sides
def test_no_lookup_and_no_store_meets_a_bank_twice(side):
    """But for V of 1 bit: lanes t and t + 2 ask for the same group, whose entries of 16 bytes fill a row."""
    codes = np.random.default_rng(0).integers(0, 256, 32)
    for _, token, group in accesses(side):
        together = side.groups // (side.parts_a_block if side.transposed else side.atoms)
        part, within = group // together, group % together
        offset = side.entry_offset(within, T) + part * order.BOOK_ROW_BYTES // 2
        most = 2 if side.transposed and side.bits == 1 else 1
        assert conflicts(codes * order.BOOK_ROW_BYTES + offset, side.entry_bytes) <= most
        assert conflicts(side.place(token, side.group_size * group), side.entry_bytes) == 1


@sides
def test_offsets_name_a_group_in_either_copy_of_a_row(side):
    """attached.kernel_table has a row of head_dim 64 twice, the second time with its halves exchanged."""
    for group, t in product(range(side.groups), range(4)):
        at = side.entry_offset(group % (order.BOOK_ROW_BYTES // side.entry_bytes), t) // side.entry_bytes
        held = at if at < side.groups else (at + side.groups // 2) % side.groups
        assert held == group


@sides
def test_places_are_what_the_multiply_reads(side, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    import cutlass.cute as cute

    from lowbit_attn.hopper.tile import decode

    found, rng = {}, random.Random(0)
    token, channel = np.meshgrid(np.arange(128), np.arange(side.head_dim), indexing="ij")
    assert len(np.unique(side.place(token, channel))) == token.size

    def sample():
        tile = (decode.value_layout if side.transposed else decode.tile_layout)(128, side.head_dim, 1)
        assert str(tile.inner) == "S<3,4,3>"
        for _ in range(64):
            at = rng.randrange(128), rng.randrange(side.head_dim)
            found[at] = tile.outer((*(reversed(at) if side.transposed else at), 0))

    @cute.jit
    def evaluate():
        sample()

    evaluate()
    for (token, channel), offset in found.items():
        address = 2 * int(offset)
        assert address ^ (address >> 3 & 0x70) == side.place(token, channel)
