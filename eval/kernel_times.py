"""Where a GPU's time goes, by kernel."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.profiler import ProfileData


def kernel_times(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Run something under JAX's profiler.

    Kernels that differ by a number at the end of their name count as one. Those of command buffers
    are seen where ``XLA_FLAGS=--xla_gpu_enable_command_buffer=`` makes them kernels of their own.

    Returns:
        Of each kernel of the first GPU its name, how often it ran and its milliseconds in all, the
        longest first; nothing where there is no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        profile = ProfileData.from_file(str(file))
    counts, totals = collections.Counter(), collections.Counter()
    for plane in profile.planes:
        if plane.name != "/device:GPU:0":
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):  # the rest says the same again
                continue
            for event in line.events:
                name = re.sub(r"[._]\d+$", "", event.name)
                counts[name] += 1
                totals[name] += event.duration_ns / 1e6
    return [{"name": n, "count": counts[n], "ms": ms} for n, ms in totals.most_common()]
