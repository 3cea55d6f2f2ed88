"""What a recipe means for each layer of a model."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, use_abstract_mesh

from kvjax.codecs import KVCodec, kv_codec, latent_codec
from kvjax.errors import UsageError
from kvjax.matching.head_budgets import head_budgets
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Policy:
    """How one layer is kept.

    Attributes:
        classes: codecs of the tokens that are no longer recent.
        keeps: "all"; "window": what the layer's sliding window can still see; "budget": what the
            recipe's selector or retention picks.
        first: tokens at the row's start that have the first class for themselves.
        of_prompt: the class of the prompt's other tokens, 1 for ``classes[0]``.
        of_kind: the classes of the answer's tokens by the kind of their thought.
        queries: how many of the last queries the layer keeps.
        budgets: tokens of each KV head, where they are not alike.
        config: the model's, where latents are rebuilt to select from.
    """

    classes: tuple[KVCodec, ...]
    keeps: Literal["all", "window", "budget"]
    first: int = 0
    of_prompt: int = 1
    of_kind: tuple[int, int, int] = (1, 1, 1)
    queries: int = 0
    budgets: tuple[int, ...] | None = None
    config: ModelConfig | None = None


@functools.lru_cache(maxsize=64)
def policies(recipe: Recipe, config: ModelConfig) -> tuple[Policy, ...]:
    """One for each layer.

    Raises:
        UsageError: the recipe names a layer that the model lacks, or a codec its head size.
    """
    if recipe.keeps_all:
        return (Policy((), "all"),) * config.num_layers
    if recipe.projector is not None:
        bits = min(kv_codec(spec).k.bits for spec in (recipe.codec, *recipe.codecs_of_layers))
        recipe.projector.check(config, bits)
    count = config.num_layers
    skipped = {_layer(index, count, "skip_layers") for index in recipe.skip_layers}
    named = [
        (None if index == "*" else _layer(index, count, "layer_codecs"), spec)
        for index, spec in recipe.layer_codecs
    ]
    budgets = _head_budgets(recipe, config)
    sampled = () if recipe.segmenter is None else recipe.segmenter.layers
    for layer in sampled:
        _layer(layer, count, "segmenter.layers")
        if config.windows[layer] is not None:
            raise UsageError(
                f"segmenter.layers names layer {layer}, whose sliding window hides most tokens: "
                "take layers without one"
            )
    found = []
    for layer in range(count):
        given = next((spec for index, spec in named if index in (None, layer)), None)
        if recipe.projector is None:
            codec = _for_layer(layer, given, recipe.codec, config)
        else:
            codec = latent_codec(kv_codec(given or recipe.codec))
        if config.windows[layer] is not None:
            found.append(Policy((codec,), "window", queries=recipe.needs_queries))
            continue
        evicts = recipe.selector is not None or recipe.retention is not None
        keeps = "budget" if evicts and layer not in skipped else "all"
        own = budgets[layer] if keeps == "budget" else None
        if recipe.positions == "contiguous" and recipe.sinks and keeps == "budget":
            queries = recipe.needs_queries
            split = Policy((codec, codec), keeps, recipe.sinks, 2, (2, 2, 2), queries, own)
            found.append(split)
            continue
        if recipe.projector is not None:
            queries = max(recipe.needs_queries, int(layer in sampled))
            found.append(Policy((codec,), keeps, queries=queries, config=config))
            continue
        specs = [
            recipe.prompt_codec or recipe.codec,
            *(recipe.thought_codecs or [recipe.codec] * 3),
        ]
        codecs = [_for_layer(layer, given, spec, config) for spec in specs]
        classes = tuple(dict.fromkeys(codecs))
        of_prompt, *of_kind = (1 + classes.index(codec) for codec in codecs)
        queries = max(recipe.needs_queries, int(layer in sampled))
        found.append(Policy(classes, keeps, 0, of_prompt, tuple(of_kind), queries, own))
    return tuple(found)


def _head_budgets(recipe: Recipe, config: ModelConfig) -> list[tuple[int, ...] | None]:
    """Tokens of each KV head of every layer; None where all have the recipe's budget.

    A head gets what stays in any case first, and its share of the rest then.
    """
    if recipe.head_shares is None:
        return [None] * config.num_layers
    shares = np.asarray(recipe.head_shares, np.float64)
    if shares.shape != (config.num_layers, config.num_kv_heads):
        raise UsageError(
            f"head_shares must be {config.num_layers} layers of {config.num_kv_heads} KV heads, "
            f"got {shares.shape}"
        )
    least, heads = recipe.floor - 1, shares.size
    # Also while a program for one of several devices is traced, which this is no part of.
    with jax.ensure_compile_time_eval(), use_abstract_mesh(AbstractMesh((), ())):
        rest = recipe.budget - least
        table = np.asarray(head_budgets(shares, rest, rest * heads))
    return [tuple(row) for row in (table + least).tolist()]


def _for_layer(layer: int, given: str | None, spec: str, config: ModelConfig) -> KVCodec:
    """The codec of a layer: the one given for it, or a safer one than ``spec`` where it must be."""
    codec = _for_model(given or spec, config)
    if layer == 0 and given is None and codec.balance and codec.k.bits < 8:
        return _for_model("int8", config)  # whose keys suffer most from few bits
    return codec


def group(of_layer: tuple[Policy, ...]) -> int:
    """Tokens that leave the recent window together, in every layer."""
    return math.lcm(*(codec.group for policy in of_layer for codec in policy.classes))


def _layer(index: int, count: int, name: str) -> int:
    if not -count <= index < count:
        raise UsageError(f"{name} names layer {index}, and the model has {count} layers")
    return index % count


def _for_model(spec: str, config: ModelConfig) -> KVCodec:
    """Keys with a bias have channels far off zero, which codes of few bits must not pay for.

    A codec whose name says what its basis is stays as it is.
    """
    codec = kv_codec(spec)
    for part in (codec.k, codec.v):
        if part.channels and config.head_dim % part.channels:
            raise UsageError(
                f"codec {codec.name} shares a scale among {part.channels} channels, which "
                f"must divide the model's head size of {config.head_dim}: take a codec with "
                f"other groups, such as kivi2-g{config.head_dim}"
            )
    if not codec.rotate or "mean" in spec or "balance" in spec:
        return codec
    biased = config.qkv_bias and codec.k.fmt != "float"
    return dataclasses.replace(codec, center=codec.center or biased, balance=biased)
