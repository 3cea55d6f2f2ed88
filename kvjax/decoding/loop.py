"""The loop on the host: dispatches chunks, and reads each while the next one runs."""

import collections
import dataclasses
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from kvjax.cache import Geometry
from kvjax.cache.plan import Plan, padded_prompt
from kvjax.decoding.batch import Batch, Flight
from kvjax.decoding.chunk import ChunkOutput, DecodeState, decode_chunk, idle_state
from kvjax.decoding.clock import Clock
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.events import Event, Result
from kvjax.decoding.fill import (
    continue_prompt,
    drop_prompt,
    empty_rows,
    fill_rows,
    park_prompt,
    sampling_of,
)
from kvjax.decoding.kernel import kernel_in_errors
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import seed_bits
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.resume import conversation, resume
from kvjax.decoding.sampling import Sampling
from kvjax.errors import NumericalError
from kvjax.loading import LanguageModel
from kvjax.sharding import groups, on

DISPATCHED = None
NARROWEST = 1024
"""Slots attended at least; from there the width doubles, so that a long run compiles few chunks."""


def decode_all(
    lm: LanguageModel,
    requests: list[Request],
    planned: Plan,
    options: Options,
    should_stop: Callable[[], bool],
    *,
    alone: bool = False,
) -> Iterator[Event]:
    """Decode requests in the rows of a plan; one that ends makes room for the next.

    Rows start and end at different times, but all step together, and every row's work on its cache
    is counted from its own first token. A request's tokens are the same as if it were alone. Data
    parallel groups of devices have such rows each, and take requests from the same queue.

    Args:
        should_stop: asked before every chunk and before rows are filled; True ends every request
            as ``interrupted``.
        alone: whether the only request fails by an error instead of a result.

    Raises:
        NumericalError: the logits of the only request are not finite.
    """
    asked, options = options.recipe, dataclasses.replace(options, recipe=planned.recipe)

    def keep(own: LanguageModel, state: DecodeState, result: Result) -> Result:
        with on(own.mesh):
            kept = conversation(own, state, requests[0], result.tokens, options, asked)
        return dataclasses.replace(result, cache=kept)

    with Clock() as clock:
        waiting, batches = collections.deque(requests), []
        for own in groups(lm):
            batches.append(Batch(own, waiting, options, planned, clock, batches))
        kept = keep if options.keep_cache else None
        runs = [_run(b.lm, b, planned, options, should_stop, kept) for b in batches]
        yield from _in_turns(runs)
    errors = [batch.numerical_error for batch in batches if batch.numerical_error]
    if errors and alone:
        raise NumericalError(errors[0])


def _in_turns(runs: list[Iterator[Event | None]]) -> Iterator[Event]:
    """The events of several groups of devices, each of which is kept busy in its turn."""
    turn, told = collections.deque(runs), set()
    while turn:
        run = turn.popleft()
        for event in run:
            if event is DISPATCHED:
                turn.append(run)
                break
            if event.kind != "phase" or event.phase not in told:
                told.add(event.phase)
                yield event


def _run(
    lm: LanguageModel,
    batch: Batch,
    planned: Plan,
    options: Options,
    should_stop: Callable[[], bool],
    keep: Callable[[LanguageModel, DecodeState, Result], Result] | None,
) -> Iterator[Event | None]:
    """Fill free rows, dispatch a chunk, and read what was dispatched before it.

    Args:
        keep: puts what the only row has become into its result, where that is asked for.

    Yields:
        Events, and ``DISPATCHED`` before it reads, which waits for the devices.
    """
    state, sampling = None, sampling_of(batch.samples(), options)
    dispatched: list[tuple[ChunkOutput, list[Flight | None]]] = []
    phase = ""

    def told(events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            result = event.result
            if keep and result and result.tokens and not result.error:
                event = dataclasses.replace(event, result=keep(lm, state, result))
            yield event

    while batch.busy():
        if should_stop():
            for output, flights in dispatched:  # what has been decoded is not lost
                yield from told(batch.take(output, flights))
            yield from told(batch.end_all("interrupted"))
            return
        if state is None:
            phase = "prefill"
            yield Event("phase", phase=phase)
            with on(lm.mesh):
                state = idle_state(empty_cache(lm, planned.geometry))
        idle, filled = not dispatched, []
        with on(lm.mesh):
            over = batch.vacate()
            for rows in _together(list(over), planned):
                state = empty_rows(state, rows, over[rows[0]].lent)
            for parked in batch.unpark():
                state = drop_prompt(state, parked)
            for rows in _together(batch.admit(), planned):
                flights = [batch.flights[row] for row in rows]
                state, outputs = _fill(lm, state, batch, rows, flights, options)
                filled += [(output, flights) for output in outputs]
                if options.samples > 1:
                    sampling = sampling_of(batch.samples(), options)
        if idle and filled:  # the device has nothing else to do: tell the first tokens at once
            yield DISPATCHED
            for output, flights in filled:
                yield from told(batch.take(output, flights))
            continue
        before, dispatched = [*dispatched, *filled], []
        if batch.stepping():
            if phase == "prefill":
                phase = "decode"
                yield Event("phase", phase=phase)
            with on(lm.mesh):
                state, output = _chunk(lm, state, sampling, batch, options)
            dispatched.append((output, list(batch.flights)))
        yield DISPATCHED
        for output, flights in before:
            yield from told(batch.take(output, flights))


def _fill(
    lm: LanguageModel,
    state: DecodeState,
    batch: Batch,
    rows: list[int],
    flights: list[Flight],
    options: Options,
) -> tuple[DecodeState, list[ChunkOutput]]:
    """Read prompts into rows, or let a row go on from one that has been read."""
    requests = [flight.row.request for flight in flights]
    if requests[0].past is not None:
        state, first = resume(lm, state, requests[0], options)
        if first is None:
            batch.mark_start(flights[0])
        return state, [] if first is None else [first]
    prompt = batch.prompts.get(requests[0].row)
    if prompt is None:
        state, output = fill_rows(lm, state, rows, requests, options)
        return state, [output]
    ((row,), (request,), (flight,)) = rows, requests, flights
    if prompt.parked is None:
        state, prompt.parked = park_prompt(lm, state, request, options)
    state, output = continue_prompt(state, row, prompt.parked, request, options, flight.lent)
    return state, [output]


def _together(rows: list[int], planned: Plan) -> list[list[int]]:
    """The rows that one program works on: all that there are, or one after the other."""
    geometry = planned.geometry
    together = geometry.longest is None and len(rows) == geometry.rows
    return [rows] if together else [[row] for row in rows]


def _chunk(
    lm: LanguageModel,
    state: DecodeState,
    sampling: Sampling | None,
    batch: Batch,
    options: Options,
) -> tuple[DecodeState, ChunkOutput]:
    """Work on the rows' caches, where there is any to do, and decode a chunk of tokens."""
    recipe, stepping = options.recipe, batch.stepping()
    steps = options.chunk if recipe.keeps_all else recipe.tick
    longest = max(_reach(flight, steps) for flight in stepping)
    shape = {"steps": steps, "width": width_of(longest, batch.geometry)}
    halted = batch.halted()
    begun = 0 if recipe.keeps_all else stepping[0].steps % recipe.tick
    if begun:  # the only row, which goes on from a conversation
        batch.step(steps - begun)
        return _rest_of_tick(lm, state, sampling, halted, options, steps - begun, **shape)
    if not recipe.keeps_all:
        state = maintain(
            state,
            batch.compressing(),
            seed_bits(options.seed),
            config=lm.config,
            recipe=recipe,
            done=batch.done(),
            model=lm.model,
        )
    batch.step(steps)
    return _decode(lm, state, sampling, halted, options, **shape)


def _rest_of_tick(
    lm: LanguageModel,
    state: DecodeState,
    sampling: Sampling | None,
    halted: np.ndarray,
    options: Options,
    count: int,
    **shape: int,
) -> tuple[DecodeState, ChunkOutput]:
    """Decode ``count`` tokens, up to the end of a tick, from where on chunks are whole ticks."""
    left = state.left
    state = dataclasses.replace(state, left=jnp.minimum(left, count))
    state, output = _decode(lm, state, sampling, halted, options, **shape)
    ended = ~state.finite | jnp.isin(state.token, jnp.asarray(options.stop_ids, jnp.int32))
    left = jnp.where(ended, 0, jnp.maximum(left - count, 0))
    return dataclasses.replace(state, left=left), output


def _decode(
    lm: LanguageModel,
    state: DecodeState,
    sampling: Sampling | None,
    halted: np.ndarray,
    options: Options,
    **shape: int,
) -> tuple[DecodeState, ChunkOutput]:
    """``decode_chunk`` as the options have it.

    Raises:
        UsageError: the kernel that was asked for cannot do it.
    """
    with kernel_in_errors(options.kernel):
        return decode_chunk(
            lm.model,
            state,
            sampling,
            halted,
            stop_ids=options.stop_ids,
            recipe=options.recipe,
            kernel=options.kernel,
            **shape,
        )


def _reach(flight: Flight, steps: int) -> int:
    """Slots that a row can need in the next chunk.

    All prompts of a bucket attend to one width at first, so that they share one program.
    """
    return max(flight.length, padded_prompt(len(flight.row.request.ids))) + steps


def width_of(tokens: int, geometry: Geometry) -> int:
    """Slots that hold ``tokens``, rounded up so that a long run compiles few chunks.

    Not beyond what a table has: that would cut nothing off and be another program.
    """
    return min(max(NARROWEST, 1 << (tokens - 1).bit_length()), geometry.widest)
