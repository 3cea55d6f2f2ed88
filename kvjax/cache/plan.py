"""What a run will allocate, computed before anything is allocated or any weight is read."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.geometry import ClassGeometry, Geometry, LayerGeometry
from kvjax.cache.working import prefill_row_bytes
from kvjax.codecs import kv_codec
from kvjax.compress.policy import Policy, group, policies
from kvjax.errors import CapacityError, UsageError
from kvjax.models.config import ModelConfig
from kvjax.recipes import PHASES, Recipe
from kvjax.report.units import size

PREFILL_CHUNK = 2048
"""Tokens read at once at most; longer prompts are read in chunks of this size."""
SMALLEST_BUCKET = 16
RECENT_PAGE = 16
"""Slots of a page of recent tokens; there are few of these."""


def bucket(tokens: int) -> int:
    """The length that a piece of a prompt is padded to: a power of two, so that few compile."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def padded_prompt(tokens: int) -> int:
    """A prompt's length once its last chunk is padded to its bucket."""
    whole = (tokens - 1) // PREFILL_CHUNK * PREFILL_CHUNK
    return whole + bucket(tokens - whole)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cache's geometry for a request, and what surrounds it in memory.

    Attributes:
        recipe: how the cache is kept, with a number for a share of the longest row.
        tokens: the longest that a row can get, prompt padding included.
        parameter_bytes: the model's weights.
        memory_bytes: what there is, or None where that is not known.
        prefill_row_bytes: what reading its prompt takes of each row for a while; an estimate.
        parks: whether the pools have room for a prompt beside the rows, which several share.
    """

    geometry: Geometry
    recipe: Recipe
    tokens: int
    parameter_bytes: int
    memory_bytes: int | None
    prefill_row_bytes: int = 0
    parks: bool = False

    @property
    def prefill_bytes(self) -> int:
        """What reading the prompts takes for a while; an estimate, see `prefill_row_bytes`.

        They are read together, or one after the other where memory is short.
        """
        together = self.geometry.rows if self.geometry.longest is None else 1
        return together * self.prefill_row_bytes

    @property
    def nbytes(self) -> int:
        """All that the run takes: weights, cache, and the reading of the prompts."""
        return self.parameter_bytes + self.geometry.nbytes + self.prefill_bytes

    def largest_batch(self) -> int | None:
        """Rows of this length that fit beside the weights; None where the memory is not known."""
        if self.memory_bytes is None:
            return None
        one, two = (
            self.holding(rows, self.most(rows)).nbytes - self.parameter_bytes for rows in (1, 2)
        )
        left = self.memory_bytes - self.parameter_bytes - one
        return 0 if left < 0 else 1 + left // (two - one)

    def holding(self, rows: int, longest: int | None) -> "Plan":
        """The plan for other rows, and with pools for so many of the longest of them."""
        return dataclasses.replace(
            self, geometry=dataclasses.replace(self.geometry, rows=rows, longest=longest)
        )

    def most(self, rows: int) -> int | None:
        """``Geometry.longest`` of so many rows where memory is not short."""
        return rows + 1 if self.parks else None

    def check(self) -> None:
        """Refuse what cannot fit.

        Raises:
            CapacityError: with the numbers and the flag that would help.
        """
        largest = self.largest_batch()
        if largest is None or self.geometry.rows <= largest:
            return
        advice = f"--batch-size {largest}" if largest else "a smaller --max-new-tokens or model"
        raise CapacityError(
            f"{_counted(self.geometry.rows, 'row')} of {self.tokens} tokens need "
            f"{size(self.geometry.nbytes)} of cache beside {size(self.parameter_bytes)} of "
            f"weights and about {size(self.prefill_bytes)} while prompts are read, and there are "
            f"{size(self.memory_bytes)}: pass {advice}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of ``--plan``."""
        shape = self.geometry
        lines = [
            ("method", self.recipe.name),
            ("rows", f"{shape.rows}"),
            ("tokens a row", f"{self.tokens}"),
            ("dtype", jnp.dtype(shape.dtype).name),
        ]
        if shape.longest is not None and shape.longest < shape.rows:
            lines.append(("rows so long at once", f"{shape.longest}; more where they are shorter"))
        if self.recipe.budget is not None:
            lines.insert(1, ("budget", _budget(self.recipe)))
        # Layers that are alike share their lines.
        for layer in dict.fromkeys(shape.layers):
            alike = sum(other == layer for other in shape.layers)
            for i, part in enumerate(layer.classes):
                what = part.codec.name
                if i == 0 and len(layer.classes) > 1:
                    what = "recent"
                elif i == 1 and layer.classes[1].codec in [c.codec for c in layer.classes[2:]]:
                    what = f"first, {what}"
                slot = sum(shape.slot_bytes(part).values())
                most = "" if part.pages_per_row is None else "at most "
                owner = "KV head" if part.latent is None else "block"
                lines.append(
                    (
                        f"{_counted(alike, 'layer')}, {what}",
                        f"{most}{_counted(part.pages_per_head, 'page')} a {owner} of "
                        f"{part.page_size} slots of {slot:.6g} bytes, "
                        f"{shape.pages(part):,} pages in the pool",
                    )
                )
        held = shape.nbytes / shape.rows / self.tokens
        lines += [
            (
                "bytes a token",
                f"{held:,.0f} ({held / shape.full_token_bytes:.3f} of a bare bf16 cache)",
            ),
            ("pools", size(shape.pool_bytes)),
            ("cache", size(shape.nbytes)),
            ("weights", size(self.parameter_bytes)),
            ("reading prompts", f"about {size(self.prefill_bytes)}"),
        ]
        if self.memory_bytes is not None:
            lines.append(("memory", size(self.memory_bytes)))
            lines.append(("largest batch", f"{self.largest_batch()}"))
        return lines


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _budget(recipe: Recipe) -> str:
    """What the recipe keeps, in words."""
    shared = isinstance(recipe.budget, float)
    share = f"{recipe.budget:g} of the tokens {recipe.share_of}"
    tokens = share if shared else f"{recipe.budget:,} tokens"
    if recipe.retention is not None:
        left = ", ".join(map(str, recipe.retention.schedule))
        prompt = "" if recipe.selector is None else f" (at most {recipe.prompt_budget} tokens)"
        return (
            f"{tokens} a KV head for complete segments of {recipe.segmenter.every}, of which "
            f"{left} tokens are left; beside the growing one, the last {recipe.window} tokens and "
            f"the prompt{prompt}"
        )
    when = f"every {recipe.every} steps" if recipe.every else "while the prompt is read"
    if recipe.once and recipe.every:
        when = f"once, after {recipe.every} steps"
    stay = f"the first {recipe.sinks} and the last {max(recipe.recent, recipe.window)} stay"
    prompt = ", and all of the prompt" if recipe.spares_prompt else ""
    chosen = type(recipe.selector).__name__
    return f"{tokens} a KV head, chosen by {chosen} {when}; {stay}{prompt}"


def plan(
    config: ModelConfig,
    recipe: Recipe,
    *,
    batch_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    dtype: DTypeLike,
    parameter_bytes: int,
    memory_bytes: int | None = None,
    parks: bool = False,
) -> Plan:
    """Size a cache for ``batch_size`` rows of the longest prompt and answer.

    The size depends on the prompt's bucket and not on its exact length, so that two prompts of one
    bucket share every compiled program.

    Args:
        parks: whether there is to be room for one more prompt, which several rows share.

    Raises:
        UsageError: the recipe does not fit the model or the prompt.
    """
    prompt = padded_prompt(prompt_tokens)
    tokens = min(prompt + max_new_tokens, config.context_length)
    recipe = recipe.for_longest(tokens)
    segments = 0
    if recipe.segmenter is not None:
        segments = max_new_tokens // recipe.segmenter.every + 1
    geometry = Geometry(
        layers=layers_of(recipe, config, tokens, prompt, max_new_tokens),
        rows=batch_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(dtype),
        segments=segments,
        noted=tokens if recipe.needs_text else 0,
        vocab_size=config.vocab_size if recipe.needs_text else 0,
        projector=recipe.projector,
        span=tokens if recipe.projector else 0,
        longest=batch_size + 1 if parks else None,
    )
    _check_budget(recipe, prompt_tokens, max_new_tokens)
    chunk = min(prompt, PREFILL_CHUNK)
    working = prefill_row_bytes(config, geometry.layers, chunk, dtype)
    return Plan(geometry, recipe, tokens, parameter_bytes, memory_bytes, working, parks)


def least_budget(recipe: Recipe, prompt_tokens: int, max_new_tokens: int) -> int:
    """The smallest budget, in tokens, that can be kept to."""
    if recipe.retention is None:
        return recipe.floor + prompt_tokens * recipe.spares_prompt
    return max(1, _floor(recipe) * (max_new_tokens // recipe.segmenter.every))


def _floor(recipe: Recipe) -> int:
    """Tokens that stay of a segment in any case."""
    return recipe.retention.sizes(recipe.segmenter.every)[-1]


def _check_budget(recipe: Recipe, prompt_tokens: int, max_new_tokens: int) -> None:
    """Refuse a budget that a run of this size cannot keep to.

    Raises:
        UsageError: with the number that would do.
    """
    if not isinstance(recipe.budget, int):
        return
    least = least_budget(recipe, prompt_tokens, max_new_tokens)
    if recipe.budget >= least:
        return
    if recipe.retention is None:
        raise UsageError(
            f"budget {recipe.budget} is below a prompt of {prompt_tokens} tokens, which all stay, "
            f"and the {recipe.floor} tokens beside it: pass {least}"
        )
    every, floor = recipe.segmenter.every, _floor(recipe)
    raise UsageError(
        f"budget {recipe.budget} is below the {floor} tokens that stay of each of "
        f"{max_new_tokens // every} segments of {every}: pass {least}, fewer new tokens, or a "
        f"retention schedule with a lower floor"
    )


def largest_budget(
    recipe: Recipe, limit: int, planned: Callable[[Recipe], Plan], least: int
) -> int | None:
    """The largest budget, in tokens, whose rows take no more than ``limit`` bytes.

    Args:
        planned: plans a recipe.
        least: the smallest budget that can be kept to; None is returned where that takes more.
    """

    def fits(budget: int) -> bool:
        return planned(dataclasses.replace(recipe, budget=budget)).geometry.row_bytes <= limit

    low = least
    high = max(low, planned(dataclasses.replace(recipe, budget=1.0)).tokens)
    if not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def layers_of(
    recipe: Recipe, config: ModelConfig, tokens: int, prompt: int, new: int
) -> tuple[LayerGeometry, ...]:
    """What every layer takes of a row.

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
        _layer(recipe, policy, together, window, *size)
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
        together = None if policy.budgets is None else sum(pages)
        rest.append(ClassGeometry(codec, page, max(pages), recipe.needs_mass, levels, together))
    return LayerGeometry((first, *rest), policy.queries)


def _recent_pages(recipe: Recipe, together: int) -> int:
    """Pages of recent tokens, if so many leave the recent window together."""
    recent = recipe.window + recipe.tick + together - 1
    if recipe.segmenter is not None and recipe.segmenter.covers == "past":
        recent += recipe.segmenter.every
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
    width = config.num_kv_heads * config.head_dim
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
                most = max(most, _floor(recipe) * (tokens // every))
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
        return min(window + recipe.tick, tokens)
    # Between two selections nothing is evicted.
    always = recipe.every and set(PHASES[1:]) <= set(recipe.compress)
    apart = max(recipe.every, recipe.tick) if always else new
    if always and recipe.once:
        apart = max(apart, new - recipe.every)
    spared = prompt if recipe.spares_prompt or recipe.repeats else 0
    return min(max(recipe.most(tokens), spared + recipe.floor) + apart, tokens)
