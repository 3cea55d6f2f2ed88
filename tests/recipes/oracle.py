"""What a row with known evictions must say: dense attention over what is left, nothing cached."""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.attention import add_sinks, masked_attention
from kvjax.models.rope import rotate, rotation


def logits(lm: kvjax.LanguageModel, tokens, seen, back=None) -> np.ndarray:
    """Float32 logits [T, V] where position ``t`` sees the positions that ``seen[layer, t]`` says.

    Args:
        seen: bool [layers, T, T].
        back: for each query and key [T, T], by how many positions the query is turned back when it
            meets the key.
    """
    config = lm.config
    ids = jnp.asarray(tokens, jnp.int32)[None]
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]

    def attend(index, layer, q, k, v, sinks):
        parts = []
        for t in range(len(tokens)):
            query = jnp.broadcast_to(q[:, t], (len(tokens), *q.shape[2:]))[None]
            if back is not None:
                moved = jnp.asarray(-back[t], jnp.int32)[None]
                query = rotate(query, *rotation(moved, config.rope, config.head_dim))
            # One query a key, so that each key may meet it at another position.
            dots = jnp.einsum(
                "bshgd,bshd->bhgs",
                query.reshape(*query.shape[:2], k.shape[2], -1, q.shape[3]),
                k,
                precision="highest",
            )
            dots = jnp.where(seen[index, t][None, None, None], dots * config.scale, -jnp.inf)
            weights = jax.nn.softmax(dots, -1)
            parts.append(jnp.einsum("bhgs,bshd->bhgd", weights, v, precision="highest"))
        out = jnp.stack(parts, 1).reshape(q.shape)
        assert sinks is None
        return out, layer

    def quick(index, layer, q, k, v, sinks):
        mask = jnp.asarray(seen[index])[None]
        out, lse = masked_attention(q, k, v, mask, config.scale)
        return add_sinks(out, lse, sinks).astype(q.dtype), layer

    hidden, _ = lm.model(
        ids, positions, quick if back is None else attend, (None,) * config.num_layers
    )
    return np.asarray(lm.model.logits(hidden[0]))


def streaming_cuts(prompt: int, total: int, budget: int, sinks: int, every: int) -> np.ndarray:
    """For each position, the first one after the sinks that it still sees.

    The prompt is attended as a whole. After it, and after every ``every`` decoded tokens, the row
    keeps ``budget`` tokens.
    """
    cuts = np.zeros(total, int)
    cut = sinks
    for t in range(total):
        if t >= prompt and (t - prompt) % every == 0:
            cut = max(cut, t - (budget - sinks))
        cuts[t] = cut
    return cuts


def streaming_seen(cuts: np.ndarray, sinks: int, windows) -> np.ndarray:
    """Bool [layers, T, T]; layers with a sliding window ignore the budget."""
    total = len(cuts)
    t, s = np.arange(total)[:, None], np.arange(total)[None]
    causal = s <= t
    kept = causal & ((s < sinks) | (s >= cuts[:, None]))
    return np.stack([kept if window is None else causal & (t - s < window) for window in windows])


def greedy(lm: kvjax.LanguageModel, tokens, prompt: int, end: int, **how) -> list[int]:
    """What is chosen at each position from the prompt's end to ``end``, by the oracle's logits."""
    return logits(lm, tokens, **how)[prompt - 1 : end - 1].argmax(-1).tolist()
