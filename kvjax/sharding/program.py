"""A program of one device, run on each of the devices that share a model's heads."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from kvjax.sharding.across import AXIS

SPLIT = "split"
"""What a parameter calls the axis that devices share; one without it is on all of them."""
_EVERYWHERE = PartitionSpec()
_HEADS = {
    "pools": PartitionSpec(AXIS),
    "free": PartitionSpec(AXIS),
    "bases": PartitionSpec(AXIS),
    "tables": PartitionSpec(None, AXIS),
    "queries": PartitionSpec(None, None, AXIS),
    "asked": PartitionSpec(None, None, AXIS),
}
"""Fields of ``LayerCache``, arguments and parts of results that hold some of the heads on each
device. Pages and their numbers are a device's own: the pools of all devices are one array outside,
of which each has its part."""
_KINDS = list(dict.fromkeys([_EVERYWHERE, *_HEADS.values()]))


def per_shard(function: Callable) -> Callable:
    """A function of one device's arrays that runs on every device of a mesh.

    Under ``jax.set_mesh`` with an axis "tp", each device calls it with its own part of the
    arguments, whose shapes tell it how many heads it has; what else it needs to know it asks
    ``kvjax.sharding.across`` for. Elsewhere the function stays what it is. Positional parameters
    hold arrays, keyword-only ones do not. What arguments and results are called says how they are
    spread; parameters of models say it themselves.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args, **static):
        mesh = jax.sharding.get_abstract_mesh()
        if AXIS not in mesh.axis_names or mesh.manual_axes:
            return function(*args, **static)
        bound = signature.bind(*args, **static)
        given = dict(zip(signature.parameters, bound.args, strict=False))
        places, (leaves, tree) = specs(given, mesh.shape[AXIS]), jax.tree.flatten(given)
        made: dict[str, Any] = {}

        def on_device(leaves):
            given = _counts(tree.unflatten(_apart(leaves)), lambda count: count[0])
            out = _counts(function(**given, **bound.kwargs), lambda count: count[None])
            leaves, made["tree"] = jax.tree.flatten(out)
            made["kinds"] = [_KINDS.index(place) for place in specs(out, 1)]
            return [
                [leaf for leaf, own in zip(leaves, made["kinds"], strict=True) if own == kind]
                for kind in range(len(_KINDS))
            ]

        # Of Pallas' kernels it is not known what varies between devices.
        run = jax.shard_map(on_device, in_specs=(places,), out_specs=_KINDS, check_vma=False)
        by_kind = [iter(of_kind) for of_kind in run(leaves)]
        return made["tree"].unflatten([next(by_kind[kind]) for kind in made["kinds"]])

    return call


def specs(tree: Any, devices: int) -> list[PartitionSpec]:
    """How each leaf of a tree is spread over the devices that share the heads.

    Args:
        tree: arrays, caches and modules under their names.
        devices: how many there are.
    """
    found = []
    flat, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    for path, leaf in flat:
        if isinstance(leaf, nnx.Variable):
            found += [parameter_spec(leaf, devices)] * len(jax.tree.leaves(leaf))
        else:
            found.append(next((_HEADS[n] for n in _names(path) if n in _HEADS), _EVERYWHERE))
    return found


def parameter_spec(parameter: nnx.Variable, devices: int) -> PartitionSpec:
    """How a parameter is spread. A vocabulary that devices cannot share is on all of them."""
    axis = parameter.get_metadata(SPLIT, None)
    if devices == 1 or axis is None or parameter.shape[axis] % devices:
        return _EVERYWHERE
    return PartitionSpec(*[None] * axis, AXIS)


def _apart(leaves: list[jax.Array]) -> list[jax.Array]:
    """The same arrays, but new ones for those without elements, as latents have them for values.

    XLA crashes where a program hands on such an array that it was given.
    """
    return [leaf if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]


def _counts(tree: Any, change: Callable) -> Any:
    """Change numbers of free pages: outside there is an array of them, one for each device."""

    def of(path, leaf):
        names = _names(path)
        return change(leaf) if "free" in names and names[-1] == "count" else leaf

    return jax.tree_util.tree_map_with_path(of, tree)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
