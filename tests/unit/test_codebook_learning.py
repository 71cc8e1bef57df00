"""k-means, and what a layer's codebooks are learned from: channels, positions, page means, held-out errors."""

import pytest
import torch

from lowbit_attn.codebooks.capture import LayerSample, Sample, turned
from lowbit_attn.codebooks.kmeans import _start, gathered, kmeans, nearest
from lowbit_attn.codebooks.learn import (
    LEAST_WEIGHT,
    Recipe,
    balanced_order,
    channel_weights,
    learn_layers,
    random_offsets,
)

HEADS, DIM, PAGES = 2, 16, 9


def normal(*shape, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- k-means

def test_separate_clusters_are_found():
    centers = normal(3, 8, 4) * 50
    x = centers.repeat(1, 40, 1) + normal(3, 320, 4, seed=2) * 0.01
    found = kmeans(x, 8, seed=3)
    distance = torch.cdist(found.entries, centers)
    assert distance.min(2).values.max() < 0.02 and distance.min(1).values.max() < 0.02
    assert found.counts.tolist() == [[40] * 8] * 3 and found.unused == 0
    assert found.error.max() < 1e-3


def test_nearest_is_the_nearest():
    x, entries = normal(3, 700, 4), normal(3, 256, 4, seed=2)
    codes, distance = nearest(x, entries)
    exact = torch.cdist(x.double(), entries.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    assert (distance - exact.min(2).values).abs().max() < 2e-3
    assert (codes == exact.argmin(2)).double().mean() > 0.995
    assert torch.allclose(distance, (x - gathered(entries, codes)).square().sum(-1))


def test_each_iteration_lowers_the_error_and_seeds_decide():
    x = normal(4, 2000, 4)
    errors = [kmeans(x, 64, n, seed=5).error.mean().item() for n in (1, 3, 12)]
    assert errors[0] > errors[1] > errors[2]
    again, other = kmeans(x, 64, 3, seed=5), kmeans(x, 64, 3, seed=6)
    assert torch.equal(again.entries, kmeans(x, 64, 3, seed=5).entries)
    assert not torch.equal(again.entries, other.entries)


def test_hot_entries_come_first_and_counts_are_of_the_vectors():
    x = normal(2, 3000, 2)
    found = kmeans(x, 32)
    assert (found.counts.diff(dim=1) <= 0).all() and (found.counts.sum(1) == 3000).all()
    codes, distance = nearest(x, found.entries)
    assert torch.equal(torch.stack([code.bincount(minlength=32) for code in codes]), found.counts)
    assert torch.allclose(found.error, distance.mean(1))


@pytest.mark.parametrize("different", (1, 3, 100))
def test_fewer_different_vectors_than_entries(different):
    x = normal(1, different, 4).repeat(1, 5, 1)
    found = kmeans(x, 256)
    assert found.entries.isfinite().all() and found.error.max() < 1e-10
    assert found.unused == 256 - different


def test_no_entry_stays_empty_beside_vectors_that_are_far():
    """All start in one heap of 1,000 equal vectors, but for a few; the rest are found by moving empty entries."""
    x = torch.cat((torch.zeros(1, 1000, 2), normal(1, 64, 2) * 10), 1)
    assert kmeans(x, 65, seed=1).error.item() < 1e-3


def test_weights_are_of_square_distances():
    """Vectors of weight 2 count as if they were there twice, in means and in what an empty entry moves to."""
    x = normal(2, 500, 4).cumsum(1)
    weights = torch.ones(2, 500)
    weights[:, 100:300] = 2.0
    twice = torch.cat((x, x[:, 100:300]), 1)
    found = kmeans(x, 16, 1, weights=weights)
    codes = nearest(x, _start(x, 16, 0))[0]
    for problem in range(2):
        means = torch.stack([twice[problem][torch.cat((codes[problem], codes[problem, 100:300])) == entry].mean(0)
                             for entry in range(16)])
        distance = torch.cdist(found.entries[problem], means).amin(1)
        assert distance.max() < 1e-3 * means.norm(), distance
    assert torch.equal(kmeans(x, 16, 5, weights=torch.ones(2, 500)).entries, kmeans(x, 16, 5).entries)


def test_steps_are_told():
    told = []
    kmeans(normal(1, 300, 2), 16, 5, on_step=lambda: told.append(1))
    assert len(told) == 5


# ---- channels

@pytest.mark.parametrize("vec_size", (2, 4, 8))
def test_groups_have_even_products(vec_size):
    importance = normal(3, 64).exp() ** 3
    order = balanced_order(importance, vec_size)
    assert (order.sort(1).values == torch.arange(64)).all()
    spread = importance.log().gather(1, order).unflatten(1, (-1, vec_size)).sum(-1).std(1)
    plain = importance.log().unflatten(1, (-1, vec_size)).sum(-1).std(1)
    assert (spread < plain / 4).all()


def test_weights_are_mean_squares_of_pairs():
    q = normal(1, 500, DIM) * torch.arange(1, DIM + 1)
    weight = channel_weights(q.mT @ q / 500)[0]
    assert torch.equal(weight[: DIM // 2], weight[DIM // 2 :])
    squares = q[0].square().mean(0)
    expected = (squares[: DIM // 2] + squares[DIM // 2 :]) / squares.mean() / 2 + LEAST_WEIGHT
    assert torch.allclose(weight[: DIM // 2], expected, rtol=1e-4)
    assert (channel_weights(torch.zeros(1, DIM, DIM)) > 0).all()


# ---- layers

def sample(context: int = 8192, drift: float = 0.0, turns: bool = True) -> Sample:
    """Pages of a rotated vector with noise, as keys are; values of tokens with norms of their own."""
    inv_freq = 10_000.0 ** -(torch.arange(DIM // 2) / (DIM // 2)) if turns else torch.zeros(DIM // 2)
    first = torch.arange(PAGES) * 128 + 32
    still = normal(HEADS, DIM)[None, :, None] * 4 + normal(PAGES, HEADS, 128, DIM, seed=2)
    positions = first[:, None] + torch.arange(128)
    keys = turned(still, inv_freq, positions[:, None]) + drift * normal(PAGES, HEADS, 1, DIM, seed=7)
    values = normal(PAGES, HEADS, 128, DIM, seed=3) * (0.1 + normal(PAGES, HEADS, 128, 1, seed=4).abs())
    q = normal(HEADS, 400, DIM, seed=5) * (normal(HEADS, 1, DIM, seed=6).abs() + 0.1)
    layer = LayerSample(keys.half(), values.half(), q.mT @ q / 400, DIM**-0.5, inv_freq)
    return Sample([layer], first, context)


def error_far_away(recipe: Recipe, offset: int) -> float:
    """Relative square error of keys turned on by an offset, through learned codebooks."""
    given = sample()
    learned = learn_layers(given, recipe)[0]
    layer = given.layers[0]
    keys = turned(layer.keys.float(), layer.inv_freq, torch.tensor(offset))
    mean = keys.mean(2, keepdim=True) if recipe.has_page_mean else 0
    stored = ((keys - mean) * learned.k_weights[:, None]).gather(3, learned.k_order[None, :, None].expand_as(keys))
    split = stored.unflatten(3, (-1, recipe.k_vec_size)).permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)
    distance = nearest(split, learned.k_entries.flatten(0, 1).float())[1]
    return (distance.sum() / stored.square().sum()).item()


def test_fields_have_the_shapes_of_a_file():
    found = learn_layers(sample(), Recipe(4, 2, iterations=2))[0]
    assert found.k_entries.shape == (HEADS, DIM // 4, 256, 4) and found.k_entries.dtype == torch.float16
    assert found.v_entries.shape == (HEADS, DIM // 2, 256, 2)
    assert found.k_order.shape == found.k_weights.shape == (HEADS, DIM)
    assert 0 < found.logit_error and 0 < found.value_error < 0.2
    only_v = learn_layers(sample(), Recipe(None, 4, iterations=2))[0]
    assert only_v.k_entries is only_v.k_order is only_v.logit_error is None and only_v.v_entries is not None


def test_random_positions_serve_positions_that_the_text_did_not_have():
    with_, without = (Recipe(4, None, has_page_mean=False, has_random_positions=has) for has in (True, False))
    assert error_far_away(without, 0) < error_far_away(with_, 0)
    assert error_far_away(with_, 5000) < 0.8 * error_far_away(without, 5000)


def test_page_means_take_a_drift_off():
    drifting = sample(drift=3.0)
    with_, without = (learn_layers(drifting, Recipe(4, None, has_page_mean=has))[0] for has in (True, False))
    assert with_.logit_error < without.logit_error / 2


def test_weights_and_even_groups_lower_the_logits_error():
    whole = learn_layers(sample(), Recipe(4, None))[0].logit_error
    for left_out in ("is_weighted", "is_balanced"):
        assert whole < learn_layers(sample(), Recipe(4, None, **{left_out: False}))[0].logit_error, left_out


def test_keys_before_rope_are_one_heap_wherever_they_stand():
    """Without random positions; the rotated constant costs nothing once keys are turned back."""
    pre, post = (learn_layers(sample(), Recipe(4, None, rope=rope))[0].logit_error for rope in ("pre", "post"))
    assert pre < post / 2


def test_norms_serve_a_loud_token():
    loud = sample()
    loud.layers[0].values[8, 0, 5] *= 100  # on the page that is held out
    with_, without = (learn_layers(loud, Recipe(None, 4, v_norm=has))[0].value_error for has in (True, False))
    assert with_ < 0.2 < 0.5 < without


def test_seeds_and_offsets():
    given = sample()
    assert random_offsets(given, Recipe(4, 4), 0).max() <= 8192 - given.first.max() - 128
    stays, *turns = random_offsets(given, Recipe(4, 4), 0)
    assert not stays.any() and len(turns) == 2 and len(set(torch.cat(turns).tolist())) == 2 * PAGES
    assert not torch.equal(random_offsets(given, Recipe(4, 4), 0), random_offsets(given, Recipe(4, 4, seed=1), 0))
    for none in (Recipe(4, 4, rope="pre"), Recipe(4, 4, has_random_positions=False)):
        assert not random_offsets(given, none, 0).any()
    assert not random_offsets(sample(context=PAGES * 128 + 32), Recipe(4, 4), 0).any()
    first, again, other = (learn_layers(given, Recipe(4, 4, iterations=2, seed=s))[0] for s in (0, 0, 1))
    assert torch.equal(first.k_entries, again.k_entries) and not torch.equal(first.v_entries, other.v_entries)


@pytest.mark.parametrize("rope", ("post", "pre"))
def test_layers_learned_at_once_are_those_learned_in_turn(rope):
    """As many layers at once as torch has threads; the threads are the caller's again, also after an error."""
    given = sample()
    given.layers += sample(drift=1.0).layers + sample(drift=2.0).layers
    told, before = [], torch.get_num_threads()
    recipe = Recipe(4, 4, rope=rope, iterations=2)
    try:
        torch.set_num_threads(1)
        in_turn = learn_layers(given, recipe)
        torch.set_num_threads(3)
        at_once = learn_layers(given, recipe, on_step=lambda: told.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 3 and told == [1] * 3 * recipe.steps
        given.layers[1].q_moment = None
        with pytest.raises(AttributeError):
            learn_layers(given, recipe)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for one, other in zip(in_turn, at_once, strict=True):
        assert torch.equal(one.k_entries, other.k_entries) and torch.equal(one.v_entries, other.v_entries)
        assert (one.logit_error, one.value_error) == (other.logit_error, other.value_error)
    assert not torch.equal(at_once[0].k_entries, at_once[1].k_entries)


def test_held_out_pages_teach_nothing():
    """Whatever stands on the ninth page changes the errors alone."""
    given, changed = sample(), sample()
    changed.layers[0].values[8] *= normal(128, 1, seed=9).exp()
    changed.layers[0].keys[8] += normal(128, DIM, seed=9).half()
    one, other = (learn_layers(x, Recipe(4, 4, iterations=2))[0] for x in (given, changed))
    assert torch.equal(one.k_entries, other.k_entries) and torch.equal(one.v_entries, other.v_entries)
    assert one.logit_error != other.logit_error and one.value_error != other.value_error


def test_values_beyond_fp16_are_clamped_in_entries():
    huge = sample()
    huge.layers[0].q_moment *= torch.tensor([1e-9] * (DIM - 1) + [1e9]).sqrt().outer(
        torch.tensor([1e-9] * (DIM - 1) + [1e9]).sqrt())
    huge.layers[0].keys[..., -1] *= 2000
    assert learn_layers(huge, Recipe(4, None, iterations=2))[0].k_entries.isfinite().all()


def test_constant_keys_leave_entries_unused_and_say_so():
    still = sample(turns=False)
    still.layers[0].keys[:] = 1.0
    found = learn_layers(still, Recipe(4, None, iterations=2, has_page_mean=False))[0]
    assert found.unused == HEADS * (DIM // 4) * 255
    assert found.logit_error < 1e-6


def test_bad_errors_are_warned_of():
    loud = sample()
    loud.layers[0].q_moment *= 1e4
    found = learn_layers(loud, Recipe(8, 8, iterations=2))[0]
    assert [w.split(":")[0] for w in found.warnings] == ["layer 0"] * len(found.warnings) and len(found.warnings) == 2
    assert "above 0.5" in found.warnings[0] and "above 0.15" in found.warnings[1]


def test_unknown_rope_is_refused():
    with pytest.raises(ValueError, match="rope: got 'during', supported: post, pre"):
        Recipe(4, 4, rope="during")
