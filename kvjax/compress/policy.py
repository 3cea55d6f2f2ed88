"""What a recipe means for each layer of a model."""

import dataclasses
import math
from typing import Literal

from kvjax.codecs import KVCodec, kv_codec
from kvjax.errors import UsageError
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe


@dataclasses.dataclass(frozen=True)
class Policy:
    """How one layer is kept.

    Attributes:
        classes: codecs of the tokens that are no longer recent. With two, the first is for the
            row's first tokens (``first`` of them).
        keeps: "all"; "window": what the layer's sliding window can still see; "budget": what the
            recipe's selector picks.
    """

    classes: tuple[KVCodec, ...]
    keeps: Literal["all", "window", "budget"]
    first: int = 0


def policies(recipe: Recipe, config: ModelConfig) -> tuple[Policy, ...]:
    """One for each layer.

    Raises:
        UsageError: the recipe names a layer that the model lacks, or a codec its head size.
    """
    if recipe.keeps_all:
        return (Policy((), "all"),) * config.num_layers
    count = config.num_layers
    skipped = {_layer(index, count, "skip_layers") for index in recipe.skip_layers}
    named = [
        (None if index == "*" else _layer(index, count, "layer_codecs"), spec)
        for index, spec in recipe.layer_codecs
    ]
    found = []
    for layer in range(count):
        given = next((spec for index, spec in named if index in (None, layer)), None)
        codec = _for_model(given or recipe.codec, config)
        if layer == 0 and given is None and codec.balance and codec.k.bits < 8:
            codec = _for_model("int8", config)  # whose keys suffer most from few bits
        keeps = "all"
        if config.windows[layer] is not None:
            keeps = "window"
        elif recipe.selector is not None and layer not in skipped:
            keeps = "budget"
        split = recipe.positions == "contiguous" and recipe.sinks and keeps == "budget"
        found.append(
            Policy((codec, codec), keeps, recipe.sinks) if split else Policy((codec,), keeps)
        )
    return tuple(found)


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
