"""A row gives the same tokens whatever is around it, and nothing is compiled twice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decoding import Sampling, decode_chunk, start_decoding
from pallas_kernels import SCRATCH_PAGE
from tests.decoding import small
from tests.decoding.small import SAMPLED, prompts, tokens

KINDS = [(False, 0), (True, 0), (True, 1)]
kinds = pytest.mark.parametrize(("sampled", "seed"), KINDS, ids=["greedy", "seed 0", "seed 1"])


def how(sampled: bool, seed: int) -> dict:
    return {"seed": seed} | (SAMPLED if sampled else {})


def test_the_kinds_differ():
    """Else what follows would show little."""
    answers = [small.usual(*kind) for kind in KINDS]
    for row in range(small.ROWS):
        assert len({answer[row] for answer in answers}) == len(KINDS)
    assert all(len(set(answer)) == small.ROWS for answer in answers)


@kinds
@pytest.mark.parametrize("order", [(3, 2, 1, 0), (2, 0, 3, 1)])
def test_at_any_position_of_a_batch(sampled, seed, order):
    moved = tokens([prompts()[i] for i in order], **how(sampled, seed))
    assert moved == [small.usual(sampled, seed)[i] for i in order]


@kinds
def test_beside_rows_of_padding_and_beside_itself(sampled, seed):
    """The fifth to seventh prompts make a second batch, whose last row stays empty."""
    first, second, third, _ = prompts()
    answers = tokens([third] * small.ROWS + [first, second, first], **how(sampled, seed))
    usual = small.usual(sampled, seed)
    assert answers == [usual[2]] * small.ROWS + [usual[0], usual[1], usual[0]]


@kinds
def test_beside_longer_and_shorter_neighbours(sampled, seed):
    others = small.prompts([32, 1, 9], seed=3)
    answers = tokens([prompts()[1], *others], **how(sampled, seed))
    assert answers[0] == small.usual(sampled, seed)[1]
    assert tokens([others[1], prompts()[2], others[2], prompts()[0]], **how(sampled, seed)) == [
        answers[2],
        small.usual(sampled, seed)[2],
        answers[3],
        small.usual(sampled, seed)[0],
    ]


@pytest.mark.parametrize(("sampled", "seed"), KINDS[:2])
def test_alone(sampled, seed):
    for row in (1, 2):
        alone = tokens([prompts()[row]], **how(sampled, seed))
        assert alone == [small.usual(sampled, seed)[row]]


@pytest.mark.parametrize(
    ("sampled", "seed"), [KINDS[1], pytest.param(*KINDS[2], marks=pytest.mark.slow)]
)
def test_beside_neighbours_that_finish_early(sampled, seed):
    """Rows 0 and 2 reach a stop in the middle of a chunk, after which the others go on."""
    usual = small.usual(sampled, seed)
    taken = set(usual[1]) | set(usual[3])
    stops = tuple({next(t for t in usual[row][1:] if t not in taken) for row in (0, 2)})
    answers = tokens(prompts(), stop_ids=stops, **how(sampled, seed))
    assert answers[1::2] == [usual[1], usual[3]]
    for row in (0, 2):
        end = min(usual[row].index(stop) for stop in stops if stop in usual[row])
        assert answers[row] == usual[row][: end + 1]
        assert 1 < len(answers[row]) < small.NEW


@pytest.mark.parametrize(
    ("sampled", "chunk"),
    [
        (False, 1),
        (False, 5),
        pytest.param(False, 16, marks=pytest.mark.slow),
        pytest.param(True, 5, marks=pytest.mark.slow),
    ],
)
def test_whatever_the_chunk(sampled, chunk):
    assert tokens(prompts(), chunk=chunk, **how(sampled, 0)) == list(small.usual(sampled))


@pytest.mark.parametrize("page", [4, *(pytest.param(p, marks=pytest.mark.slow) for p in (1, 64))])
def test_whatever_the_page(page):
    """Pages of 4 and less: the width of what is attended grows while the rows do."""
    recipe = kvjax.recipes.full(page)
    grown = tokens(prompts(), recipe=recipe, max_new_tokens=44)
    assert [row[: small.NEW] for row in grown] == list(small.usual())
    # The last token of the longest row, out of a prompt that holds all before it.
    longest = [*prompts()[1], *grown[1][:-1]]
    assert tokens([longest], max_new_tokens=1, batch_size=1) == [grown[1][-1:]]


def owned(cache, row: int) -> list[np.ndarray]:
    """Everything that a row holds, and where."""
    parts = [np.asarray(cache.length[row])]
    for layer in cache.layers:
        (pool,), (table,) = layer.pools, np.asarray(layer.tables)
        pages = table[row][table[row] != SCRATCH_PAGE]
        parts += [table[row], *(np.asarray(leaf)[pages] for leaf in jax.tree.leaves(pool))]
    return parts


def same(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def start(sampling=None, stop_ids=(), max_new=small.NEW):
    lm, rows = small.lm(), small.ROWS
    size = {"prompt_tokens": 32, "max_new_tokens": small.NEW, "page_size": small.PAGE}
    count = [[len(prompt) for prompt in prompts()]]
    [(cache, logits)] = small.prefilled(lm, prompts(), count, bucket=32, **size)
    left = jnp.full(rows, max_new, jnp.int32)
    return start_decoding(cache, jnp.asarray(logits), sampling, left, stop_ids=stop_ids)


def test_finished_rows_are_frozen():
    lm = small.lm()
    state, _ = start()
    halt = jnp.array([False, True, False, False])
    state, output = decode_chunk(
        lm.model, state, None, halt, steps=small.CHUNK, stop_ids=(), width=16 * small.PAGE
    )
    assert output.real.all(0).tolist() == [True, False, True, True]
    assert not output.real[:, 1].any()
    before = [owned(state.cache, row) for row in range(small.ROWS)]
    token = int(state.token[1])
    assert int(state.cache.length[1]) == small.LENGTHS[1]
    state, output = decode_chunk(
        lm.model,
        state,
        None,
        jnp.zeros(4, bool),
        steps=small.CHUNK,
        stop_ids=(),
        width=16 * small.PAGE,
    )
    after = [owned(state.cache, row) for row in range(small.ROWS)]
    assert same(before[1], after[1]) and int(state.token[1]) == token
    assert not any(same(before[row], after[row]) for row in (0, 2, 3))
    for layer in state.cache.layers:
        assert np.isneginf(layer.pools[0].bias[SCRATCH_PAGE]).all()
    assert output.slots.sum((1, 2)).tolist() == [
        2 * 3 * (length + 2 * small.CHUNK * (row != 1)) for row, length in enumerate(small.LENGTHS)
    ]


def test_a_row_stops_in_the_cache_where_it_stopped_in_the_answer():
    """After the stop, nothing more is appended: not even the stop token itself."""
    stop = next(t for t in small.usual()[0][3:] if t not in small.usual()[0][:3])
    at = small.usual()[0].index(stop)
    lm = small.lm()
    state, _ = start(stop_ids=(stop,))
    for _ in range(3):
        state, _ = decode_chunk(
            lm.model,
            state,
            None,
            jnp.zeros(4, bool),
            steps=small.CHUNK,
            stop_ids=(stop,),
            width=16 * small.PAGE,
        )
    assert int(state.cache.length[0]) == small.LENGTHS[0] + at
    assert int(state.left[0]) == 0 and int(state.token[0]) == stop
    for layer in state.cache.layers:
        live = layer.pools[0].bias[layer.tables[0][0]] > -jnp.inf
        assert live.sum((1, 2)).tolist() == [small.LENGTHS[0] + at] * 2


def test_the_device_knows_every_stop_and_the_first_token_may_be_one():
    """Else a row would go on in the cache after the host has ended it."""
    first, second = small.usual()[2][0], small.usual()[1][3]
    stops = (95, second, first)
    state, output = start(stop_ids=stops)
    assert output.real.all()
    assert (state.left == 0).tolist() == [row[0] in stops for row in small.usual()]
    _, output = decode_chunk(
        small.lm().model,
        state,
        None,
        jnp.zeros(4, bool),
        steps=8,
        stop_ids=stops,
        width=16 * small.PAGE,
    )
    for row, real in zip(small.usual(), output.real.T.tolist(), strict=True):
        ends = [i for i, token in enumerate(row[:9]) if token in stops]
        left = ends[0] if ends else 8
        assert real == [True] * left + [False] * (8 - left)


def test_no_more_tokens_than_are_left():
    state, output = start(max_new=3)
    total = np.asarray(output.real)
    for _ in range(2):
        state, output = decode_chunk(
            small.lm().model,
            state,
            None,
            jnp.zeros(4, bool),
            steps=8,
            stop_ids=(),
            width=16 * small.PAGE,
        )
        total = np.concatenate([total, output.real])
    assert total.sum(0).tolist() == [3] * 4
    np.testing.assert_array_equal(state.cache.length, np.array(small.LENGTHS) + 2)


def test_rows_have_their_own_settings():
    """A greedy row among sampled ones, through the lower interface."""
    sampling = Sampling.create(4, temperature=0.9, top_k=40, top_p=0.95, min_p=0.0, seed=0)
    cold = dataclasses.replace(sampling, temperature=sampling.temperature.at[2].set(0.0))
    state, output = start(sampling=cold)
    _, more = decode_chunk(
        small.lm().model,
        state,
        cold,
        jnp.zeros(4, bool),
        steps=8,
        stop_ids=(),
        width=16 * small.PAGE,
    )
    got = np.concatenate([output.tokens, more.tokens]).T
    assert tuple(got[2].tolist()) == small.usual()[2][:9]
    assert tuple(got[1].tolist()) == small.usual(sampled=True)[1][:9]


def test_two_prompts_of_one_bucket_compile_once():
    tokens(prompts())
    with small.counting_compilations() as compiled:
        again = tokens(prompts())
        other = tokens(small.prompts([17, 32, 18, 1], seed=9))
    assert compiled == []
    assert again == list(small.usual()) and other != again
    with small.counting_compilations() as compiled:
        tokens(prompts(), max_new_tokens=small.NEW + 32)
    assert compiled, "the count must see a program that is new"


def test_seeds_and_settings_compile_nothing():
    tokens(prompts(), **small.SAMPLED)
    with small.counting_compilations() as compiled:
        tokens(prompts(), seed=123, temperature=0.3, top_k=7, top_p=0.5)
    assert compiled == []


@pytest.mark.slow
def test_long_prompts_of_one_bucket_compile_once():
    """One of them fills its bucket, so that its pages soon need the next width."""
    lm = small.lm("qwen2")
    options = {"max_new_tokens": 4, "stop_ids": (), "chunk": 4}
    kvjax.generate(lm, small.prompts([1030]), **options)
    with small.counting_compilations() as compiled:
        kvjax.generate(lm, small.prompts([2048]), **options)
    assert compiled == []
