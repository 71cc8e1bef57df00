"""The Hopper integer path without a GPU: what each lane reads, its compile-time plan, which calls take it."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from gpu import matrix

from lowbit_attn import dispatch, kernels, layout, registers
from lowbit_attn.formats import FORMATS, packing

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from lowbit_attn.hopper import PATHS, decode  # noqa: E402
from lowbit_attn.hopper.arith.int8 import boost, config, steps  # noqa: E402
from lowbit_attn.hopper.common import tuning  # noqa: E402
from lowbit_attn.hopper.config import make_config  # noqa: E402
from lowbit_attn.hopper.warp import config as register  # noqa: E402
from lowbit_attn.hopper.warp import mixed, plan  # noqa: E402

BOOSTED = ("kitty", "kitty-pro", "kitty-b8-bf16", "kitty-b40-vg64", "kitty-b64")
NAMES = ("k4v4", "k8v8", "k2v2", "k1v1", "k4v2-g32-vg32", "k2v8-g64-vg64-bf16", "k8v1-g32", "k1v4-g64-bf16", *BOOSTED)
PAGES = [(name, d) for name, d in itertools.product(NAMES, (64, 96, 128, 256))
         if not (d == 96 and ("v1" in name or "vg64" in name or name == "kitty"))
         and not PATHS["integer"].missing(FORMATS[name], d, torch.float16)]
BOOSTED_PAGES = [(name, d) for name, d in PAGES if name in BOOSTED]
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


@pytest.mark.parametrize("path, head_dims", [
    ("integer", (64, 128, 256)), ("small", (64, 128)), ("stream", (64, 128))])
def test_calls_are_clusters_where_the_kernel_can_be_one(path, head_dims):
    """The dispatcher's rule and the kernel's are two."""
    for head_dim in head_dims:
        cfg = make_config(path, FORMATS["k4v4"], head_dim, "float16", 4)
        key = kernels.decode_key("hopper", "sm_90a", "float16", head_dim, "k4v4", path, cfg.rows)
        assert bool(kernels.clusters(key, 8, 132)) == cfg.has_clusters == ("inbox" in cfg.smem_plan)


def config_of(name: str, head_dim: int, features=()) -> register.WarpConfig:
    return make_config("integer", FORMATS[name], head_dim, "float16", 4, features)


def pages(name: str, head_dim: int):
    """(config, bytes of a record, its K part and V part)."""
    fmt, cfg = FORMATS[name], config_of(name, head_dim)
    record = fmt.quantize(*torch.randn(2, 1, 128, head_dim))
    return cfg, record, [record[0, s.start : s.start + s.nbytes].numpy() for s in (cfg.k, cfg.v)]


def codes_of(side: register.SidePlan, part: np.ndarray) -> np.ndarray:
    return part[side.codes :][: layout.plane_bytes(side.rows, side.cols, side.bits)]


def unpacked(side: register.SidePlan, part: np.ndarray) -> np.ndarray:
    plane = torch.from_numpy(codes_of(side, part)[None])
    return packing.unpack_codes(plane, side.rows, side.cols, side.bits)[0].numpy()


def lane_words(side: register.SidePlan, part: np.ndarray, col_tile: int, row_tiles: range) -> dict[int, np.ndarray]:
    """What steps.tile_words brings each lane; every access lies on a multiple of its size."""
    first_tile, tiles = steps.run_of(side, col_tile, row_tiles)
    first, count = side.words_of(first_tile), side.words_of(tiles)
    width = math.gcd(count, layout.BLOCK_WORDS)
    assert first % width == 0
    accesses = codes_of(side, part).view(np.uint32).reshape(-1, width)
    return {word + i: accesses[side.code_access(word, width, LANES), i]
            for word in range(first, first + count, width) for i in range(width)}


@pytest.mark.parametrize("name, head_dim", PAGES)
def test_lanes_read_the_codes_of_their_rows_group_by_group(name, head_dim):
    cfg, record, (k_part, v_part) = pages(name, head_dim)
    boosted = [(cfg.boost, k_part)] if cfg.boost else []
    for side, part in [(cfg.k, k_part), (cfg.v, v_part), *boosted]:
        want = unpacked(side, part)
        tiles = min(side.group_size // layout.TILE, config.MAX_TILES)
        for col_tile, first in itertools.product(range(side.col_tiles), range(0, side.row_tiles, tiles)):
            row_tiles = range(first, min(first + tiles, side.row_tiles))
            words = lane_words(side, part, col_tile, row_tiles)
            for rt in row_tiles:
                for row8, (word, mask) in enumerate(steps.masks_of(side, rt, col_tile)):
                    found = (words[word] & np.uint32(mask)).view(np.uint8).reshape(32, 4) >> side.power(rt, row8)
                    for byte in range(4):
                        column = 16 * col_tile + 2 * T + registers.byte_column(byte)
                        assert np.array_equal(found[:, byte], want[16 * rt + 8 * row8 + G, column])


@pytest.mark.parametrize("name, head_dim", PAGES)
def test_codes_of_a_row_tile_chosen_at_run_time_take_the_masks_of_the_first(name, head_dim):
    cfg, _, (part, _) = pages(name, head_dim)
    for side in [cfg.k] + ([cfg.boost] if cfg.boost else []):
        width, want = max(1, side.words_of(1)), unpacked(side, part)
        accesses = codes_of(side, part).view(np.uint32).reshape(-1, width)
        for ct, tile in itertools.product(range(side.col_tiles), range(side.row_tiles)):
            first = ct * side.row_tiles
            values = accesses[mixed.tile_access(side, first, tile, width) + side.code_access(0, width, LANES)]
            values = values >> np.uint32(mixed.tile_shift(side, tile))
            for row8, (word, mask) in enumerate(steps.masks_of(side, 0, ct)):
                found = values[:, word - side.words_of(first)] & np.uint32(mask)
                found = found.view(np.uint8).reshape(32, 4) >> side.power(0, row8)
                for byte in range(4):
                    column = 16 * ct + 2 * T + registers.byte_column(byte)
                    assert np.array_equal(found[:, byte], want[16 * tile + 8 * row8 + G, column])


@pytest.mark.parametrize("name, head_dim", PAGES)
def test_lanes_read_the_metadata_of_their_channels_and_tokens(name, head_dim):
    cfg, record, (k_part, v_part) = pages(name, head_dim)
    for is_zero, group, step in itertools.product((0, 1), range(cfg.k.groups), range(head_dim // 32)):
        at = steps.own_access(cfg.k, group, is_zero, step, G, T)
        halves = k_part[cfg.k.meta :].view(np.uint16).reshape(-1, 4)[at]
        for byte in range(4):  # of a word: half e = byte // 2 of metadata word col8 = byte % 2
            channel = 16 * (2 * step + G % 2) + 2 * T + registers.byte_column(byte)
            offset = np.array([layout.channel_meta_offset(group, is_zero, int(c), head_dim) for c in channel])
            want = k_part[cfg.k.meta :].view(np.uint16)[offset // 2]
            assert np.array_equal(halves[:, 2 * (byte % 2) + byte // 2], want)
    plane = v_part[cfg.v.meta :].view(np.uint32)
    for group, first in itertools.product(range(cfg.v.groups), range(0, 128, steps.SPAN)):
        quads = plane.reshape(-1, 4)[steps.quad_access(group, first, G)]
        for j in range(4):
            offset = layout.token_meta_offset(group, 0, first + 8 * j + G)
            assert np.array_equal(quads[:, j], plane[offset // 4])


def test_the_two_lanes_of_a_row_share_its_column_tiles():
    """Over the two column tiles of a step and all bytes, the eight lanes of a query row have each channel once."""
    for row in range(config.ROWS):
        channels = [16 * (lane // 4 % 2) + 2 * (lane % 4) + registers.byte_column(byte)
                    for lane in LANES[G // 2 == row] for byte in range(4)]
        assert sorted(channels) == list(range(registers.BYTE_STEP))


def test_channels_stand_in_the_order_of_metadata():
    """All channels that a byte can name, in each byte of a word."""
    channels = np.arange(256, dtype=np.uint8).reshape(-1, 4)
    for turn in range(4):
        turned = np.roll(channels, turn, 1)
        found = boost.positions(np.ascontiguousarray(turned).view(np.uint32)).view(np.uint8)
        assert np.array_equal(found, layout.channel_meta_index(turned.astype(int)))


@pytest.mark.parametrize("name, head_dim", BOOSTED_PAGES)
def test_the_two_lanes_of_a_row_share_its_slots(name, head_dim):
    """Every slot once, in the byte of the operand whose column of codes is the slot's; the first lane stands for all
    rows."""
    cfg, _, (part, _) = pages(name, head_dim)
    index = part[cfg.boost.high.index :][: cfg.boost.cols]
    assert (index < head_dim).all() and (index[cfg.boost.high.channels :] == index[cfg.boost.high.channels - 1]).all()
    for first in range(0, cfg.boost.col_tiles, config.STEP_TILES):
        seen = []
        for lane in range(32):
            pairs = [[2 * i, 2 * i + 1] for i in boost.own_accesses(first, cfg.boost.col_tiles, lane)]
            g, t = lane // 4, lane % 4
            if len(pairs) == 1:  # joined has them in bytes col8 + 2e, col8 = g % 2
                want = [16 * first + 2 * t + registers.byte_column(g % 2 + 2 * e) for e in (0, 1)]
                assert first + 1 == cfg.boost.col_tiles and pairs[0] == want
            else:
                tile = first + g % 2
                want = [16 * tile + 2 * t + registers.byte_column(byte) for byte in range(4)]
                assert permute(*(pair + ["", ""] for pair in pairs), boost.PAIRS) == want
            seen += want * (g < 2)
        assert sorted(seen) == list(range(16 * first, min(16 * (first + 2), cfg.boost.cols)))


def permute(a: list, b: list, selector: int) -> list:
    """prmt by the manual: nibble i of the selector names byte i of the result among those of (a, b)."""
    return [(a + b)[selector >> 4 * i & 7] for i in range(4)]


def test_a_lone_column_tile_is_joined_from_the_digits_of_two_lanes():
    """Registers a lane has after DIGITS_OF_TWO: high digits of its slots e = 0, 1, then the low ones."""
    even, odd = ([f"{digit}{col8}{e}" for digit in ("high", "low") for e in (0, 1)] for col8 in (0, 1))
    order = [(byte % 2, byte // 2) for byte in range(4)]
    assert permute(even, odd, boost.EVEN_LANE) == [f"high{col8}{e}" for col8, e in order]
    assert permute(odd, even, boost.ODD_LANE) == [f"low{col8}{e}" for col8, e in order]


def test_selectors_order_the_digits():
    def fixed(i: int) -> list:  # bytes of start + X
        return [f"low{i}", f"high{i}", "", ""]

    pairs = [permute(fixed(i), fixed(i + 1), steps.DIGITS_OF_TWO) for i in (0, 2)]
    assert permute(*pairs, steps.LOW_HALVES) == [f"high{i}" for i in range(4)]
    assert permute(*pairs, steps.HIGH_HALVES) == [f"low{i}" for i in range(4)]
    flips = [steps.SIGN_FLIPS >> 8 * i & 0xFF for i in range(4)]
    assert [bool(flip) for flip in flips] == [name.startswith("low") for name in pairs[0]] and max(flips) == 0x80


@pytest.mark.parametrize("name, head_dim", PAGES)
def test_shared_memory_plan(name, head_dim, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cfg = config_of(name, head_dim)
    assert cfg.warps >= (3 if head_dim == 256 else 4) and cfg.slots >= tuning.MIN_SLOTS
    assert cfg.smem_bytes <= plan.SMEM_LIMIT
    assert decode.kernel_of(cfg).storage().size_in_bytes() == cfg.smem_bytes
    banks = {int((g + cfg.merge_pitch * t) % 32) for g, t in itertools.product(range(8), range(4))}
    assert len(banks) == 32, "the lanes of a warp write O to the same bank at the merge"


@pytest.mark.usefixtures("windowed_formats")
@pytest.mark.parametrize("kernel", matrix.SMALL, ids=str)
def test_four_ctas_fit_an_sm(kernel, monkeypatch):
    """By shared memory, and by the 168 registers a lane that four blocks an SM of the launch leave."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    cfg = make_config("small", FORMATS[kernel.format], kernel.head_dim, kernel.dtype, 4)
    assert 4 * cfg.warps == tuning.MANY_WARPS and cfg.slots >= tuning.MIN_SLOTS
    assert 4 * (decode.kernel_of(cfg).storage().size_in_bytes() + plan.BLOCK_SMEM) <= plan.SM_SMEM
    key, = kernel.keys("hopper", "small")
    assert kernels.ctas_per_sm(key) == 4 == 65_536 // (168 * cfg.threads)


def test_the_number_of_blocks_of_rows_picks_the_ctas():
    plain, = matrix.MatrixKernel("k2v2", "float16", 128, 4).keys("hopper", "integer")
    small, stream = (dataclasses.replace(plain, schedule=path) for path in ("small", "stream"))
    for blocks, pages, wanted in ((132, 1, plain), (133, 9, stream), (264, 9, small), (264, 19, stream),
                                  (300, 9, stream), (512, 32, small), (560, 32, stream), (512, 64, stream),
                                  (1024, 64, small), (1024, 1000, stream), (20_000, 1000, small),
                                  (128, 1000, plain), (88, 128, stream), (88, 127, plain), (89, 128, plain),
                                  (66, 128, plain), (40, 1000, plain), (64, 256, plain), (8, 1000, plain)):
        assert dispatch.for_shape(plain, blocks, pages, 132) == wanted
    for pages, wanted in (((256,) * 8, plain), ((1024, *(120,) * 7), stream), ((500, *(220,) * 7), stream),
                          ((300, *(250,) * 7), plain), ((40, *(8,) * 7), plain), ((0,) * 8, plain)):
        assert dispatch.for_shape(plain, 64, 1024, 132, np.array(pages)) == wanted, pages
    wide = dataclasses.replace(plain, format="k8v4")
    assert dispatch.for_shape(wide, 5000, 32, 132) == dataclasses.replace(wide, schedule="stream"), "no smaller CTAs"
    for key in (dataclasses.replace(plain, features=("window",)), dataclasses.replace(plain, head_dim=256),
                dataclasses.replace(plain, arithmetic="fp16", rows=8)):
        assert dispatch.for_shape(key, 5000, 32, 132) == key, "has no other CTAs"
    ampere = dataclasses.replace(plain, arch="ampere", target="sm_80", arithmetic="fp16", rows=8)
    assert dispatch.for_shape(ampere, 5000, 32, 108) == ampere
    assert kernels.pick("hopper", FORMATS["k2v2"], 128, torch.float16, 4)[0] == ("integer", 4)


@pytest.mark.parametrize("name, head_dim, message", [
    ("k8v4", 128, "part of a record of 16896 B, supported: up to 9216 B"),
    ("k4v4-g32", 128, "K group 32, supported: 128"),
    ("k4v4", 256, "head_dim 256, supported: 64, 96, 128")])
def test_smaller_ctas_say_what_they_do_not_serve(name, head_dim, message):
    with pytest.raises(ValueError, match=message):
        make_config("small", FORMATS[name], head_dim, "float16", 4)


def test_only_calls_of_up_to_four_rows_take_the_path():
    for rows in range(1, 20):
        for name, head_dim in (("k4v4", 128), ("k1v8-g32-vg64-bf16", 256)):
            path, _ = kernels.pick("hopper", FORMATS[name], head_dim, torch.float16, rows)[0]
            assert (path == "integer") == (rows <= config.ROWS)
    for fmt in (*(FORMATS[name] for name in BOOSTED), dataclasses.replace(FORMATS["k4v4"], window_v=128)):
        assert kernels.pick("hopper", fmt, 128, torch.float16, 4)[0] == ("integer", 4)
        assert kernels.pick("hopper", fmt, 128, torch.float16, 5)[0] == ("register", 8)
    assert PATHS["integer"].missing(FORMATS["k4tv4"], 128, torch.float16)
    assert kernels.pick("hopper", FORMATS["k4tv4"], 128, torch.float16, 4)[0] == ("register", 8)
    forced, _ = kernels.pick("hopper", FORMATS["k4v4"], 128, torch.float16, 8, "integer")
    assert forced == ("integer", 4), "more rows go in blocks"
    for name in ("k8v4", "k2v2", "k4v1", "kitty-pro"):  # head_dim 256 as others
        assert kernels.pick("hopper", FORMATS[name], 256, torch.float16, 4)[0] == ("integer", 4)


@pytest.mark.parametrize("name, head_dim, rows, want", [
    ("k4v4", 128, 16, ("register", 16)), ("k4v4", 128, 17, ("wgmma", 32)), ("k2tv4", 64, 32, ("wgmma", 32)),
    ("k4v4", 96, 32, ("register", 16)),
    ("k4v4", 128, 33, ("tile", 64)), ("k8v4", 128, 17, ("tile", 64)), ("k4v8", 128, 32, ("tile", 64)),
    ("k4v4", 256, 8, ("register", 8)), ("k4v4", 256, 16, ("register", 8)), ("k4v4", 256, 17, ("tile", 64)),
    ("k8v4", 256, 9, ("tile", 64)), ("kitty", 128, 64, ("register", 16)), ("k4v4", 128, 200, ("tile", 64))])
def test_two_blocks_of_rows_are_taken_where_they_are_faster(name, head_dim, rows, want):
    """The tile path pads to 64 rows: the wgmma path's 32, or two blocks of the register path's, take less time."""
    assert kernels.pick("hopper", FORMATS[name], head_dim, torch.float16, rows)[0] == want
    own = (want[0], kernels.pick("hopper", FORMATS[name], head_dim, torch.float16, rows, want[0])[0][1])
    assert own == want, "the same kernel as by name"
    assert kernels.pick("ampere", FORMATS["k4v4"], 128, torch.float16, 17)[0] == ("register", 64)


def test_unsupported_calls_say_why():
    for wrong, message in (({"rows": 8}, "rows: got 8, supported at head_dim 128: 4"),
                           ({"features": ("alibi",)}, "features: got alibi, supported: softcap, window")):
        with pytest.raises(ValueError, match=message):
            decode.decode_kernel(FORMATS["k4v4"], 128, "float16", path="integer", **{"rows": 4} | wrong)
    with pytest.raises(ValueError, match="supported: K per channel or boosted with V per token"):
        decode.decode_kernel(FORMATS["k4tv4"], 128, "float16", path="integer", rows=4)


@pytest.mark.parametrize("name, head_dim, path, warps, page_warps", [
    ("k4v4", 128, "integer", 12, 8), ("k2v2", 128, "integer", 12, 12), ("k4v2", 128, "integer", 12, 8),
    ("k4v4", 64, "integer", 12, 12), ("kitty", 128, "integer", 12, 12), ("k8v4", 128, "integer", 6, 6),
    ("k4v4", 128, "small", 3, 2), ("k2v2", 128, "small", 3, 3), ("k4v4", 128, "stream", 8, 8),
    ("k2v2", 128, "stream", 12, 12)])
def test_large_pages_leave_warps_to_16_bit_units(name, head_dim, path, warps, page_warps):
    cfg = make_config(path, FORMATS[name], head_dim, "float16", 4)
    assert (cfg.warps, cfg.page_warps) == (warps, page_warps)
