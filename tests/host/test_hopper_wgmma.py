"""Where the wgmma path finds codes and metadata of an A operand, against the layout; its sizes."""

from itertools import product

import pytest
import torch

from lowbit_attn import kernels, layout
from lowbit_attn.formats import FORMATS
from lowbit_attn.hopper.common.support import PATHS, WGMMA
from lowbit_attn.hopper.tile.config import GROUP_WARPS, SMEM_LIMIT, WARP
from lowbit_attn.hopper.wgmma.config import STEPS, make_config

NAMES = ("k4v4", "k2v2", "k4v2-g32-vg64", "k2tv4-g64-vg32", "k4tv2")
SIDES = [pytest.param(side, id=f"{name}-d{head_dim}-{'v' if side.transposed else 'k'}")
         for name, head_dim in product(NAMES, PATHS[WGMMA].head_dims)
         for cfg in [make_config(FORMATS[name], head_dim, "float16")] for side in (cfg.k, cfg.v)]


@pytest.mark.parametrize("side", SIDES)
def test_a_warp_reads_its_own_rows_codes(side):
    """Registers of m64k16's A: row g + 8 row8 of a warp's 16, column 2t + e + 8 col8; a warp's rows follow each other
    over the blocks."""
    for warp, lane, col_tile in product(range(GROUP_WARPS), range(WARP), range(side.col_tiles)):
        g, t = divmod(lane, 4)
        first = side.access(col_tile, warp, lane) * side.warp_words
        for block, register, word, shift, position in side.positions():
            row8, col8 = register % 2, register // 2
            row = layout.TILE * (side.blocks * warp + block) + 8 * row8 + g
            bit = position + shift + (side.warp_shift(warp) if side.sharing_warps > 1 else 0)
            for e in range(2):  # the halves of the word
                wanted = layout.code_slot(row, layout.TILE * col_tile + 8 * col8 + 2 * t + e, side.rows, side.bits)
                number, owner, byte, slot = wanted
                assert owner == lane and layout.word_offset(number, lane) // 4 == first + word
                assert 8 * byte + side.bits * slot == bit + 16 * e


@pytest.mark.parametrize("side", SIDES)
def test_a_warp_reads_its_own_metadata(side):
    for warp, lane, pair in product(range(GROUP_WARPS), range(WARP), range(side.col_tiles // STEPS)):
        g, t = divmod(lane, 4)
        reads = [16 * at for at in side.meta_accesses(pair, warp, g, t)]
        for block, register, step, e in product(range(side.blocks), range(4), range(STEPS), range(2)):
            row = layout.TILE * (side.blocks * warp + block) + 8 * (register % 2) + g
            col = layout.TILE * (STEPS * pair + step) + 8 * (register // 2) + 2 * t + e
            word = 4 * side.meta_word(block, register, step)
            if side.transposed:
                assert reads[e] + word == layout.token_meta_offset(row // side.group_size, 0, col)
            elif side.is_per_token:
                assert reads[0] + word == layout.token_meta_offset(col // side.group_size, 0, row)
            else:
                for is_zero in range(2):
                    assert reads[is_zero] + word + 2 * e == layout.channel_meta_offset(
                        row // side.group_size, is_zero, col, side.head_dim)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", PATHS[WGMMA].head_dims)
def test_sizes_fit(name, head_dim):
    cfg = make_config(FORMATS[name], head_dim, "float16")
    assert not cfg.problems() and cfg.smem_bytes <= SMEM_LIMIT and cfg.packed_stages >= 2


@pytest.mark.parametrize("name, head_dim, dtype, reason", [
    ("k8v4", 128, "float16", "K bits 8, supported: 4, 2"), ("k4v4", 96, "float16", "head_dim 96, supported: 64, 128"),
    ("kitty", 128, "float16", "supported: K per channel or per token"),
    ("k4v4", 128, "bfloat16", "dtype torch.bfloat16, supported: float16")])
def test_what_is_not_served_is_named(name, head_dim, dtype, reason):
    with pytest.raises(ValueError, match=reason):
        make_config(FORMATS[name], head_dim, dtype)


@pytest.mark.parametrize("name, dtype, rows, path", [
    ("k4v4", torch.float16, 16, ("register", 16)), ("k4v4", torch.float16, 17, (WGMMA, 32)),
    ("k2v2", torch.float16, 32, (WGMMA, 32)), ("k2v2", torch.float16, 33, ("tile", 64)),
    ("k2v2", torch.float16, 100, ("tile", 64)), ("k4v4", torch.bfloat16, 32, ("register", 16)),
    ("k8v8", torch.float16, 32, ("tile", 64))])
def test_which_calls_take_it(name, dtype, rows, path):
    assert kernels.pick("hopper", FORMATS[name], 128, dtype, rows)[0] == path
