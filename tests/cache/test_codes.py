"""Every codec behind the cache: stored through ``store``, read back by attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import ClassGeometry, Geometry, LayerGeometry, init_cache, store
from kvjax.codecs import ADVERTISED, KeyBasis, code_keys, code_values, kv_codec, plain_output
from kvjax.codecs import plain_keys as decoded_keys
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference

ROWS, HEADS, GROUP, DIM, TOKENS = 2, 2, 3, 64, 64
SCALE = 0.3


def made(codec, basis=None, page=32):
    shape = ClassGeometry(codec, page, 3, mass=True)
    geometry = Geometry(
        layers=(LayerGeometry((shape, shape)),),
        rows=ROWS,
        num_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype=jnp.dtype("float32"),
    )
    cache = init_cache(geometry, None if basis is None else (basis,))
    assert cache.nbytes() == geometry.nbytes
    return geometry, cache.layers[0]


def draw(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def dense(q, k, v):
    """Attention and the mass of each key, in float64."""
    out, mass = np.zeros(q.shape), np.zeros(k.shape[:3])
    for row, head in np.ndindex(q.shape[:2]):
        at = row, head // GROUP
        logits = np.float64(k[at]) @ np.float64(q[row, head]) * SCALE
        weights = np.exp(logits - logits.max())
        weights /= weights.sum()
        out[row, head] = weights @ np.float64(v[at])
        mass[at] += weights
    return out, mass


SPECS = [*ADVERTISED[:5], "k4v2", "k16v4", "nvfp4", "ternary", "kivi2"]


@pytest.mark.parametrize(
    ("spec", "biased"),
    [
        *((spec, True) for spec in SPECS),  # a bias is for those that rotate
        ("int4", False),
        *(pytest.param(spec, False, marks=pytest.mark.slow) for spec in SPECS if spec != "int4"),
    ],
)
def test_attention_reads_what_was_stored(spec, biased):
    rng = np.random.default_rng(len(spec))
    codec, basis = kv_codec(spec), KeyBasis()
    if biased and codec.rotate:
        codec = dataclasses.replace(codec, center=True, balance=True)
        basis = KeyBasis(
            draw(rng, HEADS, DIM) * 5, jnp.exp(draw(rng, HEADS, DIM)) + jnp.float32(0.2)
        )
    elif codec.center:
        codec = dataclasses.replace(codec, center=False)
    _, layer = made(codec, basis if biased and codec.rotate else None)
    k, v = draw(rng, ROWS, HEADS, TOKENS, DIM) + jnp.float32(1), draw(rng, ROWS, HEADS, TOKENS, DIM)
    pos = jnp.tile(jnp.arange(TOKENS, dtype=jnp.int32)[None], (ROWS, 1))
    keep = jnp.ones((ROWS, HEADS, TOKENS), bool)
    put = jax.jit(store, static_argnums=1)
    layer, placed = put(layer, 1, k, v, pos, keep, None)
    assert placed.all()

    # What no table names may hold anything.
    pool, table = layer.pools[1], layer.tables[1]
    unowned = sorted(set(range(1, len(pool.bias))) - set(np.asarray(table).ravel().tolist()))
    poisoned = {
        name: getattr(pool, name).at[jnp.array(unowned)].set(jnp.nan)
        for name in ("k_scale", "v_scale", "k_zero", "v_zero", "bias")
        if getattr(pool, name) is not None
    }
    pool = dataclasses.replace(pool, **poisoned)

    q = draw(rng, ROWS, HEADS * GROUP, DIM)
    out, lse, mass = paged_attention([q], [pool], [table], scale=SCALE, with_mass=True)
    kept_k = decoded_keys(codec, basis, codec.k.decode(codec.k.encode(code_keys(codec, basis, k))))
    kept_v = plain_output(codec, codec.v.decode(codec.v.encode(code_values(codec, v))))
    expected, expected_mass = dense(q, kept_k, kept_v)
    np.testing.assert_allclose(out, expected, rtol=0, atol=3e-5)
    order = np.argsort(np.asarray(pool.pos[table]).reshape(ROWS, HEADS, -1), -1, kind="stable")
    in_order = np.take_along_axis(np.asarray(mass[0]), order, -1)[:, :, -TOKENS:]
    np.testing.assert_allclose(in_order, expected_mass, rtol=0, atol=1e-5)
    for got, want in zip(
        (out, lse, *mass),
        jax.tree.leaves(paged_attention_reference((q,), (pool,), (table,), scale=SCALE)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)


@pytest.mark.parametrize("spec", ADVERTISED)
def test_bytes_are_what_the_codec_says(spec):
    codec = kv_codec(spec)
    geometry, layer = made(codec)
    shape = geometry.layers[0].classes[0]
    pool = layer.pools[0]
    payload = sum(
        getattr(pool, name).nbytes
        for name in ("k", "v", "k_scale", "v_scale", "k_zero", "v_zero")
        if getattr(pool, name) is not None
    )
    wide = sum(part.fmt == "float" for part in (codec.k, codec.v)) * 2  # bytes beyond bfloat16's
    bits = codec.k.payload_bits(DIM) + codec.v.payload_bits(DIM)
    slots = pool.bias.size
    assert payload == slots * DIM * (bits / 8 + wide)
    held = sum(geometry.slot_bytes(shape).values())
    assert held * slots == payload + slots * (4 + 4 + 4)
    if codec.k.fmt != "float":
        assert pool.k.dtype == jnp.uint8


def test_streamed_codes_are_those_of_one_go():
    """A token at a time and all at once; pages may have other numbers."""
    rng = np.random.default_rng(0)
    codec = kv_codec("k4v2")
    codec = dataclasses.replace(codec, center=False)
    k, v = draw(rng, ROWS, HEADS, 40, DIM), draw(rng, ROWS, HEADS, 40, DIM)
    keep = jnp.ones((ROWS, HEADS, 40), bool)
    pos = jnp.tile(jnp.arange(40, dtype=jnp.int32)[None], (ROWS, 1))
    put = jax.jit(store, static_argnums=1)
    _, whole = made(codec)
    whole, _ = put(whole, 1, k, v, pos, keep, None)
    _, single = made(codec)
    for t in range(40):
        part = slice(t, t + 1)
        single, placed = put(
            single, 1, k[:, :, part], v[:, :, part], pos[:, part], keep[:, :, part], None
        )
        assert placed.all()
    for name in ("k", "v", "k_scale", "v_scale", "pos"):
        ours, theirs = (
            np.asarray(getattr(layer.pools[1], name)[layer.tables[1]]) for layer in (single, whole)
        )
        np.testing.assert_array_equal(ours[:, :, :2], theirs[:, :, :2])
