"""Which tokens of a segment stay, against a plain loop in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import UsageError
from kvjax.thoughts import Retention, retention
from pallas_kernels import cluster_centers
from tests.thoughts import kept

SCHEDULE = (64, 32, 16, 8, 4)
FEW = (16, 8, 4, 2)
ROWS, HEADS, TOKENS, SHORT, DIM = 2, 3, 128, 32, 8
MARGIN = 2e-4
"""Decisions closer than this are not float32's to take."""

survivals = jax.jit(retention.survivals, static_argnums=0)


def survived(how: Retention, keys, scores=None, pos=None, seed=0, layer=0) -> np.ndarray:
    """Demotions that each token survives, [B, H, T]."""
    if pos is None:
        pos = np.broadcast_to(np.arange(keys.shape[2], dtype=np.int32), keys.shape[::2][:2])
    numbers = (jnp.int32(x) for x in (seed, layer))
    scores = None if scores is None else jnp.asarray(scores, jnp.float32)
    keys = jnp.asarray(keys, jnp.float32)
    return np.asarray(survivals(how, keys, scores, jnp.asarray(pos), *numbers))


def random_keys(seed: int, tokens: int = TOKENS) -> np.ndarray:
    """Float32 keys that drift, as those of a text do."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((ROWS, HEADS, tokens, DIM)) * 0.4
    return (steps.cumsum(2) + rng.standard_normal(steps.shape)).astype(np.float32)


def check(found: np.ndarray, schedule, tokens: int) -> None:
    """Every level holds as many as the schedule says, all of them tokens of the level before.

    What a token survives is one number, so a level's tokens are among the last one's by
    construction; that the numbers are exact is what makes it true of the counts.
    """
    for level, count in enumerate(schedule, 1):
        assert ((found >= level).sum(-1) == min(count, tokens)).all()
    assert found.max() <= len(schedule)


def compare(found: np.ndarray, keys: np.ndarray, schedule, least: float = MARGIN) -> int:
    """Compare heads whose every decision is clear; returns how many there were."""
    clear = 0
    for row, head in np.ndindex(found.shape[:2]):
        expected, margin = kept.kmeans_levels(keys[row, head], schedule)
        if margin > least:
            assert found[row, head].tolist() == expected.tolist()
            clear += 1
    return clear


def test_kmeans_of_each_head():
    keys = random_keys(1)
    found = survived(Retention(), keys)
    check(found, SCHEDULE, TOKENS)
    assert compare(found, keys, SCHEDULE) > 2, "too few draws with clear decisions"


def short_segments_by_kmeans():
    """Shorter ones, so that it is quick; used by the mutants below as well."""
    clear = 0
    for seed in range(4):
        keys = random_keys(seed, SHORT)
        found = survived(Retention(FEW), keys)
        check(found, FEW, SHORT)
        clear += compare(found, keys, FEW)
    assert clear > 2 * ROWS * HEADS


def test_kmeans_of_short_segments():
    short_segments_by_kmeans()


def test_kmeans_of_all_heads_together():
    clear = 0
    for seed in range(4):
        keys = random_keys(seed, SHORT)
        found = survived(Retention(FEW, shared=True), keys)
        check(found, FEW, SHORT)
        assert (found == found[:, :1]).all()
        joined = keys.swapaxes(1, 2).reshape(ROWS, 1, SHORT, HEADS * DIM)
        clear += compare(found[:, :1], joined, FEW)
    assert clear > ROWS


def test_rows_and_heads_do_not_feel_each_other():
    """What others hold, NaN too, leaves a head as it is."""
    keys, how = random_keys(1, SHORT), Retention(FEW)
    found = survived(how, keys)
    for other in (np.nan, 7.0):
        changed = keys.copy()
        changed[0] = other
        changed[1, 2] = other
        assert (survived(how, changed)[1, :2] == found[1, :2]).all()
    swapped = survived(how, keys[::-1, ::-1])
    assert (swapped[::-1, ::-1] == found).all()


@pytest.mark.parametrize("count", [1, 5, 31])
def test_the_first_centers_are_spaced_evenly(count):
    """Without a round, clusters are around the tokens that they start from."""
    start = kept.spaced(SHORT, count)
    assert retention.evenly(SHORT, count).tolist() == start
    keys = jnp.asarray(random_keys(4, SHORT))
    near, apart = jax.jit(cluster_centers, static_argnums=2)(keys, jnp.asarray(start), 0)
    assert (near.sum(-1) == count).all() and near[..., jnp.asarray(start)].all()
    assert (np.asarray(apart)[..., start] == 0).all()


@pytest.mark.parametrize("rounds", [1, 10])
def test_rounds_of_lloyd(rounds):
    keys = random_keys(5, SHORT)
    found = survived(Retention(FEW, iterations=rounds), keys)
    clear = 0
    for row, head in np.ndindex(ROWS, HEADS):
        expected, margin = kept.kmeans_levels(keys[row, head], FEW, rounds)
        clear += margin > MARGIN
        assert margin <= MARGIN or found[row, head].tolist() == expected.tolist()
    assert clear > 3


@pytest.mark.parametrize("different", [1, 3, 6])
def test_equal_keys(different):
    """Fewer different keys than clusters: exact ties, and clusters that nobody is in."""
    rng = np.random.default_rng(different)
    choice = rng.integers(different, size=(ROWS, HEADS, SHORT))
    # Whole numbers, so that float32 and float64 see the same ties.
    points = rng.permutation(200)[: different * DIM].reshape(different, DIM) - 100
    keys = points[choice].astype(np.float32)
    found = survived(Retention(FEW), keys)
    check(found, FEW, SHORT)
    for row, head in np.ndindex(ROWS, HEADS):
        expected, _ = kept.kmeans_levels(keys[row, head], FEW)
        assert found[row, head].tolist() == expected.tolist()
    if different == 1:  # the earliest are as good as any
        assert (found == [sum(t < count for count in FEW) for t in range(SHORT)]).all()


def test_a_cluster_without_tokens_leaves_its_place_to_the_farthest():
    """All four start from equal keys, so that one of them gets all the tokens."""
    keys = np.zeros((ROWS, HEADS, SHORT, DIM), np.float32)
    for token, size in ((1, 40), (9, 50), (17, 60), (30, 20)):
        keys[:, :, token, token % DIM] = size
    assert not keys[:, :, kept.spaced(SHORT, 4)].any()
    found = survived(Retention((4,), iterations=0), keys)
    assert (found == np.isin(np.arange(SHORT), [0, 1, 9, 17])).all()


@pytest.mark.parametrize("shared", [False, True])
def test_strided(shared):
    found = survived(Retention(chooser="strided", shared=shared), random_keys(1))
    expected = kept.levels(
        TOKENS, SCHEDULE, lambda alive, count: [alive[i] for i in kept.spaced(len(alive), count)]
    )
    assert (found == expected).all()
    check(found, SCHEDULE, TOKENS)


@pytest.mark.parametrize("shared", [False, True])
def test_attention(shared):
    """The highest scores stay; of equal ones the earlier token."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 20, (ROWS, HEADS, TOKENS)).astype(np.float32)
    how = Retention(chooser="attention", shared=shared)
    found = survived(how, random_keys(1), scores)
    check(found, SCHEDULE, TOKENS)
    for row, head in np.ndindex(ROWS, HEADS):
        own = scores[row].mean(0) if shared else scores[row, head]
        order = sorted(range(TOKENS), key=lambda t: (-own[t], t))
        expected = [sum(order.index(t) < count for count in SCHEDULE) for t in range(TOKENS)]
        assert found[row, head].tolist() == expected


def test_random():
    how, keys = Retention(chooser="random"), random_keys(1)
    found = survived(how, keys)
    check(found, SCHEDULE, TOKENS)
    assert (survived(how, random_keys(2)) == found).all(), "keys have no part in it"
    assert (found[0] == found[1]).all(), "nor has the row's place"
    drawn = [found[0, 0], found[0, 1], survived(how, keys, seed=1)[0, 0]]
    drawn.append(survived(how, keys, layer=1)[0, 0])
    pos = np.arange(TOKENS, dtype=np.int32)[None] + np.array([[0], [128]], np.int32)
    drawn.append(survived(how, keys, pos=pos)[1, 0])
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn)
    together = survived(dataclasses.replace(how, shared=True), keys)
    assert (together == together[:, :1]).all()
    check(together, SCHEDULE, TOKENS)


def test_random_is_fair():
    """Each token survives the last demotion as often as any other."""
    how, keys = Retention((16,), chooser="random"), random_keys(1, SHORT)
    draws = np.concatenate([survived(how, keys, seed=seed)[0] for seed in range(200)])
    share = (draws == 1).mean(0)  # of 600 draws, at odds of one half
    assert abs(share - 0.5).max() < 5 * 0.5 / np.sqrt(len(draws))


@pytest.mark.parametrize("chooser", ["kmeans", "strided", "random"])
@pytest.mark.parametrize("schedule", [SCHEDULE, (40, 32, 31, 1), (12, 0), (0,)])
def test_segments_shorter_than_a_schedule_and_schedules_down_to_nothing(chooser, schedule):
    keys = random_keys(6, SHORT)
    how = Retention(schedule, chooser)
    found = survived(how, keys)
    check(found, schedule, SHORT)
    assert how.sizes(SHORT) == (SHORT, *(min(count, SHORT) for count in schedule))
    if chooser == "kmeans":
        assert compare(found, keys, schedule) > 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": ()}, "schedule must be numbers"),
        ({"schedule": (8, 8)}, "schedule must be .* got 8,8"),
        ({"schedule": (4, 8)}, "schedule"),
        ({"schedule": (4, -1)}, "schedule"),
        ({"schedule": tuple(range(65, 0, -1))}, "schedule"),
        ({"chooser": "best"}, "chooser must be .* got 'best'"),
        ({"at": "never"}, "at must be start or end"),
        ({"iterations": -1}, "iterations"),
        ({"observed": 0}, "observed"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Retention(**options)


def test_queries_are_asked_for_by_attention_alone():
    assert Retention().needs_queries == 0
    assert Retention(chooser="attention", observed=9).needs_queries == 9


def farthest_from_its_center(keys, start, iterations):
    near, apart = cluster_centers(keys, start, iterations)
    return near & False, apart


def no_rounds(keys, start, iterations):
    return cluster_centers(keys, start, 0)


def centers_from_the_front(keys, start, iterations):
    return cluster_centers(keys, jnp.arange(len(start), dtype=jnp.int32), iterations)


@pytest.mark.parametrize("mutant", [farthest_from_its_center, no_rounds, centers_from_the_front])
def test_a_mutant_is_caught(monkeypatch, mutant):
    monkeypatch.setattr(retention, "cluster_centers", mutant)
    survivals.clear_cache()
    with pytest.raises(AssertionError):
        short_segments_by_kmeans()
    survivals.clear_cache()
