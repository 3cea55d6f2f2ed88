"""A program of one device, run on each of the devices that share a model's heads."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from kvjax.sharding.across import AXIS

SPLIT = "split"
"""What a parameter calls the axis that devices share; one without it is on all of them."""
_HEADS = {
    "pools": PartitionSpec(AXIS),
    "free": PartitionSpec(AXIS),
    "bases": PartitionSpec(AXIS),
    "tables": PartitionSpec(None, AXIS),
    "queries": PartitionSpec(None, None, AXIS),
    "asked": PartitionSpec(None, None, AXIS),
}
"""Fields of ``LayerCache``, and arguments, that hold some of the heads on each device. Pages and
their numbers are a device's own: all devices' pools are one array, a part of it on each."""
_EVERYWHERE = PartitionSpec()


def specs(tree: Any, devices: int) -> Any:
    """How a tree of arguments or results is spread, a `PartitionSpec` for each leaf or parameter.

    Args:
        tree: arrays, caches and modules under their names; None is on all devices.
        devices: that share the heads.
    """

    def of(path, leaf):
        if isinstance(leaf, PartitionSpec):
            return leaf
        if isinstance(leaf, nnx.Variable):
            return parameter_spec(leaf, devices)
        return next((_HEADS[name] for name in _names(path) if name in _HEADS), _EVERYWHERE)

    return jax.tree_util.tree_map_with_path(of, tree, is_leaf=_is_whole)


def parameter_spec(parameter: nnx.Variable, devices: int) -> PartitionSpec:
    """How a parameter is spread. A vocabulary that devices cannot share is on all of them."""
    axis = parameter.get_metadata(SPLIT, None)
    if devices == 1 or axis is None or parameter.shape[axis] % devices:
        return _EVERYWHERE
    return PartitionSpec(*[None] * axis, AXIS)


def per_shard(*results: str | PartitionSpec | Callable[..., Any] | None) -> Callable:
    """Make a function of one device's arrays one that runs on every device of a mesh.

    Under ``jax.set_mesh`` with an axis "tp", each device calls the function with its own part of
    the arguments, whose shapes tell it how many heads it has; what else it needs it asks
    ``kvjax.sharding.across`` for. Elsewhere the function stays what it is. Positional parameters
    hold arrays, keyword-only ones do not.

    Args:
        *results: for each of the function's results, the parameter that it has the form of, a
            function that makes such a form out of the arguments, how it is spread, or None for
            what is the same on all devices.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args, **static):
            mesh = jax.sharding.get_abstract_mesh()
            if AXIS not in mesh.axis_names or mesh.manual_axes:
                return function(*args, **static)
            bound = signature.bind(*args, **static)
            names = list(signature.parameters)[: len(bound.args)]
            given = dict(zip(names, bound.args, strict=True))
            devices = mesh.shape[AXIS]
            made = tuple(_form(result, given, bound.kwargs) for result in results)
            single = len(made) == 1

            def on_device(given):
                out = function(**_counts(given, lambda count: count[0]), **bound.kwargs)
                return _counts(out, lambda count: count[None])

            return jax.shard_map(
                on_device,
                in_specs=(specs(given, devices),),
                out_specs=specs(made[0] if single else made, devices),
                check_vma=False,  # of Pallas' kernels it is not known what varies
            )(given)

        return call

    return decorate


def _form(result, given: dict[str, Any], static: dict[str, Any]) -> Any:
    if isinstance(result, str):
        return given[result]
    return result(**given, **static) if callable(result) else result


def _counts(tree: Any, change: Callable) -> Any:
    """Number of free pages: one a device, an array of them outside."""

    def of(path, leaf):
        names = _names(path)
        return change(leaf) if "free" in names and names[-1] == "count" else leaf

    return jax.tree_util.tree_map_with_path(of, tree)


def _names(path: tuple) -> list[str]:
    return [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]


def _is_whole(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, nnx.Variable | PartitionSpec)
