"""Latents of random tokens, scattered over pages, and attention to them in NumPy's float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import SCRATCH_PAGE, KVPages
from pallas_kernels.formats import pack
from pallas_kernels.latent_attention.layout import Basis, Rotary
from pallas_kernels.uniform import encode_uniform

_MIDDLE = {"int8": 128.0, "int4": 8.0, "int2": 1.5}


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes: tokens of each row, blocks of each pool, and how many of the tokens are in each.

    Attributes:
        kv_heads: of one of the devices that have the same latents.
        dtype: of queries, and of latents that are no codes.
        devices: how many there are.
    """

    tokens: tuple[int, ...] = (37, 0, 12)
    blocks: tuple[int, ...] = (1, 4)
    page: int = 8
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    span: int = 64
    fmt: str = "float"
    mean: bool = False
    seed: int = 0
    dtype: str = "float32"
    devices: int = 1

    @property
    def channels(self) -> int:
        return self.kv_heads * self.dim

    @property
    def width(self) -> int:
        return self.devices * self.channels


def problem(case: Case, poison: float = np.nan) -> tuple[dict, tuple]:
    """Arguments of the op, and its latents by position; free slots and pages hold poison."""
    rng = np.random.default_rng(case.seed)
    rows, width = len(case.tokens), case.width

    def basis() -> Basis:
        back = jnp.asarray(rng.standard_normal((width, case.channels)) / 4, jnp.float32)
        mean = jnp.asarray(rng.standard_normal(case.channels), jnp.float32) if case.mean else None
        return Basis(back, mean)

    keys, values = basis(), basis()
    latents = [np.zeros((2, case.span, width)) for _ in case.tokens]
    live = [np.zeros(case.span, bool) for _ in case.tokens]
    pools, tables = [], []
    owners = [rng.integers(len(case.blocks), size=count) for count in case.tokens]
    places = [rng.permutation(case.span)[:count] for count in case.tokens]
    for index, blocks in enumerate(case.blocks):
        store = _Store(case, blocks, rng, poison, rows)
        for row in range(rows):
            for token in np.flatnonzero(owners[row] == index):
                pos = int(places[row][token])
                live[row][pos] = True
                for side in (0, 1):
                    for block in range(int(rng.integers(1, blocks + 1))):
                        store.add(row, 2 * block + side, pos)
        pool, numbers = store.pool()
        pools.append(pool)
        for row, line, pos, page, slot in store.stored:
            own = slice(*(width // blocks * (line // 2 + i) for i in (0, 1)))
            latents[row][line % 2, pos, own] = numbers[page, slot]
        tables.append(store.tables())
    frequencies = 1.0 / 100.0 ** (np.arange(case.dim // 2) / (case.dim // 2))
    arguments = {
        "q": jnp.asarray(rng.standard_normal((rows, case.heads, case.dim)), case.dtype),
        "pools": tuple(pools),
        "tables": tuple(tables),
        "keys": keys,
        "values": values,
        "rotary": Rotary(jnp.asarray(frequencies, jnp.float32), 1.25),
    }
    return arguments, (latents, live)


class _Store:
    """Pages of one pool, filled slot by slot in random order."""

    def __init__(self, case: Case, blocks: int, rng, poison: float, rows: int):
        self._case, self._rng, self._size = case, rng, case.width // blocks
        self._most = -(-case.span // case.page)
        self._lines = [[[] for _ in range(2 * blocks)] for _ in range(rows)]
        self._spare = list(rng.permutation(np.arange(1, rows * 2 * blocks * self._most + 3)))
        self._x = np.full((len(self._spare) + 1, case.page, self._size), poison)
        self._x[SCRATCH_PAGE] = poison
        self._pos = np.full(self._x.shape[:2], -1, np.int32)
        self.stored: list[tuple[int, ...]] = []

    def add(self, row: int, line: int, pos: int) -> None:
        pages = self._lines[row][line]
        free = [(p, s) for p in pages for s in np.flatnonzero(self._pos[p] < 0)]
        if len(free) < 2:  # one slot at least stays free in every page
            pages.append(int(self._spare.pop()))
            free += [(pages[-1], s) for s in range(self._case.page)]
        page, slot = free[self._rng.integers(len(free))]
        self._x[page, slot] = self._rng.standard_normal(self._size)
        self._pos[page, slot] = pos
        self.stored.append((row, line, pos, page, slot))

    def tables(self):
        table = np.full((len(self._lines), len(self._lines[0]), self._most), SCRATCH_PAGE)
        for row, lines in enumerate(self._lines):
            for line, pages in enumerate(lines):
                table[row, line, : len(pages)] = pages
        return jnp.asarray(table, jnp.int32)

    def pool(self) -> tuple[KVPages, np.ndarray]:
        """The pool, and what its slots say."""
        fmt, there = self._case.fmt, (self._pos >= 0)[..., None]
        k, scale = jnp.asarray(self._x, self._case.dtype), None
        numbers = np.asarray(k.astype(jnp.float32))
        if fmt != "float":
            (codes,), scale = encode_uniform([jnp.where(there, k, 0).astype(jnp.float32)], fmt)
            numbers = (np.asarray(codes, np.float32) - _MIDDLE[fmt]) * np.asarray(scale, np.float32)
            k = pack(codes, fmt, -1)
            scale = jnp.where(there, scale, jnp.float16(jnp.nan))
        v = jnp.zeros((len(self._x), 0, self._case.page), self._case.dtype)
        return KVPages(k, v, None, jnp.asarray(self._pos), scale, k_format=fmt), numbers


def expected(
    case: Case, arguments: dict, dense, *, scale: float, window=None, q_pos=None, sinks=None
) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, head by head, in float64."""
    latents, live = dense
    q = np.asarray(arguments["q"], np.float64)
    out, lses = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    frequencies = np.asarray(arguments["rotary"].frequencies, np.float64)
    for row in range(len(q)):
        k, v = (
            latents[row][side] @ np.asarray(basis.back, np.float64)
            + (0 if basis.mean is None else np.asarray(basis.mean, np.float64))
            for side, basis in enumerate((arguments["keys"], arguments["values"]))
        )
        seen = [
            pos
            for pos in np.flatnonzero(live[row])
            if window is None or int(q_pos[row]) - pos < window
        ]
        for head in range(case.heads):
            own = slice(*(case.dim * (head // (case.heads // case.kv_heads) + i) for i in (0, 1)))
            logits = []
            for pos in seen:
                first, second = np.split(k[pos, own], 2)
                cos, sin = np.cos(pos * frequencies), np.sin(pos * frequencies)
                turned = np.concatenate([first * cos - second * sin, second * cos + first * sin])
                logits.append(scale * 1.25 * q[row, head] @ turned)
            every = np.array(logits + ([] if sinks is None else [float(sinks[head])]))
            if not every.size:
                continue
            lses[row, head] = np.logaddexp.reduce(every)
            weights = np.exp(np.array(logits) - lses[row, head])
            out[row, head] = sum(
                (w * v[pos, own] for w, pos in zip(weights, seen, strict=True)),
                np.zeros(case.dim),
            )
    return out, lses
