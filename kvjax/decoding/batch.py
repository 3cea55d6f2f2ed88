"""The host's side of the rows in flight: who decodes where, and what each request took."""

import collections
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import Geometry
from kvjax.cache.fitting import pages_of_row, pool_pages
from kvjax.cache.plan import Plan
from kvjax.decoding.chunk import ChunkOutput
from kvjax.decoding.clock import Clock, Lap
from kvjax.decoding.events import Event, FinishReason, Progress, Result
from kvjax.decoding.fill import Parked, lent_pages
from kvjax.decoding.maintain import IDLE
from kvjax.decoding.report import BytesLog, report
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from kvjax.loading import LanguageModel


@dataclasses.dataclass
class Flight:
    """A request that has got a row.

    Attributes:
        row: its tokens and text.
        log: what its cache held.
        lap: its times.
        pages: that it can own of every class of every layer, at most.
        lent: for every layer, the pages of a KV head that are its prompt's instead.
        done: decode steps dispatched for it.
    """

    row: Row
    log: BytesLog
    lap: Lap
    pages: np.ndarray
    lent: tuple[int, ...]
    done: int = 0

    @property
    def running(self) -> bool:
        """Whether the host has not seen its end."""
        return self.row.finish is None

    @property
    def needs_steps(self) -> bool:
        """Whether it can get more tokens than those that have been dispatched."""
        request = self.row.request
        return self.running and self.done < request.max_new - (not request.goes_on)

    @property
    def steps(self) -> int:
        """Steps that its cache has taken, from the end of its prompt on, once those are done."""
        return self.row.request.before + self.done

    @property
    def length(self) -> int:
        """Tokens that it has in the cache, at most, after what has been dispatched."""
        return len(self.row.request.ids) + self.done


@dataclasses.dataclass
class Prompt:
    """A prompt that several requests go on from.

    Attributes:
        pages: as a flight's.
        parked: what it is on the device, once it has been read.
    """

    pages: np.ndarray
    parked: Parked | None = None


class Batch:
    """Requests that share the rows of a plan: each takes a row when one is free.

    Attributes:
        lm: the model, on the devices that have the rows.
        flights: by row, whose pages it holds; None where it is empty.
        prompts: those that are or will be parked, by their number, where there are several samples.
        numerical_error: the last request's error whose logits were not finite.

    Args:
        waiting: the requests, for whichever batch has room first.
        together: all batches that take from these.
    """

    def __init__(
        self,
        lm: LanguageModel,
        waiting: collections.deque[Request],
        options: Options,
        planned: Plan,
        clock: Clock,
        together: list["Batch"],
    ):
        self.lm = lm
        self.flights: list[Flight | None] = [None] * planned.geometry.rows
        self.prompts: dict[int, Prompt] = {}
        self.numerical_error: str | None = None
        self._waiting, self._together = waiting, together
        self._unread: list[Flight] = []  # that have begun and whose end has not been seen
        self._limit = sum(request.max_new for request in waiting)
        self._generated = 0
        self._options, self._planned, self._clock = options, planned, clock
        self._lap = Lap(clock)

    def busy(self) -> bool:
        """Whether any request is not finished."""
        return bool(self._waiting or self._unread)

    def vacate(self) -> dict[int, Flight]:
        """Rows whose pages are to go back, since others wait and no step will need them.

        A row's last token need not have been read by then: it is enough that it is dispatched.
        """
        over = {}
        for row, flight in enumerate(self.flights):
            if self._waiting and flight is not None and not flight.needs_steps:
                self.flights[row] = None
                over[row] = flight
        return over

    def unpark(self) -> list[Parked]:
        """Prompts that nobody will go on from and nobody shares pages with any more."""
        if not self.prompts:
            return []
        needed = {request.row for request in self._waiting}
        needed |= {f.row.request.row for f in self.flights if f is not None and any(f.lent)}
        return [self.prompts.pop(row).parked for row in list(self.prompts) if row not in needed]

    def admit(self) -> list[int]:
        """Give empty rows to requests that wait, in their order; returns the rows.

        The next one waits until the pools have all the pages that it can come to own, so that no
        row that has begun ever lacks any.
        """
        rows = []
        for row, flight in enumerate(self.flights):
            if not self._waiting or flight is not None:
                continue
            request = self._waiting[0]
            pages, lent = self._pages(request, request.max_new), ()
            needed = pages
            if self._options.samples > 1:
                lent = lent_pages(self.lm, self._options, len(request.ids))
                if any(lent):  # there is one class a layer then
                    pages = pages - self.geometry.num_kv_heads * np.array(lent)
                prompt = self.prompts.get(request.row) or Prompt(self._pages(request, 0))
                needed = pages if request.row in self.prompts else pages + prompt.pages
            # Who has the pools alone begins in any case: nothing else will come free.
            shared = any(self.flights) or bool(self.prompts)
            if shared and (needed > self._free_pages()).any():
                break
            self._waiting.popleft()
            if self._options.samples > 1:
                self.prompts[request.row] = prompt
            own = Row(self.lm, request, self._options)
            log = BytesLog(self.geometry)
            self.flights[row] = new = Flight(own, log, Lap(self._clock), pages, lent)
            self._unread.append(new)
            rows.append(row)
        return rows

    def _pages(self, request: Request, new: int) -> np.ndarray:
        return pages_of_row(self.lm.config, self._planned, len(request.ids), new)

    def _free_pages(self) -> np.ndarray:
        """Pages of every class that nobody can come to own."""
        pools = pool_pages(self.geometry)
        owners = [*filter(None, self.flights), *self.prompts.values()]
        return pools - sum(owner.pages for owner in owners)

    def step(self, steps: int) -> None:
        """Count a chunk that is dispatched for all rows."""
        for flight in self.stepping():
            flight.done += steps

    def stepping(self) -> list[Flight]:
        """The requests that another chunk would bring tokens."""
        return [flight for flight in self.flights if flight is not None and flight.needs_steps]

    def samples(self) -> list[int]:
        """Which of its prompt's samples every row draws."""
        return [0 if flight is None else flight.row.request.sample for flight in self.flights]

    def halted(self) -> np.ndarray:
        """Rows that the host has ended; True for the empty ones too."""
        return np.array([flight is None or not flight.running for flight in self.flights])

    @property
    def geometry(self) -> Geometry:
        """Of the cache."""
        return self._planned.geometry

    def done(self) -> np.ndarray:
        """Steps that every row has taken."""
        running = [flight is not None and flight.needs_steps for flight in self.flights]
        steps = [IDLE if f is None else f.steps for f in self.flights]
        return np.where(running, steps, IDLE).astype(np.int32)

    def compressing(self) -> np.ndarray:
        """Rows in a phase of their answer in which the recipe selects tokens."""
        phases = self._options.recipe.compress
        return np.array([f is not None and f.row.phase in phases for f in self.flights])

    def mark_start(self, flight: Flight) -> None:
        """Count time from now on for a request whose first token comes with others."""
        for lap in (self._lap, flight.lap):
            lap.mark(0)

    def take(self, output: ChunkOutput, flights: list[Flight | None]) -> Iterator[Event]:
        """Read a chunk's output: waits for the device, then tells what each row got.

        Tokens behind a row's end are none of its own, and not counted.

        Args:
            flights: whose rows they are, of the output's.
        """
        tokens, real, finite = map(np.asarray, (output.tokens, output.real, output.finite))
        names = ("length", "slots", "pages", "crowded", "thoughts", "latents", "blocks")
        held = jax.tree.map(np.asarray, {name: getattr(output, name) for name in names})
        running = [(i, f) for i, f in enumerate(flights) if f is not None and f.running]
        chosen = [tokens[real[:, i], i].tolist() for i, _ in running]
        pushed = [flight.row.push(own) for (_, flight), own in zip(running, chosen, strict=True)]
        self._lap.mark(sum(len(new) for _, new in pushed))
        for (i, flight), (_, new) in zip(running, pushed, strict=True):
            flight.lap.mark(len(new))
            self._generated += len(new)
            flight.log.add(i, **held)
        progress = self._progress()
        for (i, flight), own, (text, new) in zip(running, chosen, pushed, strict=True):
            row, log = flight.row, flight.log
            # The last one was chosen from them: where the host ended the row before, it has none.
            if not finite[i] and len(new) == len(own):
                wide = "" if self.lm.dtype == jnp.float32 else "try --dtype float32, or "
                self.numerical_error = (
                    f"row {row.request.row}: the logits hold NaN or infinity after "
                    f"{len(row.tokens)} tokens; {wide}check the weights"
                )
                text += row.end("error", self.numerical_error)
            # Of latents, what finds no slot are single blocks, and the answer goes on.
            full = log.crowded and self._options.recipe.projector is None
            if full and row.finish is None:
                text += row.end("cache_full")
            if new or text:
                yield _text(row, text, new, progress)
            if row.finish is not None:
                yield self._end(flight)

    def end_all(self, reason: FinishReason) -> Iterator[Event]:
        """End every request that still runs or waits."""
        progress = self._progress()
        for flight in list(self._unread):
            text = flight.row.end(reason)
            if text:
                yield _text(flight.row, text, (), progress)
            yield self._end(flight)
        while self._waiting:
            yield _not_begun(self._waiting.popleft(), reason)

    def _end(self, flight: Flight) -> Event:
        self._unread.remove(flight)
        row, log = flight.row, flight.log
        if not log.lengths:
            return _not_begun(row.request, row.finish)
        text, reasoning = row.split()
        result = Result(
            text=text,
            tokens=tuple(row.tokens),
            finish_reason=row.finish,
            prompt_tokens=len(row.request.ids),
            reasoning=reasoning,
            report=report(self.lm, self._options, self._planned, flight.lap, log, row),
            error=row.error,
            history=log.history(self._options.recipe, row.request.prompt),
        )
        return _done(row.request, result)

    def _progress(self) -> Progress:
        """Of all rows together: too much to ask for each of them."""
        logs = [f.log for batch in self._together for f in batch.flights if f is not None]
        return Progress(
            generated=sum(batch._generated for batch in self._together),
            limit=self._limit,
            tokens_per_s=sum(batch._lap.tokens_per_s() for batch in self._together),
            live_tokens=round(sum(log.live_tokens for log in logs)),
            logical_tokens=sum(log.logical for log in logs),
            kv_bytes=sum(log.live_bytes for log in logs),
            full_bytes=sum(log.full_bytes for log in logs),
        )


def _text(row: Row, text: str, tokens: tuple[int, ...], progress: Progress) -> Event:
    request = row.request
    return Event(
        "text", request.row, text=text, tokens=tokens, progress=progress, sample=request.sample
    )


def _not_begun(request: Request, reason: FinishReason) -> Event:
    """Nothing of the answer has been read."""
    return _done(request, Result("", (), reason, len(request.ids)))


def _done(request: Request, result: Result) -> Event:
    return Event("done", row=request.row, result=result, sample=request.sample)
