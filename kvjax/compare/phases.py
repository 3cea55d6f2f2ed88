"""In which rows of given tokens a recipe selects."""

import numpy as np

from kvjax.decoding.requests import Options, Request
from kvjax.decoding.row import Row
from kvjax.loading import LanguageModel
from kvjax.recipes import PHASES, Recipe


class Phases:
    """In which rows the recipe selects: as ``generate`` knows it, one tick after the tokens."""

    def __init__(self, lm: LanguageModel, ids: np.ndarray, prompt: int, recipe: Recipe):
        self._ids, self._prompt, self._recipe = ids, prompt, recipe
        self._rows: list[Row] = []
        evicts = recipe.selector is not None or recipe.retention is not None
        if not evicts or set(PHASES[1:]) <= set(recipe.compress):
            return
        options = Options(
            recipe=recipe,
            max_new_tokens=ids.shape[1],
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=0,
            batch_size=len(ids),
            chunk=recipe.tick,
            system_prompt=None,
            chat=False,
            thinking=None,
            repetition_stop=False,
            stop_ids=(),
        )
        for i, row in enumerate(ids):
            request = Request(i, tuple(row[:prompt].tolist()), ids.shape[1], truncated=False)
            self._rows.append(Row(lm, request, options))

    def after(self, done: int) -> np.ndarray:
        """True in the rows to be compressed once ``done`` tokens have been fed."""
        known = self._prompt + max(done - self._recipe.tick, 0) + 1
        for row, ids in zip(self._rows, self._ids, strict=bool(self._rows)):
            row.push(ids[self._prompt + len(row.tokens) : known].tolist())
        if not self._rows:
            return np.ones(len(self._ids), bool)
        return np.array([row.phase in self._recipe.compress for row in self._rows])
