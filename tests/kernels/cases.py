"""A covering set of attention problems, and what attention is in plain NumPy.

Whatever must not be read is made to show: pages that no table names hold NaN and look alive, and
free slots of the other pages hold large numbers and any position.
"""

import dataclasses
import itertools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages

GARBAGE = 1e6
KV_HEADS = 2
LENGTHS = {
    "around a page": lambda page: [page - 1, page, page + 1],
    "empty between full": lambda page: [2 * page, 0, 3 * page],
    "few": lambda page: [1, 0, page // 2],
    "nothing": lambda page: [0, 0],
}
AXES = {
    "head_dim": (16, 64, 96, 128),
    "group": (1, 3, 4, 8, 16),
    "page": (16, 64),
    "lengths": tuple(LENGTHS),
    "bias": ("zero", "any"),
    "sinks": (False, True),
    "window": (False, True),
    "pools": (1, 2),
    "dtype": ("float32", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One choice on every axis. The window is one page, so that lengths lie around it too."""

    head_dim: int = 16
    group: int = 4
    page: int = 16
    lengths: str = "around a page"
    bias: str = "any"
    sinks: bool = True
    window: bool = True
    pools: int = 1
    dtype: str = "float32"

    def __str__(self) -> str:
        switches = [name for name in ("sinks", "window") if getattr(self, name)]
        numbers = f"D{self.head_dim}-G{self.group}-page{self.page}-pools{self.pools}"
        return "-".join([numbers, self.dtype, self.lengths, f"bias {self.bias}", *switches])

    def pairs(self) -> set[tuple]:
        """Every two choices that this case brings together."""
        return set(itertools.combinations(enumerate(dataclasses.astuple(self)), 2))


def covering(**axes: tuple) -> list[Case]:
    """Few cases that bring every two choices of different axes together."""
    axes = AXES | axes
    rng = random.Random(0)

    def candidate(wanted: tuple) -> Case:
        values = [rng.choice(choices) for choices in axes.values()]
        for axis, value in wanted:
            values[axis] = value
        return Case(*values)

    choices = [[(axis, value) for value in values] for axis, values in enumerate(axes.values())]
    missing = {
        pair for a, b in itertools.combinations(choices, 2) for pair in itertools.product(a, b)
    }
    cases = []
    while missing:
        first = min(missing, key=repr)
        tries = [candidate(first) for _ in range(200)]
        cases.append(max(tries, key=lambda case: len(case.pairs() & missing)))
        missing -= cases[-1].pairs()
    return cases


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of ``paged_attention``."""

    q: Any
    pools: tuple[KVPages, ...]
    tables: tuple[Any, ...]
    scale: float
    q_pos: Any
    window: int | None
    sinks: Any

    @property
    def options(self) -> dict[str, Any]:
        names = ("scale", "q_pos", "window", "sinks")
        return {name: getattr(self, name) for name in names}


def build(case: Case, seed: int = 0) -> Problem:
    """Random tokens in random slots of random pages; heads of a row hold different numbers."""
    rng = np.random.default_rng(seed)
    lengths = LENGTHS[case.lengths](case.page)
    rows, dim = len(lengths), case.head_dim
    counts = np.array([[lengths[(row + head) % rows] for head in range(KV_HEADS)]
                       for row in range(rows)])  # fmt: skip
    counts[:, 1] = np.where(counts[:, 1] > 2, counts[:, 1] - 2, counts[:, 1])
    dtype = jnp.dtype(case.dtype)
    owner = {
        (row, head): rng.integers(0, case.pools, counts[row, head])
        for row, head in np.ndindex(counts.shape)
    }
    parts = [_pool(rng, case, counts, owner, index, dtype) for index in range(case.pools)]
    pools, tables = zip(*parts, strict=True)
    heads = KV_HEADS * case.group
    return Problem(
        q=jnp.asarray(rng.standard_normal((rows, heads, dim)), dtype),
        pools=pools,
        tables=tables,
        scale=dim**-0.5,
        q_pos=jnp.asarray(np.maximum(counts.max(1) - 1, 0), jnp.int32),
        window=case.page if case.window else None,
        sinks=jnp.asarray(rng.standard_normal(heads), jnp.float32) if case.sinks else None,
    )


def _pool(rng, case: Case, counts, owner, index: int, dtype) -> tuple[KVPages, Any]:
    """The pool of one codec class; the second one has pages of another size."""
    page = (case.page, 32)[index]
    rows, dim = len(counts), case.head_dim
    width = -(-counts.max() // min(case.page, 32)) + 2
    total = 1 + counts.size * width + 3
    k = np.full((total, page, dim), np.nan)
    v = np.full((total, dim, page), np.nan)
    bias = np.zeros((total, page))  # what nobody names looks alive
    pos = np.zeros((total, page), np.int32)
    table = np.zeros((rows, KV_HEADS, width), np.int32)
    unused = list(rng.permutation(np.arange(1, total)))

    def clear(number):
        k[number] = rng.standard_normal(k[number].shape) * GARBAGE
        v[number] = rng.standard_normal(v[number].shape) * GARBAGE
        bias[number] = -np.inf
        pos[number] = rng.integers(-(2**31), 2**31, page)

    clear(0)
    for (row, head), pool_of in owner.items():
        tokens = np.flatnonzero(pool_of == index)
        spare = int(rng.integers(0, 2))  # a page with nothing live in it
        used = -(-len(tokens) // page) + spare
        for i in range(used):
            table[row, head, i] = unused.pop()
            clear(table[row, head, i])
        slots = rng.permutation(used * page)[: len(tokens)]
        for token, slot in zip(rng.permutation(tokens), slots, strict=True):
            at = table[row, head, slot // page], slot % page
            k[at] = rng.standard_normal(dim)
            v[at[0], :, at[1]] = rng.standard_normal(dim) + 0.5
            bias[at] = 0 if case.bias == "zero" else rng.choice([0, -np.inf, -1.5, 2.25])
            pos[at] = token
    pages = KVPages(
        jnp.asarray(k, dtype),
        jnp.asarray(v, dtype),
        jnp.asarray(bias, jnp.float32),
        jnp.asarray(pos),
    )
    return pages, jnp.asarray(table)


def oracle(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, one query head at a time over a list of live slots."""
    q = np.asarray(problem.q, np.float64)
    pools = [
        (*(np.asarray(x, np.float64) for x in (p.k, p.v, p.bias, p.pos)), np.asarray(table))
        for p, table in zip(problem.pools, problem.tables, strict=True)
    ]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, head in np.ndindex(q.shape[:2]):
        kv_head = head // (q.shape[1] // problem.tables[0].shape[1])
        logits, values = [], []
        for k, v, bias, pos, table in pools:
            for page in table[row, kv_head]:
                for slot in np.flatnonzero(bias[page] > -np.inf):
                    age = int(problem.q_pos[row]) - pos[page, slot]
                    if problem.window is None or age < problem.window:
                        dot = (q[row, head] * k[page, slot]).sum()
                        logits.append(dot * problem.scale + bias[page, slot])
                        values.append(v[page, :, slot])
        if problem.sinks is not None:
            logits.append(float(problem.sinks[head]))
            values.append(np.zeros(q.shape[2]))
        if logits:
            lse[row, head] = np.logaddexp.reduce(logits)
            weights = np.exp(np.array(logits) - lse[row, head])
            out[row, head] = weights @ np.array(values)
    return out, lse


def check(actual: tuple, problem: Problem) -> None:
    """Compare an output and a log-sum-exp with the oracle's."""
    out, lse = (np.asarray(x) for x in actual)
    assert out.dtype == lse.dtype == np.float32
    expected_out, expected_lse = oracle(problem)
    # Sums are in float32 in any case; bfloat16 rounds the weights once.
    tolerance = 2e-5 if problem.q.dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=tolerance)
    dead = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), dead)
    np.testing.assert_allclose(lse[~dead], expected_lse[~dead], rtol=0, atol=5e-5)
    nothing = (expected_out == 0).all(-1)
    assert (out[nothing] == 0).all()
