"""Rows that the model writes itself, for where its own training text is not at hand."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import kvjax
from kvjax.errors import NumericalError
from kvjax.train.dynakv.data import Rows
from kvjax.train.dynakv.settings import TrainSettings

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def sample_rows(
    lm: "LanguageModel",
    count: int,
    settings: TrainSettings,
    *,
    progress: Callable[[int], None] = lambda done: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rows | None:
    """Full rows, sampled at temperature 1 from everything the model can say.

    Each begins with the token that begins (or else ends) the model's texts, and then any token, so
    that rows differ from the start. An end of text is followed by more text, as in packed data.

    Args:
        lm: the model.
        count: rows to sample.
        settings: their length, and the seed.
        progress: called with the number of tokens sampled so far.
        should_stop: asked now and then; True gives up.

    Returns:
        The rows, or None if it was given up.

    Raises:
        NumericalError: the model's logits are not finite.
        CapacityError: a row does not fit the model's context, or the memory.
    """
    rng = np.random.default_rng(settings.seed)
    first = lm.tokenizer and (lm.tokenizer.bos_id, lm.tokenizer.eos_id)
    begin = [token for token in first or () if token is not None][:1]
    if settings.seq_len <= len(begin) + 1:
        begin = []
    prompts = [[*begin, int(token)] for token in rng.integers(lm.config.vocab_size, size=count)]
    tokens, done = np.zeros((count, settings.seq_len), np.int32), 0
    events = kvjax.stream(
        dataclasses.replace(lm, tokenizer=None),  # text that nobody reads would take half the time
        prompts,
        max_new_tokens=settings.seq_len - len(prompts[0]),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=settings.seed,
        batch_size=min(count, settings.batch_size),
        repetition_stop=False,
        stop_ids=(),
        should_stop=should_stop,
    )
    for event in events:
        if event.kind == "text":
            done += len(event.tokens)
            progress(done)
        elif event.kind == "done":
            if event.result.error:
                raise NumericalError(f"self-sampled row {event.row}: {event.result.error}")
            if event.result.finish_reason == "interrupted":
                return None
            tokens[event.row] = [*prompts[event.row], *event.result.tokens]
    return Rows(tokens, np.ones(tokens.shape, bool))
