"""Wall time, with compilation told apart."""

import sys
import time
from typing import Any

import jax
import numpy as np

_COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class Clock:
    """Runs from the moment that it is entered.

    Attributes:
        compile_s: seconds spent tracing and compiling so far.
    """

    # Of the class: as Python leaves, a stream that nobody ended is closed after modules are gone.
    _leaving = staticmethod(sys.is_finalizing)

    def __enter__(self) -> "Clock":
        self._started = time.perf_counter()
        self.compile_s = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *error) -> None:
        if not self._leaving():
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **_) -> None:
        if event in _COMPILING:
            self.compile_s += duration

    def now(self) -> float:
        """Seconds since it was entered."""
        return time.perf_counter() - self._started


class Lap:
    """Times one request from now on, by a clock; or all of them together."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._started, self._compiled = clock.now(), clock.compile_s
        # After each chunk that was read: seconds, compilation left out, and tokens it brought.
        self._marks: list[tuple[float, int]] = []
        self._ttft_s = self._prefill_s = self._prefill_compile_s = 0.0

    def mark(self, tokens: int) -> None:
        """Note that ``tokens`` more have been read from the device; at first, prefill's.

        None at first: the prompt was there already, and the first token comes later.
        """
        elapsed = self._clock.now() - self._started
        compile_s = self._clock.compile_s - self._compiled
        if not any(count for _, count in self._marks):
            self._ttft_s = elapsed
        if not self._marks:
            self._prefill_s = elapsed - compile_s
            self._prefill_compile_s = compile_s
        self._marks.append((elapsed - compile_s, tokens))

    def tokens_per_s(self) -> float:
        """Tokens a second after the first ones, compilation left out."""
        if not self._marks:
            return 0.0
        seconds = self._marks[-1][0] - self._marks[0][0]
        return sum(tokens for _, tokens in self._marks[1:]) / seconds if seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        times, tokens = zip(*self._marks, strict=True)
        gaps = np.diff(times)
        steps = np.asarray(tokens[1:])
        each = 1000 * gaps[steps > 0] / steps[steps > 0]
        return {
            "wait_s": self._started,
            "compile_s": self._clock.compile_s - self._compiled,
            "prefill_s": self._prefill_s,
            "prefill_compile_s": self._prefill_compile_s,
            "ttft_s": self._ttft_s,
            "decode_s": times[-1] - times[0],
            "decode_tok_s": self.tokens_per_s(),
            "ms_per_token": {
                "p50": float(np.percentile(each, 50)) if each.size else None,
                "p99": float(np.percentile(each, 99)) if each.size else None,
            },
        }
