"""How much memory the device has, and how much was used."""

import os
import resource
import sys

import jax


def device_memory() -> int | None:
    """Bytes that this process may use on the default device; the machine's memory on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
