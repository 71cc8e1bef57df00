"""Policies: shares, cumulative thresholds and the paper's Algorithm 1, each against plain loops."""

import pytest
import torch

from lowbit_attn.levels.policy import HIGH, LOW, PRUNED, Cumulative, Paper, Shares


def scores(n: int = 128) -> torch.Tensor:
    """Means of two rows and three heads, with ties."""
    return torch.rand(2, 3, n).pow(4).mul(64).round() / 64


@pytest.mark.parametrize("policy, n, counts", [
    (Shares(), 128, (32, 96, 0)), (Shares(0.25, 0.75), 128, (32, 96, 0)), (Shares(0.25, 0.35), 128, (32, 45, 51)),
    (Shares(0.3), 100, (30, 70, 0)), (Shares(0.01), 128, (1, 127, 0)), (Shares(1.0), 128, (128, 0, 0)),
    (Shares(0.0), 128, (0, 128, 0)), (Shares(0, 0.5), 7, (0, 4, 3))])
def test_shares_count_whole_tokens_by_rank(policy, n, counts):
    mean = scores(n)
    found = policy.classes(mean)
    assert policy.prunes == (counts[2] > 0) and found.dtype == torch.uint8
    for x, row in zip(mean.flatten(0, 1), found.flatten(0, 1).tolist()):
        ranked = sorted(range(n), key=lambda i: (-x[i], i))
        assert [row[i] for i in ranked] == [HIGH] * counts[0] + [LOW] * counts[1] + [PRUNED] * counts[2]


@pytest.mark.parametrize("T_l, T_h", [(0.0, 0.5), (0.1, 0.5), (0.0, 1.0), (0.3, 0.3), (0.0, 0.0), (1.0, 1.0)])
def test_cumulative_thresholds_follow_a_running_sum(T_l, T_h):
    mean, policy = scores(), Cumulative(T_l, T_h)
    found = policy.classes(mean)
    for x, row in zip(mean.flatten(0, 1).double(), found.flatten(0, 1).tolist()):
        total, running = x.sum(), 0.0
        for i in sorted(range(128), key=lambda i: (x[i], -i)):
            running += x[i]
            assert row[i] == (PRUNED if running < T_l * total else LOW if running < T_h * total else HIGH)
    assert policy.prunes == (T_l > 0)


def test_no_thresholds_are_one_level():
    assert (Cumulative(0, 0).classes(scores()) == HIGH).all() and (Shares(1.0).classes(scores()) == HIGH).all()


def test_cumulative_does_not_depend_on_the_order_of_sums():
    mean = torch.rand(128)
    order = torch.randperm(128)
    assert torch.equal(Cumulative(0.2, 0.6).classes(mean[order]), Cumulative(0.2, 0.6).classes(mean)[order])


def test_unseen_tokens_are_high():
    mean = torch.rand(128)
    mean[[3, 100]] = torch.inf
    for policy in (Shares(0.1, 0.1), Cumulative(0.2, 0.9)):
        assert (policy.classes(mean)[[3, 100]] == HIGH).all()
    assert torch.equal(Cumulative(0.2, 0.9).classes(mean)[4:100], Cumulative(0.2, 0.9).classes(
        torch.where(mean.isinf(), 0.0, mean))[4:100])


@pytest.mark.parametrize("make, words", [
    (lambda: Shares(1.2), "high: got 1.2"), (lambda: Shares(0.5, 0.6), "low: got 0.6 beside high = 0.5"),
    (lambda: Shares("x"), "high: got 'x'"), (lambda: Cumulative(0.6, 0.5), "T_l: got 0.6, supported: at most T_h"),
    (lambda: Cumulative(-1, 0.5), "T_l: got -1"), (lambda: Paper(2, 1), "T_l, T_h: got 2, 1")])
def test_other_thresholds_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_algorithm_1_line_by_line():
    paper = Paper(0.1, 0.5)
    #                  0     1    2     3    4    5     6
    score = torch.tensor([0.9, 0.6, 0.05, 0.3, 0.2, 0.05, 0.0])
    classes = torch.tensor([HIGH, HIGH, HIGH, LOW, LOW, LOW, PRUNED], dtype=torch.uint8)
    for candidate, value, want in (
        (6, 0.7, [HIGH, HIGH, PRUNED, LOW, LOW, LOW, HIGH]),  # lines 6, 7, 11: the least of high is below T_l
        (6, 0.3, [HIGH, HIGH, HIGH, LOW, LOW, PRUNED, LOW]),  # lines 14 to 17
        (6, 0.01, [HIGH, HIGH, HIGH, LOW, LOW, LOW, PRUNED]),  # neither: dropped, and no victim
    ):
        now = score.clone()
        now[candidate] = value
        assert paper.step(classes, now, candidate).tolist() == want
    now = score.clone()
    now[6], now[2] = 0.7, 0.2
    assert paper.step(classes, now, 6).tolist() == [HIGH, HIGH, LOW, LOW, LOW, LOW, HIGH]  # lines 8, 9
    now[2] = 0.55
    assert paper.step(classes, now, 6).tolist() == [HIGH, HIGH, HIGH, LOW, LOW, LOW, HIGH]  # the victim stays
    assert classes[6] == PRUNED and paper.prunes and not Paper(0, 1).prunes


def test_algorithm_1_settles_like_thresholds_once_every_token_was_a_victim():
    """With fixed scores, steps leave high what is at least T_h and drop what is below T_l."""
    paper, score = Paper(0.2, 0.6), torch.rand(40)
    classes = torch.full((40,), PRUNED, dtype=torch.uint8)
    for token in range(40):
        classes = paper.step(classes, score, token)
    want = torch.where(score >= 0.6, HIGH, torch.where(score >= 0.2, LOW, PRUNED)).to(torch.uint8)
    assert torch.equal(classes, want)
