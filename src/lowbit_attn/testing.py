"""Random cases and comparators, shared by the tests and the benchmarks.

A comparator raises AssertionError and says where the two sides differ. Each of them rejects outputs that are
zero, constant, NaN, stale (of another case) or shifted by a token or a head.
"""

import copy
from dataclasses import dataclass, replace

import torch

from lowbit_attn import layout
from lowbit_attn.cache import KVCache
from lowbit_attn.cache.attached import Attached
from lowbit_attn.cache.view import Strides
from lowbit_attn.codebooks import Codebooks, LayerCodebooks
from lowbit_attn.codebooks.learn import SHARED
from lowbit_attn.formats import FORMATS, Format, Kind
from lowbit_attn.precision import on_own_defaults
from lowbit_attn.reference import PLAIN, Attention

NORMAL_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of o, on N(0, 1) data
ROUND_KEYS = ("tile", "wgmma", "codebook64", "prerope", "prerope8")  # decode paths
POISON_BYTE = 0xFF  # two of them are a NaN in fp16 and in bf16
POISON_PAGE = 0x7F000000  # no pool has this page: reading it is out of bounds
DATA = ("normal", "k-channel-100x", "k-channel-100x-q-0.05", "q-norm-100", "v-300x", "v-token-300x",
        "v-1e-4-beside-sink", "v-page-1e3-after-1e-4", "zero-200x-range", "flat-attention", "meta-beyond-fp16",
        "q-1e6-k-1e-6", "zero-pages", "q-1e3", "q-1e-3")


@dataclass(frozen=True)
class Case:
    """A decode problem: what the cache holds and what is asked of it.

    lengths: tokens of each sequence, the last q_len of which are the queries' own. data: one of DATA;
    "meta-beyond-fp16" wants a bf16 cache and a "-bf16" format, "q-1e6-k-1e-6" a bf16 cache. page_seed: order of
    the pages in the pool, None: as allocated. poison: NaN in all memory that no reader may use. shared_pages: the
    sequences share the pages of the first one as far as theirs reach (a common prefix). rotate_keys: as in KVCache.
    rope, k_shared: of the normal codebooks that a format which needs some gets.
    """

    format: str = "k4v4"
    dtype: torch.dtype = torch.float16
    head_dim: int = 128
    num_heads: int = 8
    num_heads_kv: int = 2
    lengths: tuple[int, ...] = (300,)
    q_len: int = 1
    sinks: int = 0
    data: str = "normal"
    range_search: bool | None = None
    page_seed: int | None = 1
    poison: bool = True
    shared_pages: bool = False
    rotate_keys: bool = False
    rope: str = "post"
    k_shared: bool = False
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def __str__(self) -> str:
        lengths = "+".join(map(str, self.lengths))
        return (f"{self.format}-d{self.head_dim}-h{self.num_heads}/{self.num_heads_kv}-L{lengths}-q{self.q_len}"
                f"-s{self.sinks}-{str(self.dtype).removeprefix('torch.')}-{self.data}")


@dataclass(frozen=True)
class Problem:
    """q [batch, q_len, num_heads, head_dim] and the cache it reads; k, v: the original tokens of each
    sequence, fp32 [seqlen, num_heads_kv, head_dim]."""

    case: Case
    q: torch.Tensor
    cache: KVCache
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Expected:
    """fp64 attention over the dequantized cache, on the CPU, and what may differ from it, by sequence.

    o [batch, q_len, num_heads, head_dim]; lse [batch, num_heads, q_len]; o_tolerance (relative Frobenius error)
    and lse_tolerance (absolute) [batch].
    """

    o: torch.Tensor
    lse: torch.Tensor
    o_tolerance: torch.Tensor
    lse_tolerance: torch.Tensor


# ---- cases


@on_own_defaults
def normal_codebooks(format: str, layers: int = 1, num_heads_kv: int = 2, head_dim: int = 128, rope: str = "post",
                     seed: int = 0, k_shared: bool = False) -> Codebooks:
    """Codebooks of normal entries, in no data's order and with uneven weights: for what needs no quality.

    k_shared: groups of K share entries, and channels that turn together lie in groups half a head apart, as kernels
    read keys before their rotary embedding (codebooks.learn.Recipe).
    """
    like = dict(generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    fmt, lead = FORMATS[format], (layers, num_heads_kv)
    k_entries, v_entries = (
        torch.randn((*lead, *side.entries_shape(1, head_dim)[1:]), **like).half()
        if side.kind is Kind.CODEBOOK else None for side in (fmt.k, fmt.v))
    of_keys, freq = {}, None
    if k_entries is not None:
        half = torch.rand((*lead, head_dim // 2), **like) + 0.5
        of_keys = dict(k_order=torch.rand((*lead, head_dim), **like).argsort(-1).short(),
                       k_weights=torch.cat((half, half), -1))
        if k_shared:
            k_entries = k_entries[:, :, :SHARED].repeat(1, 1, k_entries.shape[2] // SHARED, 1, 1)
            order = torch.rand((*lead, head_dim // 2), **like).argsort(-1)
            order = order + head_dim // 2 * (torch.rand(order.shape, **like) < 0.5)
            of_keys["k_order"] = torch.cat((order, (order + head_dim // 2) % head_dim), -1).short()
    if rope == "pre":
        freq = (10_000.0 ** -(torch.arange(head_dim // 2, dtype=torch.float32) / (head_dim // 2))).expand(layers, -1)
    return Codebooks(format, rope, head_dim, k_entries, v_entries, **of_keys, rope_inv_freq=freq)


@on_own_defaults
def build(case: Case, device: torch.device | str = "cpu") -> Problem:
    """Make the case's cache (prefill, then the last q_len tokens by append) and queries; device: where they go.

    Pages are always quantized by the torch quantizer on the CPU, so a kernel is judged on the same bytes.
    """
    if case.data not in DATA:
        raise ValueError(f"data: got {case.data!r}, supported: {', '.join(DATA)}")
    generator = torch.Generator().manual_seed(case.seed)
    rows = [_tokens(case, length, generator) for length in case.lengths]
    pages = sum(-(-length // layout.PAGE_TOKENS) for length in case.lengths) + 2
    cache = KVCache(case.format, pages, case.num_heads_kv, case.head_dim, case.dtype, "cpu", case.sinks,
                    case.range_search, max_batch=case.batch, max_q_len=case.q_len, rotate_keys=case.rotate_keys,
                    codebooks=_books(case))
    for row, (_, k, v) in enumerate(rows):
        fresh = min(case.q_len, len(k))
        queries = _queries(case, len(k) - fresh, generator) if cache.format.orders_tokens else None
        cache.prefill(row, k[: len(k) - fresh], v[: len(v) - fresh], queries)
        if fresh:
            cache.append(k[None, len(k) - fresh :], v[None, len(v) - fresh :], [row])
    if case.page_seed is not None:
        permute_pages(cache, case.page_seed)
    if case.shared_pages:
        share_pages(cache)
    if case.poison:
        poison(cache)
    q = torch.stack([q for q, _, _ in rows]).to(device)
    return Problem(case, q, to_device(cache, device), tuple(k for _, k, _ in rows), tuple(v for _, _, v in rows))


def _queries(case: Case, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Queries of a prompt, for formats that order tokens by what queries see in them."""
    return torch.randn(tokens, case.num_heads, case.head_dim, generator=generator).to(case.dtype)


def _books(case: Case) -> LayerCodebooks | None:
    fmt = case.format if isinstance(case.format, Format) else FORMATS[case.format]
    if not fmt.needs_codebooks:
        return None
    return normal_codebooks(case.format, 1, case.num_heads_kv, case.head_dim, case.rope, case.seed,
                            case.k_shared).layer(0)


@on_own_defaults
def permute_pages(cache: KVCache, seed: int) -> None:
    """Move every page of the pool to a random place; the table and the free list follow."""
    place = torch.randperm(cache.num_pages, generator=torch.Generator().manual_seed(seed)).to(cache.device)
    pool = torch.empty_like(cache.pool)
    pool[place] = cache.pool
    cache.pool = pool
    used = cache.table >= 0
    cache.table[used] = place[cache.table[used].long()].int()
    cache.book.renumber(place.cpu().numpy())


def share_pages(cache: KVCache) -> None:
    """Let every sequence read the first one's pages in the place of its own, as far as both have both sides packed."""
    packed = cache.n_qv // layout.PAGE_TOKENS
    for row in range(1, cache.max_batch):
        common = int(torch.minimum(packed[0], packed[row]))
        cache.table[row, :common] = cache.table[0, :common]


def per_head_table(cache: KVCache) -> KVCache:
    """A view of the cache's pages with a row of the table for every KV head (LeanKV's); only kernels can read it."""
    heads, entries = cache.num_heads_kv, cache.table.shape[1]
    head = torch.arange(heads, device=cache.device, dtype=torch.int32)
    view = copy.copy(cache)
    pages = torch.where(cache.table < cache.num_pages, cache.table, POISON_PAGE // heads)
    view.table = (pages[:, None] * heads + head[:, None]).reshape(cache.max_batch * heads, entries).contiguous()
    view.strides = Strides(page=cache.strides.head, head=0, table_b=heads * entries, table_h=entries)
    return view


def poison(cache: KVCache) -> None:
    """Fill everything that holds no present token with NaN: free pages, sides and padding of records that are
    not written, dead sink and ring slots; unused table entries get a page id that does not exist."""
    used = torch.zeros_like(cache.pool, dtype=torch.bool)
    for row in range(cache.max_batch):
        for n_packed, planes in ((cache.n_qk, cache.record.k_planes), (cache.n_qv, cache.record.v_planes)):
            pages = cache.table[row, : int(n_packed[row]) // layout.PAGE_TOKENS].long()
            for plane in planes:
                used[pages, :, plane.offset : plane.offset + plane.nbytes] = True
        cache.table[row, int(cache.n_pages[row]) :] = POISON_PAGE
        for sink in (cache.sink_k, cache.sink_v):
            sink[row, :, int(cache.n_sink[row]) :] = float("nan")
        for ring, n_packed in ((cache.ring_k, cache.n_qk), (cache.ring_v, cache.n_qv)):
            dead = torch.ones(ring.shape[2], dtype=torch.bool, device=cache.device)
            dead[_live_slots(cache, row, ring, n_packed)] = False
            ring[row, :, dead] = float("nan")
    cache.pool.masked_fill_(~used, POISON_BYTE)


def to_device(cache: KVCache, device: torch.device | str) -> KVCache:
    """A copy of the cache, tensor by tensor, on another device (or the same one)."""
    moved = copy.copy(cache)
    moved.device = torch.device(device)
    for name, value in vars(cache).items():
        if isinstance(value, torch.Tensor):
            setattr(moved, name, value.to(device, copy=True))
    if cache.attached is not None:
        moved.attached = Attached(cache.attached.layer, cache.format, cache.num_heads_kv, cache.head_dim, moved.device)
    moved.book = cache.book.copy()
    moved._row_tensors = {}
    moved.bind()
    return moved


def _tokens(case: Case, length: int, generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q in the case's dtype; k, v fp32 holding values of that dtype."""
    q = torch.randn(case.q_len, case.num_heads, case.head_dim, generator=generator)
    k, v = (torch.randn(length, case.num_heads_kv, case.head_dim, generator=generator) for _ in range(2))
    first, page = min(case.sinks, length), layout.PAGE_TOKENS
    if case.data.startswith("k-channel-100x"):
        k[..., 5] *= 100
        if case.data.endswith("q-0.05"):
            q[..., 5] = 0.05
    elif case.data == "q-norm-100":
        q *= 100 / q.norm(dim=-1, keepdim=True)
    elif case.data == "v-300x":
        v *= 300
    elif case.data == "v-token-300x":
        v[length // 2 : length // 2 + 1] *= 300
    elif case.data == "v-1e-4-beside-sink":
        v[first:] *= 1e-4
    elif case.data == "v-page-1e3-after-1e-4":
        v[first : first + page] *= 1e-4
        v[first + page : first + 2 * page] *= 1e3
    elif case.data == "zero-200x-range":  # 128 normal numbers span about 5.4 deviations
        k.mul_(0.05).add_(torch.where(torch.arange(case.head_dim) % 3 == 0, -54.0, 54.0))
    elif case.data == "flat-attention":  # all weights equal but for a few roundings, and their sum cancels
        q *= 5e-4
    elif case.data == "meta-beyond-fp16":
        k[..., 3] = k[..., 3] * 1e6 + 3e6
        q[..., 3] = 1e-6
    elif case.data == "zero-pages":  # K of the first page, V of the second
        k[first : first + page], v[first + page : first + 2 * page] = 0.0, 0.0
    elif case.data in ("q-1e3", "q-1e-3"):
        q *= float(case.data[2:])
    elif case.data == "q-1e6-k-1e-6":
        q, k = q * 1e6, k * 1e-6
    return q.to(case.dtype), k.to(case.dtype).float(), v.to(case.dtype).float()


# ---- expected values and tolerances


def attention_fp64(q, k, v, options: Attention = PLAIN, rounding: torch.dtype | None = None, n_sink: int = 0):
    """Causal attention of the last queries of one sequence in fp64, a query and a KV head at a time.

    q [q_len, num_heads, head_dim]; k, v [num_heads_kv, seqlen, head_dim]. rounding: round K, V, P and o to this
    type, for the error that any kernel of that type makes. Returns o [q_len, num_heads, head_dim] and lse
    [num_heads, q_len]; zeros and -inf where a query sees nothing.
    """
    def rounded(x):
        return x.double() if rounding is None else x.to(rounding).double()

    (q_len, num_heads, head_dim), seqlen = q.shape, k.shape[1]
    scale = head_dim**-0.5 if options.softmax_scale is None else options.softmax_scale
    o, lse = q.new_zeros(q.shape, dtype=torch.float64), q.new_full((num_heads, q_len), -torch.inf, dtype=torch.float64)
    sides = [(rounded(k[h]), rounded(v[h])) for h in range(k.shape[0])]
    position = torch.arange(seqlen, device=q.device)
    for j in range(q_len):
        last = seqlen - q_len + j
        seen = position <= last
        if options.window is not None:
            recent = position > last - options.window
            seen = seen & (recent | (position < n_sink) if options.keep_sinks else recent)
        for h_kv, side in enumerate(sides):
            heads = slice(h_kv * num_heads // len(sides), (h_kv + 1) * num_heads // len(sides))
            keys, values = (x[seen] for x in side)
            scores = scale * (q[j, heads].double() @ keys.T)
            if options.softcap is not None:
                scores = options.softcap * torch.tanh(scores / options.softcap)
            if options.sink_logits is not None:
                scores = torch.cat((scores, options.sink_logits[heads, None].double()), 1)
            if not scores.shape[1]:
                continue
            top = scores.amax(1, keepdim=True)
            p = torch.exp(scores - top)
            total = p.sum(1, keepdim=True)
            o[j, heads] = rounded(rounded(p[:, : len(keys)]) @ values / total)
            lse[heads, j] = (top + total.log())[:, 0]
    return o, lse


@on_own_defaults
def expected(problem: Problem, options: Attention = PLAIN, path: str = "register") -> Expected:
    """What decode must return for a problem, from its cache's dequantized values, with the tolerances.

    o: on "normal" data 2e-3 (fp16) or 1e-2 (bf16); elsewhere 3 e16 + 1e-3 + beta, where e16 is the error of fp64
    attention with K, V, P and o rounded to the model type and beta bounds the rounding of q * scale and of fp32 sums.
    lse: 3 beta + 1e-3; the paths of ROUND_KEYS, which round K itself to 16 bit as 16-bit attention does, may add 3
    times the error in lse of that rounding.
    """
    case, cache = problem.case, to_device(problem.cache, "cpu")
    if options.sink_logits is not None:
        options = replace(options, sink_logits=options.sink_logits.cpu())
    wants, o_tolerance, lse_tolerance = [], [], []
    # rotated where decode rotates: another device may round a product's last bit the other way
    for row, q in enumerate(problem.cache.queries(problem.q).cpu()):
        k, v = cache.gather(row)
        n_sink = int(cache.n_sink[row])
        o, lse = attention_fp64(q, k, v, options, None, n_sink)
        beta = logit_bound(q, k, cache, row, options.softmax_scale)
        o16, lse16 = attention_fp64(q, k, v, options, case.dtype, n_sink)
        e16 = relative_error(o16, o)
        rounding = 0.0
        if path in ROUND_KEYS and lse.isfinite().any():
            rounding = float((lse16 - lse)[lse.isfinite()].abs().max())
        wants.append((o, lse))
        o_tolerance.append(NORMAL_TOLERANCE[case.dtype] if case.data == "normal" else 3 * e16 + 1e-3 + beta)
        lse_tolerance.append(3 * beta + 1e-3 + 3 * rounding)
    return Expected(torch.stack([o for o, _ in wants]), torch.stack([lse for _, lse in wants]),
                    torch.tensor(o_tolerance), torch.tensor(lse_tolerance))


def logit_bound(q, k, cache: KVCache, row: int, softmax_scale: float | None = None) -> float:
    """beta: what rounding may move a logit of packed pages by, or of any token where its sum cancels.

    The first: 2^-12 scale max over pages and query rows of sqrt(sum_d (q_d range_d)^2); 0 without a packed page. The
    range of a channel in a page is that of its dequantized values, which equals (2^bits - 1) s_d for one
    group a page and bounds it for smaller groups. The second: one rounding of the largest sum of magnitudes in fp32,
    2^-24 scale max over tokens and query rows of sum_d |q_d k_d|.
    """
    if not k.shape[1]:
        return 0.0
    scale = cache.head_dim**-0.5 if softmax_scale is None else softmax_scale
    n_sink, n_qk = int(cache.n_sink[row]), int(cache.n_qk[row])
    rows = q.double().transpose(0, 1).reshape(k.shape[0], -1, q.shape[-1]).transpose(1, 2)
    sums = 2.0**-24 * float((k.double().abs() @ rows.abs()).max())
    if not n_qk:
        return scale * sums
    pages = k[:, n_sink : n_sink + n_qk].double().unflatten(1, (-1, layout.PAGE_TOKENS))
    span = (pages.amax(2) - pages.amin(2)) ** 2  # [num_heads_kv, pages, head_dim]
    return scale * max(sums, 2.0**-12 * float((span @ rows**2).max().sqrt()))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative Frobenius error in fp64; inf where want is zero and got is not, NaN stays NaN."""
    difference, size = (got.double() - want.double()).norm(), want.double().norm()
    return float(difference / size) if size else (0.0 if difference == 0 else float("inf"))


# ---- comparators


def assert_decode(o: torch.Tensor, lse: torch.Tensor, want: Expected) -> None:
    """Outputs of decode against the expected ones, sequence by sequence; rows that see nothing must be exact."""
    o, lse = o.cpu(), lse.cpu()
    assert o.shape == want.o.shape, f"o: shape {list(o.shape)}, expected {list(want.o.shape)}"
    assert lse.shape == want.lse.shape, f"lse: shape {list(lse.shape)}, expected {list(want.lse.shape)}"
    assert_same_special("o", o, want.o)
    assert_same_special("lse", lse, want.lse)
    blind = want.lse.transpose(1, 2) == -torch.inf
    assert not o[blind].any(), "o: not zero where a query sees no token"
    for row in range(len(o)):
        error, limit = relative_error(o[row], want.o[row]), float(want.o_tolerance[row])
        assert error <= limit, (f"o of sequence {row}: relative error {error:.3g}, at most {limit:.3g}; "
                                f"{_worst(o, want.o, row)}")
        seen = want.lse[row].isfinite()
        error = float((lse[row].double() - want.lse[row])[seen].abs().max()) if seen.any() else 0.0
        limit = float(want.lse_tolerance[row])
        assert error <= limit, (f"lse of sequence {row}: error {error:.3g}, at most {limit:.3g}; "
                                f"{_worst(lse, want.lse, row)}")


def assert_same_special(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """NaN, +Inf and -Inf at the same positions."""
    for what, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        wrong = (test(got) != test(want)).nonzero()
        assert not len(wrong), f"{name}: {what} differs at {len(wrong)} positions, first {wrong[0].tolist()}"


def assert_same_bytes(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Bit for bit equal: NaN equals the same NaN, -0.0 differs from 0.0."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, expected {want.dtype}"
    got, want = (x.detach().cpu().contiguous().flatten().view(torch.uint8) for x in (got, want))
    wrong = (got != want).nonzero().flatten()
    assert not len(wrong), (f"{name}: {len(wrong)} of {len(want)} bytes differ, first at {int(wrong[0])}: "
                            f"{int(got[wrong[0]])}, expected {int(want[wrong[0]])}")


def assert_same_state(got: KVCache, want: KVCache) -> None:
    """Two caches hold the same: counters, planes of packed pages through the table, sinks, live ring slots."""
    for row in range(want.max_batch):
        theirs, ours = (_held(cache, row) for cache in (got, want))
        for name in ours:
            assert_same_bytes(f"sequence {row} {name}", theirs[name], ours[name])


def _held(cache: KVCache, row: int) -> dict[str, torch.Tensor]:
    n_sink = int(cache.n_sink[row])
    held = {name: getattr(cache, name)[row] for name in ("n_sink", "n_qk", "n_qv", "n_tok")}
    held |= {"sink_k": cache.sink_k[row, :, :n_sink], "sink_v": cache.sink_v[row, :, :n_sink]}
    for side, ring, n_packed, planes in (("k", cache.ring_k, cache.n_qk, cache.record.k_planes),
                                         ("v", cache.ring_v, cache.n_qv, cache.record.v_planes)):
        held[f"ring_{side}"] = ring[row][:, _live_slots(cache, row, ring, n_packed)]
        pages = cache.pool[cache.table[row, : int(n_packed[row]) // layout.PAGE_TOKENS].long()]
        held |= {f"{side} {p.name}": pages[..., p.offset : p.offset + p.nbytes] for p in planes}
    return held


def _live_slots(cache: KVCache, row: int, ring: torch.Tensor, n_packed: torch.Tensor) -> torch.Tensor:
    stop = int(cache.n_tok[row] - cache.n_sink[row])
    return torch.arange(int(n_packed[row]), stop, device=cache.device) % ring.shape[2]


def _worst(got: torch.Tensor, want: torch.Tensor, row: int) -> str:
    difference = (got[row].double() - want[row]).nan_to_num(0.0).abs()
    at = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
    return f"worst at {[row, *at]}: {float(got[row][tuple(at)]):.5g}, expected {float(want[row][tuple(at)]):.5g}"
