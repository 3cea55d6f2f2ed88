"""Where memory is short: pools that rows share, and what each of them can come to own."""

from collections.abc import Callable, Iterable

import numpy as np

from kvjax.cache.geometry import Geometry
from kvjax.cache.plan import Plan, layers_of, padded_prompt
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe


def plan_of_longest(lengths: Iterable[int], planned: Callable[[int], Plan]) -> tuple[int, Plan]:
    """The longest prompt that one row at least has the memory for, and the plan for such rows.

    Args:
        lengths: tokens of the prompts.
        planned: plans rows of prompts that are at most so long.

    Raises:
        CapacityError: no prompt fits.
    """
    of_bucket = {padded_prompt(tokens): tokens for tokens in sorted(lengths)}
    *longer, shortest = sorted(of_bucket.values(), reverse=True)
    for tokens in longer:
        found = planned(tokens)
        if found.largest_batch() != 0:
            return tokens, _busy(fitted(found), planned(shortest).geometry)
    found = planned(shortest)
    return shortest, _busy(fitted(found), found.geometry)


def fitted(planned: Plan) -> Plan:
    """The plan, or one with pools for fewer of the longest rows where not all can be so long.

    Rows then share the pools, and a request waits until there are pages for it.

    Raises:
        CapacityError: not even one row can be so long, or the rows' tables alone do not fit.
    """
    largest, rows = planned.largest_batch(), planned.geometry.rows
    if largest is None or rows <= largest:
        return planned
    least = 1 + planned.parks
    one, two = (planned.holding(rows, longest) for longest in (least, least + 1))
    left = planned.memory_bytes - one.nbytes
    if left < 0:
        planned.check()
    longest = least + left // (two.nbytes - one.nbytes)
    return planned.holding(rows, min(longest, rows + planned.parks))


def _busy(planned: Plan, shortest: Geometry) -> Plan:
    """The plan, without rows for which there would never be pages.

    Args:
        shortest: of the same layers, but for the shortest rows.
    """
    shape = planned.geometry
    rows = shape.rows
    for own, least in zip(shape.layers, shortest.layers, strict=True):
        for one, other in zip(own.classes, least.classes, strict=True):
            rows = min(rows, (shape.pages(one) - 1) // other.of_row(shape.num_kv_heads))
    return planned if rows == shape.rows else planned.holding(rows, shape.longest)


def pages_of_row(
    config: ModelConfig, recipe: Recipe, prompt_tokens: int, max_new_tokens: int
) -> np.ndarray:
    """Pages that one row can own of every class, all layers' classes in a line, at most.

    Args:
        recipe: a plan's.
        prompt_tokens: of the row, padding left out.
        max_new_tokens: likewise.
    """
    tokens = min(prompt_tokens + max_new_tokens, config.context_length)
    layers = layers_of(recipe, config, tokens, prompt_tokens, max_new_tokens)
    heads = config.num_kv_heads
    return np.array([shape.of_row(heads) for layer in layers for shape in layer.classes])
