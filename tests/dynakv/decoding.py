"""Adapters on disk, and given tokens through the cache that their recipes make."""

import dataclasses
import functools
import pathlib

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import KVCache, Plan, plan
from kvjax.decoding import prefill_chunk
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.forced import force_chunk
from kvjax.decoding.maintain import maintain
from kvjax.dynakv.adapter import Adapter, save_adapter
from kvjax.dynakv.spectrum import Spectra
from tests.dynakv.tiny import WIDTH, fitted, perturbed, tiny

PAGE, BLOCKS, BUCKET, TICK = 8, 4, 32, 16
OPTIONS = {"blocks": BLOCKS, "page_size": PAGE}
BLOCK = WIDTH // BLOCKS
PROMPTS, TOTAL = (50, 37), 80  # tokens of each row's prompt, in two pieces, and of every row


@functools.cache
def spectra(family: str = "llama", layers: int = 2, **settings) -> Spectra:
    """Gates that give tokens ranks from one block to all, and bases that are not orthogonal."""
    return perturbed(fitted(tiny(family, layers), tilt=0.0, **settings), gate=1.5)


@dataclasses.dataclass(frozen=True)
class Run:
    """Tokens through the cache of a recipe."""

    lm: kvjax.LanguageModel
    spectra: Spectra
    recipe: kvjax.recipes.Recipe
    ids: np.ndarray
    logits: np.ndarray
    cache: KVCache


def saved(folder: pathlib.Path, found: Spectra, lm: kvjax.LanguageModel, **measured) -> str:
    save_adapter(Adapter(found, lm.fingerprint, lm.source, {}, measured), folder)
    return str(folder)


def planned(
    lm, recipe, rows: int = len(PROMPTS), prompt: int = max(PROMPTS), total: int = TOTAL
) -> Plan:
    return plan(
        lm.config,
        recipe,
        batch_size=rows,
        prompt_tokens=prompt,
        max_new_tokens=max(total - prompt, 1),
        dtype=lm.dtype,
        parameter_bytes=0,
    )


def forced(lm, recipe, ids: np.ndarray, prompts=PROMPTS) -> tuple[np.ndarray, KVCache]:
    """Logits after the prompt's last token and after all that follow, NaN elsewhere; the cache.

    Prompts are read in two pieces, of which the shorter row has a part in the first alone.
    """
    rows = len(ids)
    cache = empty_cache(lm, planned(lm, recipe, rows, total=ids.shape[1]).geometry)
    found = np.full((*ids.shape, lm.config.vocab_size), np.nan, np.float32)
    logits = jnp.zeros((rows, lm.config.vocab_size), jnp.float32)
    start = np.zeros(rows, np.int32)
    for count in (np.minimum(prompts, BUCKET), np.maximum(np.subtract(prompts, BUCKET), 0)):
        padded = np.full((rows, BUCKET), 3, np.int32)
        for row, (at, new) in enumerate(zip(start, count, strict=True)):
            padded[row, :new] = ids[row, at : at + new]
        cache, logits = prefill_chunk(
            lm.model, cache, logits, padded, np.int32(count), recipe=recipe
        )
        start += count.astype(np.int32)
    fed = [row[prompt:] for row, prompt in zip(ids, prompts, strict=True)]
    for row, prompt in enumerate(prompts):
        found[row, prompt - 1] = logits[row]
    left = jnp.asarray([len(row) for row in fed], jnp.int32)
    state = DecodeState(cache, jnp.zeros(rows, jnp.int32), left, jnp.ones(rows, bool))
    options = {"config": lm.config, "recipe": recipe, "model": lm.model}
    for done in range(0, max(map(len, fed)), TICK):
        state = maintain(state, np.ones(rows, bool), 0, done=done, **options)
        tokens = np.zeros((TICK, rows), np.int32)
        for row, rest in enumerate(fed):
            piece = rest[done : done + TICK]
            tokens[: len(piece), row] = piece
        state, after, _, _ = force_chunk(
            lm.model, state, jnp.asarray(tokens), width=256, recipe=recipe
        )
        for row, (rest, prompt) in enumerate(zip(fed, prompts, strict=True)):
            count = len(rest[done : done + TICK])
            found[row, prompt + done : prompt + done + count] = after[:count, row]
    return found, state.cache
