"""The recipes that an evaluation compares: from a file to what a model can run."""

import dataclasses
import fractions
import re
import statistics
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from kvjax import loading
from kvjax.cache.plan import largest_budget
from kvjax.command.calibrated import calibrated, check_adapter
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.fit import settled_recipe
from kvjax.command.options import entries, merge, typed_options
from kvjax.command.outline import Outline, shape_of_model
from kvjax.command.recipe import KEEPING, RECIPE_OPTIONS, flags_in_errors, given_recipe
from kvjax.command.yaml_file import load_yaml
from kvjax.errors import UsageError
from kvjax.eval.options import EvalConfig
from kvjax.loading import LanguageModel
from kvjax.memory import device_memory
from kvjax.recipes import Recipe, full
from kvjax.recipes import as_dict as recipe_as_dict


@dataclasses.dataclass(frozen=True)
class Named:
    """One entry of a file of recipes.

    Attributes:
        name: what results call it.
        config: the options of the decode command that make it.
        share: of a bare bfloat16 cache's bytes, what it may take, if its budget follows from that.
        tokens: how many of them it may keep, or the share of them if it is at most 1, if its budget
            follows from that.
    """

    name: str
    config: DecodeConfig
    share: fractions.Fraction | None = None
    tokens: fractions.Fraction | None = None

    @property
    def size(self) -> str | None:
        """What its budget follows from, as names end with it."""
        if self.tokens is None:
            return None if self.share is None else str(self.share)
        return f"{self.tokens} {'of the ' if self.tokens <= 1 else ''}tokens"

    @property
    def is_full(self) -> bool:
        """Whether it is what the others are compared with."""
        return self.config.method in (None, "full")


def read_recipes(config: EvalConfig) -> list[Named]:
    """The recipes that are compared, the full cache first where it is among them.

    Raises:
        UsageError: the file cannot be read, or one of its recipes cannot work with any model.
    """
    if config.recipes is None:
        return [Named("full", config.decoding())]
    found = load_yaml(config.recipes, "--recipes")
    if not isinstance(found, list) or not found:
        raise UsageError(f"{config.recipes} must hold a list of recipes, as in `- method: rkv`")
    named = [_named(item, index, config) for index, item in enumerate(found, start=1)]
    names = [one.name for one in named]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{config.recipes}: two recipes are called {twice}: give each a `name`")
    return sorted(_chosen(named, config.only), key=lambda one: not one.is_full)


def _chosen(named: list[Named], only: str | None) -> list[Named]:
    if only is None:
        return named
    try:
        found = [one for one in named if re.fullmatch(only, one.name)]
    except re.error as error:
        raise UsageError(f"--only {only!r} is no regular expression: {error}") from error
    if not found:
        names = ", ".join(one.name for one in named)
        raise UsageError(f"--only {only!r} is the name of no recipe; there are {names}")
    return found


def _named(item: Any, index: int, config: EvalConfig) -> Named:
    if not isinstance(item, dict):
        raise UsageError(f"{config.recipes}: recipe {index} must be `key: value` lines")
    given = dict(item)
    share = _number("share", given.pop("share", None), config.recipes)
    tokens = _number("tokens", given.pop("tokens", None), config.recipes)
    own_name, method = given.pop("name", None), str(given.get("method", "full"))
    source = f"{config.recipes}, recipe {method if own_name is None else own_name}"
    known = {key: one for key, one in entries(DecodeConfig).items() if key in RECIPE_OPTIONS}
    options = merge(DecodeConfig, typed_options(known, given, source), {})
    own = {key: getattr(options, key) for key in RECIPE_OPTIONS}
    options = dataclasses.replace(config.decoding(), **own)
    budget = options.kv_budget or options.kv_budget_bytes
    sizes = {"share": share, "tokens": tokens, "a budget": budget}
    named = [name for name, size in sizes.items() if size is not None]
    if (share or tokens) and method in KEEPING:
        raise UsageError(
            f"{source}: {named[0]} is for methods that evict, and {method} keeps every token"
        )
    if len(named) > 1:
        raise UsageError(f"{source}: {' and '.join(named)} exclude each other: give one of them")
    try:
        given_recipe(options)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    found = Named(str(own_name), options, share, tokens)
    if own_name is None:
        found = dataclasses.replace(found, name=" ".join(filter(None, (method, found.size))))
    return found


def _number(key: str, given: Any, source: str) -> fractions.Fraction | None:
    """A share, or a number of tokens."""
    if given is None:
        return None
    try:
        number = fractions.Fraction(str(given))
    except (ValueError, ZeroDivisionError):
        number = fractions.Fraction(0)
    if key == "share" and not 0 < number <= 1:
        raise UsageError(f"{source}: share must be above 0 and at most 1, as in 1/8, got {given!r}")
    if number <= 0 or (number > 1 and number.denominator > 1):
        raise UsageError(
            f"{source}: tokens must be a whole number, or a share of them as in 1/2, got {given!r}"
        )
    return number


@dataclasses.dataclass(frozen=True)
class Work:
    """What the caches of a run have to hold.

    Attributes:
        prompts: tokens of every prompt.
        new_tokens: that may follow a prompt.
        beside: a share is of the ``share_tokens`` behind the prompt, whose own come on top, and so
            do a recipe's ``tokens``; otherwise both are of prompt and new tokens together.
        share_tokens: see ``beside``.
    """

    prompts: Sequence[int]
    new_tokens: int
    beside: bool = False
    share_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Settled:
    """A recipe for a model and its work, or why there is none.

    Attributes:
        named: what was asked for.
        recipe: None where it is refused.
        row_bytes: that a row of it can take, in bfloat16.
        refused: the reason.
    """

    named: Named
    recipe: Recipe | None
    row_bytes: int = 0
    refused: str = ""

    @property
    def name(self) -> str:
        return self.named.name

    def origin(self, lm: LanguageModel, config: EvalConfig) -> list[Any]:
        """What every row of the recipe follows from, for its key."""
        return [lm.fingerprint, config.dtype, config.seed, recipe_as_dict(self.recipe)]

    def as_dict(self) -> dict[str, Any]:
        """What rows tell of the recipe."""
        return {
            "method": self.recipe.name,
            "budget": self.recipe.budget,
            "codec": self.recipe.codec,
            "share": self.named.size,
            "row_bytes": self.row_bytes,
        }


def settle(named: Named, lm: LanguageModel, work: Work, batch_size: int) -> Settled:
    """A recipe for a model, which may be only its shape, and its work.

    Raises:
        CapacityError: it does not fit the memory.
    """
    try:
        with flags_in_errors():
            recipe, row_bytes = _settle(named, lm, work)
    except UsageError as error:
        return Settled(named, None, refused=str(error))
    own = {"batch_size": batch_size, "dtype": lm.dtype, "parameter_bytes": lm.nbytes}
    whole = _outline(lm, max(work.prompts), work.new_tokens).request
    Outline(whole | own, []).plan(recipe, device_memory()).check()
    return Settled(named, recipe, row_bytes)


def _settle(named: Named, lm: LanguageModel, work: Work) -> tuple[Recipe, int]:
    outlined = _outline(lm, max(work.prompts), work.new_tokens)
    token = outlined.plan(full()).geometry.full_token_bytes
    mean = statistics.fmean(work.prompts)
    whole = work.share_tokens if work.beside else mean + work.new_tokens
    if named.share is None:
        given = named.config
        if (tokens := named.tokens) is not None:
            own = given_recipe(given).retention is not None  # a budget of the answer alone
            prompt = mean if work.beside and not own else 0
            kept = round(prompt + (tokens * round(whole) if tokens <= 1 else tokens))
            given = dataclasses.replace(given, kv_budget=str(kept))
        recipe = settled_recipe(given, outlined)
    elif work.beside:
        # The prompt is the same in every cache: what is planned is a row without one.
        alone = _outline(lm, 1, work.share_tokens)
        recipe = _of_bytes(named, alone, token * whole)
        if recipe.retention is None:  # otherwise the budget is the answer's alone
            recipe = dataclasses.replace(recipe, budget=recipe.budget + round(mean))
    else:
        recipe = _of_bytes(named, outlined, token * whole)
    return recipe, outlined.plan(recipe).geometry.row_bytes


def _outline(lm: LanguageModel, prompt: int, new: int) -> Outline:
    """One row, as a model of bfloat16 would hold it."""
    request = {
        "config": lm.config,
        "batch_size": 1,
        "prompt_tokens": prompt,
        "max_new_tokens": new,
        "dtype": jnp.dtype(jnp.bfloat16),
        "parameter_bytes": 0,
    }
    return Outline(request, [prompt])


def _of_bytes(named: Named, outlined: Outline, whole: float) -> Recipe:
    """The recipe with the largest budget that takes no more than its share of ``whole`` bytes."""
    recipe = calibrated(given_recipe(named.config), named.config)
    check_adapter(recipe, named.config)
    limit, least = int(named.share * int(whole)), outlined.least_budget(recipe)
    budget = largest_budget(recipe, limit, outlined.plan, least)
    if budget is None:
        needed = outlined.plan(dataclasses.replace(recipe, budget=least)).geometry.row_bytes
        raise UsageError(
            f"share {named.share} is {limit:,} bytes, and {recipe.name} takes {needed:,} with the "
            f"fewest tokens ({least:,}): give a larger share, or fewer bits with kv_bits"
        )
    return dataclasses.replace(recipe, budget=budget)


def shape_of(config: EvalConfig) -> LanguageModel:
    """The model without its weights, under its fingerprint.

    Raises:
        ModelError: it cannot be read.
    """
    shape = shape_of_model(config.decoding())
    path = loading.resolve(shape.source, config.revision)
    return dataclasses.replace(shape, fingerprint=loading.read_fingerprint(path))
