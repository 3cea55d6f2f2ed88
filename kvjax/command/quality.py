"""``--compare full``: what compression changes, on tokens that the uncompressed run chose or on a
given text."""

from collections.abc import Callable

import kvjax
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.fit import allowed_memory
from kvjax.command.inputs import prompt_options, stream_options
from kvjax.compare import Comparison, compare
from kvjax.decoding.requests import Prompt, read_prompt
from kvjax.recipes import Recipe, parse


def compared(
    lm: kvjax.LanguageModel,
    prompt: Prompt,
    recipe: Recipe,
    config: DecodeConfig,
    text: str | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Comparison:
    """Feed a prompt and an answer to the recipe's cache.

    Args:
        text: the answer; what the model answers without compression if None.
        should_stop: True ends the comparison.

    Raises:
        KvjaxError: it cannot be made, or was to stop.
    """
    plain = parse("full", page_size=config.page_size)
    limits = {"memory_bytes": allowed_memory(config), "should_stop": should_stop}
    ids = read_prompt(lm, 0, prompt, prompt_options(config, plain)).ids
    if text is None:
        options = stream_options(config, plain) | {"batch_size": 1, "keep_cache": False}
        [answer] = kvjax.generate(lm, [prompt], **options, **limits)
        tokens = answer.tokens
    else:
        tokens = lm.tokenizer.encode(text, starts=False)
    return compare(
        lm,
        [*ids, *tokens],
        recipe=recipe,
        prompt_tokens=len(ids),
        seed=config.seed,
        per_layer=True,
        kernel=config.kernel,
        **limits,
    )
