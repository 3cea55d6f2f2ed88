"""Log likelihoods of given tokens behind prompts that a compressed cache has read."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache.plan import Plan
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.forced import Held, force_together, held
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import prefill_prompts, seed_bits
from kvjax.decoding.report import BytesLog
from kvjax.loading import LanguageModel
from kvjax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class Scored:
    """One row.

    Attributes:
        logs: natural logarithm of each token's probability.
        greedy: whether each of them was the likeliest.
        peak_bytes: the most that the row's pages took.
        full_bytes: a bare bfloat16 cache of all its tokens.
    """

    logs: np.ndarray
    greedy: bool
    peak_bytes: int
    full_bytes: int


def log_likelihoods(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    following: Sequence[Sequence[int]],
    planned: Plan,
    seed: int = 0,
) -> list[Scored]:
    """Score what follows each prompt, a tick of tokens at a time, with the cache kept meanwhile as
    while decoding.

    Args:
        lm: what ``kvjax.load`` returned.
        prompts: token ids, of any lengths.
        following: token ids behind each, at least one.
        planned: of a cache with at least as many rows, and of the recipe.
        seed: of selectors that draw.
    """
    recipe, rows = planned.recipe, planned.geometry.rows
    cache, logits = prefill_prompts(lm, empty_cache(lm, planned.geometry), prompts, recipe, seed)
    lengths = np.array([len(ids) for ids in following] + [0] * (rows - len(following)), np.int32)
    given = np.zeros((rows, lengths.max() + recipe.tick), np.int32)
    for row, ids in enumerate(following):
        given[row, : len(ids)] = ids
    fed = np.maximum(lengths - 1, 0)  # the last one has nothing to predict
    logs = [BytesLog(planned.geometry) for _ in following]
    _note(logs, held(cache), lengths > 0)
    parts = [jax.device_get(_pick(logits[:, None], jnp.asarray(given[:, :1])))]
    state = DecodeState(cache, jnp.asarray(given[:, 0]), jnp.asarray(fed), jnp.ones(rows, bool))
    for done in range(0, fed.max(), recipe.tick):
        if not recipe.keeps_all:
            state = maintain(
                state,
                np.full(rows, "answer" in recipe.compress),
                seed_bits(seed),
                config=lm.config,
                recipe=recipe,
                done=done,
                model=lm.model,
            )
        count = np.clip(fed - done, 0, recipe.tick)
        tokens = jnp.asarray(given[:, done : done + recipe.tick])
        state, hidden = force_together(lm.model, state, tokens, jnp.asarray(count), recipe=recipe)
        now = held(state.cache)
        target = jnp.asarray(given[:, done + 1 : done + 1 + recipe.tick])
        parts.append(jax.device_get(_score(lm.model, hidden, target)))
        _note(logs, now, count > 0)
    scores, likeliest = (np.concatenate(part, 1) for part in zip(*parts, strict=True))
    return [
        Scored(
            scores[row, : len(ids)],
            bool(likeliest[row, : len(ids)].all()),
            logs[row].peak_bytes,
            logs[row].full_bytes,
        )
        for row, ids in enumerate(following)
    ]


def _note(logs: list[BytesLog], now: Held, active: np.ndarray) -> None:
    found = jax.tree.map(np.asarray, vars(now))
    for row, log in enumerate(logs):
        if active[row]:
            log.add(row, **found)


@jax.jit
def _score(
    model: Decoder, hidden: Float[Array, "B T E"], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    return _pick(model.logits(hidden), tokens)


@jax.jit
def _pick(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log probabilities of tokens, and whether they are the likeliest."""
    logs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logs, tokens[..., None], -1)[..., 0]
    return picked, logits.argmax(-1) == tokens
