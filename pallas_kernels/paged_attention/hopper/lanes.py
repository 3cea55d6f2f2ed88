"""A warpgroup's threads, one number each: what a Mosaic GPU kernel says in PTX, and a twin of it.

An array of shape [128] is a register of every thread; what ``jax.numpy`` does to it, each thread
does to its own. Here is the rest: memory by the byte, shuffles within a warp, tensor cores, bulk
copies and the barriers that say when those are done. Where ``interpret`` is set, the same is
computed by XLA on any device, one program after the other, and copies are done at once.

Fragments of matrices are those of PTX's ``mma.m16n8k32`` (bytes) and ``m16n8k16`` (16-bit floats),
which are the same in bytes: of a warp's 32 threads, thread ``4 * r + c`` holds, for words w = 0, 1,
on the left the bytes ``16 * w + 4 * c ..`` of rows r and r + 8, on the right the same bytes of
column r, and of the sums columns 2c and 2c + 1 of rows r and r + 8.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxtyping import Array, Float32, Int32

THREADS = 128
_LAYOUT = plgpu.Layout.WG_STRIDED((THREADS,), 1)
_WAIT = 10_000_000  # nanoseconds before a thread asks again


@dataclasses.dataclass(frozen=True)
class Copy:
    """Bytes of a page of an array, and the place in shared memory where they go, for each warp.

    Attributes:
        source: in global memory; a page is an entry of the first axis, and contiguous.
        page: the entry.
        start: the first of the page's bytes, a multiple of 16.
        nbytes: how many, a multiple of 16.
        to: byte of the shared memory, a multiple of 16.
    """

    source: Any
    page: Int32[Array, " 128"]
    start: Int32[Array, " 128"]
    nbytes: int
    to: Int32[Array, " 128"]


@dataclasses.dataclass(frozen=True)
class Lanes:
    """What the threads of one warpgroup do together.

    Attributes:
        interpret: compute twins of all this, for a machine without such a GPU.
    """

    interpret: bool

    def thread(self) -> Int32[Array, " 128"]:
        """The number of each thread."""
        if self.interpret:
            return jnp.arange(THREADS, dtype=jnp.int32)
        return _inline(lambda ctx: _register(mgpu.utils.thread_idx()), jnp.int32)()

    def uniform(self, x: Int32[Array, " 128"]) -> Int32[Array, ""]:
        """The number that all threads hold, as a scalar."""
        if self.interpret:
            return x[0]
        scalar = plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(()))

        @plgpu.inline_mgpu(arg_types=(_LAYOUT,), return_type=scalar)
        def first(ctx, x):
            value = _ptx("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", _value(x), result=_i32())
            return mgpu.FragmentedArray.splat(value, (), is_signed=True)

        return first(_spread(x))

    def load(
        self, ref, at: Int32[Array, " 128"], words: int, offset: int = 0
    ) -> list[Int32[Array, " 128"]]:
        """At most four 32-bit words from byte ``at + offset`` of an array on, aligned to all."""
        if self.interpret:
            found = _read(ref, at + offset, 4 * words).reshape(THREADS, words, 4)
            return list(jax.lax.bitcast_convert_type(found, jnp.int32).T)

        def load(ctx, ref, at):
            kind = _i32() if words == 1 else ir.VectorType.get((words,), _i32())
            found = llvm.load(kind, _pointer(ref, at, offset), alignment=4 * words)
            if words == 1:
                return _register(found)
            return [_register(_extract(found, word)) for word in range(words)]

        call = _inline(load, *[jnp.int32] * words, arguments=(plgpu.RefType(), _LAYOUT))
        found = call(ref, _spread(at))
        return [found] if words == 1 else list(found)

    def half(self, ref, at: Int32[Array, " 128"], offset: int = 0) -> Float32[Array, " 128"]:
        """The float16 at byte ``at + offset`` of an array, as float32."""
        if self.interpret:
            found = _read(ref, at + offset, 2)
            return jax.lax.bitcast_convert_type(found, jnp.float16).astype(jnp.float32)

        def load(ctx, ref, at):
            found = llvm.load(ir.F16Type.get(), _pointer(ref, at, offset), alignment=2)
            return _register(arith.extf(ir.F32Type.get(), found))

        return _inline(load, jnp.float32, arguments=(plgpu.RefType(), _LAYOUT))(ref, _spread(at))

    def store(self, ref, at: Int32[Array, " 128"], value, there, offset: int = 0) -> None:
        """Store a float32 at byte ``at + offset`` of an array, where ``there`` is set."""
        if self.interpret:
            every = _bytes(ref)
            at = at + offset
            new = jax.lax.bitcast_convert_type(value, jnp.uint8)
            at = jnp.where(there[:, None], at[:, None] + jnp.arange(4)[None], every.size)
            every = every.at[at].set(new, mode="drop")
            shape = ref.shape if ref.dtype.itemsize == 1 else (*ref.shape, ref.dtype.itemsize)
            ref[...] = jax.lax.bitcast_convert_type(every.reshape(shape), ref.dtype)
            return

        def store(ctx, ref, at, value, there):
            with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ne, _value(there), _c(0))):
                llvm.store(_value(value), _pointer(ref, at, offset), alignment=4)

        call = _inline(store, arguments=(plgpu.RefType(), _LAYOUT, _LAYOUT, _LAYOUT))
        call(ref, _spread(at), _spread(value), _spread(there.astype(jnp.int32)))

    def exchange(self, x, distance: int):
        """The number of the thread whose own differs by one bit."""
        if self.interpret:
            return x[jnp.arange(THREADS) ^ distance]
        code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
        return self._unary(code, x)

    def take(self, x, lane: Int32[Array, " 128"]):
        """The number of a thread of the same warp."""
        if self.interpret:
            return x[(jnp.arange(THREADS) & ~31) + lane]
        return self._unary("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane)

    def transpose(self, x: Int32[Array, " 128"]) -> Int32[Array, " 128"]:
        """Of 8 by 8 16-bit numbers, two a thread, the transposed ones."""
        if self.interpret:
            pairs = jax.lax.bitcast_convert_type(x, jnp.int16).reshape(-1, 8, 8)
            pairs = pairs.swapaxes(1, 2).reshape(THREADS, 2)
            return jax.lax.bitcast_convert_type(pairs, jnp.int32)
        return self._unary("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x)

    def pick(self, a, b, selector: Int32[Array, " 128"]) -> Int32[Array, " 128"]:
        """Four of the eight bytes of two words, by four hexadecimal digits."""
        if self.interpret:
            # By arithmetic: XLA puts two conversions of bits in a row together, wrongly.
            digits = [selector >> (4 * n) & 7 for n in range(4)]
            bytes_ = [jnp.where(d < 4, a, b) >> (8 * (d & 3)) & 255 for d in digits]
            return bytes_[0] | bytes_[1] << 8 | bytes_[2] << 16 | bytes_[3] << 24
        return self._unary("prmt.b32 $0, $1, $2, $3;", a, b, selector)

    def select(self, x: Int32[Array, " 128"], mask: int, flip: int) -> Int32[Array, " 128"]:
        """Some bits of a word, and some of all turned: one instruction, if it is asked for."""
        if self.interpret:
            return x & jnp.int32(mask) ^ jnp.int32(flip)
        return self._unary(f"lop3.b32 $0, $1, {mask}, {flip}, 0x6a;", x)

    def multiply_add(self, a, b, c):
        """``a * b + c``, rounded once."""
        if self.interpret:
            return a * b + c

        def fma(ctx, a, b, c):
            return _register(
                _ptx("fma.rn.f32 $0, $1, $2, $3;", *map(_value, (a, b, c)), result=ir.F32Type.get())
            )

        arguments = [_spread(jnp.asarray(x, jnp.float32)) for x in (a, b, c)]
        return _inline(fma, jnp.float32, arguments=(_LAYOUT,) * 3)(*arguments)

    def product(self, sums, left, right, kind: str):
        """``sums + left @ right`` of 16 rows and 8 columns, for each warp.

        Args:
            sums: four registers: two columns of row r, then of row r + 8.
            left: the words of row r, and those of row r + 8.
            right: as many words of the column.
            kind: "s8" or "bf16".
        """
        words = len(right)
        number = jnp.int32 if kind == "s8" else jnp.float32
        if self.interpret:
            return _product(sums, left, right, kind)
        rows = [row[word] for word in range(words) for row in left]
        k = words * (16 if kind == "s8" else 8)
        wide = "s32" if kind == "s8" else "f32"

        def run(ctx, *registers):
            names = [f"${i}" for i in range(8 + 3 * words)]
            groups = names[:4], names[4 : 4 + 2 * words], names[4 + 2 * words : 4 + 3 * words]
            groups = *groups, names[4 + 3 * words :]
            lists = ", ".join("{" + ", ".join(group) + "}" for group in groups)
            code = f"mma.sync.aligned.m16n8k{k}.row.col.{wide}.{kind}.{kind}.{wide} {lists};"
            kinds = [_i32() if kind == "s8" else ir.F32Type.get()] * 4
            found = _ptx(code, *map(_value, registers), result=kinds)
            return [_register(x) for x in found]

        registers = [*rows, *right, *sums]
        call = _inline(run, *[number] * 4, arguments=(_LAYOUT,) * len(registers))
        return list(call(*map(_spread, registers)))

    def register(self, x):
        """A number that may differ between threads, though it does not yet."""
        return x if self.interpret else _spread(x)

    def sync(self) -> None:
        """Wait for all threads, and what they stored."""
        if not self.interpret:
            _inline(lambda ctx: mgpu.utils.warpgroup_barrier())()

    def barriers(self, ring, counts: Sequence[int]) -> None:
        """Make a barrier at every eighth byte of the shared memory, and say who arrives at it."""
        if self.interpret:
            return

        def make(ctx, ring):
            with mgpu.utils.when(_is(mgpu.utils.thread_idx(), 0)):
                for number, count in enumerate(counts):
                    _ptx(f"mbarrier.init.shared::cta.b64 [$0], {count};",
                         _shared(ring, _c(8 * number)))  # fmt: skip
                _ptx("fence.mbarrier_init.release.cluster;")
            mgpu.utils.warpgroup_barrier()

        _inline(make, arguments=(plgpu.RefType(),))(ring)

    def fetch(self, ring, copies: Sequence[Copy], barrier, free, parity, ready) -> None:
        """Start the copies of each warp, of which its ``barrier`` learns when they are done.

        A thread of the warp first waits until the barrier ``free`` has passed the phase ``parity``.
        Nothing happens but where ``ready`` is set.
        """
        if self.interpret:
            for warp in range(THREADS // 32):
                pl.when(ready[32 * warp])(functools.partial(_copy, ring, copies, 32 * warp))
            return

        def start(ctx, ring, barrier, free, parity, ready, *rest):
            sources, rest = rest[: len(copies)], list(map(_value, rest[len(copies) :]))
            wanted = arith.cmpi(arith.CmpIPredicate.ne, _value(ready), _c(0))
            # Of a thread chosen otherwise, ptxas has every copy look for threads that differ.
            with mgpu.utils.when(arith.andi(nvvm.elect_sync(), wanted)):
                nvvm.mbarrier_try_wait_parity(_pointer(ring, free), _value(parity), _c(_WAIT))
                done = _shared(ring, _value(barrier))
                total = sum(each.nbytes for each in copies)
                _ptx(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {total};", done)
                for index, each in enumerate(copies):
                    page, begin, to = rest[3 * index :][:3]
                    whole = int(np.prod(each.source.shape[1:])) * each.source.dtype.itemsize
                    _ptx(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                        f"[$0], [$1], {each.nbytes}, [$2];",
                        _shared(ring, to),
                        _global(sources[index], page, whole, begin),
                        done,
                    )

        places = [x for each in copies for x in (each.page, each.start, each.to)]
        arrays = (barrier, free, parity, ready.astype(jnp.int32))
        kinds = (plgpu.RefType(), *[_LAYOUT] * 4, *[plgpu.RefType()] * len(copies))
        call = _inline(start, arguments=(*kinds, *[_LAYOUT] * len(places)))
        sources = [each.source for each in copies]
        call(ring, *map(_spread, arrays), *sources, *map(_spread, places))

    def wait(self, ring, barrier: Int32[Array, " 128"], parity: Int32[Array, " 128"]) -> None:
        """Wait until a barrier has passed a phase."""
        if self.interpret:
            return

        def wait(ctx, ring, barrier, parity):
            nvvm.mbarrier_try_wait_parity(_pointer(ring, barrier), _value(parity), _c(_WAIT))

        call = _inline(wait, arguments=(plgpu.RefType(), _LAYOUT, _LAYOUT))
        call(ring, _spread(barrier), _spread(parity))

    def release(self, ring, barrier: Int32[Array, " 128"]) -> None:
        """One thread of each warp arrives at a barrier, after all of the warp's have come."""
        if self.interpret:
            return

        def release(ctx, ring, barrier):
            mgpu.utils.warp_barrier()
            lane = arith.andi(mgpu.utils.thread_idx(), _c(31))
            with mgpu.utils.when(_is(lane, 0)):
                at = _shared(ring, _value(barrier))
                _ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [$0];", at)

        _inline(release, arguments=(plgpu.RefType(), _LAYOUT))(ring, _spread(barrier))

    def _unary(self, code: str, x, *others):
        """One instruction over registers, with a result of the first one's type."""

        def run(ctx, *registers):
            kind = _value(registers[0]).type
            return _register(_ptx(code, *map(_value, registers), result=kind))

        call = _inline(run, x.dtype, arguments=(_LAYOUT,) * (1 + len(others)))
        return call(_spread(x), *map(_spread, others))


def _spread(x):
    """A register, for constants too."""
    return plgpu.layout_cast(jnp.broadcast_to(x, (THREADS,)), _LAYOUT)


def _inline(function, *dtypes, arguments=()):
    kinds = [plgpu.ShapeDtypeStruct((THREADS,), dtype, _LAYOUT) for dtype in dtypes]
    result = None if not kinds else kinds[0] if len(kinds) == 1 else kinds
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)(function)


def _i32():
    return ir.IntegerType.get_signless(32)


def _c(value: int):
    return mgpu.utils.c(value, _i32())


def _is(x, value: int):
    return arith.cmpi(arith.CmpIPredicate.eq, x, _c(value))


def _extract(x, position: int):
    at = ir.DenseI64ArrayAttr.get([position])
    return vector.extract(x, dynamic_position=[], static_position=at)


def _value(x: mgpu.FragmentedArray):
    """The number of this thread."""
    return _extract(x.registers.flat[0], 0)


def _register(value) -> mgpu.FragmentedArray:
    whole = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    signed = True if isinstance(value.type, ir.IntegerType) else None
    layout = mgpu.WGStridedFragLayout((THREADS,), 1)
    registers = np.array([None], dtype=object)
    registers[0] = whole
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _ptx(code: str, *arguments, result=None):
    return mgpu.utils.inline_ptx(
        code, *arguments, result_types=result, has_side_effects=result is None, convergent=True
    )


def _pointer(ref, at, offset: int = 0):
    """Where a byte of an array is."""
    pointer = mgpu.utils.memref_ptr(ref)
    if not mgpu.utils.is_smem_ref(ref):
        pointer = llvm.addrspacecast(llvm.PointerType.get(address_space=1), pointer)
    at = _value(at) if isinstance(at, mgpu.FragmentedArray) else at
    byte = ir.IntegerType.get_signless(8)
    pointer = mgpu.utils.getelementptr(pointer, [at], byte)
    return mgpu.utils.getelementptr(pointer, [offset], byte) if offset else pointer


def _shared(ref, at):
    return llvm.ptrtoint(_i32(), _pointer(ref, at))


def _global(ref, page, nbytes: int, start):
    """The address of a byte of a page."""
    wide = ir.IntegerType.get_signless(64)
    offset = arith.muli(arith.extui(wide, page), mgpu.utils.c(nbytes, wide))
    offset = arith.addi(offset, arith.extui(wide, start))
    return llvm.ptrtoint(wide, _pointer(ref, offset))


def _copy(ring, copies, thread: int) -> None:
    """What the warp of a thread fetches, at once."""
    for each in copies:
        page = each.source[each.page[thread]]
        if page.dtype != jnp.uint8:
            page = jax.lax.bitcast_convert_type(page, jnp.uint8)
        part = jax.lax.dynamic_slice(page.reshape(-1), (each.start[thread],), (each.nbytes,))
        ring[pl.ds(each.to[thread], each.nbytes)] = part


def _bytes(ref):
    """All bytes of an array, in one axis."""
    every = ref[...]
    if every.dtype != jnp.uint8:
        every = jax.lax.bitcast_convert_type(every, jnp.uint8)
    return every.reshape(-1)


def _read(ref, at, count: int):
    """Bytes of an array from a byte on, for each thread."""
    return _bytes(ref)[at[:, None] + jnp.arange(count)[None]]


@functools.partial(jax.jit, static_argnames="kind")
def _product(sums, left, right, kind):
    """``Lanes.product`` by einsum, over the fragments put together."""
    number = (
        jnp.int8 if kind == "s8" else jnp.dtype({"bf16": jnp.bfloat16, "f16": jnp.float16}[kind])
    )
    words, per = len(right), 4 // jnp.dtype(number).itemsize

    def tile(rows):
        """[warps, rows, words * 4 threads * numbers of a word]."""
        found = jax.lax.bitcast_convert_type(jnp.stack(rows), number)  # [words, 128, per]
        found = found.reshape(words, 4, 8, 4, per).transpose(1, 2, 0, 3, 4)
        return found.reshape(4, 8, words * 4 * per)

    wide = jnp.int32 if kind == "s8" else jnp.float32
    a = jnp.concatenate([tile(row) for row in left], 1).astype(wide)
    b = tile(right).astype(wide)
    new = jnp.einsum("wmk,wnk->wmn", a, b, precision="highest").reshape(4, 2, 8, 4, 2)
    new = new.transpose(1, 4, 0, 2, 3).reshape(4, THREADS)
    return [old + more for old, more in zip(sums, new, strict=True)]
