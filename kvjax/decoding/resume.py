"""Going on from a conversation: its next turn is read as if it had been decoded."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.plan import PREFILL_CHUNK, bucket
from kvjax.decoding.chunk import ChunkOutput, DecodeState, start_decoding
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.fill import empty_rows, sampling_of
from kvjax.decoding.forced import force_together
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import prefill_prompts, seed_bits
from kvjax.decoding.requests import Options, Request
from kvjax.decoding.rewind import rewind
from kvjax.decoding.row import Row
from kvjax.errors import UsageError
from kvjax.loading import LanguageModel
from kvjax.models.decoder import Decoder
from kvjax.recipes import Recipe
from kvjax.sharding import per_shard


def resume(
    lm: LanguageModel, state: DecodeState, request: Request, options: Options
) -> tuple[DecodeState, ChunkOutput | None]:
    """Let the only row go on from a conversation, and read its next turn, if there is one.

    Args:
        lm: what ``kvjax.load`` returned.
        state: one of one row, whose cache is empty.
        request: with what it goes on from.
        options: of the run.

    Returns:
        The state; and, after a turn, what the host reads of the first token.
    """
    past = request.past
    state = past.state(lm, state.cache)
    max_new = np.array([request.max_new], np.int32)
    turn = request.ids[len(past.tokens) :]
    if not turn:
        return dataclasses.replace(state, left=jnp.asarray(max_new)), None
    reads = "prompt" in options.recipe.compress
    state, logits = read_on(
        lm, state, [past.tokens[-1], *turn], options.recipe, options.seed, lambda read: reads
    )
    sampling = sampling_of([request.sample], options)
    return start_decoding(state.cache, logits, sampling, max_new, stop_ids=options.stop_ids)


def read_on(
    lm: LanguageModel,
    state: DecodeState,
    tokens: Sequence[int],
    recipe: Recipe,
    seed: int,
    compressing: Callable[[int], bool],
) -> tuple[DecodeState, Float[Array, "1 V"]]:
    """Read given tokens into the only row, with the maintenance where decoding has it.

    A tick of tokens is read in one pass.

    Args:
        lm: what ``kvjax.load`` returned.
        state: the layers of its cache are donated.
        tokens: one at least.
        recipe: how the cache is kept.
        seed: of selectors that draw, 32 bits.
        compressing: whether tokens may be selected, once so many of these have been read.

    Returns:
        The state, and the float32 logits after the last token.
    """
    read = 0
    state = dataclasses.replace(state, left=jnp.asarray([len(tokens)], jnp.int32))
    done = int(state.cache.length[0] - state.cache.prompt[0])
    while read < len(tokens):
        count, width = len(tokens) - read, recipe.tick
        if recipe.keeps_all:
            count = min(count, PREFILL_CHUNK)
            width = bucket(count)
        else:
            if done % recipe.tick == 0:
                state = maintain(
                    state,
                    np.array([compressing(read)]),
                    seed_bits(seed),
                    config=lm.config,
                    recipe=recipe,
                    done=done,
                    model=lm.model,
                )
            count = min(count, recipe.tick - done % recipe.tick)
        piece = np.zeros((1, width), np.int32)
        piece[0, :count] = tokens[read : read + count]
        given = jnp.asarray(piece), jnp.full(1, count, jnp.int32)
        state, hidden = force_together(lm.model, state, *given, recipe=recipe)
        read, done = read + count, done + count
    return state, _logits(lm.model, hidden, np.int32(count - 1))


@jax.jit
@per_shard
def _logits(model: Decoder, hidden: Float[Array, "1 T E"], last) -> Float[Array, "1 V"]:
    return model.logits(jnp.take(hidden, last, 1))


def conversation(
    lm: LanguageModel,
    state: DecodeState,
    request: Request,
    answer: Sequence[int],
    options: Options,
    recipe: Recipe,
) -> Conversation:
    """What has become of the only row, up to the last token of its answer.

    Where the host has ended the row, by a text or a repetition, the device is ahead: the row goes
    back, or where it cannot, is read again.

    Args:
        lm: what ``kvjax.load`` returned.
        state: donated.
        request: whose the row is.
        answer: its tokens, one at least.
        options: of the run.
        recipe: as the caller gave it.
    """
    tokens = (*request.ids, *answer)
    answered = len(answer) + (request.past.answered if request.goes_on else 0)
    length = int(state.cache.length[0])
    ahead = length + 1 - len(tokens)
    # What comes after the answer does not matter, since it is cut off.
    found = Conversation.of(lm, state.cache, recipe, (*tokens, *[0] * ahead), answered + ahead)
    if not ahead:
        return found
    try:
        return rewind(lm, found, len(tokens))
    except UsageError:
        cache = _read_again(lm, state, request, answer, options)
        return Conversation.of(lm, cache, recipe, tokens, answered)


def _read_again(lm, state: DecodeState, request: Request, answer, options: Options):
    """The cache after all that led to an answer's last token."""
    recipe, state = options.recipe, empty_rows(state, [0])
    rest = list(answer[:-1])
    if request.past is None:
        cache, _ = prefill_prompts(lm, state.cache, [request.ids], recipe, options.seed)
        state = dataclasses.replace(state, cache=cache)
    else:
        state = request.past.state(lm, state.cache)
        rest = [*request.ids[len(request.past.tokens) - 1 :], *rest]
    if not rest:
        return state.cache
    before = len(rest) - len(answer) + 1
    row = Row(lm, request, dataclasses.replace(options, stop_texts=(), repetition_stop=False))

    def compressing(read: int) -> bool:
        """As the host knew it: one tick later."""
        if read < before:
            return "prompt" in recipe.compress
        row.push(answer[len(row.tokens) : max(read - before - recipe.tick, 0) + 1])
        return row.phase in recipe.compress

    state, _ = read_on(lm, state, rest, recipe, options.seed, compressing)
    return state.cache
