"""E8P, the 2-bit lattice codebook of QuIP# (Tseng et al., 2024, section 4.2): 65,536 points of E8 + 1/4.

A code of 16 bits, a pattern byte and a sign byte, stands for 8 weights. The pattern is one of 256 vectors of absolute
values, all half-odd: the 227 of squared norm 10 or less and 29 of norm 12. The sign byte gives seven signs and, by its
parity, the shift: all eight weights move by +1/4 (even) or -1/4 (odd). The eighth sign makes the sum of the unshifted
weights even.

Two tables say the same in integers, as kernels read them: 4 w = 2 u - 15, u = TABLE_1[pattern] ^ TABLE_2[sign byte],
eight fields of 4 bits.
"""

from functools import cache

import torch

VEC = 8
CODES = 65536
# Weights of unit variance are multiplied by SCALE before rounding to the grid, what that leaves by RESIDUAL_SCALE
# before the second stage. QuIP#'s 1.03 and 3.45 are the best for Gaussian weights; with fed-back errors targets are
# wider, and these lower the error of y by 5 %.
SCALE, RESIDUAL_SCALE = 0.93, 3.6
SIGN_BIT = (0, 4, 1, 5, 2, 6, 3, 7)  # bit of the sign byte that belongs to a weight
# The patterns of norm 12 that belong to the codebook, in halves.
NORM_12 = """31113333 13113333 11313333 11133333 33313311 33313131 33311331 33313113 33311313 33311133
33133311 33133131 33131331 33133113 33131313 33131133 31333311 31333131 31331331 31333113 31331313
13331133 13333311 13333131 13331331 13333113 13331313 11331333 33113331"""
_CHUNK = 1024  # rows searched at once: their scores stay in a core's cache


@cache
@torch.inference_mode(False)  # kept for all callers, as the other tables here
def patterns() -> torch.Tensor:
    """The 256 vectors of absolute values, fp32 [256, 8], in the order of the pattern byte."""
    half_odd = torch.tensor([0.5, 1.5, 2.5], device="cpu")  # 3.5 alone has norm 12.25
    small = torch.cartesian_prod(*[half_odd] * VEC)  # in lexicographic order, which is the code's
    small = small[small.square().sum(1) <= 10]
    large = torch.tensor([[int(digit) for digit in word] for word in NORM_12.split()], device="cpu") / 2
    return torch.cat((small, large))


def _odd() -> torch.Tensor:
    """Whether a pattern's sum is odd: then an odd number of signs is negative. int [256]."""
    return patterns().sum(1).long() & 1


def _parity(byte: torch.Tensor) -> torch.Tensor:
    """Parity of the bits of integers 0 to 255."""
    for shift in (4, 2, 1):
        byte = byte ^ (byte >> shift)
    return byte & 1


@cache
@torch.inference_mode(False)
def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """(TABLE_1 by pattern byte, TABLE_2 by sign byte), int64 [256] of 32 bits: field i (bits 4 i on) is weight i.

    TABLE_1: 2 (|w| - 1/2) with its top bit flipped, and negated in the eighth field of odd patterns. TABLE_2: 14 where
    a sign is negative (XOR by 14 negates), and the shift in the lowest bit of every field.
    """
    field = 4 * torch.arange(VEC, device="cpu")
    first = (2 * patterns() - 1).long() ^ 8
    first[:, 7] ^= 14 * _odd()
    byte = torch.arange(256, device="cpu")
    odd = _parity(byte)
    signs = (byte ^ odd)[:, None] >> torch.tensor(SIGN_BIT, device="cpu") & 1
    return (first << field).sum(1), ((14 * signs | (1 - odd)[:, None]) << field).sum(1)


@cache
@torch.inference_mode(False)
def grid() -> torch.Tensor:
    """All weights by code (pattern byte x 256 + sign byte), fp32 [65536, 8], multiples of 1/4 in -2.75 to 2.75."""
    first, second = tables()
    fields = (first[:, None] ^ second)[..., None] >> 4 * torch.arange(VEC, device="cpu") & 15
    return ((2 * fields - 15).float() / 4).reshape(CODES, VEC)


@cache
@torch.inference_mode(False)
def _folded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(points fp32 [8, n], half their squared norms [n], their pattern x 256 + negative weights int64 [n]).

    Candidates for a vector whose first seven entries are not negative and whose eighth has the sign that leaves an even
    number of flips to undo: at most one of the first seven is negative, and the eighth sign is what parity asks for.
    A flip of 3/2 or 5/2 is left out where the pattern with that entry exchanged for a 1/2 exists: that one is nearer.
    """
    points, marks = [], []
    base, odd = patterns(), _odd()
    for flipped in (None, *range(7)):
        signs = torch.ones(VEC, device="cpu")
        if flipped is not None:
            signs[flipped] = -1
        last = 1 - 2 * (odd ^ (flipped is not None)).float()
        point = base * signs
        point[:, 7] *= last
        kept = torch.ones(256, dtype=torch.bool, device="cpu")
        if flipped is not None:
            kept = (base[:, flipped] == 0.5) | (torch.arange(256, device="cpu") >= 227)
        negative = (point < 0).long() << torch.arange(VEC, device="cpu")
        points.append(point[kept])
        marks.append((torch.arange(256, device="cpu") * 256 + negative.sum(1))[kept])
    points, marks = torch.cat(points), torch.cat(marks)
    return points.T.contiguous(), points.square().sum(1) / 2, marks


def nearest(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codebook point of each row of x, fp32 [m, 8]: (points fp32 [m, 8], codes int64 [m]).

    Exact: folds the signs away, so that about 1,500 candidates a shift are compared instead of 65,536.
    """
    chosen = [_nearest_chunk(chunk) for chunk in x.split(_CHUNK)] or [(x, x.new_zeros(0, dtype=torch.long))]
    return torch.cat([points for points, _ in chosen]), torch.cat([codes for _, codes in chosen])


def _nearest_chunk(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    points, half_norms, marks = (table.to(x.device) for table in _folded())
    weights = 1 << torch.arange(VEC, device=x.device)
    scores, codes = [], []
    for minus in (0, 1):
        shifted = x - (0.25 - 0.5 * minus)
        negative = shifted < 0
        folded = shifted.abs()
        flips_last = negative.sum(1) & 1 == 1  # an odd number of signs: the eighth takes one back
        folded[:, 7] = torch.where(flips_last, -folded[:, 7], folded[:, 7])
        best, at = torch.addmm(half_norms, folded, points, beta=-1).max(1)
        flips = negative.long()
        flips[:, 7] ^= flips_last.long()
        scores.append(shifted.square().sum(1) / 2 - best)
        codes.append(_code(marks[at] ^ (flips * weights).sum(1), minus))
    code = torch.where(scores[1] < scores[0], codes[1], codes[0])
    return grid().to(x.device)[code], code


def _code(mark: torch.Tensor, minus: int) -> torch.Tensor:
    """Code of a pattern and the signs of its weights (bits 0 to 7 of ``mark``), and the shift: minus 1 is -1/4."""
    pattern = mark >> 8
    signs = mark ^ _odd().to(mark.device)[pattern] << 7
    byte = sum((signs >> weight & 1) << bit for weight, bit in enumerate(SIGN_BIT)) ^ minus
    return pattern << 8 | byte
