"""Codecs with one scale a token, against loops, bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import kv_codec
from tests.codecs import oracles
from tests.codecs.inputs import block_codes, block_numbers, blocks, decode, encode, numbers, steps

INTEGERS = ["int8", "int4", "int2"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("shape", [(2, 3, 5, 64), (1, 1, 16, 12), (40, 4), (2, 7, 128)])
def test_integers(name, shape):
    codec, x = kv_codec(name).k, numbers(shape)
    stored = encode(codec, x)
    assert stored.scale.shape == (*shape[:-1], 1) and stored.scale.dtype == jnp.float16
    tokens, codes = x.reshape(-1, shape[-1]), block_codes(codec, stored).reshape(-1, shape[-1])
    same = 0
    for token, code, scale in zip(tokens, codes, np.asarray(stored.scale).ravel(), strict=True):
        scales = oracles.candidates(token, name)
        errors = [oracles.squared_error(token, candidate, name) for candidate in scales]
        assert scale in scales
        # Sums of float32 may settle a tie the other way.
        assert oracles.squared_error(token, scale, name) <= min(errors) * (1 + 1e-5)
        same += scale == scales[int(np.argmin(errors))]
        np.testing.assert_array_equal(code, oracles.int_codes(token, scale, name))
    assert same >= 0.9 * len(tokens)
    expected = [oracles.level(code, name) for code in codes.ravel().tolist()]
    expected = np.array(expected).reshape(shape) * np.asarray(stored.scale).astype(np.float64)
    np.testing.assert_array_equal(decode(codec, stored), expected.astype(np.float32))


@pytest.mark.parametrize("name", INTEGERS)
def test_the_grid_pays(name):
    """The fewer the bits, the more it gains over scaling to the largest number."""
    codec, x = kv_codec(name).k, np.random.default_rng(0).standard_t(4, (300, 64))
    x = x.astype(np.float32)
    stored = encode(codec, x)
    error = ((decode(codec, stored) - x) ** 2).sum()
    largest = sum(
        oracles.squared_error(token, oracles.candidates(token, name)[0], name) for token in x
    )
    assert error < largest * {"int8": 0.995, "int4": 0.9, "int2": 0.5}[name]


def test_fp8():
    codec, x = kv_codec("fp8").k, numbers((3, 10, 64))
    stored = encode(codec, x)
    codes = np.asarray(stored.codes).reshape(-1, 64)
    for token, code, scale in zip(
        x.reshape(-1, 64), codes, np.asarray(stored.scale).ravel(), strict=True
    ):
        expected, expected_scale = oracles.fp8(token)
        assert scale == expected_scale
        np.testing.assert_array_equal(code, expected)
    error, step = abs(decode(codec, stored) - x), steps(stored.scale)[..., 0]
    assert (error <= np.maximum(abs(x) / 16, step * 2.0**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("largest", [500, -1e3, 1e4, 465, 2.0**-12, 448 * 65504])
def test_fp8_is_cut_before_the_cast(largest):
    """Without a cut, a scale that float16 rounded down would make NaN of the largest number."""
    x = np.full((1, 8), largest / 3, np.float32)
    x[0, 5] = largest
    codec = kv_codec("fp8").k
    np.testing.assert_allclose(decode(codec, encode(codec, x)), x, rtol=1 / 15)


@pytest.mark.parametrize("largest", [448 * 1.45 * 2.0**-24, 1e30])
def test_fp8_is_cut_where_float16_cannot_hold_the_scale(largest):
    codec = kv_codec("fp8").k
    stored = encode(codec, np.array([[largest, 0, 0, -largest]], np.float32))
    top = 448 * float(stored.scale.item())
    assert top < largest
    np.testing.assert_array_equal(decode(codec, stored)[0], [top, 0, 0, -top])


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dim", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 128))])
def test_at_most_half_a_step(name, dim):
    codec, x = kv_codec(name).k, numbers((500, dim), seed=1)
    stored = encode(codec, x)
    error, scale = abs(block_numbers(codec, stored) - blocks(codec, x)), steps(stored.scale)
    inside = abs(blocks(codec, x)) <= scale * oracles.LEVELS[name][-1]
    assert inside.mean() > 0.8
    assert (error <= scale / 2 * (1 + 1e-5))[inside].all()
    outside = abs(blocks(codec, x)) - scale * oracles.LEVELS[name][-1]
    np.testing.assert_allclose(error[~inside], outside[~inside], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 2.0**-24, 2.0**12])
def test_levels_themselves_are_stored_exactly(name, scale):
    levels = oracles.LEVELS[name]
    dim = -(-len(levels) // 4) * 4
    x = np.resize(levels, dim)[None].astype(np.float32) * np.float32(scale)
    codec = kv_codec(name).k
    stored = encode(codec, x)
    assert stored.scale.item() == scale
    np.testing.assert_array_equal(decode(codec, stored), x)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_halves_go_to_the_even_level(name):
    top = int(oracles.LEVELS[name][-1])
    x = np.array([[top, -top, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    codec = kv_codec(name).k
    stored = encode(codec, np.concatenate([x, np.tile(x[:, :2], 28)], 1))
    assert stored.scale.item() == 1
    np.testing.assert_array_equal(decode(codec, stored)[0, :8], [top, -top, 0, 2, 2, 0, -2, -2])
