"""The public op: what goes in is checked here, then a backend computes it."""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.latent_attention.layout import Basis, Rotary, blocks_of
from pallas_kernels.latent_attention.triton import latent_attention_triton, unsupported
from pallas_kernels.latent_attention.xla import latent_attention_xla
from pallas_kernels.layout import KVPages

Implementation = Literal["triton", "xla"]


def latent_attention(
    q: Float[Array, "B Hq D"],
    pools: Sequence[KVPages],
    tables: Sequence[Int[Array, "B _ _"]],
    keys: Basis,
    values: Basis,
    rotary: Rotary,
    *,
    scale: float,
    span: int,
    q_pos: Int[Array, " B"] | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B Hq D"], Float[Array, "B Hq"]]:
    """Softmax attention of one query a row to keys and values that are stored as latents.

    A token's key is its latent times ``keys.back``, plus the mean, turned to its position; its
    value likewise, without being turned. Components that are not stored count as zero. How latents
    lie in pages: see `pallas_kernels.latent_attention.layout`.

    Args:
        q: queries with their rotary position applied, as the model made them.
        pools: of latents, cut into blocks of different widths perhaps; a token is in one of them.
        tables: for each pool, the pages of every row and block, padded with ``SCRATCH_PAGE``.
        keys: what rebuilds keys.
        values: what rebuilds values.
        rotary: how keys are turned.
        scale: multiplies ``q . k``.
        span: positions are below this.
        q_pos: logical position of each row's query; needed with ``window`` alone.
        window: if given, only tokens with ``q_pos - pos < window`` are seen.
        sinks: a learned logit for each query head that takes mass and has no value (GPT-OSS).
        implementation: a backend by name, which fails loudly where it cannot run; ``None`` takes
            the kernels on NVIDIA GPUs where they can run, and XLA otherwise.

    Returns:
        The float32 output, zero for a row without tokens, and the float32 log-sum-exp of its
        logits, sink included (``-inf`` where there is nothing).

    Raises:
        ValueError: shapes, dtypes or options that do not fit together.
        NotImplementedError: the named backend cannot run this.
    """
    _check(q, pools, tables, keys, values, rotary, span, q_pos, window, sinks)
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f"implementation must be None, 'triton' or 'xla', got {implementation!r}")
    arguments = q, tuple(pools), tuple(tables), keys, values, rotary
    arrays = {"q_pos": q_pos, "sinks": sinks}

    def backend(function):
        def call(*arguments):
            *arguments, arrays = arguments
            return function(*arguments, scale=scale, span=span, window=window, **arrays)

        return call

    triton, xla = backend(latent_attention_triton), backend(latent_attention_xla)
    if implementation == "triton":
        return triton(*arguments, arrays)
    if implementation == "xla" or unsupported(q, arguments[1]):
        return xla(*arguments, arrays)
    return jax.lax.platform_dependent(*arguments, arrays, cuda=triton, default=xla)


def _check(q, pools, tables, keys, values, rotary, span, q_pos, window, sinks) -> None:
    rows, heads, dim = q.shape
    width, channels = keys.back.shape
    if not pools or len(pools) != len(tables):
        raise ValueError(f"need one table a pool, got {len(pools)} pools, {len(tables)} tables")
    if channels % dim or heads % (channels // dim):
        raise ValueError(
            f"{channels} channels must be KV heads that divide the query heads, got {q.shape=}"
        )
    for name, basis in (("keys", keys), ("values", values)):
        if basis.back.shape != (width, channels):
            raise ValueError(f"{name}.back must be ({width}, {channels}), got {basis.back.shape}")
    if rotary.frequencies.shape != (dim // 2,):
        raise ValueError(f"need {dim // 2} frequencies, got {rotary.frequencies.shape}")
    if span < 1:
        raise ValueError(f"span must be at least 1, got {span}")
    for pool, table in zip(pools, tables, strict=True):
        if len(table) != rows or not jnp.issubdtype(table.dtype, jnp.integer):
            raise ValueError(
                f"a table must be integer ({rows}, ..), got {table.dtype} {table.shape}"
            )
        blocks_of(pool, table, width)
    if window is not None and q_pos is None:
        raise ValueError(f"{window=} needs `q_pos`, the logical position of each row's query")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape ({heads},), got {sinks.shape}")
