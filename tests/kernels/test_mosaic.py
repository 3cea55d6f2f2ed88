"""The Mosaic GPU kernel's twin on a CPU against NumPy, and what the kernel refuses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.hopper.plan import Launch
from pallas_kernels.paged_attention.mosaic import paged_attention_mosaic
from tests.kernels import cases
from tests.kernels.cases import Case

COVERING = cases.covering(**cases.HOPPER, group=(1, 4, 5))
SMALL = Case(head_dim=64, dtype="bfloat16", window=False, sinks=False)
LONG = dataclasses.replace(
    SMALL, page=64, lengths="empty between full", window=True, sinks=True, basis=True, pools=2
)
# A page a step, two stages that are used again, and three programs for a row's.
NARROW = Launch(programs=18, stages=2, nbytes=0)


def run(problem: cases.Problem, launch: Launch | None = None):
    fixed = {name: getattr(problem, name) for name in ("scale", "window", "soft_cap")}
    fn = functools.partial(paged_attention_mosaic, interpret=True, launch=launch, **fixed)
    arrays = {"q_pos": problem.q_pos, "sinks": problem.sinks}
    # Every case is compiled to be run once.
    quick = {"xla_backend_optimization_level": 0}
    call = jax.jit(lambda *args, **arrays: fn(*args, **arrays), compiler_options=quick)
    queries = (problem.q,) * len(problem.pools)
    return call(queries, problem.pools, problem.tables, **arrays)


def with_few_recent(problem: cases.Problem) -> cases.Problem:
    """No more pages of the second pool than a step takes, and each of the first named twice."""
    first, second = problem.tables
    tables = jnp.concatenate([first, first], 2), second[:, :, :2]
    return dataclasses.replace(problem, tables=tables)


def halved(problem: cases.Problem) -> cases.Problem:
    """The same, with the pages of the first pool named by two tables: two pools are rotated."""
    pools, (table, *tables) = problem.pools, problem.tables
    tables = table[:, :, ::2], table[:, :, 1::2], *tables
    return dataclasses.replace(problem, pools=(pools[0], *pools), tables=tables)


def check(found: tuple, problem: cases.Problem) -> None:
    """Closer than other backends have to be: queries are not rounded once they are rotated."""
    cases.check(found, dataclasses.replace(problem, q=problem.q.astype(jnp.float32)))


@pytest.mark.parametrize(
    ("case", "launch"),
    [
        pytest.param(dataclasses.replace(LONG, fmt="int4 int2"), NARROW, marks=pytest.mark.slow),
        (dataclasses.replace(SMALL, basis=True, cap=True, group=5), None),
    ],
    ids=str,
)
def test_twin(case, launch):
    problem = cases.build(case)
    check(run(halved(problem) if case.pools > 1 else problem, launch), problem)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(programs=6, nbytes=20 * 1024),  # stages that are used again
        pytest.param(Launch(programs=6, stages=3, nbytes=20 * 1024), marks=pytest.mark.slow),
        pytest.param(Launch(programs=6, stages=4, nbytes=20 * 1024), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_twin_of_recent_tokens_that_are_read_first(launch):
    """Codes come into one stage while the recent tokens are read in another."""
    case = dataclasses.replace(LONG, fmt="int8")
    problem = with_few_recent(cases.build(case))
    check(run(problem, launch), problem)


@pytest.mark.slow
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_twin_of_the_covering_set(case):
    problem = cases.build(case)
    check(run(problem), problem)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 17}, "16 query heads .* 17"),
        ({"dtype": "float32"}, "queries must be bfloat16, got float32"),
        ({"page": 256}, "page size must be .* 256"),
        ({"fmt": "fp8"}, "no codes of fp8"),
        ({"head_dim": 96, "basis": True}, "rotated .* power of two .* 96"),
        ({"head_dim": 512, "page": 128, "lengths": "empty between full"}, "bytes of shared memory"),
        ({}, "compute capability 9.0 .* got cpu"),
    ],
)
def test_what_it_refuses(changes, message):
    problem = cases.build(dataclasses.replace(SMALL, **changes))
    attend = functools.partial(paged_attention, scale=1.0, implementation="mosaic")
    with pytest.raises(NotImplementedError, match=f"mosaic paged_attention: .*{message}"):
        attend(problem.q, problem.pools, problem.tables)


def test_it_cannot_tell_the_mass_of_slots():
    problem = cases.build(SMALL)
    attend = functools.partial(paged_attention, scale=1.0, with_mass=True, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="attention that every slot received"):
        attend(problem.q, problem.pools, problem.tables)
