"""What holds for every codec: hard inputs, sizes, streams and the isolation of tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import kv_codec
from kvjax.errors import UsageError
from tests.codecs.inputs import CODECS, NAMES, decode, encode, numbers, tensor_codec

FLOAT_MAX = float(np.finfo(np.float32).max)


def bits(stored) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(stored)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("head_dim", [64, 192])
def test_payload_bits_are_those_of_the_buffers(name, head_dim):
    codec = tensor_codec(name)
    x = jnp.zeros((64, head_dim), jnp.bfloat16)
    stored = encode(codec, x)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(stored))
    assert codec.payload_bits(head_dim) == nbytes * 8 / x.size
    assert stored.codes.shape[-1] == codec.width(head_dim)
    if codec.fmt != "float":
        assert stored.codes.dtype == jnp.uint8
        assert stored.scale.dtype == codec.scale_dtype
        groups = head_dim // (codec.channels or head_dim)
        assert stored.scale.shape[-2:] == (64 // codec.tokens, groups)
        assert (stored.zero is not None) == codec.zero
        assert stored.zero is None or stored.zero.dtype == codec.scale_dtype


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bf16", 16), ("fp8", 8.25), ("int8", 8.25), ("int4", 4.25), ("int2", 2.25), ("nvfp4", 4.5),
     ("ternary", 2.5), ("kivi4", 5), ("kivi2", 3), ("kivi2-g64", 2.5), ("kivi2-g16", 4)],
)  # fmt: skip
def test_payload_bits_at_64_channels(name, expected):
    codec = kv_codec(name)
    assert codec.k.payload_bits(64) == codec.v.payload_bits(64) == expected


@pytest.mark.parametrize("name", CODECS)
def test_a_stream_is_stored_as_one_shot(name):
    codec = tensor_codec(name)
    x = numbers((128 if codec.tokens == 64 else 64, 64))
    whole = encode(codec, x)
    assert abs(decode(codec, whole) - x).max() > 0
    pieces = [
        encode(codec, x[start : start + codec.tokens]) for start in range(0, len(x), codec.tokens)
    ]
    assert len(pieces) > 1
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, -2), *pieces)
    assert bits(joined) == bits(whole)
    plain = np.concatenate([decode(codec, piece) for piece in pieces])
    np.testing.assert_array_equal(plain, decode(codec, whole))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-30, -1e-30, 1e-40])
def test_nothing_and_next_to_nothing(name, number):
    codec = tensor_codec(name)
    x = np.full((64, 64), number, np.float32)
    x[:, ::2] *= -1
    stored = encode(codec, x)
    assert not np.asarray(stored.scale).astype(np.float32).any()
    assert not decode(codec, stored).any()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("number", [1.0, -3.7, 100.03, -0.02, 300.0])
def test_constants(name, number):
    codec = tensor_codec(name)
    x = np.full((64, 64), number, np.float32)
    plain = decode(codec, encode(codec, x))
    # The scale's own rounding; float8 scales end at 2**-9.
    narrow = codec.scale_dtype == jnp.float8_e4m3fn
    rtol, atol = (2.0**-4, 2.0**-10 * 6) if narrow else (2.0**-9, 1e-6)
    np.testing.assert_allclose(plain, x, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("huge", [65504.0, 66000.0, -1e6, 3e7, 1e30, FLOAT_MAX, -FLOAT_MAX])
def test_one_huge_outlier(name, huge):
    codec = tensor_codec(name)
    x = numbers((64, 64))
    x[5, 7] = huge
    stored = encode(codec, x)
    for leaf in jax.tree.leaves(stored):
        assert np.isfinite(np.asarray(leaf).astype(np.float32)).all()
    plain = decode(codec, stored)
    assert np.isfinite(plain).all()
    # Numbers under another scale do not notice, though they may share a byte.
    x[5, 7] = 0
    without = decode(codec, encode(codec, x))
    channels = codec.channels or 64
    other_token = np.arange(64)[:, None] // codec.tokens != 5 // codec.tokens
    other_channel = np.arange(64)[None] // channels != 7 // channels
    apart = other_token | other_channel
    np.testing.assert_array_equal(plain[apart], without[apart])
    if codec.fmt not in ("e2m1", "ternary", "int2", "uint2") and abs(huge) < 1e5:
        assert plain[5, 7] == pytest.approx(huge, rel=0.1)
    assert np.sign(plain[5, 7]) == np.sign(huge)


@pytest.mark.parametrize("name", CODECS)
def test_the_largest_numbers_of_both_signs(name):
    codec = tensor_codec(name)
    x = np.where(np.arange(64 * 64) % 2, FLOAT_MAX, -FLOAT_MAX).astype(np.float32)
    x = x.reshape(64, 64) * np.where(np.arange(64) % 2, 1, -1).astype(np.float32)[:, None]
    plain = decode(codec, encode(codec, x))
    assert np.isfinite(plain).all()
    if not codec.zero:  # a zero point and a scale that are both cut to float16 may meet at zero
        np.testing.assert_array_equal(np.sign(plain), np.sign(x))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_token(name, bad):
    codec = tensor_codec(name)
    x = numbers((64, 64), seed=3)
    spoilt, fine = x.copy(), x.copy()
    spoilt[4] = bad
    # What changes neither the range of a group of tokens nor, for "twn", the mean size.
    group = np.delete(x[: codec.tokens], 4, 0) if codec.tokens > 1 else x
    fine[4] = abs(group).mean(0) if name.startswith("ternary.") else group[0]
    actual, expected = encode(codec, spoilt), encode(codec, fine)
    others = np.arange(64) != 4
    codes, expected_codes = np.asarray(actual.codes), np.asarray(expected.codes)
    np.testing.assert_array_equal(codes[others], expected_codes[others])
    groups = np.arange(64 // codec.tokens) != 4 // codec.tokens
    for leaf, expected_leaf in zip(
        *(jax.tree.leaves(x)[1:] for x in (actual, expected)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(leaf)[groups], np.asarray(expected_leaf)[groups])
    plain = decode(codec, actual)
    assert np.isfinite(plain[others]).all()
    if codec.channels is None and np.isnan(bad):
        assert np.isnan(plain[4]).all(), "a NaN is not to be hidden where it harms nobody else"


@pytest.mark.parametrize("name", [name for name in CODECS if tensor_codec(name).tokens > 1])
def test_a_group_of_nothing_finite(name):
    codec = tensor_codec(name)
    stored = encode(codec, np.full((codec.tokens, 64), np.nan, np.float32))
    assert not decode(codec, stored).any()


def test_numbers_of_the_model_are_stored_as_they_are():
    codec = kv_codec("bf16").k
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(numbers((2, 5, 12)), dtype)
        stored = encode(codec, x)
        assert stored.codes.dtype == dtype
        assert stored.scale is None and stored.zero is None
        np.testing.assert_array_equal(stored.codes, x)
        np.testing.assert_array_equal(decode(codec, stored), x.astype(jnp.float32))


@pytest.mark.parametrize(
    ("name", "head_dim", "message"),
    [
        ("int4.k", 63, "int4 needs a head_dim that 2 divides"),
        ("int2.v", 66, "int2 needs a head_dim that 4 divides"),
        ("nvfp4.v", 72, "groups of 16 channels fill a head; got 72"),
        ("kivi2.v", 80, "that 32 divides"),
        ("kivi2-g64.v", 96, "that 64 divides"),
    ],
)
def test_heads_that_do_not_divide(name, head_dim, message):
    codec = tensor_codec(name)
    x = jnp.zeros((64, head_dim))
    asks = (codec.width, codec.payload_bits, lambda _: codec.encode(x))
    for ask in asks:
        with pytest.raises(UsageError, match=message):
            ask(head_dim)


@pytest.mark.parametrize("name", ["nvfp4.k", "kivi2.k"])
def test_an_unfinished_group_of_tokens_is_refused(name):
    """Stored alone, a token would be its own scale: exact, and far more than the bits promised."""
    codec = tensor_codec(name)
    for tokens in (1, codec.tokens - 1, codec.tokens + 1):
        with pytest.raises(ValueError, match=f"{codec.tokens} tokens at a time, got {tokens}"):
            codec.encode(jnp.zeros((2, tokens, 64)))
