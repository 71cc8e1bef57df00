"""Boosted channels (Kitty) on Ampere's register path: where everything is, and the arithmetic of a page, on the CPU.

Driven by the kernel's own helpers, as test_ampere_emulation; what other formats have in common is emulation.py's.
"""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lowbit_attn import kernels, layout, subnormals, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.formats.uniform import PerChannel
from lowbit_attn.testing import Case
from sim import emulation

pytest.importorskip("tilelang", reason="the helpers live in kernel files that import tilelang")

from lowbit_attn.ampere import boost, codes  # noqa: E402
from lowbit_attn.ampere import config as sizes  # noqa: E402

LANE = np.arange(32)
T = LANE % 4
LOG2_E = emulation.LOG2_E
CASES = [(name, d) for name in ("kitty", "kitty-pro", "kitty-b24-vg32", "kitty-b64-bf16", "kitty-b0")
           for d in sizes.HEAD_DIMS if (name, d) != ("kitty", 96)]


@pytest.mark.parametrize("name, head_dim", CASES)
def test_boosted_parts_are_where_the_record_has_them(name, head_dim):
    for target, rows in itertools.product(kernels.ARCH_TARGETS["ampere"], sizes.rows_of(head_dim)):
        cfg = sizes.decode_config(FORMATS[name], head_dim, "bfloat16", target, "register", rows)
        at = {plane.name: plane.offset // 16 for plane in FORMATS[name].record(head_dim).k_planes}
        assert (cfg.k.codes, cfg.k.meta, cfg.k.bits, cfg.k.groups) == (0, at["meta"], 2, 1) and cfg.has_mixed
        assert cfg.shared_bytes <= kernels.SMEM_LIMIT_BYTES[target] and cfg.rows == rows
        channels = FORMATS[name].k.boost(head_dim)
        if not channels:
            assert cfg.boost is None
            continue
        high = cfg.boost.high
        assert (high.codes, cfg.boost.index) == (at["high"], at["index"]) and high.accesses == cfg.k.accesses
        assert (high.bits, high.rows, high.column_words) == (2, layout.PAGE_TOKENS, 4)
        assert high.cols == FORMATS[name].k.slots(head_dim) and cfg.boost.channels == channels
        halves = [cfg.boost.is_padding(tile, col8) for tile in range(high.column_tiles) for col8 in (0, 1)]
        assert halves == [8 * i >= channels for i in range(high.cols // 8)]


class Shape(NamedTuple):
    """What of a configuration places q': 8 * columns query rows of each row group."""

    columns: int
    row_groups: int = 1
    head_dim: int = 128


def stored(shape: Shape, q_own: np.ndarray, group: int = 0) -> np.ndarray:
    """q' of a row group by channel, as start() leaves it, from B registers [column, column tile, half, lane, pair]."""
    query_of = np.full(boost.query_shape(shape), np.nan, np.float32)
    for n, half, v in np.ndindex(shape.columns, shape.head_dim // 8, 2):
        query_of[group, n, 8 * half + 2 * T + v, LANE // 4] = q_own[n, half // 2, half % 2, :, v]
    return query_of


def load_query(shape: Shape, query_of: np.ndarray, channel: np.ndarray, group: int = 0) -> np.ndarray:
    """ldmatrix, transposed, of the rows that the lanes name: B registers [column, half, lane, pair]."""
    named = query_of[boost.row_of(LANE, channel, shape, 32 * group + LANE)]  # lane 8m + r: row r of matrix m
    matrices = named[: 16 * shape.columns].reshape(shape.columns, 2, 8, 8)
    return np.stack([matrices[:, :, 2 * T + e, LANE // 4] for e in (0, 1)], -1)


@pytest.mark.parametrize("head_dim, columns, group", ((64, 1, 0), (96, 2, 0), (128, 2, 3), (256, 1, 7)))
def test_gathered_channels_are_those_of_the_slots(head_dim, columns, group):
    """q' in shared memory and metadata, element by element: slot s of a B operand is the channel that lane s names."""
    shape = Shape(columns, group + 1, head_dim)
    q = np.arange(8 * columns * head_dim, dtype=np.float32).reshape(8 * columns, head_dim)
    row = 8 * np.arange(columns)[:, None, None, None, None] + emulation.B_COL
    channel_of = 16 * np.arange(head_dim // 16)[:, None, None, None] + emulation.B_ROW
    query_of = stored(shape, q[row, channel_of], group)
    assert not np.isnan(query_of[group]).any()
    for channels in (16 + np.arange(16), np.random.default_rng(0).permutation(head_dim)[:16]):
        b = emulation.b_matrix(load_query(shape, query_of, channels[LANE % 16], group))  # [column, slot, row]
        for n in range(columns):
            assert (b[n] == q[8 * n : 8 * n + 8, channels].T).all()
    for col8 in (0, 1):
        assert ((boost.slot_lane(LANE, col8) % 16) == 8 * col8 + 2 * T).all()
    channel = np.arange(head_dim)
    access, value = boost.scale_place(channel)
    assert (16 * access + 2 * value == layout.channel_meta_offset(0, 0, channel, head_dim)).all()


class BoostedWarp(emulation.Warp):
    """Logits of K with boosted channels: those of the plane of all channels, and what the high plane adds."""

    def logits(self, record: np.ndarray) -> np.ndarray:
        side, planes = self.format.k, self.record.k_planes
        cfg = sizes.decode_config(self.format, self.head_dim, "float16", "sm_80", "register", 8)
        meta = emulation.metadata(record, planes, side.storage)
        low = emulation.code_matrix(record, planes, layout.PAGE_TOKENS, side.bits)
        power = emulation.powers(cfg.k.row_tiles, side.bits)
        logits = self._logits_per_channel(PerChannel(side.bits, storage=side.storage), low, power, meta)
        if cfg.boost is None:
            return logits
        part = np.ascontiguousarray(record[: 16 * cfg.k.accesses]).view(np.uint32).reshape(-1, 4)
        e_s, e_q = -emulation.max_exponent(meta[: self.head_dim]), self._per_column(self.e_q)
        e_c = 0 if cfg.k.meta_dtype == "float16" else e_s + subnormals.CENTRE_SHIFT
        own, shift = e_q + subnormals.QUERY_OWN_SHIFT, e_s + subnormals.SCALE_SHIFT
        for column_tile in range(cfg.boost.high.column_tiles):
            q, scale = self.gathered(cfg, part, column_tile)
            b = emulation.rounded(q * (scale * emulation.pow2(shift)))
            assert np.abs(b).max() <= 65504 and np.abs(q).max() <= 2**14
            step = emulation.b_matrix(b)[:, None, None]  # [query tile, row tile, step, 16, 8]
            acc = emulation.multiply(self.high(cfg, part, column_tile), step)
            logits = logits + acc * (self.scale * emulation.pow2(
                subnormals.SUBNORMAL_SHIFT - own - shift)[:, None] * emulation.pow2(-power))
            if self.centring:
                a = np.zeros((4, 32, 2), np.float32)
                a[1::2] = emulation.rounded(scale * emulation.pow2(e_c))
                sums = emulation.multiply(emulation.a_matrix(a)[None], emulation.b_matrix(q)[:, None])
                ones = emulation.multiply(np.ones((1, 16, 16)), emulation.b_matrix(b)[:, None])
                lost = sums * emulation.pow2(-(own + e_c)) - ones * emulation.pow2(-(own + shift))
                logits = logits + self.scale * np.float32(1.5) * np.tile(lost[..., 2:], 2)[:, None]
        return logits

    def gathered(self, cfg, part: np.ndarray, column_tile: int):
        """4 q' [query tile, half, lane, pair] and scales [half, lane, pair] at the slots of a column tile."""
        shape = Shape(self.tiles, head_dim=self.head_dim)
        channel = part.view(np.uint8)[cfg.boost.index + column_tile, LANE % 16].astype(int)
        q, bits = 4 * load_query(shape, stored(shape, self.q_own), channel), np.zeros((2, 32, 2), np.int16)
        access, value = boost.scale_place(channel)
        own = part.view(np.int16)[cfg.k.meta + access, value]
        for col8 in (0, 1):
            if cfg.boost.is_padding(column_tile, col8):
                q[:, col8] = 0
            else:
                lane = boost.slot_lane(LANE, col8)
                bits[col8] = np.stack((own[lane], own[lane ^ 1]), -1)
        return q, torch.from_numpy(bits).view(self.format.k.storage).float().numpy()

    def high(self, cfg, part: np.ndarray, column_tile: int) -> np.ndarray:
        """The high plane's codes of a column tile as A [row tile, step, 16, 16]."""
        plane = cfg.boost.high
        word = codes.code_word(plane, column_tile, 0) + np.arange(plane.column_words)[:, None]
        words = part[plane.codes + layout.word_offset(word, LANE) // sizes.ACCESS_BYTES, word % layout.BLOCK_WORDS]
        return emulation.a_matrix(emulation.unpack(words, plane.bits))[:, None]


def check_boosted(monkeypatch, case: Case, centring: bool = True) -> None:
    monkeypatch.setattr(emulation, "Warp", BoostedWarp)
    problem = testing.build(case)
    want = testing.expected(problem)
    if centring:  # as in test_register_emulation
        want = dataclasses.replace(want, lse_tolerance=(want.lse_tolerance - 1e-3) * 2 / 3 + 1e-3)
    testing.assert_decode(*emulation.decode(problem.q, problem.cache, centring=centring), want)


@pytest.mark.parametrize("name, head_dim", [
    ("kitty", 64), ("kitty-pro", 64), ("kitty", 128), ("kitty-pro", 128), ("kitty-b24-vg32-bf16", 128),
    ("kitty-b64-vg64", 128), ("kitty-pro", 96), ("kitty-pro-bf16", 256), ("kitty-b0", 128), ("kitty-random", 128)])
@pytest.mark.parametrize("centring", (True, False))
def test_boosted_channels(monkeypatch, name, head_dim, centring):
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    heads = 12 if head_dim == 128 else 3
    check_boosted(monkeypatch, Case(name, dtype, head_dim, heads, 1, (0, 127, 300, 700), sinks=32), centring)


@pytest.mark.parametrize("name", ("kitty", "kitty-pro-vg64"))
@pytest.mark.parametrize("data", testing.DATA)
def test_boosted_channels_of_hard_data(monkeypatch, name, data):
    bf16 = data in ("meta-beyond-fp16", "q-1e6-k-1e-6")
    name, dtype = (name + "-bf16", torch.bfloat16) if bf16 else (name, torch.float16)
    check_boosted(monkeypatch, Case(name, dtype, lengths=(129, 700), sinks=32, data=data, num_heads=4))


@pytest.mark.parametrize("name", ("kitty", "kitty-pro-bf16"))
def test_boosted_channels_are_centred(name):
    """Boosted codes reach 15: centring them as 3 would leave most of the error."""
    problem = testing.build(Case(name, num_heads=8, num_heads_kv=1, lengths=(257,), poison=False))
    cache, page = problem.cache, int(problem.cache.table[0, 0])
    k = cache.dequantize_pages(torch.tensor([page]))[0][0, 0].double()
    want = LOG2_E * (problem.q[0, 0].double() @ k.T).numpy()
    token, errors = layout.TILE * np.arange(8)[:, None, None] + emulation.C_ROW, []
    for centring in (True, False):
        got = BoostedWarp(cache, problem.q[0, 0], 8, LOG2_E, centring).logits(cache.pool[page, 0].numpy())[0]
        errors.append(np.sqrt(((got - want[emulation.C_COL, token]) ** 2).mean()))
    assert errors[0] < 0.7 * errors[1]
