"""A program of the Mosaic kernel; ``pallas_kernels.paged_attention.mosaic`` says how it works."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layout import SCRATCH_PAGE
from pallas_kernels.paged_attention.hopper.lanes import THREADS, Copy
from pallas_kernels.paged_attention.hopper.plan import HEADS, WARPS, Side, pitch
from pallas_kernels.paged_attention.hopper.query import Queries
from pallas_kernels.paged_attention.hopper.registers import (
    as_bits,
    as_float,
    everywhere,
    rotated,
)
from pallas_kernels.paged_attention.operands import LOWEST, NEG_INF, ROUND, TINY, TOP
from pallas_kernels.paged_attention.triton import LOG2E


class Program:
    """One row, one KV head and a share of one pool's pages.

    Args:
        refs: arrays of the pool by name.
        outs: arrays of the results, for all programs.
        ring: the shared memory.
        barriers: where the pool's barriers are in it.
        start: where stages begin.
        behind: stages that the pool before this one has while this one's first pages come; its
            steps begin with the stage after them.
        place: the program's row, head and share.
    """

    def __init__(
        self, lanes, plan, refs, outs, ring, barriers, start, behind, place, scale, window, soft_cap
    ):
        self.lanes, self.plan, self.refs, self.outs, self.ring = lanes, plan, refs, outs, ring
        self.barriers, self.start, self.behind, self.place = barriers, start, behind, place
        self.row, self.head, part = place
        self.scale, self.window, self.soft_cap = scale * LOG2E, window, soft_cap
        self.group = outs["top"].shape[3]
        self.thread = lanes.thread()
        lane = self.thread & 31
        self.warp, self.r, self.c = self.thread >> 5, lane >> 2, lane & 3
        self.tiles = -(-self.group // HEADS)
        # Where the slots of rows r of a first product are, among the warp's.
        self.slot = plan.span // 4 * (self.r >> 1) + (self.r & 1)
        used = self._used()
        steps = pl.cdiv(used, plan.pages)
        share = pl.cdiv(steps, plan.count)
        if plan.alone:  # of the last step, a warp may have no page
            steps = pl.cdiv(used - lanes.uniform(self.warp), plan.pages)
        self.first = part * share
        self.last = jnp.minimum(self.first + share, steps)

    def begin(self) -> None:
        """Fetch what no other pool's pages are in the way of: for the first pool, and for one that
        is behind it."""
        for number in range(self.plan.stages - self.behind):
            self._fetch(number, self.first + number, self._page(self.first + number))

    def follow(self) -> None:
        """Fetch the other first pages, once all warps have read those of the pool before."""
        begun = self.plan.stages - self.behind if self.behind else 0
        numbers = range(begun, self.plan.stages)
        pages = [self._page(self.first + number) for number in numbers]
        self.lanes.sync()
        for number, page in zip(numbers, pages, strict=True):
            self._fetch(number, self.first + number, page)

    def queries(self) -> list:
        """What ``Queries.words`` says of each tile of heads."""
        place = self.row, self.head, self.group
        queries = Queries(self.lanes, self.plan, self.refs, *place, self.scale)
        return [queries.words(tile) for tile in range(self.tiles)]

    def nothing(self) -> tuple:
        """The top logit, mass and sums of each tile of heads, before any slot."""
        zero = jnp.zeros(THREADS, jnp.float32)
        return ((zero + LOWEST, zero, (zero,) * (self.plan.v.dim // 8)),) * self.tiles

    def attend(self, query, tiles):
        """Add what the pool's slots say to the tops, masses and sums of each tile of heads.

        Args:
            query: of ``queries``.
            tiles: what other pools' programs left, its sums in the basis of this one.
        """
        lanes, plan, first, last = self.lanes, self.plan, self.first, self.last
        # A stage is filled again a step after it was read, so that no warp waits for another.
        ahead = plan.stages - 1
        page = self._page(first + ahead) if plan.stages < plan.share else None

        def step(i, carry):
            page, tiles = carry
            if page is not None:
                self._fetch(i - first + ahead, i + ahead, page, i > first)
                page = self._page(i + ahead + 1)
            slot, phase, full, free = self._slot(i - first)
            lanes.wait(self.ring, full, phase)
            tiles = self._step(self.start + slot * plan.stage, query, tiles)
            lanes.release(self.ring, free)
            return page, tiles

        carry = jax.tree.map(lanes.register, (page, tiles))
        _, tiles = jax.lax.fori_loop(first, last, step, carry)
        return tiles

    def turned(self, tiles):
        """Sums turned into the rotated basis, or out of it, which is the same."""
        norm = jnp.float32(self.plan.v.dim**-0.5)

        def turn(sums):
            return tuple(x * norm for x in rotated(self.lanes, list(sums), (4, 8, 16)))

        return tuple((top, total, turn(sums)) for top, total, sums in tiles)

    def _slot(self, number):
        """Of a step: its stage, how often that was used, and the barriers of the warp."""
        number += self.behind
        slot = jax.lax.rem(number, self.plan.stages)
        used = jax.lax.div(number, self.plan.stages)
        if self.behind:  # the first turn left out some stages
            used -= (slot < self.behind).astype(jnp.int32)
        phase = used & 1
        each = WARPS if self.plan.alone else 1
        barrier = self.barriers + 8 * (slot * each + (self.warp if self.plan.alone else 0))
        return (
            slot,
            everywhere(phase),
            everywhere(barrier),
            everywhere(barrier + 8 * self.plan.stages * each),
        )

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
        at = step * plan.pages + self.warp // (WARPS // plan.pages)
        (page,) = self.lanes.load(table, (base + jnp.minimum(at, plan.width - 1)) * 4, 1)
        return jnp.where(at < plan.width, page, SCRATCH_PAGE)

    def _fetch(self, number, step, page, wanted=True) -> None:
        """Fetch a step, the program's ``number``-th, if it is wanted and there are so many."""
        plan = self.plan
        slot, phase, full, free = self._slot(number)
        start = self.start + slot * plan.stage
        copies = []
        for name, nbytes in plan.arrays:
            part = plan.pages * nbytes // WARPS
            begin = self.warp % (WARPS // plan.pages) * part
            to = start + plan.at(name) + self.warp * part
            copies.append(Copy(self.refs[name], page, begin, part, to))
        ready = everywhere((step < self.last) & wanted)
        self.lanes.fetch(self.ring, copies, full, free, phase ^ 1, ready)

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
            q_pos = lanes.load(self.refs["q_pos"], everywhere(self.row * 4), 1)[0]
            near = [q_pos - self._word("pos", stage, mine, slot) < self.window for slot in slots]
            live = [a & b for a, b in zip(live, near, strict=True)]
        mark = [x * jnp.float32(LOG2E) for x in bias]
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
        # Codes are finite, and the scale of a free slot is zero here: its mark is enough.
        marked = self.plan.k.coded and self.window is None
        return logit if marked else jnp.where(live, logit, NEG_INF)

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
                pair = jax.lax.shift_right_logical(as_bits(high), jnp.int32(16)) | as_bits(low)
                right.append(lanes.transpose(pair))
            return new_top, total, sums, fade, None, right
        weights = [a * b for a, b in zip(weights, v_scale, strict=True)]
        largest = jnp.maximum(self._column(weights), TINY)
        inverse = TOP / largest
        moved = []
        for weight in weights:
            fixed = (as_bits(lanes.multiply_add(weight, inverse, ROUND)) + 128) ^ 128
            moved.append(lanes.transpose(lanes.pick(fixed, fixed, everywhere(0x1010))))
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
        return as_float(self._word(name, stage, mine, slot))

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

    def store(self, tiles) -> None:
        """Put the four warps' sums together, out of the pool's basis, and store them.

        Each warp takes a head of a tile, and each thread every 32nd channel of it.
        """
        lanes, ring, dim = self.lanes, self.ring, self.plan.v.dim
        heads = self.tiles * HEADS
        tops = self.start
        totals = tops + 4 * WARPS * heads
        outs = totals + 4 * WARPS * heads
        always = self.thread >= 0
        lanes.sync()
        for tile, (top, total, sums) in enumerate(tiles):
            for distance in (4, 8, 16):
                total = total + lanes.exchange(total, distance)
            head = self.warp * heads + tile * HEADS + self.c
            lanes.store(ring, tops + 4 * head, top, self.r == 0)
            lanes.store(ring, totals + 4 * head, total, self.r == 0)
            at = outs + 4 * (head * pitch(dim) + self.r)
            for index, number in enumerate(sums):
                lanes.store(ring, at, number, always, 32 * index)
        lanes.sync()
        _, kv_heads, count, _ = self.outs["top"].shape
        base = (self.row * kv_heads + self.head) * count + self.place[2]
        lane = self.thread & 31
        for tile in range(self.tiles):
            head = tile * HEADS + self.warp
            each = self._of_warps(tops + 4 * head, 4 * heads)
            top = functools.reduce(jnp.maximum, each)
            weights = [jnp.exp2(one - top) for one in each]
            total = self._weighted(weights, self._of_warps(totals + 4 * head, 4 * heads))
            at, apart = outs + 4 * (head * pitch(dim) + lane), 4 * heads * pitch(dim)
            out = [
                self._weighted(weights, self._of_warps(at + 4 * n, apart))
                for n in range(0, dim, 32)
            ]
            if self.plan.rotated:
                distances = [n for n in (1, 2, 4, 8, 16) if n < dim]
                out = [x * jnp.float32(dim**-0.5) for x in rotated(lanes, out, distances)]
            real, at = head < self.group, base * self.group + head
            lanes.store(self.outs["top"], 4 * at, top, real & (lane == 0))
            lanes.store(self.outs["total"], 4 * at, total, real & (lane == 0))
            for n, number in enumerate(out):
                there = real & (lane + 32 * n < dim)
                lanes.store(self.outs["out"], 4 * (at * dim + lane), number, there, 128 * n)

    def _of_warps(self, at, apart: int):
        """Four numbers that lie so many bytes apart, one of each warp."""
        found = [self.lanes.load(self.ring, at, 1, warp * apart) for warp in range(WARPS)]
        return [as_float(number) for (number,) in found]

    def _weighted(self, weights, numbers):
        found = jnp.zeros(THREADS, jnp.float32)
        for pair in zip(weights, numbers, strict=True):
            found = self.lanes.multiply_add(*pair, found)
        return found


def _join(pair, side: Side):
    """The number whose two parts are in neighbouring columns."""
    high, low = pair
    return (high * 256 + low).astype(jnp.float32) if side.coded else high + low
