"""Ctrl-C: before there is anything to keep it ends the process; then once to stop soon, twice to
stop at once."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130
"""What a shell expects of a command that ended on SIGINT."""


class Interrupts:
    """Takes SIGINT while it is entered.

    Python runs signal handlers between two of the main thread's bytecodes, which may be minutes
    apart while XLA compiles, and an exception that a handler raises is lost if it hits a callback
    from C. The bytes of ``set_wakeup_fd`` are written at once, so a thread that reads them notices
    every signal in time.
    """

    def __init__(self):
        self._patient = False
        self._requested = False
        self._clean_up: Callable[[], None] = lambda: None

    def clean_up_with(self, action: Callable[[], None]) -> None:
        """Have this called before the process ends at once."""
        self._clean_up = action

    def wait_for_answers(self) -> None:
        """From now on the first SIGINT only makes ``requested`` true."""
        self._patient = True

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Interrupts":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handler = signal.signal(signal.SIGINT, _noted)
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGINT, self._handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] != signal.SIGINT:
                continue
            if self._requested or not self._patient:
                self._leave()
            self._requested = True
            print("\nkvjax: stopping (Ctrl-C again: at once)", file=sys.stderr, flush=True)

    def _leave(self) -> None:
        try:
            self._clean_up()
            print("\nkvjax: interrupted", file=sys.stderr, flush=True)
        finally:
            os._exit(INTERRUPTED)


def _noted(number: int, frame: FrameType | None) -> None:
    """Stands in for Python's own handler, which would raise KeyboardInterrupt."""
    del number, frame
