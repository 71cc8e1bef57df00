"""The Hopper decode kernel without a GPU: its index arithmetic, its rings, its compile-time checks.

Lanes are simulated with the functions the kernel itself traces (config, walk, ring); tiles are read back
through WGMMA's canonical layout, written here a second time from the PTX manual.
"""

import dataclasses
import itertools
import random
from functools import cache

import numpy as np
import pytest
import torch

from lowbit_attn import layout
from lowbit_attn.formats import FORMATS
from lowbit_attn.registers import lane_place, matrix_place

pytest.importorskip("cutlass", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")

from host.wgmma import CONFIGS, FORMAT, HEAD_DIMS, LANES, ROWS, read_wgmma_tile, swizzle  # noqa: E402
from lowbit_attn.hopper import PATHS  # noqa: E402
from lowbit_attn.hopper import decode as entries  # noqa: E402
from lowbit_attn.hopper.common import abi  # noqa: E402
from lowbit_attn.hopper.tile import config, decode, dequant, ring, walk  # noqa: E402
from lowbit_attn.hopper.tile import masks as masks  # noqa: E402
from lowbit_attn.hopper.tile.config import GROUP_WARPS, TILE_N, UNIT_TOKENS, UNITS, WARP  # noqa: E402

CASES = [("k4v4", d, "float16") for d in HEAD_DIMS] + [
    ("k2v2", 64, "float16"), ("k2v2", 96, "bfloat16"), ("k8v8", 96, "float16"), ("k8v8", 256, "float16"),
    ("k8v8", 256, "bfloat16"), ("k1v1", 64, "float16"), ("k1v1", 64, "bfloat16"), ("k1v1", 256, "bfloat16"),
    ("k1v1-g32", 128, "float16"), ("k2v2-g32-vg32", 128, "float16"), ("k2v4-g64-vg64-bf16", 256, "float16"),
    ("k4tv4", 64, "float16"), ("k4tv2", 96, "float16"), ("k8tv4-g32", 96, "float16"), ("k4tv4", 256, "bfloat16"),
    ("k4tv4-g32-vg64-bf16", 128, "float16"), ("k1tv1-g64-vg128", 256, "float16"), ("k2v2-vg32", 256, "bfloat16"),
    ("k4tv8-g64-vg32", 256, "float16"), ("k4v4-vg32", 96, "bfloat16"), ("k8v8-vg32-bf16", 96, "float16")]


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


def values(bits: np.ndarray, storage: str) -> np.ndarray:
    """16-bit metadata as float."""
    if storage == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)
    return bits.view(np.float16).astype(float)


def lane_meta(side: config.TileSide, meta: np.ndarray, run: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """What ``dequant.load_meta`` gives: (scales, zeros) [meta_index, lane, low or high column]."""
    offsets = side.meta_offsets(run, block, LANES // 4, LANES % 4)
    assert all((o % side.meta_bytes == 0).all() for o in offsets)
    halves = [np.stack([meta[o // 2 + 2 * j + i] for j in side.meta_words for i in (0, 1)]).reshape(-1, 2, 32)
              for o in offsets]
    halves = [values(h, side.storage) for h in halves]
    if side.is_per_token:  # (scale, zero) words
        scale, zero = (np.stack((halves[0][:, i], halves[-1][:, i]), -1) for i in (0, 1))
        return scale, zero
    return tuple(h.transpose(0, 2, 1) for h in halves)


def dequant_part(side: config.TileSide, part: np.ndarray) -> np.ndarray:
    """What four dequant warps write for one part of a record: the tile as float in memory order."""
    tile = np.full(side.tile_rows * side.cols, np.nan)
    codes, meta = part[: side.meta].view(np.uint32), part[side.meta :].view(np.uint16)
    row, col8 = lane_place(LANES)
    mask = (1 << side.bits) - 1
    for run in (r for w in range(GROUP_WARPS) for r in range(w, side.runs, GROUP_WARPS)):
        assert run * side.run_words % side.width == 0
        first_row, first_col = side.run_place(run)
        for block in range(side.meta_blocks):
            scale, zero = lane_meta(side, meta, run, block)
            for col_tile, row_tile, parts in side.registers(block):
                registers = []
                for row8, c8, word, shift, position in parts:
                    words = codes[layout.word_offset(run * side.run_words + word, LANES) // 4] >> np.uint32(shift)
                    halves = np.stack(((words >> position) & mask, (words >> (16 + position)) & mask), -1)
                    at = side.meta_index(col_tile, row_tile, row8, c8)
                    registers.append(halves * scale[at] + zero[at])
                chunks = config.tile_chunk(first_row + row, (first_col + col_tile) * 2 + col8, side.tile_rows,
                                           side.atom_chunks)
                stmatrix_x4(tile, chunks + row_tile * 16 * side.atom_chunks, registers)
    return tile


@pytest.mark.parametrize("format_name, head_dim, dtype", CASES)
@pytest.mark.parametrize("name", ("k", "v"))
@pytest.mark.parametrize("rows", ROWS)
def test_dequant_lanes_rebuild_the_matrix(format_name, head_dim, dtype, name, rows):
    torch.manual_seed(head_dim)
    fmt = FORMATS[format_name]
    k, v = torch.randn(2, 1, 128, head_dim)
    record = fmt.quantize(k, v)
    side = getattr(config.make_config(fmt, head_dim, dtype, rows), name)
    part = record[0, side.start : side.start + side.nbytes].numpy()
    got = read_wgmma_tile(dequant_part(side, part), side.tile_rows, side.cols)[: side.rows]
    want = (fmt.dequantize_k if name == "k" else fmt.dequantize_v)(record, head_dim)[0].numpy()
    want = want.T if side.transposed else want
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", ("k", "v"))
@pytest.mark.parametrize("rows", ROWS)
def test_plain_units_rebuild_the_matrix(head_dim, name, rows):
    cfg = CONFIGS[head_dim, rows]
    side, live = getattr(cfg, name), 77
    source = np.random.default_rng(0).standard_normal((TILE_N, head_dim)).astype(np.float16)
    source[live:] = np.nan
    tile = np.full(side.tile_rows * side.cols, np.inf, np.float16)
    row, col8 = lane_place(LANES)
    row8 = row // 8
    for u, w, j in itertools.product(range(UNITS), range(GROUP_WARPS), range(dequant.unit_tiles(side) // GROUP_WARPS)):
        token_tile, channel_tile = dequant.unit_tile(side, w, j)
        token8 = u * 4 + 2 * token_tile
        staged = source[u * UNIT_TOKENS : (u + 1) * UNIT_TOKENS].reshape(UNIT_TOKENS, -1, 8)
        if side.transposed:
            registers = ldmatrix_x4(staged[token_tile * 16 + col8 * 8 + LANES % 8, 2 * channel_tile + row8], True)
            for m in range(4):
                token = token8 * 8 + 8 * matrix_place(m)[1] + 2 * (LANES % 4)
                registers[m] = np.where(np.stack((token, token + 1), -1) < live, registers[m], np.float16(0))
            chunks = config.tile_chunk(channel_tile * 16 + row, token8 + col8, side.tile_rows, side.atom_chunks)
        else:
            registers = ldmatrix_x4(staged[token_tile * 16 + row, 2 * channel_tile + col8], False)
            chunks = config.tile_chunk(token8 * 8 + row, 2 * channel_tile + col8, side.tile_rows, side.atom_chunks)
        stmatrix_x4(tile, chunks, registers)
    got = read_wgmma_tile(tile, side.tile_rows, side.cols)[: side.rows]
    got = got.T if side.transposed else got
    assert np.array_equal(got[:live], source[:live])
    assert not side.transposed or (got[live:] == 0).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_tile_chunk_is_the_dsl_layout(head_dim, rows, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    import cutlass.cute as cute

    found = {}

    def sample():
        rng = random.Random(0)
        for name, _ in itertools.product("kv", range(64)):
            side = getattr(CONFIGS[head_dim, rows], name)
            at = rng.randrange(side.tile_rows), 8 * rng.randrange(side.cols // 8), rng.randrange(2)
            tile = decode.tile_layout(side.tile_rows, side.cols, 2)
            # of byte addresses: a property of the pointer, not of the layout
            assert str(tile.inner) == ("S<3,4,3>" if side.atom_chunks == 8 else "S<2,4,3>")
            found[name, at] = tile.outer(at)

    @cute.jit
    def evaluate():
        sample()

    evaluate()
    for (name, (row, col, stage)), offset in found.items():
        side = getattr(CONFIGS[head_dim, rows], name)
        want = stage * side.tile_rows * side.cols
        want += 8 * config.tile_chunk(row, col // 8, side.tile_rows, side.atom_chunks)
        assert swizzle(2 * int(offset), 8 * side.atom_chunks) == 2 * want, (name, row, col, stage)


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


@cache
def stage_and_parity(stages, fill):
    names = ring.StageRing(None, None, stages)
    return ring.stage(names, ring.Uint32(fill)).value, ring.parity(names, ring.Uint32(fill)).value


class RingModel:
    """Barriers of one ring and the fill that each stage holds; every wait must see exactly its own fill."""

    def __init__(self, stages, full, empty):
        self.stages = stages
        self.full = [Barrier(full) for _ in range(stages)]
        self.empty = [Barrier(empty) for _ in range(stages)]
        self.content = [None] * stages

    def wait(self, kind, fill):
        stage, parity = stage_and_parity(self.stages, fill)
        barrier, skip = (self.full, 0) if kind == "full" else (self.empty, 1)
        while not barrier[stage].passes(parity ^ skip):
            yield
        done = fill // self.stages + (1 - skip)
        assert barrier[stage].phases == done, f"{kind} of fill {fill}: phase {barrier[stage].phases}, not {done}"
        return stage


def load_role(pages, plain, packed):
    for fill in range(pages + plain * UNITS):
        stage = yield from packed.wait("empty", fill)
        packed.content[stage] = fill
        packed.full[stage].arrive()


def dequant_role(shapes, packed, tiles, seen):
    """shapes: (pages, 16-bit tiles) of each side that this warpgroup unpacks, a tile of each in turn."""
    fills = dict.fromkeys(shapes, 0)
    for tile in range(sum(next(iter(shapes.values())))):
        for side, (pages, _) in shapes.items():
            stage = yield from tiles[side].wait("empty", tile)
            for _ in range(1 if tile < pages else UNITS):
                piece = yield from packed[side].wait("full", fills[side])
                assert packed[side].content[piece] == fills[side]
                yield
                packed[side].empty[piece].arrive()
                fills[side] += 1
            seen[side, tile] = seen.get((side, tile), 0) + 1
            tiles[side].content[stage] = tile
            tiles[side].full[stage].arrive()


def mma_role(group, groups, tile_count, tiles):
    for tile in range(group, tile_count, groups):
        for side in "kv":
            stage = yield from tiles[side].wait("full", tile)
            assert stage == group
            yield
            assert tiles[side].content[stage] == tile
            tiles[side].empty[stage].arrive()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("pages, third, plain", [(0, 0, 0), (1, 0, 0), (0, 0, 1), (3, 1, 2), (4, 0, 1), (0, 2, 1),
                                                 (9, 2, 2), (33, 0, 3)])
@pytest.mark.parametrize("rows", ROWS)
def test_rings_neither_hang_nor_skip_a_phase(head_dim, pages, third, plain, rows):
    cfg = CONFIGS[head_dim, rows]
    for seed in range(10):
        seen, shapes = {}, {"k": (pages + third, plain), "v": (pages, third + plain)}
        readers, writers = cfg.readers_arrive // WARP, cfg.dequants_arrive // WARP
        packed = {side: RingModel(cfg.packed_stages, cfg.loads_arrive, readers) for side in "kv"}
        tiles = {side: RingModel(cfg.mma_groups, writers, readers) for side in "kv"}
        roles = [load_role(*shapes[side], packed[side]) for side in "kv"]
        sides = ["kv"] if cfg.dequant_groups == 1 else ["k", "v"]
        roles += [dequant_role({side: shapes[side] for side in own}, packed, tiles, seen)
                  for own in sides for _ in range(GROUP_WARPS)]
        roles += [mma_role(group, cfg.mma_groups, pages + third + plain, tiles)
                  for group in range(cfg.mma_groups) for _ in range(GROUP_WARPS)]
        rng, idle = random.Random(seed), 0
        weight = [rng.random() ** 3 + 0.01 for _ in roles]
        total = list(itertools.accumulate(weight))
        while roles and idle < 200_000:
            i = rng.choices(range(len(roles)), cum_weights=total)[0]
            try:
                next(roles[i])
                idle += 1
            except StopIteration:
                roles.pop(i), weight.pop(i)
                total, idle = list(itertools.accumulate(weight)), 0
        assert not roles, "deadlock"
        assert seen == {(side, tile): GROUP_WARPS for side in "kv" for tile in range(pages + third + plain)}


def number(x) -> int:
    return int(getattr(x, "value", x))


def tokens_of(w: walk.TileWalk) -> list[tuple[str, int, int]]:
    """(kind, first position, tokens) of every tile of a walk, in order."""
    found = [("page", w.packed_start + TILE_N * (w.first_page + i), TILE_N) for i in range(w.num_pages)]
    for i in range(w.token_tiles):
        start, live, is_sink = map(number, walk.token_tile_of(w, i))
        assert 1 <= live <= TILE_N
        units = [number(abi.clamp_unit(live - u * UNIT_TOKENS, UNIT_TOKENS)) for u in range(UNITS)]
        assert sum(units) == live
        found.append(("sink", start, live) if is_sink else ("ring", w.packed_start + w.ring_start + start, live))
    return found


@pytest.mark.usefixtures("numpy_walk")
@pytest.mark.parametrize("n_sink, n_qk, lag, residual", [
    (0, 0, 0, 0), (4, 0, 0, 0), (3, 0, 0, 5), (0, 128, 0, 0), (130, 1280, 128, 255), (0, 640, 0, 128),
    (128, 384, 384, 1), (32, 4096, 256, 129)])
@pytest.mark.parametrize("num_splits", (1, 2, 3, 7, 40))
@pytest.mark.parametrize("window", (None, 1, 100, 300, 1 << 30))
def test_walk_visits_every_seen_token_once(n_sink, n_qk, lag, residual, num_splits, window):
    n_tok, q_len = n_sink + n_qk + residual, 3
    hidden = 0 if window is None else number(walk.hidden_pages(n_sink, n_tok, q_len, window))
    assert hidden == 0 or n_sink + hidden * TILE_N <= n_tok - q_len + 1 - window
    visited = {"k": [], "v": []}
    for split in range(num_splits):
        both = [walk.TileWalk(*map(number, w))
                for w in walk.plan(n_sink, n_qk, n_qk - lag, n_tok, n_qk, hidden, split, num_splits)]
        k, v = map(tokens_of, both)
        assert [at[1:] for at in k] == [at[1:] for at in v]  # tile for tile the same tokens
        visited["k"] += k
        visited["v"] += v
    first = min(hidden, n_qk // TILE_N)
    for side, packed in (("k", n_qk), ("v", n_qk - lag)):
        seen = sorted((at + i, kind) for kind, at, live in visited[side] for i in range(live))
        want = [(i, "sink") for i in range(n_sink)]
        want += [(n_sink + i, "page" if i < packed else "ring") for i in range(first * TILE_N, n_tok - n_sink)]
        assert seen == want


def seen_positions(w: walk.TileWalk, i: int, rows: abi.Rows, visible: masks.Visible, row: int) -> set[int]:
    """Positions of tile ``i`` of K's walk that ``masks.to_logits`` leaves to a row of the tile."""
    if i < w.num_pages:
        start = w.packed_start + TILE_N * (w.first_page + i)
        first = 0
        if start < visible.first_last + rows.q_len - visible.window:
            first = masks.end_of(rows, visible, row, start) - visible.window
        return {start + c for c in range(TILE_N) if c >= first}
    start, live, is_sink = map(number, walk.token_tile_of(w, i - w.num_pages))
    start += (1 - is_sink) * (w.packed_start + w.ring_start)
    end = masks.end_of(rows, visible, row, start)
    first = end - (is_sink * visible.sink_window + (1 - is_sink) * visible.window)
    return {start + c for c in range(TILE_N) if first <= c < min(live, end)}


@pytest.mark.usefixtures("numpy_walk")
@pytest.mark.parametrize("window, keeps_sinks", [(1, False), (5, True), (130, False), (300, True), (1 << 30, False)])
@pytest.mark.parametrize("n_sink, n_qk, lag, residual, q_len", [
    (0, 0, 0, 3, 5), (4, 256, 128, 9, 3), (3, 640, 0, 130, 1), (130, 384, 256, 40, 16), (2, 0, 0, 0, 1)])
def test_masks_leave_what_a_query_sees(n_sink, n_qk, lag, residual, q_len, window, keeps_sinks):
    n_tok, ratio, num_splits = n_sink + n_qk + residual, 3, 2
    sink_window = 1 << 30 if keeps_sinks else window
    rows = abi.Rows(0, 0, 0, ratio * q_len, ratio, q_len)
    visible = masks.Visible(n_tok - q_len, window, sink_window)
    hidden = number(walk.hidden_pages(n_sink, n_tok, q_len, window))
    seen = [set() for _ in range(rows.count)]
    for split in range(num_splits):
        w = walk.TileWalk(*map(number, walk.plan(n_sink, n_qk, n_qk - lag, n_tok, n_qk, hidden, split, num_splits)[0]))
        for i, row in itertools.product(range(w.num_pages + w.token_tiles), range(rows.count)):
            seen[row] |= seen_positions(w, i, rows, visible, row)
    for row, got in enumerate(seen):
        last = n_tok - q_len + row // ratio
        want = {at for at in range(last + 1) if at > last - (sink_window if at < n_sink else window)}
        assert got == want, row


@pytest.mark.parametrize("ratio, q_len, rows", [(1, 1, 8), (8, 1, 8), (3, 2, 8), (5, 13, 64), (4, 16, 64), (16, 9, 64),
                                                (9, 3, 8), (3, 5, 16), (7, 3, 4), (12, 16, 16)])
def test_row_blocks_serve_every_query_of_every_head_once(ratio, q_len, rows):
    seen, head_idx, blocks = [], 3, -(-ratio * q_len // rows)
    for block in range(blocks):
        mine = abi.block_rows((head_idx * blocks + block, 0), blocks, ratio, q_len, rows)
        assert 1 <= number(mine.count) <= rows
        seen += [tuple(map(number, abi.query_and_head(mine, row))) for row in range(number(mine.count))]
    assert seen == [(j, head_idx * ratio + h) for j in range(q_len) for h in range(ratio)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", ROWS)
def test_shared_memory_plan(head_dim, rows):
    cfg = CONFIGS[head_dim, rows]
    assert cfg.smem_bytes <= config.SMEM_LIMIT
    assert decode.DecodeSm90(cfg).storage().size_in_bytes() == cfg.smem_bytes
    with pytest.raises(ValueError, match="shared memory"):
        dataclasses.replace(cfg, packed_stages=64).check()
    with pytest.raises(ValueError, match="registers"):
        dataclasses.replace(cfg, dequant_regs=128).check()
    with pytest.raises(ValueError, match="a thread starts with"):
        dataclasses.replace(cfg, mma_regs=88).check()
    with pytest.raises(ValueError, match="rows: got 16"):
        config.make_config(FORMAT, head_dim, "float16", 16)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("bits, groups", list(itertools.product((8, 4, 2, 1), ("", "-g32", "-vg32", "-g32-vg32"))))
@pytest.mark.parametrize("rows", ROWS)
def test_every_supported_format_fits(head_dim, dtype, bits, groups, rows):
    for name in (f"k{bits}v{bits}{groups}", f"k{bits}tv{bits}{groups}-bf16"):
        fmt = FORMATS[name]
        if bits == 1 and head_dim == 96:
            continue  # the format itself refuses
        missing = PATHS["tile"].missing(fmt, head_dim, getattr(torch, dtype))
        if missing:
            assert (bits, head_dim) == (8, 256) and "32" in groups
            with pytest.raises(ValueError, match="record of"):
                config.make_config(fmt, head_dim, dtype, rows)
        else:
            cfg = config.make_config(fmt, head_dim, dtype, rows)
            assert cfg.smem_bytes <= config.SMEM_LIMIT
            for side in (cfg.k, cfg.v):
                assert side.run_rows == side.meta_blocks * side.meta_rows
                assert side.group % side.meta_rows == 0 or side.is_per_token and not side.transposed


@pytest.mark.parametrize("name, head_dim, match", [("k4v4", 80, "head_dim"), ("k8v8-vg32", 256, "record of"),
                                                   ("k4v4-vg64", 96, "V group")])
def test_unsupported_formats_say_why(name, head_dim, match):
    with pytest.raises(ValueError, match=match):
        entries.decode_kernel(FORMATS[name], head_dim, "float16")
