"""The kernels by themselves, compiled for an H200: one launch each, and nothing beside it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KVPages, cluster_centers, latent_attention, paged_attention, write_slots
from pallas_kernels.formats import PER_BYTE
from pallas_kernels.latent_attention.layout import Basis, Rotary
from pallas_kernels.uniform import encode_uniform

pytestmark = pytest.mark.aot
ROWS, HEADS, PAGE, PAGES = 4, 8, 64, 129


def array(*shape, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def pool(dim: int, formats: tuple[str, str]) -> KVPages:
    coded = formats != ("float", "float")
    k, v = (array(PAGES, PAGE, dim // PER_BYTE[fmt], dtype=jnp.uint8) if fmt in PER_BYTE
            else array(PAGES, PAGE, dim) for fmt in formats)  # fmt: skip
    scales = [None if fmt == "float" else jnp.float16 for fmt in formats]
    return KVPages(
        k,
        array(PAGES, v.shape[2], PAGE, dtype=v.dtype),
        array(PAGES, PAGE, dtype=jnp.float32),
        array(PAGES, PAGE, dtype=jnp.int32),
        k_scale=scales[0] and array(PAGES, PAGE, 1, dtype=scales[0]),
        v_scale=scales[1] and array(PAGES, 1, PAGE, dtype=scales[1]),
        mean=array(HEADS, dim, dtype=jnp.float32) if coded else None,
        balance=array(HEADS, dim, dtype=jnp.float32) if coded else None,
        mass=array(PAGES, PAGE, dtype=jnp.float32),
        level=array(PAGES, PAGE, dtype=jnp.uint8),
        k_format=formats[0],
        v_format=formats[1],
        rotated=coded,
    )


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize(
    ("formats", "dim"),
    [
        (("float", "float"), 96),
        (("int8", "int8"), 64),
        (("fp8", "fp8"), 256),
        (("int4", "int4"), 128),
        (("int4", "int2"), 128),
        (("float", "int4"), 64),
    ],
    ids=str,
)
def test_write_slots(h200, formats, dim, tokens):
    places = array(ROWS, HEADS, tokens, dtype=jnp.int32)
    heads = array(ROWS, HEADS, tokens, dim)
    pages = pool(dim, formats)
    arguments = pages, places, places, heads, heads, array(ROWS, tokens, dtype=jnp.int32)
    program = h200.compile(jax.jit(write_slots, donate_argnums=0), *arguments)
    assert [launch.name for launch in program.launches] == ["write_slots"]
    written = jax.tree.leaves(dataclasses.replace(pages, mean=None, balance=None))
    assert program.aliased >= sum(leaf.size * leaf.dtype.itemsize for leaf in written)


@pytest.mark.parametrize(
    ("formats", "dim", "group"),
    [(("float", "float"), 96, 4), (("int4", "int4"), 128, 4), (("fp8", "fp8"), 64, 16)],
    ids=str,
)
def test_paged_attention_with_all_that_it_takes(h200, formats, dim, group):
    def attend(q, pages, table, q_pos, sinks):
        options = {"scale": 0.1, "window": 99, "soft_cap": 30.0, "with_mass": True}
        return paged_attention(q, [pages], [table], q_pos=q_pos, sinks=sinks, **options)

    heads = HEADS * group
    program = h200.compile(
        jax.jit(attend),
        array(ROWS, heads, dim),
        pool(dim, formats),
        array(ROWS, HEADS, 4, dtype=jnp.int32),
        array(ROWS, dtype=jnp.int32),
        array(heads, dtype=jnp.float32),
    )
    names = [launch.name for launch in program.launches]
    assert sum(name.startswith("paged_attention") for name in names) == 1


@pytest.mark.parametrize(
    ("formats", "dim", "group"),
    [
        (("float", "float"), 64, 16),
        (("int8", "int8"), 128, 4),
        (("int4", "int2"), 128, 8),
        (("float", "int4"), 128, 1),
    ],
    ids=str,
)
def test_paged_attention_by_mosaic(h200, formats, dim, group):
    """One launch for codes and recent tokens, rotated and not; few of XLA's merge its shares."""

    def attend(q, pools, tables, q_pos, sinks):
        options = {"scale": 0.1, "window": 99, "soft_cap": 30.0, "implementation": "mosaic"}
        return paged_attention(q, pools, tables, q_pos=q_pos, sinks=sinks, **options)

    heads = HEADS * group
    program = h200.compile(
        jax.jit(attend),
        array(ROWS, heads, dim),
        (pool(dim, formats), pool(dim, ("float", "float"))),
        (array(ROWS, HEADS, 40, dtype=jnp.int32), array(ROWS, HEADS, 3, dtype=jnp.int32)),
        array(ROWS, dtype=jnp.int32),
        array(heads, dtype=jnp.float32),
    )
    kinds = [launch.kind for launch in program.launches]
    assert kinds.count("kCustomCall") == 1 and len(kinds) <= 5, kinds


def test_scales_are_rounded_before_they_are_used(h200):
    """XLA drops a pair of conversions, and codes would be those of a scale that is not stored."""
    program = h200.compile(
        jax.jit(lambda x: encode_uniform([x], "int8")), array(4, 64, dtype=jnp.float32)
    )
    instructions = [i for c in program.module.computations.values() for i in c.values()]
    types = {i.name: i.type for i in instructions}
    widened = [
        i
        for i in instructions
        if i.opcode == "convert"
        and i.type.startswith("f32")
        and types[i.operands[0]].startswith("f16")
    ]
    assert len(widened) >= 4, "one for each scale that is tried"


@pytest.mark.parametrize(
    ("fmt", "dim", "blocks"),
    [("float", 128, 8), ("int8", 128, 8), ("int4", 64, 4), ("int4", 128, 1)],
    ids=str,
)
def test_latent_attention(h200, fmt, dim, blocks):
    """A launch for the blocks of keys and one for those of values, and no latent is gathered."""
    width, page = HEADS * dim, 16
    basis = Basis(array(width, width, dtype=jnp.float32))
    packed = width // blocks // PER_BYTE.get(fmt, 1)
    latents = KVPages(
        array(PAGES, page, packed, dtype=jnp.bfloat16 if fmt == "float" else jnp.uint8),
        array(PAGES, 0, page),
        None,
        array(PAGES, page, dtype=jnp.int32),
        k_scale=None if fmt == "float" else array(PAGES, page, 1, dtype=jnp.float16),
        k_format=fmt,
    )

    def attend(q, pages, table, basis, frequencies):
        rotary = Rotary(frequencies)
        return latent_attention(q, [pages], [table], basis, basis, rotary, scale=0.1, span=4096)

    program = h200.compile(
        jax.jit(attend),
        array(ROWS, HEADS * 4, dim),
        latents,
        array(ROWS, 2 * blocks, 256, dtype=jnp.int32),
        basis,
        array(dim // 2, dtype=jnp.float32),
    )
    names = [launch.name for launch in program.launches]
    for name in ("latent_logits", "latent_values"):
        assert sum(launched.startswith(name) for launched in names) == 1, names
    keys = ROWS * 4096 * width * 4
    assert program.temporary < keys // 2


@pytest.mark.parametrize(
    ("dim", "tokens", "clusters"), [(128, 128, 64), (128, 64, 32), (64, 128, 64), (128, 8, 4)]
)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_cluster_centers(request, gpu, dim, tokens, clusters):
    """Segments of 128 tokens leave little of an A100's shared memory."""
    cluster = functools.partial(cluster_centers, iterations=4)
    keys = array(ROWS, HEADS, tokens, dim, dtype=jnp.float32)
    gpu = request.getfixturevalue(gpu)
    program = gpu.compile(jax.jit(cluster), keys, array(clusters, dtype=jnp.int32))
    assert [launch.name for launch in program.launches] == ["cluster_centers"]
    assert program.temporary == 0
