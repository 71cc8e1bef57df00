"""Every registered format and a spread of the grammar: records, round trips, defaults, and a format made here."""

import re

import pytest
import torch

from lowbit_attn import FORMATS, KVCache, decode, kernels, layout
from lowbit_attn.formats import FAMILIES, Family, Format, FormatRegistry, Kind, Side
from lowbit_attn.formats.affine import dequantize_groups, quantize_groups
from lowbit_attn.reference import attention

SPREAD = ("k8v8", "k8tv1", "k4v4-g32-vg32", "k4tv2-g64", "k2tv8-g32-vg64-bf16", "k2v4-g64-bf16", "k1v1", "k1tv1-g32",
          "k4v1", "k2v2-vg32", "k8v2-bf16", "k1v8-g128")
PRESETS = tuple(name for name in FORMATS if not FORMATS[name].needs_codebooks)  # the others: test_codebook_formats
NAMES = tuple(dict.fromkeys((*PRESETS, *SPREAD)))
DIMS = (32, 64, 96, 128, 256)
UNIFORM = re.compile(r"k(\d)(t?)v(\d)(?:-g(\d+))?(?:-vg(\d+))?(-bf16)?")


def supports(name: str, head_dim: int) -> bool:
    try:
        FORMATS[name].record(head_dim)
    except ValueError:
        return False
    return True


PAIRS = [(name, d) for name in NAMES for d in DIMS if supports(name, d)]
UNIFORM_PAIRS = [(name, d) for name, d in PAIRS if UNIFORM.fullmatch(name)]
formats = pytest.mark.parametrize("name, head_dim", PAIRS)
uniform = pytest.mark.parametrize("name, head_dim", UNIFORM_PAIRS)


def tokens(head_dim: int, count: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """K with channel means and an outlier channel, V, as fp32 values of fp16 numbers."""
    k, v = torch.randn(count, 128, head_dim) + torch.randn(head_dim) * 3, torch.randn(count, 128, head_dim)
    k[..., 1] *= 30
    return k.half().float(), v.half().float()


def test_every_preset_has_some_head_dim():
    assert set(PRESETS) <= {name for name, _ in PAIRS}
    assert len(FORMATS) == len(list(FORMATS)) > 0


@formats
def test_planes_fill_the_record_without_overlap(name, head_dim):
    record = FORMATS[name].record(head_dim)
    end = 0
    for plane in record.k_planes:
        assert plane.offset >= end and plane.nbytes > 0
        end = plane.offset + plane.nbytes
    assert record.v_offset == -(-end // 128) * 128
    end = record.v_offset
    for plane in record.v_planes:
        assert plane.offset >= end and plane.nbytes > 0
        end = plane.offset + plane.nbytes
    assert record.nbytes == -(-end // 128) * 128 == FORMATS[name].record_bytes(head_dim)
    assert all(plane.offset % 16 == 0 for plane in (*record.k_planes, *record.v_planes))  # 16-byte loads


@uniform
def test_record_size_is_the_documented_one(name, head_dim):
    """Codes plus one (scale, zero) of 4 bytes a group, each side rounded up to 128 bytes."""
    k_bits, per_token, v_bits, k_group, v_group, _ = UNIFORM.fullmatch(name).groups()
    k_group, v_group = int(k_group or (head_dim if per_token else 128)), int(v_group or head_dim)
    sides = [128 * head_dim * int(bits) // 8 + 128 * head_dim // group * 4
             for bits, group in ((k_bits, k_group), (v_bits, v_group))]
    assert FORMATS[name].record_bytes(head_dim) == sum(-(-side // 128) * 128 for side in sides)


@pytest.mark.parametrize("name, head_dim, bits", [
    ("k4v4", 128, 4.25), ("k2v2", 128, 2.25), ("k8v4", 128, 6.25), ("k4v2", 128, 3.25), ("k4v4-g32-vg32", 128, 5.0),
    ("k4v4-g64-vg64", 128, 4.5), ("k2v2-g32-vg32", 128, 3.0), ("k4v4", 64, 4.375), ("k2v2", 64, 2.375),
    ("k4tv4", 64, 4.5), ("k8v4", 64, 6.375), ("k4v1", 128, 2.75),
])
def test_bits_per_element(name, head_dim, bits):
    assert FORMATS[name].bits_per_element(head_dim) == bits


@uniform
@pytest.mark.parametrize("search", (None, False, True))
def test_records_read_back_as_the_group_quantizer_says(name, head_dim, search):
    """Groups cut by hand out of K and V, quantized one side at a time, against the bytes of a record."""
    k_bits, per_token, v_bits, k_group, v_group, bf16 = UNIFORM.fullmatch(name).groups()
    storage, k_bits, v_bits = torch.bfloat16 if bf16 else torch.float16, int(k_bits), int(v_bits)
    k, v = tokens(head_dim)

    def through(x, bits, group, searches):
        levels = "search" if searches else "two-means" if bits == 1 else "minmax"
        return dequantize_groups(quantize_groups(x.unflatten(-1, (-1, group)), bits, storage, levels)).flatten(-2)

    k_searches = k_bits <= 2 if search is None else search  # the default: K of at most 2 bits
    if per_token:
        want_k = through(k, k_bits, int(k_group or head_dim), k_searches)
    else:
        want_k = through(k.transpose(1, 2), k_bits, int(k_group or 128), k_searches).transpose(1, 2)
    want_v = through(v, v_bits, int(v_group or head_dim), bool(search))
    records = FORMATS[name].quantize(k, v, search)
    assert torch.equal(FORMATS[name].dequantize_k(records, head_dim), want_k)
    assert torch.equal(FORMATS[name].dequantize_v(records, head_dim), want_v)


@formats
def test_values_come_back_close(name, head_dim):
    """On normal data, where grouping by channel and by token serve alike."""
    fmt, k, v = FORMATS[name], *torch.randn(2, 2, 128, head_dim)
    records = fmt.quantize(k, v)
    assert records.shape == (2, fmt.record_bytes(head_dim)) and records.dtype == torch.uint8
    for got, want, side in ((fmt.dequantize_k(records, head_dim), k, fmt.k),
                            (fmt.dequantize_v(records, head_dim), v, fmt.v)):
        limit = {8: 0.01, 4: 0.12, 2: 0.57, 1: 0.75}[side.bits]
        assert got.shape == want.shape and got.dtype == torch.float32
        for page in range(2):
            assert (got[page] - want[page]).norm() <= limit * want[page].norm()


@formats
def test_sides_are_written_apart(name, head_dim):
    """write_k touches K's planes only, write_v V's only, and neither touches the padding."""
    fmt, (k, v) = FORMATS[name], tokens(head_dim)
    whole, record = fmt.quantize(k, v), fmt.record(head_dim)
    for write, x, planes in ((fmt.write_k, k, record.k_planes), (fmt.write_v, v, record.v_planes)):
        mine = torch.zeros(record.nbytes, dtype=torch.bool)
        for plane in planes:
            mine[plane.offset : plane.offset + plane.nbytes] = True
        records = torch.full_like(whole, 0xA5)
        write(records, x)
        assert torch.equal(records[:, mine], whole[:, mine])
        assert (records[:, ~mine] == 0xA5).all()


@formats
def test_pages_do_not_depend_on_their_neighbours(name, head_dim):
    fmt, (k, v) = FORMATS[name], tokens(head_dim, 3)
    whole = fmt.quantize(k, v)
    assert torch.equal(fmt.quantize(k[1:2], v[1:2]), whole[1:2])
    assert not torch.equal(whole[0], whole[1])


@formats
def test_nan_shows(name, head_dim):
    """A NaN in K or V reads back as NaN where it was, and the rest of the other side is untouched."""
    fmt, (k, v) = FORMATS[name], tokens(head_dim, 1)
    k[0, 17, 3], v[0, 90, 5] = float("nan"), float("nan")
    records = fmt.quantize(k, v)
    got_k, got_v = fmt.dequantize_k(records, head_dim), fmt.dequantize_v(records, head_dim)
    assert got_k[0, 17, 3].isnan() and got_v[0, 90, 5].isnan()
    assert not got_v[0, 89].isnan().any()


def test_range_search_changes_codes_not_the_layout():
    k, v = tokens(128)
    fmt = FORMATS["k2v2"]
    plain, searched, default = (fmt.quantize(k, v, search) for search in (False, True, None))
    half = fmt.record(128).v_offset
    assert plain.shape == searched.shape
    assert torch.equal(default[:, :half], searched[:, :half]) and not torch.equal(default[:, :half], plain[:, :half])
    assert torch.equal(default[:, half:], plain[:, half:]) and not torch.equal(default[:, half:], searched[:, half:])


def test_unknown_format_shows_close_matches_and_where_the_grammar_is():
    for name, close in (("k4v5", "k4v4"), ("k4v4-g16", "k4v4"), ("k2v3", "k2v2"), ("K4V4", "k4v4")):
        with pytest.raises(KeyError) as error:
            FORMATS[name]
        message = str(error.value)
        assert repr(name) in message and "docs/formats.md" in message
        assert f"did you mean {close}" in message or f"or {close}" in message
    assert "k4v5" not in FORMATS and "k1tv8-g32-vg64-bf16" in FORMATS


@pytest.mark.parametrize("name, head_dim, words", [
    ("k4v4", 80, "multiple of 32"), ("k4v4", 0, "multiple of 32"), ("k4v1", 96, "multiple of 64 rows"),
    ("k4v4-vg64", 96, "V group 64 does not divide head_dim 96"), ("k4tv4-g128", 96, "K group 128 does not divide"),
])
def test_unsupported_head_dims_are_refused(name, head_dim, words):
    with pytest.raises(ValueError, match=f"format {name}: .*{words}"):
        FORMATS[name].record(head_dim)
    with pytest.raises(ValueError, match=words):
        KVCache(name, 1, 1, head_dim)


@formats
def test_spec_says_where_the_planes_lie(name, head_dim):
    """What kernels are told of a side, against its record and what one page of it holds."""
    fmt = FORMATS[name]
    record = fmt.record(head_dim)
    for side, spec, planes, start, end in zip((fmt.k, fmt.v), fmt.specs(head_dim), (record.k_planes, record.v_planes),
                                              (0, record.v_offset), (record.v_offset, record.nbytes)):
        at = {plane.name: plane for plane in planes}
        assert (spec.start, spec.nbytes) == (start, end - start) and spec.first_unit * layout.RECORD_ALIGN == start
        assert (spec.codes, spec.meta) == tuple(at[plane].offset - start for plane in ("codes", "meta"))
        wide = spec.wide.tokens if spec.wide else 0
        assert at["codes"].nbytes == spec.rows * (spec.cols - wide) * spec.bits // 8
        assert at["meta"].nbytes == 4 * spec.groups * (head_dim if spec.kind is Kind.CHANNEL else layout.PAGE_TOKENS)
        assert spec.kind is side.kind and (spec.high is not None) == ("high" in at)
        assert (spec.wide is not None) == ("boosted" in at)
        if wide:
            assert (spec.wide.codes, spec.wide.positions) == tuple(
                at[plane].offset - start for plane in ("boosted", "positions"))
            assert at["boosted"].nbytes == spec.rows * wide * spec.wide.bits // 8
        if high := spec.high:
            assert (high.codes, high.index) == (at["high"].offset, at["index"].offset)
            assert at["index"].nbytes == high.slots >= high.channels
            assert at["high"].nbytes == layout.PAGE_TOKENS * high.slots * high.bits // 8


def test_families_have_layout_ids_of_their_own():
    assert FORMATS["k4v4"].layout_id == FORMATS["k2tv1-g32"].layout_id == layout.LAYOUT_ID
    assert FORMATS["kitty"].layout_id == FORMATS["kitty-pro-vg32"].layout_id != layout.LAYOUT_ID
    assert layout.LAYOUT_ID in FORMATS["kitty"].layout_id  # its planes are in the common order


def test_a_side_without_a_spec_has_no_kernels():
    fmt = Format("raw16", Sixteen(), Sixteen())
    assert fmt.specs(64) == (None, None)
    assert kernels.quantize_missing(fmt, 64, torch.float16) == [
        "format raw16, supported: K per channel, per token, boosted or by codebooks, with V per token or by codebooks"]
    for arch in kernels.ARCH_TARGETS:
        picked, reasons = kernels.pick(arch, fmt, 64, torch.float16, 4)
        assert picked is None and reasons and all("format raw16, supported: " in r for r in reasons)


class Sixteen(Side):
    """fp16 values as they are."""

    bits = 16

    def check(self, head_dim):
        if head_dim % 8:
            raise ValueError(f"head_dim {head_dim} is not supported; supported: multiples of 8")

    def plane_sizes(self, head_dim):
        return {"values": 2 * layout.PAGE_TOKENS * head_dim}

    def quantize(self, x, range_search):
        return {"values": x.half().flatten(1).view(torch.uint8)}

    def dequantize(self, planes, head_dim):
        return planes["values"].contiguous().view(torch.float16).float().unflatten(1, (-1, head_dim))


def test_a_new_format_is_one_class_and_one_line():
    """16-bit passthrough: flows through the cache and decode, with exactly the original values."""
    fmt = Format("raw16", Sixteen(), Sixteen())
    registry = FormatRegistry(FAMILIES + [Family("raw16", ("raw16",), lambda name: fmt if name == "raw16" else None)])
    assert registry["raw16"] is fmt and "raw16" in list(registry) and registry["k4v4"] is FORMATS["k4v4"]
    assert fmt.bits_per_element(64) == 16
    cache = KVCache(registry["raw16"], 3, 2, 64, sinks=4, max_q_len=2)
    k, v = (torch.randn(400, 2, 64).half() for _ in range(2))
    cache.prefill(0, k[:-2], v[:-2])
    cache.append(k[None, -2:], v[None, -2:])
    assert int(cache.n_qk[0]) == 384
    got_k, got_v = cache.gather(0)
    assert torch.equal(got_k, k.float().transpose(0, 1)) and torch.equal(got_v, v.float().transpose(0, 1))
    q = torch.randn(1, 2, 6, 64).half()
    o, lse = decode(q, cache)
    want, want_lse = attention(q[0], k.transpose(0, 1), v.transpose(0, 1))
    assert torch.equal(o[0], want.half()) and torch.equal(lse[0], want_lse)
