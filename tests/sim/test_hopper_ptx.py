"""Compiled Hopper kernels without a GPU: their PTX, run thread by thread on the CPU, gives what decode must return.

It covers what each thread computes, reads and writes, of the whole kernel: copies, packed pages, 16-bit tokens, merge.
"""

import re
import struct
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from lowbit_attn import bench, kernels, testing
from lowbit_attn.hopper import EMPTY
from lowbit_attn.hopper.scratch import chunks
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.hopper_calls import compiled, decode, decode_stream, key_of, packed, ptx_of, run, run_stream
from sim.ptx import program as ptx

cute = pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
pytestmark = pytest.mark.usefixtures("windowed_formats")


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


PLAIN = Case("k4v4", head_dim=64, num_heads=8, num_heads_kv=2, lengths=(0, 300), sinks=5)
ONE_HEAD = replace(PLAIN, num_heads=4, num_heads_kv=1, lengths=(300,))


@pytest.mark.parametrize("case, splits, options", [
    (PLAIN, 2, Attention()), (ONE_HEAD, 35, Attention()), (PLAIN, 2, Attention(sink_logits=torch.linspace(-3, 3, 8))),
    (Case("k2v2-g64-vg32-bf16", torch.bfloat16, 64, 5, 1, lengths=(700,), sinks=3), 1, Attention()),
    (Case("k8v1", head_dim=64, num_heads=2, num_heads_kv=1, q_len=2, lengths=(500,)), 1, Attention(None, 20.0, 200)),
], ids=("ragged", "many-splits", "sink-logits", "groups-bf16", "features"))
def test_integer_path(case, splits, options, scratch):
    text, cfg = compiled(key_of(case, options), scratch)
    problem = testing.build(case)
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits), testing.expected(problem, options))


@pytest.mark.parametrize("case, splits, path, rows, options", [
    (PLAIN, 2, "integer", 4, Attention()), (PLAIN, 4, "integer", 4, Attention(sink_logits=torch.linspace(-3, 3, 8))),
    (replace(ONE_HEAD, lengths=(1900,)), 8, "integer", 4, Attention()),
    (Case("k4v4", head_dim=64, num_heads=7, num_heads_kv=1, lengths=(700,), sinks=5), 2, "register", 8, Attention()),
    (Case("k2v2-g64", head_dim=96, num_heads=3, num_heads_kv=1, q_len=5, lengths=(300,)), 8, "register", 16,
     Attention()),
], ids=("two", "four", "eight", "register", "several-chunks-a-thread"))
@pytest.mark.parametrize("reverse", [False, True])
def test_splits_that_are_a_cluster(case, splits, path, rows, options, reverse, scratch):
    """They merge through each other's shared memory, in a fixed order; scratch is not touched."""
    text, cfg = compiled(key_of(case, options, path, rows), scratch)
    problem, program = testing.build(case), ptx.Program(text)
    found = decode(program, cfg, problem, options, splits, reverse, in_clusters=True)
    testing.assert_decode(*found, testing.expected(problem, options))
    if path == "register":  # several chunks a thread, in no order that waits for itself
        assert (cfg.rows * chunks(problem.q.shape) > cfg.threads) == (rows == 16)
    if reverse:
        first = decode(program, cfg, problem, options, splits, in_clusters=True)
        assert all(torch.equal(*pair) for pair in zip(found, first))


def many_pages(name: str, pages: int = 16) -> Case:
    return Case(name, head_dim=64, num_heads=3, num_heads_kv=1, lengths=(128 * pages + 40,), sinks=2)


@pytest.mark.parametrize("name, slots", [("k4v4", 2), ("k2v2", 3)])
def test_rings_turn(name, slots, scratch):
    """Several pages a warp, in CTAs of three; the warps after the first have one page less."""
    case = many_pages(name)
    text, cfg = compiled(key_of(case, Attention(), "small"), scratch)
    assert (cfg.warps, cfg.slots, cfg.ctas_per_sm) == (3, slots, 4)
    problem = testing.build(case)
    found = decode(ptx.Program(text), cfg, problem, Attention(), 1)
    testing.assert_decode(*found, testing.expected(problem))


@pytest.mark.parametrize("counted", (4096, -4096), ids=("behind", "ahead"))
def test_when_pieces_are_asked_for_changes_nothing(counted, scratch):
    """Warps that take all others to have come far, hence themselves to be behind, or the other way round."""
    case = many_pages("k4v4")
    text, cfg = compiled(key_of(case, Attention(), "small"), scratch)
    count = re.compile(r"atom\.shared\.cta\.add\.u32\s+(%r\d+), .*;")
    assert len(count.findall(text)) == 1
    looks = re.compile(r"mbarrier\.test_wait\S+ (%p\d+), .*;")
    assert len(looks.findall(text)) == 1
    problem = testing.build(case)
    more = count.sub(rf"\g<0>\n add.s32 \1, \1, {counted};", text)
    texts = text, looks.sub(r"setp.ne.b32 \1, 0, 0;", more)  # no V has come early
    found = [decode(ptx.Program(t), cfg, problem, Attention(), 1) for t in texts]
    assert all(torch.equal(one, other) for one, other in zip(*found))


def test_pages_are_told_by_group(scratch):
    """A CTA's pages that each of its warps has, in the line of its group, once: warps have 5, 4 and 4 here."""
    case = many_pages("k4v4", 26)
    text, cfg = compiled(key_of(case, Attention(), "small"), scratch)
    problem = testing.build(case)
    call = run(ptx.Program(text), cfg, problem, Attention(), 2, False)
    assert call.grid == (1, 1, 2) and call.counted().tolist() == [4 * cfg.warps, 4 * cfg.warps, 0, 0]


def test_the_order_of_turns_changes_nothing(scratch):
    text, cfg = compiled(key_of(PLAIN, Attention()), scratch)
    problem, program = testing.build(PLAIN), ptx.Program(text)
    for first, second in zip(*(decode(program, cfg, problem, Attention(), 3, reverse) for reverse in (False, True))):
        assert torch.equal(first, second)


@pytest.mark.parametrize("case, splits, options", [
    (Case("kitty", head_dim=64, num_heads=8, num_heads_kv=2, lengths=(129, 450), sinks=5), 2, Attention()),
    (Case("kitty-b40-bf16", torch.bfloat16, 64, 3, 1, lengths=(700,)), 1, Attention()),
    (Case("kitty-pro-vg32", head_dim=96, num_heads=1, num_heads_kv=1, q_len=4, lengths=(450,)), 1,
     Attention(None, 20.0, 200)),
    (Case("k4v4-g32+w128", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(450,)), 1, Attention()),
    (Case("k1v8-g64+w256", head_dim=64, num_heads=2, num_heads_kv=1, lengths=(600,)), 3, Attention()),
], ids=("kitty", "two-runs", "features", "groups", "1-bit"))
def test_integer_path_of_packed_keys_beside_values_in_16_bit(case, splits, options, scratch):
    """Boosted keys of a lone column tile of slots, of three and of two; third segments of all pages' rows."""
    text, cfg = compiled(key_of(case, options), scratch)
    problem = testing.build(case)
    assert cfg.has_mixed and (problem.cache.n_qk > problem.cache.n_qv).any()
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits), testing.expected(problem, options))


@pytest.mark.parametrize("case, splits, rows, options", [
    (Case("kitty", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(300,), sinks=5), 2, 8, Attention()),
    (Case("kitty-pro-bf16", torch.bfloat16, 64, 2, 1, q_len=4, lengths=(450,)), 1, 8, Attention(None, 20.0, 200)),
    (Case("k2v2-g64+w256", head_dim=64, num_heads=10, num_heads_kv=1, lengths=(450,)), 1, 16, Attention()),
    (Case("k8tv8+w128", head_dim=64, num_heads=2, num_heads_kv=1, lengths=(300,)), 1, 8, Attention()),
], ids=("kitty", "features", "groups", "per-token"))
def test_packed_keys_beside_values_in_16_bit(case, splits, rows, options, scratch):
    """The register path's mixed segment, shared out over the warps."""
    text, cfg = compiled(key_of(case, options, "register", rows), scratch)
    problem = testing.build(case)
    assert cfg.has_mixed and (problem.cache.n_qk > problem.cache.n_qv).all()
    testing.assert_decode(*decode(ptx.Program(text), cfg, problem, options, splits), testing.expected(problem, options))


@pytest.mark.parametrize("right, wrong, error", [
    ("u8.s8.s32", "u8.u8.s32", AssertionError), ("ldmatrix", "ldmartix", NotImplementedError)])
def test_a_wrong_instruction_is_found(right, wrong, error, scratch):
    case = Case("k4v4", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(300,))
    text, cfg = compiled(key_of(PLAIN, Attention()), scratch)
    assert right in text
    problem = testing.build(case)
    with pytest.raises(error):
        found = decode(ptx.Program(text.replace(right, wrong)), cfg, problem, Attention(), 1)
        testing.assert_decode(*found, testing.expected(problem))


WAIT_FOR_ANOTHER_CTA = """.entry k(.param .u64 k_param_0)
{
	ld.param.b64 	%rd1, [k_param_0];
	setp.ne.b32 	%p1, %ctaid.z, 0;
	@%p1 bra 	$L_0;
	st.global.b32 	[%rd1], %ctaid.z;
	ret;
$L_0:
	ld.relaxed.gpu.global.b32 	%r1, [%rd1];
	setp.eq.b32 	%p2, %r1, -1;
	@%p2 bra 	$L_0;
	ret;
}
"""
LEAVE_BEFORE_A_BARRIER = """.entry k(.param .u64 k_param_0)
{
	setp.gt.u32 	%p1, %tid.x, 31;
	@%p1 bra 	$L_0;
	bar.sync 	0;
$L_0:
	ret;
}
"""


def run_text(text: str, splits: list[int]) -> Counter:
    """Two warps each of some splits of two; a word of memory is EMPTY."""
    memory = ptx.GlobalMemory([torch.full((1,), EMPTY, dtype=torch.int32)])
    parameters = [struct.pack("<Q", ptx.GLOBAL_BASE)]
    ctas = [ptx.Cta(ptx.Program(text), parameters, memory.memory, (0, 0, z), (1, 1, 2)) for z in splits]
    return ptx.run_grid(ctas, 2 * ptx.LANES)


@pytest.mark.parametrize("splits", [[0, 1], [1, 0]])
def test_a_cta_waits_for_another(splits):
    run_text(WAIT_FOR_ANOTHER_CTA, splits)


@pytest.mark.parametrize("text", [
    WAIT_FOR_ANOTHER_CTA, LEAVE_BEFORE_A_BARRIER, LEAVE_BEFORE_A_BARRIER.replace("sync \t0", "sync \t1, 64")])
def test_a_deadlock_is_found(text):
    with pytest.raises(AssertionError, match="deadlock"):
        run_text(text, [1])


def test_a_named_barrier_counts_its_own_warps():
    assert run_text(LEAVE_BEFORE_A_BARRIER.replace("sync \t0", "sync \t1, 32"), [0, 1]) == {1: 2}


RAGGED = Case("k4v4", head_dim=64, num_heads=4, num_heads_kv=2, lengths=(130, 1300, 0, 2700, 40, 128), sinks=5)


@pytest.mark.parametrize("case, ctas", [
    (RAGGED, 1), (RAGGED, 3), (RAGGED, 5),
    *((Case("kitty", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(450, 1000), sinks=3), ctas) for ctas in (1, 2)),
    (Case("k2v2", head_dim=64, num_heads=1, num_heads_kv=1, lengths=tuple(13 * i % 150 for i in range(70))), 2),
    (Case("k8v2-g32-vg32", head_dim=96, num_heads=3, num_heads_kv=1, q_len=2, lengths=(40,)), 4),
], ids=("ragged-1", "ragged-3", "ragged-5", "kitty-1", "kitty-2", "70-sequences", "idle-ctas"))
def test_stream_path(case, ctas, scratch):
    """Items within a warp, of several warps and of several CTAs; runs that begin and end anywhere, or have nothing."""
    text, cfg = compiled(key_of(case, Attention(), "stream"), scratch)
    problem, program = testing.build(case), ptx.Program(text)
    found = decode_stream(program, cfg, problem, Attention(), ctas)
    testing.assert_decode(*found, testing.expected(problem))


def test_the_order_of_turns_changes_nothing_on_the_stream_path(scratch):
    text, cfg = compiled(key_of(RAGGED, Attention(), "stream"), scratch)
    problem, program = testing.build(RAGGED), ptx.Program(text)
    for first, second in zip(*(decode_stream(program, cfg, problem, Attention(), 3, reverse)
                               for reverse in (False, True))):
        assert torch.equal(first, second)


@pytest.mark.parametrize("path, run, q_len, spare, policy", [
    ("small", run, 1, 0, "EVICT_FIRST"), ("small", run, 1, -1, "EVICT_UNCHANGED"),
    ("small", run, 2, 0, "EVICT_UNCHANGED"),  # two blocks of query rows read each page
    ("integer", run, 1, -1, "EVICT_FIRST"),  # warps of few pages do not look
    ("stream", run_stream, 1, 0, "EVICT_FIRST"), ("stream", run_stream, 1, -1, "EVICT_UNCHANGED"),
], ids=("little", "much", "twice", "few", "stream-little", "stream-much"))
def test_lines_of_pages_leave_l2_first_where_a_call_reads_little(path, run, q_len, spare, policy, monkeypatch, scratch):
    """As many bytes as L2 may let pass, or one less. The stream path counts 16-bit units as pages."""
    from lowbit_attn.device import ptx as instructions
    from lowbit_attn.hopper.warp import fetch

    case = replace(many_pages("k4v4"), q_len=q_len, sinks=0)
    problem = testing.build(case)
    cache = problem.cache
    units = -(-(cache.n_tok - cache.n_qk) // 16) if path == "stream" else 0 * cache.n_tok
    pages = int((cache.n_qk // 128 + units).sum())
    monkeypatch.setattr(fetch, "PASSING_BYTES", pages * cache.record.nbytes + spare)
    text, cfg = compiled.__wrapped__(key_of(case, Attention(), path), scratch)
    call = run(ptx.Program(text), cfg, problem, Attention(), 1, False)
    assert call.policies == {getattr(instructions, policy) << 32}


def test_the_plain_read_reads_all_bytes_and_nothing_else(scratch):
    """What decode is compared with: CTAs that have several items, one, and part of one."""
    from lowbit_attn.device import ptx as instructions

    assert (bench.PLAIN, bench.HINTED) == (instructions.EVICT_UNCHANGED, instructions.EVICT_FIRST)
    data = torch.randint(1 << 30, (2 * 256 * 8 + 300, 4), dtype=torch.int32)
    key = next(key for key in kernels.baselines("hopper") if key.variant == "256x8")
    text, ctas = ptx_of(kernels.trace(key), key.target, scratch), 2
    memory = ptx.GlobalMemory([data, torch.zeros(1, dtype=torch.int32)])
    read, seen = memory.memory.read, np.zeros(4 * data.numel(), bool)

    def record(address, size):
        for first in address.astype(np.int64) - ptx.GLOBAL_BASE:
            assert first + size <= len(seen)
            seen[first : first + size] = True
        return read(address, size)

    memory.memory.read = record
    parameters = [memory.parameter(0, data.shape[:1], ()), memory.parameter(1, (), ()), *packed("i", bench.HINTED)]
    ptx.run_grid([ptx.Cta(ptx.Program(text), parameters, memory.memory, (x, 0, 0), (ctas, 1, 1)) for x in range(ctas)],
                 256)
    assert seen.all() and "ld.global.L2::cache_hint" in text
    assert (memory.tensor(1, torch.zeros(1, dtype=torch.int32)) == 0).all()


@pytest.mark.parametrize("name, path", [("k4v4", "integer"), ("k4v4", "stream"), ("kitty", "integer"),
                                        ("kitty", "stream"), ("k4v4", "register")])
def test_rows_of_the_cache_in_any_order(name, path, scratch):
    """Counters and table in one order, sinks and rings in another and apart: the same results, bit for bit."""
    case = Case(name, head_dim=64, num_heads=4, num_heads_kv=2, lengths=(300, 0, 520), sinks=3)
    text, cfg = compiled(key_of(case, Attention(), path, 8 if path == "register" else 4), scratch)
    problem, program = testing.build(case), ptx.Program(text)
    attend = decode_stream if path == "stream" else decode
    found = attend(program, cfg, problem, Attention(), 2, scattered=True)
    testing.assert_decode(*found, testing.expected(problem))
    assert all(torch.equal(*pair) for pair in zip(found, attend(program, cfg, problem, Attention(), 2)))


@pytest.mark.parametrize("row", [3, -1, -2**31, 2**31 - 1])
def test_a_row_that_does_not_exist_has_no_tokens(row, scratch):
    """Behind the cache's last row, or in front of its first."""
    case = Case("k4v4", head_dim=64, num_heads=4, num_heads_kv=1, lengths=(40, 300, 150), sinks=3)
    text, cfg = compiled(key_of(case, Attention()), scratch)
    o, lse = decode(ptx.Program(text), cfg, testing.build(case), Attention(), 1, others={1: row})
    assert not o[1].any() and (lse[1] == -torch.inf).all() and o[::2].all()
