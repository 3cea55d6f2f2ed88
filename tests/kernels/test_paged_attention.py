"""``paged_attention`` of every backend against NumPy, and what it refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVPages, paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.triton import Launch, paged_attention_triton
from pallas_kernels.paged_attention.xla import paged_attention_xla
from tests.kernels import cases
from tests.kernels.cases import Case

COVERING = cases.covering()


def one_query(backend, **fixed):
    """A backend that takes the same query for every pool."""

    @functools.wraps(backend)
    def call(q, pools, tables, **options):
        return backend((q,) * len(pools), pools, tables, **fixed, **options)

    return call


interpret = one_query(paged_attention_triton, interpret=True, with_mass=True)
reference = one_query(paged_attention_reference)
xla = one_query(paged_attention_xla, with_mass=True)


def run(backend, problem: cases.Problem):
    fixed = {name: getattr(problem, name) for name in ("scale", "window", "soft_cap")}
    fn = functools.partial(backend, **fixed)
    arrays = {"q_pos": problem.q_pos, "sinks": problem.sinks}
    # Every case is compiled to be run once.
    quick = {"xla_backend_optimization_level": 0}
    call = jax.jit(lambda *args, **arrays: fn(*args, **arrays), compiler_options=quick)
    return call(problem.q, problem.pools, problem.tables, **arrays)


def test_the_cases_bring_every_two_choices_together():
    assert len(COVERING) <= 80
    pairs = set().union(*(case.pairs() for case in COVERING))
    sizes = [len(choices) for choices in cases.AXES.values()]
    assert len(pairs) == (sum(sizes) ** 2 - sum(n * n for n in sizes)) // 2


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_reference(case):
    problem = cases.build(case)
    cases.check(run(reference, problem), problem)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_xla(case):
    problem = cases.finite(cases.build(case))
    cases.check(run(xla, problem), problem)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_triton(case):
    problem = cases.build(case)
    cases.check(run(interpret, problem), problem)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", ["around a page", "empty between full", "few"])
@pytest.mark.parametrize("page", [16, 64, 128])
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("fmt", cases.AXES["fmt"])
def test_triton_everywhere(fmt, head_dim, group, page, lengths):
    problem = cases.build(Case(head_dim, group, page, lengths, fmt=fmt, dtype="bfloat16"))
    cases.check(run(interpret, problem), problem)


@pytest.mark.parametrize("fmt", ["float", "int4"])
@pytest.mark.parametrize(
    "launch", [Launch(programs=6), Launch(programs=18, slots=32), Launch(10**6, 16)]
)
def test_triton_merges_its_shares(launch, fmt):
    """From one share that takes all pages to a share a page, dead shares among them."""
    problem = cases.build(Case(lengths="empty between full", window=launch.slots == 32, fmt=fmt))
    attend = one_query(paged_attention_triton, interpret=True, with_mass=True, launch=launch)
    cases.check(run(attend, problem), problem)


@pytest.mark.parametrize("backend", [reference, xla, interpret])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_free_slots_may_hold_any_finite_number(backend, dtype):
    problem = cases.build(Case(dtype=dtype, lengths="empty between full", bias="zero"))
    (pages,), huge = problem.pools, jnp.finfo(dtype).max
    free = jnp.isneginf(pages.bias)
    full = dataclasses.replace(
        pages,
        k=jnp.where(free[:, :, None], huge, pages.k),
        v=jnp.where(free[:, None], -huge, pages.v),
    )
    problem = dataclasses.replace(problem, pools=(full,))
    cases.check(run(backend, problem), problem)


def test_reference_needs_nothing_of_free_slots():
    problem = cases.build(Case(lengths="empty between full"))
    (pages,) = problem.pools
    free = jnp.isneginf(pages.bias)
    unset = dataclasses.replace(
        pages,
        k=jnp.where(free[:, :, None], jnp.nan, pages.k),
        v=jnp.where(free[:, None], jnp.nan, pages.v),
    )
    cases.check(run(reference, dataclasses.replace(problem, pools=(unset,))), problem)


@pytest.mark.parametrize("backend", [xla, interpret])
def test_a_constant_bias_only_moves_the_log_sum_exp(backend):
    """The mass of a slot is exp(bias): the same for all slots, it cancels in the output."""
    problem = cases.build(Case(bias="zero", sinks=False))
    (pages,) = problem.pools
    moved = dataclasses.replace(pages, bias=pages.bias - 3.0)
    out, lse, _ = run(backend, problem)
    moved_out, moved_lse, _ = run(backend, dataclasses.replace(problem, pools=(moved,)))
    np.testing.assert_allclose(moved_out, out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(moved_lse, lse - 3.0, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", [xla, interpret])
@pytest.mark.parametrize("bias", [2.0, -4.0])
def test_a_bias_stands_for_that_many_tokens(backend, bias):
    """Two equal tokens against one with twice the mass."""
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 4, 16)).astype(np.float32)
    q = jnp.asarray(rng.standard_normal((1, 1, 16)), jnp.float32)

    def attend(tokens, marks):
        empty = np.zeros((2, 16, 16), np.float32)
        keys, values, mark = empty.copy(), empty.copy(), np.full((2, 16), -np.inf, np.float32)
        keys[1, : len(tokens)], values[1, :, : len(tokens)] = k[tokens], v[tokens].T
        mark[1, : len(tokens)] = marks
        pages = KVPages(*map(jnp.asarray, (keys, values, mark, np.zeros((2, 16), np.int32))))
        table = jnp.ones((1, 1, 1), jnp.int32)
        problem = cases.Problem(q, (pages,), (table,), 0.25, q_pos=None, window=None, sinks=None)
        return run(backend, problem)

    twice = attend([0, 1, 1, 2], [0, bias, bias, 0])
    once = attend([0, 1, 2], [0, bias + np.log(2), 0])
    np.testing.assert_allclose(once[0], twice[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(once[1], twice[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("window", [7, 8, 9])
@pytest.mark.parametrize("backend", [reference, xla, interpret])
def test_the_edge_of_the_window(backend, window):
    """Eight tokens, each of which shows in a channel of its own."""
    pages = KVPages(
        k=jnp.zeros((2, 16, 16)),
        v=jnp.zeros((2, 16, 16)).at[1].set(jnp.eye(16)),
        bias=jnp.full((2, 16), -jnp.inf).at[1, :8].set(0.0),
        pos=jnp.full((2, 16), -1, jnp.int32).at[1, :8].set(jnp.arange(8, dtype=jnp.int32)),
    )
    problem = cases.Problem(
        q=jnp.ones((1, 1, 16)),
        pools=(pages,),
        tables=(jnp.ones((1, 1, 1), jnp.int32),),
        scale=1.0,
        q_pos=jnp.array([7], jnp.int32),
        window=window,
        sinks=None,
    )
    out, lse, _ = run(backend, problem)
    seen = min(window, 8)
    expected = np.where((np.arange(16) >= 8 - seen) & (np.arange(16) < 8), 1 / seen, 0)
    np.testing.assert_allclose(out[0, 0], expected, rtol=1e-6)
    np.testing.assert_allclose(lse, np.log(seen), rtol=1e-6)


def test_pools_may_have_tables_of_different_widths():
    problem = cases.build(Case(pools=2))
    wide = jnp.pad(problem.tables[1], ((0, 0), (0, 0), (0, 3)))
    problem = dataclasses.replace(problem, tables=(problem.tables[0], wide))
    cases.check(run(paged_attention, problem), problem)
    for backend in (paged_attention, reference, xla, interpret):
        for _ in range(8):  # annotations of sequences are checked for one member at random
            fn = functools.partial(backend, **problem.options)
            jax.eval_shape(lambda *args, fn=fn: fn(*args), problem.q, problem.pools, problem.tables)


@pytest.mark.parametrize(
    "case", [Case(), Case(head_dim=96, pools=2), Case(page=64, group=3)], ids=str
)
def test_the_public_op_on_a_cpu(case):
    problem = cases.build(case)
    problem = dataclasses.replace(problem, pools=list(problem.pools), tables=list(problem.tables))
    cases.check(run(paged_attention, problem), problem)
    cases.check(run(functools.partial(paged_attention, implementation="xla"), problem), problem)


def call(case: Case, *, implementation=None, **changes):
    problem = dataclasses.replace(cases.build(case), **changes)
    return run(functools.partial(paged_attention, implementation=implementation), problem)


PAGES = KVPages(
    jnp.zeros((4, 16, 16)),
    jnp.zeros((4, 16, 16)),
    jnp.zeros((4, 16)),
    jnp.zeros((4, 16), jnp.int32),
)
TABLE = jnp.zeros((3, 2, 4), jnp.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pools": (), "tables": ()}, "0 pools, 0 tables"),
        ({"pools": (PAGES, PAGES), "tables": (TABLE,)}, "2 pools, 1 tables"),
        ({"q": jnp.zeros((3, 7, 16))}, "heads=7 kv_heads=2"),
        ({"tables": (TABLE[:2],)}, r"\(3, 2, \.\.\), got int32 \(2, 2, 4\)"),
        ({"tables": (TABLE.astype(jnp.float32),)}, r"integer .* got float32 \(3, 2, 4\)"),
        ({"pools": (PAGES, PAGES), "tables": (TABLE, TABLE[:, :1])}, r"got int32 \(3, 1, 4\)"),
        ({"q": jnp.zeros((3, 8, 32))}, r"k \(pages, page, 32\) .* got \(\d+, 16, 16\) and"),
        ({"v": (4, 8, 16)}, r"got \(4, 16, 16\) and \(4, 8, 16\)"),
        ({"v": (3, 16, 16)}, r"got \(4, 16, 16\) and \(3, 16, 16\)"),
        ({"q_pos": None}, "window=16 needs `q_pos`"),
        ({"sinks": jnp.zeros(7)}, r"sinks must have shape \(8,\), got \(7,\)"),
        ({"soft_cap": 0.0}, "soft_cap must be positive, got 0.0"),
        ({"implementation": "cudnn"}, "implementation .* got 'cudnn'"),
    ],
)
def test_arguments_that_do_not_fit_together(unchecked, changes, message):
    if "v" in changes:
        changes = {"pools": (dataclasses.replace(PAGES, v=jnp.zeros(changes["v"])),)}
    with pytest.raises(ValueError, match=message):
        call(Case(lengths="around a page"), **changes)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(group=17), "16 query heads .* 17"),
        (Case(page=8), "page size .* 8"),
        (Case(page=48), "page size .* 48"),
    ],
)
def test_triton_says_what_it_cannot_do(case, message):
    problem = cases.build(case)
    with pytest.raises(NotImplementedError, match=f"triton paged_attention: .*{message}"):
        call(case, implementation="triton")
    # Left to itself, the op takes a backend that can.
    cases.check(call(case), problem)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_format": "e2m1"}, "no codes of e2m1"),
        ({"v_format": "uint4"}, "no codes of uint4"),
        ({"v_zero": jnp.zeros((4, 1, 16), jnp.float16)}, "no codes of int4 with a zero point"),
        ({"k_scale": jnp.zeros((4, 1, 16), jnp.float16)}, r"one scale a slot, got \(4, 1, 16\)"),
        ({"k_scale": jnp.zeros((4, 16, 2), jnp.float16)}, r"one scale a slot, got \(4, 16, 2\)"),
    ],
)
def test_triton_refuses_other_codes(change, message):
    """They take XLA's path; the codecs' own tests say that it reads them."""
    scale = jnp.zeros((4, 16, 1), jnp.float16)
    pages = KVPages(
        k=jnp.zeros((4, 16, 8), jnp.uint8),
        v=jnp.zeros((4, 8, 16), jnp.uint8),
        bias=PAGES.bias,
        pos=PAGES.pos,
        k_scale=scale,
        v_scale=scale.swapaxes(1, 2),
        k_format="int4",
        v_format="int4",
    )
    pages = dataclasses.replace(pages, **change)
    arguments = jnp.zeros((3, 2, 16)), (pages,), (TABLE,)
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(*arguments, scale=1.0, implementation="triton")
    jaxpr = jax.make_jaxpr(functools.partial(paged_attention, scale=1.0))(*arguments)
    assert "pallas_call" not in str(jaxpr)


def test_triton_refuses_a_second_dtype():
    problem = cases.build(Case())
    with pytest.raises(NotImplementedError, match="one dtype, got bfloat16 and float32"):
        call(Case(), q=problem.q.astype(jnp.bfloat16), implementation="triton")


@pytest.mark.parametrize(
    ("pages", "fmt", "fits"),
    [
        (2**21, "int8", True),
        (2**21 + 1, "int8", False),
        (2**22, "int8", False),
        (2**22 + 1, "int8", True),
        (2**20, "float", True),
        (2**21, "float", True),
        (2**21 + 1, "float", True),
    ],
)
def test_pools_beyond_the_kernels_offsets_take_the_other_backend(unchecked, pages, fmt, fits):
    """It counts elements in 32 signed bits up to 4 GiB, and in 64 beyond."""

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    coded = fmt != "float"
    numbers = jnp.uint8 if coded else jnp.bfloat16
    pool = KVPages(
        shape(pages, 16, 64, dtype=numbers),
        shape(pages, 64, 16, dtype=numbers),
        shape(pages, 16, dtype=jnp.float32),
        shape(pages, 16, dtype=jnp.int32),
        k_scale=shape(pages, 16, 1, dtype=jnp.float16) if coded else None,
        v_scale=shape(pages, 1, 16, dtype=jnp.float16) if coded else None,
        k_format=fmt,
        v_format=fmt,
    )

    def jaxpr(**options):
        attend = functools.partial(paged_attention, scale=1.0, **options)
        table = shape(1, 2, 3, dtype=jnp.int32)
        return str(jax.make_jaxpr(attend)(shape(1, 2, 64), (pool,), (table,)))

    assert ("pallas_call" in jaxpr()) == fits
    if fits:
        jaxpr(implementation="triton")
    else:
        with pytest.raises(NotImplementedError, match=r"\d{10} bytes in one array overflow"):
            jaxpr(implementation="triton")
