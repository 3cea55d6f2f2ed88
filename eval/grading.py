"""Is an answer right: what stands in its last box, and whether that equals what was asked for."""

import importlib.util
import re

from kvjax.errors import UsageError

_BOX = re.compile(r"\\f?boxed\s*\{")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_SECONDS = 5
"""That reading an answer, and comparing it, may take; what takes longer is wrong."""


def boxed(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` of a text holds, braces balanced; None without one.

    A box that is never closed, as a truncated answer ends with, is none.
    """
    hidden = _ESCAPED.sub(lambda found: found[0] if found[0][1].isalpha() else "  ", text)
    for start in reversed([found.end() for found in _BOX.finditer(text)]):
        depth = 1
        for at in range(start, len(hidden)):
            depth += {"{": 1, "}": -1}.get(hidden[at], 0)
            if not depth:
                return text[start:at].strip()
    return None


def check_math_verify(flag: str) -> None:
    """Refuse to grade where the library for it is missing.

    Raises:
        UsageError: math-verify is not installed.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise UsageError(
            f"{flag} needs math-verify: install it with `pip install math-verify` (or kvjax with "
            "its extra: `pip install 'kvjax[eval]'`)"
        )


def equivalent(expected: str, given: str) -> bool:
    """Whether two texts of LaTeX or plain numbers mean the same number, set, tuple or expression.

    Of the main thread alone: an alarm ends what takes too long.
    """
    if expected.strip() == given.strip():
        return True
    from math_verify import parse, verify

    one, other = (parse(f"${text}$", parsing_timeout=_SECONDS) for text in (expected, given))
    return verify(one, other, timeout_seconds=_SECONDS)
