"""Ctrl-C or SIGTERM: before there is anything to keep it ends the process; then once to stop soon,
twice to stop at once."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from kvjax.report.say import say

INTERRUPTED = 130
"""What a shell expects of a command that ended on SIGINT; the exit code for SIGTERM as well."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Takes SIGINT and SIGTERM while it is entered.

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
        """From now on the first signal only makes ``requested`` true."""
        self._patient = True

    def requested(self) -> bool:
        return self._requested

    def __enter__(self) -> "Interrupts":
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers = {number: signal.signal(number, _noted) for number in _SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._write)
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._write)
        self._thread.join()
        os.close(self._read)

    def _watch(self) -> None:
        while number := os.read(self._read, 1):
            if number[0] not in _SIGNALS:
                continue
            if self._requested or not self._patient:
                self._leave()
            self._requested = True
            say("\nkvjax: stopping (Ctrl-C again: at once)")

    def _leave(self) -> None:
        try:
            self._clean_up()
            say("\nkvjax: interrupted")
        finally:
            os._exit(INTERRUPTED)


def _noted(number: int, frame: FrameType | None) -> None:
    """Stands in for Python's own handler, which would raise KeyboardInterrupt."""
    del number, frame
