"""Sampling against the filtered distribution in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.decoding.sampling import Sampling, sample
from tests.decoding import small
from tests.decoding.small import prompts, tokens

DRAWS = 6000
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
# In no order; tokens 1 and 4 tie, as do 6 and 7.
LOGITS = np.array([0.3, 2.0, -1.0, 1.2, 2.0, -np.inf, 0.5, 0.5, -4.0, 1.1], np.float32)


def distribution(logits, temperature, top_k, top_p, min_p) -> np.ndarray:
    """One token at a time: top-k, of those top-p, of those min-p; ties go to the lower token."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    mass = np.exp((logits - logits.max()) / temperature)
    kept = [token for token in order[: top_k or None] if mass[token] > 0]
    mass = mass / mass[kept].sum()
    chosen, before = [], 0.0
    for rank, token in enumerate(kept):
        if rank == 0 or (before < top_p and mass[token] >= min_p * mass[kept[0]]):
            chosen.append(token)
        before += mass[token]
    probabilities = np.zeros(len(logits))
    probabilities[chosen] = mass[chosen] / mass[chosen].sum()
    return probabilities


# Many small programs, each run once.
quick_sample = jax.jit(sample, compiler_options={"xla_backend_optimization_level": 0})


def draw(logits=LOGITS, seed=0, count=DRAWS, **settings) -> np.ndarray:
    """Samples at positions 0, 1, .. of one row."""
    sampling = Sampling.create(count, seed=seed, **(OFF | settings))
    many = jnp.broadcast_to(jnp.asarray(logits)[None], (count, len(logits)))
    return np.asarray(quick_sample(many, jnp.arange(count, dtype=jnp.int32), sampling))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, 9),
        ({"temperature": 0.5}, 9),
        ({"temperature": 3.0}, 9),
        ({"top_k": 1}, 1),
        ({"top_k": 2}, 2),
        ({"top_k": 5}, 5),
        ({"top_k": 6}, 6),  # cuts through a tie
        ({"top_k": 1000}, 9),
        ({"top_p": 1e-6}, 1),
        ({"top_p": 0.0}, 1),
        ({"top_p": 0.4}, 2),
        ({"top_p": 0.85}, 5),
        ({"min_p": 0.3}, 4),
        ({"min_p": 1.0}, 2),
        ({"top_k": 4, "top_p": 0.68}, 2),  # of what top-k left: of all it would keep three
        ({"top_k": 8, "top_p": 0.9, "min_p": 0.25, "temperature": 0.8}, 4),
        ({"top_p": 0.9, "min_p": 0.46, "temperature": 2.0}, 6),
    ],
    ids=str,
)
def test_frequencies(settings, kept):
    expected = distribution(LOGITS, **(OFF | settings))
    assert (expected > 0).sum() == kept
    counts = np.bincount(draw(**settings), minlength=len(LOGITS))
    assert not counts[expected == 0].any()
    seen = expected > 0
    wanted = DRAWS * expected[seen]
    assert (counts[seen] > 0)[wanted > 20].all()
    chi_square = ((counts[seen] - wanted) ** 2 / wanted).sum()
    freedom = kept - 1
    assert chi_square <= freedom + 4 * np.sqrt(2 * freedom)


def test_the_filters_need_not_be_used_by_every_row():
    """Rows with a filter beside rows for which it is switched off."""
    count = 2000
    on = Sampling.create(count, temperature=1.0, top_k=2, top_p=0.9, min_p=0.5, seed=0)
    off = np.arange(count) % 2 == 1
    mixed = dataclasses.replace(
        on,
        top_k=jnp.where(off, 0, on.top_k),
        top_p=jnp.where(off, 1.0, on.top_p),
        min_p=jnp.where(off, 0.0, on.min_p),
    )
    many = jnp.broadcast_to(jnp.asarray(LOGITS)[None], (count, len(LOGITS)))
    drawn = np.asarray(quick_sample(many, jnp.arange(count, dtype=jnp.int32), mixed))
    assert set(drawn[~off]) == {1, 4}
    assert len(set(drawn[off])) >= 8


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [1e-12, 1e-3])
def test_cold_is_greedy(settings, temperature):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((64, 50)), jnp.float32)
    sampling = Sampling.create(64, seed=0, **(OFF | settings | {"temperature": temperature}))
    position = jnp.arange(64, dtype=jnp.int32)
    drawn = quick_sample(logits, position, sampling)
    # At 1e-3 two logits as close as this may still swap.
    close = jnp.diff(jnp.sort(logits, -1)[:, -2:], axis=-1)[:, 0] < 0.02
    best = sample(logits, position, None)
    assert ((drawn == best) | close).all() and close.sum() < 5
    np.testing.assert_array_equal(best, logits.argmax(-1))


def test_zero_is_greedy_and_needs_no_settings():
    assert Sampling.create(3, seed=1, **(OFF | {"temperature": 0.0})) is None


def test_filters_that_are_off_cost_nothing():
    sampling = Sampling.create(3, seed=1, **OFF)
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (None, None, None)


@pytest.mark.parametrize("top_k", [2**31 - 1, 2**31, 2**32 + 1])
def test_any_top_k_that_the_options_allow(top_k):
    np.testing.assert_array_equal(draw(top_k=top_k, count=50), draw(top_k=1000, count=50))


def test_samples_depend_on_seed_and_position_alone():
    one = draw(count=300)
    np.testing.assert_array_equal(draw(count=300), one)
    assert (draw(count=300, seed=1) != one).mean() > 0.5
    sampling = Sampling.create(2, seed=0, **OFF)
    other = jnp.zeros_like(jnp.asarray(LOGITS))
    for position in (0, 7, 299):
        row = jnp.stack([other, jnp.asarray(LOGITS)])
        drawn = quick_sample(row, jnp.array([3, position], jnp.int32), sampling)
        assert int(drawn[1]) == one[position]


def test_neighbouring_positions_are_independent():
    drawn = draw(np.zeros(2, np.float32), count=4000)
    for lag in (1, 2, 3):
        assert abs((drawn[lag:] == drawn[:-lag]).mean() - 0.5) < 0.04


def test_every_token_has_the_key_of_its_position():
    """The first token's is that of the prompt's end; no two tokens share one."""
    settings = OFF | small.SAMPLED
    one = Sampling.create(1, seed=3, **settings)
    flat = jnp.zeros((1, 96), jnp.float32)
    for prompt, row in zip(
        prompts(), tokens(prompts(), small.mute(), seed=3, **small.SAMPLED), strict=True
    ):
        positions = range(len(prompt), len(prompt) + small.NEW)
        expected = [int(quick_sample(flat, jnp.full(1, p, jnp.int32), one)[0]) for p in positions]
        assert list(row) == expected


def test_seeds_through_generate():
    usual = small.usual(sampled=True)
    assert tokens(prompts(), **small.SAMPLED) == list(usual)
    others = tokens(prompts(), seed=2**32 - 1, **small.SAMPLED)
    assert not set(others) & set(usual)
    cold = tokens(prompts(), **(small.SAMPLED | {"temperature": 1e-9}))
    assert cold == list(small.usual())


def test_the_models_own_defaults():
    own = dataclasses.replace(
        small.lm().defaults, temperature=0.9, top_k=40, top_p=0.95, stop_ids=()
    )
    lm = dataclasses.replace(small.lm(), defaults=own)
    sampled = list(small.usual(sampled=True))
    assert tokens(prompts(), lm, temperature=None) == sampled
    assert tokens(prompts(), lm) == list(small.usual()), "greedy unless told otherwise"
    assert tokens(prompts(), temperature=None) == list(small.usual()), "a model that says nothing"
    # What the caller says wins, one setting at a time.
    said = tokens(prompts(), lm, temperature=None, top_k=40, top_p=0.1)
    assert said == tokens(prompts(), lm, temperature=0.9, top_p=0.1) != sampled
