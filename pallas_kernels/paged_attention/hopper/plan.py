"""How pools are read by the Mosaic kernel, and which ones."""

import dataclasses

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.layout import KVPages
from pallas_kernels.paged_attention.hopper.lanes import Lanes
from pallas_kernels.paged_attention.operands import INTEGERS, TOP

WARPS = 4
HEADS = 4  # of a product's eight columns, two for each
MOST = 225 * 1024  # bytes of shared memory that stages may have; barriers take some more


@dataclasses.dataclass(frozen=True)
class Launch:
    """How pools are read.

    Attributes:
        programs: to aim at, in all, for a pool.
        stages: steps whose pages are there or on their way, four at most.
        nbytes: of a step's pages, at most, where that leaves 16 slots a warp.
    """

    programs: int = 264
    stages: int = 2
    nbytes: int = 40 * 1024


def launch_for(
    pools: tuple[KVPages, ...], tables: tuple[Array, ...], dim: int, group: int
) -> Launch:
    """The fastest on an H200.

    Three steps of 20 KiB leave room for four programs an SM, where two of 40 KiB leave it for
    three. Of codes that are so short that a program takes whole rows that is faster: while one
    computes queries or puts sums together, more copies of others go on. Programs of several such
    pools, or of more heads, have too many registers for it.
    """
    rows, kv_heads, _ = tables[0].shape
    short = Launch(stages=3, nbytes=20 * 1024)
    coded = [plan_of(*x, dim, short) for x in zip(pools, tables, strict=True) if not x[0].plain]
    few = len(coded) == 1 and coded[0].stage <= short.nbytes and group <= HEADS
    return short if few and rows * kv_heads > short.programs else Launch()


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values of one format.

    Attributes:
        dim: channels of a head.
        chunk: consecutive bytes that a thread takes at a time; four threads take a row together.
    """

    fmt: str
    dim: int
    chunk: int

    @property
    def coded(self) -> bool:
        return self.fmt in INTEGERS

    @property
    def kind(self) -> str:
        return "s8" if self.coded else "bf16"

    @property
    def planes(self) -> int:
        return {"int4": 2, "int2": 4}.get(self.fmt, 1)

    @property
    def width(self) -> int:
        """Bytes of a slot."""
        return self.dim // self.planes if self.coded else 2 * self.dim

    @property
    def run(self) -> int:
        """Consecutive channels that a thread takes at a time."""
        return self.chunk if self.coded else self.chunk // 2

    @property
    def unit(self) -> float:
        return INTEGERS[self.fmt][3] * TOP

    def signed(self, lanes: Lanes, word, plane: int):
        """Four codes of a plane as signed bytes."""
        if not self.coded:
            return word
        left, mask, flip, _ = INTEGERS[self.fmt]
        left -= 8 // self.planes * plane
        return lanes.select(word << left if left else word, _four(mask), _four(flip))


def _four(byte: int) -> int:
    """A word of four equal bytes."""
    word = byte * 0x01010101
    return word - 2**32 if word >= 2**31 else word


def pitch(dim: int) -> int:
    """Numbers from one head's sums to the next one's, where four warps' are put together.

    As many as threads read, and then some: those of neighbouring heads store to other banks.
    """
    return -(-dim // 32) * 32 + 8


def _chunk(width: int) -> int:
    """The most bytes of a row that one of four threads can load at a time; none where there are."""
    return next((n for n in (16, 8, 4) if width % (4 * n) == 0), 0)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one pool is read.

    Attributes:
        rotated: whether keys and values are, as ``pallas_kernels.rotation`` has it.
        page: slots of a page.
        span: slots that a warp takes in a step.
        width: pages that the table may name.
        count: programs of a row and KV head.
        most: stages to have, if there is so much to do and room for them.
        arrays: what every page has, as (name, bytes of a page).
    """

    k: Side
    v: Side
    rotated: bool
    page: int
    span: int
    width: int
    count: int
    most: int
    arrays: tuple[tuple[str, int], ...]

    @property
    def share(self) -> int:
        """Steps of a program at most."""
        return pl.cdiv(pl.cdiv(self.width, self.pages), self.count)

    @property
    def pages(self) -> int:
        """Pages of a step."""
        return WARPS * self.span // self.page

    @property
    def alone(self) -> bool:
        """Whether a warp reads nothing but what it fetches, and so needs no other."""
        return self.pages == WARPS

    @property
    def stage(self) -> int:
        """Bytes of a step's pages."""
        return self.pages * sum(nbytes for _, nbytes in self.arrays)

    @property
    def stages(self) -> int:
        """Steps whose pages are there or on their way."""
        return min(self.most, self.share, max(2, MOST // self.stage))

    @property
    def arrivals(self) -> list[int]:
        """Warps that arrive at each barrier: those of full stages, then those of free ones."""
        each = WARPS if self.alone else 1
        return [WARPS // each] * (2 * self.stages * each)

    @property
    def ring(self) -> int:
        """Bytes of shared memory for all stages."""
        return self.stages * self.stage

    def at(self, name: str) -> int:
        """Where an array begins in a stage."""
        names = [name for name, _ in self.arrays]
        return self.pages * sum(nbytes for _, nbytes in self.arrays[: names.index(name)])


def unsupported(
    queries: tuple[Array, ...], pools: tuple[KVPages, ...], tables: tuple[Array, ...]
) -> str | None:
    """Why the kernel cannot run on these shapes, None where it can."""
    q = queries[0]
    group, dim = q.shape[1] // tables[0].shape[1], q.shape[2]
    if group > 16:
        return f"at most 16 query heads may share a KV head, got {group}"
    if q.dtype != jnp.bfloat16:
        return f"queries must be bfloat16, got {q.dtype}"
    for pages, table in zip(pools, tables, strict=True):
        page = pages.page_size
        for fmt, scale in ((pages.k_format, pages.k_scale), (pages.v_format, pages.v_scale)):
            if fmt not in ("float", *INTEGERS):
                return f"no codes of {fmt}"
            if scale is not None and scale.dtype != jnp.float16:
                return f"scales must be float16, got {scale.dtype}"
        if pages.rotated and dim & (dim - 1):
            return f"rotated heads must have a power of two of channels, got {dim}"
        if not pages.uniform:
            return "codes need one scale a slot and no zero point"
        if page not in (16, 32, 64, 128):
            return f"the page size must be 16, 32, 64 or 128, got {page}"
        for name in ("k", "v"):
            array, fmt = getattr(pages, name), getattr(pages, f"{name}_format")
            if fmt == "float" and array.dtype != jnp.bfloat16:
                return f"pages must be codes or bfloat16, got {array.dtype}"
        if not _chunk(pages.k.shape[2] * pages.k.dtype.itemsize) or pages.v.shape[1] % 16:
            return f"a slot's codes must have a multiple of 16 bytes, got {dim=}"
        if plan_of(pages, table, dim, Launch()).ring > MOST:
            return f"two steps need more than {MOST} bytes of shared memory, with {page=} {dim=}"
    return None


def plan_of(pages: KVPages, table, dim: int, launch: Launch) -> Plan:
    """The widest steps that are no larger than asked for, or else the narrowest."""
    rows, kv_heads, width = table.shape
    page = pages.page_size
    names = ("k", "v", "bias", "k_scale", "v_scale", "pos")
    arrays = {name: getattr(pages, name) for name in names}
    nbytes = tuple(
        (name, array.size // array.shape[0] * array.dtype.itemsize)
        for name, array in arrays.items()
        if array is not None
    )
    size = pages.v.dtype.itemsize

    def plan(span):
        k = Side(pages.k_format, dim, _chunk(pages.k.shape[2] * pages.k.dtype.itemsize))
        v = Side(pages.v_format, dim, span * size // 4)
        steps = -(-width * page // (WARPS * span))
        count = min(steps, max(1, launch.programs // (rows * kv_heads)))
        return Plan(k, v, pages.rotated, page, span, width, count, launch.stages, nbytes)

    spans = [n for n in (16, 32, 64) if n <= page <= WARPS * n and n * size <= 64]
    plans = [plan(span) for span in spans]
    return next((p for p in reversed(plans) if p.stage <= launch.nbytes), plans[0])
