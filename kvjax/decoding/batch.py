"""The host's side of a batch: hands tokens to their rows and accounts for what they took."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.plan import Plan
from kvjax.decoding.chunk import ChunkOutput
from kvjax.decoding.clock import Clock
from kvjax.decoding.events import Event, FinishReason, Progress, Result
from kvjax.decoding.report import BytesLog, report
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from kvjax.loading import LanguageModel


class Batch:
    """Rows that decode together; ``rows[i]`` is row ``i`` of every device array.

    Attributes:
        numerical_error: the last row's error if its logits were not finite.
    """

    def __init__(
        self,
        lm: LanguageModel,
        requests: list[Request],
        options: Options,
        planned: Plan,
        clock: Clock,
    ):
        self.rows = [Row(lm, request, options) for request in requests]
        self.numerical_error: str | None = None
        self._lm, self._options, self._planned, self._clock = lm, options, planned, clock
        self._log = [BytesLog(planned.geometry) for _ in requests]

    def running(self) -> bool:
        return any(row.finish is None for row in self.rows)

    def halted(self) -> np.ndarray:
        """Rows that the host has ended; True for the empty ones too."""
        halted = np.ones(self._planned.geometry.rows, bool)
        halted[: len(self.rows)] = [row.finish is not None for row in self.rows]
        return halted

    def compressing(self) -> np.ndarray:
        """Rows in a phase of their answer in which the recipe selects tokens."""
        phases = np.zeros(self._planned.geometry.rows, bool)
        phases[: len(self.rows)] = [row.phase in self._options.recipe.compress for row in self.rows]
        return phases

    def take(self, output: ChunkOutput) -> Iterator[Event]:
        """Read a chunk's output: waits for the device, then tells what each row got."""
        tokens, real, finite = map(np.asarray, (output.tokens, output.real, output.finite))
        length, slots, pages = map(np.asarray, (output.length, output.slots, output.pages))
        crowded = np.asarray(output.crowded)
        held_thoughts = jax.tree.map(np.asarray, output.thoughts)
        self._clock.mark(int(real[:, : len(self.rows)].sum()))
        for i, row in enumerate(self.rows):
            if row.finish is not None:
                continue
            text, new = row.push(tokens[real[:, i], i].tolist())
            thoughts = jax.tree.map(lambda leaf, i=i: leaf[i], held_thoughts)
            latents = None if output.latents is None else np.asarray(output.latents)[i]
            self._log[i].add(int(length[i]), slots[i], pages[i], thoughts, latents)
            if not finite[i]:
                wide = "" if self._lm.dtype == jnp.float32 else "try --dtype float32, or "
                self.numerical_error = (
                    f"row {row.request.row}: the logits hold NaN or infinity after "
                    f"{len(row.tokens)} tokens; {wide}check the weights"
                )
                text += row.end("error", self.numerical_error)
            self._log[i].crowded = int(crowded[i])
            recipe = self._options.recipe
            # Of latents, what finds no slot are single blocks, and the answer goes on.
            full = crowded[i] and recipe.when_full == "end" and recipe.projector is None
            if full and row.finish is None:
                text += row.end("cache_full")
            if new or text:
                yield Event(
                    "text", row=row.request.row, text=text, tokens=new, progress=self._progress()
                )
            if row.finish is not None:
                yield self._done(i)

    def end_all(self, reason: FinishReason) -> Iterator[Event]:
        """End every row that still runs."""
        for i, row in enumerate(self.rows):
            if row.finish is None:
                text = row.end(reason)
                if text:
                    yield Event("text", row=row.request.row, text=text, progress=self._progress())
                yield self._done(i)

    def _done(self, i: int) -> Event:
        row = self.rows[i]
        text, reasoning = row.split()
        result = Result(
            text=text,
            tokens=tuple(row.tokens),
            finish_reason=row.finish,
            prompt_tokens=len(row.request.ids),
            reasoning=reasoning,
            report=report(self._lm, self._options, self._planned, self._clock, self._log[i], row),
            error=row.error,
            history=self._log[i].history(self._options.recipe, len(row.request.ids)),
        )
        return Event("done", row=row.request.row, result=result)

    def _progress(self) -> Progress:
        logs = self._log
        return Progress(
            generated=sum(len(row.tokens) for row in self.rows),
            limit=sum(row.request.max_new for row in self.rows),
            tokens_per_s=self._clock.tokens_per_s(),
            live_tokens=round(sum(log.live_tokens for log in logs)),
            logical_tokens=sum(log.logical for log in logs),
            kv_bytes=sum(log.live_bytes for log in logs),
            full_bytes=sum(log.full_bytes for log in logs),
        )
