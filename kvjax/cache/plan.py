"""What a run will allocate, computed before anything is allocated or any weight is read."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.cache.geometry import Geometry
from kvjax.cache.layers import layers_of, segment_floor
from kvjax.cache.working import prefill_row_bytes
from kvjax.errors import CapacityError, UsageError
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe
from kvjax.report.units import size
from kvjax.sharding import of_device

PREFILL_CHUNK = 2048
"""Tokens read at once at most; longer prompts are read in chunks of this size."""
SMALLEST_BUCKET = 16


def bucket(tokens: int) -> int:
    """The length that a piece of a prompt is padded to: a power of two, so that few compile."""
    return max(SMALLEST_BUCKET, 1 << (tokens - 1).bit_length())


def padded_prompt(tokens: int) -> int:
    """A prompt's length once its last chunk is padded to its bucket."""
    whole = (tokens - 1) // PREFILL_CHUNK * PREFILL_CHUNK
    return whole + bucket(tokens - whole)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cache's geometry for a request, and what surrounds it in memory, on one device.

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
        if error := self.refusal():
            raise error

    def refusal(self) -> CapacityError | None:
        """What ``check`` raises; None where all fits."""
        largest = self.largest_batch()
        if largest is None or self.geometry.rows <= largest:
            return None
        advice = f"--batch-size {largest}" if largest else "a smaller --max-new-tokens or model"
        return CapacityError(
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
        if shape.devices > 1:
            lines.insert(0, ("devices", f"{shape.devices} share the heads; bytes are of each"))
        held = shape.nbytes / shape.rows / self.tokens * shape.devices
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
    tp: int = 1,
    shortest_prompt: int | None = None,
) -> Plan:
    """Size a cache for ``batch_size`` rows of the longest prompt and answer.

    The size depends on the prompt's bucket and not on its exact length, so that two prompts of one
    bucket share every compiled program.

    Args:
        parks: whether there is to be room for one more prompt, which several rows share.
        tp: devices that share the heads; bytes are those of one of them.
        shortest_prompt: tokens of the shortest prompt, behind which the context has the most room
            for an answer; ``prompt_tokens`` if None.

    Raises:
        UsageError: the recipe does not fit the model or the prompts.
    """
    own = of_device(config, tp)
    prompt = padded_prompt(prompt_tokens)
    tokens = min(prompt + max_new_tokens, config.context_length)
    recipe = recipe.for_longest(tokens)
    segments = 0
    if recipe.segmenter is not None:
        segments = min(max_new_tokens, tokens) // recipe.segmenter.every + 1
    geometry = Geometry(
        layers=layers_of(recipe, config, tokens, prompt, max_new_tokens, tp),
        rows=batch_size,
        num_heads=own.num_heads,
        num_kv_heads=own.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.dtype(dtype),
        segments=segments,
        noted=tokens if recipe.needs_text else 0,
        vocab_size=config.vocab_size if recipe.needs_text else 0,
        projector=recipe.projector,
        span=tokens if recipe.projector else 0,
        longest=batch_size + 1 if parks else None,
        devices=tp,
    )
    shortest = prompt_tokens if shortest_prompt is None else shortest_prompt
    _check_budget(recipe, prompt_tokens, answer_tokens(config, shortest, max_new_tokens))
    chunk = min(prompt, PREFILL_CHUNK)
    working = prefill_row_bytes(own, geometry.layers, chunk, dtype)
    return Plan(geometry, recipe, tokens, parameter_bytes, memory_bytes, working, parks)


def answer_tokens(config: ModelConfig, prompt_tokens: int, max_new_tokens: int) -> int:
    """The longest that the answer to a prompt can get, in tokens: the context may end it."""
    return min(max_new_tokens, config.context_length - prompt_tokens)


def least_budget(recipe: Recipe, prompt_tokens: int, max_new_tokens: int) -> int:
    """The smallest budget, in tokens, that can be kept to.

    Args:
        recipe: how the cache is kept.
        prompt_tokens: of the longest prompt.
        max_new_tokens: of the longest answer: see ``answer_tokens``.
    """
    if recipe.retention is None:
        return recipe.floor + prompt_tokens * recipe.spares_prompt
    return max(1, segment_floor(recipe) * (max_new_tokens // recipe.segmenter.every))


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
    every, floor = recipe.segmenter.every, segment_floor(recipe)
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
