"""Reading whole prompts, a chunk at a time."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache import KVCache
from kvjax.cache.plan import PREFILL_CHUNK, bucket
from kvjax.decoding.prefill import prefill_chunk
from kvjax.loading import LanguageModel
from kvjax.recipes import Recipe


def prefill_prompts(
    lm: LanguageModel,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    recipe: Recipe,
    seed: int,
) -> tuple[KVCache, Float[Array, "B V"]]:
    """The cache with a prompt in each row, and the float32 logits after each row's last token.

    Args:
        lm: what ``kvjax.load`` returned.
        cache: whose rows are empty; its layers are donated.
        prompts: token ids; rows beyond them stay empty.
        recipe: how the cache is kept.
        seed: of selectors that draw, 32 bits.
    """
    rows = len(cache.length)
    lengths = np.zeros(rows, np.int32)
    lengths[: len(prompts)] = [len(ids) for ids in prompts]
    logits = jnp.zeros((rows, lm.config.vocab_size), jnp.float32)
    for start in range(0, lengths.max(), PREFILL_CHUNK):
        count = np.clip(lengths - start, 0, PREFILL_CHUNK)
        tokens = np.zeros((rows, bucket(int(count.max()))), np.int32)
        for i, ids in enumerate(prompts):
            tokens[i, : count[i]] = ids[start : start + PREFILL_CHUNK]
        cache, logits = prefill_chunk(
            lm.model,
            cache,
            logits,
            tokens,
            count,
            seed_bits(seed),
            recipe=recipe,
            longest=start + int(count.max()),
        )
    return cache, logits


def seed_bits(seed: int) -> np.ndarray:
    """A seed of 32 bits as the selectors take it."""
    return np.asarray(seed, np.uint32).astype(np.int32)
