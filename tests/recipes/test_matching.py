"""Recipes that match attention: what stays of a selection in the cache, and what it says then."""

import dataclasses
import functools
import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import recipes
from kvjax.cache import init_cache, plan
from kvjax.compress.context import Context
from kvjax.compress.refit import store_change
from kvjax.compress.selection import Candidates, Rows, selection
from kvjax.compress.selectors import HighestAttention
from kvjax.decoding import decode_chunk, prefill_chunk, start_decoding
from kvjax.decoding.loop import NARROWEST
from kvjax.decoding.maintain import maintain
from kvjax.errors import UsageError
from kvjax.matching import AttentionMatching, segments
from kvjax.models.attention import causal_mask, masked_attention
from kvjax.models.rope import rotation
from kvjax.recipes import Recipe
from kvjax.thoughts import Given
from pallas_kernels.read import plain_keys, plain_values
from tests.decoding import small
from tests.recipes.test_budget import decode, tokens

maintaining = importlib.import_module("kvjax.decoding.maintain")
PROMPT, BUDGET, EVERY = 20, 48, 64
OPTIONS = {"budget": BUDGET, "every": EVERY, "page_size": 16, "recent": 20, "codec": "bf16"}
MATCHING = AttentionMatching(queries=16)
BREAKS = np.isin(np.arange(96), [3, 40, 41, 77]) * np.uint8(segments.BREAK)

CODECS = ["int4", *(pytest.param(codec, marks=pytest.mark.slow) for codec in ("bf16", "int8"))]


def tam(**options) -> Recipe:
    selector = dataclasses.replace(recipes.tam().selector, window=16, least=8)
    return recipes.tam(**{"compactor": MATCHING, "selector": selector} | OPTIONS | options)


@dataclasses.dataclass(frozen=True)
class Token:
    """What a slot says, and the bytes that it says it with."""

    k: np.ndarray
    v: np.ndarray
    bias: float
    key_bytes: bytes
    value_bytes: bytes
    recent: bool


def held(layer, row: int = 0) -> list[dict[int, Token]]:
    """The tokens of every KV head by position."""
    found = [{} for _ in range(layer.tables[0].shape[1])]
    for c, (pool, table) in enumerate(zip(layer.pools, layer.tables, strict=True)):
        k, v = (
            np.asarray(read(pool, table, jnp.float32))[row] for read in (plain_keys, plain_values)
        )
        for head, pages in enumerate(np.asarray(table)[row]):
            for i, page in enumerate(pages):
                for slot in np.flatnonzero(np.asarray(pool.bias[page]) > -np.inf):
                    parts = {"k": pool.k[page, slot], "v": pool.v[page, :, slot]}
                    if pool.k_scale is not None:
                        parts |= {
                            "ks": pool.k_scale[page, slot],
                            "vs": pool.v_scale[page, :, slot],
                        }
                    raw = {name: np.asarray(part).tobytes() for name, part in parts.items()}
                    position = int(pool.pos[page, slot])
                    assert position not in found[head], "a token is there twice"
                    found[head][position] = Token(
                        k[head, i, slot],
                        v[head, i, slot],
                        float(pool.bias[page, slot]),
                        raw["k"] + raw.get("ks", b""),
                        raw["v"] + raw.get("vs", b""),
                        c == 0,
                    )
    return found


def empty(geometry):
    """A cache whose tokens are a text with paragraphs."""
    cache = init_cache(geometry)
    if cache.ledger is None:
        return cache
    known = {"newlines": jnp.asarray(BREAKS), "instruction": jnp.array([5, 9], jnp.int32)}
    return dataclasses.replace(cache, ledger=dataclasses.replace(cache.ledger, **known))


def run(recipe: Recipe, steps: int, prompt: int = PROMPT, lm=None):
    """``done``, and the state before and after every maintenance of ``steps`` decoded tokens."""
    lm = lm or small.lm()
    planned = plan(
        lm.config,
        recipe,
        batch_size=1,
        prompt_tokens=prompt,
        max_new_tokens=steps + recipe.tick,
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    padded = np.zeros((1, max(16, 1 << (prompt - 1).bit_length())), np.int32)
    padded[0, :prompt] = small.prompts([prompt])[0]
    cache, logits = prefill_chunk(
        lm.model,
        empty(planned.geometry),
        jnp.zeros((1, lm.config.vocab_size)),
        padded,
        np.int32([prompt]),
        recipe=recipe,
    )
    left = jnp.full(1, steps + 9, jnp.int32)
    state, _ = start_decoding(cache, logits, None, left, stop_ids=())
    halt = np.zeros(1, bool)
    for done in range(0, steps + 1, recipe.tick):
        copy = [held(layer) for layer in state.cache.layers] if done % recipe.every == 0 else None
        queries = [np.asarray(layer.queries) for layer in state.cache.layers]
        common = {"config": lm.config, "recipe": recipe, "done": done}
        after = maintain(state, ~halt, **common, model=lm.model)
        yield done, copy, queries, after
        state, _ = decode_chunk(
            lm.model,
            after,
            None,
            halt,
            steps=recipe.tick,
            stop_ids=(),
            width=NARROWEST,
            recipe=recipe,
        )


@functools.cache
def selections(codec: str = "bf16", rounds: int = 2, **options):
    """For every selection: what the layers held before it, their queries, and after it."""
    recipe = tam(codec=codec, **options)
    found = []
    for done, before, queries, after in run(recipe, rounds * EVERY):
        if done and done % EVERY == 0:
            layers = [held(layer) for layer in after.cache.layers]
            flags = np.asarray(after.cache.ledger.flags[0])
            found.append((before, queries, layers, int(after.cache.length[0]), flags))
    return found


def attention(queries, tokens: dict[int, Token], scale: float, length: int, head: int):
    """Log-mass and output of the last queries over what they see, in float64."""
    count = queries.shape[1]
    found = []
    for pos in range(max(0, length - count), length):
        group = queries.shape[2] // 2
        for q in queries[0, pos % count, head * group : (head + 1) * group].astype(np.float64):
            seen = [token for p, token in tokens.items() if p <= pos]
            logit = np.array(
                [token.k.astype(np.float64) @ q * scale + token.bias for token in seen]
            )
            weight = np.exp(logit - logit.max())
            out = weight @ np.stack([token.v for token in seen]) / weight.sum()
            found.append((np.log(weight.sum()) + logit.max(), out))
    mass, out = zip(*found, strict=True)
    return np.array(mass), np.stack(out)


def errors(before, queries, after, length):
    """Mean error of log-mass and relative error of outputs, over layers and heads."""
    lm = small.lm()
    found = []
    for was, q, now in zip(before, queries, after, strict=True):
        for head in range(len(was)):
            mass, out = attention(q, was[head], lm.config.scale, length, head)
            new_mass, new_out = attention(q, now[head], lm.config.scale, length, head)
            miss = np.linalg.norm(new_out - out) / np.linalg.norm(out)
            found.append((np.abs(new_mass - mass).mean(), miss))
    return np.mean(found, 0)


@pytest.mark.parametrize("codec", CODECS)
def test_keys_stay_as_they_are_and_what_must_stay_is_untouched(codec):
    for before, _, after, length, _ in selections(codec):
        changed = 0
        for was, now in zip(before, after, strict=True):
            for old, new in zip(was, now, strict=True):
                assert len(new) == BUDGET
                assert set(new) <= set(old)
                assert set(range(4)) | set(range(length - 20, length)) <= set(new)
                for p, token in new.items():
                    if not old[p].recent:
                        assert token.key_bytes == old[p].key_bytes
                    if p < 4 or p >= length - 20:
                        assert token.bias == old[p].bias
                        if old[p].recent == token.recent:
                            assert token.value_bytes == old[p].value_bytes
                    changed += token.bias != old[p].bias
        assert changed > 3 * 2 * 10


@pytest.mark.parametrize("codec", CODECS)
def test_what_stays_says_what_all_said(codec):
    """Mass and output of the queries that were asked, over what is in the cache, in float64."""
    for before, queries, after, length, _ in selections(codec):
        plain = [
            [{p: old[p] for p in new} for old, new in zip(was, now, strict=True)]
            for was, now in zip(before, after, strict=True)
        ]
        evicted = errors(before, queries, plain, length)
        matched = errors(before, queries, after, length)
        assert (matched < 0.7 * evicted).all()


def expected(before, q, now, length, recipe):
    """What the compactor says of one layer, from its tokens in order of position."""
    heads = len(before)
    positions = [sorted(head) for head in before]
    most = max(map(len, positions))
    shape = (1, heads, most)
    bias, pos = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.int32)
    k, v = (np.zeros((*shape, 8), np.float32) for _ in range(2))
    keep, fixed = np.zeros(shape, bool), np.zeros(shape, bool)
    for head, order in enumerate(positions):
        for i, p in enumerate(order):
            token = before[head][p]
            bias[0, head, i], pos[0, head, i], k[0, head, i], v[0, head, i] = (
                token.bias,
                p,
                token.k,
                token.v,
            )
            keep[0, head, i] = p in now[head]
            fixed[0, head, i] = p < 4 or p >= length - 20
    count = q.shape[1]
    last = length - 1
    query_pos = [last - (last - slot) % count for slot in range(count)]
    lm = small.lm()
    ctx = Context(
        bias=jnp.asarray(bias),
        pos=jnp.asarray(pos),
        length=jnp.array([length], jnp.int32),
        prompt=jnp.array([PROMPT], jnp.int32),
        seed=jnp.int32(0),
        k=jnp.asarray(k),
        v=jnp.asarray(v),
        queries=jnp.asarray(q),
        query_pos=jnp.asarray([query_pos], jnp.int32),
        must=jnp.asarray(fixed),
        room=jnp.array([BUDGET], jnp.int32),
        segment=None,
        scale=lm.config.scale,
    )
    fitted = recipe.compactor(ctx, jnp.asarray(keep), jnp.asarray(fixed), BUDGET)
    found = [{} for _ in range(heads)]
    for head in range(heads):
        for i, ok in enumerate(np.asarray(fitted.valid[0, head])):
            if ok:
                p = int(pos[0, head, int(fitted.index[0, head, i])])
                found[head][p] = float(fitted.bias[0, head, i]), np.asarray(fitted.v[0, head, i])
    return found


def test_the_cache_holds_what_the_fit_says():
    """The fit of the tokens in order; twice, so that the second one starts from biases."""
    recipe = tam(selector=recipes.pam().selector)
    biases = []
    for done, before, queries, after in run(recipe, 2 * EVERY):
        if not done or done % EVERY:
            continue
        length = int(after.cache.length[0])
        biases.append(sum(t.bias != 0 for layer in before for head in layer for t in head.values()))
        for was, q, layer in zip(before, queries, after.cache.layers, strict=True):
            now = held(layer)
            for head, values in enumerate(expected(was, q, now, length, recipe)):
                assert values.keys() == now[head].keys()
                for p, (bias, v) in values.items():
                    assert now[head][p].bias == pytest.approx(bias, abs=2e-3)
                    np.testing.assert_allclose(now[head][p].v, v, atol=2e-2)
    assert biases[0] == 0 < biases[1]


def test_values_are_not_read_where_none_is_fitted():
    """Not by the fit, and not when its biases are stored: they stay, whatever they are."""
    full = tam(codec="int4")
    state = next(state for done, *_, state in run(full, 2 * EVERY) if done == 48)
    recipe = dataclasses.replace(
        full,
        selector=HighestAttention(window=16),
        compactor=dataclasses.replace(MATCHING, fit_values=False),
        budget=36,
    )
    length = state.cache.length
    rows = Rows(length, length, state.cache.prompt, length, length, length > 0, jnp.int32(0))
    none = jnp.zeros((1, 2, 16, 8))
    new = Candidates(
        jnp.zeros((1, 16), jnp.int32),
        none,
        none,
        keep=none[..., 0] > 0,
        mass=None,
        into=jnp.ones((1, 16), jnp.int32),
        leaves=none[:, 0, :, 0] > 0,
    )
    stored = []
    for poison in (0, jnp.nan):
        layer = state.cache.layers[0]
        pool = layer.pools[1]
        pool = dataclasses.replace(pool, v_scale=pool.v_scale + poison)
        layer = dataclasses.replace(layer, pools=(layer.pools[0], pool))
        _, _, change = selection(layer, 0, recipe, small.lm().config.scale, rows, new)
        assert change.real.sum() > 10
        after = store_change(layer, change).pools[1]
        assert after.v.tobytes() == pool.v.tobytes()
        assert after.v_scale.tobytes() == pool.v_scale.tobytes()
        assert ((after.bias != pool.bias) & (pool.bias == 0)).sum() > 10
        stored.append(after.bias)
    np.testing.assert_array_equal(*stored)


def no_biases(monkeypatch):
    """Matching that forgets the biases of the round before."""
    plain = AttentionMatching.__call__

    def mutant(self, ctx, *rest):
        live = jnp.where(ctx.bias > -jnp.inf, 0.0, -jnp.inf)
        return plain(self, dataclasses.replace(ctx, bias=live), *rest)

    monkeypatch.setattr(AttentionMatching, "__call__", mutant)


@pytest.mark.slow
def test_a_fit_without_the_old_biases_is_seen(monkeypatch):
    before, queries, after, length, _ = selections()[1]
    honest = errors(before, queries, after, length)
    no_biases(monkeypatch)
    maintaining._settle.clear_cache()
    for done, before, queries, after in run(tam(), 2 * EVERY):
        if done == 2 * EVERY:
            layers = [held(layer) for layer in after.cache.layers]
            forgetful = errors(before, queries, layers, int(after.cache.length[0]))
    maintaining._settle.clear_cache()
    assert forgetful[0] > 1.2 * honest[0]


def test_the_ring_holds_the_queries_of_the_last_positions():
    """Those that a pass over all tokens makes of them, as long as nothing has been evicted."""
    lm = small.lm()
    _, queries, _, length, _ = selections()[0]
    [said] = decode(lm, small.prompts([PROMPT]), recipes.full(16), EVERY)
    ids = jnp.asarray([[*small.prompts([PROMPT])[0], *said.tokens][:length]])
    positions = jnp.arange(length)[None]
    expected = []

    def attend(q, k, v, sinks):
        expected.append(q)
        out, _ = masked_attention(q, k, v, causal_mask(positions, positions, None), lm.config.scale)
        return out

    x, angles = lm.model.embed[...][ids], rotation(positions, lm.config.rope, lm.config.head_dim)
    for module in lm.model.layers:
        x = module(x, angles, lambda *given: (attend(*given), None))[0]
    for ring, q in zip(queries, expected, strict=True):
        for p in range(length - 16, length):
            np.testing.assert_allclose(ring[0, p % 16], q[0, p], atol=2e-4)


@pytest.mark.slow
def test_a_budget_that_is_never_reached_changes_nothing():
    lm = small.lm()
    prompts = small.prompts([40, 21])
    recipe = dataclasses.replace(tam(budget=400), selector=recipes.pam().selector)
    results = decode(lm, prompts, recipe, new=80)
    assert tokens(results) == tokens(decode(lm, prompts, recipes.full(16), new=80))


@pytest.mark.slow
def test_memory_stays_between_budget_and_budget_and_period():
    """Ten periods, in tokens and in the pages that a row owns."""
    peaks = []
    for done, _, _, after in run(tam(every=32), 320):
        counts = [len(head) for layer in after.cache.layers for head in held(layer)]
        if done and done % 32 == 0:
            assert set(counts) == {BUDGET}
        pages = [int((layer.tables[1] > 0).sum()) for layer in after.cache.layers]
        peaks.append((done, max(counts), max(pages)))
    assert max(count for done, count, _ in peaks if done >= 32) <= BUDGET + 32
    # A page of 16 slots in each of two heads; what comes takes the slots of what went.
    assert max(pages for _, _, pages in peaks) <= 2 * -(-(BUDGET + 32) // 16)


@pytest.mark.slow
def test_a_single_selection_gives_its_pages_back():
    recipe = tam(once=True)
    owned, live = {}, {}
    for done, _, _, after in run(recipe, 3 * EVERY):
        owned[done] = int((after.cache.layers[0].tables[1] > 0).sum())
        live[done] = [len(head) for head in held(after.cache.layers[0])]
    assert live[EVERY] == [BUDGET] * 2
    assert live[3 * EVERY] == [BUDGET + 2 * EVERY] * 2
    assert owned[EVERY] == 2 * -(-(BUDGET - recipe.window) // 16) < owned[EVERY - 16]


@pytest.mark.slow
@pytest.mark.parametrize("share", ["held", "longest"])
def test_what_a_share_is_a_share_of(share):
    recipe = tam(budget=0.5, share_of=share)
    steps = 2 * EVERY
    longest = 32 + steps + recipe.tick  # the prompt's bucket
    sizes = {}
    recipe = recipe.for_longest(longest)
    for done, before, _, after in run(recipe, steps):
        if done and done % EVERY == 0:
            sizes[done] = len(before[0][0]), len(held(after.cache.layers[0])[0])
    for had, has in sizes.values():
        assert has == (-(-had // 2) if share == "held" else min(had, -(-longest // 2)))


def test_paragraphs_are_those_of_the_tokens():
    """The ledger has the flags of every token read, and the selection looks at its paragraphs."""
    *_, length, flags = selections()[0]
    [said] = decode(small.lm(), small.prompts([PROMPT]), recipes.full(16), 16)
    ids = [*small.prompts([PROMPT])[0], *said.tokens]  # nothing has been evicted by then
    assert flags[: len(ids)].tolist() == BREAKS[ids].tolist()
    assert flags[:length].any()


@pytest.mark.slow
def test_survivors_of_a_thought_inherit():
    """Tokens of a demoted segment change, those of the others and the prompt do not."""
    retention = dataclasses.replace(recipes.thinkv(64).retention, schedule=(8, 4))
    options = {"segmenter": dataclasses.replace(recipes.thinkv().segmenter, every=32)}
    recipe = recipes.thinkv(
        40,
        retention=retention,
        thought_codecs=("bf16",) * 3,
        prompt_codec="bf16",
        compactor=MATCHING,
        page_size=16,
        **options,
    )
    recipe = dataclasses.replace(recipe, every=16)
    demoted = False
    plain = dataclasses.replace(recipe, compactor=None)
    both = zip(run(recipe, 160), run(plain, 160), strict=True)
    for (_, before, queries, after), (_, _, _, other) in both:
        now = [held(layer) for layer in after.cache.layers]
        assert before is not None
        lost = [
            {(p - PROMPT) // 32 for p in old if p not in new}
            for was, is_ in zip(before, now, strict=True)
            for old, new in zip(was, is_, strict=True)
        ]
        pairs = [
            (old, new)
            for was, is_ in zip(before, now, strict=True)
            for old, new in zip(was, is_, strict=True)
        ]
        for gone, (old, new) in zip(lost, pairs, strict=True):
            for p, token in new.items():
                if p < PROMPT or (p - PROMPT) // 32 not in gone:
                    assert token.bias == old[p].bias
                    assert (token.v == old[p].v).all()
        if any(lost) and not demoted:
            demoted = True
            length = int(after.cache.length[0])
            dropped = [[set(head) for head in held(layer)] for layer in other.cache.layers]
            assert dropped == [[set(head) for head in layer] for layer in now]
            evicted = [
                [{p: old[p] for p in new} for old, new in zip(was, is_, strict=True)]
                for was, is_ in zip(before, now, strict=True)
            ]
            plainly = errors(before, queries, evicted, length)
            assert (errors(before, queries, now, length) < 0.85 * plainly).all()
    assert demoted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share_of": "all"}, "share_of must be"),
        ({"codec": "nvfp4"}, "shares scales"),
        ({"selector": None}, "nothing to do"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        recipes.tam(**options)


@pytest.mark.slow
def test_heads_hold_what_their_share_gives_them():
    """Ragged heads: as many tokens in all, and no pages for what a head may not hold."""
    shares = ((1.0, 3.0), (2.0, 2.0), (0.0, 1.0))
    recipe = tam(head_shares=shares)
    counts, owned = {}, []
    for done, _, _, after in run(recipe, 2 * EVERY):
        counts[done] = [len(head) for layer in after.cache.layers for head in held(layer)]
        owned.append([int((layer.tables[1] > 0).sum()) for layer in after.cache.layers])
    assert counts[EVERY] == counts[2 * EVERY]
    least = recipe.floor - 1  # of every head; what is left of all budgets is shared out
    ideal = [least + 6 * (BUDGET - least) * share / 9 for layer in shares for share in layer]
    for count, wanted in zip(counts[EVERY], ideal, strict=True):
        assert abs(count - max(wanted, least + 1)) <= 1
    assert sum(counts[EVERY]) == 6 * BUDGET
    pools = [layer.pools[1].k.shape[0] - 1 for layer in after.cache.layers]
    for layer, pages in enumerate(pools):
        most = [counts[EVERY][2 * layer + head] - 16 + EVERY + 16 for head in range(2)]
        assert pages <= sum(-(-n // 16) + 1 for n in most)
        assert max(now[layer] for now in owned) <= pages


@pytest.mark.slow
def test_quotas_of_paragraphs_with_precision_by_thought():
    """Every class keeps its kind's tokens, and what stays is matched in all of them."""
    thoughts = Given("RT", every=32)
    codecs = {"thought_codecs": ("int8", "int4", "int2"), "prompt_codec": "int8"}
    recipe = tam(segmenter=thoughts, **codecs)
    plain = dataclasses.replace(recipe, compactor=None)
    both = zip(run(recipe, EVERY), run(plain, EVERY), strict=True)
    for (done, before, queries, after), (*_, evicted) in both:
        if done != EVERY:
            continue
        length = int(after.cache.length[0])
        for layer in after.cache.layers:
            assert [codec.name for codec in layer.codecs[1:]] == ["int8", "int4", "int2"]
            kinds = {}
            for c in (1, 3):
                pos = np.asarray(layer.pools[c].pos[layer.tables[c][0]])
                kinds[c] = pos[pos >= 0]
            assert (((kinds[3] - PROMPT) // 32) % 2 == 1).all()
            answered = kinds[1][kinds[1] >= PROMPT]
            assert ((answered - PROMPT) // 32 % 2 == 0).all()
            assert all(len(kind) for kind in kinds.values())
            assert {len(head) for head in held(layer)} == {48}
        # Both hold codes of 2 bits, whose noise only one of them has been fitted to.
        plainly, matched = (
            errors(before, queries, [held(layer) for layer in state.cache.layers], length)
            for state in (evicted, after)
        )
        assert (matched < plainly).all()
