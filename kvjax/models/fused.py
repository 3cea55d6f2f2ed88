"""Attention of whole sequences to themselves by cuDNN, whose scores never reach memory.

For training: at 1,024 tokens the scores of a small model are most of what a step reads and writes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvjax.models.attention import causal_attention

_AGREES = 0.03  # of the norm: bfloat16 rounds weights to 2**-9, and cuDNN and XLA at other places


def fused_attention(
    q: Float[Array, "B T Hq D"],
    k: Float[Array, "B T Hkv D"],
    v: Float[Array, "B T Hkv D"],
    scale: float,
    window: int | None,
) -> Float[Array, "B T Hq D"]:
    """Causal attention of rows to themselves; query head ``h`` reads KV head ``h // (Hq // Hkv)``.

    Args:
        q: rotated queries, bfloat16.
        k: rotated keys, bfloat16.
        v: values, bfloat16.
        scale: of the logits.
        window: tokens that one sees, itself included, or None for all.
    """
    side = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=True, local_window_size=side, implementation="cudnn"
    )


@functools.cache
def fused_attention_works(
    dtype: DTypeLike, length: int, heads: int, dim: int, kv_heads: int, window: int | None
) -> bool:
    """Whether the device has it for such rows, and agrees with `causal_attention` on some.

    What cuDNN takes depends on its version, the GPU and the shapes, so it is tried, once a process,
    forwards and backwards.
    """
    if dtype != jnp.bfloat16 or jax.default_backend() != "gpu":
        return False
    rng = np.random.default_rng(0)
    shapes = [(1, length, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
    *parts, weight = (rng.standard_normal(shape, np.float32) for shape in shapes)
    scale = dim**-0.5

    def fused(*parts):
        parts = (part.astype(jnp.bfloat16) for part in parts)
        return fused_attention(*parts, scale, window).astype(jnp.float32)

    def plain(*parts):
        order = jnp.arange(length, dtype=jnp.int32)[None]
        return causal_attention(*parts, order, scale, window)[0]

    def tried(attention):
        def loss(*parts):
            out = attention(*parts)
            return (out * weight).sum(), out

        return jax.device_get(jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*parts))

    try:
        with jax.ensure_compile_time_eval():  # also where a program that uses it is being traced
            found, expected = (jax.tree.leaves(tried(each)) for each in (fused, plain))
    except Exception:  # whatever it is, the other one works
        return False
    gaps = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]
    return bool(max(gaps) < _AGREES)
