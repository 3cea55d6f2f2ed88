"""A covering set of attention problems, and what attention is in plain NumPy.

Whatever must not be read is made to show: pages that no table names hold NaN and look alive, and
free slots of the other pages hold large numbers or any code, NaN for a scale, and any position.
"""

import dataclasses
import itertools
import random
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels import KVPages
from pallas_kernels.rotation import rotation

GARBAGE = 1e6
PLANES = {"fp8": 1, "int8": 1, "int4": 2, "int2": 4}
LEVELS = {"int8": 127.0, "int4": 7.0, "int2": 1.5}
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
    "page": (16, 64, 128),
    "lengths": tuple(LENGTHS),
    "bias": ("zero", "any"),
    "sinks": (False, True),
    "window": (False, True),
    "cap": (False, True),
    "pools": (1, 2),
    "dtype": ("float32", "bfloat16"),
    "fmt": ("float", "fp8", "int8", "int4", "int2", "int8 int2", "float int4"),
    "basis": (False, True),
}

# What the Mosaic kernel takes.
HOPPER = {
    "head_dim": (64, 128),
    "page": (16, 32, 64, 128),
    "dtype": ("bfloat16",),
    "fmt": ("float", "int8", "int4", "int2", "int8 int2", "float int4"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One choice on every axis.

    The window is one page, so that lengths lie around it too. With ``basis``, keys and values of
    the first pool are rotated, and its keys are balanced and without their mean.
    """

    head_dim: int = 16
    group: int = 4
    page: int = 16
    lengths: str = "around a page"
    bias: str = "any"
    sinks: bool = True
    window: bool = True
    cap: bool = False
    pools: int = 1
    dtype: str = "float32"
    fmt: str = "float"
    basis: bool = False

    def __str__(self) -> str:
        switches = [name for name in ("sinks", "window", "cap", "basis") if getattr(self, name)]
        numbers = f"D{self.head_dim}-G{self.group}-page{self.page}-pools{self.pools}"
        kind = [self.dtype, self.fmt, self.lengths, f"bias {self.bias}"]
        return "-".join([numbers, *kind, *switches])

    def formats(self, index: int) -> tuple[str, str]:
        """Of keys and values; a second pool holds numbers, as the recent tokens' pool does."""
        return ("float", "float") if index else (self.fmt.split()[0], self.fmt.split()[-1])

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
    soft_cap: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        names = ("scale", "q_pos", "window", "sinks", "soft_cap")
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
        soft_cap=1.5 if case.cap else None,
    )


def _pool(rng, case: Case, counts, owner, index: int, dtype) -> tuple[KVPages, Any]:
    """The pool of one codec class; the second one has pages of another size."""
    page = (case.page, 32)[index]
    rows, dim = len(counts), case.head_dim
    width = -(-counts.max() // min(case.page, 32)) + 2
    total = 1 + counts.size * width + 3
    k, v = (_Side(rng, fmt, total, page, dim, dtype) for fmt in case.formats(index))
    bias = np.zeros((total, page))  # what nobody names looks alive
    pos = np.zeros((total, page), np.int32)
    table = np.zeros((rows, KV_HEADS, width), np.int32)
    unused = list(rng.permutation(np.arange(1, total)))

    def clear(number):
        k.clear(number)
        v.clear(number)
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
            k.store(at, 0.0)
            v.store(at, 0.5)
            bias[at] = 0 if case.bias == "zero" else rng.choice([0, -np.inf, -1.5, 2.25])
            pos[at] = token
    basis = {}
    if case.basis and index == 0:
        basis = {
            "mean": jnp.asarray(rng.standard_normal((KV_HEADS, dim)), jnp.float32),
            "balance": jnp.asarray(rng.uniform(0.5, 2, (KV_HEADS, dim)), jnp.float32),
            "rotated": True,
        }
    pages = KVPages(
        jnp.asarray(k.numbers, k.dtype),
        jnp.asarray(v.numbers.swapaxes(1, 2), v.dtype),
        jnp.asarray(bias, jnp.float32),
        jnp.asarray(pos),
        k_scale=None if k.scale is None else jnp.asarray(k.scale[:, :, None], jnp.float16),
        v_scale=None if v.scale is None else jnp.asarray(v.scale[:, None], jnp.float16),
        k_format=k.fmt,
        v_format=v.fmt,
        **basis,
    )
    return pages, jnp.asarray(table)


class _Side:
    """Keys or values to be: one row a slot, and a scale for each if they are codes."""

    def __init__(self, rng, fmt: str, total: int, page: int, dim: int, dtype):
        self.rng, self.fmt = rng, fmt
        coded = fmt != "float"
        self.dtype = jnp.uint8 if coded else dtype
        width = dim // PLANES.get(fmt, 1)
        self.numbers = np.full((total, page, width), 0xA5 if coded else np.nan)
        self.scale = np.full((total, page), np.nan) if coded else None

    def clear(self, number):
        shape = self.numbers[number].shape
        if self.scale is None:
            self.numbers[number] = self.rng.standard_normal(shape) * GARBAGE
        else:
            self.numbers[number] = self._codes(shape)

    def store(self, at, middle: float):
        shape = self.numbers[at].shape
        if self.scale is None:
            self.numbers[at] = self.rng.standard_normal(shape) + middle
        else:
            self.numbers[at] = self._codes(shape)
            self.scale[at] = self.rng.uniform(0.5, 2) / LEVELS.get(self.fmt, 240.0)

    def _codes(self, shape):
        codes = self.rng.integers(0, 256, shape)
        return codes & 0xF7 if self.fmt == "fp8" else codes  # without the two NaN


def plain(pages: KVPages, side: str) -> np.ndarray:
    """Keys, or values, of every slot as the model made them, in float64: [pages, page, D]."""
    numbers, scale, fmt = (np.asarray(getattr(pages, side + part)) if part != "_format" else
                           getattr(pages, side + part)
                           for part in ("", "_scale", "_format"))  # fmt: skip
    numbers = numbers if side == "k" else numbers.swapaxes(1, 2)
    if fmt == "float":
        found = numbers.astype(np.float64)
    elif fmt == "fp8":
        found = numbers.view(jnp.float8_e4m3fn).astype(np.float64)
    else:
        bits = 8 // PLANES[fmt]
        planes = [numbers >> bits * i & 2**bits - 1 for i in range(PLANES[fmt])]
        found = np.concatenate(planes, -1) - (LEVELS[fmt] + (fmt != "int2"))
    if fmt != "float":
        found = found * scale.astype(np.float64).reshape(*found.shape[:2], 1)
    return found @ rotation(found.shape[-1]).T.astype(np.float64) if pages.rotated else found


def oracle(problem: Problem) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Output, log-sum-exp and every slot's attention in float64, one query head at a time."""
    q = np.asarray(problem.q, np.float64)
    group = q.shape[1] // problem.tables[0].shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    masses = [
        np.zeros((*table.shape, pages.page_size))
        for pages, table in zip(problem.pools, problem.tables, strict=True)
    ]
    pools = []
    for pages, table in zip(problem.pools, problem.tables, strict=True):
        bias, pos = (np.asarray(x, np.float64) for x in (pages.bias, pages.pos))
        pools.append((plain(pages, "k"), plain(pages, "v"), bias, pos, np.asarray(table), pages))
    for row, head in np.ndindex(q.shape[:2]):
        kv_head = head // group
        logits, values, where = [], [], []
        for index, (k, v, bias, pos, table, pages) in enumerate(pools):
            key = (
                np.ones(q.shape[2]) if pages.balance is None else np.asarray(pages.balance)[kv_head]
            )
            mean = 0.0 if pages.mean is None else np.asarray(pages.mean, np.float64)[kv_head]
            for place, page in enumerate(table[row, kv_head]):
                for slot in np.flatnonzero(bias[page] > -np.inf):
                    age = int(problem.q_pos[row]) - pos[page, slot]
                    if problem.window is None or age < problem.window:
                        dot = (q[row, head] * (k[page, slot] * key + mean)).sum()
                        own = dot * problem.scale
                        if problem.soft_cap is not None:
                            own = problem.soft_cap * np.tanh(own / problem.soft_cap)
                        logits.append(own + bias[page, slot])
                        values.append(v[page, slot])
                        where.append((index, place, slot))
        if problem.sinks is not None:
            logits.append(float(problem.sinks[head]))
            values.append(np.zeros(q.shape[2]))
        if logits:
            lse[row, head] = np.logaddexp.reduce(logits)
            weights = np.exp(np.array(logits) - lse[row, head])
            out[row, head] = weights @ np.array(values)
            for (index, place, slot), weight in zip(where, weights, strict=False):
                masses[index][row, kv_head, place, slot] += weight
    return out, lse, [mass.reshape(*mass.shape[:2], -1) for mass in masses]


def finite(problem: Problem) -> Problem:
    """The same with scales of free slots that are numbers, which XLA's gather asks for."""

    def number(scale):
        return None if scale is None else jnp.where(jnp.isnan(scale), 1e3, scale)

    pools = [
        dataclasses.replace(p, k_scale=number(p.k_scale), v_scale=number(p.v_scale))
        for p in problem.pools
    ]
    return dataclasses.replace(problem, pools=tuple(pools))


def tolerances(problem: Problem) -> tuple[float, float]:
    """Of the output and of the log-sum-exp.

    Sums are in float32 in any case. Beside integers stand 16-bit numbers, and beside fp8 float16.
    bfloat16 rounds the weights once, and the queries if they are rotated.
    """
    formats = {fmt for pages in problem.pools for fmt in (pages.k_format, pages.v_format)}
    out, lse = 2e-5, 5e-5
    if formats - {"float"}:
        out, lse = 5e-4, 3e-4
    if "fp8" in formats:
        out, lse = 3e-3, 3e-3
    if problem.q.dtype == jnp.bfloat16:
        out = 1.5e-2
        if not all(pages.plain for pages in problem.pools):
            out, lse = 3e-2, 3e-2
    return out, lse


def check(actual: tuple, problem: Problem) -> None:
    """Compare an output, a log-sum-exp and, if there are any, masses with the oracle's."""
    out, lse = (np.asarray(x) for x in actual[:2])
    assert out.dtype == lse.dtype == np.float32
    expected_out, expected_lse, expected_mass = oracle(problem)
    tolerance, lse_tolerance = tolerances(problem)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=tolerance)
    for mass, expected in zip(*(actual[2], expected_mass) if actual[2:] else ((), ()), strict=True):
        np.testing.assert_allclose(mass, expected, rtol=0, atol=10 * tolerance)
    dead = np.isneginf(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), dead)
    np.testing.assert_allclose(lse[~dead], expected_lse[~dead], rtol=0, atol=lse_tolerance)
    nothing = (expected_out == 0).all(-1)
    assert (out[nothing] == 0).all()
