"""Named methods: what of a token is stored, for how long, and in which numbers."""

from kvjax.recipes.methods import (
    METHODS,
    full,
    h2o,
    kivi,
    random,
    rkv,
    snapkv,
    snapkv_decode,
    streaming,
    thinkv,
    tova,
    uniform,
)
from kvjax.recipes.recipe import PHASES, Recipe
from kvjax.recipes.text import SELECTORS, as_dict, parse

__all__ = [
    "METHODS",
    "PHASES",
    "SELECTORS",
    "Recipe",
    "as_dict",
    "full",
    "h2o",
    "kivi",
    "parse",
    "random",
    "rkv",
    "snapkv",
    "snapkv_decode",
    "streaming",
    "thinkv",
    "tova",
    "uniform",
]
