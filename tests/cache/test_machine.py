"""Random sequences of operations on a cache, against a plain Python model of it."""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis import strategies as st

from kvjax.cache import evict, slots
from kvjax.cache.pages import give_pages
from pallas_kernels import SCRATCH_PAGE
from tests.cache import model
from tests.cache.model import Machine, Operation

CHOICES = (
    *[("append", 0)] * 3,
    *[("store", 1), ("store", 2)] * 2,
    *[("evict", 0), ("evict", 1), ("evict", 2)],
    *[("compact", 1), ("compact", 2)] * 2,
    *[("reuse", 1), ("reuse", 2)] * 2,
    ("weigh", 0),
    *[("weigh", 1), ("weigh", 2)] * 2,
    *[("reset", 0)] * 2,
)
KINDS = dict.fromkeys(kind for kind, _ in CHOICES)
EVENTS = (
    "the oldest gave way",
    "a page was taken",
    "a page was given back",
    "a hole was filled",
    "the pool ran dry",
    "a class was full",
    "a slot was moved",
    "a weighted slot was moved",
)


def operation(seed: int) -> Operation:
    """What a seed stands for. Hypothesis itself draws some choices far more often than others."""
    kind, index = CHOICES[np.random.default_rng(seed).integers(len(CHOICES))]
    return Operation(kind, index, seed)


SEEDS = st.integers(0, 2**32 - 1)


def run(sequences: int, **options) -> tuple[list[int], collections.Counter, collections.Counter]:
    """Lengths of the sequences, how often every operation was drawn, and what happened."""
    lengths, drawn, seen = [], collections.Counter(), collections.Counter()
    fixed = {"deadline": None, "derandomize": True, "database": None}

    @settings(max_examples=sequences, suppress_health_check=list(HealthCheck), **fixed, **options)
    @given(st.lists(SEEDS.map(operation), min_size=10, max_size=20), SEEDS)
    def sequence(todo: list[Operation], seed: int):
        machine = Machine(seen)
        for each in todo:
            machine.do(each)
        machine.check_end(seed)
        lengths.append(len(todo))
        drawn.update(each.kind for each in todo)

    sequence()
    return lengths, drawn, seen


@pytest.mark.parametrize("sequences", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_sequence_of_operations_leaves_what_the_model_says(sequences):
    lengths, drawn, seen = run(sequences)
    assert len(lengths) >= sequences and min(lengths) >= 10
    for kind in KINDS:
        assert drawn[kind] >= 0.05 * drawn.total(), (kind, drawn)
    for event in EVENTS:
        assert seen[event] >= sequences / 20, (event, seen)


def live_slot_reused(monkeypatch):
    """A slot of little mass is taken for a free one."""

    def is_free(pool, table, group):
        return (pool.bias[table] < 0) & (table != SCRATCH_PAGE)[..., None]

    monkeypatch.setattr(slots, "_is_free", is_free)
    return "store", model.store_tokens


def bias_lost(monkeypatch):
    """Slots that an eviction spares are ordinary ones afterwards."""

    def spare(layer, index, keep):
        layer = evict(layer, index, keep)
        bias = jnp.where(layer.pools[index].bias > -jnp.inf, jnp.float32(0), -jnp.inf)
        pool = dataclasses.replace(layer.pools[index], bias=bias)
        return slots.replace_class(layer, index, pools=pool)

    monkeypatch.setattr(model, "evict", spare)
    return "evict", model.evict_slots


def page_freed_early(monkeypatch):
    """An eviction gives back a page with one live slot left."""

    def free_early(layer, index, keep):
        layer = evict(layer, index, keep)
        table = layer.tables[index]
        few = (layer.pools[index].bias[table] > -jnp.inf).sum(-1) < 2
        table, free = give_pages(layer.free[index], table, few & (index > 0))
        return slots.replace_class(layer, index, tables=table, free=free)

    monkeypatch.setattr(model, "evict", free_early)
    return "evict", model.evict_slots


@pytest.mark.parametrize(
    "mutant, complaint",
    [
        (live_slot_reused, "tokens placed|pages taken|other tokens"),
        (bias_lost, "live slots changed: .*'bias': False"),
        (page_freed_early, "pages with live slots stay"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_machine_catches_a_mutant(monkeypatch, mutant, complaint):
    name, program = mutant(monkeypatch)
    monkeypatch.setitem(model.PROGRAMS, name, model.compiled(program))
    with pytest.raises(AssertionError, match=complaint):
        run(50, phases=[Phase.generate], verbosity=Verbosity.quiet)
