"""The kernels on a CUDA device against the CPU: bytes, dequantized values, decode, merge. Both architectures' builds."""

import itertools

import pytest
import torch

import lowbit_attn
from lowbit_attn import dispatch, kernels, loader, reference, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.kernels import KernelKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ARCHES = ("hopper", "ampere")
LENGTHS = (0, 1, 127, 128, 129, 4097)  # one ragged batch: empty, one token, around a page, many pages
RATIOS = range(1, 9)


@pytest.fixture(params=ARCHES)
def arch(request, monkeypatch):
    """Runs the test with each architecture's kernels; skips what this device cannot run."""
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", request.param)
    try:
        dispatch.target_of(torch.device("cuda"))
    except NotImplementedError as error:
        pytest.skip(str(error))
    return request.param


def hard_blocks(head_dim: int) -> torch.Tensor:
    """fp16 blocks [n, 2 heads, 128, head_dim] of the groups that broke other quantizers, in both grouping directions."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 128, head_dim, generator=generator)
    two_valued = torch.where(normal > 0, 1.5, -0.25)
    spoiled = []
    for value in (1e4, 65504.0, float("nan"), float("inf"), -float("inf"), 6e-8, -0.0):
        x = normal.clone()
        x[0, 7, 3] = value
        x[1, :, 5] = value
        x[1, 9, :] = value
        spoiled.append(x)
    tiny, far, halves = normal * 3e-7, normal * 0.01 + 200, (normal * 8).round() / 2
    blocks = [normal, torch.zeros_like(normal), torch.full_like(normal, 0.1), two_valued, tiny, far, halves, *spoiled]
    return torch.stack(blocks).half()


@pytest.mark.parametrize("head_dim", kernels.SHIPPED_HEAD_DIMS)
@pytest.mark.parametrize("name", kernels.SHIPPED_FORMATS)
def test_quantize_bytes_and_dequantized_values(arch, name, head_dim):
    blocks = hard_blocks(head_dim)
    caches = [lowbit_attn.KVCache(name, 40, 2, head_dim, device=device) for device in ("cpu", "cuda")]
    for cache in caches:
        tokens = blocks.transpose(1, 2).flatten(0, 1).to(cache.device)
        cache.prefill(0, tokens, tokens.flip(0))
    want, got = caches
    testing.assert_same_state(got, want)
    pages = want.table[0, : len(blocks)]
    for side, ours, theirs in zip("kv", got.dequantize_pages(pages.cuda()), want.dequantize_pages(pages)):
        assert ours.isnan().sum() > 0
        testing.assert_same_special(side, ours.cpu(), theirs)
        testing.assert_same_bytes(side, ours.cpu().nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0))


@pytest.mark.parametrize("head_dim", kernels.SHIPPED_HEAD_DIMS)
def test_append_and_flush_equal_prefill(arch, head_dim):
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(2, 300, 2, head_dim, generator=generator).half().cuda() for _ in range(2))
    caches = [lowbit_attn.KVCache("k4v4", 8, 2, head_dim, device="cuda", sinks=5, max_batch=2) for _ in range(2)]
    for row in range(2):
        caches[0].prefill(row, k[row], v[row])
    for i in range(300):
        caches[1].append(k[:, i : i + 1], v[:, i : i + 1])
    caches[1].flush()
    testing.assert_same_state(caches[1], caches[0])


@pytest.mark.parametrize("num_splits", (None, 1, 3, 40))
@pytest.mark.parametrize("sinks", (0, 33))
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("head_dim", kernels.SHIPPED_HEAD_DIMS)
def test_decode(arch, head_dim, ratio, sinks, num_splits, record_property):
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=2 * ratio, num_heads_kv=2, lengths=LENGTHS, sinks=sinks,
                        seed=ratio)
    problem, want = problem_and_expected(case)
    out = torch.full_like(problem.q, float("nan"))
    lse = problem.q.new_full((case.batch, case.num_heads, 1), float("nan"), dtype=torch.float32)
    lowbit_attn.decode(problem.q, problem.cache, num_splits=num_splits, out=out, lse=lse)
    testing.assert_decode(out, lse, want)
    record_property("group", f"{arch} decode d{head_dim}")
    record_property("error", max(testing.relative_error(out[b].cpu(), want.o[b]) for b in range(case.batch)))


def problem_and_expected(case, made={}):
    """Cases recur over architectures and split counts; their fp64 answers are made once."""
    if case not in made:
        problem = testing.build(case, "cuda")
        made[case] = problem, testing.expected(problem, path="tile")
    return made[case]


@pytest.mark.parametrize("data", [d for d in testing.DATA if d not in ("meta-beyond-fp16", "q-1e6-k-1e-6")])
@pytest.mark.parametrize("head_dim", kernels.SHIPPED_HEAD_DIMS)
def test_decode_hard_data(arch, head_dim, data, record_property):
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=8, num_heads_kv=2, lengths=(700, 1300), sinks=16, data=data)
    problem, want = problem_and_expected(case)
    out, lse = lowbit_attn.decode(problem.q, problem.cache)
    testing.assert_decode(out, lse, want)
    record_property("group", f"{arch} hard data d{head_dim}")
    record_property("error", max(testing.relative_error(out[b].cpu(), want.o[b]) for b in range(case.batch)))


@pytest.mark.parametrize("head_dim", kernels.SHIPPED_HEAD_DIMS)
def test_one_hot_probabilities_return_rows_of_v(arch, head_dim):
    """A query that only one token answers returns that token's dequantized V, rounded to fp16 once."""
    generator = torch.Generator().manual_seed(3)
    length, wanted = 300, (0, 5, 127, 128, 255, 256, 299)
    directions = torch.randn(length, 1, head_dim, generator=generator)
    k = (directions / directions.norm(dim=-1, keepdim=True)).half()
    v = torch.randn(length, 1, head_dim, generator=generator).half()
    cache = lowbit_attn.KVCache("k4v4", 2 * len(wanted), 1, head_dim, device="cuda", max_batch=len(wanted))
    for row in range(len(wanted)):
        cache.prefill(row, k.cuda(), v.cuda())
    stored = cache.gather(0)[1].cpu()
    q = torch.stack([k[token] * 1000 for token in wanted])[:, None].cuda()
    out, _ = lowbit_attn.decode(q, cache)
    for row, token in enumerate(wanted):
        torch.testing.assert_close(out[row, 0, 0].cpu().float(), stored[0, token], rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize("writer, reader", list(itertools.permutations(ARCHES, 2)))
def test_packed_by_one_architecture_decodes_on_the_other(monkeypatch, writer, reader):
    generator = torch.Generator().manual_seed(4)
    k, v = (torch.randn(1000, 2, 128, generator=generator).half().cuda() for _ in range(2))
    q = torch.randn(1, 1, 8, 128, generator=generator).half().cuda()
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", writer)
    cache = lowbit_attn.KVCache("k4v4", 9, 2, 128, device="cuda")
    cache.prefill(0, k, v)
    own, own_lse = lowbit_attn.decode(q, cache)
    monkeypatch.setenv("LOWBIT_ATTN_ARCH", reader)
    other, other_lse = lowbit_attn.decode(q, cache)
    torch.testing.assert_close(own, other, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(own_lse, other_lse, rtol=1e-5, atol=1e-3)
    assert testing.relative_error(other.cpu(), reference.decode(q, cache)[0].cpu()) < 2e-3


@pytest.mark.parametrize("num_splits", (1, 2, 7, 64))
def test_combine(arch, num_splits):
    generator = torch.Generator().manual_seed(5)
    o = torch.randn(num_splits, 3, 1, 8, 128, generator=generator)
    lse = torch.randn(num_splits, 3, 8, 1, generator=generator) * 5
    lse[torch.rand(lse.shape, generator=generator) < 0.3] = -torch.inf
    lse[:, 1, 2] = -torch.inf
    o[lse.transpose(2, 3)[..., None].expand_as(o) == -torch.inf] = float("nan")  # an empty state's o is ignored
    want, want_lse = reference.merge_states(o, lse)
    got, got_lse = torch.empty(24, 128, dtype=torch.float16, device="cuda"), torch.empty(24, device="cuda")
    target = dispatch.target_of(torch.device("cuda"))
    loader.load(KernelKey("combine", *target, "float16", 128))(
        o.cuda().view(num_splits, 24, 128), lse.cuda().view(num_splits, 24), got, got_lse)
    torch.testing.assert_close(got.cpu().view(3, 1, 8, 128).float(), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got_lse.cpu().view(3, 8, 1), want_lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("head_dim", kernels.SHIPPED_HEAD_DIMS)
def test_thousand_launches_beside_another_stream_are_bitwise_equal(arch, head_dim):
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=8, num_heads_kv=2, lengths=(1500, 77, 4000), sinks=4)
    problem, _ = problem_and_expected(case)
    first, first_lse = (x.clone() for x in lowbit_attn.decode(problem.q, problem.cache))
    other, load = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(1000):
        if i % 20 == 0:
            with torch.cuda.stream(other):
                load @ load
        o, lse = lowbit_attn.decode(problem.q, problem.cache)
        differing += (o.view(torch.int16) != first.view(torch.int16)).sum() + (lse != first_lse).sum()
    assert differing.item() == 0


def test_splits_agree(arch):
    problem, _ = problem_and_expected(testing.Case("k4v4", num_heads=8, num_heads_kv=2, lengths=(5000, 130), sinks=0))
    whole = lowbit_attn.decode(problem.q, problem.cache, num_splits=1)[0].float()
    for num_splits in (2, 5, 39, 100):
        split = lowbit_attn.decode(problem.q, problem.cache, num_splits=num_splits)[0].float()
        torch.testing.assert_close(split, whole, rtol=1e-3, atol=1e-3)


def test_unsupported_raises_before_launch(arch):
    cache = lowbit_attn.KVCache("k4v4", 4, 1, 128, device="cuda")
    with pytest.raises(NotImplementedError, match="query heads per KV head 9, supported: 1 to 8"):
        lowbit_attn.decode(torch.zeros(1, 1, 9, 128, dtype=torch.float16, device="cuda"), cache)
    with pytest.raises(NotImplementedError, match="path"):
        lowbit_attn.decode(torch.zeros(1, 1, 4, 128, dtype=torch.float16, device="cuda"), cache, path="nonsense")
    assert set(FORMATS) >= set(kernels.SHIPPED_FORMATS)
