"""Named methods: what of a token is stored, for how long, and in which numbers."""

from kvjax.recipes.methods import (
    ADAPTED,
    METHODS,
    am,
    dynakv,
    full,
    h2o,
    kivi,
    pam,
    random,
    rkv,
    snapkv,
    snapkv_decode,
    streaming,
    tam,
    thinkv,
    tova,
    uniform,
)
from kvjax.recipes.recipe import PHASES, Recipe
from kvjax.recipes.text import SELECTORS, as_dict, parse

__all__ = [
    "ADAPTED",
    "METHODS",
    "PHASES",
    "SELECTORS",
    "Recipe",
    "am",
    "as_dict",
    "dynakv",
    "full",
    "h2o",
    "kivi",
    "pam",
    "parse",
    "random",
    "rkv",
    "snapkv",
    "snapkv_decode",
    "streaming",
    "tam",
    "thinkv",
    "tova",
    "uniform",
]
