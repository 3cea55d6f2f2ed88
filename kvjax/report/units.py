"""Numbers as people read them."""

from collections.abc import Sequence


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
