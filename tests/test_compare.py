"""Comparisons see no difference where there is none, and every difference that there is."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.compare import Comparison, compare, feed, reference
from kvjax.compare.scores import score
from kvjax.decoding import chunk, forced
from kvjax.errors import CapacityError, Interrupted, UsageError
from kvjax.models import decoder
from tests.decoding import small

PROMPT, TOKENS = 40, 96
SMALL = {"window": 4, "tick": 4, "recent": 4, "sinks": 2, "page_size": 16}


def texts(rows: int = 2, tokens: int = TOKENS) -> list[list[int]]:
    return small.prompts([tokens] * rows, seed=5)


def run(recipe, model: str = "llama", rows: int = 2, **options) -> Comparison:
    return compare(small.lm(model), texts(rows), recipe=recipe, prompt_tokens=PROMPT, **options)


def same(found: Comparison) -> bool:
    return (
        found.kl_mean < 1e-6
        and found.kl_p99 < 1e-6
        and found.top1_agreement == 1.0
        and set(found.first_divergence) == {None}
        and abs(found.nll - found.nll_full) < 1e-5
    )


MODELS = ["llama", "qwen3_window", "gpt_oss"]
ALL = {
    "full": recipes.full(16),
    "bf16": recipes.uniform("bf16", **SMALL),
    "random, roomy": recipes.random(budget=4 * TOKENS, **SMALL, every=8),
    "tova, roomy": recipes.tova(budget=1.0, **SMALL, every=8),
}


@pytest.mark.parametrize(
    ("name", "by_tick"),
    [
        pytest.param(name, by_tick, marks=() if quick else pytest.mark.slow)
        for name in ALL
        for by_tick in (False, True)
        for quick in [name in ("full", "bf16") or (name, by_tick) == ("tova, roomy", True)]
    ],
)
def test_what_keeps_all_as_it_was_is_the_same(name, by_tick):
    found = run(ALL[name], by_tick=by_tick)
    assert same(found) and found.kl.shape == (2, TOKENS - PROMPT) and found.crowded == 0


@pytest.mark.parametrize("model", [pytest.param(m, marks=pytest.mark.slow) for m in MODELS[1:]])
def test_whatever_the_model(model):
    found = run(ALL["bf16"], model, per_layer=True)
    assert same(found)
    assert len(found.per_layer) == small.lm(model).config.num_layers
    assert max(found.per_layer) < 1e-5


def test_likelihoods_are_those_of_the_tokens():
    lm = small.lm()
    found = run(ALL["full"])
    logits = jax.nn.log_softmax(kvjax.forward(lm, texts()))[:, PROMPT - 1 : -1]
    target = np.array(texts())[:, PROMPT:, None]
    expected = -np.take_along_axis(np.asarray(logits), target, -1).mean()
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert found.perplexity == pytest.approx(np.exp(expected), rel=1e-4)


def test_scores_are_those_of_the_distributions():
    """Of two runs whose logits are known, one of them the uncompressed one."""
    lm, rng = small.lm(), np.random.default_rng(0)
    tokens = np.array(texts())
    full = np.asarray(kvjax.forward(lm, tokens), np.float64)[:, PROMPT - 1 : -1]
    ours = full + rng.normal(size=full.shape)
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (full, ours))
    expected = reference(lm, tokens, prompt_tokens=PROMPT).hidden
    given = jnp.asarray(tokens[:, PROMPT:].T)
    logits = jnp.asarray(ours.swapaxes(0, 1), jnp.float32)
    got = score(lm.model, expected, logits, given)
    np.testing.assert_allclose(got["kl"].T, (np.exp(p) * (p - q)).sum(-1), rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(got["same"].T, full.argmax(-1) == ours.argmax(-1))
    assert 0 < got["same"].mean() < 1


def test_what_is_reported_is_of_the_single_positions():
    found = run(recipes.uniform("int2", **SMALL), by_tick=True)
    apart = [at for at in found.first_divergence if at is not None]
    assert apart and found.top1_agreement < 1
    assert found.kl_mean == pytest.approx(found.kl.mean())
    assert (found.kl <= found.kl_p99).mean() == pytest.approx(0.99, abs=0.01)
    for row, at in enumerate(found.first_divergence):
        if at is not None:
            assert found.kl[row, at] > 0


@pytest.mark.slow
def test_fewer_bits_are_further_away():
    codecs = ("int8", "int4", "int2")
    found = [run(recipes.uniform(codec, **SMALL), by_tick=True) for codec in codecs]
    kl = [one.kl_mean for one in found]
    assert 1e-9 < kl[0] < 1e-2 and 3 * kl[0] < kl[1] and 3 * kl[1] < kl[2]
    assert all(one.bytes["end"] < found[0].bytes["full_bf16"] * 2 for one in found)


QUICK = ("uniform",)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, method in recipes.METHODS.items()
        if name not in recipes.ADAPTED
        and not method().needs_text  # the small model has no tokenizer
    ],
)
def test_a_tick_at_once_is_the_same_as_token_by_token(method):
    """Also where tokens are evicted in between."""
    options = {}
    if method == "kivi":
        options = {"codec": "kivi4-g8", "window": 16}
    elif method == "uniform":
        options = {"codec": "int4", **SMALL}
    elif method != "full":
        every = 0 if method == "snapkv" else 8
        options = {"budget": 24, **SMALL, "every": every}
    recipe = recipes.METHODS[method](**options)
    one, other = run(recipe), run(recipe, by_tick=True)
    np.testing.assert_allclose(one.kl, other.kl, rtol=3e-3, atol=2e-5)
    assert one.live_tokens["end"] == pytest.approx(other.live_tokens["end"], abs=4)
    if recipe.selector is not None:
        assert one.kl_mean > 1e-4 and one.live_tokens["end"] < TOKENS
    assert one.crowded == other.crowded == 0


@pytest.mark.parametrize(
    "by_tick",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["by token", "by tick"],
)
@pytest.mark.parametrize("codec", ["int4", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_row_is_the_same_alone(codec, by_tick):
    recipe = recipes.streaming(codec=codec, budget=24, **SMALL, every=4)
    lm, tokens = small.lm(), texts()
    options = {"recipe": recipe, "prompt_tokens": PROMPT, "by_tick": by_tick}
    together = compare(lm, tokens, **options)
    alone = [compare(lm, row, **options) for row in tokens]
    one_by_one = np.concatenate([one.kl for one in alone])
    np.testing.assert_allclose(together.kl, one_by_one, rtol=1e-3, atol=1e-5)
    assert together.first_divergence == tuple(one.first_divergence[0] for one in alone)
    assert together.bytes["end"] == np.mean([one.bytes["end"] for one in alone])
    assert together.nll == pytest.approx(np.mean([one.nll for one in alone]), rel=1e-5)


def test_errors_of_layers_grow():
    one, other = (run(recipes.uniform(c, **SMALL), per_layer=True) for c in ("int8", "int2"))
    for fine, coarse in zip(one.per_layer, other.per_layer, strict=True):
        assert 1e-5 < fine < 0.05 and 3 * fine < coarse < 1.5


@pytest.fixture
def mutable():
    """Programs traced with a fault must not be met again, nor ones without it before."""
    forced.force_chunk.clear_cache()
    yield
    forced.force_chunk.clear_cache()


def other_channels(append):
    def turned(layer, k, *rest):
        return append(layer, jnp.roll(k, 1, -1), *rest)

    return turned


def other_head(attention):
    def swapped(queries, *args, **options):
        return attention([jnp.roll(query, 1, 1) for query in queries], *args, **options)

    return swapped


def next_position(rotation):
    def late(positions, *args):
        return rotation(positions + 1, *args)

    return late


@pytest.mark.usefixtures("mutable")
@pytest.mark.parametrize(
    "mutant", ["head", "position", pytest.param("key", marks=pytest.mark.slow)]
)
def test_faults_are_seen(mutant, monkeypatch):
    """Each in decoding alone, on a recipe that is exact without it."""
    if mutant == "head":
        monkeypatch.setattr(chunk, "paged_attention", other_head(chunk.paged_attention))
    elif mutant == "key":
        monkeypatch.setattr(chunk, "append", other_channels(chunk.append))
    else:
        monkeypatch.setattr(decoder, "rotation", next_position(decoder.rotation))
    found = run(ALL["bf16"], rows=1)
    assert not same(found) and found.kl_mean > 1e-4


def test_a_report_says_what_was_found():
    found = run(recipes.streaming(codec="int4", budget=24, **SMALL, every=4), by_tick=True)
    lines = dict(found.rows())
    assert lines["method"] == "streaming, budget 24, int4"
    assert lines["tokens"] == f"2 rows of {TOKENS}, the first {PROMPT} a prompt"
    assert lines["KL"].startswith(f"{found.kl_mean:.3g} nats")
    record = found.as_dict()
    assert record["rows"] == 2 and record["perplexity"] == found.perplexity
    assert "kl" not in record and record["ratio"]["end"] == found.ratio["end"] < 1
    assert dataclasses.replace(found, kl=None) == found


@pytest.mark.parametrize("prompt", [0, TOKENS])
def test_something_must_be_read_and_something_scored(prompt):
    with pytest.raises(UsageError, match="prompt_tokens"):
        compare(small.lm(), texts(), recipe=ALL["full"], prompt_tokens=prompt)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="same length"):
        compare(small.lm(), [[1, 2, 3], [1]], recipe=ALL["full"], prompt_tokens=1)
    for single in ({"per_layer": True}, {"kernel": "xla"}):
        with pytest.raises(UsageError, match="by_tick"):
            run(ALL["full"], by_tick=True, **single)
    with pytest.raises(UsageError, match="kernel must be"):
        run(ALL["full"], kernel="cudnn")
    with pytest.raises(CapacityError, match=r"there are 4\.00 KiB"):
        run(ALL["full"], memory_bytes=4096)


@pytest.mark.usefixtures("mutable")
def test_the_kernel_that_was_asked_for_is_the_one(monkeypatch):
    def unable(*_, implementation, **__):
        raise NotImplementedError(f"not {implementation}")

    monkeypatch.setattr(chunk, "paged_attention", unable)
    with pytest.raises(UsageError, match="kernel xla cannot do this: not xla"):
        run(ALL["full"], kernel="xla")


@pytest.mark.parametrize("ticks", [0, 1, 2])
def test_a_comparison_can_be_stopped(ticks, monkeypatch):
    """Asked at first and before every tick, of which no other is fed then."""
    fed, answers = [], iter([False] * (ticks + 1) + [True])

    def counted(*args, **options):
        fed.append(options)
        return forced.force_chunk(*args, **options)

    monkeypatch.setattr(feed, "force_chunk", counted)
    with pytest.raises(Interrupted, match="interrupted"):
        run(ALL["full"], should_stop=lambda: next(answers))
    assert len(fed) == ticks


@pytest.mark.slow
def test_one_reference_serves_many():
    once = reference(small.lm(), texts(), prompt_tokens=PROMPT)
    for recipe in (ALL["full"], recipes.uniform("int2", **SMALL)):
        found = compare(small.lm(), once, recipe=recipe, by_tick=True)
        assert found == run(recipe, by_tick=True)
    for wrong in ({"prompt_tokens": PROMPT + 1}, {"per_layer": True}):
        with pytest.raises(UsageError, match="reference"):
            compare(small.lm(), once, recipe=ALL["full"], **wrong)
    with pytest.raises(UsageError, match="prompt_tokens"):
        compare(small.lm(), texts(), recipe=ALL["full"])
