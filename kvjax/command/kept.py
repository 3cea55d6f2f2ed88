"""``--load-cache`` and ``--save-cache``: what a run goes on from, and what it leaves."""

import dataclasses

from kvjax import loading
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.outline import shape_of_model
from kvjax.command.recipe import flags_in_errors
from kvjax.decoding.conversation import Conversation
from kvjax.decoding.events import Result
from kvjax.decoding.saved import load_cache, save_cache
from kvjax.errors import ModelError
from kvjax.recipes import Recipe
from kvjax.report.say import say


def read_kept(
    config: DecodeConfig, recipe: Recipe, lm: loading.LanguageModel | None = None
) -> Conversation | None:
    """What ``--load-cache`` names, if anything.

    Args:
        config: of the run.
        recipe: how the cache is kept.
        lm: the model; if None its shape, and None is returned where its weights are not here yet.

    Raises:
        UsageError: it cannot be gone on from.
    """
    if config.load_cache is None:
        return None
    if lm is None:
        shape = shape_of_model(config)
        path = loading.resolve(shape.source, config.revision, weights=False)
        try:
            lm = dataclasses.replace(shape, fingerprint=loading.read_fingerprint(path))
        except ModelError:
            return None
    with flags_in_errors():
        return load_cache(lm, config.load_cache, recipe=recipe)


def keep(config: DecodeConfig, result: Result) -> None:
    """Write what can be gone on from to where ``--save-cache`` says.

    Raises:
        UsageError: it cannot be written.
    """
    if config.save_cache is None:
        return
    if result.cache is None:
        say("kvjax: --save-cache: no token was chosen, so that there is nothing to save")
        return
    with flags_in_errors():
        save_cache(result.cache, config.save_cache)
