"""What all evaluations are given: a model, recipes to compare, and a folder for what is found."""

import argparse
import dataclasses
import fractions
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kvjax import loading
from kvjax.cache.plan import largest_budget
from kvjax.command.calibrated import calibrated
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.fit import settled_recipe
from kvjax.command.options import entries, make_parser, merge, option, typed_options
from kvjax.command.outline import Outline, shape_of_model
from kvjax.command.recipe import KEEPING, RECIPE_OPTIONS, flags_in_errors, given_recipe
from kvjax.command.yaml_file import load_yaml
from kvjax.errors import UsageError
from kvjax.loading import LanguageModel
from kvjax.memory import device_memory
from kvjax.recipes import Recipe, full

EXITS = (
    "Exit codes: 0 done, 2 usage, input or output, 3 the model cannot be loaded, 4 does not fit, "
    "5 NaN or infinity, 6 some rows failed or some recipes could not run, 130 interrupted. The "
    "same command goes on where it ended."
)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Options of every evaluation; see each one's help."""

    model: str | None = option(
        None, "model directory, GGUF file or hub id (default: the demo model)"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "directory or hub id of another tokenizer")
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "of the weights and activations")
    recipes: str | None = option(
        None,
        "YAML file with a list of recipes: a name, method and other cache flags of the decode "
        "command, or the share of a bare bf16 cache's bytes (default: the full cache alone)",
    )
    out: str | None = option(None, "folder for rows and results; a run goes on there", "-o")
    batch_size: int = option(8, "rows read or decoded together", minimum=1)
    seed: int = option(0, "of samples and of random eviction", minimum=0, maximum=2**31 - 1)
    commit: str | None = option(None, "of the code, where this runs outside a checkout")
    quiet: bool = option(False, "no progress line")
    verbose: bool = option(False, "show where an error came from")

    def decoding(self) -> DecodeConfig:
        """What the decode command has of these options as well."""
        shared = {field.name for field in dataclasses.fields(DecodeConfig)}
        mine = {field.name for field in dataclasses.fields(self)}
        return DecodeConfig(**{name: getattr(self, name) for name in shared & mine})

    def folder(self) -> pathlib.Path:
        """Where results go.

        Raises:
            UsageError: none was named, or it cannot be made.
        """
        if self.out is None:
            raise UsageError("no output: name a folder for rows and results with --out")
        path = pathlib.Path(self.out)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out: cannot make {path}: {error.strerror}") from error
        return path


def eval_parser(table: type[EvalConfig], name: str, description: str) -> argparse.ArgumentParser:
    """Flags of every option of an evaluation, and of what is done with them."""
    parser = make_parser(
        table, prog=f"python -m kvjax.eval.{name}", description=description, epilog=EXITS
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags win over it")
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file and leave"
    )
    return parser


@dataclasses.dataclass(frozen=True)
class Named:
    """One entry of a file of recipes.

    Attributes:
        name: what results call it.
        config: the options of the decode command that make it.
        share: of a bare bfloat16 cache's bytes, what it may take, if its budget follows from that.
    """

    name: str
    config: DecodeConfig
    share: fractions.Fraction | None = None

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
    return sorted(named, key=lambda one: not one.is_full)


def _named(item: Any, index: int, config: EvalConfig) -> Named:
    if not isinstance(item, dict):
        raise UsageError(f"{config.recipes}: recipe {index} must be `key: value` lines")
    given = dict(item)
    share, name = _share(given.pop("share", None), config.recipes), given.pop("name", None)
    method = str(given.get("method", "full"))
    name = str(name) if name is not None else f"{method} {item['share']}" if share else method
    source = f"{config.recipes}, recipe {name}"
    known = {key: one for key, one in entries(DecodeConfig).items() if key in RECIPE_OPTIONS}
    options = merge(DecodeConfig, typed_options(known, given, source), {})
    own = {key: getattr(options, key) for key in RECIPE_OPTIONS}
    options = dataclasses.replace(config.decoding(), **own)
    if share is not None and method in KEEPING:
        raise UsageError(
            f"{source}: share is for methods that evict, and {method} keeps every token"
        )
    if share is not None and (options.kv_budget or options.kv_budget_bytes):
        raise UsageError(f"{source}: share and a budget exclude each other: give one of them")
    try:
        given_recipe(options)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from error
    return Named(name, options, share)


def _share(given: Any, source: str) -> fractions.Fraction | None:
    if given is None:
        return None
    try:
        share = fractions.Fraction(str(given))
    except (ValueError, ZeroDivisionError):
        share = fractions.Fraction(0)
    if not 0 < share <= 1:
        raise UsageError(f"{source}: share must be above 0 and at most 1, as in 1/8, got {given!r}")
    return share


@dataclasses.dataclass(frozen=True)
class Work:
    """What the caches of a run have to hold.

    Attributes:
        prompts: tokens of every prompt.
        new_tokens: that may follow a prompt.
        beside: a share is of the ``share_tokens`` behind the prompt, which comes on top and stays;
            otherwise it is of prompt and new tokens together.
        share_tokens: see ``beside``.
    """

    prompts: Sequence[int]
    new_tokens: int
    beside: bool = False
    share_tokens: int = 0


def settle(named: Named, lm: LanguageModel, work: Work, batch_size: int) -> tuple[Recipe, int]:
    """The recipe for a model and its work, and the bytes that a row of it can take in bfloat16.

    Args:
        lm: the model, or only its shape.

    Raises:
        UsageError: the recipe cannot be used for them.
        CapacityError: it does not fit the memory.
    """
    longest = max(work.prompts)
    outlined = _outline(lm, longest, work.new_tokens)
    token = outlined.plan(full()).geometry.full_token_bytes
    mean = statistics.fmean(work.prompts)
    with flags_in_errors():
        if named.share is None:
            recipe = settled_recipe(named.config, outlined)
        elif work.beside:
            # The prompt is the same in every cache: what is planned is a row without one.
            alone = _outline(lm, 1, work.share_tokens)
            recipe = _of_bytes(named, alone, token * work.share_tokens)
            if recipe.retention is None:  # otherwise the budget is the answer's alone
                recipe = dataclasses.replace(recipe, budget=recipe.budget + round(mean))
        else:
            recipe = _of_bytes(named, outlined, token * (mean + work.new_tokens))
        row_bytes = outlined.plan(recipe).geometry.row_bytes
    weights = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(lm.model))
    own = {"batch_size": batch_size, "dtype": lm.dtype, "parameter_bytes": weights}
    Outline(outlined.request | own, []).plan(recipe, device_memory()).check()
    return recipe, row_bytes


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
