"""Tokens that matter to the last queries and that no other token repeats."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.attention import (
    check_window,
    latest_queries,
    or_recency,
    query_logits,
    softmax,
)
from kvjax.compress.context import Context, in_window
from kvjax.compress.neighbours import check_kernel, pool, position_rank
from kvjax.errors import UsageError
from pallas_kernels.einsum import einsum_float32

BLOCK = 128  # rows of the matrix of cosines that are in memory at once


@dataclasses.dataclass(frozen=True)
class RKV:
    """Importance against redundancy: ``score = lambda * I - (1 - lambda) * R``.

    Cai et al., 2025 (arXiv 2505.24133), with the details of the authors' program. For each KV
    head, over its ``n`` tokens in order of position:

    - ``I``: logits of the last ``window`` queries, maximum over the heads of the group, softmax
      over the tokens before the window, mean over the queries, max-pooled over ``kernel``
      neighbours.
    - ``R``: ``C`` is the cosine of every two keys (with rotary position), zero on the diagonal. In
      row ``i`` the last ``j`` with ``C_ij > threshold`` is set to zero: of tokens that repeat each
      other, the latest is spared. ``R = softmax over j of mean over i of C_ij``, all ``n`` tokens
      taking part.

    The window itself always stays: ``+inf``. Before the first query: recency.

    Attributes:
        window: queries that are looked at, and last tokens that stay.
        kernel: tokens that are pooled, odd.
        threshold: cosine above which two tokens repeat each other.
        mix_lambda: weight of the importance, 0 to 1. The authors' program has 0.07, their text 0.1.
        shield_first: where no token repeats ``i``, set ``C_ij`` to zero for the first token, as
            the authors' program does (its search falls through to index 0), so that the first
            token is hardly ever redundant. False: set nothing.
    """

    window: int = 8
    kernel: int = 7
    threshold: float = 0.5
    mix_lambda: float = 0.07
    shield_first: bool = True

    needs_mass: ClassVar[bool] = False
    needs_keys: ClassVar[bool] = True

    def __post_init__(self):
        check_window(self.window)
        check_kernel(self.kernel)
        if not 0 <= self.threshold < 1:
            raise UsageError(f"threshold must be at least 0 and below 1, got {self.threshold}")
        if not 0 <= self.mix_lambda <= 1:
            raise UsageError(f"mix_lambda must be between 0 and 1, got {self.mix_lambda}")

    @property
    def needs_queries(self) -> int:
        return self.window

    def __call__(self, ctx: Context) -> Float[Array, "B Hkv S"]:
        """Float32 scores; the highest stay."""
        rank, window = position_rank(ctx), in_window(ctx, self.window)
        importance = self._importance(ctx, rank, window)
        redundancy = self._redundancy(ctx.k, ctx.live, rank)
        weight = jnp.float32(self.mix_lambda)
        scores = weight * importance - (1 - weight) * redundancy
        return or_recency(ctx, jnp.where(window, jnp.inf, scores))

    def _importance(
        self, ctx: Context, rank: Int[Array, "B Hkv S"], window: Bool[Array, "B Hkv S"]
    ) -> Float[Array, "B Hkv S"]:
        logits, seen = query_logits(ctx, self.window)
        attention = softmax(logits.max(2), seen & ~window[:, :, None])
        queries = latest_queries(ctx, self.window).sum(1, dtype=jnp.int32)
        mean = attention.sum(2) / jnp.maximum(queries, 1).astype(jnp.float32)[:, None, None]
        return pool(mean, rank, self.kernel, "max")

    def _redundancy(
        self,
        k: Float[Array, "B Hkv S D"],
        live: Bool[Array, "B Hkv S"],
        rank: Int[Array, "B Hkv S"],
    ) -> Float[Array, "B Hkv S"]:
        # Slots without a token, and those that fill the last block, are keys of zero: their cosine
        # with any key is 0, which neither repeats a token nor adds to a sum.
        slots = k.shape[2]
        padding = ((0, 0), (0, 0), (0, -slots % BLOCK))
        keys = jnp.where(live[..., None], k.astype(jnp.float32), 0)
        keys = keys / (jnp.linalg.norm(keys, axis=3, keepdims=True) + 1e-8)
        keys = jnp.pad(keys, (*padding, (0, 0)))
        rank = jnp.pad(rank, padding)
        column = jnp.arange(keys.shape[2], dtype=jnp.int32)

        def add_rows(total, start):
            rows = jax.lax.dynamic_slice_in_dim(keys, start, BLOCK, 2)
            cosine = einsum_float32("bhid,bhjd->bhij", rows, keys)
            row = start + jnp.arange(BLOCK, dtype=jnp.int32)
            cosine = jnp.where((row[:, None] != column[None])[None, None], cosine, 0)
            repeats = cosine > self.threshold
            spared = jnp.where(repeats, rank[:, :, None], -1).max(3, keepdims=True)
            if self.shield_first:
                spared = jnp.maximum(spared, 0)
            cosine = jnp.where(rank[:, :, None] == spared, 0, cosine)
            return total + cosine.sum(2), None

        starts = jnp.arange(0, keys.shape[2], BLOCK, dtype=jnp.int32)
        total, _ = jax.lax.scan(add_rows, jnp.zeros(rank.shape, jnp.float32), starts)
        tokens = jnp.maximum(live.sum(2, keepdims=True, dtype=jnp.int32), 1)
        return softmax(total[:, :, :slots] / tokens.astype(jnp.float32), live)
