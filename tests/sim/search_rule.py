"""The factor that range search picks, in numpy, for a quotient of choice; and groups whose factor hinges on it."""

import numpy as np
import torch

GRID, TENTHS = 150, (10, 9, 8, 7, 6, 5, 4, 3)
STEPS = (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25)  # halves of a grid step, in units of the data
F = np.float32


def half_ranges(x: np.ndarray) -> np.ndarray:
    return (x.max(-1) - x.min(-1)) * F(0.5)


def quotients(x: np.ndarray) -> np.ndarray:
    """Steps of the grid over half the range of each group fp32 [n, size], rounded once."""
    return F(GRID) / half_ranges(x)


def products(x: np.ndarray) -> np.ndarray:
    """What the quotients must not be: the reciprocals, rounded, times the steps, rounded again."""
    return F(1) / half_ranges(x) * F(GRID)


def factors(x: np.ndarray, inverse: np.ndarray, bits: int) -> np.ndarray:
    """Index of each group's factor: the least squared distance to the nearest level, on the grid; the first of ties."""
    steps, middle = (1 << bits) - 1, (x.min(-1) + x.max(-1)) * F(0.5)
    distance = np.rint((x - middle[:, None]) * inverse[:, None]).astype(np.int32)
    errors = []
    for tenths in TENTHS:
        levels = [GRID * tenths * (2 * i - steps) // (10 * steps) for i in range(steps + 1)]
        misses = np.abs(distance - levels[0])
        for level in levels[1:]:
            misses = np.minimum(misses, np.abs(distance - level))
        errors.append((misses * misses).sum(-1))
    return np.argmin(errors, 0)


def hinging_groups(count: int, size: int, bits: int, dtype: torch.dtype, seed: int) -> np.ndarray:
    """``count`` groups fp32 [count, size], exact in ``dtype``, whose factor is another by ``products``.

    Half of the range is 300 times a number, and the values are odd multiples of it: half way between two steps of the
    grid, where the last bit of the quotient decides.
    """
    draw, found, missing = np.random.default_rng(seed), [], count
    while missing > 0:
        n = draw.normal(0, draw.uniform(20, 200, (2048, 1)), (2048, size)).round().clip(-150, 149)
        x = (2 * n + 1) * draw.choice(STEPS, (2048, 1))
        x[:, 0], x[:, 1] = -300 * x[:, 0] / (2 * n[:, 0] + 1), 300 * x[:, 1] / (2 * n[:, 1] + 1)
        x = torch.from_numpy(x).to(dtype).float().numpy() * F(2.0**-9)
        x = x[quotients(x) != products(x)]
        found.append(x[factors(x, quotients(x), bits) != factors(x, products(x), bits)])
        missing -= len(found[-1])
    return np.concatenate(found)[:count]
