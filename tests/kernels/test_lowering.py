"""The kernels lower for the GPUs they are meant for, on a machine that has none."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import KVPages, cluster_centers, latent_attention, paged_attention, write_slots
from pallas_kernels.formats import PER_BYTE
from pallas_kernels.latent_attention.layout import Basis, Rotary
from pallas_kernels.paged_attention.api import LARGE
from pallas_kernels.paged_attention.hopper.plan import Launch, launch_for

pytestmark = pytest.mark.usefixtures("unchecked")  # lowering builds pytrees of no arrays
GPUS = ["NVIDIA A100", "NVIDIA H200"]
KERNEL = "__gpu$xla.gpu.triton"


def lower(gpu: str, fn, *arguments) -> str:
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(gpu, None, "gpu"))
    with use_abstract_mesh(mesh):
        return jax.jit(fn).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.zeros(sizes, dtype)


def pool(dim: int, page: int, dtype, formats=("float", "float"), notes: bool = False) -> KVPages:
    def side(fmt, *axes):
        if fmt == "float":
            return shape(*axes, dtype=dtype)
        return shape(*(n // PER_BYTE[fmt] if n == dim else n for n in axes), dtype=jnp.uint8)

    coded = formats != ("float", "float")
    return KVPages(
        side(formats[0], 9, page, dim),
        side(formats[1], 9, dim, page),
        shape(9, page, dtype=jnp.float32),
        shape(9, page, dtype=jnp.int32),
        k_scale=None if formats[0] == "float" else shape(9, page, 1, dtype=jnp.float16),
        v_scale=None if formats[1] == "float" else shape(9, 1, page, dtype=jnp.float16),
        mean=shape(2, dim, dtype=jnp.float32) if coded else None,
        balance=shape(2, dim, dtype=jnp.float32) if coded and notes else None,
        mass=shape(9, page, dtype=jnp.float32) if notes else None,
        level=shape(9, page, dtype=jnp.uint8) if notes else None,
        k_format=formats[0],
        v_format=formats[1],
        rotated=coded,
    )


def attention(
    gpu, dtype, dim, group, page, pools, full, implementation=None, formats=("float", "float")
) -> str:
    attend = functools.partial(
        paged_attention,
        scale=0.1,
        window=8 if full else None,
        soft_cap=30.0 if full else None,
        implementation=implementation,
        with_mass=full,
    )
    table = shape(3, 2, 4, dtype=jnp.int32)
    return lower(
        gpu,
        lambda q, pools, tables, q_pos, sinks: attend(
            q, pools, tables, q_pos=q_pos if full else None, sinks=sinks if full else None
        ),
        shape(3, 2 * group, dim, dtype=dtype),
        # Of different shapes: equal ones would share a function of the module.
        (pool(dim, 32, dtype), pool(dim, page, dtype, formats))[-pools:],
        (table,) * pools,
        shape(3, dtype=jnp.int32),
        shape(2 * group, dtype=jnp.float32),
    )


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize(
    ("dtype", "dim", "group", "page", "pools", "full"),
    [
        (jnp.bfloat16, 128, 4, 64, 1, False),
        (jnp.bfloat16, 64, 8, 64, 2, True),
        (jnp.float32, 64, 3, 16, 1, True),
        (jnp.float32, 16, 16, 64, 1, False),
    ],
)
def test_paged_attention(gpu, implementation, dtype, dim, group, page, pools, full):
    text = attention(gpu, dtype, dim, group, page, pools, full, implementation)
    assert text.count(KERNEL) == pools
    assert "paged_attention" in text


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("formats", "dim", "group", "page", "full"),
    [
        (("int8", "int8"), 128, 4, 64, False),
        (("int4", "int4"), 128, 4, 64, True),
        (("int2", "int2"), 64, 1, 16, False),
        (("int4", "int2"), 96, 3, 32, True),
        (("fp8", "fp8"), 256, 8, 128, True),
        (("float", "int4"), 128, 16, 64, False),
    ],
    ids=str,
)
def test_paged_attention_over_codes(gpu, formats, dim, group, page, full):
    """A launch for the recent tokens, one for the codes, and no gather of either."""
    text = attention(gpu, jnp.bfloat16, dim, group, page, 2, full, formats=formats)
    assert text.count(KERNEL) == 2
    assert "stablehlo.gather" not in text
    assert "stablehlo.gather" in attention(
        gpu, jnp.bfloat16, dim, group, page, 2, full, "xla", formats
    )


@pytest.mark.parametrize("gpu", GPUS)
def test_paged_attention_that_the_kernel_cannot_do(gpu):
    assert KERNEL not in attention(gpu, jnp.bfloat16, 64, 17, 64, 1, False)
    assert KERNEL not in attention(gpu, jnp.bfloat16, 64, 4, 64, 1, False, "xla")
    with pytest.raises(NotImplementedError, match="got 17"):
        attention(gpu, jnp.bfloat16, 64, 17, 64, 1, False, "triton")


def test_paged_attention_by_mosaic():
    """One launch for both pools, for GPUs that its compiler does not crash for."""
    arguments = jnp.bfloat16, 128, 4, 64, 2, False, "mosaic", ("int4", "int4")
    text = attention("NVIDIA H200", *arguments)
    assert text.count("custom_call @mosaic_gpu") == 1 and KERNEL not in text
    for gpu in ("NVIDIA A100", "NVIDIA B200"):
        with pytest.raises(NotImplementedError, match=rf"compute capability 9\.0 .* got {gpu}"):
            attention(gpu, *arguments)


@pytest.mark.parametrize(
    ("gpu", "rows", "fmt", "mass", "mosaic"),
    [
        ("NVIDIA H200", 256, "int4", False, True),
        ("NVIDIA H200", 255, "int4", False, False),
        ("NVIDIA H200", 256, "int4", True, False),
        ("NVIDIA H200", 256, "fp8", False, False),
        ("NVIDIA H200", 256, "float", False, False),
        ("NVIDIA A100", 256, "int4", False, False),
    ],
)
def test_large_pools_of_codes_go_to_mosaic_where_it_runs(gpu, rows, fmt, mass, mosaic):
    assert LARGE == 256 * 2 * 64 * 8192  # rows, heads, pages, bytes of a page of int4
    attend = functools.partial(paged_attention, scale=0.1, with_mass=mass)
    pools, table = [pool(128, 64, jnp.bfloat16, (fmt, fmt))], shape(rows, 2, 64, dtype=jnp.int32)
    text = lower(gpu, attend, shape(rows, 8, 128), pools, [table])
    assert ("custom_call @mosaic_gpu" in text) == mosaic == (KERNEL not in text)


@pytest.mark.parametrize(
    ("rows", "formats", "group", "narrow"),
    [
        (256, ["int4"], 4, True),
        (132, ["int4"], 4, False),  # 264 programs: a row is shared by several
        (256, ["float"], 4, False),
        (256, ["int4"], 8, False),
        (256, ["int4", "int2"], 4, False),
    ],
)
def test_mosaic_s_launch_of_short_rows_of_codes(rows, formats, group, narrow):
    pools = tuple(pool(128, 64, jnp.bfloat16, (fmt, fmt)) for fmt in ("float", *formats))
    tables = (shape(rows, 2, 16, dtype=jnp.int32),) * len(pools)
    found = launch_for(pools, tables, 128, group)
    assert found == (Launch(264, 3, 20 * 1024) if narrow else Launch(264, 2, 40 * 1024))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("dtype", "dim", "blocks", "fmt"),
    [
        (jnp.bfloat16, 128, 8, "float"),
        (jnp.float32, 64, 4, "int8"),
        (jnp.bfloat16, 64, 4, "int4"),
    ],
)
def test_latent_attention(gpu, dtype, dim, blocks, fmt):
    """Two launches for all pools, one of them for keys, and no gather of latents."""
    kv_heads, page, width = 3, 16, 3 * dim
    basis = Basis(shape(width, width, dtype=jnp.float32), shape(width, dtype=jnp.float32))

    def latents(count, fmt):
        components, stored = width // count, jnp.uint8 if fmt != "float" else dtype
        scale = None if fmt == "float" else shape(9, page, 1, dtype=jnp.float16)
        k = shape(9, page, components // PER_BYTE.get(fmt, 1), dtype=stored)
        pos = shape(9, page, dtype=jnp.int32)
        return KVPages(k, shape(9, 0, page, dtype=dtype), None, pos, scale, k_format=fmt)

    attend = functools.partial(latent_attention, scale=0.1, span=64, window=9)
    text = lower(
        gpu,
        lambda *arguments: attend(*arguments[:-1], q_pos=arguments[-1]),
        shape(2, kv_heads * 4, dim, dtype=dtype),
        (latents(1, "float"), latents(blocks, fmt)),
        (shape(2, 2, 2, dtype=jnp.int32), shape(2, 2 * blocks, 4, dtype=jnp.int32)),
        basis,
        basis,
        Rotary(shape(dim // 2, dtype=jnp.float32), 1.1),
        shape(2, dtype=jnp.int32),
    )
    assert text.count(KERNEL) == 2
    assert "latent_logits" in text and "latent_values" in text
    stored = "ui8" if fmt != "float" else {"bfloat16": "bf16", "float32": "f32"}[dtype.__name__]
    gathers = [line for line in text.splitlines() if '"stablehlo.gather"' in line]
    assert not any(f"x{width // blocks}x{stored}" in line for line in gathers)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("dtype", "dim", "page", "tokens", "formats", "arrays"),
    [
        (jnp.bfloat16, 128, 64, 1, ("float", "float"), 4),
        (jnp.float32, 64, 16, 16, ("float", "float"), 4),
        (jnp.float32, 96, 16, 16, ("float", "float"), 4),
        (jnp.bfloat16, 128, 64, 16, ("int8", "int8"), 8),
        (jnp.bfloat16, 64, 16, 1, ("int4", "int4"), 8),
        (jnp.bfloat16, 128, 64, 17, ("int4", "int2"), 8),
        (jnp.float32, 256, 64, 15, ("int2", "int2"), 8),
        (jnp.float32, 256, 64, 16, ("fp8", "fp8"), 8),
        (jnp.bfloat16, 128, 64, 16, ("float", "int4"), 7),
    ],
    ids=str,
)
def test_write_slots(gpu, dtype, dim, page, tokens, formats, arrays):
    """One launch, which takes over all arrays of the pool in place."""
    notes = formats != ("float", "float")
    text = storing(gpu, pool(dim, page, dtype, formats, notes), dtype, dim, tokens)
    assert text.count(KERNEL) == 1 and "stablehlo.scatter" not in text
    line = next(line for line in text.splitlines() if KERNEL in line)
    assert line.count("#stablehlo.output_operand_alias") == arrays


@pytest.mark.parametrize("gpu", GPUS)
def test_write_slots_that_the_kernel_cannot_do(gpu):
    text = storing(gpu, pool(96, 16, jnp.bfloat16, ("int4", "int4")), jnp.bfloat16, 96, 16)
    assert KERNEL not in text and "stablehlo.scatter" in text


def storing(gpu, pages: KVPages, dtype, dim: int, tokens: int) -> str:
    places = shape(3, 2, tokens, dtype=jnp.int32)
    heads = shape(3, 2, tokens, dim, dtype=dtype)
    positions = shape(3, tokens, dtype=jnp.int32)
    return lower(gpu, write_slots, pages, places, places, heads, heads, positions)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("dtype", "dim", "tokens", "clusters"),
    [(jnp.float32, 128, 128, 64), (jnp.bfloat16, 64, 40, 31), (jnp.float32, 16, 8, 4)],
)
def test_cluster_centers(gpu, dtype, dim, tokens, clusters):
    text = clustering(gpu, dtype, dim, tokens, clusters)
    assert text.count(KERNEL) == 1 and "stablehlo.dot_general" not in text


@pytest.mark.parametrize("gpu", GPUS)
def test_cluster_centers_that_the_kernel_cannot_do(gpu):
    text = clustering(gpu, jnp.float32, 96, 16, 4)
    assert KERNEL not in text and "stablehlo.dot_general" in text


def clustering(gpu, dtype, dim: int, tokens: int, clusters: int) -> str:
    cluster = functools.partial(cluster_centers, iterations=4)
    start = shape(clusters, dtype=jnp.int32)
    return lower(gpu, cluster, shape(3, 2, tokens, dim, dtype=dtype), start)
