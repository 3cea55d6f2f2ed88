"""Telling the user something beside the answers."""

import os
import sys
from typing import TextIO


def say(text: str, *, end: str = "\n", stream: TextIO | None = None) -> None:
    """Write to standard error at once. A log that cannot be written takes no answer with it."""
    stream = stream or sys.stderr
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError:
        drop(stream)


def drop(stream: TextIO) -> None:
    """Forget what a stream could not write, else Python would try again at exit and complain."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
