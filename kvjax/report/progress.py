"""The progress line on standard error."""

import shutil
import threading
import time
from typing import TextIO

from kvjax.decoding.events import Progress
from kvjax.report.say import say
from kvjax.report.units import size

REDRAW_S = 0.1
LOG_S = 30.0


class ProgressLine:
    """One line that is drawn over and over on a terminal; elsewhere a new one now and then.

    A short run whose standard error is a file says nothing there. A phase counts its seconds in a
    thread of its own, since loading and compiling are long silences otherwise.
    """

    def __init__(self, stream: TextIO, *, enabled: bool):
        self._stream = stream
        self._enabled = enabled
        self._terminal = enabled and stream.isatty()
        self._last = 0.0 if self._terminal else time.monotonic()
        self._shown = False
        self._phase_over = threading.Event()
        self._ticker: threading.Thread | None = None

    def phase(self, name: str) -> None:
        """Say that something begins, until ``update``, ``clear`` or the next phase."""
        self._end_phase()
        if self._terminal:
            self._phase_over = threading.Event()
            self._ticker = threading.Thread(
                target=self._tick, args=(name, time.monotonic()), daemon=True
            )
            self._ticker.start()

    def _tick(self, name: str, started: float) -> None:
        while True:
            self._draw(f"{name} · {time.monotonic() - started:.1f} s")
            if self._phase_over.wait(REDRAW_S):
                return

    def _end_phase(self) -> None:
        if self._ticker is not None:
            self._phase_over.set()
            self._ticker.join()
            self._ticker = None

    def update(self, text: str) -> None:
        """Show the latest state, unless the last one was shown just now."""
        now = time.monotonic()
        if not self._enabled or now - self._last < (REDRAW_S if self._terminal else LOG_S):
            return
        self._end_phase()
        self._last = now
        if self._terminal:
            self._draw(text)
        else:
            say(f"kvjax: {text}", stream=self._stream)

    def clear(self) -> None:
        """Make room for other text."""
        self._end_phase()
        if self._shown:
            say("\r\x1b[K", end="", stream=self._stream)
            self._shown = False

    def retire(self) -> None:
        """Clear the line for good."""
        self.clear()
        self._enabled = self._terminal = False

    def _draw(self, text: str) -> None:
        width = shutil.get_terminal_size().columns
        say(f"\r{text[: width - 1]}\x1b[K", end="", stream=self._stream)
        self._shown = True


def describe(phase: str, progress: Progress) -> str:
    """What the line says while decoding."""
    parts = [
        phase,
        f"token {progress.generated:,}/{progress.limit:,}",
        f"{progress.tokens_per_s:.1f} tok/s",
        f"live {progress.live_tokens:,}/{progress.logical_tokens:,} tokens",
        f"{size(progress.kv_bytes)} (full {size(progress.full_bytes)})",
    ]
    return " · ".join(parts)
