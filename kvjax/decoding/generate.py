"""Prompts in, answers out."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from kvjax.cache import plan
from kvjax.cache.fitting import plan_of_longest
from kvjax.cache.plan import Plan
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.events import Event, Result
from kvjax.decoding.loop import decode_all
from kvjax.decoding.requests import (
    Options,
    Prompt,
    Request,
    check_model,
    listed,
    read_prompts,
    with_special_stops,
)
from kvjax.errors import KvjaxError, UsageError
from kvjax.loading import LanguageModel
from kvjax.memory import device_memory
from kvjax.recipes import Recipe, full
from kvjax.sharding import data_groups, shards


def generate(lm: LanguageModel, prompts: Sequence[Prompt], **options) -> list[Result]:
    """Decode an answer to every prompt.

    Args:
        lm: what ``kvjax.load`` returned.
        prompts: strings, chat message lists or token-id lists.
        **options: those of ``kvjax.stream``.

    Returns:
        One result a prompt, in their order; with several samples, one after the other. A prompt
        that cannot be decoded among several, or for which the memory is too small, has
        ``finish_reason == "error"``.

    Raises:
        KvjaxError: an option cannot be used, no prompt fits the memory, or the only prompt fails.
    """
    events = stream(lm, prompts, **options)
    done = [event for event in events if event.kind == "done"]
    return [event.result for event in sorted(done, key=lambda event: (event.row, event.sample))]


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
    samples: int = 1,
    batch_size: int = 8,
    chunk: int = 16,
    system_prompt: str | None = None,
    chat: bool = True,
    thinking: bool | None = None,
    repetition_stop: bool = True,
    stop_ids: Sequence[int] | None = None,
    stop_texts: Sequence[str] = (),
    kernel: Literal["mosaic", "triton", "xla"] | None = None,
    memory_bytes: int | None = None,
    cache: Conversation | None = None,
    keep_cache: bool = False,
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
        samples: answers a prompt, which share its reading; the first is what one alone would be.
        batch_size: rows decoded together; where one ends, the next prompt is read into it.
        chunk: tokens decoded between two looks of the host.
        system_prompt: put before messages that have no system message.
        chat: False passes strings to the model as they are.
        thinking: switches a template's thinking block on or off; None leaves it to the template.
        repetition_stop: end a row that has fallen into a loop.
        stop_ids: tokens that end a row; those of the model if None.
        stop_texts: texts that end a row where they begin, in its thinking block as well; the name
            of a special token ends it at that token.
        kernel: what computes attention while decoding; None takes the GPU's kernel where it can.
        memory_bytes: what weights, cache and reading prompts may take; None: what the device has.
            Where that is too little for ``batch_size`` rows as long as the longest can get, a
            prompt waits until there are pages for it.
        cache: a conversation to go on from, ``Result.cache`` of a run or what ``kvjax.load_cache``
            returned. The only prompt is its next turn, which the chat template puts behind it; an
            empty one lets the answer go on. ``recipe`` is the conversation's.
        keep_cache: let ``Result.cache`` of the only answer be what can be gone on from.
        should_stop: asked before every chunk; True ends every row as ``interrupted``.

    Yields:
        Phases as they begin, text as it comes (interleaved over rows), and each row's result.

    Raises:
        KvjaxError: an option cannot be used, no prompt fits the memory, or the only prompt fails.
    """

    def default(value, name, neutral):
        own = getattr(lm.defaults, name)
        return value if value is not None else neutral if own is None else own

    if cache is not None or keep_cache:
        _check_conversation(prompts, samples, cache, system_prompt)
    if recipe is None:
        recipe = full() if cache is None else cache.recipe
    asked = Options(
        recipe=recipe,
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
        samples=samples,
        keep_cache=keep_cache,
    )
    check_model(asked.recipe, lm)
    if cache is not None:
        cache.check(lm, asked.recipe)
    options = with_special_stops(lm, asked)
    requests, errors = read_prompts(lm, prompts, options, cache)
    for row, error in errors.items():
        yield from _failed(Request(row, (), 0, False), error, samples)
    if not requests:
        return
    at_once = min(batch_size, samples * len(requests))
    rows = -(-at_once // data_groups(lm.mesh))
    # What a conversation has read since its prompt is kept as an answer is.
    new = max(len(request.ids) - request.prompt for request in requests) + max_new_tokens
    lengths = [request.prompt for request in requests]

    def planned(prompt_tokens: int, rows: int = rows) -> Plan:
        return plan(
            lm.config,
            options.recipe,
            batch_size=rows,
            prompt_tokens=prompt_tokens,
            max_new_tokens=new,
            dtype=lm.dtype,
            parameter_bytes=lm.nbytes,
            memory_bytes=device_memory() if memory_bytes is None else memory_bytes,
            parks=samples > 1,
            tp=shards(lm.mesh),
            shortest_prompt=min(lengths),
        )

    longest, taken = plan_of_longest(lm.config, lengths, new, planned)
    admitted = []
    for request in requests:
        if request.prompt > longest:
            yield from _failed(request, planned(request.prompt, rows=1).refusal(), samples)
            continue
        admitted += [dataclasses.replace(request, sample=sample) for sample in range(samples)]
    alone = samples * len(prompts) == 1
    yield from decode_all(lm, admitted, taken, options, should_stop, alone=alone)


def _check_conversation(
    prompts: Sequence[Prompt], samples: int, cache: Conversation | None, system_prompt: str | None
) -> None:
    """Refuse what a conversation cannot have.

    Raises:
        UsageError: several answers, or another beginning.
    """
    name = "keep_cache" if cache is None else "cache"
    answers = samples * len(prompts)
    if answers != 1:
        raise UsageError(f"{name} is for one prompt and one answer, got {answers} answers")
    if cache is not None and system_prompt is not None:
        raise UsageError("system_prompt has no effect on a conversation that has begun: drop it")


def _failed(request: Request, error: KvjaxError, samples: int) -> Iterator[Event]:
    """The end of a request that has not begun, in all its samples."""
    result = Result("", (), "error", len(request.ids), error=str(error))
    for sample in range(samples):
        yield Event("done", row=request.row, result=result, sample=sample)
