"""The order of codebook codes against its statement lane by lane, and what it is for: lookups without conflicts."""

from itertools import product

import pytest

from lowbit_attn.formats import FORMATS
from lowbit_attn.formats import codebook_order as order

GROUPS = (8, 16, 32, 64, 128)


@pytest.mark.parametrize("groups", (*GROUPS, 4, 12, 24, 48, 40))
@pytest.mark.parametrize("transposed", (False, True))
def test_codes_fill_a_plane_and_are_found_again(groups, transposed):
    cells = list(product(range(128), range(groups)))
    offsets = [order.code_offset(token, group, groups, transposed) for token, group in cells]
    assert sorted(offsets) == list(range(128 * groups))
    assert [order.code_at(offset, groups, transposed) for offset in offsets] == cells
    assert order.is_by_lanes(groups) == (groups in GROUPS)


def test_k_of_head_dim_128_is_as_the_kernels_read_it():
    """CQ-2: byte 8b + 4q + i of a lane's 16 in a block of 16 tokens; CQ-4: byte 4q + i in a block of 8."""
    for block, lane, b, q, i in product(range(8), range(32), range(2), range(2), range(4)):
        g, t = lane // 4, lane % 4
        at = block * 512 + lane * 16 + 8 * b + 4 * q + i
        assert order.code_at(at, 32, False) == (16 * block + 8 * b + g, 16 * q + 4 * ((i + g) % 4) + t)
    for block, lane, q, i in product(range(16), range(32), range(4), range(4)):
        g, t = lane // 4, lane % 4
        at = block * 512 + lane * 16 + 4 * q + i
        assert order.code_at(at, 64, False) == (8 * block + g, 16 * q + 4 * ((i + g) % 4) + t)


def test_v_of_head_dim_128_is_as_the_kernels_read_it():
    """Byte 4i + 2j + e of a lane's 16 in a block of 16 tokens; CQ-4 has two runs of 512 bytes a block."""
    for block, lane, i, j, e in product(range(8), range(32), range(4), range(2), range(2)):
        g, t, within = lane // 4, lane % 4, lane * 16 + 4 * i + 2 * j + e
        token = 16 * block + 8 * j + 2 * t + e
        assert order.code_at(block * 512 + within, 32, True) == (token, 4 * g + (i + t) % 4)
        for s in range(2):
            at = (2 * block + s) * 512 + within
            assert order.code_at(at, 64, True) == (token, 32 * s + 4 * g + (i + t) % 4)


@pytest.mark.parametrize("groups", GROUPS)
def test_lanes_that_look_up_together_ask_for_different_groups(groups):
    """K, at one byte of 32 lanes: all groups are as often asked for; half a warp never for one twice, if 16 exist."""
    for n in range(4 * groups):
        at = [n // 16 * 512 + lane * 16 + n % 16 for lane in range(32)]
        asked = [order.code_at(offset, groups, False)[1] for offset in at]
        assert len(set(asked[:16])) == len(set(asked[16:])) == min(16, groups)


@pytest.mark.parametrize("groups", GROUPS)
def test_lanes_of_v_share_tokens_across_g_and_groups_across_t(groups):
    """V, at one byte: a lane's t alone says the token, and its g the run of groups, as the second multiply wants."""
    turns = min(4, groups // 8)
    for n in range(0, 4 * groups, 5):
        found = [order.code_at(n // 16 * 512 + lane * 16 + n % 16, groups, True) for lane in range(32)]
        assert all(found[lane][0] == found[lane % 4][0] for lane in range(32))
        assert all(found[lane][1] % (8 * turns) // turns == lane // 4 for lane in range(32))


def test_norms_lie_as_a_lane_reads_them():
    for token in range(128):
        assert order.token_of_norm(order.norm_index(token)) == token
    lane = [order.token_of_norm(32 * 2 + 8 * 1 + n) for n in range(8)]  # third 32 tokens, t = 1
    assert lane == [66, 67, 74, 75, 82, 83, 90, 91]


def test_other_head_dims_have_the_plain_order():
    assert order.code_offset(5, 7, 24, False) == order.code_offset(5, 7, 24, True) == 5 * 24 + 7
    assert not order.is_by_lanes(96 // 4) and not order.is_by_lanes(96 // 2)


def test_the_family_has_an_identity_of_its_own():
    assert order.ORDER_ID in FORMATS["cq2"].layout_id and FORMATS["cq2"].layout_id == FORMATS["kcq4vcq1"].layout_id
    mixed = FORMATS["k4vcq2"].layout_id
    assert mixed == f"{FORMATS['k4v4'].layout_id}/{FORMATS['cq2'].layout_id}" != FORMATS["kcq2v4"].layout_id
