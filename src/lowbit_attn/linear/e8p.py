"""E8P, the 2-bit lattice codebook of QuIP# (Tseng et al., 2024, section 4.2): 65,536 points of E8 + 1/4.

A code of 16 bits, a pattern byte and a sign byte, stands for 8 weights. The pattern is one of 256 vectors of absolute
values, all half-odd: the 227 of squared norm 10 or less and 29 of norm 12. The sign byte gives seven signs and, by its
parity, the shift: all eight weights move by +1/4 (even) or -1/4 (odd). The eighth sign makes the sum of the unshifted
weights even.

Two tables say the same in integers, as kernels read them: 4 w = 2 u - 15, u = TABLE_1[pattern] ^ TABLE_2[sign byte],
eight fields of 4 bits.
"""

import torch

from lowbit_attn.linear.constants import constant

VEC = 8
CODES = 65536
# Weights of unit variance are multiplied by SCALE before rounding to the grid, what that leaves by RESIDUAL_SCALE
# before the second stage. QuIP#'s 1.03 and 3.45 are the best for Gaussian weights; with fed-back errors targets are
# wider, and these lower the error of y by 5 %.
SCALE, RESIDUAL_SCALE = 0.93, 3.6
DAMPING = 0.01  # QuIP#'s; a whole model is better with it than with 0.1, which is better for a matrix on other text
SIGN_BIT = (0, 4, 1, 5, 2, 6, 3, 7)  # bit of the sign byte that belongs to a weight
# The patterns of norm 12 that belong to the codebook, in halves.
NORM_12 = """31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133
33133311 33133131 33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 31331313
13331133 13333311 13333131 13331331 13333113 13331313 11331333 33113331"""
_CHUNK = 4096  # rows searched at once: their scores stay in a core's cache


@constant
def patterns() -> torch.Tensor:
    """The 256 vectors of absolute values, fp32 [256, 8], in the order of the pattern byte."""
    half_odd = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float32)  # 3.5 alone has norm 12.25
    small = torch.cartesian_prod(*[half_odd] * VEC)  # in lexicographic order, which is the code's
    small = small[small.square().sum(1) <= 10]
    large = torch.tensor([[int(digit) for digit in word] for word in NORM_12.split()]).float() / 2
    return torch.cat((small, large))


def _odd() -> torch.Tensor:
    """Whether a pattern's sum is odd: then an odd number of signs is negative. int [256]."""
    return patterns().sum(1).long() & 1


def _parity(byte: torch.Tensor) -> torch.Tensor:
    """Parity of the bits of integers 0 to 255."""
    for shift in (4, 2, 1):
        byte = byte ^ (byte >> shift)
    return byte & 1


@constant
def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """(TABLE_1 by pattern byte, TABLE_2 by sign byte), int64 [256] of 32 bits: field i (bits 4 i on) is weight i.

    TABLE_1: 2 (|w| - 1/2) with its top bit flipped, and negated in the eighth field of odd patterns. TABLE_2: 14 where
    a sign is negative (XOR by 14 negates), and the shift in the lowest bit of every field.
    """
    field = 4 * torch.arange(VEC)
    first = (2 * patterns() - 1).long() ^ 8
    first[:, 7] ^= 14 * _odd()
    byte = torch.arange(256)
    odd = _parity(byte)
    signs = (byte ^ odd)[:, None] >> torch.tensor(SIGN_BIT) & 1
    return (first << field).sum(1), ((14 * signs | (1 - odd)[:, None]) << field).sum(1)


@constant
def grid(device: torch.device = torch.device("cpu")) -> torch.Tensor:
    """All weights by code (pattern byte x 256 + sign byte), fp32 [65536, 8], multiples of 1/4 in -2.75 to 2.75."""
    first, second = tables()
    fields = (first[:, None] ^ second)[..., None] >> 4 * torch.arange(VEC) & 15
    return ((2 * fields - 15).float() / 4).reshape(CODES, VEC).to(device)


# Entries 1/2, 3/2, 5/2 (0, 1, 2) of the patterns to norm 10, largest first: all their permutations are patterns.
_SHAPES = ("00000000", "10000000", "11000000", "11100000", "11110000", "20000000", "21000000")


@constant
def _shapes() -> tuple[torch.Tensor, ...]:
    """(entries fp32 [8, 7], half their squared norms [7], their parities int64 [7], digits int64 [7, 8], pattern by
    digits, first weight lowest, int64 [3^8])."""
    digits = torch.tensor([[int(digit) for digit in shape] for shape in _SHAPES])
    entries = digits.float() + 0.5
    number = torch.full((3**VEC,), -1)
    number[((patterns() - 0.5).long() * 3 ** torch.arange(VEC)).sum(1)] = torch.arange(256)
    return entries.T.contiguous(), entries.square().sum(1) / 2, entries.sum(1).long() & 1, digits, number


@constant
def _large() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(points fp32 [n, 8], half their squared norm, their pattern x 256 + negative weights int64 [n]) of norm 12.

    Candidates for a vector whose first seven entries are not negative and whose eighth has the sign that leaves an even
    number of flips to undo: at most one of the first seven is negative, and the eighth sign is what parity asks for.
    """
    points, marks = [], []
    base, odd = patterns()[227:], _odd()[227:]
    for flipped in (None, *range(7)):
        point = base.clone()
        point[:, 7] *= 1 - 2 * (odd ^ (flipped is not None)).float()
        if flipped is not None:
            point[:, flipped] *= -1
        points.append(point)
        negative = (point < 0).long() << torch.arange(VEC)
        marks.append(torch.arange(227, 256) * 256 + negative.sum(1))
    points = torch.cat(points)
    return points, points.square().sum(1) / 2, torch.cat(marks)


def nearest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codebook point of each row of x, fp32 [m, 8]: (points fp32 [m, 8], codes int64 [m]).

    Exact. Of the patterns to norm 10 every permutation is one, so sorting the absolute values leaves seven candidates a
    shift; where the signs' parity is wrong, the smallest value's sign flips. Those of norm 12 are compared one by one.
    """
    codes = torch.cat([_nearest_codes(chunk) for chunk in x.split(_CHUNK)]) if len(x) else x.new_zeros(0).long()
    return grid(x.device)[codes], codes


def _nearest_codes(x: torch.Tensor) -> torch.Tensor:
    """Codes of x, fp32 [m, 8]: both shifts are searched as one batch, and each row's better half is decoded."""
    m = len(x)
    distance, order, shape, candidate, negative, is_odd = _search(torch.cat((x - 0.25, x + 0.25)))
    minus = (distance[m:] < distance[:m]).long()
    row = minus * m + torch.arange(m, device=x.device)
    order, shape, candidate, signs, is_odd = order[row], shape[row], candidate[row], negative[row], is_odd[row]
    _, _, parities, digits, number = (table.to(x.device) for table in _shapes())
    powers, bit = (base ** torch.arange(VEC, device=x.device) for base in (3, 2))
    small = number[(powers[order] * digits[shape]).sum(1)] << 8 | signs ^ bit[order[:, 7]] * (parities[shape] ^ is_odd)
    large = _large()[2].to(x.device)[candidate] ^ signs ^ is_odd << 7
    mark = torch.where(candidate >= 0, large, small)
    pattern = mark >> 8
    return pattern << 8 | _sign_bytes().to(x.device)[mark & 255 ^ _odd().to(x.device)[pattern] << 7] ^ minus


def _search(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each row of x, already without the shift, the nearest pattern with signs: (half the squared distance, order
    of the sorted values, shape, which candidate of norm 12 is nearer or -1, bits of negative values, their parity)."""
    entries, half_norms, parities = (table.to(x.device) for table in _shapes()[:3])
    values = x.abs()
    negative = ((x < 0) * 2 ** torch.arange(VEC, device=x.device)).sum(1)
    is_odd = _parity(negative)
    ordered, order = values.sort(1, descending=True)
    scores = torch.addmm(half_norms, ordered, entries, beta=-1)
    best, shape = (scores - ordered[:, 7:] * (parities ^ is_odd[:, None])).max(1)
    half_squares = (values * values).sum(1) / 2
    candidate = torch.full_like(shape, -1)
    # five entries of 3/2 in the best places and no wrong sign: what no pattern of norm 12 can surpass
    rows = (scores[:, 4] + ordered[:, 4] - 1 > best).nonzero()[:, 0]
    if len(rows):
        points, half_twelve, _ = (table.to(x.device) for table in _large())
        folded = values[rows]
        folded[:, 7] *= 1 - 2 * is_odd[rows]
        large, found = torch.addmm(half_twelve, folded, points.T, beta=-1).max(1)
        candidate[rows] = torch.where(large > best[rows], found, -1)
        best[rows] = torch.maximum(best[rows], large)
    return half_squares - best, order, shape, candidate, negative, is_odd


@constant
def _sign_bytes() -> torch.Tensor:
    """Sign byte, without the shift's parity, of the bits of negative weights, int64 [256]."""
    weight = torch.arange(256)
    return sum((weight >> place & 1) << bit for place, bit in enumerate(SIGN_BIT))
