"""Numbers as people read them."""

import re
from collections.abc import Sequence

from kvjax.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    letter + ending: base**power
    for power, letter in enumerate("KMGT", start=1)
    for ending, base in (("", 1024), ("IB", 1024), ("B", 1000))
}


def read_size(text: str, name: str) -> int:
    """Bytes of a size as people write it: 64MiB, 1.5G (both by 1,024), 2GB (by 1,000) or a number.

    Raises:
        UsageError: it is none; ``name`` is what it was given as.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = _UNITS.get(parts[2].upper()) if parts else None
    count = int(float(parts[1]) * unit) if unit else 0
    if count < 1:
        raise UsageError(f"{name} must be a size like 64MiB or 2GiB, or bytes, got {text!r}")
    return count


def size(count: float) -> str:
    """Bytes in the largest unit that leaves at least one of it."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << bits:
            return f"{count / (1 << bits):.2f} {unit}"
    return f"{count:.0f} bytes"


def rate(count: float, seconds: float) -> str:
    """So many a second; a dash where no time passed."""
    return f"{count / seconds:.1f} tok/s" if seconds > 0 else "- tok/s"


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, one pair a line, the values one below the other."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
