"""When segments are demoted, against a state machine that looks at one row and one event."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvjax.thoughts import Given, Retention, Sparsity, Thoughts, demotion
from kvjax.thoughts.state import no_thoughts
from tests.thoughts.machine import Machine

EVERY, SEGMENTS, ROWS = 32, 10, 4
SCHEDULE = (16, 8, 4, 2)
WAYS = [
    {"covers": covers, "at": at, "repeated": repeated, "itself": itself}
    for covers, at, repeated, itself in itertools.product(
        ("next", "past"), ("start", "end"), (True, False), (True, False)
    )
]
SPARSITY = {"E": 0.1, "R": 0.5, "T": 0.9}
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def parts(covers: str = "next", **how) -> tuple[Sparsity, Retention]:
    segmenter = Sparsity((0,), (0.3, 0.7), every=EVERY, covers=covers)
    return segmenter, Retention(SCHEDULE, **how)


refresh = jax.jit(demotion.refresh, static_argnums=(1, 2))
make_fit = jax.jit(demotion.make_fit, static_argnums=(1, 2))


class Device:
    """Rows of the library's, worked on as ``maintain`` does."""

    def __init__(self, rows: int, covers: str = "next", **how):
        self.segmenter, self.retention = parts(covers, **how)
        self.thoughts = no_thoughts(rows, SEGMENTS)

    def border(self, kinds: str, answered, active=True, evicts=True) -> None:
        rows = len(kinds)
        sparsity = jnp.asarray([SPARSITY[kind] for kind in kinds], jnp.float32)
        answered, active, evicts = (
            jnp.asarray(np.broadcast_to(np.array(x, dtype), rows))
            for x, dtype in ((answered, np.int32), (active, bool), (evicts, bool))
        )
        self.thoughts = refresh(
            self.thoughts, self.segmenter, self.retention, sparsity, answered, active, evicts
        )

    def fit(self, closed, budget) -> None:
        closed, budget = (jnp.asarray(x, jnp.int32) for x in (closed, budget))
        self.thoughts = make_fit(self.thoughts, EVERY, self.retention, closed, budget)

    def row(self, row: int) -> dict:
        kind = np.asarray(self.thoughts.kind)[row]
        return {
            "kinds": "".join("RET"[k] for k in kind[kind >= 0]),
            "levels": np.asarray(self.thoughts.level)[row].tolist(),
            "demoted": np.asarray(self.thoughts.demoted)[row].tolist(),
        }


def said(machine: Machine) -> dict:
    levels = machine.levels + [0] * (SEGMENTS - len(machine.levels))
    return {
        "kinds": "".join(machine.kinds),
        "levels": levels,
        "demoted": [machine.by_transition, machine.by_budget],
    }


LABELS = st.text("RET", min_size=SEGMENTS, max_size=SEGMENTS)


def follow(rows: list[str], budgets: list[int], **how) -> list[Machine]:
    """Run whole answers through both; returns the machines at their ends."""
    device = Device(len(rows), **how)
    machines = [Machine(EVERY, SCHEDULE, **how) for _ in rows]
    for number in range(SEGMENTS):
        device.border([labels[number] for labels in rows], number * EVERY)
        for machine, labels in zip(machines, rows, strict=True):
            machine.border(number, labels[number])
        closed = max(number - (how.get("covers") == "past"), 0)
        device.fit([closed] * len(rows), budgets)
        for row, (machine, budget) in enumerate(zip(machines, budgets, strict=True)):
            machine.fit(closed, budget)
            assert device.row(row) == said(machine)
    return machines


BUDGETS = st.lists(st.integers(1, 200), min_size=ROWS, max_size=ROWS)


@pytest.mark.parametrize("how", WAYS, ids=lambda how: "-".join(map(str, how.values())))
def test_every_answer_goes_as_the_state_machine_says(how):
    """With the budgets, all kinds of demotion come about; see the counts."""
    seen = np.zeros(2, int)

    @QUICK
    @given(st.lists(LABELS, min_size=ROWS, max_size=ROWS), BUDGETS)
    def run(rows, budgets):
        for machine in follow(rows, budgets, **how):
            seen[:] += machine.by_transition, machine.by_budget

    run()
    assert (seen > 50).all()


def test_a_transition_demotes_all_before_it_by_one_level():
    """Case 1, spelled out once."""
    levels = {}
    for how in WAYS:
        device = Device(1, **how)
        for number, kind in enumerate("RETTRR"):
            device.border([kind], number * EVERY)
        levels[tuple(how.values())] = device.row(0)["levels"][:5]
    assert levels["next", "start", True, False] == [2, 2, 1, 0, 0]
    assert levels["next", "start", False, False] == [1, 1, 0, 0, 0]
    assert levels["next", "start", True, True] == [2, 2, 2, 1, 0]
    assert levels["next", "end", True, False] == [2, 2, 1, 0, 0]
    # What was found after the first five segments is E, T, T, R, R.
    for at in ("start", "end"):
        assert levels["past", at, True, False] == [2, 1, 0, 0, 0]
        assert levels["past", at, False, True] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("at", ["start", "end"])
def test_when_a_transition_demotes(at):
    device, found = Device(1, at=at), []
    for number, kind in enumerate("RRTR"):
        device.border([kind], number * EVERY)
        found.append(device.row(0)["levels"][:4])
    late = [[0] * 4, [0] * 4, [1, 1, 0, 0], [1, 1, 0, 0]]
    assert found == (late if at == "start" else [*late[:2], [0] * 4, late[3]])


def test_no_level_below_the_floor():
    device = Device(1)
    for number in range(SEGMENTS):
        device.border(["T"], number * EVERY)
    assert device.row(0)["levels"] == [4, 4, 4, 4, 4, 4, 3, 2, 1, 0]
    assert device.row(0)["demoted"] == [4 * 6 + 3 + 2 + 1, 0]


@st.composite
def held(draw):
    """Thoughts of one row anywhere in its answer."""
    numbers = st.lists(st.integers(0, len(SCHEDULE)), min_size=SEGMENTS, max_size=SEGMENTS)
    return draw(LABELS), draw(numbers), draw(st.integers(0, SEGMENTS)), draw(st.integers(0, 330))


def fitted(rows) -> tuple[Thoughts, Thoughts]:
    """Thoughts before and after a fit."""
    kinds = jnp.asarray([["RET".index(k) for k in labels] for labels, *_ in rows], jnp.int32)
    before = dataclasses.replace(
        no_thoughts(len(rows), SEGMENTS),
        kind=kinds,
        level=jnp.asarray([levels for _, levels, *_ in rows], jnp.int32),
    )
    closed, budget = (jnp.asarray([row[i] for row in rows], jnp.int32) for i in (2, 3))
    after = make_fit(before, EVERY, Retention(SCHEDULE), closed, budget)
    return jax.tree.map(np.asarray, (before, after))


def check_fit(rows) -> None:
    """What case 2 says, from the outside, and the very levels of the state machine."""
    sizes = np.array([EVERY, *SCHEDULE])
    before, after = fitted(rows)
    for row, (kinds, levels, closed, budget) in enumerate(rows):
        new = after.level[row]
        total = sizes[new[:closed]].sum()
        steps = int((new - levels).sum())
        assert (new[closed:] == levels[closed:]).all(), "a growing segment is left alone"
        assert (new >= levels).all() and new.max() <= len(SCHEDULE)
        assert total <= budget or (new[:closed] == len(SCHEDULE)).all()
        assert steps == 0 or sizes[np.array(levels[:closed])].sum() > budget
        assert after.demoted[row].tolist() == [0, steps]
        machine = Machine(EVERY, SCHEDULE)
        machine.kinds, machine.levels = list(kinds), list(levels)
        machine.fit(closed, budget)
        assert new.tolist() == machine.levels
        # Nothing is demoted while a less important kind can still be.
        fallen = {kinds[s] for s in np.flatnonzero(new > levels)}
        for less, more in ("TE", "TR", "ER"):
            if more in fallen:
                assert all(new[s] == len(SCHEDULE) for s in range(closed) if kinds[s] == less)
    assert (after.kind == before.kind).all()


@QUICK
@given(st.lists(held(), min_size=ROWS, max_size=ROWS))
def test_the_budget_demotes_the_least_important_and_oldest_first(rows):
    check_fit(rows)


def test_one_level_at_a_time():
    """The oldest falls to the floor before the next begins, and no further than is needed."""
    [[levels]] = [fitted([("TTRE" + "R" * 6, [0] * SEGMENTS, 4, 100)])[1].level.tolist()]
    assert levels == [3, 0, 0, 0, *[0] * 6]  # 4 + 3 * 32
    [[levels]] = [fitted([("TTRE" + "R" * 6, [0] * SEGMENTS, 4, 49)])[1].level.tolist()]
    assert levels == [4, 4, 0, 2, *[0] * 6]  # 2 + 2 + 32 + 8 = 44


def test_rows_at_different_steps_are_as_if_they_were_alone():
    """Each row meets its own borders; between them, and once it is finished, nothing happens."""
    rng = np.random.default_rng(0)
    together, alone = Device(ROWS), [Device(1) for _ in range(ROWS)]
    machines = [Machine(EVERY, SCHEDULE) for _ in range(ROWS)]
    answered = np.array([0, 16, 48, 80])
    for row, machine in enumerate(machines):  # what had happened before
        for number in range(-(-answered[row] // EVERY)):
            alone[row].border("R", number * EVERY)
            machine.border(number, "R")
    together.thoughts = jax.tree.map(
        lambda *rows: jnp.concatenate(rows), *(one.thoughts for one in alone)
    )
    for _ in range(10):
        kinds = rng.choice(list("RET"), ROWS)
        active, evicts = rng.random(ROWS) < 0.8, rng.random(ROWS) < 0.7
        closed, budget = np.maximum(answered - 16, 0) // EVERY, rng.integers(20, 120, ROWS)
        together.border(kinds, answered, active, evicts)
        together.fit(closed, budget)
        for row, machine in enumerate(machines):
            alone[row].border(kinds[row], answered[row], active[row], evicts[row])
            alone[row].fit(closed[row : row + 1], budget[row : row + 1])
            if active[row] and answered[row] % EVERY == 0:
                machine.border(answered[row] // EVERY, kinds[row], evicts=evicts[row])
            machine.fit(closed[row], budget[row])
            assert together.row(row)["levels"] == alone[row].row(0)["levels"]
            assert together.row(row)["levels"] == said(machine)["levels"]
            assert together.row(row)["demoted"] == said(machine)["demoted"]
        answered = np.where(active, answered + 16, answered)


def test_what_was_measured_is_noted_where_it_belongs():
    device = Device(2)
    device.border("ET", [0, 64])
    found = np.asarray(device.thoughts.sparsity)
    assert found[0, 0] == np.float32(0.1) and found[1, 2] == np.float32(0.9)
    assert np.isnan(found).sum() == found.size - 2
    assert device.row(1)["levels"][:3] == [1, 1, 0]


def test_kinds_that_are_given_repeat():
    kinds = Given("RTE", every=EVERY)(jnp.full(5, jnp.nan), jnp.arange(5, dtype=jnp.int32))
    assert kinds.tolist() == [0, 2, 1, 0, 2]


def test_thresholds_are_inside_reasoning():
    segmenter, _ = parts()
    sparsity = jnp.asarray([0.0, 0.29, 0.3, 0.5, 0.7, 0.71, 1.0], jnp.float32)
    kinds = segmenter(sparsity, jnp.zeros(7, jnp.int32))
    assert "".join("RET"[kind] for kind in kinds.tolist()) == "EERRRTT"


def two_levels(refresh):
    """A transition demotes what is before it twice."""

    def mutant(thoughts, *rest):
        new = refresh(thoughts, *rest)
        fallen = new.level - thoughts.level
        return dataclasses.replace(new, level=jnp.minimum(new.level + fallen, len(SCHEDULE)))

    return mutant


def one_late(refresh):
    """Kinds are those of the segment after their own."""

    def mutant(thoughts, segmenter, retention, sparsity, answered, *rest):
        return refresh(thoughts, segmenter, retention, sparsity, answered + EVERY, *rest)

    return mutant


def execution_first(make_fit):
    """Case 2 takes E before T."""

    def mutant(thoughts, *rest):
        swapped = jnp.asarray([0, 2, 1], jnp.int32)[jnp.maximum(thoughts.kind, 0)]
        new = make_fit(dataclasses.replace(thoughts, kind=swapped), *rest)
        return dataclasses.replace(new, kind=thoughts.kind)

    return mutant


def newest_first(make_fit):
    def mutant(thoughts, every, retention, closed, budget):
        @jax.vmap
        def turned(x, n):
            index = jnp.arange(x.shape[0], dtype=jnp.int32)
            return x[jnp.where(index < n, n - 1 - index, index)]

        back = dataclasses.replace(
            thoughts, kind=turned(thoughts.kind, closed), level=turned(thoughts.level, closed)
        )
        new = make_fit(back, every, retention, closed, budget)
        return dataclasses.replace(new, kind=thoughts.kind, level=turned(new.level, closed))

    return mutant


def one_more(make_fit):
    """More is demoted than is needed."""

    def mutant(thoughts, every, retention, closed, budget):
        return make_fit(thoughts, every, retention, closed, budget - 1)

    return mutant


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("refresh", two_levels),
        ("refresh", one_late),
        ("make_fit", execution_first),
        ("make_fit", newest_first),
        ("make_fit", one_more),
    ],
)
def test_a_mutant_is_caught(monkeypatch, name, mutant):
    wrong = jax.jit(mutant(getattr(demotion, name)), static_argnums=(1, 2))
    monkeypatch.setitem(globals(), name, wrong)
    rng = np.random.default_rng(0)
    with pytest.raises(AssertionError):
        for _ in range(20):
            rows = ["".join(rng.choice(list("RET"), SEGMENTS)) for _ in range(ROWS)]
            follow(rows, rng.integers(20, 120, ROWS).tolist())
