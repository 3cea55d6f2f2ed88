"""From an exception to one line on standard error and an exit code."""

import sys
import traceback

from kvjax.command.interrupt import INTERRUPTED
from kvjax.command.output import silence_standard_streams
from kvjax.errors import CapacityError, KvjaxError

UNEXPECTED = 1
ROWS_FAILED = 6


def exit_code(error: BaseException, *, verbose: bool) -> int:
    """Tell the user what went wrong; with ``verbose``, where as well.

    A reader that closed the pipe has all it wanted: that is no failure, and nothing is said.
    """
    if isinstance(error, BrokenPipeError):
        silence_standard_streams()
        return 0
    if isinstance(error, SystemExit):  # argparse, after --help
        return int(error.code or 0)
    message, code = _describe(error)
    try:
        if verbose:
            traceback.print_exception(error)
        print(f"kvjax: {message}", file=sys.stderr, flush=True)
    except OSError:
        pass  # there is no one left to tell
    silence_standard_streams()
    return code


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, KvjaxError):
        return " ".join(str(error).split()), error.exit_code
    exhausted = ("RESOURCE_EXHAUSTED", "Out of memory")  # as GPUs and as CPUs say it
    if isinstance(error, MemoryError) or any(text in str(error) for text in exhausted):
        advice = "pass a smaller --batch-size or --max-new-tokens, or --dtype bfloat16"
        return f"out of memory: {advice}", CapacityError.exit_code
    summary = traceback.format_exception_only(error)[0].strip().partition("\n")[0]
    return f"unexpected {summary} (--verbose shows where)", UNEXPECTED
