"""The loop on the host: dispatches chunks, and reads each while the next one runs."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import numpy as np

from kvjax.cache import plan
from kvjax.cache.plan import Plan, padded_prompt
from kvjax.decoding.batch import Batch
from kvjax.decoding.chunk import ChunkOutput, DecodeState, decode_chunk, start_decoding
from kvjax.decoding.clock import Clock
from kvjax.decoding.events import Event, Result
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import prefill_prompts, seed_bits
from kvjax.decoding.requests import (
    Options,
    Prompt,
    Request,
    check_model,
    listed,
    read_prompts,
    with_special_stops,
)
from kvjax.decoding.sampling import Sampling
from kvjax.errors import NumericalError, UsageError
from kvjax.loading import LanguageModel
from kvjax.memory import device_memory
from kvjax.recipes import Recipe, full

NARROWEST = 1024
"""Slots attended at least; from there the width doubles, so that a long run compiles few chunks."""


def generate(lm: LanguageModel, prompts: Sequence[Prompt], **options) -> list[Result]:
    """Decode an answer to every prompt.

    Args:
        lm: what ``kvjax.load`` returned.
        prompts: strings, chat message lists or token-id lists.
        **options: those of ``kvjax.stream``.

    Returns:
        One result a prompt, in their order. A prompt that cannot be decoded among several has
        ``finish_reason == "error"``.

    Raises:
        KvjaxError: an option cannot be used, the batch does not fit, or the only prompt fails.
    """
    events = stream(lm, prompts, **options)
    results = {event.row: event.result for event in events if event.kind == "done"}
    return [results[row] for row in range(len(prompts))]


def stream(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    *,
    recipe: Recipe | None = None,
    max_new_tokens: int = 256,
    temperature: float | None = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    batch_size: int = 8,
    chunk: int = 16,
    system_prompt: str | None = None,
    chat: bool = True,
    thinking: bool | None = None,
    repetition_stop: bool = True,
    stop_ids: Sequence[int] | None = None,
    stop_texts: Sequence[str] = (),
    kernel: Literal["triton", "xla"] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Decode prompts, telling what happens as it happens.

    Args:
        lm: what ``kvjax.load`` returned.
        prompts: strings, chat message lists or token-id lists. A string goes through the model's
            chat template as one user message.
        recipe: how the cache is kept; ``kvjax.recipes.full()`` if None.
        max_new_tokens: tokens to choose at most in each row.
        temperature: 0 is greedy; None takes the model's own default, as do the three filters.
        top_k: sample among the ``top_k`` most likely tokens; 0 means all.
        top_p: sample among the fewest tokens whose mass reaches ``top_p``.
        min_p: sample among the tokens at least ``min_p`` times as likely as the likeliest.
        seed: of the samples. A row's samples depend on the seed and on the row alone.
        batch_size: rows decoded together.
        chunk: tokens decoded between two looks of the host.
        system_prompt: put before messages that have no system message.
        chat: False passes strings to the model as they are.
        thinking: switches a template's thinking block on or off; None leaves it to the template.
        repetition_stop: end a row that has fallen into a loop.
        stop_ids: tokens that end a row; those of the model if None.
        stop_texts: texts that end a row where they begin, in its thinking block as well; the name
            of a special token ends it at that token.
        kernel: what computes attention while decoding; None takes the GPU's kernel where it can.
        should_stop: asked after every chunk; True ends every row as ``interrupted``.

    Yields:
        Phases as they begin, text as it comes (interleaved over rows), and each row's result.

    Raises:
        KvjaxError: an option cannot be used, the batch does not fit, or the only prompt fails.
    """

    def default(value, name, neutral):
        own = getattr(lm.defaults, name)
        return value if value is not None else neutral if own is None else own

    asked = Options(
        recipe=recipe or full(),
        max_new_tokens=max_new_tokens,
        temperature=default(temperature, "temperature", 0.0),
        top_k=default(top_k, "top_k", 0),
        top_p=default(top_p, "top_p", 1.0),
        min_p=default(min_p, "min_p", 0.0),
        seed=seed,
        batch_size=batch_size,
        chunk=chunk,
        system_prompt=system_prompt,
        chat=chat,
        thinking=thinking,
        repetition_stop=repetition_stop,
        stop_ids=listed("stop_ids", default(stop_ids, "stop_ids", ())),
        stop_texts=(stop_texts,)
        if isinstance(stop_texts, str)
        else listed("stop_texts", stop_texts),
        kernel=kernel,
    )
    check_model(asked.recipe, lm)
    options = with_special_stops(lm, asked)
    requests, errors = read_prompts(lm, prompts, options)
    for row, error in errors.items():
        failed = Result("", (), "error", 0, error=str(error))
        yield Event("done", row=row, result=failed)
    rows = min(batch_size, len(requests))
    batches = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    # All of them before the first: a batch that cannot fit must not end a run half way.
    plans = [_plan(lm, batch, rows, options) for batch in batches]
    alone = len(prompts) == 1
    for batch, planned in zip(batches, plans, strict=True):
        if should_stop():
            yield from _not_begun(batch)
        else:
            yield from _decode_batch(lm, batch, planned, options, should_stop, alone)


def _not_begun(requests: list[Request]) -> Iterator[Event]:
    for request in requests:
        result = Result("", (), "interrupted", len(request.ids))
        yield Event("done", row=request.row, result=result)


def _plan(lm: LanguageModel, requests: list[Request], rows: int, options: Options) -> Plan:
    """What a batch of ``rows`` rows will allocate.

    Raises:
        CapacityError: it does not fit.
    """
    planned = plan(
        lm.config,
        options.recipe,
        batch_size=rows,
        prompt_tokens=max(len(request.ids) for request in requests),
        max_new_tokens=options.max_new_tokens,
        dtype=lm.dtype,
        parameter_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(lm.model)),
        memory_bytes=device_memory(),
    )
    planned.check()
    return planned


def _decode_batch(
    lm: LanguageModel,
    requests: list[Request],
    planned: Plan,
    options: Options,
    should_stop: Callable[[], bool],
    alone: bool,
) -> Iterator[Event]:
    """Decode the requests together; rows of the plan beyond them stay empty.

    Raises:
        NumericalError: the logits of the only prompt (``alone``) are not finite.
    """
    options = dataclasses.replace(options, recipe=planned.recipe)
    with Clock() as clock:
        batch = Batch(lm, requests, options, planned, clock)
        yield Event("phase", phase="prefill")
        state, sampling, output = _prefill(lm, requests, options, planned)
        yield from batch.take(output)
        yield Event("phase", phase="decode")
        yield from _decode(lm, state, sampling, batch, requests, options, should_stop)
    if batch.numerical_error and alone:
        raise NumericalError(batch.numerical_error)


def _prefill(
    lm: LanguageModel, requests: list[Request], options: Options, planned: Plan
) -> tuple[DecodeState, Sampling | None, ChunkOutput]:
    """Read all prompts, a chunk at a time, and choose the first tokens."""
    rows = planned.geometry.rows
    max_new = np.zeros(rows, np.int32)
    max_new[: len(requests)] = [request.max_new for request in requests]
    prompts = [request.ids for request in requests]
    cache, logits = prefill_prompts(lm, prompts, planned.geometry, options.recipe, options.seed)
    sampling = Sampling.create(
        rows,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )
    state, output = start_decoding(cache, logits, sampling, max_new, stop_ids=options.stop_ids)
    return state, sampling, output


def _decode(
    lm: LanguageModel,
    state: DecodeState,
    sampling: Sampling | None,
    batch: Batch,
    requests: list[Request],
    options: Options,
    should_stop: Callable[[], bool],
) -> Iterator[Event]:
    """Dispatch chunk after chunk, each before the last one's tokens are read."""
    longest = max(len(request.ids) for request in requests)
    last = longest + max(request.max_new for request in requests) - 1
    # All prompts of a bucket attend to one width at first, so that they share one program.
    recipe = options.recipe
    steps = options.chunk if recipe.keeps_all else recipe.tick
    first = padded_prompt(longest) + steps
    pending, done = None, 0
    while batch.running():
        if should_stop():
            yield from batch.end_all("interrupted")
            return
        dispatched = None
        if longest < last:
            if not recipe.keeps_all:
                state = maintain(
                    state,
                    batch.compressing(),
                    seed_bits(options.seed),
                    config=lm.config,
                    recipe=recipe,
                    done=done,
                    model=lm.model,
                )
            longest += steps
            done += steps
            try:
                state, dispatched = decode_chunk(
                    lm.model,
                    state,
                    sampling,
                    batch.halted(),
                    steps=steps,
                    stop_ids=options.stop_ids,
                    width=_width(max(longest, first)),
                    recipe=recipe,
                    kernel=options.kernel,
                )
            except NotImplementedError as error:
                raise UsageError(f"kernel {options.kernel} cannot do this: {error}") from error
        if pending is not None:
            yield from batch.take(pending)
        pending = dispatched


def _width(tokens: int) -> int:
    """Slots that hold ``tokens``, rounded up so that a long run compiles few chunks."""
    return max(NARROWEST, 1 << (tokens - 1).bit_length())
