"""``paged_attention`` for Hopper GPUs: pages come by bulk copies, some steps before they are read.

A program is one warpgroup and takes one row, one KV head and a share of one pool's pages; all pools
are in one launch. A step is ``4 * span`` slots in whole pages, ``span`` for each warp, which keeps
its own top logit and sums until the end, so that no warp waits for another but for copies. As in
the Triton kernel, pages stand on the left of products of bytes, and what stands on the right is two
numbers in neighbouring columns, of which the sum is finer than either: the two bytes of a 16-bit
number, or a bfloat16 and what it left over. ``lanes`` has the threads' own instructions.

Nothing is moved to put fragments together, for the order of what a product sums over is free: a
thread takes consecutive bytes of a key's row, and likewise of a value's, and slots stand in such an
order in the rows of the first product that its results are, transposed, the second one's fragments.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import SCRATCH_PAGE, KVPages
from pallas_kernels.paged_attention.lanes import THREADS, Copy, Lanes
from pallas_kernels.paged_attention.operands import INTEGERS, LOWEST, NEG_INF, ROUND, TINY, TOP
from pallas_kernels.paged_attention.triton import LOG2E, combine

_CAPABILITY = "9.0"
_WARPS = 4
_HEADS = 4  # of a product's eight columns, two for each
_START = 256  # where the first stage begins, after the barriers
_MOST = 227 * 1024  # bytes of shared memory that a program may have


@dataclasses.dataclass(frozen=True)
class Launch:
    """How pools are read.

    Attributes:
        programs: to aim at, in all, for a pool.
        stages: steps whose pages are there or on their way, four at most.
        nbytes: of a step's pages, at most, where that leaves 16 slots a warp.
    """

    programs: int = 264
    stages: int = 3
    nbytes: int = 40 * 1024


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
        return _WARPS * self.span // self.page

    @property
    def alone(self) -> bool:
        """Whether a warp reads nothing but what it fetches, and so needs no other."""
        return self.pages == _WARPS

    @property
    def stage(self) -> int:
        """Bytes of a step's pages."""
        return self.pages * sum(nbytes for _, nbytes in self.arrays)

    @property
    def stages(self) -> int:
        """Steps whose pages are there or on their way."""
        return min(self.most, self.share, max(2, (_MOST - _START) // self.stage))

    @property
    def ring(self) -> int:
        """Bytes of shared memory for all stages."""
        return _START + self.stages * self.stage

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
        if _plan(pages, table, dim, Launch()).ring > _MOST:
            return f"two steps need more than {_MOST} bytes of shared memory, with {page=} {dim=}"
    return None


def other_device() -> str | None:
    """Why this is no device for the kernel, None where it is: for others, the compiler crashes."""
    needs = f"needs a GPU of compute capability {_CAPABILITY} (H100, H200, GH200)"
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:  # what is compiled for, which need not be there
        kind = described.device_kind
        return None if re.search(r"\bG?H[1-9]00\b", kind) else f"{needs}, got {kind}"
    device = jax.local_devices()[0]
    found = getattr(device, "compute_capability", None)
    return None if found == _CAPABILITY else f"{needs}, got {device.device_kind}"


def paged_attention_mosaic(
    queries: tuple[Float[Array, "B Hq D"], ...],
    pools: tuple[KVPages, ...],
    tables: tuple[Int[Array, "B Hkv _"], ...],
    *,
    scale: float,
    q_pos: Int[Array, " B"] | None,
    window: int | None,
    sinks: Float[Array, " Hq"] | None,
    soft_cap: float | None = None,
    with_mass: bool = False,
    launch: Launch | None = None,
    interpret: bool = False,
) -> tuple:
    """See ``pallas_kernels.paged_attention``.

    Raises:
        NotImplementedError: the shapes are not for this kernel.
    """
    reason = unsupported(queries, pools, tables)
    if with_mass:
        reason = "it cannot tell the attention that every slot received"
    if reason is None and not interpret:
        reason = other_device()
    if reason:
        raise NotImplementedError(f"mosaic paged_attention: {reason}")
    parts = _shares(
        queries,
        pools,
        tables,
        q_pos if window is not None else None,
        launch=launch or Launch(),
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    return combine([parts], [lambda out: out], queries[0], sinks)


def _plan(pages: KVPages, table, dim: int, launch: Launch) -> Plan:
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
        steps = -(-width * page // (_WARPS * span))
        count = min(steps, max(1, launch.programs // (rows * kv_heads)))
        return Plan(k, v, pages.rotated, page, span, width, count, launch.stages, nbytes)

    spans = [n for n in (16, 32, 64) if n <= page <= _WARPS * n and n * size <= 64]
    plans = [plan(span) for span in spans]
    return next((p for p in reversed(plans) if p.stage <= launch.nbytes), plans[0])


# Compiled by itself, so that equal layers trace it once.
@functools.partial(jax.jit, static_argnames=("launch", "window", "soft_cap", "scale", "interpret"))
def _shares(
    queries, pools, tables, q_pos, *, launch, scale, window, soft_cap, interpret
) -> dict[str, Array]:
    """What the programs of all pools found, as the Triton kernel leaves it, turned back."""
    (rows, heads, dim), kv_heads = queries[0].shape, tables[0].shape[1]
    group = heads // kv_heads
    plans, arrays = [], []
    for q, pages, table in zip(queries, pools, tables, strict=True):
        plan = _plan(pages, table, dim, launch)
        if window is None:
            kept = tuple(x for x in plan.arrays if x[0] != "pos")
            plan = dataclasses.replace(plan, arrays=kept)
        plans.append(plan)
        given = {"table": table, "q": q, "q_pos": q_pos}
        given |= {"mean": pages.mean, "balance": pages.balance}
        given |= {
            name: getattr(pages, name).reshape(pages.bias.shape)
            if name.endswith("scale") else getattr(pages, name)
            for name, _ in plan.arrays
        }  # fmt: skip
        arrays.append({name: array for name, array in given.items() if array is not None})
    count = sum(plan.count for plan in plans)
    shapes = {"out": (count, group, dim), "top": (count, group), "total": (count, group)}
    out = {
        name: jax.ShapeDtypeStruct((rows, kv_heads, *shape), jnp.float32)
        for name, shape in shapes.items()
    }
    merged = 4 * _WARPS * -(-group // _HEADS) * _HEADS * (dim + 2)
    ring = max(_START + merged, *(plan.ring for plan in plans))
    inputs, kind = jax.tree.flatten(arrays)
    outputs, out_kind = jax.tree.flatten(out)

    def kernel(place, *refs):
        *refs, ring = refs
        taken = jax.tree.unflatten(kind, refs[: len(inputs)])
        stored = jax.tree.unflatten(out_kind, refs[len(inputs) :])
        start = 0
        for plan, mine in zip(plans, taken, strict=True):
            part = place[2] - start
            program = Program(
                Lanes(interpret), plan, mine, stored, ring, place, part, scale, window, soft_cap
            )  # fmt: skip
            if len(plans) == 1:
                program.run()
            else:
                pl.when((part >= 0) & (part < plan.count))(program.run)
            start += plan.count

    grid = rows, kv_heads, count
    found = (_interpreted if interpret else _launched)(kernel, grid, outputs, ring)(*inputs)
    return jax.tree.unflatten(out_kind, found)


def _launched(kernel, grid, outputs, ring):
    names = "row", "head", "part"

    def body(*refs):
        kernel([jax.lax.axis_index(name) for name in names], *refs)

    return plgpu.kernel(
        body,
        out_type=tuple(outputs),
        scratch_types=[plgpu.SMEM((ring,), jnp.uint8)],
        grid=grid,
        grid_names=names,
        kernel_name="paged_attention_mosaic",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )


def _interpreted(kernel, grid, outputs, ring):
    """The same programs one after the other, by XLA."""

    def body(*refs):
        kernel([pl.program_id(axis) for axis in range(3)], *refs)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    return lambda *inputs: pl.pallas_call(
        body,
        grid=grid,
        in_specs=[whole] * len(inputs),
        out_specs=(whole,) * len(outputs),
        out_shape=tuple(outputs),
        scratch_shapes=[pl.MemoryRef(jax.core.ShapedArray((ring,), jnp.uint8), pl.ANY)],
        interpret=True,
    )(*inputs)


class Program:
    """One row, one KV head and a share of one pool's pages.

    Args:
        refs: arrays of the pool by name.
        outs: arrays of the results, for all programs.
        ring: the shared memory.
        place: the program's row, head and number.
        part: the share that it takes.
    """

    def __init__(self, lanes, plan, refs, outs, ring, place, part, scale, window, soft_cap):
        self.lanes, self.plan, self.refs, self.outs, self.ring = lanes, plan, refs, outs, ring
        self.place, self.part = place, part
        self.row, self.head, _ = place
        self.scale, self.window, self.soft_cap = scale * LOG2E, window, soft_cap
        self.group = outs["top"].shape[3]
        self.thread = lanes.thread()
        lane = self.thread & 31
        self.warp, self.r, self.c = self.thread >> 5, lane >> 2, lane & 3
        self.tiles = -(-self.group // _HEADS)
        # Where the slots of rows r of a first product are, among the warp's.
        self.slot = plan.span // 4 * (self.r >> 1) + (self.r & 1)

    def run(self) -> None:
        lanes, plan = self.lanes, self.plan
        each = _WARPS if plan.alone else 1
        stages = plan.stages
        lanes.barriers(self.ring, [_WARPS // each] * (2 * stages * each))
        steps = pl.cdiv(self._used() * plan.page, _WARPS * plan.span)
        share = pl.cdiv(steps, plan.count)
        first = self.part * share
        last = jnp.minimum(first + share, steps)
        # A stage is filled again a step after it was read, so that no warp waits for another.
        ahead = stages - 1 if stages < plan.share else stages
        for number in range(ahead):
            self._fetch(number, first + number, last, self._page(first + number))
        query = [self._query(tile) for tile in range(self.tiles)]
        zero = jnp.zeros(THREADS, jnp.float32)
        tile = (zero + LOWEST, zero, (zero,) * (plan.v.dim // 8))
        page = self._page(first + ahead) if ahead < plan.share else None

        def step(i, carry):
            page, tiles = carry
            if page is not None:
                self._fetch(i - first + ahead, i + ahead, last, page)
                page = self._page(i + ahead + 1)
            slot, phase, full, free = self._slot(i - first)
            lanes.wait(self.ring, full, phase)
            tiles = self._step(_START + slot * plan.stage, query, tiles)
            lanes.release(self.ring, free)
            return page, tiles

        carry = jax.tree.map(lanes.register, (page, (tile,) * self.tiles))
        _, tiles = jax.lax.fori_loop(first, last, step, carry)
        self._merge(tiles)

    def _slot(self, number):
        """Of a step: its stage, how often that was used, and the barriers of the warp."""
        slot = jax.lax.rem(number, self.plan.stages)
        phase = jax.lax.div(number, self.plan.stages) & 1
        each = _WARPS if self.plan.alone else 1
        barrier = 8 * (slot * each + (self.warp if self.plan.alone else 0))
        return slot, _all(phase), _all(barrier), _all(barrier + 8 * self.plan.stages * each)

    def _used(self):
        """Pages of the table up to the last one that it names."""
        width, lanes = self.plan.width, self.lanes
        base = (self.row * self.refs["table"].shape[1] + self.head) * width

        def look(i, found):
            for part in range(4):
                at = i * 128 + part * 32 + (self.thread & 31)
                (page,) = lanes.load(self.refs["table"], (base + jnp.minimum(at, width - 1)) * 4, 1)
                named = (page != SCRATCH_PAGE) & (at < width)
                found = jnp.maximum(found, jnp.where(named, at + 1, 0))
            return found

        found = jax.lax.fori_loop(0, -(-width // 128), look, lanes.register(self.thread * 0))
        for distance in (1, 2, 4, 8, 16):
            found = jnp.maximum(found, lanes.exchange(found, distance))
        return lanes.uniform(found)

    def _page(self, step):
        """The page of which the warp fetches its quarter of a step."""
        plan, table = self.plan, self.refs["table"]
        base = (self.row * table.shape[1] + self.head) * plan.width
        at = step * plan.pages + self.warp // (_WARPS // plan.pages)
        (page,) = self.lanes.load(table, (base + jnp.minimum(at, plan.width - 1)) * 4, 1)
        return jnp.where(at < plan.width, page, SCRATCH_PAGE)

    def _fetch(self, number, step, last, page) -> None:
        """Fetch a step, the program's ``number``-th, if it has so many."""
        plan = self.plan
        slot, phase, full, free = self._slot(number)
        start = _START + slot * plan.stage
        copies = []
        for name, nbytes in plan.arrays:
            part = plan.pages * nbytes // _WARPS
            begin = self.warp % (_WARPS // plan.pages) * part
            to = start + plan.at(name) + self.warp * part
            copies.append(Copy(self.refs[name], page, begin, part, to))
        self.lanes.fetch(self.ring, copies, full, free, phase ^ 1, _all(step < last))

    def _query(self, tile: int):
        """Words of the queries for each plane and chunk; what logits are times and plus."""
        lanes, k = self.lanes, self.plan.k
        member = tile * _HEADS + (self.r >> 1)
        heads = self.refs["q"].shape[1]
        row = self.row * heads + self.head * self.group + jnp.minimum(member, self.group - 1)
        numbers = self._channels("q", row)
        offset, scale = None, self.scale
        if "mean" in self.refs:
            mean = self._channels("mean", _all(self.head))
            dot = functools.reduce(jnp.add, [a * b for a, b in zip(numbers, mean, strict=True)])
            for distance in (1, 2):
                dot += lanes.exchange(dot, distance)
            offset = lanes.take(dot, 8 * self.c) * jnp.float32(self.scale)
        if "balance" in self.refs:
            balance = self._channels("balance", _all(self.head))
            numbers = [a * b for a, b in zip(numbers, balance, strict=True)]
        if self.plan.rotated:
            numbers, scale = self._rotate(numbers, (1, 2)), scale * k.dim**-0.5
        numbers = [jnp.where(member < self.group, x, 0) for x in numbers]
        if k.coded:
            words, largest = self._bytes(numbers)
            # The sums of a thread are of head c, of whose queries thread 8c has the largest number.
            factor = lanes.take(largest, 8 * self.c) * jnp.float32(scale / k.unit)
        else:
            words, factor = self._halves(numbers), jnp.full(THREADS, scale, jnp.float32)
        step, many = k.chunk // 4, k.width // 16
        chunks = [words[n : n + step] for n in range(0, len(words), step)]
        planes = [chunks[n : n + many // step] for n in range(0, len(chunks), many // step)]
        return planes, factor, offset

    def _channels(self, name: str, row):
        """A row's numbers of the thread's channels, in the order of its bytes of a key."""
        ref, k = self.refs[name], self.plan.k
        size = ref.dtype.itemsize
        at = row * (k.dim * size) + self.c * (k.run * size)
        words = min(4, k.run * size // 4)
        found = []
        for first in range(0, k.dim, 4 * k.run):
            for start in range(0, k.run * size, 4 * words):
                found += self.lanes.load(ref, at, words, first * size + start)
        if size == 4:
            return [_float(word) for word in found]
        return [_float(x) for word in found for x in (word << 16, word & jnp.int32(-65536))]

    def _rotate(self, numbers, distances):
        """Times Sylvester's matrix: sums and differences of what differs by a bit of its channel.

        Args:
            numbers: of a power of two of channels.
            distances: between threads whose channels differ by a bit.
        """
        bit = 1
        while bit < len(numbers):
            numbers = [
                numbers[n - bit] - x if n & bit else x + numbers[n + bit]
                for n, x in enumerate(numbers)
            ]
            bit *= 2
        for distance in distances:
            sign = jnp.where((self.thread & distance) == 0, jnp.float32(1), jnp.float32(-1))
            numbers = [
                self.lanes.multiply_add(x, sign, self.lanes.exchange(x, distance)) for x in numbers
            ]
        return numbers

    def _bytes(self, numbers):
        """Words of fixed-point numbers of the largest one of a head, upper or lower bytes."""
        largest = functools.reduce(jnp.maximum, [jnp.abs(x) for x in numbers])
        for distance in (1, 2):
            largest = jnp.maximum(largest, self.lanes.exchange(largest, distance))
        largest = jnp.maximum(largest, TINY)
        inverse = TOP / largest
        fixed = [_int(x * inverse + ROUND) for x in numbers]
        # The upper byte of a number whose lower one is signed, or the lower one.
        fixed = [jnp.where(self._low, x, (x + 128) >> 8) & 255 for x in fixed]
        fours = zip(*(fixed[n::4] for n in range(4)), strict=True)
        return [a | b << 8 | c << 16 | d << 24 for a, b, c, d in fours], largest

    def _halves(self, numbers):
        """Words of two bfloat16 each: of the numbers, or of what those leave over."""
        halves = []
        for x in numbers:
            high = _rounded(x)
            halves.append(jnp.where(self._low, _rounded(x - _float(high)), high))
        pairs = zip(halves[::2], halves[1::2], strict=True)
        return [jax.lax.shift_right_logical(a, jnp.int32(16)) | b for a, b in pairs]

    @property
    def _low(self):
        """Whether a column is the second one of its head."""
        return (self.r & 1) == 1

    def _step(self, stage, query, tiles):
        """Attend to the slots of a stage, which begins at a byte of the shared memory."""
        lanes, plan = self.lanes, self.plan
        k, ring = plan.k, self.ring
        number = jnp.int32 if k.coded else jnp.float32
        mine = self.warp * plan.span + self.slot  # the first slot of a thread
        at = stage + plan.at("k") + mine * k.width + self.c * k.chunk
        slots = [4 * t + 2 * h for t in range(plan.span // 16) for h in range(2)]
        sums = []
        for t in range(plan.span // 16):
            found = [[jnp.zeros(THREADS, number)] * 4 for _ in range(self.tiles)]
            for j in range(k.width // (4 * k.chunk)):
                rows = [
                    lanes.load(ring, at, k.chunk // 4, (4 * t + 2 * h) * k.width + 4 * k.chunk * j)
                    for h in range(2)
                ]
                for plane in range(k.planes):
                    left = [[k.signed(lanes, word, plane) for word in row] for row in rows]
                    for tile in range(self.tiles):
                        right = query[tile][0][plane][j]
                        found[tile] = self._products(found[tile], left, right, k.kind)
            sums.append(found)
        bias = [self._number("bias", stage, mine, slot) for slot in slots]
        live = [mark > LOWEST for mark in bias]
        if self.window is not None:
            q_pos = lanes.load(self.refs["q_pos"], _all(self.row * 4), 1)[0]
            near = [q_pos - self._word("pos", stage, mine, slot) < self.window for slot in slots]
            live = [a & b for a, b in zip(live, near, strict=True)]
        mark = [
            jnp.where(on, x * jnp.float32(LOG2E), NEG_INF) for on, x in zip(live, bias, strict=True)
        ]
        k_scale, v_scale = (self._scales(name, stage, mine, slots, live) for name in "kv")
        done = []
        for tile in range(self.tiles):
            _, scale, shift = query[tile]
            logits = []
            for index in range(len(slots)):
                number = _join(sums[index // 2][tile][2 * (index % 2) :][:2], k)
                factor = scale if k_scale is None else scale * k_scale[index]
                logits.append(self._logit(number, factor, live[index], mark[index], shift))
            done.append(self._add(stage, logits, v_scale, tiles[tile]))
        return self._values(stage, done)

    def _logit(self, number, factor, live, mark, shift):
        if self.soft_cap is None:
            added = mark if shift is None else mark + shift
            logit = self.lanes.multiply_add(number, factor, added)
        else:
            most = jnp.float32(self.soft_cap * LOG2E)
            logit = number * factor if shift is None else number * factor + shift
            logit = jnp.tanh(logit * (1 / most)) * most + mark
        return jnp.where(live, logit, NEG_INF)

    def _add(self, stage, logits, v_scale, tile):
        """The new top logit, the mass, and the weights as what stands on the right of values."""
        lanes, v = self.lanes, self.plan.v
        top, total, sums = tile
        new_top = jnp.maximum(top, self._column(logits))
        fade = jnp.exp2(top - new_top)
        weights = [jnp.exp2(logit - new_top) for logit in logits]
        total = total * fade + functools.reduce(jnp.add, weights)
        if not v.coded:
            right = []
            for weight in weights:
                high = weight.astype(jnp.bfloat16).astype(jnp.float32)
                low = (weight - high).astype(jnp.bfloat16).astype(jnp.float32)
                pair = jax.lax.shift_right_logical(_int(high), jnp.int32(16)) | _int(low)
                right.append(lanes.transpose(pair))
            return new_top, total, sums, fade, None, right
        weights = [a * b for a, b in zip(weights, v_scale, strict=True)]
        largest = jnp.maximum(self._column(weights), TINY)
        inverse = TOP / largest
        moved = []
        for weight in weights:
            fixed = (_int(lanes.multiply_add(weight, inverse, ROUND)) + 128) ^ 128
            moved.append(lanes.transpose(lanes.pick(fixed, fixed, _all(0x1010))))
        byte = jnp.where((self.r & 1) == 0, 0x7531, 0x6420)
        right = [lanes.pick(a, b, byte) for a, b in zip(moved[::2], moved[1::2], strict=True)]
        return new_top, total, sums, fade, largest * jnp.float32(1 / v.unit), right

    def _values(self, stage, done):
        """Add the weighted values of a stage."""
        lanes, plan, v = self.lanes, self.plan, self.plan.v
        size = 1 if v.coded else 2
        place = self.warp * plan.span
        row = plan.page * size
        page = jax.lax.div(place, jnp.int32(plan.page))
        within = jax.lax.rem(place, jnp.int32(plan.page))
        rows = v.dim // v.planes
        at = stage + plan.at("v") + page * (rows * row) + within * size
        at = at + self.r * row + self.c * v.chunk
        words = v.chunk // 4
        zero = [jnp.zeros(THREADS, jnp.int32 if v.coded else jnp.float32)] * 4
        sums = [list(tile[2]) for tile in done]
        for first in range(0, rows, 16):
            lines = [lanes.load(self.ring, at, words, (first + 8 * h) * row) for h in range(2)]
            for plane in range(v.planes):
                left = [[v.signed(lanes, word, plane) for word in line] for line in lines]
                for tile, (_, _, _, fade, factor, right) in enumerate(done):
                    found = self._products(zero, left, right, v.kind)
                    for h in range(2):
                        index = (plane * rows + first) // 8 + h
                        new = _join(found[2 * h :][:2], v)
                        if factor is not None:
                            new = new * factor
                        old = sums[tile][index]
                        sums[tile][index] = lanes.multiply_add(old, fade, new)
        return tuple((t[0], t[1], tuple(s)) for t, s in zip(done, sums, strict=True))

    def _products(self, sums, left, right, kind):
        """Two words at a time, or one where there is one."""
        for word in range(0, len(right), 2):
            pair = slice(word, word + 2)
            sums = self.lanes.product(sums, [row[pair] for row in left], right[pair], kind)
        return sums

    def _column(self, numbers):
        """The largest of the column, of which each thread has some rows."""
        most = functools.reduce(jnp.maximum, numbers)
        for distance in (4, 8, 16):
            most = jnp.maximum(most, self.lanes.exchange(most, distance))
        return most

    def _word(self, name, stage, mine, slot):
        at = stage + self.plan.at(name) + mine * 4
        return self.lanes.load(self.ring, at, 1, 4 * slot)[0]

    def _number(self, name, stage, mine, slot):
        return _float(self._word(name, stage, mine, slot))

    def _scales(self, side, stage, mine, slots, live):
        name = f"{side}_scale"
        if name not in self.refs:
            return None
        at = stage + self.plan.at(name) + mine * 2
        # Those of free slots may hold anything.
        return [
            jnp.where(on, self.lanes.half(self.ring, at, 2 * slot), 0)
            for on, slot in zip(live, slots, strict=True)
        ]

    def _merge(self, tiles) -> None:
        """Put the four warps' sums together, and store them."""
        lanes, ring, dim = self.lanes, self.ring, self.plan.v.dim
        heads = self.tiles * _HEADS
        everywhere = self.thread >= 0
        tops = _START
        totals = tops + 4 * _WARPS * heads
        outs = totals + 4 * _WARPS * heads
        lanes.sync()
        for tile, (top, total, sums) in enumerate(tiles):
            if self.plan.rotated:
                sums = [x * jnp.float32(dim**-0.5) for x in self._rotate(sums, (4, 8, 16))]
            for distance in (4, 8, 16):
                total = total + lanes.exchange(total, distance)
            head = self.warp * heads + tile * _HEADS + self.c
            lanes.store(ring, tops + 4 * head, top, self.r == 0)
            lanes.store(ring, totals + 4 * head, total, self.r == 0)
            for index, number in enumerate(sums):
                channel = 8 * index + self.r
                lanes.store(ring, outs + 4 * (head * dim + channel), number, everywhere)
        lanes.sync()
        _, kv_heads, count, _ = self.outs["top"].shape
        base = (self.row * kv_heads + self.head) * count + self.place[2]
        for start in range(0, heads * dim, THREADS):
            at = start + self.thread
            head, channel = at // dim, at % dim
            top, weights = self._tops(tops, head, heads)
            out = functools.reduce(jnp.add, [
                self._read(outs + 4 * ((warp * heads + head) * dim + channel)) * weight
                for warp, weight in enumerate(weights)
            ])  # fmt: skip
            real = head < self.group
            lanes.store(self.outs["out"], 4 * (base * self.group * dim + at), out, real)
        head = jnp.minimum(self.thread, heads - 1)
        top, weights = self._tops(tops, head, heads)
        total = functools.reduce(jnp.add, [
            self._read(totals + 4 * (warp * heads + head)) * weight
            for warp, weight in enumerate(weights)
        ])  # fmt: skip
        real = self.thread < self.group
        at = 4 * (base * self.group + head)
        lanes.store(self.outs["top"], at, top, real)
        lanes.store(self.outs["total"], at, total, real)

    def _tops(self, tops: int, head, heads: int):
        """The top logit of a head, and what each warp's sums count for."""
        each = [self._read(tops + 4 * (warp * heads + head)) for warp in range(_WARPS)]
        top = functools.reduce(jnp.maximum, each)
        return top, [jnp.exp2(one - top) for one in each]

    def _read(self, at):
        return _float(self.lanes.load(self.ring, at, 1)[0])


def _all(x):
    return jnp.broadcast_to(x, (THREADS,))


def _float(word):
    return jax.lax.bitcast_convert_type(word, jnp.float32)


def _int(number):
    return jax.lax.bitcast_convert_type(number, jnp.int32)


def _rounded(number):
    """The bits of the nearest number that is a bfloat16."""
    return (_int(number) + 0x8000) & jnp.int32(-65536)


def _join(pair, side: Side):
    """The number whose two parts are in neighbouring columns."""
    high, low = pair
    return (high * 256 + low).astype(jnp.float32) if side.coded else high + low
