"""What must not be in a program that threads a cache through."""

import dataclasses

import jax

from kvjax.cache import KVCache
from kvjax.models.decoder import Decoder
from tests.aot.h200 import Program
from tests.aot.hlo import Instruction

# Results that are no new memory.
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}
# Launches of a turn of the loop that XLA leaves out of the command buffers: one of the scan's
# outputs is stored by a copy of its own, and the loop's counter is incremented.
_LEFT_OUT = 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of what must stay where it is.

    Attributes:
        pools: elements of every array of the pools.
        elements: of the smallest pool of keys or weight matrix.
        nbytes: the same in bytes.
        cache_bytes: of the whole cache.
    """

    pools: frozenset[int]
    elements: int
    nbytes: int
    cache_bytes: int

    @classmethod
    def of(cls, model: Decoder, cache: KVCache) -> "Sizes":
        pools = [pool for layer in cache.layers for pool in layer.pools]
        matrices = [leaf for leaf in jax.tree.leaves(model) if leaf.ndim > 1]
        large = [*matrices, *(pool.k for pool in pools)]
        return cls(
            frozenset(leaf.size for leaf in jax.tree.leaves(pools)),
            min(leaf.size for leaf in large),
            min(leaf.size * leaf.dtype.itemsize for leaf in large),
            sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)),
        )


def memory_problems(program: Program, sizes: Sizes) -> dict[str, list[str]]:
    """Copies, under whatever name, and buffers that are not shared; empty where all is well."""
    problems = {
        "copied": [str(i) for i in program.module.executed() if _copies(i, sizes.elements)],
        "temporary": [f"{program.temporary} bytes"] if program.temporary >= sizes.nbytes else [],
        "not aliased": [f"{program.aliased} of {sizes.cache_bytes} bytes"]
        if program.aliased < sizes.cache_bytes
        else [],
    }
    return {kind: found for kind, found in problems.items() if found}


def loop_problems(program: Program, sizes: Sizes, layers: int) -> dict[str, list[str]]:
    """Kernels that the loop lacks, pools that it gathers from, and launches one by one."""
    body = [launch for launch in program.launches if launch.looped]
    kernels = [launch.name for launch in body if launch.captured]
    alone = [f"{launch.kind} {launch.name}" for launch in body if not launch.captured]
    problems = {
        "kernels": [
            f"{kernels.count(name)} of {layers} {name} in a command buffer"
            for name in ("write_slots", "paged_attention")
            if kernels.count(name) != layers
        ],
        "gathered": gathered(program, sizes.pools),
        "not captured": alone if len(alone) > _LEFT_OUT else [],
    }
    return {kind: found for kind, found in problems.items() if found}


def gathered(program: Program, sizes: frozenset[int]) -> list[str]:
    """What the loop gathers from arrays of so many elements."""
    return [
        str(instruction)
        for instruction, operands in program.module.looped()
        if instruction.opcode in ("gather", "dynamic-slice") and operands[0].sizes[0] in sizes
    ]


def _copies(instruction: Instruction, elements: int) -> bool:
    """Whether it writes as much as a pool or a weight holds, in any shape and dtype.

    A copy, a transposition, a conversion, a gather, or a fusion of them: nothing that a step
    computes is that large. What a kernel writes in place counts for nothing.
    """
    # What starts is listed with all that it reads; what is done, with its result alone.
    if instruction.opcode in _FREE or instruction.opcode.endswith("-start"):
        return False
    return any(
        size >= elements and not _in_place(instruction, index)
        for index, size in enumerate(instruction.sizes)
    )


def _in_place(instruction: Instruction, index: int) -> bool:
    _, found, aliases = instruction.attributes.partition("output_to_operand_aliasing=")
    output = f"{{{index}}}: (" if len(instruction.sizes) > 1 else "{}: ("
    return bool(found) and output in aliases.partition("}}")[0] + "}}"
