"""Boosted values: names, bytes of a record, and values beside the uniform formats that they are made of."""

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, kernels, layout
from lowbit_attn.formats.affine import quantize_groups
from lowbit_attn.formats.contract import by_position, reordered

NAMES = {  # name -> bits of K, of boosted tokens and of the others, boosted tokens
    "k4v2-boost": (4, 4, 2, 32), "k8v4-boost": (8, 8, 4, 32), "k4v1-boost": (4, 2, 1, 32),
    "k4v2-boost16": (4, 4, 2, 16), "k2v2-boost64to8": (2, 8, 2, 64), "k1v1-boost96to4-bf16": (1, 4, 1, 96),
}
NOT_AT_64 = ("k4v1-boost", "k4v2-boost16", "k1v1-boost96to4-bf16")  # their runs fill no whole blocks there
PAIRS = [(name, d) for name in NAMES for d in (64, 128, 256) if not (d == 64 and name in NOT_AT_64)]
pairs = pytest.mark.parametrize("name, head_dim", PAIRS)


def page(head_dim: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K with channel offsets, V and an order of tokens [count, 128, ..]."""
    k, v = torch.randn(count, 128, head_dim) + 3 * torch.randn(head_dim), torch.randn(count, 128, head_dim)
    order = torch.stack([torch.randperm(128) for _ in range(count)]).to(torch.uint8)
    return k.half().float(), v.half().float(), order


@pytest.mark.parametrize("head_dim, v_offset, nbytes, bits", [
    (64, 4352, 7552, 3.6875), (128, 8704, 14464, 3.53125), (256, 17408, 28288, 3.453125)])
def test_record_of_the_default(head_dim, v_offset, nbytes, bits):
    fmt = FORMATS["k4v2-boost"]
    record = fmt.record(head_dim)
    assert (record.v_offset, record.nbytes, fmt.bits_per_element(head_dim)) == (v_offset, nbytes, bits)
    assert [(plane.name, plane.nbytes) for plane in record.v_planes] == [
        ("boosted", 16 * head_dim), ("codes", 24 * head_dim), ("meta", 512), ("positions", 128)]
    assert (fmt.window_k, fmt.window_v, fmt.sinks) == (128, 128, 32)
    assert record.k_planes == FORMATS["k4v4"].record(head_dim).k_planes


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    fmt, (k_bits, boosted_bits, bits, boosted) = FORMATS[name], NAMES[name]
    assert (fmt.k.bits, fmt.v.boosted_bits, fmt.v.bits, fmt.v.boosted) == (k_bits, boosted_bits, bits, boosted)
    assert fmt.name == name and fmt.orders_tokens and FORMATS[name] == fmt
    assert fmt.v.storage == fmt.k.storage == (torch.bfloat16 if name.endswith("bf16") else torch.float16)


@pytest.mark.parametrize("name", ["k4v4-boost32to4", "k4v2-boost24", "k4v2-boost128", "k4v2-boost0", "k4tv2-boost",
                                  "k4v8-boost", "k4v2-boostto2", "k4v2-boost-b4"])
def test_names_outside_the_grammar(name):
    with pytest.raises(KeyError, match="-boost"):
        FORMATS[name]


@pytest.mark.parametrize("name, head_dim, words", [
    ("k4v2-boost", 96, "96 tokens of 2 bits with head_dim 96"), ("k4v1-boost", 64, "tokens of 1 bits with head_dim 64"),
    ("k4v1-boost32to4", 64, "96 tokens of 1 bits"), ("k4v2-boost16", 64, "112 tokens of 2 bits"),
    ("k4v2-boost", 32, "96 tokens of 2 bits"),
    ("k4v2-boost", 80, "multiple of 32")])
def test_runs_that_fill_no_whole_blocks_are_refused(name, head_dim, words):
    with pytest.raises(ValueError, match=f"format {name}: .*{words}"):
        FORMATS[name].record(head_dim)
    with pytest.raises(ValueError, match=words):
        KVCache(name, 1, 1, head_dim)


def test_runs_that_do_are_served_at_96_channels():
    assert FORMATS["k4v2-boost64"].record_bytes(96) == 6144 + 384 + 96 * 64 * 6 // 8 + 512 + 128


@pairs
def test_every_code_is_where_the_layout_says(name, head_dim):
    """Codes of the group quantizer, found one by one in the bytes of the two runs by layout's functions."""
    fmt, (_, boosted_bits, bits, boosted), (k, v, _) = FORMATS[name], NAMES[name], page(head_dim, 1)
    planes = {p.name: fmt.quantize(k, v)[0, p.offset : p.offset + p.nbytes] for p in fmt.record(head_dim).v_planes}
    channel = torch.arange(head_dim)[:, None]
    for plane, first, stop, width in (("boosted", 0, boosted, boosted_bits), ("codes", boosted, 128, bits)):
        want = quantize_groups(v[0, first:stop], width, fmt.v.storage, "two-means" if width == 1 else "minmax").codes.T
        word, lane, byte, slot = layout.code_slot(channel, torch.arange(stop - first), head_dim, width)
        got = planes[plane][layout.word_offset(word, lane) + byte].int() >> (slot * width) & ((1 << width) - 1)
        assert torch.equal(got, want.int())
    assert planes["positions"].tolist() == list(range(128))


@pairs
@pytest.mark.parametrize("search", (None, True))
def test_values_are_those_of_the_uniform_formats(name, head_dim, search):
    """K as in a uniform format, whatever the order; V of each token as in the uniform format of its width."""
    fmt, (k_bits, boosted_bits, bits, boosted), (k, v, order) = FORMATS[name], NAMES[name], page(head_dim)
    suffix = "-bf16" * name.endswith("bf16")
    wide, narrow = (FORMATS[f"k{k_bits}v{b}{suffix}"] for b in (boosted_bits, bits))
    wide_records, narrow_records = wide.quantize(k, v, search), narrow.quantize(k, v, search)
    records = fmt.quantize(k, v, search, order=order)
    positions = fmt.positions(records, head_dim)
    assert torch.equal(positions, order)
    got_k, got_v = (by_position(x, positions) for x in (fmt.dequantize_k(records, head_dim),
                                                        fmt.dequantize_v(records, head_dim)))
    assert torch.equal(got_k, wide.dequantize_k(wide_records, head_dim))
    is_boosted = torch.zeros(2, 128, dtype=torch.bool).scatter_(1, order[:, :boosted].long(), True)
    want = torch.where(is_boosted[..., None], wide.dequantize_v(wide_records, head_dim),
                       narrow.dequantize_v(narrow_records, head_dim))
    assert torch.equal(got_v, want)


@pairs
def test_an_order_is_a_permutation_of_tokens_and_nothing_else(name, head_dim):
    fmt, (k, v, order) = FORMATS[name], page(head_dim)
    plain = fmt.quantize(reordered(k, order), reordered(v, order))
    fmt.positions(plain, head_dim).copy_(order)
    assert torch.equal(fmt.quantize(k, v, order=order), plain)
    identity = torch.arange(128, dtype=torch.uint8).expand(2, -1)
    assert torch.equal(fmt.quantize(k, v, order=identity), fmt.quantize(k, v))
    assert torch.equal(by_position(reordered(k, order), order), k)


@pairs
def test_sides_are_written_apart_and_padding_is_not(name, head_dim):
    fmt, (k, v, _) = FORMATS[name], page(head_dim)
    whole, record = fmt.quantize(k, v), fmt.record(head_dim)
    for write, x, planes in ((fmt.write_k, k, record.k_planes), (fmt.write_v, v, record.v_planes)):
        mine = torch.zeros(record.nbytes, dtype=torch.bool)
        for plane in planes:
            mine[plane.offset : plane.offset + plane.nbytes] = True
        records = torch.full_like(whole, 0xA5)
        write(records, x)
        assert torch.equal(records[:, mine], whole[:, mine]) and (records[:, ~mine] == 0xA5).all()


def test_nan_shows_where_it_was():
    fmt, (k, v, order) = FORMATS["k4v2-boost"], page(64, 1)
    v[0, 90, 5] = float("nan")
    records = fmt.quantize(k, v, order=order)
    got = by_position(fmt.dequantize_v(records, 64), fmt.positions(records, 64))
    assert got[0, 90, 5].isnan() and not got[0, :90].isnan().any() and not got[0, 91:].isnan().any()


def test_layout_id_is_the_familys_own():
    ids = {FORMATS[name].layout_id for name in ("k4v2", "kitty", "k4v2-boost", "k8v4-boost")}
    assert len(ids) == 3 and all(layout.LAYOUT_ID in one for one in ids)
    assert FORMATS["k4v2-boost"].layout_id == FORMATS["k8v4-boost"].layout_id


def test_other_formats_hold_no_positions():
    fmt, (k, v, _) = FORMATS["k4v4"], page(64)
    with pytest.raises(ValueError, match="k4v4: its tokens are stored by position"):
        fmt.positions(fmt.quantize(k, v), 64)


def test_windows_of_both_sides_must_be_one():
    from dataclasses import replace

    with pytest.raises(ValueError, match="window_k: got 0, supported: window_v = 128"):
        replace(FORMATS["k4v2-boost"], window_k=0)


def test_kernels_serve_all_but_windows_and_what_tiles_read():
    """Of names, head_dims and features: what a call is refused for, by reason."""
    fmt = FORMATS["k4v2-boost"]
    assert not kernels.quantize_missing(fmt, 128, torch.float16)
    for arch, path in (("hopper", "integer"), ("ampere", "register")):
        rows = 4 if arch == "hopper" else 8
        assert kernels.pick(arch, fmt, 128, torch.float16, 4)[0] == (path, rows)
        picked, reasons = kernels.pick(arch, fmt, 128, torch.float16, 4, path, ("window",))
        assert picked is None and "feature window, supported: softcap" in reasons[0]
        assert "V per token" in kernels.pick(arch, fmt, 128, torch.float16, 4, "tile")[1][0]
    assert "bits of boosted values 8" in kernels.pick("ampere", FORMATS["k4v2-boostto8"], 128, torch.float16, 4)[1][0]
    assert "whole blocks" in kernels.pick("hopper", fmt, 96, torch.float16, 4)[1][0]
