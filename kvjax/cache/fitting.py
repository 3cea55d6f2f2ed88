"""Where memory is short: pools that rows share, and what each of them can come to own."""

from collections.abc import Callable, Sequence

import numpy as np

from kvjax.cache.geometry import Geometry
from kvjax.cache.layers import layers_of
from kvjax.cache.plan import Plan, padded_prompt
from kvjax.models.config import ModelConfig


def plan_of_longest(
    config: ModelConfig,
    lengths: Sequence[int],
    max_new_tokens: int,
    planned: Callable[[int], Plan],
) -> tuple[int, Plan]:
    """The longest prompt that one row at least has the memory for, and the plan for such rows.

    Args:
        config: the model's.
        lengths: tokens of the prompts.
        max_new_tokens: of every answer, at most.
        planned: plans rows of prompts that are at most so long.

    Raises:
        CapacityError: no prompt fits.
    """
    of_bucket = {padded_prompt(tokens): tokens for tokens in sorted(lengths)}
    *longer, last = sorted(of_bucket.values(), reverse=True)
    plans = ((tokens, planned(tokens)) for tokens in longer)
    tokens, found = next(
        ((tokens, found) for tokens, found in plans if found.largest_batch() != 0),
        (last, None),
    )
    found = fitted(found or planned(last))
    if found.geometry.longest is None or found.parks:
        return tokens, found
    # Without rows for which there would never be pages.
    least = pages_of_row(config, found, min(lengths), max_new_tokens)
    rows = min(found.geometry.rows, int((pool_pages(found.geometry) // least).min()))
    return tokens, found.holding(rows, found.geometry.longest)


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
        raise planned.refusal()
    longest = least + left // (two.nbytes - one.nbytes)
    return planned.holding(rows, min(longest, rows + planned.parks))


def pool_pages(geometry: Geometry) -> np.ndarray:
    """Pages that rows can own of every class, all layers' classes in a line, all rows together."""
    shapes = [shape for layer in geometry.layers for shape in layer.classes]
    return np.array([geometry.pages(shape) - 1 for shape in shapes])


def pages_of_row(
    config: ModelConfig, planned: Plan, prompt_tokens: int, max_new_tokens: int
) -> np.ndarray:
    """Pages that one row can own of every class, all layers' classes in a line, at most.

    Args:
        config: the model's.
        planned: for this row and others.
        prompt_tokens: of the row, padding left out.
        max_new_tokens: likewise.
    """
    geometry, recipe = planned.geometry, planned.recipe
    layers = geometry.layers
    if recipe.projector is None:  # blocks of latents take what a row may take, however short it is
        tokens = min(prompt_tokens + max_new_tokens, config.context_length)
        size = tokens, prompt_tokens, max_new_tokens
        layers = layers_of(recipe, config, *size, geometry.devices)
    shapes = [shape for layer in layers for shape in layer.classes]
    return np.array([shape.of_row(geometry.heads(shape)) for shape in shapes])
