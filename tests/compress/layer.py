"""Random caches of one layer, and what a selector may see of them as plain Python lists.

Whatever must not be read is made to show: a slot without a token holds NaN and any position, and
so does a query that has not been asked yet.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvjax.compress import Context

KV_HEADS, SLOTS, QUERIES, DIM = 2, 48, 12, 8
# Read so far, and how many queries are held: the last rows were restored with few or none.
LENGTHS, HELD = (200, 45, 9, 5, 1, 0, 30, 35), (12, 12, 9, 5, 1, 0, 0, 3)
BIASES = (0.0, 0.0, -1.5, 2.25)


@dataclasses.dataclass(frozen=True)
class Token:
    """What a slot holds."""

    slot: int
    pos: int
    bias: float
    key: np.ndarray
    mass: float
    value: np.ndarray
    segment: int
    must: bool


def build(group: int, seed: int = 0, **sizes) -> Context:
    """Rows of different lengths whose heads hold different tokens, some of the last ones gone."""
    lengths, held = sizes.get("lengths", LENGTHS), sizes.get("held", HELD)
    slots = sizes.get("slots", SLOTS)
    rng = np.random.default_rng(seed)
    rows, shape = len(lengths), (len(lengths), KV_HEADS, slots)
    bias, mass = np.full(shape, -np.inf), np.full(shape, np.nan)
    pos, k = rng.integers(-(2**31), 2**31, shape), np.full((*shape, DIM), np.nan)
    v, segment = k.copy(), rng.integers(-(2**31), 2**31, shape)
    must = rng.random(shape) < 0.5
    for row, head in np.ndindex(shape[:2]):
        most = min(lengths[row], slots - 5)
        count = most if row % 2 == head else most - most // 4
        at = rng.permutation(slots)[:count]
        bias[row, head, at] = rng.choice(BIASES, count)
        pos[row, head, at] = rng.permutation(lengths[row])[:count]
        k[row, head, at] = rng.standard_normal((count, DIM))
        mass[row, head, at] = rng.random(count) * 5
        v[row, head, at] = rng.standard_normal((count, DIM))
        segment[row, head, at] = pos[row, head, at] // 13 * 3
        must[row, head, at] = pos[row, head, at] >= lengths[row] - 4
    queries = np.full((rows, QUERIES, KV_HEADS * group, DIM), np.nan)
    query_pos = np.full((rows, QUERIES), -1)
    for row in range(rows):
        at = rng.permutation(QUERIES)[: held[row]]
        queries[row, at] = rng.standard_normal((held[row], KV_HEADS * group, DIM))
        query_pos[row, at] = lengths[row] - 1 - np.arange(held[row])
    return Context(
        bias=jnp.asarray(bias, jnp.float32),
        pos=jnp.asarray(pos, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        prompt=jnp.asarray([length // 3 for length in lengths], jnp.int32),
        seed=jnp.asarray(7, jnp.int32),
        k=jnp.asarray(k, jnp.float32),
        queries=jnp.asarray(queries, jnp.float32),
        query_pos=jnp.asarray(query_pos, jnp.int32),
        mass=jnp.asarray(mass, jnp.float32),
        v=jnp.asarray(v, jnp.float32),
        segment=jnp.asarray(segment, jnp.int32),
        must=jnp.asarray(must),
        room=jnp.full(rows, sizes.get("room", 17), jnp.int32),
        layer=3,
        scale=0.6,
    )


def tokens_of(ctx: Context, row: int, head: int) -> list[Token]:
    """The tokens that a KV head holds, in order of position."""
    names = ("pos", "bias", "k", "mass", "v", "segment", "must")
    pos, bias, k, mass, v, segment, must = (
        np.asarray(getattr(ctx, name))[row, head] for name in names
    )
    found = [
        Token(
            slot,
            int(pos[slot]),
            float(bias[slot]),
            k[slot].astype(float),
            float(mass[slot]),
            v[slot].astype(float),
            int(segment[slot]),
            bool(must[slot]),
        )
        for slot in range(len(bias))
        if bias[slot] != -np.inf
    ]
    return sorted(found, key=lambda token: token.pos)


def queries_of(ctx: Context, row: int, head: int) -> dict[int, list[np.ndarray]]:
    """By position: the vectors of the query heads that read a KV head."""
    group = ctx.queries.shape[2] // ctx.bias.shape[1]
    heads = range(head * group, (head + 1) * group)
    queries, positions = np.asarray(ctx.queries)[row], np.asarray(ctx.query_pos)[row]
    return {
        int(pos): [queries[i, h].astype(float) for h in heads]
        for i, pos in enumerate(positions)
        if pos >= 0
    }


def row_of(ctx: Context, row: int) -> Context:
    """The cache of one row alone."""
    names = ("bias", "pos", "length", "prompt", "k", "queries", "query_pos", "mass")
    names += ("v", "segment", "must", "room")
    rows = {name: getattr(ctx, name)[row : row + 1] for name in names}
    return dataclasses.replace(ctx, **rows)


def permuted(ctx: Context, order: np.ndarray) -> Context:
    """The same tokens in other slots: ``order`` [B, Hkv, S] names where each comes from."""

    def move(array):
        index = order.reshape(order.shape + (1,) * (array.ndim - 3))
        return jnp.asarray(np.take_along_axis(np.asarray(array), index, axis=2))

    slots = ("bias", "pos", "k", "mass", "v", "segment", "must")
    return dataclasses.replace(ctx, **{name: move(getattr(ctx, name)) for name in slots})


def widened(ctx: Context, before: int, after: int) -> Context:
    """The same cache with more free slots, which hold garbage, around its own."""
    wide = {}
    fills = {"bias": -jnp.inf, "pos": 2, "k": jnp.nan, "mass": jnp.nan, "v": jnp.nan}
    for name, fill in (fills | {"segment": 1, "must": True}).items():
        array = getattr(ctx, name)
        widths = [(0, 0), (0, 0), (before, after)] + [(0, 0)] * (array.ndim - 3)
        wide[name] = jnp.pad(array, widths, constant_values=fill)
    return dataclasses.replace(ctx, **wide)
