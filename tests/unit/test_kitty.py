"""Kitty: boosted channels, the two planes of codes element by element, and the cache with V packed a page later.

The tests of every registered format (test_formats.py, test_cli.py) cover its presets too.
"""

import numpy as np
import pytest
import torch

from lowbit_attn import FORMATS, Format, KVCache, decode, layout
from lowbit_attn.formats import packing
from lowbit_attn.formats.affine import dequantize_groups, quantize_groups
from lowbit_attn.formats.kitty import SELECTIONS, Boosted
from lowbit_attn.testing import Case, assert_decode, assert_same_bytes, assert_same_state, build, expected, to_device
from unit.boosted import DIMS, INF, NAN, F, chosen, code_at, element, emulated_masks, formats, keys

WIDTHS = ((2, 4), (1, 4), (1, 2), (4, 8), (1, 8), (2, 3))  # bits, boosted bits
widths = pytest.mark.parametrize("bits, boosted_bits", WIDTHS)


# ---- bytes


@pytest.mark.parametrize("name, head_dim, k_bytes, record_bytes", [
    ("kitty", 128, 5248, 9856), ("kitty-pro", 128, 5760, 10368),  # the paper's own: 2.5625 and 2.8125 bits
    ("kitty", 64, 2944, 5504), ("kitty-pro", 64, 2944, 5504),  # 8 boosted channels take 16 slots
    ("kitty-pro", 96, 4608, 8192), ("kitty", 256, 10368, 19072), ("kitty-pro", 256, 11392, 20096),
    ("kitty-pro", 32, 1792, 3328), ("kitty-b0", 128, 4608, 9216), ("kitty-b8", 128, 5248, 9856),
])
def test_documented_sizes(name, head_dim, k_bytes, record_bytes):
    record = FORMATS[name].record(head_dim)
    assert (record.v_offset, record.nbytes) == (k_bytes, record_bytes)
    assert FORMATS[name].bits_per_element(head_dim) == 8 * record_bytes / (2 * 128 * head_dim)


@formats
def test_planes_index_and_padding(name, head_dim):
    """Order, sizes and alignment; index ascending; padded slots repeat its last channel and hold zero codes."""
    side, record, k = FORMATS[name].k, FORMATS[name].record(head_dim), keys(head_dim)
    boost = side.boost(head_dim)
    slots = -(-boost // 16) * 16
    want = {"codes": 32 * head_dim, "high": 32 * slots, "index": slots, "meta": 4 * head_dim}
    assert [(p.name, p.nbytes) for p in record.k_planes] == list(want.items())
    assert all(p.offset % 16 == 0 for p in (*record.k_planes, *record.v_planes))
    planes = side.quantize(k, True)
    for page in range(2):
        index = planes["index"][page].tolist()
        assert all(a < b for a, b in zip(index[:boost], index[1:boost])) and index[boost - 1] < head_dim
        assert index[boost:] == [index[boost - 1]] * (slots - boost)
        for slot in range(boost, slots):
            assert not any(code_at(planes["high"][page], token, slot, 2) for token in range(128))


@formats
def test_elements_are_where_the_layout_says(name, head_dim):
    side, k = FORMATS[name].k, keys(head_dim)
    planes = side.quantize(k, True)
    values = side.dequantize(planes, head_dim)
    assert values.shape == k.shape and values.dtype == torch.float32
    places = [tuple(int(torch.randint(n, ())) for n in (2, 128, head_dim)) for _ in range(60)]
    for page, token, channel in places + [(1, 77, channel) for channel in planes["index"][1].tolist()]:
        assert element(side, planes, page, token, channel, head_dim) == F(values[page, token, channel])


@formats
def test_logits_from_the_planes(name, head_dim):
    """What a reader multiplies: the low plane, the high plane with queries gathered by slot, and the zero-points."""
    side, k, q = FORMATS[name].k, keys(head_dim), torch.randn(3, head_dim).double()
    planes = side.quantize(k, True)
    low = packing.unpack_codes(planes["codes"], 128, head_dim, 2).double()
    high = packing.unpack_codes(planes["high"], 128, side.slots(head_dim), 2).double()
    scale, zero = (x[:, 0].double() for x in packing.unpack_channel_meta(planes["meta"], head_dim, side.storage))
    scaled = q * scale[:, None]  # [page, query, channel]
    gathered = scaled.gather(2, planes["index"][:, None].long().expand(-1, 3, -1))  # padded slots too: no check
    logits = low @ scaled.mT + 4 * (high @ gathered.mT) + (zero @ q.T)[:, None]
    assert torch.allclose(logits, side.dequantize(planes, head_dim).double() @ q.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("storage", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("search", (False, True))
@widths
def test_round_trip_of_all_codes(bits, boosted_bits, storage, search):
    """Channels that hold every code times a power of two come back exactly, boosted or not."""
    head_dim, boost, token = 64, 24, torch.arange(128)[:, None].float()
    side = Boosted(bits, boosted_bits, channels=boost, storage=storage)
    places = torch.randperm(head_dim)[:boost]
    k = 0.25 * (token % (1 << bits)).repeat(1, head_dim) - 0.5
    top = 1 << boosted_bits  # 8 bits: half of them, beside both ends
    k[:, places] = torch.where(token == 127, top - 1.0, token % top) + 4
    assert k[:, places[0]].unique().numel() == min(128, top)
    planes = side.quantize(k[None], search)
    assert planes["index"][0, :boost].tolist() == sorted(places.tolist())
    assert torch.equal(side.dequantize(planes, head_dim)[0], k)


def check_channels(side: Boosted, k: torch.Tensor, search: bool) -> None:
    """Every channel of K is what the group quantizer makes of it with the bits of its kind."""
    planes, levels = side.quantize(k, search), "search" if search else "minmax"
    low, high = (dequantize_groups(quantize_groups(k.transpose(1, 2), bits, side.storage, levels)).transpose(1, 2)
                 for bits in (side.bits, side.boosted_bits))
    is_boosted = torch.zeros(k.shape[0], 1, k.shape[2], dtype=torch.bool)
    is_boosted.scatter_(2, planes["index"][:, None].long(), True)
    assert (is_boosted.sum(2) == side.boost(k.shape[2])).all()
    assert torch.equal(side.dequantize(planes, k.shape[2]), torch.where(is_boosted, high, low))


@pytest.mark.parametrize("search", (False, True))
@formats
def test_channels_read_back_as_the_group_quantizer_says(name, head_dim, search):
    check_channels(FORMATS[name].k, keys(head_dim), search)


@pytest.mark.parametrize("head_dim", DIMS)
@widths
def test_other_widths_are_only_numbers(bits, boosted_bits, head_dim):
    """A 4-bit boost over a 1-bit base, and others."""
    fmt = Format("made", Boosted(bits, boosted_bits, channels=24), FORMATS["k2v2"].v)
    assert all(p.offset % 16 == 0 and p.nbytes for p in fmt.record(head_dim).k_planes)
    check_channels(fmt.k, keys(head_dim), True)


@pytest.mark.parametrize("search", (None, False, True))
@pytest.mark.parametrize("head_dim", DIMS)
def test_no_boost_is_k2v2(head_dim, search):
    """Same planes, same bytes, K and V, with the same default of the range search."""
    kitty, plain = FORMATS["kitty-b0"], FORMATS["k2v2"]
    assert kitty.record(head_dim) == plain.record(head_dim)
    k, v = keys(head_dim), torch.randn(2, 128, head_dim)
    records = kitty.quantize(k, v, search)
    assert_same_bytes("records", records, plain.quantize(k, v, search))
    assert_same_bytes("K", kitty.dequantize_k(records, head_dim), plain.dequantize_k(records, head_dim))


# ---- special values


@pytest.mark.parametrize("search", (False, True))
@pytest.mark.parametrize("value", (0.0, -0.0, 0.3, -65504.0, 1e-6))
def test_constant_channels_are_exact(value, search):
    side, k = FORMATS["kitty"].k, torch.full((1, 128, 64), value)
    planes = side.quantize(k, search)
    assert torch.equal(side.dequantize(planes, 64), k.half().float())
    assert not planes["codes"].any() and not planes["high"].any()
    assert planes["index"][0].tolist() == [*range(8), *[7] * 8]


@pytest.mark.parametrize("name", ("kitty", "kitty-pro-variance", "kitty-random"))
@pytest.mark.parametrize("value", (NAN, INF, -INF))
def test_special_values_show_in_their_channels_only(name, value):
    """They count as the largest, whatever the rest of the channel is."""
    side, k = FORMATS[name].k, keys(128, 3)
    k[1, :, 5] *= 1e-3
    k[1, 13, 5] = k[1, 90, 77] = value
    values = side.dequantize(side.quantize(k, True), 128)
    assert not values[1, [13, 90], [5, 77]].isfinite().any()
    assert value == value or values[1, :, [5, 77]].isnan().all()
    values[1, :, [5, 77]] = 0
    assert values.isfinite().all()
    assert side.selection == "random" or {5, 77} <= set(side.boosted_channels(k)[1].tolist())


def test_more_special_channels_than_places():
    """NaN and infinity rank alike: the lower channels win."""
    k = keys(64, 1)
    k[0, 3, 10:20:2], k[0, 3, 11:21:2] = NAN, INF
    assert chosen(k) == [[*range(10, 18)]]


# ---- the cache


def packed(length: int, sinks: int, window: int) -> int:
    return max(0, length - min(length, sinks) - window) // 128 * 128


@pytest.mark.parametrize("sinks, max_q_len", ((0, 1), (32, 1), (32, 4)))
def test_appending_equals_prefilling(sinks, max_q_len):
    """V stays in 16 bit for 128 tokens at least; K for none."""
    k, v = torch.randn(2, 450, 2, 64).half()
    cache, length = KVCache("kitty", 8, 2, 64, sinks=sinks, max_q_len=max_q_len), 0
    for stop in (sinks + 1, 127, 128, 129, 160, 161, 256, 257, 288, 289, 383, 384, 420, 450):
        while length < stop:
            step = min(max_q_len, stop - length)
            cache.append(k[None, length : length + step], v[None, length : length + step])
            assert int(cache.n_qk[0]) == packed(length, sinks, max_q_len - 1)
            assert int(cache.n_qv[0]) == packed(length, sinks, 128)
            length += step
        flushed, whole = to_device(cache, "cpu"), KVCache("kitty", 8, 2, 64, sinks=sinks, max_q_len=max_q_len)
        flushed.flush()
        whole.prefill(0, k[:length], v[:length])
        assert_same_state(flushed, whole)
    assert int(whole.n_qk[0]) - int(whole.n_qv[0]) == 128


CASES = [
    Case("kitty", lengths=(300, 700, 5, 0), sinks=32),
    Case("kitty-pro", lengths=(513, 129), sinks=32, q_len=4),
    Case("kitty-pro", torch.bfloat16, lengths=(400,), head_dim=96, num_heads=6, num_heads_kv=3),
    Case("kitty-b24-vg32-bf16", torch.bfloat16, lengths=(390,), head_dim=256, num_heads=7, num_heads_kv=7),
    Case("kitty-b0", lengths=(600,), head_dim=64),
    *(Case("kitty", lengths=(700,), sinks=32, data=data) for data in (
        "k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "v-token-300x", "v-page-1e3-after-1e-4",
        "zero-200x-range")),
    Case("kitty-pro-bf16", torch.bfloat16, lengths=(400,), data="meta-beyond-fp16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_meets_the_tolerances(case):
    """Pages permuted, all unused memory NaN, among it V of pages whose K alone is packed."""
    problem = build(case)
    assert_decode(*decode(problem.q, problem.cache), expected(problem))


# ---- the quantize kernel, lane by lane in Python: which channels, which words, which bytes


def emulated_planes(m, codes: torch.Tensor, masks: list[int]) -> dict[str, torch.Tensor]:
    """What the lanes of one page make of codes [128, head_dim] of ``bits`` or ``boosted_bits`` bits."""
    low = np.zeros(32 * m.head_dim // 4, np.uint32)
    high, index = np.zeros(32 * m.slots, np.uint8), np.zeros(m.slots, np.uint8)
    for channel, rows in enumerate(codes.T.tolist()):
        mask, bit = masks[channel // 16], channel % 16
        slot = sum(x.bit_count() for x in masks[: channel // 16]) + (mask & (1 << bit) - 1).bit_count()
        column_tile, t, c = channel // 16, channel % 8 // 2, channel % 16 // 8 * 2 + channel % 2
        assert m.column_of(column_tile, t, c) == channel
        for g in range(8):
            octets = [0] * m.high_words
            for held in range(m.held):
                word, shift = m.word_and_shift(held, c)
                at = layout.word_offset(column_tile * m.words + word, 4 * g + t) // 4
                low[at] |= (rows[8 * held + g] & m.steps) << shift
                word, shift = m.high_and_shift(held)
                octets[word] |= rows[8 * held + g] >> m.bits << shift
            for word, octet in enumerate(octets):
                if mask >> bit & 1:
                    high[sum(m.high_byte(slot, word, g))] = octet
        if mask >> bit & 1:
            index[slot:] = channel  # the last one fills the padded slots
    return {"codes": torch.from_numpy(low.view(np.uint8)), "high": torch.from_numpy(high),
            "index": torch.from_numpy(index)}


@formats
def test_quantize_kernel_puts_bytes_where_the_format_says(name, head_dim):
    pytest.importorskip("tilelang", reason="the kernel's geometry lives in a file that imports tilelang")
    from lowbit_attn.device.quantize_boost import BoostMatrix

    side, k = FORMATS[name].k, keys(head_dim, 1)
    k[..., 3:60:2] = k[..., :1]  # equal scores
    m, planes = BoostMatrix(side.spec(head_dim)), side.quantize(k, True)
    offsets = {p.name: p.offset for p in FORMATS[name].record(head_dim).k_planes}
    assert (m.high_at, m.index_at, m.meta_at) == tuple(offsets[plane] for plane in ("high", "index", "meta"))
    masks = emulated_masks(m, SELECTIONS[side.selection](k.transpose(1, 2))[0])
    boosted = side.boosted_channels(k)[0].tolist()
    assert [16 * w + bit for w, x in enumerate(masks) for bit in range(16) if x >> bit & 1] == boosted
    assert side.selection != "random" or list(m.fixed) == boosted
    codes = packing.unpack_codes(planes["codes"], 128, head_dim, side.bits)[0]
    high = packing.unpack_codes(planes["high"], 128, m.slots, side.high_bits)[0, :, : m.boost]
    codes[:, boosted] |= high << side.bits
    for plane, written in emulated_planes(m, codes, masks).items():
        assert_same_bytes(plane, planes[plane][0], written)


def test_no_boost_takes_the_kernels_of_k2v2():
    pytest.importorskip("tilelang", reason="the kernel's geometry lives in a file that imports tilelang")
    from lowbit_attn.device.quantize_boost import BoostMatrix

    assert FORMATS["kitty-b0"].k.spec(64) == FORMATS["k2v2"].k.spec(64) != FORMATS["kitty"].k.spec(64)
    with pytest.raises(NotImplementedError, match="K: 8 bits boosted over 2, supported: 4 over 2"):
        BoostMatrix(Boosted(2, 8).spec(64))


# ---- names and errors


def test_names():
    fmt = FORMATS["kitty"]
    assert [FORMATS[name].k.boost(128) for name in ("kitty", "kitty-pro", "kitty-b40")] == [16, 32, 40]
    assert (fmt.window_k, fmt.window_v) == (0, 128) and fmt.k.searches_range and not fmt.v.searches_range
    fmt = FORMATS["kitty-b8-variance-vg32-bf16"]
    assert (fmt.k.selection, fmt.k.channels, fmt.v.group_size, fmt.v.bits) == ("variance", 8, 32, 2)
    assert fmt.k.storage == fmt.v.storage == torch.bfloat16
    assert {"kitty", "kitty-pro"} <= set(FORMATS)
    assert FORMATS["kitty-b8-weighted"].k.selection == "weighted"
    assert [FORMATS[name].sinks for name in ("kitty", "kitty-pro-random", "k2v2")] == [32, 32, 0]


@pytest.mark.parametrize("name", ("kitty-b12", "kitty-b08", "kitty-b-8", "kitty-pro-b8", "kitty-vg16",
                                  "kitty-bf16-pro", "kitty-magnitudes", "Kitty", "kittypro"))
def test_other_names_are_refused(name):
    with pytest.raises(KeyError, match="is not known.*grammar of all names is in docs.formats.md"):
        FORMATS[name]


@pytest.mark.parametrize("name, head_dim, words", [
    ("kitty", 96, "a boost of 0.125 of head_dim 96 is 12 channels, supported: multiples of 8 up to head_dim 96"),
    ("kitty", 32, "is 4 channels, supported: multiples of 8"),
    ("kitty-b72", 64, "a boost of 72 channels, supported: multiples of 8 up to head_dim 64"),
    ("kitty-pro", 80, "head_dim 80 is not supported; it must be a multiple of 32"),
    ("kitty-pro", 512, "head_dim 512 with boosted channels, supported: up to 256"),
    ("kitty-pro-vg64", 96, "V group 64 does not divide head_dim 96"),
])
def test_unsupported_head_dims_are_refused(name, head_dim, words):
    with pytest.raises(ValueError, match=f"format {name}: .*{words}"):
        KVCache(name, 1, 1, head_dim)


@pytest.mark.parametrize("change, words", [
    (dict(channels=12), "a boost of 12 channels, supported: multiples of 8"),
    (dict(channels=-8), "a boost of -8 channels, supported: multiples of 8"),
    (dict(share=0.1), "a boost of 0.1 of head_dim 128 is 12.8 channels, supported: multiples of 8"),
    (dict(bits=4), "4 bits boosted over 4, supported: more, up to 8"),
    (dict(boosted_bits=9), "9 bits boosted over 2, supported: more, up to 8"),
    (dict(bits=3), "3 bits is not supported"),
    (dict(selection="entropy"), "selection 'entropy', supported: magnitude, variance, weighted, random"),
])
def test_unsupported_sides_are_refused(change, words):
    with pytest.raises(ValueError, match=f"K: {words}"):
        Boosted(**change).check(128)


def test_what_is_not_combined_says_so():
    with pytest.raises(ValueError, match="rotate_keys: format kitty groups K per channel"):
        KVCache("kitty", 1, 1, 64, rotate_keys=True)
    with pytest.raises(NotImplementedError, match="no kernels"):
        decode(torch.zeros(1, 1, 1, 64).half(), KVCache("kitty", 1, 1, 64), path="register")
