"""Codebook formats: grammar, records, and bytes against entries that are looked up by hand."""

from itertools import product

import pytest
import torch

from lowbit_attn import FORMATS, kernels
from lowbit_attn.codebooks import Codebooks
from lowbit_attn.formats import Kind, Scope, codebook
from lowbit_attn.formats import codebook_order as order
from lowbit_attn.testing import normal_codebooks

NAMES = ("cq4", "cq2", "cq1", "kcq4vcq2", "kcq2vcq1", "cq2-nonorm", "k4vcq2", "k2tvcq4-g32-bf16-nonorm", "kcq2v4",
         "kcq4v2-vg64-bf16")
DIMS = (64, 96, 128)


def supports(name: str, head_dim: int) -> bool:
    try:
        FORMATS[name].record(head_dim)
    except ValueError:
        return False
    return True


formats = pytest.mark.parametrize("name, head_dim", [(n, d) for n in NAMES for d in DIMS if supports(n, d)])


def entries(name: str, head_dim: int, heads: int = 2, seed: int = 0) -> dict[str, torch.Tensor]:
    """What ``Format.quantize`` takes for the sides that have codebooks."""
    books = normal_codebooks(name, 1, heads, head_dim, seed=seed).layer(0)
    return {f"{side}_entries": x for side in "kv" if (x := getattr(books, f"{side}_entries")) is not None}


def tokens(head_dim: int, count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(count, 128, head_dim) + torch.randn(head_dim) * 3, torch.randn(count, 128, head_dim)
    return k.half().float(), v.half().float()


def both(name: str, k, v, given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V after a record."""
    fmt, head_dim = FORMATS[name], k.shape[-1]
    records = fmt.quantize(k, v, **given)
    return (fmt.dequantize_k(records, head_dim, given.get("k_entries")),
            fmt.dequantize_v(records, head_dim, given.get("v_entries")))


# ---- names


@pytest.mark.parametrize("name, k, v", [
    ("cq4", (2, False), (2, True)), ("cq2", (4, False), (4, True)), ("cq1", (8, False), (8, True)),
    ("cq2-nonorm", (4, False), (4, False)), ("kcq4vcq2", (2, False), (4, True)),
    ("kcq1vcq4-nonorm", (8, False), (2, False)),
])
def test_names_say_the_channels_of_a_code_and_whether_v_has_norms(name, k, v):
    fmt = FORMATS[name]
    assert fmt.name == name and fmt.sinks == 32 and (fmt.window_k, fmt.window_v) == (0, 0) and fmt.needs_codebooks
    assert ((fmt.k.vec_size, fmt.k.normed), (fmt.v.vec_size, fmt.v.normed)) == (k, v)
    assert fmt.k.kind is fmt.v.kind is Kind.CODEBOOK and fmt.k.bits == 8 // k[0]


@pytest.mark.parametrize("name, uniform, book", [
    ("k4vcq2", "k4v4", "cq2"), ("k2tvcq1-g32", "k2tv4-g32", "cq1"),
    ("k4vcq2-g64-bf16-nonorm", "k4v4-g64-bf16", "cq2-nonorm"),
    ("kcq2v4", "k4v4", "cq2"), ("kcq4v2-vg32-bf16", "k4v2-vg32-bf16", "cq4"),
])
def test_mixed_names_take_a_side_of_each_family(name, uniform, book):
    mixed, is_k_book = FORMATS[name], name.startswith("kcq")
    assert mixed.k == FORMATS[book if is_k_book else uniform].k and mixed.v == FORMATS[uniform if is_k_book else book].v
    assert mixed.sinks == 32 and mixed.needs_codebooks and not FORMATS[uniform].needs_codebooks


@pytest.mark.parametrize("name", (
    "cq8", "cq3", "cq", "kcq8vcq2", "k8vcq8", "kcq2", "kcq2tvcq2", "cq2-bf16", "kcq2vcq2-bf16", "kcq2vcq2-g32",
    "k4vcq2-vg32", "kcq2v4-g32", "kcq2v4-nonorm", "cq2-nonorm-bf16", "k4vcq2-nonorm-g32", "k4vcq2-bf16-g32", "CQ2",
    "k16vcq2",
))
def test_other_names_are_in_no_grammar(name):
    assert name not in FORMATS
    with pytest.raises(KeyError, match="is not known.*grammar of all names is in docs.formats.md"):
        FORMATS[name]


@pytest.mark.parametrize("name", ("cq2x2", "cq4x3", "kcq2x2vcq2", "VQ<4,8,2>", "vq<2, 8, 2>"))
def test_residual_codebooks_are_refused_by_name(name):
    assert name not in FORMATS
    with pytest.raises(KeyError, match="codes of residuals .* are not supported; supported: one code"):
        FORMATS[name]


def test_presets_are_in_the_registry_and_have_kernels():
    names = {"kcq4vcq2", "cq2", "cq4"}
    assert names <= set(FORMATS) and names <= {key.format for key in kernels.shipped_keys("hopper")}
    for name, (rows, kernel) in product(names, ((3, ("codebook", 4)), (4, ("codebook", 4)), (5, ("codebook8", 8)),
                                               (9, ("codebook64", 64)), (65, ("codebook64", 64)))):
        assert kernels.pick("hopper", FORMATS[name], 128, torch.float16, rows)[0] == kernel
    for name in names:
        assert kernels.pick("hopper", FORMATS[name], 128, torch.float16, 2)[0] == ("codebook2", 2)
        assert kernels.pick("ampere", FORMATS[name], 128, torch.float16, rows)[0] == ("codebook", 8)
    picked, reasons = kernels.pick("ampere", FORMATS["cq1"], 128, torch.float16, 1)
    assert picked is None and reasons


@pytest.mark.parametrize("name, head_dim, archs", [
    ("cq1", 128, ("ampere",)), ("cq1", 64, ("hopper", "ampere")), ("k4vcq1", 64, ("hopper",)),
    ("cq2", 96, ("hopper", "ampere")), ("cq4", 256, ("hopper", "ampere")), ("k4vcq1", 128, ("ampere",)),
    ("k4vcq2", 96, ("hopper",)), ("k4vcq2", 128, ("ampere",)), ("kcq4v2", 64, ("ampere",))])
def test_what_no_kernel_reads(name, head_dim, archs):
    for arch in archs:
        assert kernels.pick(arch, FORMATS[name], head_dim, torch.float16, 4)[0] is None
        assert f"no kernel on {arch} reads its codebooks yet" in kernels.no_codebooks(arch, FORMATS[name], head_dim)[0]


@pytest.mark.parametrize("name", ("k4vcq2", "kcq4v2-vg32", "k8tvcq4-bf16", "k1vcq2-nonorm", "kcq2v8"))
def test_a_codebook_on_one_side_goes_through_tiles_whatever_the_rows(name):
    for head_dim, rows in product((64, 128), (1, 8, 64)):
        assert kernels.no_codebooks("hopper", FORMATS[name], head_dim) == []
        assert kernels.pick("hopper", FORMATS[name], head_dim, torch.bfloat16, rows)[0] == ("codebook64", 64)


@pytest.mark.parametrize("name", ("cq1", "kcq2vcq1", "kcq1vcq4-nonorm", "k4vcq1", "kcq1v2"))
def test_codebooks_of_1_bit_go_through_tiles_whatever_the_rows(name):
    for rows in (1, 8, 64):
        assert kernels.pick("hopper", FORMATS[name], 128, torch.float16, rows)[0] == ("codebook64", 64)
    assert "head_dim with codebooks of 1 bit 64, supported: 128" in kernels.no_codebooks("hopper", FORMATS[name], 64)[0]


# ---- records


@pytest.mark.parametrize("name, bits", [
    ("cq4", 4.125), ("kcq4vcq2", 3.125), ("cq2", 2.125), ("kcq2vcq1", 1.625), ("cq1", 1.125), ("cq2-nonorm", 2.0625),
    ("k4vcq2", 3.1875),
])
def test_bits_per_element_at_head_dim_128(name, bits):
    assert FORMATS[name].bits_per_element(128) == bits


@formats
def test_planes_and_specs_agree(name, head_dim):
    fmt = FORMATS[name]
    record = fmt.record(head_dim)
    ends = (record.v_offset, record.nbytes)
    for side, spec, planes, start, end in zip((fmt.k, fmt.v), fmt.specs(head_dim), (record.k_planes, record.v_planes),
                                              (0, record.v_offset), ends):
        assert planes[0].offset == start and end % 128 == 0 and all(plane.offset % 16 == 0 for plane in planes)
        if side.kind is not Kind.CODEBOOK:
            continue
        sizes = {plane.name: plane.nbytes for plane in planes}
        shift = {"mean": 2 * head_dim} if side is fmt.k else {"norm": 256} if side.normed else {}
        assert sizes == {"codes": 128 * head_dim // side.vec_size} | shift
        assert (spec.kind, spec.bits, spec.transposed, spec.start) == (Kind.CODEBOOK, side.bits, side is fmt.v, start)
        assert spec.codes == 0 and spec.group_size == side.vec_size and spec.meta == sizes["codes"]
        shared = {plane.name: plane.nbytes for plane in spec.shared if plane.scope is Scope.HEAD}
        assert shared["entries"] == 512 * head_dim and ("order" in shared) == (side is fmt.k)


def test_head_dims_that_no_code_divides_are_refused():
    with pytest.raises(ValueError, match="format cq1: K: head_dim 100 is not supported; it must be a multiple of 8"):
        FORMATS["cq1"].record(100)
    assert FORMATS["cq2"].record(100).nbytes > 0


# ---- the nearest entry


@pytest.mark.parametrize("vec_size", (2, 4, 8))
def test_nearest_is_the_nearest(vec_size):
    values, table = torch.randn(3, 500, vec_size), torch.randn(3, 256, vec_size)
    codes = codebook.nearest(values, table).long()
    distance = (values[:, :, None].double() - table[:, None].double()).square().sum(-1)
    taken = distance.gather(2, codes[..., None])[..., 0]
    assert (taken <= distance.amin(-1) * (1 + 1e-5)).all() and len(codes.unique()) > 100


def test_nearest_of_a_part_is_that_part():
    values, table = torch.randn(40, 700, 4), torch.randn(40, 256, 4)
    whole = codebook.nearest(values, table)
    assert torch.equal(whole[7:9, 300:301], codebook.nearest(values[7:9, 300:301], table[7:9]))


def test_ties_go_to_the_lower_index():
    table = torch.full((1, 256, 4), 9.0)
    table[0, [200, 90, 91]] = 1.0
    table[0, 17] = -1.0
    codes = codebook.nearest(torch.tensor([[[1.0] * 4, [0.0] * 4, [9.0] * 4]]), table)
    assert codes.tolist() == [[90, 17, 0]]


def test_nearest_of_what_is_no_number_or_too_large():
    table = torch.zeros(1, 256, 2)
    table[0, [3, 5, 9]] = torch.tensor([[60000.0, 0], [0, -60000.0], [1.0, 1]])
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([[[nan, nan], [inf, 1.0], [1.0, nan], [3e38, 0.0], [0.0, -3e38]]])
    assert codebook.nearest(values, table).tolist() == [[0, 0, 0, 3, 5]]


# ---- values


@formats
def test_values_are_entries_about_the_mean_times_the_norm(name, head_dim):
    """Codes of a page found by brute force, token by token, read back through ``code_offset`` and the planes."""
    fmt, (k, v), given = FORMATS[name], tokens(head_dim), entries(name, head_dim)
    records = fmt.quantize(k, v, **given)
    for side, x, planes, table in ((fmt.k, k, fmt.record(head_dim).k_planes, given.get("k_entries")),
                                   (fmt.v, v, fmt.record(head_dim).v_planes, given.get("v_entries"))):
        if side.kind is not Kind.CODEBOOK:
            continue
        at = {plane.name: records[3, plane.offset : plane.offset + plane.nbytes] for plane in planes}
        mean, norm = torch.zeros(head_dim), torch.ones(128)
        if "mean" in at:
            mean = at["mean"].view(torch.float16).float()
            assert torch.allclose(mean, x[3].mean(0), rtol=1e-3, atol=1e-3)
        if "norm" in at:
            norm = at["norm"].view(torch.float16).float()[[order.norm_index(t) for t in range(128)]]
            assert torch.allclose(norm, x[3].square().mean(-1).sqrt(), rtol=1e-3)
        groups = head_dim // side.vec_size
        wanted = ((x[3] - mean) / norm[:, None]).unflatten(1, (groups, side.vec_size)).double()
        codes = torch.tensor([[int(at["codes"][order.code_offset(t, y, groups, side is fmt.v)]) for y in range(groups)]
                              for t in range(128)])
        chosen = table[1].float()[torch.arange(groups), codes]  # page 3 of two heads in turn is head 1's
        best = (wanted[:, :, None] - table[1].double()).square().sum(-1).amin(-1)
        assert ((wanted - chosen).square().sum(-1) <= best * (1 + 1e-5)).all()
        read = fmt.dequantize_k if side is fmt.k else fmt.dequantize_v
        assert torch.equal(read(records, head_dim, table)[3], chosen.flatten(1) * norm[:, None] + mean)


@formats
def test_values_come_back_close(name, head_dim):
    k, v = torch.randn(2, 4, 128, head_dim)
    got = both(name, k, v, entries(name, head_dim))
    for x, y, side in zip((k, v), got, (FORMATS[name].k, FORMATS[name].v)):
        assert (y - x).norm() <= {4: 0.2, 2: 0.6, 1: 0.75}[side.bits] * x.norm()


@formats
def test_what_was_read_is_written_as_it_was(name, head_dim):
    """Entries come back as themselves: a page of read values has the same codes, where its mean stays."""
    fmt, given = FORMATS[name], entries(name, head_dim)
    if "v_entries" in given and not fmt.v.normed:
        v = both(name, *tokens(head_dim), given)[1]
        assert torch.equal(both(name, v, v, given)[1], v)
    if "k_entries" in given:  # antisymmetric tokens: mean 0
        table = given["k_entries"].clone()
        table[:, :, 128:] = -table[:, :, :128]
        codes = torch.randint(128, (2, 64, head_dim // fmt.k.vec_size))
        half = table.float()[torch.arange(2)[:, None, None], torch.arange(codes.shape[2]), codes].flatten(2)
        k = torch.cat((half, -half), 1)
        assert torch.equal(both(name, k, k, given | {"k_entries": table})[0], k)


@formats
def test_pages_heads_and_sides_are_written_apart(name, head_dim):
    fmt, (k, v), given = FORMATS[name], tokens(head_dim), entries(name, head_dim)
    whole, record = fmt.quantize(k, v, **given), fmt.record(head_dim)
    assert torch.equal(fmt.quantize(k[2:], v[2:], **given), whole[2:]) and not torch.equal(whole[0], whole[2])
    second = {name: x[1:] for name, x in given.items()}
    assert torch.equal(fmt.quantize(k[1:2], v[1:2], **second), whole[1:2])
    for write, x, planes, table in ((fmt.write_k, k, record.k_planes, "k_entries"),
                                    (fmt.write_v, v, record.v_planes, "v_entries")):
        mine = torch.zeros(record.nbytes, dtype=torch.bool)
        for plane in planes:
            mine[plane.offset : plane.offset + plane.nbytes] = True
        records = torch.full_like(whole, 0xA5)
        write(records, x, entries=given.get(table))
        assert torch.equal(records[:, mine], whole[:, mine]) and (records[:, ~mine] == 0xA5).all()


def test_other_codebooks_give_other_values():
    k, v = tokens(64)
    one, two = (entries("cq2", 64, seed=seed) for seed in (0, 1))
    records = FORMATS["cq2"].quantize(k, v, **one)
    assert (FORMATS["cq2"].dequantize_k(records, 64, two["k_entries"]) - k).norm() > 0.8 * (k - k.mean(1, True)).norm()


def test_range_search_changes_nothing():
    k, v = tokens(64)
    given = entries("cq2", 64)
    assert torch.equal(FORMATS["cq2"].quantize(k, v, True, **given), FORMATS["cq2"].quantize(k, v, False, **given))


# ---- hard inputs


@pytest.mark.parametrize("value", (float("nan"), float("inf"), float("-inf")))
def test_nan_and_infinity_show_where_they_were_and_nowhere_else(value):
    """In K a channel of one page of one head, in V one token."""
    k, v = tokens(128)
    given, clean = entries("cq2", 128), both("cq2", k, v, entries("cq2", 128))
    k[1, 17, 30], v[2, 90, 5] = value, value
    got_k, got_v = both("cq2", k, v, given)
    assert not got_k[1, :, 30].isfinite().any() and not got_v[2, 90].isfinite().all() and not got_v[2, 90, 5].isfinite()
    assert got_k[1, :, torch.arange(128) != 30].isfinite().all()
    assert torch.equal(got_k[[0, 2, 3]], clean[0][[0, 2, 3]])
    others = torch.arange(128) != 90
    assert torch.equal(got_v[2, others], clean[1][2, others]) and torch.equal(got_v[[0, 1, 3]], clean[1][[0, 1, 3]])


def test_without_norms_nan_in_v_reads_as_a_number():
    """The one input that ``-nonorm`` cannot show: it has no 16-bit value in V's page."""
    k, v = tokens(64)
    v[0, 3, 2] = float("nan")
    assert both("cq2-nonorm", k, v, entries("cq2-nonorm", 64))[1].isfinite().all()


def test_means_and_norms_beyond_fp16_are_clamped():
    k, v = torch.full((2, 128, 64), 3e38), torch.randn(2, 128, 64)
    v[0, 0] = 3e38
    got_k, got_v = both("cq2", k, v, entries("cq2", 64))
    assert got_k.isfinite().all() and got_v.isfinite().all() and (got_k > 60000).all()
    fmt = FORMATS["cq2"]
    records = fmt.quantize(k, v, **entries("cq2", 64))
    planes = {plane.name: plane for plane in (*fmt.record(64).k_planes, *fmt.record(64).v_planes)}
    mean, norm = (records[:, plane.offset : plane.offset + plane.nbytes].view(torch.float16)
                  for plane in (planes["mean"], planes["norm"]))
    assert (mean == 65504).all() and norm[0].eq(65504).sum() == 1 and not norm[1].eq(65504).any()


def test_zeros_and_outliers():
    """A token of zeros is zeros, and one of values a thousand times larger is as good as the others."""
    k, v = torch.zeros(2, 128, 64), torch.randn(2, 128, 64)
    v[0, 0], v[0, 1] = 0.0, v[0, 1] * 1000
    got_k, got_v = both("cq2", k, v, entries("cq2", 64))
    assert (got_v[0, 0] == 0).all() and (got_v[0, 1] - v[0, 1]).norm() < 0.6 * v[0, 1].norm()
    assert got_k.norm(dim=-1).amax() < 8 * 0.6


@pytest.mark.parametrize("made, words", [
    (lambda table: None, "entries: got none, supported for codes of 2 bits"),
    (lambda table: table[:, :8], r"entries: got \[2, 8, 256, 4\] for 4 pages"),
    (lambda table: table[..., :2], r"entries: got \[2, 16, 256, 2\]"),
    (lambda table: table[[0, 1, 0]], r"entries: got \[3, 16, 256, 4\] for 4 pages"),
])
def test_entries_of_another_shape_are_refused(made, words):
    k, v = tokens(64)
    given = entries("cq2", 64)
    with pytest.raises(ValueError, match=words):
        FORMATS["cq2"].quantize(k, v, k_entries=made(given["k_entries"]), v_entries=given["v_entries"])


def test_codebooks_of_a_layer_fit_the_format_that_they_name():
    for name in NAMES:
        books = normal_codebooks(name, 2, 3, 64)
        assert isinstance(books, Codebooks) and (books.layers, books.num_heads_kv) == (2, 3)
        fmt = FORMATS[name]
        for side, table in ((fmt.k, books.k_entries), (fmt.v, books.v_entries)):
            assert (table is None) == (side.kind is not Kind.CODEBOOK)
            assert table is None or tuple(table.shape[1:]) == side.entries_shape(3, 64)
