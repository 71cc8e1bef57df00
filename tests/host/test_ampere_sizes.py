"""Sizes and places of the Ampere kernels: what is loaded, held and written where, for every head_dim and row count."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import windowed

from lowbit_attn import KVCache, dispatch, kernels, layout
from lowbit_attn.formats import FORMATS

pytest.importorskip("tilelang", reason="the helpers live in kernel files that import tilelang")

from lowbit_attn.ampere import (  # noqa: E402
    codebook_values,
    codes,
    dequant,
    load,
    merge,
    mixed,
    mma,
    softmax,
    tokens,
)
from lowbit_attn.ampere import config as sizes  # noqa: E402

LANE = np.arange(32)
T = LANE % 4
TARGETS = kernels.ARCH_TARGETS["ampere"]


def configs(rows=sizes.ROWS, head_dims=sizes.HEAD_DIMS, names=("k4v4", "k2v2", "k8v8-g32", "k4tv4-g32", "kitty-pro")):
    """Register-path configurations of sm_80."""
    return [sizes.decode_config(FORMATS[name], d, "float16", "sm_80", "register", r)
            for name, d, r in itertools.product(names, head_dims, rows) if r in sizes.rows_of(d)]


@pytest.mark.parametrize("cfg", configs(), ids=lambda c: f"{c.k.bits}-{c.k.groups}-d{c.head_dim}-r{c.rows}")
def test_every_copy_is_made_once(cfg):
    """The threads of a ring bring every 16 bytes of a part, and of a tile of 16-bit tokens, to a place of its own."""
    member = np.arange(cfg.ring_threads)
    for accesses in (cfg.k.accesses, cfg.v.accesses, cfg.tile16_tokens * cfg.row_accesses):
        index = [i * cfg.ring_threads + member for i in range(-(-accesses // cfg.ring_threads))]
        index = np.concatenate(index)
        assert sorted(index[index < accesses]) == list(range(accesses))
    row, access = load.token_place(np.arange(cfg.tile16_tokens * cfg.row_accesses), cfg.row_accesses)
    assert row.max() == cfg.tile16_tokens - 1 and access.max() == cfg.row_accesses - 1
    place = load.swizzled(row, access, cfg.row_accesses)
    assert sorted(place) == list(range(len(place))) and len(place) <= cfg.slot_accesses


@pytest.mark.parametrize("cfg", configs(), ids=lambda c: f"{c.k.bits}-{c.k.groups}-d{c.head_dim}-r{c.rows}")
def test_every_row_has_one_place(cfg):
    """Blocks and row groups share out any number of rows; each element of O is one (row value, channel)."""
    for rows in (1, 5, 8, 9, 16, 17, 33, 64, 65, 200):
        groups = range(cfg.row_groups) if cfg.shares_pages else (0,)
        taken = []
        for block, group in itertools.product(range(-(-rows // cfg.rows)), groups):
            first = block * cfg.rows + group * cfg.warp_rows
            taken += range(first, first + max(0, min(cfg.warp_rows, rows - first)))
        assert taken == list(range(rows))
    at = np.arange(4 * cfg.o_tiles * cfg.columns)
    v, channel = softmax.row_value(cfg, at), 16 * (at // (4 * cfg.columns)) + 8 * (at % 4 // 2)
    assert len(set(zip(v, channel))) == len(at)
    assert (merge.own_output(cfg, channel // 8, v) == at).all()
    seen = [softmax.query_row(cfg, value, T) for value in range(cfg.row_values)]
    assert sorted(set(np.concatenate(seen))) == list(range(cfg.warp_rows))


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("rows", sizes.BOOK_ROWS)
@pytest.mark.parametrize("name", ("cq2", "cq4", "kcq4vcq2"))
def test_codebook_rows_have_their_columns(name, rows, head_dim):
    """Accumulators of a lane are of its own rows; over all lanes every channel of every row has a place."""
    cfg = sizes.decode_config(FORMATS[name], head_dim, "float16", "sm_80", "codebook", rows)
    columns = 2 * T[:, None] + np.arange(2)
    own = np.stack([softmax.query_row(cfg, softmax.row_value(cfg, i), T) for i in range(2)], 1)
    assert (own == columns // cfg.columns_a_row).all()
    held = {(int(row), int(channel)) for i in range(4 * cfg.packed_o_tiles) for row, channel in zip(
        softmax.query_row(cfg, softmax.row_value(cfg, i), T), codebook_values.output_channel(cfg, i // 4, i % 4, LANE))}
    assert held == set(itertools.product(range(rows), range(head_dim)))


def test_sizes_of_shared_pages():
    """64 rows: four warps of 16 through one ring, eight of 8 at head_dim 256; fewer rows: a ring for each warp."""
    for cfg in configs():
        shape = (cfg.row_groups, cfg.warp_rows, cfg.rings, cfg.ring_threads)
        if cfg.rows == 64:
            assert shape == ((8, 8, 1, 256) if cfg.head_dim == 256 else (4, 16, 1, 128))
            assert cfg.warps == cfg.row_groups and 2 * cfg.token_buffers <= cfg.slots
        else:
            assert shape == (1, cfg.rows, cfg.warps, 32) and cfg.token_buffers == 1


@pytest.mark.parametrize("name, head_dim, rows, path, shapes", [
    ("k4v4", 128, 8, "register", ((8, 2), (4, 2), (12, 2))),
    ("k2v2", 128, 8, "register", ((12, 2), (8, 2), (12, 3))),
    ("k2v2-g32", 64, 8, "register", ((12, 3), (12, 2), (12, 3))),
    # 16 rows, and groups of K at head_dim 128, take more than 168 registers
    ("k2v2", 128, 16, "register", ((8, 3), (8, 2), (8, 3))),
    ("k2v2-g32", 128, 8, "register", ((8, 3), (8, 2), (8, 3))),
    ("k2v2", 96, 8, "register", ((8, 3), (8, 3), (8, 3))),
    ("k4v4", 128, 8, "tile", ((8, 2), (4, 2), (8, 3))),
])
def test_warps_and_slots(name, head_dim, rows, path, shapes):
    """On sm_80, sm_89 and sm_90: as many warps as registers and shared memory allow, then slots."""
    found = [sizes.decode_config(FORMATS[name], head_dim, "float16", target, path, rows) for target in TARGETS]
    assert tuple((cfg.warps, cfg.slots) for cfg in found) == shapes


def test_warps_stay_below_their_maximum(monkeypatch):
    monkeypatch.setattr(sizes, "MAX_WARPS", 8)
    assert max(cfg.warps for cfg in configs(rows=(8, 16))) == 8


def test_blocks_of_an_sm():
    """Two blocks of 64 rows fit an SM up to head_dim 128; a block of fewer rows takes an SM for itself."""
    for target, name, head_dim in itertools.product(TARGETS, ("k4v4", "k2v2"), (64, 96, 128, 256)):
        for rows in (8, 64):
            key = kernels.decode_key("ampere", target, "float16", head_dim, name, "register", rows)
            cfg = sizes.decode_config(FORMATS[name], head_dim, "float16", target, "register", rows)
            held = sizes.ctas_per_sm(key, "register")
            assert held * (cfg.shared_bytes + 1024) <= sizes.SM_SHARED_BYTES[target]
            assert held * cfg.threads * 256 <= 65_536 or held == 1
            if rows == 64:
                assert held == (1 if head_dim == 256 else 2)
                assert held * (cfg.shared_bytes + 1024) <= kernels.SMEM_LIMIT_BYTES[target] + 1024


@pytest.mark.parametrize("bits, rows", [(b, r) for b in (8, 4, 2, 1) for r in (64, 96, 128, 256) if (b, r) != (1, 96)])
def test_runs_of_codes_are_the_words_of_their_tiles(bits, rows):
    """Every run of row tiles that is loaded in one go: its words, and loads that stay within 16 bytes."""
    piece = sizes.Piece(0, 0, 0, rows, 32, bits, 1, False, "float16")
    per_word = layout.tiles_per_word(bits)
    for column_tile, count in itertools.product((0, 1), (2, 4, 8, piece.row_tiles)):
        if piece.row_tiles % count or count % per_word:
            continue
        for first in range(0, piece.row_tiles, count):
            words = layout.words_per_lane(16 * count, 16, bits)
            start, loaded = codes.code_word(piece, column_tile, first), math.gcd(4, words)
            assert start % loaded == 0
            want = {layout.code_slot(16 * tile + row8, 16 * column_tile, rows, bits)[0]
                    for tile in range(first, first + count) for row8 in (0, 8)}
            assert want == set(range(start, start + words))


@pytest.mark.parametrize("bits", (8, 4, 2, 1))
@pytest.mark.parametrize("rows", (64, 128))
def test_every_code_reaches_its_place_once(rows, bits):
    """pair_loads, with the definition of the A registers, inverts layout.code_slot for every width."""
    cols, seen = 64, set()
    if layout.words_per_lane(rows, 32, bits) < layout.BLOCK_WORDS:
        pytest.skip("a pair of column tiles does not fill a 16-byte load")
    for pair in range(cols // 32):
        for block, tiles in dequant.pair_loads(pair, rows, bits):
            for tile in tiles:
                for r, source in enumerate(tile.registers):
                    for e in (0, 1):
                        row, col = 16 * tile.row_tile + 8 * (r % 2), 16 * tile.column_tile + 8 * (r // 2) + e
                        word, lane, byte, slot = layout.code_slot(row + 5, col + 6, rows, bits)  # lane 4 * 5 + 3
                        assert (word, lane) == (4 * block + source.word, 23)
                        assert 8 * byte + bits * slot == source.shift + source.exponent + 16 * e
                        assert source.mask >> source.exponent & 0xFFFF == (1 << bits) - 1
                        assert source.exponent + bits <= 10  # 1024 + code * 2**exponent is exact in fp16
                        seen.add((row, col))
    assert len(seen) == (rows // 8) * (cols // 4)


@pytest.mark.parametrize("row_accesses", (8, 12, 16, 32))
def test_swizzle_is_a_bijection_without_bank_conflicts(row_accesses):
    row, access = np.divmod(np.arange(32 * row_accesses), row_accesses)
    place = load.swizzled(row, access, row_accesses)
    assert sorted(place) == list(range(32 * row_accesses))
    for lanes in np.split(LANE, 4):  # of one phase
        for where in (mma.row_access(LANE, 1, 2, row_accesses), mma.row_access_transposed(LANE, 1, 2, row_accesses)):
            assert len(set(where[lanes] % 8)) == 8


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("target", kernels.ARCH_TARGETS["ampere"])
def test_config_fits_the_target(target, head_dim):
    cfg = sizes.decode_config(FORMATS["k4v4"], head_dim, "float16", target, "tile", 8)
    assert cfg.shared_bytes <= kernels.SMEM_LIMIT_BYTES[target]
    assert cfg.slots >= 2 and cfg.tile16_tokens == 32
    assert cfg.k.accesses * 16 + cfg.v.accesses * 16 == FORMATS["k4v4"].record_bytes(head_dim)


@pytest.mark.parametrize("head_dim", sizes.HEAD_DIMS)
@pytest.mark.parametrize("rows", sizes.ROWS)
@pytest.mark.parametrize("target", kernels.ARCH_TARGETS["ampere"])
def test_every_register_format_has_a_configuration(target, rows, head_dim):
    if rows not in sizes.rows_of(head_dim):
        pytest.skip("no such kernels")
    for k_bits, per_token, v_bits in itertools.product((8, 4, 2, 1), ("", "t"), (8, 4, 2, 1)):
        for groups in ("", "-g32-vg32", "-g64-vg64-bf16"):
            name = f"k{k_bits}{per_token}v{v_bits}{groups}"
            if head_dim == 96 and (v_bits == 1 or "64" in groups):
                continue
            cfg = sizes.decode_config(FORMATS[name], head_dim, "bfloat16", target, "register", rows)
            assert cfg.shared_bytes <= kernels.SMEM_LIMIT_BYTES[target] and cfg.slots >= 2
            assert cfg.rows == rows // (1 + halved(cfg))
            assert cfg.shares_pages or cfg.merge_floats <= cfg.ring_floats  # a warp's ring holds its O at the end
            assert cfg.tile16_tokens * cfg.row_accesses <= cfg.slot_accesses
            assert {cfg.k.groups, cfg.v.groups} <= {1, 2, 3, 4, 8}
            assert kernels.checks(kernels.decode_key("ampere", target, "bfloat16", head_dim, name, "register",
                                                    rows)).smem_bytes == cfg.shared_bytes


def halved(cfg) -> bool:
    """64 rows of head_dim 256 on sm_89: q' and two slots of 8-bit codes with several groups of metadata do not fit."""
    slot = max(cfg.k.accesses, cfg.v.accesses) * sizes.ACCESS_BYTES
    return cfg.shares_pages and cfg.head_dim == 256 and cfg.target == "sm_89" and 2 * slot + 2 * 64 * 256 > 101_376


@pytest.mark.parametrize("name", ("kitty-b16", "kitty-pro-vg32", "k4v4+w128", "k8v8+w256", "k1tv1+w128"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("target", kernels.ARCH_TARGETS["ampere"])
def test_a_third_page_is_shared_out(target, head_dim, name):
    """Every chunk of V belongs to one ring that has its logits, and fits the slot it is loaded into."""
    fmt = windowed.FORMATS[name]
    made = [sizes.decode_config(fmt, head_dim, "float16", target, "register", rows) for rows in sizes.rows_of(head_dim)]
    for cfg in made + [replace(made[0], warps=warps) for warps in (3, 6, 12)]:
        size, own, tiles = cfg.tile16_tokens, mixed.own_chunks(cfg), mixed.own_tiles(cfg)
        assert cfg.has_mixed and cfg.slots >= 2 and size * cfg.row_accesses <= cfg.slot_accesses
        walkers = range(mixed.active_rings(cfg))
        assert len(walkers) <= cfg.rings
        assert [w * own + i for w in walkers for i in range(own)] == list(range(mixed.chunks(cfg)))
        places = [mixed.place_of(cfg, ring) for ring in range(cfg.rings)]
        assert sorted(places) == list(range(cfg.rings))
        first_tiles = [int(tokens.first_tile(cfg, ring)) for ring in range(cfg.rings)]
        assert sorted(first_tiles) == list(range(cfg.rings))
        free = cfg.rings - len(walkers)  # rings without a chunk have the first tiles of tokens
        assert {r for r in range(cfg.rings) if first_tiles[r] < free} == {
            r for r in range(cfg.rings) if places[r] >= len(walkers)}
        count = 4 * tiles * cfg.columns  # accumulators that keep_own_logits moves to the front
        for walker, i in itertools.product(walkers, range(count)):
            token = softmax.token(cfg, walker * count + i, 0)
            assert token == walker * own * size + softmax.token(cfg, i, 0) < layout.PAGE_TOKENS
            assert softmax.row_value(cfg, walker * count + i) == softmax.row_value(cfg, i)


@pytest.mark.parametrize("arguments, message", [
    (("k2v4", 128, "float16", "sm_80", "tile", 8), "2-bit K"),
    (("k4tv4", 128, "float16", "sm_80", "tile", 8), "K per token"),
    (("k4v4-g32", 128, "float16", "sm_80", "tile", 8), "4 groups of K"),
    (("k4v4-vg64", 128, "float16", "sm_80", "tile", 8), "2 groups of V"),
    (("k4v4-bf16", 128, "float16", "sm_80", "tile", 8), "in bfloat16"),
    (("k4v4", 128, "bfloat16", "sm_80", "tile", 8), "dtype bfloat16"),
    (("k4v4", 128, "float16", "sm_80", "tile", 16), "16 rows"),
    (("k4v4", 96, "float16", "sm_80", "tile", 8), "head_dim 96"),
    (("kitty", 128, "float16", "sm_80", "tile", 8), "boosted channels of K"),
    (("k4v4", 160, "float16", "sm_80", "register", 8), "head_dim: got 160"),
    (("k4v4", 256, "float16", "sm_80", "register", 16), "rows: got 16, supported at head_dim 256: 8, 64"),
    (("k4v4", 64, "float16", "sm_80", "register", 8, ("alibi",)), "features: got 'alibi'"),
    (("k4v4", 128, "float32", "sm_80", "register", 8), "dtype: got 'float32'"),
    (("k4v4", 128, "float16", "sm_75", "register", 8), "target: got 'sm_75'"),
    (("k4v4", 128, "float16", "sm_80", "integer", 8), "path: got 'integer'"),
    (("k4v4", 128, "float16", "sm_80", "register", 24), "rows: got 24"),
])
def test_unsupported_arguments_are_named(arguments, message):
    name, *rest = arguments
    with pytest.raises(ValueError, match=message):
        sizes.decode_config(FORMATS[name], *rest)


@pytest.mark.parametrize("widths", ((1, 4), (1, 2), (2, 3), (4, 8)))
def test_other_boosts_are_named(widths):
    fmt = FORMATS["kitty"]
    made = replace(fmt, k=replace(fmt.k, bits=widths[0], boosted_bits=widths[1]))
    with pytest.raises(ValueError, match=f"K of {widths[0]} bits boosted to {widths[1]} .supported: 2 boosted to 4"):
        sizes.decode_config(made, 128, "float16", "sm_80", "register", 8)


@pytest.mark.parametrize("forced, sizes_of", (("ampere", ""), ("ampere-sm_80", "sm_80"), ("ampere-sm_89", "sm_89")))
def test_kernels_for_hopper_in_the_sizes_of_another_target(monkeypatch, forced, sizes_of):
    """LOWBIT_ATTN_ARCH names whose shared memory a kernel built for sm_90 is made for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", forced)
    dispatch._target_of.cache_clear()
    cache = KVCache("k4v4", 32, 8, 128, max_batch=1, max_seqlen=256)
    monkeypatch.setattr(dispatch, "target_of", lambda device: dispatch._target_of(0, forced))
    key, reasons = dispatch.kernel_of(torch.zeros(1, 1, 32, 128, dtype=torch.float16), cache, "register")
    dispatch._target_of.cache_clear()
    assert not reasons and (key.arch, key.target, key.sizes) == ("ampere", "sm_90", sizes_of)
    wanted = sizes.decode_config(FORMATS["k4v4"], 128, "float16", sizes_of or "sm_90", "register", key.rows)
    assert kernels.checks(key).smem_bytes == wanted.shared_bytes <= kernels.SMEM_LIMIT_BYTES[sizes_of or "sm_90"]
    assert kernels.ctas_per_sm(key) == wanted.ctas_per_sm
    assert (f"as_{sizes_of}" in key.name) == bool(sizes_of)


def test_no_sizes_of_an_unknown_target(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    dispatch._target_of.cache_clear()
    with pytest.raises(NotImplementedError, match="supported: hopper, ampere, ampere-sm_80, ampere-sm_89"):
        dispatch._target_of(0, "ampere-sm_75")
    dispatch._target_of.cache_clear()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("name", ("cq2", "cq4", "kcq4vcq2", "kcq2vcq4", "cq2-nonorm"))
@pytest.mark.parametrize("rows", sizes.BOOK_ROWS)
def test_codebooks_fit_shared_memory(name, head_dim, target, rows):
    """Beside rings of parts; 16-bit tokens and the merge then take the place of the codebooks."""
    cfg = sizes.decode_config(FORMATS[name], head_dim, "float16", target, "codebook", rows)
    assert cfg.shared_bytes <= kernels.SMEM_LIMIT_BYTES[target]
    assert cfg.is_phased == (target == "sm_89" and head_dim == 128)
    assert cfg.has_second_copy == (target != "sm_89" and head_dim == 64)
    assert cfg.uses_table == (target != "sm_89" and rows < 8 and cfg.k.vec_size == 4)
    assert cfg.table_slots // cfg.slots >= cfg.warps and cfg.merge_floats <= cfg.ring_floats
    assert cfg.chunks * cfg.chunk_tokens == layout.PAGE_TOKENS and cfg.warps * 32 == cfg.threads
    # a part's follower is of its page or the next one, and in a round of phases of the same or the next part of a page
    assert 2 <= cfg.chunk_slots <= (cfg.chunks if cfg.is_phased else 2 * cfg.chunks)
    for piece in cfg.pieces:
        assert cfg.code_accesses(piece) % LANE.size == 0 and cfg.code_accesses(piece) <= cfg.chunk_runs * LANE.size
