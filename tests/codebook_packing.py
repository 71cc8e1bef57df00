"""Codes of two quantizers: equal but where two entries are as near, and there the errors are compared."""

import torch

from lowbit_attn import layout
from lowbit_attn.formats.codebook import ENTRIES, REACH, Codebook, _ordered, _source, order

MORE_ERROR = 2.0**-17  # of the squared distance to the entry chosen, of |x|^2 + |e|^2: fp32 scores have such terms
NEAR_TIES = 1e-3  # of all codes at most: of one in a thousand the two nearest entries are as near in fp32


def hard_tokens(heads: int, head_dim: int, count: int, seed: int = 0, sinks: int = 0) -> torch.Tensor:
    """fp32 [count, heads, head_dim]: normal, one channel of 100, tokens of 300 times the norm; behind the sinks, in the
    first page channels (of head 0) and tokens (of the last head) that are not finite, and the third of zeros."""
    x = torch.randn(count, heads, head_dim, generator=torch.Generator().manual_seed(seed))
    x[:, :, 5] += 100
    x[::37] *= 300
    x[sinks + 256 : sinks + 384] = 0
    x[sinks + 90, 0, 9] = float("nan")
    x[sinks + 100, 0, 10] = float("inf")
    x[sinks + 110, -1] = float("-inf")
    return x


def uneven(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Vectors [..., c] times powers of two from 2^-12 to 1: scores lose the bits that a term of fp16 does not hold."""
    generator = torch.Generator().manual_seed(seed)
    return x * 2.0 ** -torch.randint(13, (*x.shape[:-1], 1), generator=generator)


def planes_of(side: Codebook, head_dim: int, part: torch.Tensor) -> dict[str, torch.Tensor]:
    """Planes of a side's part of records, uint8 [n, bytes]."""
    sizes = side.plane_sizes(head_dim)
    return dict(zip(sizes, part[:, : sum(sizes.values())].split(list(sizes.values()), 1)))


def codes_of(side: Codebook, head_dim: int, packed: torch.Tensor) -> torch.Tensor:
    """Codes int64 [n, 128, groups] of a packed plane."""
    groups = side.groups(head_dim)
    return packed[:, _source(groups, side.transposed, False, packed.device)].long().unflatten(1, (-1, groups))


def shifted(side: Codebook, x: torch.Tensor, planes: dict[str, torch.Tensor]) -> torch.Tensor:
    """What entries are compared with: fp32 [n, 128, head_dim] less the page's mean, or by its norms."""
    if side.shift == "mean":
        x = x - planes["mean"].contiguous().view(torch.float16).float()[:, None]
    elif side.shift == "norm":
        norm = _ordered(planes["norm"].contiguous().view(torch.float16), order.norm_index).float()
        x = x / torch.where(norm == 0, 1.0, norm)[..., None]
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-REACH, REACH)


def assert_same_but_near_ties(side: Codebook, x: torch.Tensor, entries: torch.Tensor, got: torch.Tensor,
                              want: torch.Tensor) -> int:
    """Parts uint8 [n, bytes] of pages x fp32 [n, 128, head_dim], page i of head i % heads; returns differing codes."""
    head_dim, heads = x.shape[2], len(entries)
    mine, theirs = (planes_of(side, head_dim, part) for part in (got, want))
    if side.shift:
        assert torch.equal(mine[side.shift], theirs[side.shift]), side.shift
    codes = [codes_of(side, head_dim, planes["codes"]) for planes in (mine, theirs)]
    page, token, group = (codes[0] != codes[1]).nonzero(as_tuple=True)
    values = shifted(side, x, theirs).unflatten(2, (-1, side.vec_size))[page, token, group].double()
    chosen = [entries[page % heads, group, code[page, token, group]].double() for code in codes]
    errors = [((values - entry) ** 2).sum(-1) for entry in chosen]
    terms = (values**2 + chosen[1] ** 2).sum(-1)
    assert (errors[0] - errors[1] <= terms * MORE_ERROR).all(), ((errors[0] - errors[1]) / terms).max()
    assert len(page) <= NEAR_TIES * codes[0].numel(), f"{len(page)} of {codes[0].numel()} codes differ"
    return len(page)


def twins(entries: torch.Tensor) -> torch.Tensor:
    """Entries of which each has an equal one, in the same block of 32 and eights, in others, or far away."""
    index = torch.arange(ENTRIES)
    return entries[..., torch.minimum(index, index.flip(0)) // 3 * 3, :].contiguous()


def pages_of(x: torch.Tensor) -> torch.Tensor:
    """Tokens [count, heads, head_dim] -> [pages heads, 128, head_dim]."""
    return x.unflatten(0, (-1, layout.PAGE_TOKENS)).transpose(1, 2).flatten(0, 1)
