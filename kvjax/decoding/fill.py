"""Emptying rows and reading prompts into them, while others are in the middle of an answer."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.cache import KVCache, put_rows, take_rows
from kvjax.cache.plan import PREFILL_CHUNK, bucket
from kvjax.cache.slots import reset_counters, reset_layer
from kvjax.decoding.chunk import ChunkOutput, DecodeState, put_decoding, start_decoding
from kvjax.decoding.prefill import prefill_chunk
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.sampling import Sampling
from kvjax.loading import LanguageModel


def empty_rows(state: DecodeState, rows: Sequence[int]) -> DecodeState:
    """Give back all pages of some rows; the others are not touched.

    Args:
        state: the layers of its cache are donated.
        rows: which ones.
    """
    at = _part(state, rows)
    cache = state.cache if at is None else take_rows(state.cache, at)
    every = np.ones(len(rows), bool)
    layers = tuple(_reset_layer(layer, every) for layer in cache.layers)
    rest = _reset_counters(dataclasses.replace(cache, layers=()), every)
    cache = dataclasses.replace(rest, layers=layers)
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
    part, output = _read(lm, cache, requests, options)
    return part if at is None else put_decoding(state, part, at), output


def _part(state: DecodeState, rows: Sequence[int]) -> Int[np.ndarray, " K"] | None:
    """The rows as an index; None where they are all that there are."""
    return None if len(rows) == len(state.left) else np.asarray(rows, np.int32)


def _read(
    lm: LanguageModel, cache: KVCache, requests: Sequence[Request], options: Options
) -> tuple[DecodeState, ChunkOutput]:
    """Read the prompts a chunk at a time, and choose the first tokens."""
    rows = len(requests)
    lengths = np.array([len(request.ids) for request in requests], np.int32)
    max_new = np.array([request.max_new for request in requests], np.int32)
    logits = jnp.zeros((rows, lm.config.vocab_size), jnp.float32)
    for start in range(0, lengths.max(), PREFILL_CHUNK):
        count = np.clip(lengths - start, 0, PREFILL_CHUNK)
        tokens = np.zeros((rows, bucket(int(count.max()))), np.int32)
        for i, request in enumerate(requests):
            tokens[i, : count[i]] = request.ids[start : start + PREFILL_CHUNK]
        cache, logits = prefill_chunk(
            lm.model,
            cache,
            logits,
            tokens,
            count,
            options.seed_bits,
            recipe=options.recipe,
            longest=start + int(count.max()),
        )
    sampling = sampling_of(rows, options)
    return start_decoding(cache, logits, sampling, max_new, stop_ids=options.stop_ids)


def sampling_of(rows: int, options: Options) -> Sampling | None:
    """How so many rows sample."""
    return Sampling.create(
        rows,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
    )


_reset_layer = jax.jit(reset_layer, donate_argnums=0)
_reset_counters = jax.jit(reset_counters)
