"""Compiled Hopper kernels without a GPU: their PTX, run thread by thread on the CPU, gives what decode must return.

It covers what each thread computes, reads and writes, of the whole kernel: copies, packed pages, 16-bit tokens, merge.
"""

import math
import re
import struct
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from lowbit_attn import bench, dispatch, hopper, kernels, testing
from lowbit_attn.hopper import EMPTY
from lowbit_attn.hopper.common import scratch as sizes
from lowbit_attn.hopper.scratch import chunks
from lowbit_attn.kernels import KernelKey
from lowbit_attn.reference import Attention
from lowbit_attn.testing import Case
from sim.ptx import program as ptx

cute = pytest.importorskip("cutlass.cute", reason="CuTe-DSL (nvidia-cutlass-dsl) is not installed")
pytestmark = pytest.mark.usefixtures("windowed_formats")

COUNTS = ("global", "add")  # the atomics of decode in global memory: relaxed, on the GPU, where nothing else is said


@cache
def compiled(key: KernelKey, scratch) -> tuple[str, object]:
    """(PTX, configuration) of a decode kernel; scratch: a folder for what the compiler leaves."""
    traced = kernels.trace(key)
    return ptx_of(traced, key.target, scratch), traced.entry.cfg


def ptx_of(traced: kernels.CuteKernel, target: str, scratch) -> str:
    """PTX of a kernel's program."""
    from cutlass.cute.runtime import make_fake_stream

    options = f"--enable-tvm-ffi --gpu-arch {target} --keep-ptx --dump-dir {scratch}"
    made = cute.compile(traced.entry, *traced.arguments, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)
    text = made.artifacts.PTX
    return text if isinstance(text, str) else text.decode()


def scatter(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row b of x as row rows[b]."""
    found = torch.empty_like(x)
    found[rows.long()] = x
    return found


def spread(x: torch.Tensor) -> torch.Tensor:
    """Tokens [rows, heads, slots, head_dim] with something between the heads."""
    between = torch.nan if x.dtype.is_floating_point else 0
    found = torch.full((x.shape[0], x.shape[1] + 1, *x.shape[2:]), between, dtype=x.dtype)
    found[:, : x.shape[1]] = x
    return found[:, : x.shape[1]]


def divisor(n: int) -> list[bytes]:
    """A FastDivmodDivisorV2 argument: x // n is (t + ((x - t) >> first)) >> second with t = x * multiplier >> 32."""
    bits = (n - 1).bit_length()
    multiplier = (1 << 32) * ((1 << bits) - n) // n + 1
    return [struct.pack("<iIBBxx", n, multiplier, min(bits, 1), max(bits - 1, 0)), struct.pack("<i", n)]


class Call:
    """One call of a kernel as dispatch makes it, on the CPU."""

    def __init__(self, cfg, problem: testing.Problem, options: Attention, places: int | None, splits: int,
                 in_clusters: bool = False, scattered: bool = False):
        """places: of scratch; None: one for each block of query rows. in_clusters: a block's splits are a cluster.
        scattered: rows of counters and table, and those of sinks and rings, are in orders of their own, the latter
        apart from each other."""
        cache, q = problem.cache, problem.q.to(problem.cache.dtype)
        batch, q_len, heads, head_dim = q.shape
        self.ratio = heads // cache.num_heads_kv
        self.row_blocks = -(-self.ratio * q_len // cfg.rows)
        self.grid = (cache.num_heads_kv * self.row_blocks, batch, splits)
        sink_logits = torch.full((1,), -torch.inf) if options.sink_logits is None else options.sink_logits
        scratch = hopper.scratch(q.shape, cfg.rows, self.grid[0] * batch, splits)
        if places is not None:
            scratch = hopper.even_scratch(q.shape, cfg.rows, places)
        if in_clusters:
            scratch = hopper.cluster_scratch(splits)
        self.header = scratch.header
        self.scratch = torch.full((scratch.header + math.prod(scratch.shapes[0]),), EMPTY, dtype=torch.int32)
        partials = self.scratch[scratch.header:].view(scratch.shapes[0])
        self.results = [torch.full_like(q, torch.nan), torch.full((batch, heads, q_len), torch.nan)]
        names = ["table", "n_sink", "n_qk", *["n_qv"] * cfg.has_mixed, "n_tok", "ring_start"]
        rows, ring_rows = cache.batch_rows(batch)
        state = [getattr(cache, name) for name in names]
        tokens = [cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v]
        if scattered:
            rows, ring_rows = (torch.roll(rows, shift) for shift in (1, 2))
            state = [scatter(x, rows) for x in state]
            tokens = [spread(scatter(x, ring_rows)) for x in tokens]
        tensors = [q, rows, ring_rows, dispatch._part(cache, "k"), state[0].view(-1), *state[1:], *tokens, partials,
                   *self.results, sink_logits]
        whole = {id(partials): self.scratch} | {id(x): x if x._base is None else x._base for x in tokens}
        self.memory = ptx.GlobalMemory([whole.get(id(x), x) for x in tensors])
        sizes = [3, 1, 1, 1, 1, *[1] * len(state[1:]), *[3] * 4, 3, 3, 3, 1]  # that vary
        strides = [2, 0, 0, 0, 0, *[0] * len(state[1:]), *[2] * 4, 2, 2, 2, 0]
        given = [self.memory.parameter(i, x.shape[:count], x.stride()[:apart], 4 * self.header * (x is partials))
                 for i, (x, count, apart) in enumerate(zip(tensors, sizes, strides))]
        self.tensors = given[:-4] + packed("i", *cache.strides) + given[-4:]
        self.count = len(given)
        self.policies: set[int] = set()  # of L2, of all CTAs' bulk copies
        self.scale = (head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale) * dispatch.LOG2_E

    def found(self) -> tuple[torch.Tensor, torch.Tensor]:
        last = self.count - 1
        assert (self.memory.tensor(last - 3, self.scratch)[self.header:] == EMPTY).all()  # ready for the next call
        return self.memory.tensor(last - 2, self.results[0]), self.memory.tensor(last - 1, self.results[1])

    def counted(self) -> torch.Tensor:
        """Pages that each group of CTAs has told."""
        lines = self.memory.tensor(self.count - 4, self.scratch)[: self.header].view(-1, sizes.LINE_WORDS)
        assert (lines[:, 1:] == EMPTY).all()
        return lines[:, 0].flip(0) - EMPTY  # group 0 is next to the cells


def packed(kind: str, *values) -> list[bytes]:
    return [struct.pack("<" + kind, x) for x in values]


def decode(program, cfg, problem: testing.Problem, options: Attention, splits: int, reverse: bool = False,
           in_clusters: bool = False, scattered: bool = False):
    """What dispatch does, on the CPU: (o, lse)."""
    return run(program, cfg, problem, options, splits, reverse, in_clusters, scattered).found()


def run(program, cfg, problem: testing.Problem, options: Attention, splits: int, reverse: bool,
        in_clusters: bool = False, scattered: bool = False) -> Call:
    """A call that has ended. The splits of a row block run at once.

    reverse: the last CTA and the last warp have the first turn.
    """
    call = Call(cfg, problem, options, None, splits, in_clusters, scattered)
    cap = (options.softcap or 0.0) * dispatch.LOG2_E
    window = dispatch.NO_WINDOW if options.window is None else options.window
    parameters = call.tensors + packed("f", call.scale, 2 * dispatch.LOG2_E / cap if cap else 0.0, 2 * cap)
    parameters += packed("i", window, window)
    parameters += [argument for n in (call.ratio, call.row_blocks, splits) for argument in divisor(n)]
    for x, y in np.ndindex(call.grid[:2]):
        ctas = [ptx.Cta(program, parameters, call.memory.memory, (x, y, z), call.grid, COUNTS) for z in range(splits)]
        for cta in ctas:
            cta.cluster = ctas if in_clusters else []
        ptx.run_grid(ctas[:: -1 if reverse else 1], cfg.threads, reverse)
        call.policies |= set().union(*(cta.policies for cta in ctas))
    return call


def decode_stream(program, cfg, problem: testing.Problem, options: Attention, ctas: int, reverse: bool = False,
                  scattered: bool = False):
    """``decode`` on the stream path."""
    return run_stream(program, cfg, problem, options, ctas, reverse, scattered).found()


def run_stream(program, cfg, problem: testing.Problem, options: Attention, ctas: int, reverse: bool = False,
               scattered: bool = False) -> Call:
    """``run`` of the stream path, whose CTAs all run at once."""
    call = Call(cfg, problem, options, ctas, 1, scattered=scattered)
    parameters = call.tensors + packed("f", call.scale) + packed("i", call.grid[0])
    parameters += [argument for n in (call.ratio, call.row_blocks, ctas) for argument in divisor(n)]
    running = [ptx.Cta(program, parameters, call.memory.memory, (x, 0, 0), (ctas, 1, 1), COUNTS) for x in range(ctas)]
    ptx.run_grid(running[:: -1 if reverse else 1], cfg.threads, reverse)
    call.policies = set().union(*(cta.policies for cta in running))
    return call


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("ptx")


def key_of(case: Case, options: Attention, path: str = "integer", rows: int = 4) -> KernelKey:
    features = tuple(name for name in kernels.FEATURES if getattr(options, name) is not None)
    return kernels.decode_key("hopper", "sm_90a", str(case.dtype).removeprefix("torch."), case.head_dim,
                     str(case.format), path, rows, features=features)


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
