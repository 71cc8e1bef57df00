"""A step of an engine by the compiled append on the CPU, of boosted channels, codebooks and all widths of heads: pages
and rings bit for bit those of ``paged.append``."""

import pytest
import torch

from sim.paged_steps import check, step_of, store_of


@pytest.mark.parametrize("name, head_dim, sinks, dtype", [
    ("kitty", 64, 32, "float16"), ("kitty-pro", 128, 32, "float16"), ("cq4", 64, 0, "float16"),
    ("k4v2", 96, 0, "float16"), ("k8v4", 256, 0, "bfloat16")])
def test_a_row_that_packs_and_a_chunk(name, head_dim, sinks, dtype):
    """The chunk's first block is half in the ring, where its own tokens then go; its second one is new."""
    step = step_of([(sinks + 127, 1), (sinks + 60, 200)], sinks)
    store = store_of(name, head_dim, sinks, 1, 2, getattr(torch, dtype))
    items = check(store, step, 1)
    assert items[0].tolist() == [0, 1, 1] and items[3].tolist() == [0, 1, 0]
