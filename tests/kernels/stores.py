"""Tokens to store, and what storing them is in plain NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import SCRATCH_PAGE, KVPages

PAGES, HEADS = 9, 2
SHAPES = [
    ("float32", 16, 16, 1),
    ("bfloat16", 64, 64, 5),
    ("float32", 128, 16, 9),
    ("bfloat16", 8, 8, 2),
]
"""Dtype, head_dim, page size and tokens."""


def problem(dtype: str, dim: int, page: int, tokens: int, seed: int = 0) -> dict:
    """A pool full of old tokens, and new ones for distinct slots; some go to the scratch page."""
    rng = np.random.default_rng(seed)
    rows = 3

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))

    pool = KVPages(
        k=draw(PAGES, page, dim),
        v=draw(PAGES, dim, page),
        bias=jnp.asarray(rng.choice([0, -np.inf, 1.5, -2], (PAGES, page)), jnp.float32),
        pos=jnp.asarray(rng.integers(-1, 99, (PAGES, page)), jnp.int32),
    )
    places = rng.permutation(np.arange(page, PAGES * page))[: rows * HEADS * tokens]
    places = places.reshape(rows, HEADS, tokens).astype(np.int32)
    pages, slots = places // page, places % page
    pages[0, :, 0] = pages[-1, 1, -1] = SCRATCH_PAGE
    free = {
        "bias": pool.bias.at[SCRATCH_PAGE].set(-jnp.inf),
        "pos": pool.pos.at[SCRATCH_PAGE].set(-1),
    }
    return {
        "pool": dataclasses.replace(pool, **free),
        "pages": jnp.asarray(pages),
        "slots": jnp.asarray(slots),
        "k": draw(rows, HEADS, tokens, dim),
        "v": draw(rows, HEADS, tokens, dim),
        "pos": jnp.asarray(rng.integers(100, 10**6, (rows, tokens)), jnp.int32),
    }


def oracle(pool, pages, slots, k, v, pos) -> KVPages:
    """One token after another."""
    stored = {name: np.array(getattr(pool, name)) for name in ("k", "v", "bias", "pos")}
    for row, head, token in np.ndindex(pages.shape):
        page, slot = int(pages[row, head, token]), int(slots[row, head, token])
        kept = page != SCRATCH_PAGE
        stored["k"][page, slot] = k[row, head, token]
        stored["v"][page, :, slot] = v[row, head, token]
        stored["bias"][page, slot] = 0 if kept else -np.inf
        stored["pos"][page, slot] = pos[row, token] if kept else -1
    return KVPages(**{name: jnp.asarray(value) for name, value in stored.items()})


def bits(pool: KVPages) -> list[bytes]:
    """Every page but the scratch page, and what makes that one free."""
    kept = [np.asarray(x)[SCRATCH_PAGE + 1 :] for x in (pool.k, pool.v, pool.bias, pool.pos)]
    scratch = [np.asarray(x)[SCRATCH_PAGE] for x in (pool.bias, pool.pos)]
    return [array.tobytes() for array in (*kept, *scratch)]


def pointers(pool: KVPages) -> list[int]:
    """Where the pool lies in memory."""
    return [array.unsafe_buffer_pointer() for array in (pool.k, pool.v, pool.bias, pool.pos)]
