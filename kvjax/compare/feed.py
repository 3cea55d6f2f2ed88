"""Given tokens, fed to a compressed cache."""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import Geometry, plan
from kvjax.cache.plan import Plan
from kvjax.compare.phases import Phases
from kvjax.compare.result import Comparison
from kvjax.compare.scores import Scores
from kvjax.compare.uncached import Reference, reference
from kvjax.decoding.chunk import DecodeState
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.forced import force_chunk, force_together, held
from kvjax.decoding.kernel import check_kernel, kernel_in_errors
from kvjax.decoding.loop import width_of
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import prefill_prompts, seed_bits
from kvjax.decoding.requests import check_model
from kvjax.errors import Interrupted, UsageError
from kvjax.loading import LanguageModel
from kvjax.memory import device_memory
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe


def compare(
    lm: LanguageModel,
    tokens: Sequence[int] | Sequence[Sequence[int]] | Reference,
    *,
    recipe: Recipe,
    prompt_tokens: int | None = None,
    seed: int = 0,
    per_layer: bool = False,
    by_tick: bool = False,
    kernel: Literal["mosaic", "triton", "xla"] | None = None,
    memory_bytes: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Feed given tokens to a compressed cache and to none, and compare what each would say next.

    The cache reads the first ``prompt_tokens`` as ``kvjax.generate`` reads a prompt. Then it gets
    one token a step, as if it had chosen it, with the maintenance where ``generate`` has it. The
    other side is one pass over all tokens without a cache, in the model's dtype: with "float32"
    every difference is the recipe's; with "bfloat16" recipe ``full`` shows what is rounding.

    Logits exist for one tick of tokens at a time; of the pass without a cache, hidden states are
    kept (and all attention outputs, with ``per_layer``).

    Args:
        lm: what ``kvjax.load`` returned.
        tokens: token ids, of one row or of several equally long ones, which are read together; or
            what ``reference`` made of them, where several recipes are compared.
        recipe: how the cache is kept.
        prompt_tokens: how many of the first tokens are a prompt; a ``Reference`` knows it.
        seed: of selectors that draw.
        per_layer: measure the error of every layer's attention output too.
        by_tick: read the tokens of a tick together. The same up to rounding (which may decide
            between two tokens that a selector finds equally good), without the decoder's own
            program, and several times as fast.
        kernel: as for ``kvjax.stream``; of the side with the cache.
        memory_bytes: what weights, cache and reading prompts may take; None: what the device has.
            On a mesh that is what each device may: each has the whole cache here.
        should_stop: asked before every tick of tokens; True ends the comparison.

    Raises:
        UsageError: tokens, ``prompt_tokens`` or ``kernel`` cannot be used, or ``per_layer`` or
            ``kernel`` with ``by_tick``.
        CapacityError: the rows exceed the model's context or the memory.
        Interrupted: by ``should_stop``.
    """
    if per_layer and by_tick:
        raise UsageError("per_layer looks into single steps: leave out by_tick")
    if kernel is not None and by_tick:
        raise UsageError(f"kernel {kernel} computes single steps: leave out by_tick")
    check_kernel(kernel, recipe)
    _go_on(should_stop)
    if not isinstance(tokens, Reference):
        if prompt_tokens is None:
            raise UsageError("prompt_tokens says how many of the tokens are a prompt: pass it")
        tokens = reference(lm, tokens, prompt_tokens=prompt_tokens, per_layer=per_layer)
    if prompt_tokens not in (None, tokens.prompt_tokens):
        raise UsageError(
            f"the reference has a prompt of {tokens.prompt_tokens} tokens, and {prompt_tokens=}"
        )
    if per_layer and tokens.outputs is None:
        raise UsageError("per_layer needs a reference that was made with it")
    check_model(recipe, lm)
    ids, prompt_tokens = tokens.ids, tokens.prompt_tokens
    rows, total = ids.shape
    planned = _plan(lm, recipe, rows, prompt_tokens, total, memory_bytes)
    recipe = planned.recipe
    scores = Scores(lm, tokens, planned)
    prompts = ids[:, :prompt_tokens].tolist()
    cache, logits = prefill_prompts(lm, empty_cache(lm, planned.geometry), prompts, recipe, seed)
    scores.add(logits[None], held(cache))
    compressing = Phases(lm, ids, prompt_tokens, recipe)
    how = {"per_layer": per_layer, "by_tick": by_tick, "kernel": kernel}
    shape = planned.geometry
    _feed(lm, cache, shape, scores, compressing, recipe, seed, should_stop, **how)
    return scores.result(recipe)


def _plan(lm, recipe: Recipe, rows: int, prompt: int, total: int, memory: int | None) -> Plan:
    planned = plan(
        lm.config,
        recipe,
        batch_size=rows,
        prompt_tokens=prompt,
        max_new_tokens=total - prompt,
        dtype=lm.dtype,
        parameter_bytes=lm.nbytes,
        memory_bytes=device_memory() if memory is None else memory,
    )
    planned.check()
    return planned


def _go_on(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise Interrupted("the comparison was interrupted")


def _feed(
    lm,
    cache,
    geometry: Geometry,
    scores,
    compressing,
    recipe,
    seed,
    should_stop,
    *,
    per_layer: bool,
    by_tick: bool,
    kernel: str | None,
) -> None:
    """Feed a tick of tokens at a time; the last token is not fed, it has nothing to predict."""
    ids, prompt = scores.ids, scores.prompt
    rows, total = ids.shape
    fed, steps = total - 1 - prompt, recipe.tick
    left = jnp.full(rows, fed, jnp.int32)
    state = DecodeState(cache, jnp.asarray(ids[:, prompt]), left, jnp.ones(rows, bool))
    for done in range(0, fed, steps):
        _go_on(should_stop)
        if not recipe.keeps_all:
            state = maintain(
                state,
                jnp.asarray(compressing.after(done)),
                seed_bits(seed),
                config=lm.config,
                recipe=recipe,
                done=done,
                model=lm.model,
            )
        tokens, count = _piece(ids[:, prompt:-1], done, steps)
        if by_tick:
            given = jnp.asarray(tokens), jnp.full(rows, count, jnp.int32)
            state, hidden = force_together(lm.model, state, *given, recipe=recipe)
            now = held(state.cache)
            scores.add(_logits(lm.model, hidden.swapaxes(0, 1)), now, count)
            continue
        with kernel_in_errors(kernel):
            state, logits, layers, now = force_chunk(
                lm.model,
                state,
                jnp.asarray(tokens.T),
                width=width_of(prompt + done + steps, geometry),
                recipe=recipe,
                with_layers=per_layer,
                kernel=kernel,
            )
        scores.add(logits, now, count, layers)


def _piece(ids: np.ndarray, start: int, steps: int) -> tuple[np.ndarray, int]:
    """The next ``steps`` tokens of every row, padded, and how many they are."""
    found = ids[:, start : start + steps]
    tokens = np.zeros((len(ids), steps), np.int32)
    tokens[:, : found.shape[1]] = found
    return tokens, found.shape[1]


@jax.jit
def _logits(model: Decoder, hidden: Float[Array, "N B E"]) -> Float[Array, "N B V"]:
    return model.logits(hidden)
