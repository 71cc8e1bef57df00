"""Hopper's host arithmetic in integers that check themselves."""

import numpy as np
import pytest

from host.integers import replace_integers


@pytest.fixture
def numpy_walk(monkeypatch):
    """Hopper's walks compute in numpy's int32, where overflows raise: the DSL's integers take 100 times longer."""
    from lowbit_attn.hopper.pair import items as pair_items
    from lowbit_attn.hopper.schedule import items
    from lowbit_attn.hopper.tile import walk as tile_walk
    from lowbit_attn.hopper.warp import page_loop

    replace_integers(monkeypatch, np.int32, items, pair_items, tile_walk, page_loop)
    with np.errstate(over="raise"):
        yield
