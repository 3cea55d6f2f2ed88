"""``paged_attention`` for Hopper GPUs: pages come by bulk copies, some steps before they are read.

A program is one warpgroup and takes one row, one KV head and a share of every pool's pages, one
pool after the other. A step is ``4 * span`` slots in whole pages, ``span`` for each warp, which
keeps its own top logit and sums until the end, so that no warp waits for another but for copies. As
in the Triton kernel, pages stand on the left of products of bytes, and what stands on the right is
two numbers in neighbouring columns, of which the sum is finer than either: the two bytes of a
16-bit number, or a bfloat16 and what it left over. ``hopper`` has the parts.

Nothing is moved to put fragments together, for the order of what a product sums over is free: a
thread takes consecutive bytes of a key's row, and likewise of a value's, and slots stand in such an
order in the rows of the first product that its results are, transposed, the second one's fragments.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import KVPages
from pallas_kernels.paged_attention.hopper.lanes import Lanes
from pallas_kernels.paged_attention.hopper.plan import (
    HEADS,
    WARPS,
    Launch,
    launch_for,
    pitch,
    plan_of,
    unsupported,
)
from pallas_kernels.paged_attention.hopper.program import Program
from pallas_kernels.paged_attention.triton import combine

_CAPABILITY = "9.0"


def other_device() -> str | None:
    """Why this is no device for the kernel, None where it is: for others, the compiler crashes."""
    needs = f"needs a GPU of compute capability {_CAPABILITY} (H100, H200, GH200)"
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:  # what is compiled for, which need not be there
        kind = described.device_kind
        return None if re.search(r"\bG?H[1-9]00\b", kind) else f"{needs}, got {kind}"
    device = jax.local_devices()[0]
    found = getattr(device, "compute_capability", None)
    return None if found == _CAPABILITY else f"{needs}, got {device.device_kind}"


def paged_attention_mosaic(
    queries: tuple[Float[Array, "B Hq D"], ...],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
    soft_cap: float | None = None,
    with_mass: bool = False,
    launch: Launch | None = None,
    interpret: bool = False,
) -> tuple:
    """See ``pallas_kernels.paged_attention``.

    Raises:
        NotImplementedError: the shapes are not for this kernel.
    """
    reason = unsupported(queries, pools, tables)
    if with_mass:
        reason = "it cannot tell the attention that every slot received"
    if reason is None and not interpret:
        reason = other_device()
    if reason:
        raise NotImplementedError(f"mosaic paged_attention: {reason}")
    _, heads, dim = queries[0].shape
    parts = _shares(
        queries,
        pools,
        tables,
        q_pos if window is not None else None,
        launch=launch or launch_for(pools, tables, dim, heads // tables[0].shape[1]),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    return combine([parts], [False], queries[0], sinks)


# Compiled by itself, so that equal layers trace it once.
@functools.partial(jax.jit, static_argnames=("launch", "window", "soft_cap", "scale", "interpret"))
def _shares(
    queries, pools, tables, q_pos, *, launch, scale, window, soft_cap, interpret
) -> dict[str, Array]:
    """What the programs of all pools found, as the Triton kernel leaves it, turned back."""
    (rows, heads, dim), kv_heads = queries[0].shape, tables[0].shape[1]
    group = heads // kv_heads
    plans, arrays = [], []
    for q, pages, table in zip(queries, pools, tables, strict=True):
        plan = plan_of(pages, table, dim, launch)
        if window is None:
            kept = tuple(x for x in plan.arrays if x[0] != "pos")
            plan = dataclasses.replace(plan, arrays=kept)
        plans.append(plan)
        given = {"table": table, "q": q, "q_pos": q_pos}
        given |= {"mean": pages.mean, "balance": pages.balance}
        given |= {
            name: getattr(pages, name).reshape(pages.bias.shape)
            if name.endswith("scale") else getattr(pages, name)
            for name, _ in plan.arrays
        }  # fmt: skip
        arrays.append({name: array for name, array in given.items() if array is not None})
    plans, arrays, behind = _ordered(plans, arrays)
    count = max(plan.count for plan in plans)
    shapes = {"out": (count, group, dim), "top": (count, group), "total": (count, group)}
    out = {
        name: jax.ShapeDtypeStruct((rows, kv_heads, *shape), jnp.float32)
        for name, shape in shapes.items()
    }
    merged = 4 * WARPS * -(-group // HEADS) * HEADS * (pitch(dim) + 2)
    arrivals = [count for plan in plans for count in plan.arrivals]
    start = -(-8 * len(arrivals) // 128) * 128
    ring = start + max(merged, *(plan.ring for plan in plans))
    inputs, kind = jax.tree.flatten(arrays)
    outputs, out_kind = jax.tree.flatten(out)

    def kernel(place, *refs):
        *refs, ring = refs
        taken = jax.tree.unflatten(kind, refs[: len(inputs)])
        stored = jax.tree.unflatten(out_kind, refs[len(inputs) :])
        lanes, programs, barriers = Lanes(interpret), [], 0
        lanes.barriers(ring, arrivals)
        for plan, mine, stages in zip(plans, taken, behind, strict=True):
            where = barriers, start, stages, place
            programs.append(
                Program(lanes, plan, mine, stored, ring, *where, scale, window, soft_cap)
            )
            barriers += 8 * len(plan.arrivals)
        for program in programs:
            if program is programs[0] or program.behind:
                program.begin()
        # While the first pages come, unless that takes too many registers.
        queries = [
            program.queries() if program.plan.k.coded or group <= HEADS else None
            for program in programs
        ]
        tiles, rotated = programs[0].nothing(), plans[0].rotated
        for program, query in zip(programs, queries, strict=True):
            if program is not programs[0]:
                program.follow()
            query = query or program.queries()
            if program.plan.rotated != rotated:
                tiles, rotated = program.turned(tiles), not rotated
            tiles = program.attend(query, tiles)
        programs[-1].store(tiles)

    grid = rows, kv_heads, count
    found = (_interpreted if interpret else _launched)(kernel, grid, outputs, ring)(*inputs)
    return jax.tree.unflatten(out_kind, found)


def _ordered(plans, arrays):
    """In which order pools are read, and how many stages of its own each leaves to the one before.

    Rotated ones come first, so that nothing is turned but what they leave. But the last one, the
    recent tokens', comes before them where its one step leaves room for their first pages to come
    meanwhile, which saves more than it takes to turn what it leaves.
    """
    order = sorted(range(len(plans)), key=lambda n: not plans[n].rotated)
    behind = [0] * len(plans)
    small, large = plans[order[-1]], plans[order[0]]
    stages = pl.cdiv(small.stage, large.stage)
    if len(plans) > 1 and small.share == 1 and stages < large.stages:
        order, behind[1] = [order[-1], *order[:-1]], stages
    return [plans[n] for n in order], [arrays[n] for n in order], behind


def _launched(kernel, grid, outputs, ring):
    names = "row", "head", "part"

    def body(*refs):
        kernel([jax.lax.axis_index(name) for name in names], *refs)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=[plgpu.SMEM((ring,), jnp.uint8)],
        grid=grid,
        grid_names=names,
        kernel_name="paged_attention_mosaic",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def _interpreted(kernel, grid, outputs, ring):
    """The same programs one after the other, by XLA."""

    def body(*refs):
        kernel([pl.program_id(axis) for axis in range(3)], *refs)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return lambda *inputs: pl.pallas_call(
        body,
        grid=grid,
        in_specs=[whole] * len(inputs),
        out_specs=(whole,) * len(outputs),
        out_shape=tuple(outputs),
        scratch_shapes=[pl.MemoryRef(jax.core.ShapedArray((ring,), jnp.uint8), pl.ANY)],
        interpret=True,
    )(*inputs)
