"""When this process began."""

import os
import time

_IMPORTED = time.time()


def process_start() -> float:
    """Seconds since the epoch; where the system does not tell, when this module was imported."""
    try:
        with open("/proc/self/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED
    return time.time() - age if age >= 0 else _IMPORTED
