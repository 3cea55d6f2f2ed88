"""What a run will allocate, computed before anything is allocated or any weight is read."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import CapacityError
from kvjax.models.config import ModelConfig
from kvjax.recipes import Recipe
from kvjax.report.units import size

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
class Geometry:
    """The shapes of a cache; ``init_cache`` makes exactly this.

    Attributes:
        pages_per_head: the most pages that one KV head of one row and layer can own.
    """

    num_layers: int
    rows: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages_per_head: int
    dtype: DTypeLike

    @property
    def pages(self) -> int:
        """Pages of one layer's pool, the scratch page among them."""
        return 1 + self.rows * self.num_kv_heads * self.pages_per_head

    @property
    def slot_bytes(self) -> int:
        """One token of one KV head and layer: key, value, bias and position."""
        return 2 * self.head_dim * jnp.dtype(self.dtype).itemsize + 4 + 4

    @property
    def token_bytes(self) -> int:
        """One token in every layer and KV head."""
        return self.num_layers * self.num_kv_heads * self.slot_bytes

    @property
    def full_token_bytes(self) -> int:
        """One token in an uncompressed bfloat16 cache: the yardstick of every ratio."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * 2

    @property
    def pool_bytes(self) -> int:
        return self.num_layers * self.pages * self.page_size * self.slot_bytes

    @property
    def table_bytes(self) -> int:
        """Block tables, free lists and lengths."""
        entries = self.rows * self.num_kv_heads * self.pages_per_head + self.pages
        return 4 * (self.num_layers * entries + self.rows)

    @property
    def nbytes(self) -> int:
        return self.pool_bytes + self.table_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A cache's geometry for a request, and what surrounds it in memory.

    Attributes:
        tokens: the longest that a row can get, prompt padding included.
        parameter_bytes: the model's weights.
        memory_bytes: what there is, or None where that is not known.
    """

    geometry: Geometry
    recipe: Recipe
    tokens: int
    parameter_bytes: int
    memory_bytes: int | None

    def largest_batch(self) -> int | None:
        """Rows of this length that fit beside the weights; None where the memory is not known."""
        if self.memory_bytes is None:
            return None
        one = dataclasses.replace(self.geometry, rows=1).nbytes
        two = dataclasses.replace(self.geometry, rows=2).nbytes
        left = self.memory_bytes - self.parameter_bytes - one
        return 0 if left < 0 else 1 + left // (two - one)

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
            f"{self.geometry.rows} rows of {self.tokens} tokens need "
            f"{size(self.geometry.nbytes)} of cache beside {size(self.parameter_bytes)} of "
            f"weights, and there are {size(self.memory_bytes)}: pass {advice}"
        )

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each line of ``--plan``."""
        shape = self.geometry
        ratio = shape.token_bytes / shape.full_token_bytes
        lines = [
            ("method", self.recipe.name),
            ("rows", f"{shape.rows}"),
            ("tokens a row", f"{self.tokens}"),
            ("cache dtype", jnp.dtype(shape.dtype).name),
            ("page", f"{shape.page_size} slots of {shape.slot_bytes} bytes"),
            ("pages a KV head", f"{shape.pages_per_head}"),
            ("pages a layer", f"{shape.pages} (one is scratch)"),
            ("bytes a token", f"{shape.token_bytes:,} ({ratio:.3f} of a bare bf16 cache)"),
            ("pools", size(shape.pool_bytes)),
            ("tables", size(shape.table_bytes)),
            ("weights", size(self.parameter_bytes)),
        ]
        if self.memory_bytes is not None:
            lines.append(("memory", size(self.memory_bytes)))
            lines.append(("largest batch", f"{self.largest_batch()}"))
        return lines


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
) -> Plan:
    """Size a cache for ``batch_size`` rows of the longest prompt and answer.

    The size depends on the prompt's bucket and not on its exact length, so that two prompts of one
    bucket share every compiled program.
    """
    tokens = min(padded_prompt(prompt_tokens) + max_new_tokens, config.context_length)
    geometry = Geometry(
        num_layers=config.num_layers,
        rows=batch_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=recipe.page_size,
        pages_per_head=math.ceil(tokens / recipe.page_size),
        dtype=jnp.dtype(dtype),
    )
    return Plan(geometry, recipe, tokens, parameter_bytes, memory_bytes)
