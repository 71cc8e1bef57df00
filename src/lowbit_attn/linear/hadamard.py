"""Hadamard transforms of any size: Sylvester's doubling of matrices by Paley (1933) and Williamson (1944).

QuIP# (Tseng et al., 2024, section 3) multiplies weights by randomly signed Hadamard matrices on both sides. The sizes
of real layers are a small order times a power of two: 14336 = 28 x 512, 11008 = 172 x 64, 576 = 36 x 16. The matrices
here are those of the published checkpoints, entry by entry, for the orders 12, 20, 28, 36, 52, 60, 108, 140, 156, 172.
"""

from functools import cache

import torch

from lowbit_attn.linear.constants import constant
from lowbit_attn.precision import on_own_defaults

# First halves of the first rows of four symmetric circulants A, B, C, D, by their order: Williamson's construction.
WILLIAMSON = {
    13: ("+-+--++", "+---+++", "++-+--+", "+----+-"),
    39: ("+++--+-+-----+--++--", "++++---+--++----+-+-", "+++--++-+---+-+--+--", "+---++-+-+-----+++-+"),
    43: ("+---++--++++-+-+++-++-", "++-++++++----+-+--++-+", "+++-+-++--+-+-++++-+--", "++---++++-+--+--++----"),
}


@cache
def base_order(size: int) -> int:
    """Order K of the matrix whose doublings give a Hadamard matrix of this size: size = K 2^p; 0 if none is known.

    The smallest K that Paley's or Williamson's construction reaches; 1 for powers of two.
    """
    odd = size & -size and size // (size & -size)
    if odd <= 1:
        return max(odd, 0)
    orders = [order for order in (4 * odd << doublings for doublings in range(32))
              if order <= size and size % order == 0]
    return next((order for order in orders if _construction(order)), 0)


@cache
def padded_size(size: int) -> int:
    """The smallest size, from this one on, that a Hadamard matrix is known for here; ValueError below 1."""
    if size < 1:
        raise ValueError(f"size: got {size}, supported: 1 or more")
    while not base_order(size):
        size += 1
    return size


@constant  # by device: a captured graph copies nothing from the host
def matrix(order: int, device: torch.device = torch.device("cpu")) -> torch.Tensor:
    """Hadamard matrix, entries 1 and -1, fp32 [order, order]: H H^T = order I; ValueError for an unknown order."""
    base = base_order(order)
    if not base:
        raise ValueError(f"order: got {order}, supported: powers of two times 1 or an order of Paley or Williamson; "
                         f"the next one is {padded_size(order)}")
    made = _construction(base)() if base > 1 else torch.ones(1, 1)
    made = made.float()
    while len(made) < order:  # the small matrix is the outer factor
        made = torch.kron(made, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float32))
    return made.to(device)


def transform(x: torch.Tensor, transpose: bool = False) -> torch.Tensor:
    """H x / sqrt(n) of each row of x [..., n], or H^T x / sqrt(n): orthogonal, so one undoes the other.

    H = matrix(K) (x) Sylvester(2^p). n must be a size of ``padded_size``; fp32 or fp64, on x's device.
    """
    size = x.shape[-1]
    base = base_order(size)
    if not base:
        raise ValueError(f"x: got {size} columns, supported: sizes of a Hadamard matrix, the next is "
                         f"{padded_size(size)}")
    inner, outer = _halves(size // base)
    small, left, right = (matrix(order, x.device).to(x.dtype) for order in (base, inner, outer))
    x = x.reshape(-1, base, outer, inner)
    x = (x @ left).transpose(-1, -2) @ right
    x = x.transpose(-1, -2).reshape(-1, base, outer * inner)
    return ((small.T if transpose else small) @ x).reshape(-1, size) / size**0.5


def _halves(size: int) -> tuple[int, int]:
    """Two powers of two whose product is ``size``, the first not the smaller."""
    bits = size.bit_length() - 1
    return 1 << (bits + 1) // 2, 1 << bits // 2


def _construction(order: int):
    """What makes a Hadamard matrix of this order, a multiple of 4; None if no construction here does."""
    if _is_prime(order - 1) and order % 4 == 0:
        return lambda: _paley_1(order - 1)
    if _is_prime(order // 2 - 1) and order % 4 == 0 and (order // 2 - 1) % 4 == 1:
        return lambda: _paley_2(order // 2 - 1)
    if order % 4 == 0 and order // 4 in WILLIAMSON:
        return lambda: _williamson(order // 4)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def _jacobsthal(prime: int) -> torch.Tensor:
    """Q[i, j] = the Legendre symbol of i - j, int [prime, prime]."""
    symbol = torch.full((prime,), -1)
    symbol[torch.arange(1, prime) ** 2 % prime] = 1
    symbol[0] = 0
    i = torch.arange(prime)
    return symbol[(i[:, None] - i) % prime]


@on_own_defaults
def _paley_1(prime: int) -> torch.Tensor:
    """I + S of order prime + 1, S skew: for primes of the form 4 m + 3."""
    made = torch.eye(prime + 1, dtype=torch.long)
    made[0, 1:], made[1:, 0] = -1, 1
    made[1:, 1:] += _jacobsthal(prime)
    return made


@on_own_defaults
def _paley_2(prime: int) -> torch.Tensor:
    """[[C + I, C - I], [C - I, -C - I]], C a symmetric conference matrix: for primes of the form 4 m + 1."""
    conference, one = torch.zeros(prime + 1, prime + 1, dtype=torch.long), torch.eye(prime + 1, dtype=torch.long)
    conference[0, 1:], conference[1:, 0] = 1, 1
    conference[1:, 1:] = _jacobsthal(prime)
    return torch.cat((torch.cat((conference + one, conference - one), 1),
                      torch.cat((conference - one, -conference - one), 1)))


@on_own_defaults
def _williamson(size: int) -> torch.Tensor:
    """[[A, B, C, D], [-B, A, -D, C], [-C, D, A, -B], [-D, -C, B, A]] of circulants of this size."""
    blocks = []
    for half in WILLIAMSON[size]:
        row = torch.tensor([1 if sign == "+" else -1 for sign in half + half[:0:-1]])
        blocks.append(torch.stack([row.roll(shift) for shift in range(size)]))
    a, b, c, d = blocks
    rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, 1) for row in rows])
