"""Going back to an earlier place of a conversation, where the cache still has what it had then."""

import bisect
import dataclasses

import numpy as np

from kvjax.cache.packed import Packed, cut_row
from kvjax.compress.policy import group, policies
from kvjax.decoding.conversation import Conversation
from kvjax.errors import UsageError
from kvjax.loading import LanguageModel

LEAST = 2
"""Tokens of a conversation: one in the cache and one to be read next."""


def rewind(lm: LanguageModel, conversation: Conversation, tokens: int) -> Conversation:
    """A conversation as it was after its first ``tokens`` tokens.

    The slots of the others come free. What has left the recent window since stays coded: with
    ``full`` it is as if the others had never been, with a codec a few tokens are coded early.

    Args:
        lm: the model.
        conversation: it stays as it is.
        tokens: how many are kept; the last of them is the next to be read.

    Raises:
        UsageError: there are not so many, or the cache no longer has what it had then.
    """
    have = len(conversation.tokens)
    if not isinstance(tokens, int) or not LEAST <= tokens <= have:
        raise UsageError(f"tokens must be between {LEAST} and {have}, got {tokens!r}")
    if tokens == have:
        return conversation

    def possible(kept: int) -> bool:
        return kept == have or _stands(lm, conversation, kept - 1)

    if not possible(tokens):
        # What is lost at one place is lost up to the last time that anything went.
        later = range(tokens + 1, have + 1)
        earliest = later[bisect.bisect_left(later, True, key=possible)]
        raise UsageError(
            f"the cache cannot go back to {tokens} of its {have} tokens: method "
            f"{conversation.recipe.name} has worked on it since, and what went is gone. The "
            f"earliest is {earliest}. Go on from a cache that was saved before, or give the first "
            f"{tokens} tokens as a prompt, to be read again"
        )
    return dataclasses.replace(
        conversation,
        tokens=conversation.tokens[:tokens],
        answered=max(0, conversation.answered - (have - tokens)),
        row=cut_row(conversation.row, tokens - 1),
    )


def _stands(lm: LanguageModel, conversation: Conversation, length: int) -> bool:
    """Whether the cache has all that it had when it had read ``length`` tokens."""
    recipe, row = conversation.recipe, conversation.row
    selects = recipe.retention is not None or (recipe.selector is not None and recipe.every > 0)
    if selects and (recipe.needs_mass or recipe.needs_queries):
        return False  # the last queries, and what they attended to, are those of later tokens
    of_layer = policies(recipe, lm.config)
    if not recipe.keeps_all and group(of_layer) > 1 and length < row["stored"]:
        return False  # tokens that share a scale were coded together
    unworked = length > _worked(conversation)
    if recipe.segmenter is not None and not unworked:
        return False  # kinds were told since
    return all(
        _all_there(row, layer, max(0, length - window + 1) if window else 0, length)
        for layer, window in enumerate(lm.config.windows)
        if window is not None or not unworked
    )


def _worked(conversation: Conversation) -> int:
    """The length at which tokens were last selected, or their thoughts told."""
    recipe, prompt = conversation.recipe, conversation.prompt
    steps = conversation.length - prompt - 1  # at the last look, if there was one
    if recipe.segmenter is not None:
        return prompt + steps // recipe.tick * recipe.tick
    if recipe.selector is None or not recipe.every or steps < recipe.every:
        return prompt - 1  # the prompt was selected from while it was read
    return prompt + (recipe.every if recipe.once else steps // recipe.every * recipe.every)


def _all_there(row: Packed, layer: int, start: int, end: int) -> bool:
    """Whether every head of a layer holds all tokens from ``start`` to ``end``, as they were."""
    found = np.zeros((len(row[f"{layer}.0.pages"]), end), bool)
    index = 0
    while (pages := row.get(f"{layer}.{index}.pages")) is not None:
        head = np.repeat(np.arange(len(pages)), pages)
        pos, bias = row[f"{layer}.{index}.pos"], row.get(f"{layer}.{index}.bias")
        live = (pos >= 0) & (pos < end) & (head < len(found))[:, None]
        if bias is not None:
            live &= bias == 0
        found[np.broadcast_to(head[:, None], pos.shape)[live], pos[live]] = True
        index += 1
    return bool(found[:, start:].all())
