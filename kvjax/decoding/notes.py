"""The rows' text as it is noted, and the paragraphs that it comes to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.cache import KVCache
from kvjax.cache.ledger import Ledger
from kvjax.compress.selection import Rows
from kvjax.loading import LanguageModel
from kvjax.matching.segments import newline_flags, segments
from kvjax.recipes import Recipe

INSTRUCTION = "\n\nRepeat the previous context exactly.\n\n"


def with_vocabulary(ledger: Ledger, lm: LanguageModel) -> Ledger:
    """The ledger with what the model's tokenizer says."""
    flags = _newlines(lm.tokenizer)
    instruction = jnp.asarray(lm.tokenizer.encode(INSTRUCTION, starts=False), jnp.int32)
    known = ledger.newlines.at[: len(flags)].set(flags)
    return dataclasses.replace(ledger, newlines=known, instruction=instruction)


@functools.lru_cache(maxsize=4)
def _newlines(tokenizer) -> np.ndarray:
    return newline_flags(tokenizer.texts())


def note_prompt(
    cache: KVCache, tokens: Int[Array | np.ndarray, "B T"], count: Int[Array | np.ndarray, " B"]
) -> KVCache:
    """The cache with tokens in its ledger that are about to be read."""
    if cache.ledger is None:
        return cache
    return dataclasses.replace(cache, ledger=_note(cache.ledger, cache.length, tokens, count))


@jax.jit
def _note(ledger: Ledger, length, tokens, count) -> Ledger:
    pos = length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return ledger.note(tokens, pos, pos < (length + count)[:, None])


def with_segments(rows: Rows, ledger: Ledger | None, recipe: Recipe) -> Rows:
    """Where the rows' paragraphs are, if the recipe's selector looks for them."""
    if not recipe.needs_segments:
        return rows
    segment = _segments(ledger.flags, rows.length, recipe=recipe)
    return dataclasses.replace(rows, segment=segment)


@functools.partial(jax.jit, static_argnames=("recipe",))
def _segments(flags, length, *, recipe: Recipe):
    return segments(flags, length, recipe.selector.least, recipe.selector.merge)
