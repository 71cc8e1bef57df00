"""Both architectures' kernels on a CUDA device against the CPU: bytes, dequantized values, decode, merge of splits."""

import copy
import itertools

import pytest
import torch

import lowbit_attn
from gpu import matrix
from gpu.checks import check_decode, differing_values, problem_and_expected, query_weights
from lowbit_attn import kernels, reference, testing
from lowbit_attn.formats import FORMATS
from lowbit_attn.reference import Attention

pytestmark = pytest.mark.gpu
ARCHES = ("hopper", "ampere")
LENGTHS = (0, 1, 127, 128, 129, 4097)  # one ragged batch: empty, one token, around a page, many pages
RATIOS = range(1, 9)


def hard_blocks(head_dim: int) -> torch.Tensor:
    """fp16 blocks [n, 2 heads, 128, head_dim] of groups that broke other quantizers, along both axes."""
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


@pytest.mark.parametrize("name, dtype, head_dim", matrix.QUANTIZED)
def test_quantize_bytes_and_dequantized_values(arch, name, dtype, head_dim):
    blocks = hard_blocks(head_dim).to(getattr(torch, dtype))
    caches = [lowbit_attn.KVCache(name, 40, 2, head_dim, blocks.dtype, device, sinks=0,
                                  query_weights=query_weights(name, 2, head_dim, device)) for device in ("cpu", "cuda")]
    for cache in caches:
        tokens = blocks.transpose(1, 2).flatten(0, 1).to(cache.device)
        cache.prefill(0, tokens, tokens.flip(0))
    want, got = caches
    testing.assert_same_state(got, want)
    pages = want.table[0, : int(want.n_qk[0]) // 128]  # windows keep the last ones in 16 bit
    for side, ours, theirs in zip("kv", got.dequantize_pages(pages.cuda()), want.dequantize_pages(pages)):
        assert ours.isnan().sum() > 0
        testing.assert_same_special(side, ours.cpu(), theirs)
        testing.assert_same_bytes(side, ours.cpu().nan_to_num(nan=0.0), theirs.nan_to_num(nan=0.0))


@pytest.mark.parametrize("head_dim", matrix.TILE_HEAD_DIMS)
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
@pytest.mark.parametrize("head_dim", matrix.TILE_HEAD_DIMS)
def test_decode(arch, head_dim, ratio, sinks, num_splits, record_property):
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=2 * ratio, num_heads_kv=2, lengths=LENGTHS, sinks=sinks,
                        seed=ratio)
    check_decode(case, "tile", f"{arch} tile d{head_dim}", record_property, num_splits)


@pytest.mark.parametrize("data", [d for d in testing.DATA if d not in ("meta-beyond-fp16", "q-1e6-k-1e-6")])
@pytest.mark.parametrize("head_dim", matrix.TILE_HEAD_DIMS)
def test_decode_hard_data(arch, head_dim, data, record_property):
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=8, num_heads_kv=2, lengths=(700, 1300), sinks=16,
                        data=data)
    check_decode(case, "tile", f"{arch} tile hard data d{head_dim}", record_property)


@pytest.mark.parametrize("head_dim", matrix.TILE_HEAD_DIMS)
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
@pytest.mark.parametrize("path, q_len, with_sinks", [("register", 3, True), ("register", 1, False), ("tile", 1, True),
                                                     ("register", 16, True)])
def test_splits_are_merged(arch, path, q_len, with_sinks, num_splits, record_property):
    """Empty sequences, splits without tokens, blocks of query rows, logits that only take weight."""
    case = testing.Case("k4v4", num_heads=8, num_heads_kv=2, q_len=q_len, lengths=(0, 16, 700, 3000), sinks=4)
    sink_logits = torch.linspace(-2, 2, 8, device="cuda") if with_sinks else None
    check_decode(case, path, "merge of splits", record_property, num_splits, Attention(sink_logits=sink_logits))


@pytest.mark.parametrize("path, side", [(None, "k"), ("register", "k"), ("tile", "k"), (None, "v"), ("register", "v"),
                                        ("tile", "v")])
def test_a_nan_in_one_split_stays_visible(arch, path, side):
    problem, _ = problem_and_expected(testing.Case("k4v4", num_heads=4, num_heads_kv=2, lengths=(1000,)), "register")
    broken = copy.deepcopy(problem.cache)
    ring = getattr(broken, f"ring_{side}")
    ring[0, 1, (int(broken.n_tok[0]) - 1) % ring.shape[2]] = float("nan")
    for num_splits in (1, 5):
        o, lse = lowbit_attn.decode(problem.q, broken, num_splits=num_splits, path=path)
        assert o[0, 0, 2:].isnan().all() and lse[0, 2:].isnan().all() == (side == "k")
        assert o[0, 0, :2].isfinite().all() and lse[0, :2].isfinite().all()


@pytest.mark.parametrize("head_dim", matrix.TILE_HEAD_DIMS)
def test_thousand_launches_beside_another_stream_are_bitwise_equal(arch, head_dim):
    case = testing.Case("k4v4", head_dim=head_dim, num_heads=8, num_heads_kv=2, lengths=(1500, 77, 4000), sinks=4)
    assert differing_values(problem_and_expected(case, "tile")[0], "tile") == 0


@pytest.mark.parametrize("path", ("register", "tile"))
def test_splits_agree(arch, path):
    problem, _ = problem_and_expected(testing.Case("k4v4", num_heads=8, num_heads_kv=2, lengths=(5000, 130)), "tile")
    whole = lowbit_attn.decode(problem.q, problem.cache, num_splits=1, path=path)[0].float()
    for num_splits in (2, 5, 39, 100):
        split = lowbit_attn.decode(problem.q, problem.cache, num_splits=num_splits, path=path)[0].float()
        torch.testing.assert_close(split, whole, rtol=1e-3, atol=1e-3)


def test_unsupported_raises_before_launch(arch):
    cache = lowbit_attn.KVCache("k4v4", 4, 1, 128, device="cuda")
    wide = copy.copy(cache)
    wide.head_dim = 160
    with pytest.raises(NotImplementedError, match="head_dim 160, supported: 64"):
        lowbit_attn.decode(torch.zeros(1, 1, 4, 160, dtype=torch.float16, device="cuda"), wide)
    with pytest.raises(NotImplementedError, match="path"):
        lowbit_attn.decode(torch.zeros(1, 1, 4, 128, dtype=torch.float16, device="cuda"), cache, path="nonsense")
    assert set(FORMATS) >= set(kernels.SHIPPED_FORMATS)
