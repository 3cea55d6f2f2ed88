"""Programs compiled for an H200 that need not be there, and what can be read of them."""

import dataclasses
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from kvjax.sharding import shards, specs
from kvjax.sharding.across import AXIS
from tests.aot import hlo

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
A100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 167936
  threads_per_core_limit: 2048
  core_count: 108
  fpus_per_core: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 2039000000000
  l2_cache_size: 41943040
  clock_rate_ghz: 1.41
  device_memory_size: 85000000000
  shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 }
device_description_str: "NVIDIA A100"
"""


# Thunks that only hold or order others.
_NO_LAUNCH = ("kCommandBuffer", "kWhile", "kDynamicSliceFusion", "kAsyncStart", "kAsyncDone")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Something that the GPU runs.

    Attributes:
        captured: it is part of a command buffer (a CUDA graph).
        looped: it runs once for every turn of a loop.
    """

    kind: str
    name: str
    captured: bool
    looped: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """An executable's optimised HLO, its launches in order, and its memory in bytes."""

    module: hlo.Module
    launches: list[Launch]
    temporary: int
    aliased: int


class H200:
    """Compiles for one, or for several of a host, or another target; slow to make, so made once.

    Attributes:
        dump: a folder for XLA's dumps.
        mesh: of an axis "x" for one, of an axis "tp" for several.
    """

    def __init__(self, dump: pathlib.Path, devices: int = 1, target: str = TARGET):
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target, topology=f"1x{devices}x1"
        )
        self.dump = dump
        self.mesh = Mesh(np.array(topology.devices), ("x" if devices == 1 else AXIS,))

    def compile(self, function: Callable, *args: Any, options=None, **static: Any) -> Program:
        """Compile a jitted function.

        Args:
            function: jitted.
            *args: trees of anything with a shape and a dtype, spread as ``per_shard`` has them.
            options: XLA's, by name.
            **static: keyword arguments that are no arrays.
        """
        names = list(inspect.signature(function).parameters)[: len(args)]
        args = dict(zip(names, args, strict=True))
        leaves, tree = jax.tree.flatten(args)
        spread = specs(args, shards(self.mesh))
        if AXIS not in self.mesh.axis_names:
            spread = [PartitionSpec()] * len(leaves)
        places = [NamedSharding(self.mesh, spec) for spec in spread]
        placed = tree.unflatten(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for x, place in zip(leaves, places, strict=True)
        )
        folder = self.dump / str(len(list(self.dump.iterdir())))
        with use_abstract_mesh(self.mesh.abstract_mesh):
            traced = function.trace(*(placed[name] for name in names), **static)
            lowered = traced.lower(lowering_platforms=("cuda",))
            compiled = lowered.compile({"xla_dump_to": str(folder), **(options or {})})
        # The last of them is ".._after_thunk_passes", if those passes changed anything.
        *_, thunks = sorted(folder.glob("*.thunk_sequence*.txt"))
        memory = compiled.memory_analysis()
        return Program(
            hlo.parse(compiled.as_text()),
            read_launches(thunks.read_text()),
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
        )


def read_launches(thunks: str) -> list[Launch]:
    """Launches out of XLA's dump of its thunks, an indented tree of ``number: kind [..] name``."""
    launches = []
    above: list[tuple[int, str]] = []  # indentation and kind of what a line is part of
    for line in thunks.splitlines():
        indent = len(line) - len(line.lstrip())
        thunk = re.match(r"\s*\d+: (\w+)\s*\[[^\]]*\]\s*(\S*)", line)
        kind = thunk[1] if thunk else line.strip()
        while above and above[-1][0] >= indent:
            above.pop()
        around = {kind for _, kind in above}
        if thunk and kind not in _NO_LAUNCH:
            launches.append(Launch(kind, thunk[2], "kCommandBuffer" in around, "body:" in around))
        above.append((indent, kind))
    return launches
