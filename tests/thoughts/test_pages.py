"""Sparsity of the last token over pages, and what of a segment stays in them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import ClassGeometry, Geometry, LayerGeometry, append, evict, init_cache, store
from kvjax.cache.slots import replace_class, reserve_layer
from kvjax.codecs import kv_codec
from kvjax.decoding.observe import remember
from kvjax.thoughts import Retention, pages
from kvjax.thoughts.pages import Segments, last_sparsity, retire, settle_levels
from kvjax.thoughts.sparsity import dense_sparsity
from kvjax.thoughts.state import no_thoughts
from pallas_kernels import SCRATCH_PAGE
from pallas_kernels.layout import UNKNOWN_LEVEL
from pallas_kernels.read import plain_keys
from tests.thoughts import kept

ROWS, HEADS, GROUP, DIM, PAGE = 3, 2, 3, 8, 16
LENGTHS = np.array([70, 41, 9], np.int32)
STORED = np.array([56, 30, 0], np.int32)  # the others are recent
SCALE = 1.3
TOKENS = 80

SHAPES = (
    ClassGeometry(kv_codec("bf16"), PAGE, 2),
    ClassGeometry(kv_codec("int8"), PAGE, 4, levels=True),
    ClassGeometry(kv_codec("k4v2"), PAGE, 4, levels=True),
)
GEOMETRY = Geometry(
    layers=(LayerGeometry(SHAPES, queries=5),),
    rows=ROWS,
    num_heads=HEADS * GROUP,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype=jnp.dtype("float32"),
    segments=8,
)


@jax.jit
def filled(k, v, q, into):
    """A layer with tokens; ``into`` [B, Hkv, T] is the class of each, -1 for none."""
    [layer] = init_cache(GEOMETRY).layers
    pos = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (ROWS, TOKENS))
    length = jnp.asarray(LENGTHS)
    layer = reserve_layer(layer, length)
    recent = (pos >= STORED[:, None]) & (pos < length[:, None])
    layer = append(layer, k.swapaxes(1, 2), v.swapaxes(1, 2), pos, recent)
    old = (pos < STORED[:, None])[:, None]
    for c in (1, 2):
        layer, _ = store(layer, c, k, v, pos, old & (into == c))
    return remember(layer, q, pos, pos < length[:, None])


def drawn(seed: int, missing: float = 0.4):
    """A filled layer, its last queries, and numpy copies of what it was filled with."""
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((ROWS, HEADS, TOKENS, DIM), np.float32) for _ in range(2))
    q = rng.standard_normal((ROWS, TOKENS, HEADS * GROUP, DIM), np.float32)
    into = np.where(rng.random((ROWS, HEADS, TOKENS)) < 0.5, 1, 2)
    into = np.where(rng.random(into.shape) < missing, -1, into).astype(np.int32)
    layer = filled(*map(jnp.asarray, (k, v, q, into)))
    return layer, q[np.arange(ROWS), LENGTHS - 1], k


def tokens_of(layer) -> list[list[dict[int, tuple[np.ndarray, float]]]]:
    """Key, as it is stored, and bias of every live token, by row, head and position."""
    found = [[{} for _ in range(HEADS)] for _ in range(ROWS)]
    for pool, table in zip(layer.pools, layer.tables, strict=True):
        keys = np.asarray(plain_keys(pool, table, jnp.float32), np.float64)
        bias, pos = (np.asarray(x)[np.asarray(table)] for x in (pool.bias, pool.pos))
        for row, head, page, slot in np.argwhere((pos >= 0) & (bias > -np.inf)):
            at = row, head, page, slot
            assert int(pos[at]) not in found[row][head]
            found[row][head][int(pos[at])] = keys[at], float(bias[at])
    return found


def expected(layer, q, corrected: bool) -> tuple[np.ndarray, float]:
    """Appendix C.2 of the paper, and how close the closest weight is to the border."""
    shares, closest = [], np.inf
    for row, heads in enumerate(tokens_of(layer)):
        weights = {}
        for head, tokens in enumerate(heads):
            own = q[row, head * GROUP : (head + 1) * GROUP].astype(np.float64)
            logit = {p: (own @ k).max() * SCALE + b for p, (k, b) in tokens.items()}
            top = max(logit.values(), default=0.0)
            mass = {p: np.exp(x - top) for p, x in logit.items()}
            total = sum(mass.values())
            for p, x in mass.items():
                weights[p] = weights.get(p, 0.0) + x / total / HEADS
        border = 0.01 * max(weights.values())
        closest = min(closest, *(abs(w / border - 1) for w in weights.values()))
        few = sum(w < border for w in weights.values())
        if corrected:
            gone = LENGTHS[row] - len(weights)
            shares.append((few + gone) / LENGTHS[row])
        else:
            shares.append(few / len(weights))
    return np.array(shares), closest


sparsity = jax.jit(last_sparsity, static_argnums=(1, 3))


def check(layer, q, corrected: bool, program=None) -> np.ndarray:
    wanted, closest = expected(layer, q, corrected)
    assert closest > 1e-4, "take another seed"
    found = np.asarray((program or sparsity)(layer, SCALE, jnp.asarray(LENGTHS), corrected))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    return found


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("missing", [0.0, 0.4, 0.9])
def test_sparsity_is_the_paper_s(corrected, missing):
    for seed in (0, 1):
        layer, q, _ = drawn(seed, missing)
        found = check(layer, q, corrected)
        assert len(set(found.tolist())) == ROWS and (found < 1).all() and found.max() > 0.2


def test_keys_that_are_stored_without_their_mean_and_balanced():
    layer, q, _ = drawn(0)
    rng = np.random.default_rng(4)
    mean = rng.standard_normal((HEADS, DIM)).astype(np.float32)
    balance = rng.uniform(0.5, 2, (HEADS, DIM)).astype(np.float32)
    pools = [
        dataclasses.replace(pool, mean=jnp.asarray(mean), balance=jnp.asarray(balance))
        for pool in layer.pools[1:]
    ]
    check(dataclasses.replace(layer, pools=(layer.pools[0], *pools)), q, True)


def test_evicted_tokens_count_as_hardly_attended_if_at_all():
    layer, q, _ = drawn(0)
    both = [check(layer, q, corrected) for corrected in (True, False)]
    assert (both[0][:2] > both[1][:2]).all()
    assert both[0][2] == both[1][2]  # nothing was evicted


def test_full_caches_say_what_calibration_says():
    """``dense_sparsity`` finds the thresholds; both have to mean the same number."""
    rng = np.random.default_rng(3)
    k, v = (rng.standard_normal((ROWS, HEADS, TOKENS, DIM), np.float32) for _ in range(2))
    q = rng.standard_normal((ROWS, TOKENS, HEADS * GROUP, DIM), np.float32)
    shapes = (ClassGeometry(kv_codec("bf16"), PAGE, TOKENS // PAGE),)
    layers = (LayerGeometry(shapes, queries=5),)
    [layer] = init_cache(dataclasses.replace(GEOMETRY, layers=layers)).layers
    pos = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (ROWS, TOKENS))
    length = jnp.asarray(LENGTHS)
    real = pos < length[:, None]

    @jax.jit
    def fill(layer, k, v, q):
        layer = append(reserve_layer(layer, length), k, v, pos, real)
        return remember(layer, q, pos, real)

    layer = fill(layer, *(jnp.asarray(x.swapaxes(1, 2)) for x in (k, v)), jnp.asarray(q))
    last = q[np.arange(ROWS), LENGTHS - 1][:, None]
    dense = dense_sparsity(jnp.asarray(last), jnp.asarray(k.swapaxes(1, 2)), real[:, None], SCALE)[
        :, 0
    ]
    for corrected in (True, False):
        found = sparsity(layer, SCALE, length, corrected)
        np.testing.assert_allclose(found, dense, rtol=0, atol=1e-6)
    assert (np.asarray(dense) > 0.2).all()


def poisoned(layer, rng):
    """NaN in what no live token says: scales and numbers of free slots, all of unowned pages."""
    for c, (pool, table) in enumerate(zip(layer.pools, layer.tables, strict=True)):
        free = np.isneginf(np.asarray(pool.bias))
        nameless = ~np.isin(np.arange(len(free)), np.asarray(table))
        nameless[SCRATCH_PAGE] = False
        new = {
            "bias": np.where(nameless[:, None], np.float32(0), np.asarray(pool.bias)),
            "pos": np.where(
                nameless[:, None], rng.integers(0, 60, free.shape), np.asarray(pool.pos)
            ).astype(np.int32),
        }
        if pool.k_scale is None:
            new["k"] = np.where(free[..., None], np.float32(np.nan), np.asarray(pool.k))
        else:
            scale = np.asarray(pool.k_scale)
            new["k_scale"] = np.where(free[..., None], np.float16(np.nan), scale)
            new["k"] = np.where(
                free[..., None], rng.integers(0, 256, pool.k.shape), np.asarray(pool.k)
            ).astype(np.uint8)
        changed = dataclasses.replace(pool, **{name: jnp.asarray(x) for name, x in new.items()})
        layer = replace_class(layer, c, pools=changed)
    return layer


def test_free_slots_and_pages_of_nobody_are_not_read():
    layer, q, _ = drawn(0)
    clean = check(layer, q, True)
    bad = poisoned(layer, np.random.default_rng(1))
    assert (np.asarray(sparsity(bad, SCALE, jnp.asarray(LENGTHS), True)) == clean).all()


@pytest.mark.parametrize("forget", [True, False])
def test_an_evicted_token_takes_no_part(forget):
    """Not even if it is attended until its slot is used again."""
    rng = np.random.default_rng(5)
    layer, q, _ = drawn(1, 0.2)
    for c in (1, 2):
        keep = rng.random((*layer.tables[c].shape, PAGE)) < 0.5
        layer = evict(layer, c, jnp.asarray(keep), forget=forget)
    assert (np.asarray(layer.pools[1].bias) > -np.inf).sum() > 0
    check(layer, q, True)
    check(layer, q, False)


def test_a_token_that_stands_for_more_weighs_more():
    layer, q, _ = drawn(2, 0.2)
    pool = layer.pools[1]
    bias = np.where(np.asarray(pool.pos) % 3 == 0, np.float32(1.5), np.asarray(pool.bias))
    pool = dataclasses.replace(pool, bias=jnp.asarray(bias))
    check(replace_class(layer, 1, pools=pool), q, True)


def test_a_row_without_a_token():
    [empty] = init_cache(GEOMETRY).layers
    found = sparsity(empty, SCALE, jnp.zeros(ROWS, jnp.int32), True)
    assert (np.asarray(found) == 0).all()


def mean_over_query_heads(text: str) -> str:
    return text.replace(".max(2) * scale", ".mean(2) * scale")


def softmax_after_the_mean(text: str) -> str:
    return (
        text.replace(".max(2) * scale", ".max(2) * scale", 1)
        .replace("* logit.shape[1]", "* 1.0", 1)
        .replace("weight.sum(-1, keepdims=True)", "1.0", 1)
    )


def tenth_of_a_percent(text: str) -> str:
    return text.replace("NEGLIGIBLE *", "0.001 *")


def first_query(text: str) -> str:
    return text.replace("jnp.maximum(length - 1, 0) % count", "jnp.zeros_like(length)")


def heads_apart(text: str) -> str:
    """What the heads say of a token is not added up."""
    return text.replace("first = pos != ", "first = True | (pos != ").replace(
        "constant_values=-1)[:, :-1]", "constant_values=-1)[:, :-1])"
    )


@pytest.mark.parametrize(
    "mutant",
    [mean_over_query_heads, softmax_after_the_mean, tenth_of_a_percent, first_query, heads_apart],
)
def test_a_mutant_is_caught(mutant):
    import inspect

    source = inspect.getsource(pages)
    changed = mutant(source)
    assert changed != source
    names = dict(vars(pages))
    exec(compile(changed, pages.__file__, "exec"), names)
    program = functools.partial(names["last_sparsity"])
    layer, q, _ = drawn(0)
    with pytest.raises(AssertionError, match="Not equal"):
        check(layer, q, True, program)


# What stays of a segment.

EVERY, SCHEDULE = 16, (8, 4, 2)
PROMPT = np.array([5, 3, 1], np.int32)


def segments(closes) -> Segments:
    return Segments(jnp.asarray(PROMPT), jnp.asarray(closes, jnp.int32), EVERY)


@functools.cache
def whole(chooser: str = "kmeans", shared: bool = False):
    """A layer whose tokens are all there, each segment in one class; and its levels settled.

    Rows close segments 1, 0 and none.
    """
    rng = np.random.default_rng(7)
    k, v = (rng.standard_normal((ROWS, HEADS, TOKENS, DIM), np.float32) for _ in range(2))
    q = rng.standard_normal((ROWS, TOKENS, HEADS * GROUP, DIM), np.float32)
    pos = np.arange(TOKENS)
    into = 1 + (pos[None] - PROMPT[:, None]) // EVERY % 2
    into = np.broadcast_to(np.where(pos < PROMPT[:, None], 1, into)[:, None], k.shape[:3])
    layer = filled(*map(jnp.asarray, (k, v, q, into.astype(np.int32))))
    how = Retention(SCHEDULE, chooser, shared=shared, observed=5)
    done = jax.jit(settle_levels, static_argnums=(2, 4))(
        layer,
        jnp.int32(0),
        how,
        segments([1, 0, -1]),
        SCALE,
        jnp.asarray(LENGTHS),
        jnp.int32(0),
    )
    return layer, done, q, k


def level_of(layer) -> list[list[dict[int, int]]]:
    found = [[{} for _ in range(HEADS)] for _ in range(ROWS)]
    for pool, table in zip(layer.pools[1:], layer.tables[1:], strict=True):
        pos, level = (np.asarray(x)[np.asarray(table)] for x in (pool.pos, pool.level))
        for row, head, page, slot in np.argwhere(pos >= 0):
            found[row][head][int(pos[row, head, page, slot])] = int(level[row, head, page, slot])
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_levels_come_from_the_keys_as_they_are_stored(shared):
    before, after, _, _ = whole(shared=shared)
    stored = tokens_of(before)
    clear = 0
    for row, closes in enumerate([1, 0, None]):
        start = None if closes is None else PROMPT[row] + closes * EVERY
        for head, levels in enumerate(level_of(after)[row]):
            mine = [] if start is None else range(start, start + EVERY)
            assert all(levels[p] == UNKNOWN_LEVEL for p in levels if p not in mine)
            if not mine:
                continue
            heads = range(HEADS) if shared else [head]
            keys = np.stack([np.concatenate([stored[row][h][p][0] for h in heads]) for p in mine])
            wanted, margin = kept.kmeans_levels(keys, SCHEDULE)
            if margin > 2e-4:
                assert [levels[p] for p in mine] == wanted.tolist()
                clear += 1
    assert clear >= 2


def test_levels_by_attention_of_the_last_queries():
    """Mean over the heads of a group, summed over the last five queries, which see all of it."""
    before, after, q, _ = whole("attention")
    stored = tokens_of(before)
    for row, closes in enumerate([1, 0]):
        mine = range(PROMPT[row] + closes * EVERY, PROMPT[row] + (closes + 1) * EVERY)
        for head, levels in enumerate(level_of(after)[row]):
            score = np.zeros(EVERY)
            keys = np.stack([stored[row][head][p][0] for p in mine])
            for t in range(LENGTHS[row] - 5, LENGTHS[row]):
                for query in q[row, t, head * GROUP : (head + 1) * GROUP].astype(np.float64):
                    weight = np.exp(keys @ query * SCALE)
                    score += weight / weight.sum()
            order = np.argsort(-score).tolist()
            wanted = [sum(order.index(i) < count for count in SCHEDULE) for i in range(EVERY)]
            assert [levels[p] for p in mine] == wanted


@pytest.mark.parametrize("forget", [True, False])
def test_retiring_keeps_what_survives_its_segment_s_level(forget):
    _, layer, _, _ = whole()
    levels = np.zeros((ROWS, GEOMETRY.segments), np.int32)
    levels[0, :3], levels[1, :2], levels[2] = (0, 2, 3), (3, 1), 1
    thoughts = dataclasses.replace(no_thoughts(*levels.shape), level=jnp.asarray(levels))
    how = Retention(SCHEDULE, forget=forget)
    after = retire(layer, thoughts, segments([1, 0, -1]), how)
    survives = level_of(layer)
    for row, heads in enumerate(level_of(after)):
        for head, held in enumerate(heads):
            for p, survived in survives[row][head].items():
                segment = (p - PROMPT[row]) // EVERY
                stays = segment < 0 or survived >= levels[row, segment]
                assert (p in held) == stays
    one = sum(p >= PROMPT[1] for p in level_of(after)[1][0])
    assert one == SCHEDULE[2] + max(STORED[1] - PROMPT[1] - EVERY, 0)


def test_a_slot_that_is_used_again_forgets_the_level_of_its_last_token():
    """Else the new token would be taken for one that does not survive, before its segment ends."""
    _, layer, _, k = whole()
    keep = jnp.zeros((*layer.tables[1].shape, PAGE), bool).at[:, :, 0, ::2].set(True)
    layer = evict(layer, 1, keep)
    pos = jnp.broadcast_to(jnp.arange(200, 200 + TOKENS, dtype=jnp.int32), (ROWS, TOKENS))
    new = jnp.zeros((ROWS, HEADS, TOKENS), bool).at[:, :, :6].set(True)
    pool = dataclasses.replace(layer.pools[1], level=layer.pools[1].level * 0)
    layer, placed = store(
        replace_class(layer, 1, pools=pool), 1, jnp.asarray(k), jnp.asarray(k), pos, new
    )
    assert placed.sum() == ROWS * HEADS * 6
    for row in level_of(layer):
        for held in row:
            assert all(level == UNKNOWN_LEVEL for p, level in held.items() if p >= 200)
