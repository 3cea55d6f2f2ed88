"""Caches whose keys lie in clusters, and what attention over them gives in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.compress import Context, keep_mask
from kvjax.compress.selectors import HighestAttention
from kvjax.matching import Fitted, match_errors

DIM, HEADS = 16, 2


def clustered(seed: int, tokens: int, positions: int, group: int = 2, free: int = 5) -> Context:
    """One row; a few free slots hold NaN, and a query sees what lies before it.

    The queries belong to the last ``positions`` positions, all of which the keys go up to.
    """
    rng = np.random.default_rng(seed)
    slots = tokens + free
    centers = rng.standard_normal((HEADS, 12, DIM))
    cluster = rng.integers(12, size=(HEADS, tokens))
    k = np.full((HEADS, slots, DIM), np.nan)
    v, bias, pos = k.copy(), np.full((HEADS, slots), -np.inf), np.full((HEADS, slots), -7)
    for head in range(HEADS):
        at = rng.permutation(slots)[:tokens]
        own = centers[head, cluster[head]]
        k[head, at] = own + 0.5 * rng.standard_normal((tokens, DIM))
        v[head, at] = np.roll(own, 1, 1) + 0.5 * rng.standard_normal((tokens, DIM))
        bias[head, at], pos[head, at] = 0, np.arange(tokens)
    ctx = Context(
        bias=jnp.asarray(bias[None], jnp.float32),
        pos=jnp.asarray(pos[None], jnp.int32),
        length=jnp.asarray([tokens], jnp.int32),
        prompt=jnp.asarray([0], jnp.int32),
        seed=jnp.int32(0),
        k=jnp.asarray(k[None], jnp.float32),
        v=jnp.asarray(v[None], jnp.float32),
        scale=0.4,
    )
    return asked(ctx, centers, rng, positions, group)


def asked(ctx: Context, centers, rng, positions: int, group: int, after: bool = False) -> Context:
    """The same cache with queries, which come after all of its tokens or belong to the last."""
    rows = np.repeat(centers[:, None], group, 1).reshape(HEADS * group, *centers.shape[1:])
    which = rng.integers(12, size=(positions, HEADS * group))
    q = 1.2 * rng.standard_normal((positions, HEADS * group, DIM))
    q += np.stack([rows[head, which[:, head]] for head in range(HEADS * group)], 1)
    first = int(ctx.length[0]) - (0 if after else positions)
    query_pos = first + np.arange(positions)
    return dataclasses.replace(
        ctx,
        queries=jnp.asarray(q[None], jnp.float32),
        query_pos=jnp.asarray(query_pos[None], jnp.int32),
    )


def pair(seed: int, tokens: int, positions: int, held_out: int) -> tuple[Context, Context]:
    """A cache with queries that come after it, and the same with others of the same kind."""
    ctx = clustered(seed, tokens, 1)
    rng = np.random.default_rng(seed)
    centers = rng.standard_normal((HEADS, 12, DIM))  # the first draws of ``clustered``
    draws = np.random.default_rng(seed + 1000)
    return tuple(asked(ctx, centers, draws, n, 2, after=True) for n in (positions, held_out))


@functools.partial(
    jax.jit, static_argnums=(0, 4), compiler_options={"xla_backend_optimization_level": 0}
)
def match(matching, ctx, keep, fixed, count: int) -> Fitted:
    return matching(ctx, keep, fixed, count)


@functools.cache
def _errors():
    return jax.jit(match_errors)


def errors(ctx, fitted) -> np.ndarray:
    """Log mass, mass and output, mean over the heads."""
    found = _errors()(ctx, fitted)
    return np.array([float(x.mean()) for x in (found.log_mass, found.mass, found.output)])


def best(ctx: Context, count: int):
    """The slots that get the highest attention."""
    return _best(ctx, jnp.int32(count))


@functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
def _best(ctx, count):
    scores = HighestAttention(window=4096)(ctx)
    return keep_mask(scores, ctx.live, ctx.pos, jnp.zeros_like(ctx.live), count)


def nothing(ctx: Context):
    return jnp.zeros_like(ctx.live)


@dataclasses.dataclass(frozen=True)
class Plain:
    """Attention of one KV head in float64: logits where seen, -inf elsewhere."""

    logits: np.ndarray
    v: np.ndarray

    @property
    def shift(self) -> np.ndarray:
        return np.maximum(self.logits.max(1, keepdims=True), -1e9)  # if nothing is seen

    @property
    def outputs(self) -> np.ndarray:
        e = np.exp(self.logits - self.shift)
        return e / np.maximum(e.sum(1, keepdims=True), 1e-30) @ self.v


def plain(ctx: Context, head: int, fitted: Fitted | None = None, row: int = 0) -> Plain:
    """Of a head's tokens in their slots, or of its fitted slots without padding."""
    k, v, bias, pos = (
        np.asarray(x)[row, head].astype(float) for x in (ctx.k, ctx.v, ctx.bias, ctx.pos)
    )
    at = np.flatnonzero(bias > -np.inf)
    if fitted is not None:
        valid = np.asarray(fitted.valid)[row, head]
        at = np.asarray(fitted.index)[row, head][valid]
        bias, v = bias.copy(), v.copy()
        bias[at] = np.asarray(fitted.bias)[row, head][valid]
        v[at] = np.asarray(fitted.v)[row, head][valid]
    group = ctx.queries.shape[2] // ctx.bias.shape[1]
    held = np.asarray(ctx.query_pos)[row] >= 0
    q = np.asarray(ctx.queries)[row, held, head * group : (head + 1) * group].astype(float)
    q = q.transpose(1, 0, 2).reshape(-1, q.shape[2])
    query_pos = np.tile(np.asarray(ctx.query_pos)[row, held], group)
    logits = q @ k[at].T * ctx.scale + bias[at]
    return Plain(np.where(pos[at] <= query_pos[:, None], logits, -np.inf), v[at])
