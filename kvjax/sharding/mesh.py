"""The devices of a run: a mesh of data parallel groups of tensor parallel devices."""

import contextlib
import dataclasses
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.errors import UsageError
from kvjax.models.config import ModelConfig
from kvjax.sharding.across import AXIS
from kvjax.sharding.program import parameter_spec

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

DATA = "data"


def device_mesh(tp: int = 1, dp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh ("data", "tp").

    Args:
        tp: devices that share a model's heads and matrices; neighbours.
        dp: groups of them, each with rows of its own.
        devices: those of this process if None.

    Raises:
        UsageError: there are too few; names both numbers.
    """
    devices = jax.local_devices() if devices is None else devices
    for name, value in (("tp", tp), ("dp", dp)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name} must be a whole number above 0, got {value!r}")
    if tp * dp > len(devices):
        raise UsageError(
            f"tp {tp} times dp {dp} is {tp * dp} devices, and this process has {len(devices)}: "
            "take fewer"
        )
    return Mesh(np.array(devices[: tp * dp]).reshape(dp, tp), (DATA, AXIS))


def check_mesh(config: ModelConfig, tp: int) -> None:
    """Refuse a model that so many devices cannot share.

    Raises:
        UsageError: with the numbers.
    """
    heads, inner = config.num_kv_heads, config.intermediate_size
    if heads % tp and tp % heads:
        raise UsageError(
            f"tp {tp} does not divide the model's {heads} KV heads, nor do they divide it: take "
            f"{_near(heads)}"
        )
    if config.num_heads % tp:
        raise UsageError(f"tp {tp} does not divide the model's {config.num_heads} query heads")
    if inner % tp:
        raise UsageError(f"tp {tp} does not divide the {inner} channels of the feed-forward layers")


def widened(config: ModelConfig, tp: int) -> ModelConfig:
    """The same model with as many KV heads as devices, where there are fewer: copies of them.

    Each copy serves some of the queries of the head that it is a copy of.
    """
    heads = config.num_kv_heads * copies(config, tp)
    return dataclasses.replace(config, num_kv_heads=heads)


def copies(config: ModelConfig, tp: int) -> int:
    """Devices that hold the same KV head, for some of its queries each."""
    return max(1, tp // config.num_kv_heads)


def of_device(config: ModelConfig, tp: int) -> ModelConfig:
    """The heads and channels that one of so many devices has."""
    return dataclasses.replace(
        config,
        num_heads=config.num_heads // tp,
        num_kv_heads=config.num_kv_heads // tp,
        intermediate_size=config.intermediate_size // tp,
    )


def device_bytes(model: Any, tp: int) -> int:
    """Bytes of a model's parameters, or of their shapes, on one of the devices that share it."""

    def of(parameter):
        count = tp if parameter_spec(parameter, tp) else 1
        return math.prod(parameter.shape) * parameter.dtype.itemsize // count

    leaves = jax.tree.leaves(model, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return sum(map(of, leaves))


def shards(mesh: Mesh | None) -> int:
    """Devices that share the heads."""
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def data_groups(mesh: Mesh | None) -> int:
    """Groups of devices that have rows of their own."""
    return 1 if mesh is None else mesh.shape.get(DATA, 1)


def on(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Computes on the devices of a mesh, or where JAX would."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def groups(lm: "LanguageModel") -> tuple["LanguageModel", ...]:
    """The model as each data parallel group has it, on a mesh ("tp",); nothing is copied."""
    if lm.mesh is None or DATA not in lm.mesh.axis_names:
        return (lm,)
    found = []
    for devices in lm.mesh.devices:
        mesh = Mesh(devices, (AXIS,))

        def part(leaf, mesh=mesh):
            own = {shard.device: shard.data for shard in leaf.addressable_shards}
            sharding = NamedSharding(mesh, leaf.sharding.spec)
            pieces = [own[device] for device in mesh.devices]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, pieces)

        found.append(dataclasses.replace(lm, model=jax.tree.map(part, lm.model), mesh=mesh))
    return tuple(found)


def _near(heads: int) -> str:
    return " or ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
