"""How sure a share of right answers is, against scipy and against simulated samples."""

import numpy as np
import pytest
import scipy.stats

from kvjax.eval.intervals import effective_count, mcnemar, wilson


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (128, 256), (250, 256)])
def test_wilson_is_scipys(right, count):
    found = scipy.stats.binomtest(right, count).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson(right, count), (found.low, found.high), atol=1e-6)


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (3, 3), (10, 2), (0, 6)])
def test_mcnemar_is_a_fair_coin(lost, won):
    expected = scipy.stats.binomtest(lost, lost + won).pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(expected) == mcnemar(won, lost)


def test_one_sample_each_counts_as_it_is():
    assert effective_count([[True], [False], [True]]) == 3


def test_samples_that_are_all_alike_add_nothing():
    assert effective_count([[True] * 8] * 5 + [[False] * 8] * 15) == pytest.approx(20, rel=0.06)
    assert effective_count([[True] * 8] * 20) == 20 == effective_count([[False] * 8] * 20)


def test_it_is_the_share_of_the_variance():
    """Shares of 1, 1/2, 0, 1/2: a variance of 1/6 where one answer's is 1/4, of four problems."""
    answers = [[True, True], [True, False], [False, False], [False, True]]
    assert effective_count(answers) == pytest.approx(1 / 4 * 4 / (1 / 6))


def test_independent_samples_count_one_by_one():
    rng = np.random.default_rng(0)
    found = effective_count((rng.random((4000, 4)) < 0.3).tolist())
    assert found == pytest.approx(16_000, rel=0.1)


def test_it_is_the_variance_of_the_share():
    """Problems of different difficulty: the share's variance is that of so many answers."""
    rng = np.random.default_rng(1)
    hard = rng.beta(1, 2, (500, 40, 1))  # 500 runs over 40 problems
    runs = rng.random((500, 40, 8)) < hard
    variance = runs.mean((1, 2)).var(ddof=1)
    expected = (1 / 3) * (2 / 3) / variance
    counts = [effective_count(run.tolist()) for run in runs]
    assert np.mean(counts) == pytest.approx(expected, rel=0.15)
    assert 40 < np.mean(counts) < 320
