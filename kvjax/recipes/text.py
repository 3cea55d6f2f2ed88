"""Recipes from texts, as a command line or a file has them, and back."""

import dataclasses
import json
import pathlib
from typing import Any

from kvjax.compress import Selector
from kvjax.compress.selectors import (
    H2O,
    OMP,
    RKV,
    TOVA,
    HighestAttention,
    Random,
    SegmentQuotas,
    SnapKV,
    Streaming,
)
from kvjax.dynakv.projector import Projector
from kvjax.errors import UsageError
from kvjax.matching import AttentionMatching
from kvjax.recipes.methods import METHODS
from kvjax.recipes.recipe import Recipe
from kvjax.recipes.thought_text import THOUGHT_FIELDS, read_codec, thinkv_fields

SELECTORS: dict[str, type[Selector]] = {
    "h2o": H2O,
    "random": Random,
    "rkv": RKV,
    "snapkv": SnapKV,
    "streaming": Streaming,
    "tova": TOVA,
    "highest_attention": HighestAttention,
    "omp": OMP,
    "segment_quotas": SegmentQuotas,
}
"""Selectors by the name that ``--selector`` takes."""
LATENT_FIELDS = {"adapter", "tau", "rate", "blocks"}
"""What ``Projector.load`` takes, for methods "dynakv" and "thinkv"."""
_SELECTING = {"budget", "sinks", "recent", "protect_prompt", "every", "share_of", "skip_layers"}
"""Fields that have no effect where nothing is selected."""
COMPACTORS = {
    "none": None,
    "matching": AttentionMatching(),
    "faithful": AttentionMatching(mode="faithful"),
}
"""Compactors by the name that ``--compactor`` takes."""


def parse(method: str, **given: Any) -> Recipe:
    """A method's recipe, with fields as a command line or a file has them.

    Args:
        method: a name of ``METHODS``.
        **given: fields of ``Recipe``; None is not given. Texts are read for ``codec`` ("k4v2"),
            ``layer_codecs`` ("0:8,*:4"), ``selector`` and ``compactor`` (names of
            ``SELECTORS`` and ``COMPACTORS``), ``head_shares`` (a JSON file of one list a layer),
            ``budget`` ("256" or "0.25"), ``compress`` ("think,answer") and ``skip_layers``
            ("0,-1"). For method "thinkv" also ``THOUGHT_FIELDS``: fields of its segmenter and
            retention; and ``codec`` may be by thought ("R:4,E:4,T:2"), ``budget`` "all". For
            "dynakv" and "thinkv" also ``LATENT_FIELDS``.

    Raises:
        UsageError: beginning with the field that is wrong.
    """
    if method not in METHODS:
        raise UsageError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    fields = {name: value for name, value in given.items() if value is not None}
    if method == "thinkv":
        fields = thinkv_fields(fields)
    elif unused := sorted(THOUGHT_FIELDS & set(fields) - ({"paper"} if method == "tam" else set())):
        raise UsageError(f"{unused[0]} has no effect with method {method}: it is for thinkv")
    if method == "dynakv" and "adapter" not in fields:
        raise UsageError(
            "adapter is needed with method dynakv: a folder that python -m kvjax.train_dynakv wrote"
        )
    if method not in ("dynakv", "thinkv") and (unused := sorted(LATENT_FIELDS & set(fields))):
        raise UsageError(f"{unused[0]} has no effect with method {method}: it is for dynakv")
    if method == "thinkv" and LATENT_FIELDS & set(fields):
        fields = _with_projector(fields)
    for name, read in _READERS.items():
        if isinstance(fields.get(name), str):
            fields[name] = read(fields[name])
    if method == "thinkv":
        return METHODS[method](**fields)
    if method in ("full", "uniform", "kivi", "dynakv") and fields.get("compactor") is not None:
        raise UsageError(f"compactor has no effect with method {method}, which evicts nothing")
    if method == "dynakv":
        if "selector" not in fields and (unused := sorted(_SELECTING & set(fields))):
            raise UsageError(f"{unused[0]} has no effect with method dynakv without a selector")
        return METHODS[method](**fields)
    selector = fields.pop("selector", None)
    if method == "full" and (unused := set(fields) - {"page_size"}):
        raise UsageError(f"{min(unused)} has no effect with method full")
    recipe = METHODS[method](**fields)
    if selector is None:
        return recipe
    if recipe.selector is None:
        raise UsageError(f"selector has no effect with method {method}, which evicts nothing")
    return dataclasses.replace(recipe, selector=selector)


def _with_projector(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of method thinkv whose latents are to be kept."""
    own = {name: fields[name] for name in LATENT_FIELDS & set(fields)}
    if "adapter" not in own:
        raise UsageError(f"{min(own)} has no effect without an adapter")
    rest = {name: value for name, value in fields.items() if name not in own}
    if (codecs := rest.pop("thought_codecs", None)) is not None:
        if len(set(codecs)) > 1:
            raise UsageError("codec must be one for all thoughts where latents are kept")
        rest["codec"] = codecs[0]
    return rest | {"projector": Projector.load(own.pop("adapter"), **own)}


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe's fields, ready for JSON."""
    return {field.name: _plain(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)}


def _plain(value: Any) -> Any:
    """A field's value, or a part with its name and its own fields."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    own = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"name": type(value).__name__, **own}


def _read_budget(field: str, text: str) -> int | float:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    raise UsageError(f"{field} must be a number of tokens or a share between 0 and 1, got {text!r}")


def _read_layer_codecs(text: str) -> tuple[tuple[int | str, str], ...]:
    pairs = []
    for item in text.split(","):
        layer, colon, codec = (part.strip() for part in item.partition(":"))
        if not colon or not (layer == "*" or _is_whole(layer)):
            raise UsageError(
                f'layer_codecs must be pairs of a layer (or *) and a codec, as in "0:8,*:4", '
                f"got {text!r}"
            )
        pairs.append((layer if layer == "*" else int(layer), read_codec("layer_codecs", codec)))
    return tuple(pairs)


def _read_skip_layers(text: str) -> tuple[int, ...]:
    layers = [item.strip() for item in text.split(",")]
    if not all(map(_is_whole, layers)):
        raise UsageError(f'skip_layers must be numbers of layers, as in "0,-1", got {text!r}')
    return tuple(map(int, layers))


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _read_selector(text: str) -> Selector:
    if text not in SELECTORS:
        raise UsageError(f"selector must be one of {', '.join(SELECTORS)}, got {text!r}")
    return SELECTORS[text]()


def _read_compactor(text: str) -> AttentionMatching | None:
    if text not in COMPACTORS:
        raise UsageError(f"compactor must be one of {', '.join(COMPACTORS)}, got {text!r}")
    return COMPACTORS[text]


def _read_head_shares(path: str) -> tuple[tuple[float, ...], ...]:
    try:
        table = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return tuple(tuple(float(share) for share in layer) for layer in table)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"head_shares {path} must be a JSON file of one list of numbers a layer: {error}"
        ) from error


_READERS = {
    "codec": lambda text: read_codec("codec", text),
    "prompt_codec": lambda text: read_codec("prompt_codec", text),
    "layer_codecs": _read_layer_codecs,
    "selector": _read_selector,
    "compactor": _read_compactor,
    "head_shares": _read_head_shares,
    "budget": lambda text: _read_budget("budget", text),
    "prompt_budget": lambda text: _read_budget("prompt_budget", text),
    "compress": lambda text: tuple(item.strip() for item in text.split(",")),
    "skip_layers": _read_skip_layers,
}
