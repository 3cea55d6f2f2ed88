"""The papers' layouts against loops over their groups, bit for bit."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.codecs import kv_codec
from tests.codecs import oracles
from tests.codecs.inputs import (
    block_codes,
    block_numbers,
    blocks,
    decode,
    encode,
    numbers,
    steps,
    tensor_codec,
)

LAYOUTS = {
    "nvfp4": (16, oracles.e2m1),
    "ternary": (16, lambda x: oracles.ternary(x, "twn")),
    "ternary-absmax": (16, lambda x: oracles.ternary(x, "absmax")),
    "kivi4": (32, lambda x: oracles.asymmetric(x, 4)),
    "kivi2": (32, lambda x: oracles.asymmetric(x, 2)),
    "kivi2-g64": (64, lambda x: oracles.asymmetric(x, 2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(2, 1, 64, 64), (64, 192)])
def test_bit_for_bit(name, shape):
    group, oracle = LAYOUTS[name]
    x = numbers(shape)
    tokens, dim = shape[-2:]
    for tensor in "kv":
        codec = tensor_codec(f"{name}.{tensor}")
        stored = encode(codec, x)
        if tensor == "k":
            assert stored.scale.shape == (*shape[:-2], tokens // group, dim)
        else:
            assert stored.scale.shape == (*shape[:-2], tokens, dim // group)
        codes = block_codes(codec, stored)
        for at in np.ndindex(stored.scale.shape):
            *lead, n, m = at
            if tensor == "k":
                numbers_of_group = x[(*lead, slice(n * group, (n + 1) * group), m)]
            else:
                numbers_of_group = x[(*lead, n, slice(m * group, (m + 1) * group))]
            expected = oracle(numbers_of_group)
            np.testing.assert_array_equal(codes[at], expected[0])
            assert np.asarray(stored.scale)[at] == expected[1]
            if len(expected) == 3:
                assert np.asarray(stored.zero)[at] == expected[2]
        levels = np.array([oracles.level(code, codec.fmt) for code in codes.ravel().tolist()])
        plain = levels.reshape(codes.shape) * steps(stored.scale)
        if stored.zero is not None:
            plain += steps(stored.zero)
        np.testing.assert_allclose(block_numbers(codec, stored), plain, rtol=1e-6, atol=1e-6)


def test_fp4_rounds_halves_to_even_and_saturates():
    halves = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = np.array([*halves, *(-half for half in halves)], np.float32)
    codec = kv_codec("nvfp4").v
    stored = encode(codec, x[None])
    assert stored.scale.astype(jnp.float32).item() == 1
    even = [0, 1, 1, 2, 2, 4, 4, 6]
    np.testing.assert_array_equal(decode(codec, stored)[0], [*even, *(-level for level in even)])
    as_type = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(decode(codec, stored)[0], as_type)
    # 6.35 / 6 is rounded down to 1, and 6.35 saturates; 1e4 is beyond the largest scale.
    for largest, expected in ((6.35, 6), (1e4, 448 * 6)):
        stored = encode(codec, np.array([[largest, *[0] * 15]], np.float32))
        assert decode(codec, stored)[0, 0] == expected


def test_ternary_rules():
    """On normal numbers the default has the lower error, as its docstring says."""
    x = np.random.default_rng(0).standard_normal((4000, 16)).astype(np.float32)
    errors = {}
    for name in ("ternary", "ternary-absmax"):
        codec = kv_codec(name).v
        plain = decode(codec, encode(codec, x))
        errors[name] = np.linalg.norm(plain - x) / np.linalg.norm(x)
    assert errors["ternary"] == pytest.approx(0.42, abs=0.01)
    assert errors["ternary-absmax"] == pytest.approx(0.59, abs=0.01)


@pytest.mark.parametrize("tensor", "kv")
@pytest.mark.parametrize("name", ["kivi4", "kivi2", "kivi2-g64"])
def test_kivi_is_at_most_half_a_step_off(name, tensor):
    codec = tensor_codec(f"{name}.{tensor}")
    x = numbers((64, 64)) + np.float32(3)
    stored = encode(codec, x)
    error, scale = abs(block_numbers(codec, stored) - blocks(codec, x)), steps(stored.scale)
    rounding = (abs(steps(stored.zero)) + 2**codec.bits * scale) * 2.0**-11
    assert (error <= scale / 2 + rounding).all()
    assert error.max() > scale.min() / 4


@pytest.mark.parametrize("tensor", "kv")
def test_nvfp4_is_at_most_half_a_step_off(tensor):
    codec = tensor_codec(f"nvfp4.{tensor}")
    x = numbers((64, 64))
    stored = encode(codec, x)
    scale = steps(stored.scale)
    size = abs(blocks(codec, x)) / np.maximum(scale, 1e-30)
    half = np.where(size < 2, 0.25, np.where(size < 4, 0.5, 1.0))
    error = abs(block_numbers(codec, stored) - blocks(codec, x)) / np.maximum(scale, 1e-30)
    known = (size <= 6) & (scale > 0)
    assert known.mean() > 0.95
    assert (error <= half * (1 + 1e-5))[known].all()
