"""What every layer of a cache takes of one row."""

import dataclasses
import functools
import math

from kvjax.cache.geometry import ClassGeometry, LayerGeometry
from kvjax.codecs import kv_codec
from kvjax.compress.policy import Policy, group, policies
from kvjax.dynakv.spectrum import key_width
from kvjax.errors import UsageError
from kvjax.models.config import ModelConfig
from kvjax.recipes import PHASES, Recipe

RECENT_PAGE = 16
"""Slots of a page of recent tokens; there are few of these."""


def layers_of(
    recipe: Recipe, config: ModelConfig, tokens: int, prompt: int, new: int, devices: int = 1
) -> tuple[LayerGeometry, ...]:
    """What every layer takes of a row, on each of the devices that share the heads.

    Args:
        tokens: of the row, at most.
        prompt: how many of them are the prompt's, at most.
        new: how many of them are the answer's, at most; where the context ends, these two come to
            more than the first.
    """
    of_layer = policies(recipe, config)
    size = tokens, min(prompt, tokens), min(new, tokens)
    together = group(of_layer)
    if recipe.projector is not None:
        return tuple(
            _latent_layer(recipe, policy, config, index, *size)
            for index, policy in enumerate(of_layer)
        )
    return tuple(
        _layer(recipe, policy, together, window, *size, devices)
        for policy, window in zip(of_layer, config.windows, strict=True)
    )


@functools.lru_cache(maxsize=256)
def _layer(
    recipe: Recipe,
    policy: Policy,
    together: int,
    window: int | None,
    tokens: int,
    prompt: int,
    new: int,
    devices: int,
) -> LayerGeometry:
    """What one layer takes at most, if so many tokens leave the recent window together."""
    if recipe.keeps_all:
        held = tokens if window is None else min(tokens, window)
        pages = math.ceil(held / recipe.page_size)
        return LayerGeometry((ClassGeometry(kv_codec("bf16"), recipe.page_size, pages),))
    first = ClassGeometry(
        kv_codec("bf16"), RECENT_PAGE, _recent_pages(recipe, together), recipe.needs_mass
    )
    page = recipe.page_size
    sharing = max(codec.group for codec in policy.classes)
    if page % sharing:
        raise UsageError(
            f"page_size {page} must be a multiple of the {sharing} tokens that share a scale in "
            f"codec {policy.classes[0].name}"
        )
    heads = [recipe]
    if policy.budgets is not None:
        heads = [dataclasses.replace(recipe, budget=n, head_shares=None) for n in policy.budgets]
    sizes = zip(*(_sizes(head, policy, window, tokens, prompt, new) for head in heads), strict=True)
    rest = []
    for index, (codec, of_head) in enumerate(zip(policy.classes, sizes, strict=True), 1):
        pages = [max(1, math.ceil(size / page)) for size in of_head]
        levels = recipe.retention is not None and policy.keeps == "budget"
        levels &= index in policy.of_kind
        together = None
        if policy.budgets is not None:  # pools are as large on all devices
            each = len(pages) // devices
            together = max(sum(pages[i : i + each]) for i in range(0, len(pages), each))
        rest.append(ClassGeometry(codec, page, max(pages), recipe.needs_mass, levels, together))
    return LayerGeometry((first, *rest), policy.queries)


def _recent_pages(recipe: Recipe, together: int) -> int:
    """Pages of recent tokens, if so many leave the recent window together."""
    spare = together - 1
    if recipe.segmenter is not None:
        if together > 1:  # the answer's wait where a tick ends beyond the prompt's last ones
            spare = max(spare, -recipe.window % recipe.tick)
        if recipe.segmenter.covers == "past":
            spare += recipe.segmenter.every
    recent = recipe.window + recipe.tick + spare
    return math.ceil(recent / RECENT_PAGE)


def _latent_layer(
    recipe: Recipe,
    policy: Policy,
    config: ModelConfig,
    index: int,
    tokens: int,
    prompt: int,
    new: int,
) -> LayerGeometry:
    """What one layer takes at most, where latents are kept.

    Any token may be the first to need a block, so tables have room for all of them in each; pages
    are fewer, and shared by the blocks of a row, those of keys and of values alike.
    """
    width = key_width(config)
    recent = _recent_pages(recipe, 1)
    first = ClassGeometry(kv_codec("bf16"), RECENT_PAGE, recent, latent=width)
    [held] = _sizes(recipe, policy, config.windows[index], tokens, prompt, new)
    pages = math.ceil(held / recipe.page_size)
    blocks = recipe.projector.blocks
    most = 2 * (blocks - 1)
    deep = recipe.projector.deep_blocks(index)
    shared = min(math.ceil(deep * held / recipe.page_size) + most, most * pages) if deep else 0
    [codec] = policy.classes
    rest = ClassGeometry(
        codec,
        recipe.page_size,
        pages,
        levels=recipe.retention is not None and policy.keeps == "budget",
        pages_per_row=2 * pages + shared,
        latent=width // blocks,
    )
    return LayerGeometry((first, rest), policy.queries)


def _sizes(
    recipe: Recipe, policy: Policy, window: int | None, tokens: int, prompt: int, new: int
) -> list[int]:
    """Tokens of one KV head in each class, at most."""
    if recipe.segmenter is None and recipe.prompt_codec is None:
        held = _held(recipe, policy, window, tokens, prompt, new)
        return [policy.first, held - policy.first] if policy.first else [held]
    if policy.keeps == "window":
        return [_held(recipe, policy, window, tokens, prompt, new)]
    of_prompt, of_answer = prompt, tokens
    if policy.keeps == "budget" and recipe.retention is not None:
        if recipe.selector is not None:
            of_prompt = min(max(recipe.most(prompt), recipe.floor), prompt)
        # Tokens that share a scale keep their slots until the last of them has gone, and all do
        # in phases in which nothing is evicted.
        always = set(PHASES[1:]) <= set(recipe.compress)
        if always and all(codec.group == 1 for codec in policy.classes):
            every = recipe.segmenter.every
            most = recipe.most_retained(tokens)
            if isinstance(recipe.budget, float):  # which may be below the floor
                most = max(most, segment_floor(recipe) * (tokens // every))
            of_answer = min(most + every + recipe.tick, tokens)
    elif policy.keeps == "budget":
        of_answer = _held(recipe, policy, window, tokens, prompt, new)
    sizes = [0] * len(policy.classes)
    sizes[policy.of_prompt - 1] += of_prompt
    for index in set(policy.of_kind):
        sizes[index - 1] += of_answer
    return [min(size, tokens) for size in sizes]


def _held(
    recipe: Recipe, policy: Policy, window: int | None, tokens: int, prompt: int, new: int
) -> int:
    """Tokens of one KV head outside the recent window, at most."""
    if policy.keeps == "all":
        return tokens
    if policy.keeps == "window":
        # Where the oldest group is partly out of sight there are more, in no more whole groups.
        return min(window + recipe.tick, tokens)
    # Between two selections nothing is evicted.
    always = recipe.every and set(PHASES[1:]) <= set(recipe.compress)
    apart = max(recipe.every, recipe.tick) if always else new
    if always and recipe.once:
        apart = max(apart, new - recipe.every)
    spared = prompt if recipe.spares_prompt or recipe.repeats else 0
    return min(max(recipe.most(tokens), spared + recipe.floor) + apart, tokens)


def segment_floor(recipe: Recipe) -> int:
    """Tokens that stay of a segment in any case."""
    return recipe.retention.sizes(recipe.segmenter.every)[-1]
