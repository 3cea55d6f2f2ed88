"""How much memory the device has, and how much was used."""

import os
import pathlib
import resource
import sys

import jax


def device_memory() -> int | None:
    """Bytes that this process may use on the default device.

    On a CPU that is the machine's memory, or what the process's control group allows of it.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu":
        return None
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *control_group_limits()])


def control_group_limits(root: pathlib.Path = pathlib.Path("/")) -> list[int]:
    """Bytes that the process's control group, and those that it is part of, may use.

    Both versions of Linux's control groups are read; there are none elsewhere. A container often
    sees its own group as the root of all.
    """
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top):
                limits += _limit(folder / name)
    return limits


def _limit(file: pathlib.Path) -> list[int]:
    """The number in a file; nothing where there is none, as for "max"."""
    try:
        return [int(file.read_text())]
    except (OSError, ValueError):
        return []


def memory_in_use() -> dict[str, int | None]:
    """Peak and present bytes on the device; of the process (resident) where it is a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return {
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "bytes_in_use": stats.get("bytes_in_use"),
        }
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_bytes": peak, "bytes_in_use": None}
