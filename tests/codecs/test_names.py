"""Names of codecs, and what they promise."""

import itertools

import jax.numpy as jnp
import pytest

from kvjax.codecs import ADVERTISED, kv_codec
from kvjax.errors import UsageError

FORMATS = {16: "float", 8: "int8", 4: "int4", 2: "int2"}


@pytest.mark.parametrize("name", ADVERTISED)
def test_an_advertised_name_is_the_codecs_own(name):
    codec = kv_codec(name)
    assert codec.name == name
    assert codec == kv_codec(codec.name) and hash(codec) == hash(kv_codec(name))
    assert not codec.balance


@pytest.mark.parametrize(("k", "v"), [*itertools.product(FORMATS, FORMATS)])
def test_widths(k, v):
    codec = kv_codec(f"k{k}v{v}")
    assert (codec.k.fmt, codec.v.fmt) == (FORMATS[k], FORMATS[v])
    assert (codec.k.bits, codec.v.bits, codec.group) == (k, v, 1)
    assert codec.rotate == ((k, v) != (16, 16))
    assert not codec.center
    for one in (codec.k, codec.v):
        assert one.channels is None and not one.zero
        assert one.scale_dtype == (None if one.bits == 16 else jnp.float16)
    if k == v:
        assert codec == kv_codec(str(k)) == kv_codec("bf16" if k == 16 else f"int{k}")


@pytest.mark.parametrize(
    ("name", "fmt", "group", "scale", "zero"),
    [
        ("nvfp4", "e2m1", 16, jnp.float8_e4m3fn, False),
        ("ternary", "ternary", 16, jnp.float8_e4m3fn, False),
        ("kivi4", "uint4", 32, jnp.float16, True),
        ("kivi2", "uint2", 32, jnp.float16, True),
        ("kivi2-g64", "uint2", 64, jnp.float16, True),
    ],
)
def test_layouts_of_the_papers(name, fmt, group, scale, zero):
    codec = kv_codec(name)
    assert (codec.k.tokens, codec.k.channels) == (group, 1)
    assert (codec.v.tokens, codec.v.channels) == (1, group)
    assert codec.group == group
    assert not codec.rotate and not codec.center
    for one in (codec.k, codec.v):
        assert (one.fmt, one.zero, one.scale_dtype) == (fmt, zero, scale)


@pytest.mark.parametrize(
    "name", ["", "3", "int3", "int16", "bf8", "k4", "k4v3", "k4v2x", "xk4v2", "kivi8", "kivi2-g0",
             "kivi2-", "kivi", "fp4", "float", "INT4", "4\n", "k16v04"],
)  # fmt: skip
def test_other_names_are_refused_with_those_there_are(name):
    with pytest.raises(UsageError) as error:
        kv_codec(name)
    assert repr(name) in str(error.value)
    for known in ("bf16", "fp8", "int8", "k4v2", "nvfp4", "ternary", "kivi2", "kivi2-g64"):
        assert known in str(error.value)
