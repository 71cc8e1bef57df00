"""The Hopper register path without a GPU: what each lane reads, its private ring, its walk, its compile-time plan.

Lanes are simulated with the functions that the kernel itself traces; the accumulator and operand places of m16n8k16
are written here a second time from the PTX manual.
"""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from lowbit_attn import layout
from lowbit_attn.formats import FORMATS, packing
from lowbit_attn.formats.kitty import Boosted

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from lowbit_attn.hopper import (
    PATHS,  # noqa: E402
    decode,  # noqa: E402
)
from lowbit_attn.hopper.arith.fp16 import boost, operands  # noqa: E402
from lowbit_attn.hopper.arith.fp16 import config as fp16  # noqa: E402
from lowbit_attn.hopper.common import tuning  # noqa: E402
from lowbit_attn.hopper.config import make_config  # noqa: E402
from lowbit_attn.hopper.schedule.config import SPLITS  # noqa: E402
from lowbit_attn.hopper.warp import config, fetch, mixed, plan  # noqa: E402

NAMES = ("k4v4", "k8v8", "k2v2", "k1v1", "k4v2-g32-vg32", "k2v8-g64-vg64-bf16", "k8v1-g32", "k1v4-g64-bf16",
         "k4tv4", "k2tv1-g32-vg64", "k8tv2-g64-vg32-bf16", "k1tv8-g32")
BOOSTED = ("kitty", "kitty-pro", "kitty-bf16", "kitty-pro-vg64", "kitty-b8", "kitty-b40-bf16", "kitty-b64",
           "kitty-b256")
HEAD_DIMS = (64, 96, 128, 256)
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def value(x) -> int:
    """A Python int from one, or from a DSL integer."""
    return int(getattr(x, "value", x))


def served(names, head_dims=HEAD_DIMS) -> list[tuple[str, int]]:
    """(name, head_dim) of the pages that exist: head_dim 96 has no 1-bit V and only channel groups that divide it."""
    def exists(name, head_dim):
        try:
            return bool(FORMATS[name].record(head_dim))
        except ValueError:
            return False

    return [pair for pair in itertools.product(names, head_dims) if exists(*pair)]


def most_rows(head_dim: int) -> int:
    return fp16.MAX_ROWS.get(head_dim, 16)


def halves(words: np.ndarray, storage: str) -> np.ndarray:
    """uint32 [...] -> the two 16-bit values of each as fp32 [..., 2]."""
    bits = torch.from_numpy(words.astype(np.uint32).view(np.int16).reshape(*words.shape, 2))
    return bits.view(getattr(torch, storage)).float().numpy()


def lane_words(side: config.SidePlan, part: np.ndarray, first_tile: int, tiles: int) -> dict[int, np.ndarray]:
    """What fetch.codes brings each lane: word -> uint32 [32]."""
    first, count = side.words_of(first_tile), side.words_of(tiles)
    width = math.gcd(count, layout.BLOCK_WORDS)
    plane = part[side.codes : side.codes + layout.plane_bytes(side.rows, side.cols, side.bits)]
    accesses = plane.view(np.uint32).reshape(-1, width)
    assert first % width == 0 and count % width == 0
    return {word + i: accesses[side.code_access(word, width, LANES), i]
            for word in range(first, first + count, width) for i in range(width)}


def rebuilt_codes(side: config.SidePlan, part: np.ndarray, chunk: int) -> np.ndarray:
    """The A operands of all tiles, read ``chunk`` row tiles at a time, without their powers of two."""
    codes = np.full((side.rows, side.cols), np.nan, np.float32)
    for ct, first in itertools.product(range(side.col_tiles), range(0, side.row_tiles, chunk)):
        words = lane_words(side, part, ct * side.row_tiles + first, chunk)
        for rt in range(first, first + chunk):
            for register, (word, shift, mask) in enumerate(operands.register_sources(side, ct * side.row_tiles + rt)):
                row8, col8 = register % 2, register // 2  # a0..a3: rows g, g + 8; columns 2t.., then 2t + 8..
                operand = halves((words[word] >> np.uint32(shift)) & np.uint32(mask), "float16")
                for e in (0, 1):
                    codes[16 * rt + 8 * row8 + G, 16 * ct + 8 * col8 + 2 * T + e] = (
                        operand[:, e] * 2.0 ** (24 - side.power(rt, row8)))
    return codes


def channel_metadata(side: config.SidePlan, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, zero) [rows, cols] from channel_access: rows are tokens."""
    plane = part[side.meta : side.meta + 4 * side.groups * side.cols]
    accesses = plane.view(np.uint32).reshape(-1, 2)
    found = np.full((2, side.rows, side.cols), np.nan, np.float32)
    for is_zero, group, ct, col8 in itertools.product((0, 1), range(side.groups), range(side.col_tiles), (0, 1)):
        pair = halves(accesses[side.channel_access(group, is_zero, ct, T), col8], side.storage)
        for e in (0, 1):
            rows = slice(group * side.group_size, (group + 1) * side.group_size)
            found[is_zero, rows, 16 * ct + 8 * col8 + 2 * T + e] = pair[:, e, None]
    return found[0], found[1]


def token_metadata(side: config.SidePlan, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scale, zero) [tokens, channels] from operands.token_access."""
    accesses = part[side.meta :].view(np.uint32).reshape(-1, 2)
    found = np.full((2, layout.PAGE_TOKENS, side.head_dim), np.nan, np.float32)
    for group, tile, half in itertools.product(range(side.groups), range(8), (0, 1)):
        pair = halves(accesses[operands.token_access(group, tile, G), half], side.storage)
        for is_zero in (0, 1):
            channels = slice(group * side.group_size, (group + 1) * side.group_size)
            found[is_zero, 16 * tile + 8 * half + G, channels] = pair[:, is_zero, None]
    return found[0], found[1]


@pytest.mark.parametrize("name, head_dim", served((*NAMES, "k4v4-g32", "k8tv2-g32", "k1v8-vg32")))
def test_lanes_rebuild_both_sides(name, head_dim):
    fmt = FORMATS[name]
    k, v = torch.randn(2, 1, 128, head_dim)
    record = fmt.quantize(k, v)
    cfg = make_config("register", fmt, head_dim, "float16", most_rows(head_dim))
    for side, want in ((cfg.k, fmt.dequantize_k(record, head_dim)), (cfg.v, fmt.dequantize_v(record, head_dim))):
        part = record[0, side.start : side.start + side.nbytes].numpy()
        for chunk in {side.row_tiles, fp16.chunk_tiles(cfg) if side is cfg.k else side.row_tiles}:
            codes = rebuilt_codes(side, part, chunk)
            codes = codes.T if side.transposed else codes  # [tokens, channels]
            scale, zero = (token_metadata if side.is_per_token else channel_metadata)(side, part)
            assert np.array_equal(codes * scale + zero, want[0].numpy())


@pytest.mark.parametrize("name, head_dim", served(("k4v4", "k2v2", "k8v1", "kitty", "k4v2-bf16"), (64, 96, 128)))
def test_halves_of_v_are_halves_of_its_tokens(name, head_dim):
    """Bytes before ``middle`` hold the codes of the first 64 tokens and nothing of the others."""
    cfg = make_config("integer", FORMATS[name], head_dim, "float16", 4)
    side, (part, other) = cfg.v, torch.randint(0, 256, (2, cfg.v.nbytes), dtype=torch.uint8).numpy()
    assert cfg.has_halves and side.middle % fetch.UNIT_BYTES == 0
    mixed = np.concatenate([part[: side.middle], other[side.middle :]])
    codes, first, second = (rebuilt_codes(side, x, side.row_tiles) for x in (mixed, part, other))
    assert np.array_equal(codes[:, :64], first[:, :64]) and np.array_equal(codes[:, 64:], second[:, 64:])
    assert not make_config("stream", FORMATS[name], head_dim, "float16", 4).has_halves


def boosted_page(name: str, head_dim: int):
    """(config, the K part of a page, its values [128, head_dim])."""
    fmt = FORMATS[name]
    k, v = torch.randn(2, 1, 128, head_dim) * (0.1 + 5 * torch.rand(head_dim))
    record = fmt.quantize(k, v)
    cfg = make_config("register", fmt, head_dim, "float16", most_rows(head_dim))
    return cfg, record[0, : cfg.k.nbytes].numpy(), fmt.dequantize_k(record, head_dim)[0].numpy()


def gathered(cfg: config.WarpConfig, part: np.ndarray, step: int) -> tuple[np.ndarray, list]:
    """(channel of each lane's slot, [col8] words of scales) of boost.gather."""
    index = part[cfg.boost.high.index : cfg.boost.high.index + cfg.boost.cols]
    channel = index[layout.TILE * step + LANES % layout.TILE].astype(np.int64)
    own = part[cfg.k.meta :].view(np.uint16)[layout.channel_meta_index(channel)].astype(np.uint32)
    pair = own | own[LANES ^ 1] << np.uint32(16)
    lanes = [np.array([value(boost.slot_lane(int(t), col8)) for t in T]) for col8 in (0, 1)]
    return channel, [pair[lanes[col8]] if boost.in_use(cfg, step, col8) else None for col8 in (0, 1)]


@pytest.mark.parametrize("name, head_dim", served(BOOSTED))
def test_slots_bring_the_other_bits_and_the_scales_of_their_channels(name, head_dim):
    cfg, part, _ = boosted_page(name, head_dim)
    fmt, high = FORMATS[name], cfg.boost
    planes = {p.name: torch.from_numpy(part[None, p.offset : p.offset + p.nbytes]) for p in
              fmt.record(head_dim).k_planes}
    whole = packing.unpack_codes(planes["codes"], 128, head_dim, 2)[0].numpy()
    assert np.array_equal(rebuilt_codes(cfg.k, part, cfg.k.row_tiles), whole)
    codes, used = rebuilt_codes(high, part, high.row_tiles), cfg.boost.high.channels
    assert np.array_equal(codes, packing.unpack_codes(planes["high"], 128, high.cols, 2)[0].numpy())
    assert not codes[:, used:].any() and cfg.boost.col_tiles * layout.TILE == high.cols
    scale = channel_metadata(cfg.k, part)[0][0]
    for step in range(cfg.boost.col_tiles):
        channel, words = gathered(cfg, part, step)
        slots = layout.TILE * step + np.arange(layout.TILE)
        # ldmatrix: row i of matrix 2 * block + col8 has the address of lane 16 * block + 8 * col8 + i
        assert np.array_equal(channel[:16], channel[16:]) and (channel < head_dim).all()
        assert np.array_equal(channel[:16], planes["index"][0].numpy()[slots])
        for col8, word in enumerate(words):
            assert (word is None) == (layout.TILE * step + 8 * col8 >= used)
            for e in (0, 1) if word is not None else ():
                assert np.array_equal(halves(word, cfg.k.storage)[:, e], scale[channel[8 * col8 + 2 * T + e]])


@pytest.mark.parametrize("name, head_dim", served(BOOSTED, (64, 128, 256)))
def test_logits_of_boosted_pages_with_centred_rounding(name, head_dim):
    """What boost.add and scores.per_channel sum, in fp64 but for the rounding of q' s."""
    cfg, part, k = boosted_page(name, head_dim)
    q = np.float16(np.random.default_rng(0).uniform(-4094, 4094, head_dim)).astype(np.float64)  # q' < 2^12
    (scale, zero), used = (x[0].astype(np.float64) for x in channel_metadata(cfg.k, part)), cfg.boost.high.channels
    up = 2.0 ** (2 - np.ceil(np.log2(scale.max())))
    channel = np.concatenate([gathered(cfg, part, step)[0][:16] for step in range(cfg.boost.col_tiles)])[:used]
    dense = np.float16(q * scale * up).astype(np.float64)
    high = np.float16(config.BOOST_WEIGHT * q[channel] * scale[channel] * up).astype(np.float64)
    is_normal = np.abs(dense[channel]) >= 2.0**-14
    assert np.isfinite(high).all() and is_normal.mean() > 0.9
    assert np.array_equal(high[is_normal], config.BOOST_WEIGHT * dense[channel][is_normal])
    low_codes = rebuilt_codes(cfg.k, part, cfg.k.row_tiles).astype(np.float64)
    high_codes = rebuilt_codes(cfg.boost, part, cfg.boost.row_tiles)[:, :used].astype(np.float64)
    s = (low_codes @ dense + high_codes @ high) / up + q @ zero
    sums = q @ scale + config.BOOST_WEIGHT * (q[channel] @ scale[channel])
    s += cfg.k.steps / 2 * (sums - (dense.sum() + high.sum()) / up)
    error = dense / up - q * scale  # of a rounded product: it meets code - N / 2, N = 3 or 15
    levels = np.full(head_dim, 3.0)
    levels[channel] = 15
    all_codes = low_codes.copy()
    all_codes[:, channel] += config.BOOST_WEIGHT * high_codes
    want = k.astype(np.float64) @ q + (all_codes - levels / 2) @ error
    assert np.allclose(s, want, rtol=0, atol=1e-6 * np.abs(k @ q).max())


@pytest.mark.parametrize("name", ("kitty", "kitty-b0"))
def test_without_boosted_channels_the_kernel_is_that_of_uniform_k(name):
    cfg = make_config("register", FORMATS[name], 128, "float16", 8)
    same = make_config("register", dataclasses.replace(FORMATS["k2v2"], window_v=128), 128, "float16", 8)
    assert (cfg == same) == (name == "kitty-b0")


@pytest.mark.parametrize("bits, boosted_bits, words", [(1, 2, "1 bits over 1"), (4, 8, "4 bits over 4"),
                                                       (2, 3, "1 bits over 2")])
def test_other_boosts_are_refused(bits, boosted_bits, words):
    fmt = dataclasses.replace(FORMATS["kitty"], k=Boosted(bits, boosted_bits, channels=32))
    with pytest.raises(ValueError, match=f"boosted K: got {words}, supported: 2 over 2"):
        plan.make_config(fmt, 128, "float16", 8, fp16.FP16, SPLITS)


@pytest.mark.parametrize("name, head_dim", served(("k8tv8-g32", "k4tv4-g32", "k2tv2-g32", "k1tv1-g32"), (64, 96, 128)))
def test_channel_groups_of_keys_lie_whole_blocks_apart(name, head_dim):
    cfg = make_config("register", FORMATS[name], head_dim, "float16", 16)
    side, chunk = cfg.k, fp16.chunk_tiles(cfg)
    assert fp16.loops_over_groups(cfg)
    group_tiles = side.group_size // layout.TILE * side.row_tiles
    blocks, rest = divmod(side.words_of(group_tiles), layout.BLOCK_WORDS)
    assert rest == 0
    width = min(side.words_of(chunk), layout.BLOCK_WORDS)
    for j, tile in itertools.product(range(side.groups), range(0, group_tiles, chunk)):
        skipped = side.code_access(side.words_of(tile), width, LANES) + j * blocks * side.block_accesses(width)
        want = side.code_access(side.words_of(j * group_tiles + tile), width, LANES)
        assert np.array_equal(skipped, want)


def test_metadata_share_of_the_maximum_reads_every_word_once():
    for name in ("k4v4", "k4v4-vg32"):
        side = make_config("register", FORMATS[name], 128, "float16", 8).v
        accesses = side.groups * layout.PAGE_TOKENS // layout.BLOCK_WORDS
        read = [first + lane for first in range(0, accesses, config.WARP) for lane in range(config.WARP)]
        assert sorted(read) == list(range((side.nbytes - side.meta) // 16))


@pytest.mark.parametrize("name, head_dim", served(("k4v4", "k4v4-g32", "kitty-b40-bf16")))
def test_the_warp_reads_all_scales_of_a_token_group_and_nothing_else(name, head_dim):
    cfg, part, _ = boosted_page(name, head_dim)
    side, plane = cfg.k, part[cfg.k.meta :]
    wide = plane[: len(plane) // config.META_BYTES * config.META_BYTES].view(np.uint16).reshape(-1, 4)
    for group in range(side.groups):
        scales = plane.view(np.uint16)[2 * group * head_dim :][:head_dim]
        found = [wide[index] for lane in range(config.WARP) for index in operands.scale_accesses(side, group, lane)]
        assert set(np.concatenate(found)) == set(scales)


@pytest.mark.parametrize("name, head_dim", [("k4v4", 128), ("k2v2", 128), ("k1v1", 64), ("k8v8", 128), ("k8v4", 256)])
def test_private_ring_neither_hangs_nor_mixes_pieces(name, head_dim):
    cfg = make_config("register", FORMATS[name], head_dim, "float16", 8)
    for slots, count in itertools.product(range(2, 9), (0, 1, 2, 3, 31, 32, 33, 70)):
        cfg = dataclasses.replace(cfg, slots=slots)
        fills, content, window = [0] * slots, [None] * slots, 0
        for n in range(slots):
            page, side = fetch.part_of(n)
            if page < count:
                fills[n], content[n] = 1, (page, side)
        slot, phase = 0, 0
        for page, side in itertools.product(range(count), (0, 1)):
            assert content[slot] == (page, side)
            assert fills[slot] % 2 != phase, "the wait would not pass, or would pass a phase too early"
            ahead, later_side = fetch.part_of(side + slots)
            if page + ahead < count:
                if later_side == 0 and (page + ahead) % config.WARP == 0:
                    window = (page + ahead) // config.WARP
                assert window == (page + ahead) // config.WARP, "page id of another window"
                fills[slot], content[slot] = fills[slot] + 1, (page + ahead, later_side)
            slot, phase = (value(x) for x in fetch.advance(cfg, slot, phase))


@pytest.mark.parametrize("name, head_dim", served(("k8v8", "k4v4", "k2v2", "k1v1", "kitty-pro", "k1tv2-g64")))
def test_codes_of_a_row_tile_stand_where_those_of_the_first_would(name, head_dim):
    cfg, part, _ = boosted_page(name, head_dim)
    for side in [cfg.k] + ([cfg.boost] if cfg.boost else []):
        n, width = layout.tiles_per_word(side.bits), max(1, side.words_of(1))
        plane = part[side.codes : side.codes + layout.plane_bytes(side.rows, side.cols, side.bits)]
        accesses = plane.view(np.uint32).reshape(-1, width)
        for ct, tile in itertools.product(range(side.col_tiles), range(side.row_tiles)):
            first, whole = ct * side.row_tiles, lane_words(side, part, ct * side.row_tiles, side.row_tiles)
            values = accesses[value(mixed.tile_access(side, first, tile, width)) + side.code_access(0, width, LANES)]
            down = np.uint32(mixed.tile_shift(side, tile))
            for register, (word, shift, mask) in enumerate(operands.register_sources(side, first)):
                got = values[:, word - side.words_of(first)] >> down >> np.uint32(shift) & np.uint32(mask)
                at, want_shift, want_mask = operands.register_sources(side, first + tile)[register]
                want = whole[at] >> np.uint32(want_shift) & np.uint32(want_mask)
                power = side.power(tile, register % 2) - side.power(0, register % 2)
                assert np.array_equal(got << np.uint32(power), want) and (n > 1 or down == 0)


def test_only_formats_with_a_longer_window_of_v_have_the_third_segment():
    longer = dataclasses.replace(FORMATS["k4v4"], window_v=128)
    same = dataclasses.replace(longer, window_k=128)
    found = [make_config("register", fmt, 128, "float16", 8) for fmt in (FORMATS["k4v4"], same, longer)]
    assert [cfg.has_mixed for cfg in found] == [False, False, True]


def test_query_columns_are_the_accumulators_columns():
    for blocks in (1, 2):
        cfg = make_config("register", FORMATS["k4v4"], 128, "float16", 8 * blocks)
        assert cfg.lane_rows == 2 * blocks
        rows = {(t, column): cfg.arithmetic.column_row(t, column) for t in range(4) for column in range(cfg.lane_rows)}
        assert sorted(rows.values()) == list(range(8 * blocks))
        assert all(row == 8 * (column // 2) + 2 * t + column % 2 for (t, column), row in rows.items())


@pytest.mark.parametrize("rows", (8, 16))
@pytest.mark.parametrize("name, head_dim", served((*NAMES, *BOOSTED, "k8v4", "k2v2", "k8v8-g32-vg32",
                                                   "k8tv8-g32-vg32")))
def test_shared_memory_plan(name, rows, head_dim, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    if rows > most_rows(head_dim):
        with pytest.raises(ValueError, match="rows: got 16, supported at head_dim 256: 8"):
            make_config("register", FORMATS[name], head_dim, "float16", rows)
        return
    cfg = make_config("register", FORMATS[name], head_dim, "float16", rows)
    assert cfg.warps >= (3 if head_dim == 256 else 4) and cfg.slots >= tuning.MIN_SLOTS
    assert cfg.smem_bytes <= plan.SMEM_LIMIT
    assert decode.kernel_of(cfg).storage().size_in_bytes() == cfg.smem_bytes
    with pytest.raises(ValueError, match="shared memory"):
        plan.check(dataclasses.replace(cfg, slots=64))
    with pytest.raises(ValueError, match="16-bit unit"):
        plan.check(dataclasses.replace(cfg, slots=0))


def test_unsupported_calls_say_why():
    with pytest.raises(ValueError, match="rows: got 12"):
        decode.decode_kernel(FORMATS["k4v4"], 128, "float16", path="register", rows=12)
    with pytest.raises(ValueError, match="rows: got 16, supported at head_dim 256: 8"):
        decode.decode_kernel(FORMATS["k4v4"], 256, "float16", path="register", rows=16)
    with pytest.raises(ValueError, match="features: got alibi, supported: softcap, window"):
        make_config("register", FORMATS["k4v4"], 128, "float16", 8, features=("alibi",))
    with pytest.raises(ValueError, match="path: got 'mma'"):
        decode.decode_kernel(FORMATS["k4v4"], 128, "float16", path="mma")
    later = dataclasses.replace(FORMATS["k4v4"], window_v=128)
    assert not PATHS["register"].missing(later, 128, torch.float16)
    assert not PATHS["register"].missing(FORMATS["k1tv8-g32-vg64-bf16"], 64, torch.bfloat16)
    for name in ("kitty", "kitty-b0", "kitty-pro-vg64-bf16"):
        assert not PATHS["register"].missing(FORMATS[name], 128, torch.float16)
    for name in ("kitty", "kitty-pro-vg64-bf16"):
        with pytest.raises(ValueError, match=f"format {name}, supported: K per channel or per token with V per token"):
            decode.decode_kernel(FORMATS[name], 128, "float16", path="tile")
