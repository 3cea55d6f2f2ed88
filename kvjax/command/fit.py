"""Recipes that only a run's size decides: ``--fit`` and ``--kv-budget-bytes``."""

import dataclasses
import math
from collections.abc import Iterator

from kvjax import recipes
from kvjax.cache.plan import largest_budget
from kvjax.command.calibrated import calibrated, check_adapter
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.outline import Outline
from kvjax.command.recipe import described, flags_in_errors, given_recipe, staying
from kvjax.errors import CapacityError, UsageError
from kvjax.recipes import Recipe
from kvjax.report.units import read_size, size

SHARES = (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Of a row's tokens: the budgets that ``--fit`` tries where keeping them all takes too much."""


def settled_recipe(config: DecodeConfig, outlined: Outline) -> Recipe:
    """The recipe of a run.

    Raises:
        UsageError: an option cannot be used for this model and these prompts.
        CapacityError: nothing fits what ``--fit`` allows.
    """
    recipe = given_recipe(config)
    if recipe is None:
        return _fitting(config, outlined)
    recipe = calibrated(recipe, config)
    check_adapter(recipe, config)
    if config.kv_budget_bytes is not None:
        return _of_bytes(recipe, config.kv_budget_bytes, outlined)
    return recipe


def allowed_memory(config: DecodeConfig) -> int | None:
    """Bytes that the options allow; None where they leave it to the device."""
    if config.fit is not None:
        return read_size(config.fit, "--fit")
    return None if config.memory is None else read_size(config.memory, "--memory")


def candidates(config: DecodeConfig, outlined: Outline) -> Iterator[Recipe]:
    """What ``--fit`` tries, from the best to the smallest; docs/command.md has this list."""
    page, recent = config.page_size, config.recent_window
    yield recipes.parse("full", page_size=page)
    for codec in ("int8", "int4"):
        yield recipes.parse("uniform", codec=codec, page_size=page, window=recent)
    evicting = recipes.parse(
        "snapkv_decode", codec="int4", page_size=page, recent=recent, budget=1.0, **staying(config)
    )
    tokens, least = outlined.plan(evicting).tokens, outlined.least_budget(evicting)
    budgets = [max(math.ceil(share * tokens), least) for share in SHARES]
    for budget in dict.fromkeys(budget for budget in budgets if budget < tokens):
        yield dataclasses.replace(evicting, budget=budget)


def _fitting(config: DecodeConfig, outlined: Outline) -> Recipe:
    memory = read_size(config.fit, "--fit")
    smallest = None
    with flags_in_errors():
        for recipe in candidates(config, outlined):
            planned = outlined.plan(recipe, memory)
            if planned.largest_batch() >= planned.geometry.rows:
                return recipe
            if smallest is None or planned.nbytes < smallest.nbytes:
                smallest = planned
    geometry, weights = smallest.geometry, smallest.parameter_bytes
    needed = math.ceil(smallest.nbytes / 2**20)
    raise CapacityError(
        f"--fit {config.fit}: {geometry.rows} rows of {smallest.tokens} tokens need at least "
        f"{size(geometry.nbytes)} of cache ({described(smallest.recipe)}) beside {size(weights)} "
        f"of weights and about {size(smallest.prefill_bytes)} while prompts are read: pass --fit "
        f"{needed}MiB, a smaller --batch-size or --max-new-tokens, or --dtype bfloat16"
    )


def _of_bytes(recipe: Recipe, given: str, outlined: Outline) -> Recipe:
    """The recipe with the largest budget whose rows take no more than so many bytes."""
    limit = read_size(given, "--kv-budget-bytes")

    with flags_in_errors():
        least = outlined.least_budget(recipe)
        budget = largest_budget(recipe, limit, outlined.plan, least)
        if budget is None:
            smallest = outlined.plan(dataclasses.replace(recipe, budget=least)).geometry.row_bytes
            raise UsageError(
                f"--kv-budget-bytes {given} is too small: {recipe.name} keeps at least {least:,} "
                f"tokens, with which a row can take {smallest:,} bytes: pass {smallest} or more, "
                "or fewer bits with --kv-bits"
            )
    return dataclasses.replace(recipe, budget=budget)
