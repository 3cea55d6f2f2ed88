"""Emptying rows and reading prompts into them, while others are in the middle of an answer."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int

from kvjax.cache import KVCache, put_rows, take_rows
from kvjax.cache.reset import reset_counters, reset_layer
from kvjax.cache.rows import blank_row, copy_rows, with_pages
from kvjax.decoding.chunk import ChunkOutput, DecodeState, put_decoding, start_decoding
from kvjax.decoding.prompts import prefill_prompts
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.sampling import Sampling
from kvjax.loading import LanguageModel
from kvjax.sharding import per_shard


@dataclasses.dataclass(frozen=True)
class Parked:
    """A prompt that has been read, for rows that are to go on from it.

    Attributes:
        cache: a row beside those of a state; its pages are those of the state's cache, whichever
            that is by now.
        logits: after its last token [1, V].
    """

    cache: KVCache
    logits: jax.Array


def empty_rows(
    state: DecodeState, rows: Sequence[int], lent: Sequence[int] | None = None
) -> DecodeState:
    """Give back all pages of some rows; the others are not touched.

    Args:
        state: the layers of its cache are donated.
        rows: which ones.
        lent: pages that are not the rows' own, as for ``kvjax.cache.rows.copy_rows``.
    """
    at = _part(state, rows)
    cache = _emptied(state.cache if at is None else take_rows(state.cache, at), lent)
    if at is not None:
        cache = put_rows(state.cache, cache, at)
    return dataclasses.replace(state, cache=cache)


def fill_rows(
    lm: LanguageModel,
    state: DecodeState,
    rows: Sequence[int],
    requests: Sequence[Request],
    options: Options,
) -> tuple[DecodeState, ChunkOutput]:
    """Read a prompt into each of some empty rows and choose its first token.

    The other rows are not touched. Programs are those of the number of rows and of the prompts'
    buckets.

    Args:
        state: donated.
        rows: which ones.
        requests: whose prompts, one a row.

    Returns:
        The state, and what the host reads of the rows, in their order.
    """
    at = _part(state, rows)
    cache = state.cache if at is None else take_rows(state.cache, at)
    part, output = _start(*_read(lm, cache, requests, options), requests, options)
    return part if at is None else put_decoding(state, part, at), output


def park_prompt(
    lm: LanguageModel, state: DecodeState, request: Request, options: Options
) -> tuple[DecodeState, Parked]:
    """Read a prompt beside the rows of a state (donated), which are not touched."""
    cache, logits = _read(lm, blank_row(state.cache), [request], options)
    state = dataclasses.replace(state, cache=with_pages(state.cache, cache))
    return state, Parked(cache, logits)


def continue_prompt(
    state: DecodeState,
    row: int,
    parked: Parked,
    request: Request,
    options: Options,
    lent: Sequence[int],
) -> tuple[DecodeState, ChunkOutput]:
    """Let an empty row go on from a prompt that has been read; otherwise like ``fill_rows``.

    Args:
        lent: pages that the row shares with the prompt, as for ``kvjax.cache.rows.copy_rows``.
    """
    cache = copy_rows(with_pages(parked.cache, state.cache), lent)
    part, output = _start(cache, parked.logits, [request], options)
    return put_decoding(state, part, np.array([row], np.int32)), output


def drop_prompt(state: DecodeState, parked: Parked) -> DecodeState:
    """Give back the pages of a prompt that no row will go on from, and none shares."""
    cache = _emptied(with_pages(parked.cache, state.cache))
    return dataclasses.replace(state, cache=with_pages(state.cache, cache))


def lent_pages(lm: LanguageModel, options: Options, prompt_tokens: int) -> tuple[int, ...]:
    """For every layer the pages of a KV head that rows can share with their prompt.

    Those are the ones that it fills, where nothing is ever evicted: every other page is written
    to in place, in the course of an answer, and is a copy in every row.
    """
    shared = prompt_tokens // options.recipe.page_size if options.recipe.keeps_all else 0
    return tuple(shared if window is None else 0 for window in lm.config.windows)


def _part(state: DecodeState, rows: Sequence[int]) -> Int[np.ndarray, " K"] | None:
    """The rows as an index; None where they are all that there are."""
    return None if len(rows) == len(state.left) else np.asarray(rows, np.int32)


def _read(
    lm: LanguageModel, cache: KVCache, requests: Sequence[Request], options: Options
) -> tuple[KVCache, jax.Array]:
    """Read the prompts a chunk at a time; returns the logits after them, too."""
    prompts = [request.ids for request in requests]
    return prefill_prompts(lm, cache, prompts, options.recipe, options.seed)


def _start(
    cache: KVCache, logits: jax.Array, requests: Sequence[Request], options: Options
) -> tuple[DecodeState, ChunkOutput]:
    """Choose the first tokens."""
    max_new = np.array([request.max_new for request in requests], np.int32)
    sampling = sampling_of([request.sample for request in requests], options)
    return start_decoding(cache, logits, sampling, max_new, stop_ids=options.stop_ids)


def _emptied(cache: KVCache, lent: Sequence[int] | None = None) -> KVCache:
    every = np.ones(len(cache.length), bool)
    layers = tuple(
        _reset_layer(layer, every, np.int32(count))
        for layer, count in zip(cache.layers, lent or [0] * len(cache.layers), strict=True)
    )
    rest = _reset_counters(dataclasses.replace(cache, layers=()), every)
    return dataclasses.replace(rest, layers=layers)


def sampling_of(samples: Sequence[int], options: Options) -> Sampling | None:
    """How rows sample, each of which draws one of its prompt's samples."""
    return Sampling.create(
        len(samples),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        samples=samples if options.samples > 1 else None,
    )


_reset_layer = jax.jit(per_shard(reset_layer), donate_argnums=0)
_reset_counters = jax.jit(reset_counters)
