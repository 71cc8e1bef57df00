"""The Hopper decode kernel without a GPU: its index arithmetic, its rings, its compile-time checks.

Lanes are simulated with the functions the kernel itself traces (config, walk, ring); tiles are read back
through WGMMA's canonical layout, written here a second time from the PTX manual.
"""

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch

from lowbit_attn import layout
from lowbit_attn.formats import FORMATS

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from lowbit_attn.hopper import config, decode, ring, walk  # noqa: E402
from lowbit_attn.hopper.config import GROUP_WARPS, TILE_N, UNIT_TOKENS, UNITS  # noqa: E402

FORMAT = FORMATS["k4v4"]
HEAD_DIMS = (64, 128)
CONFIGS = {d: config.make_config(FORMAT, d, "float16") for d in HEAD_DIMS}
LANES = np.arange(32)


def read_wgmma_tile(tile: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """K-major B operand with the 128-byte swizzle: address bits 4-6 are XORed with bits 7-9."""
    row, col = np.meshgrid(np.arange(rows), np.arange(cols), indexing="ij")
    return tile[swizzle_128b((col // 64) * rows * 128 + row * 128 + (col % 64) * 2) // 2]


def swizzle_128b(address):
    return address ^ ((address >> 3) & 0x70)


def stmatrix_x4(tile: np.ndarray, chunks: np.ndarray, registers: list[np.ndarray]) -> None:
    """registers[m]: [32 lanes, 2] fp16; lane 8m + r addresses row r of matrix m."""
    for m in range(4):
        for lane in range(32):
            chunk = chunks[8 * m + lane // 4]
            tile[8 * chunk + 2 * (lane % 4) : 8 * chunk + 2 * (lane % 4) + 2] = registers[m][lane]


def ldmatrix_x4(rows: np.ndarray, is_transposed: bool) -> list[np.ndarray]:
    """rows: [32 lanes, 8] fp16, the 16 bytes each lane addresses -> four registers [32 lanes, 2]."""
    matrices = rows.reshape(4, 8, 8)
    if is_transposed:
        matrices = matrices.transpose(0, 2, 1)
    return [m.reshape(32, 2) for m in matrices]


def dequant_part(side: config.SidePlan, part: np.ndarray) -> np.ndarray:
    """What four dequant warps write for one part of a record: the tile as fp16 in memory order."""
    tile = np.full(side.rows * side.cols, np.nan, np.float16)
    codes = part[: side.meta_offset].view(np.uint32)
    meta = part[side.meta_offset :].view(np.float16)
    t = LANES % 4
    for w in range(GROUP_WARPS):
        offsets = side.meta_offsets(w, t)
        assert all((o % side.meta_bytes == 0).all() for o in offsets)
        row, col8 = config.lane_place(LANES)
        for col_tile, row_tile, parts in side.registers():
            registers = []
            for c8, word, shift, position in parts:
                words = codes[layout.word_offset(w * side.warp_words + word, LANES) // 4] >> np.uint32(shift)
                halves = np.stack(((words >> position) & 15, (words >> (16 + position)) & 15), -1)
                at = 2 * side.meta_words()[2 * col_tile + c8]
                low, high = (np.stack([meta[o // 2 + at + i] for i in (0, 1)], -1).astype(float) for o in offsets)
                scale, zero = (low, high) if not side.transposed else np.stack((low, high), -1).transpose(1, 0, 2)
                registers.append((halves * scale + zero).astype(np.float16))
            chunks = config.tile_chunk(row, (w * side.warp_cols + col_tile) * 2 + col8, side.rows)
            stmatrix_x4(tile, chunks + row_tile * config.tile_chunk(16, 0, side.rows), registers)
    return tile


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ("k", "v"))
def test_dequant_lanes_rebuild_the_matrix(head_dim, name):
    torch.manual_seed(head_dim)
    k, v = torch.randn(2, 1, 128, head_dim)
    record = FORMAT.quantize(k, v)
    side = getattr(CONFIGS[head_dim], name)
    part = record[0, side.part_offset : side.part_offset + side.part_bytes].numpy()
    got = read_wgmma_tile(dequant_part(side, part), side.rows, side.cols)
    want = (FORMAT.dequantize_k if name == "k" else FORMAT.dequantize_v)(record, head_dim)[0].numpy()
    want = want.T if side.transposed else want
    # code * scale is exact in fp32, so the reference's fp32 sum rounds as the fused fp16 step up to one ulp of fp32
    assert np.abs(got.astype(np.float32) - want).max() <= np.abs(want).max() * 2.0**-11
    assert np.mean(got == want.astype(np.float16)) > 0.999


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ("k", "v"))
def test_plain_units_rebuild_the_matrix(head_dim, name):
    cfg = CONFIGS[head_dim]
    side, live = getattr(cfg, name), 77
    source = np.random.default_rng(0).standard_normal((TILE_N, head_dim)).astype(np.float16)
    source[live:] = np.nan
    tile = np.full(side.rows * side.cols, np.inf, np.float16)
    row, col8 = config.lane_place(LANES)
    row8 = row // 8
    for u, w, token_tile, j in itertools.product(range(UNITS), range(GROUP_WARPS), range(UNIT_TOKENS // 16),
                                                 range(head_dim // 64)):
        channel_tile, token8 = w + GROUP_WARPS * j, u * 4 + 2 * token_tile
        staged = source[u * UNIT_TOKENS : (u + 1) * UNIT_TOKENS].reshape(UNIT_TOKENS, -1, 8)
        if side.transposed:
            registers = ldmatrix_x4(staged[token_tile * 16 + col8 * 8 + LANES % 8, 2 * channel_tile + row8], True)
            for m in range(4):
                token = token8 * 8 + 8 * config.matrix_place(m)[1] + 2 * (LANES % 4)
                registers[m] = np.where(np.stack((token, token + 1), -1) < live, registers[m], np.float16(0))
            chunks = config.tile_chunk(channel_tile * 16 + row, token8 + col8, side.rows)
        else:
            registers = ldmatrix_x4(staged[token_tile * 16 + row, 2 * channel_tile + col8], False)
            chunks = config.tile_chunk(token8 * 8 + row, 2 * channel_tile + col8, side.rows)
        stmatrix_x4(tile, chunks, registers)
    got = read_wgmma_tile(tile, side.rows, side.cols)
    got = got.T if side.transposed else got
    assert np.array_equal(got[:live], source[:live])
    assert not side.transposed or (got[live:] == 0).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tile_chunk_is_the_dsl_layout(head_dim, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    import cutlass.cute as cute

    found = {}

    def sample():
        rng = random.Random(0)
        for name, _ in itertools.product("kv", range(64)):
            side = getattr(CONFIGS[head_dim], name)
            at = rng.randrange(side.rows), 8 * rng.randrange(side.cols // 8), rng.randrange(2)
            tile = decode.tile_layout(side, 2)
            assert str(tile.inner) == "S<3,4,3>"  # of byte addresses: a property of the pointer, not of the layout
            found[name, at] = tile.outer(at)

    @cute.jit
    def evaluate():
        sample()

    evaluate()
    for (name, (row, col, stage)), offset in found.items():
        side = getattr(CONFIGS[head_dim], name)
        want = stage * side.rows * side.cols + 8 * config.tile_chunk(row, col // 8, side.rows)
        assert swizzle_128b(2 * int(offset)) == 2 * want, (name, row, col, stage)


class Barrier:
    """An mbarrier: ``count`` arrivals and zero outstanding bytes complete a phase."""

    def __init__(self, count):
        self.count, self.pending, self.phases = count, count, 0

    def arrive(self):
        self.pending -= 1
        assert self.pending >= 0, "more arrivals than the phase expects"
        if self.pending == 0:
            self.phases, self.pending = self.phases + 1, self.count

    def passes(self, parity):
        return self.phases % 2 != parity


class RingModel:
    """Barriers of one ring and the fill that each stage holds; every wait must see exactly its own fill."""

    def __init__(self, stages, full, empty):
        self.names = ring.Ring(None, None, stages)
        self.full = [Barrier(full) for _ in range(stages)]
        self.empty = [Barrier(empty) for _ in range(stages)]
        self.content = [None] * stages

    def at(self, fill):
        return ring.stage(self.names, ring.Uint32(fill)).value, ring.parity(self.names, ring.Uint32(fill)).value

    def wait(self, kind, fill):
        stage, parity = self.at(fill)
        barrier, skip = (self.full, 0) if kind == "full" else (self.empty, 1)
        while not barrier[stage].passes(parity ^ skip):
            yield
        done = fill // self.names.stages + (1 - skip)
        assert barrier[stage].phases == done, f"{kind} of fill {fill}: phase {barrier[stage].phases}, not {done}"
        return stage


def load_role(pages, plain, packed):
    for fill in range(pages + plain * UNITS):
        stage = yield from packed.wait("empty", fill)
        packed.content[stage] = fill
        packed.full[stage].arrive()


def dequant_role(pages, plain, packed, tiles, seen):
    fill = 0
    for tile in range(pages + plain):
        stage = yield from tiles.wait("empty", tile)
        for _ in range(1 if tile < pages else UNITS):
            piece = yield from packed.wait("full", fill)
            assert packed.content[piece] == fill
            yield
            packed.empty[piece].arrive()
            fill += 1
        seen[tile] = seen.get(tile, 0) + 1
        tiles.content[stage] = tile
        tiles.full[stage].arrive()


def mma_role(pages, plain, k_tiles, v_tiles):
    last_v = None  # O of a tile is waited for together with S of the next
    for tile in range(pages + plain):
        k_stage = yield from k_tiles.wait("full", tile)
        yield
        assert k_tiles.content[k_stage] == tile
        k_tiles.empty[k_stage].arrive()
        if tile > 0:
            assert v_tiles.content[last_v] == tile - 1
            v_tiles.empty[last_v].arrive()
        last_v = yield from v_tiles.wait("full", tile)
        yield


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("pages, plain", [(0, 0), (1, 0), (0, 1), (3, 2), (4, 1), (5, 3), (9, 2), (33, 3)])
def test_rings_neither_hang_nor_skip_a_phase(head_dim, pages, plain):
    cfg = CONFIGS[head_dim]
    for seed in range(10):
        roles, seen = [], {}
        tiles = {}
        for side in "kv":
            packed = RingModel(cfg.packed_stages, cfg.loads_arrive, cfg.dequants_arrive)
            tiles[side] = RingModel(cfg.tile_stages, cfg.dequants_arrive, cfg.mmas_arrive)
            roles.append(load_role(pages, plain, packed))
            roles += [dequant_role(pages, plain, packed, tiles[side], seen) for _ in range(GROUP_WARPS)]
        roles += [mma_role(pages, plain, tiles["k"], tiles["v"]) for _ in range(GROUP_WARPS)]
        rng, idle = random.Random(seed), 0
        weight = [rng.random() ** 3 + 0.01 for _ in roles]
        while roles and idle < 200_000:
            i = rng.choices(range(len(roles)), weight)[0]
            try:
                next(roles[i])
                idle += 1
            except StopIteration:
                roles.pop(i), weight.pop(i)
                idle = 0
        assert not roles, "deadlock"
        assert seen == {tile: 2 * GROUP_WARPS for tile in range(pages + plain)}


@pytest.mark.parametrize("n_sink, n_packed, residual", [(0, 0, 0), (4, 0, 0), (3, 0, 5), (0, 128, 0), (130, 1280, 255),
                                                        (0, 640, 128), (128, 384, 1), (32, 4096, 129)])
@pytest.mark.parametrize("num_splits", (1, 2, 3, 7, 40))
def test_walk_visits_every_token_once(n_sink, n_packed, residual, num_splits):
    visited = []
    for split in range(num_splits):
        w = walk.plan(n_sink, n_packed, n_sink + n_packed + residual, split, num_splits)
        w = walk.Walk(*(int(getattr(x, "value", x)) for x in w))
        visited += [("page", w.first_page + i) for i in range(w.num_pages)]
        for i in range(w.plain_tiles):
            tile = walk.plain_tile(w, i)
            start, live, is_sink = (int(getattr(x, "value", x)) for x in tile)
            assert 1 <= live <= TILE_N
            units = [int(getattr(x, "value", x)) for x in
                     (walk.clamp_unit(live - u * UNIT_TOKENS, UNIT_TOKENS) for u in range(UNITS))]
            assert sum(units) == live
            visited += [("sink" if is_sink else "residual", start + i) for i in range(live)]
    want = [("page", i) for i in range(n_packed // TILE_N)]
    want += [("sink", i) for i in range(n_sink)] + [("residual", i) for i in range(residual)]
    assert sorted(visited) == sorted(want)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_shared_memory_plan(head_dim, monkeypatch):
    cfg = CONFIGS[head_dim]
    assert cfg.smem_bytes <= config.SMEM_LIMIT
    assert decode.DecodeSm90(cfg).storage().size_in_bytes() == cfg.smem_bytes
    with pytest.raises(ValueError, match="shared memory"):
        dataclasses.replace(cfg, packed_stages=64).check()
    with pytest.raises(ValueError, match="registers"):
        dataclasses.replace(cfg, dequant_regs=128).check()


@pytest.mark.parametrize("name, head_dim, match", [("k2v2", 128, "K bits"), ("k4v4", 96, "head_dim"),
                                                   ("k4v4-bf16", 64, "metadata"), ("k4v4-g64", 64, "K group")])
def test_unsupported_formats_say_why(name, head_dim, match):
    with pytest.raises(ValueError, match=match):
        decode.decode_kernel(FORMATS[name], head_dim, "float16")
