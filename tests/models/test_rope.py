"""Frequencies against transformers', the rotation against complex numbers."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.fields import Fields
from kvjax.models.rope import RopeConfig, inverse_frequencies, rotate, rotation
from tests.models.goldens import FOLDER

CASES = json.loads((FOLDER / "rope.json").read_text())
YARN = RopeConfig(1e4, "yarn", factor=8.0, original_context=64)


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["config"]["rope_scaling"])[:40])
def test_frequencies_equal_those_of_transformers(case):
    rope = RopeConfig.from_hf(Fields(case["config"]), theta=1e4)
    frequencies, factor = inverse_frequencies(rope, case["config"]["head_dim"])
    expected = np.asarray(case["inverse_frequencies"], np.float32)
    assert frequencies.dtype == np.float32
    assert factor == case["attention_factor"]
    # One unit in the last place: PyTorch's own power is not always the nearest float.
    assert np.all(np.abs(frequencies - expected) <= np.spacing(expected))


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_every_kind_is_among_the_cases(kind):
    assert any(RopeConfig.from_hf(Fields(c["config"]), 1e4).kind == kind for c in CASES)


def test_rotation_is_a_complex_product_of_the_two_halves():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 4, 16)).astype(np.float32)
    positions = np.asarray([[0, 1, 2], [7, 500, 90_000]], np.int32)
    rope = RopeConfig(1e4)
    frequencies, _ = inverse_frequencies(rope, 16)
    turn = np.exp(1j * (positions[..., None].astype(np.float32) * frequencies).astype(np.float64))
    pairs = (x[..., :8] + 1j * x[..., 8:]) * turn[:, :, None]
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    actual = rotate(jnp.asarray(x), *rotation(jnp.asarray(positions), rope, 16))
    np.testing.assert_allclose(actual, expected, atol=2e-6)


def test_scores_depend_on_the_distance_alone():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 2, 1, 32)), jnp.float32)

    def score(first: int, second: int) -> float:
        positions = jnp.asarray([[first, second]], jnp.int32)
        turned = rotate(x, *rotation(positions, YARN, 32))
        return float(jnp.vdot(turned[0, 0, 0], turned[0, 1, 0]))

    assert score(3, 10) == pytest.approx(score(103, 110), rel=1e-4)
    assert score(3, 10) != pytest.approx(score(3, 11), rel=1e-4)


def test_the_attention_factor_scales_the_rotated_vector():
    x = jnp.ones((1, 1, 1, 32), jnp.float32)
    turned = rotate(x, *rotation(jnp.zeros((1, 1), jnp.int32), YARN, 32))
    np.testing.assert_allclose(turned, np.full(x.shape, 0.1 * math.log(8) + 1), rtol=1e-6)


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 2, 2, 16)), jnp.bfloat16)
    angles = rotation(jnp.asarray([[1000, 1001]], jnp.int32), RopeConfig(1e4), 16)
    turned = rotate(x, *angles)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        turned.astype(jnp.float32),
        rotate(x.astype(jnp.float32), *angles).astype(jnp.bfloat16).astype(jnp.float32),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(c["config"]["rope_scaling"])[:40])
def test_keys_that_were_rotated_can_be_moved(case):
    """What lets a chunk of text be compacted by itself and then stand elsewhere: to turn its keys
    by a distance is to compute them there."""
    rope, dim = RopeConfig.from_hf(Fields(case["config"]), theta=1e4), case["config"]["head_dim"]
    keys = jnp.asarray(np.random.default_rng(2).standard_normal((1, 5, 2, dim)), jnp.float32)
    positions = jnp.asarray([[0, 1, 5, 40, 90]], jnp.int32)
    _, factor = inverse_frequencies(rope, dim)
    for distance in (1, 37, 4000):
        by = rotation(jnp.full((1, 5), distance, jnp.int32), rope, dim)
        moved = rotate(rotate(keys, *rotation(positions, rope, dim)), *(x / factor for x in by))
        there = rotate(keys, *rotation(positions + distance, rope, dim))
        np.testing.assert_allclose(moved, there, atol=2e-3)
        assert np.abs(moved - rotate(keys, *rotation(positions, rope, dim))).max() > 0.1
