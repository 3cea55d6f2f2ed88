"""Why a row ends, and what becomes of its neighbours."""

import collections
import dataclasses
import importlib
import subprocess
import sys
from collections.abc import Callable

import jax.numpy as jnp
import pytest
from flax import nnx

import kvjax
from kvjax.cache import plan
from kvjax.decoding.batch import Batch
from kvjax.decoding.chunk import ChunkOutput
from kvjax.decoding.clock import Clock
from tests.decoding import small
from tests.decoding.small import NEW, changed, decode, prompts, usual


def reasons(results) -> list[str]:
    return [result.finish_reason for result in results]


def test_length():
    results = decode(prompts())
    assert reasons(results) == ["length"] * 4
    assert [len(result.tokens) for result in results] == [NEW] * 4
    assert [result.prompt_tokens for result in results] == list(small.LENGTHS)


@pytest.mark.slow
def test_a_single_token():
    results = decode(prompts(), max_new_tokens=1)
    assert [result.tokens for result in results] == [row[:1] for row in usual()]
    assert reasons(results) == ["length"] * 4


def test_every_stop_id_stops_and_the_first_token_may_be_one():
    rows = usual()
    stops = (rows[0][7], rows[1][11], rows[2][0], 95)
    results = decode(prompts(), stop_ids=stops)
    for row, result in zip(rows, results, strict=True):
        at = next((i for i, token in enumerate(row) if token in stops), None)
        assert result.tokens == (row if at is None else row[: at + 1])
        assert result.finish_reason == ("length" if at is None else "stop")
    assert len(results[2].tokens) == 1
    assert reasons(results)[:3] == ["stop"] * 3
    own = dataclasses.replace(small.lm().defaults, stop_ids=stops)
    again = decode(prompts(), dataclasses.replace(small.lm(), defaults=own))
    assert [result.tokens for result in again] == [result.tokens for result in results]


def test_a_stop_on_the_last_token_is_a_stop():
    places = ((row, at) for row in range(4) for at in range(16, NEW))
    row, last = next((r, i) for r, i in places if usual()[r][i] not in usual()[r][:i])
    results = decode(prompts(), stop_ids=(usual()[row][last],), max_new_tokens=last + 1)
    assert results[row].tokens == usual()[row][: last + 1]
    assert results[row].finish_reason == "stop"


@pytest.mark.parametrize("context", [50, pytest.param(32, marks=pytest.mark.slow)])
def test_the_end_of_the_context(context):
    lm = small.lm(context=context)
    results = decode(prompts(), lm)
    rooms = [context - length for length in small.LENGTHS]
    for row, result, room in zip(usual(), results, rooms, strict=True):
        assert result.tokens == row[: min(room, NEW)]
        assert result.finish_reason == ("length" if room >= NEW else "cache_full")
    assert "cache_full" in reasons(results)
    # Exactly as many as there is room for is no lack of room.
    exact = prompts([context - NEW])[0]
    results = decode([exact, *prompts()[1:]], lm)
    assert (results[0].finish_reason, len(results[0].tokens)) == ("length", NEW)


def test_a_cache_that_is_too_small_ends_its_row_and_says_what_was_lost(monkeypatch):
    """No plan is: here all stored tokens of a head get a single page of 16."""
    module = importlib.import_module("kvjax.decoding.generate")

    def little(*args, **options):
        planned = plan(*args, **options)
        layers = tuple(
            dataclasses.replace(
                layer,
                classes=(layer.classes[0], dataclasses.replace(layer.classes[1], pages_per_head=1)),
            )
            for layer in planned.geometry.layers
        )
        geometry = dataclasses.replace(planned.geometry, layers=layers)
        return dataclasses.replace(planned, geometry=geometry)

    monkeypatch.setattr(module, "plan", little)
    recipe = kvjax.recipes.uniform("int4", page_size=16)
    results = kvjax.generate(
        small.lm(), small.prompts([12, 24]), recipe=recipe, max_new_tokens=64, stop_ids=()
    )
    for result in results:
        kv = result.report["kv"]
        assert result.finish_reason == "cache_full" and len(result.tokens) < 64
        assert kv["crowded"] > 0 and kv["live_tokens"]["end"] < kv["logical_tokens"]


def test_repetition():
    """A model that only ever says one thing."""

    lm = small.mute()
    [result] = kvjax.generate(lm, [[1, 2, 3]], max_new_tokens=600, chunk=64)
    assert result.finish_reason == "repetition"
    assert result.tokens == (0,) * 512
    [result] = kvjax.generate(lm, [[1, 2, 3]], max_new_tokens=600, chunk=64, repetition_stop=False)
    assert (result.finish_reason, len(result.tokens)) == ("length", 600)


def test_a_kernel_by_name(unchecked):
    assert tuple(result.tokens for result in decode(prompts(), kernel="xla")) == tuple(usual())
    with pytest.raises(kvjax.UsageError, match="must be None, mosaic, triton or xla, got 'cudnn'"):
        decode(prompts(), kernel="cudnn")
    with pytest.raises(kvjax.UsageError, match="kernel triton needs an NVIDIA GPU"):
        decode(prompts(), kernel="triton")
    with pytest.raises(kvjax.UsageError, match=r"kernel mosaic needs .* 9\.0 .*, got cpu"):
        decode(prompts(), kernel="mosaic")


def test_a_kernel_that_cannot_read_a_codec(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(
        kvjax.UsageError, match=r"kernel triton cannot do this: .* no codes of uint2"
    ):
        decode(prompts(), kernel="triton", recipe=kvjax.recipes.kivi("kivi2-g8"))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (kvjax.recipes.h2o(), "tells no slot's attention"),
        (kvjax.recipes.full(), "cannot do this: .* queries must be bfloat16"),
    ],
)
def test_a_kernel_that_cannot_run_a_recipe(monkeypatch, recipe, message):
    monkeypatch.setattr("kvjax.decoding.kernel.missing_device", lambda kernel: None)
    with pytest.raises(kvjax.UsageError, match=f"kernel mosaic {message}"):
        decode(prompts(), kernel="mosaic", recipe=recipe)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4])
def test_interrupted(after):
    polls = []

    def should_stop() -> bool:
        polls.append(None)
        return len(polls) > after

    results = decode(prompts(), should_stop=should_stop)
    assert len(polls) == after + 1
    kept = {len(result.tokens) for result in results}
    # Asked before the batch, and before every chunk. The first token is prefill's; the chunk that
    # runs while the host asks is waited for, and a row that it ends has ended by itself.
    count = 0 if after == 0 else min(1 + small.CHUNK * (after - 1), NEW)
    assert kept == {count}
    assert reasons(results) == ["length" if count == NEW else "interrupted"] * 4
    for row, result in zip(usual(), results, strict=True):
        assert result.tokens == row[: len(result.tokens)]
        assert bool(result.report) == (after > 0)


def test_batches_that_have_not_begun_are_interrupted_too():
    """The first batch ends by itself, then the host asks to stop."""
    done = []
    events = kvjax.stream(
        small.lm(),
        [*prompts(), *prompts()[:2]],
        recipe=kvjax.recipes.full(small.PAGE),
        max_new_tokens=NEW,
        batch_size=4,
        chunk=small.CHUNK,
        should_stop=lambda: len(done) == 4,
    )
    for event in events:
        if event.kind == "done":
            done.append(event)
    assert [event.row for event in done] == [0, 1, 2, 3, 4, 5]
    assert reasons(event.result for event in done) == ["length"] * 4 + ["interrupted"] * 2
    assert [event.result.prompt_tokens for event in done[4:]] == list(small.LENGTHS[:2])


BAD = [([], "empty"), ([3, 96], "96 is outside"), ([-1], "-1 is outside"), ("text", "no tokenizer")]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_prompt_alone_raises(bad, message):
    wanted = kvjax.ModelError if bad == "text" else kvjax.UsageError
    with pytest.raises(wanted, match=message):
        decode([bad])


def test_a_prompt_that_fills_the_context():
    lm = small.lm(context=50)
    with pytest.raises(kvjax.CapacityError, match=r"50 tokens .* holds 50: shorten .* at least 1 "):
        decode([[1] * 50], lm)
    with pytest.raises(kvjax.CapacityError, match="at least 9 tokens"):
        decode([[1] * 58], lm)
    results = decode([[1] * 50, *prompts()], lm)
    assert reasons(results) == ["error", "length", "cache_full", "length", "length"]
    assert "50 tokens" in results[0].error


def test_bad_prompts_among_others():
    first, second, third, fourth = prompts()
    mixed = [first, BAD[0][0], second, BAD[1][0], third, "text", fourth]
    results = decode(mixed)
    assert reasons(results) == ["length", "error"] * 3 + ["length"]
    assert [result.tokens for result in results[::2]] == list(usual())
    for result, (_, message) in zip(results[1::2], (BAD[0], BAD[1], BAD[3]), strict=True):
        assert message in result.error
        assert (result.text, result.tokens, result.prompt_tokens) == ("", (), 0)
    assert all(result.error is None for result in results[::2])


def test_only_bad_prompts_and_no_prompts():
    assert reasons(decode([[], [99]])) == ["error", "error"]
    assert decode([]) == []


@pytest.fixture
def poisoned() -> kvjax.LanguageModel:
    """Whoever reads token 95 gets NaN."""

    def poison(model):
        model.embed = nnx.Param(model.embed[...].at[95].set(jnp.nan))

    assert all(95 not in row for row in usual())
    return changed(small.lm(), poison)


def test_nan_in_a_row_leaves_its_neighbours_alone(poisoned):
    bad = [*prompts()[1][:-1], 95]
    results = decode([prompts()[0], bad, prompts()[2], prompts()[3]], poisoned)
    assert reasons(results) == ["length", "error", "length", "length"]
    assert [results[i].tokens for i in (0, 2, 3)] == [usual()[i] for i in (0, 2, 3)]
    assert "row 1: the logits hold NaN" in results[1].error


def test_nan_that_comes_while_decoding():
    """A row chooses a token that no other row has, whose embedding is NaN."""

    def others(row):
        return {t for r in range(4) if r != row for t in (*prompts()[r], *usual()[r])}

    places = ((row, at) for row in range(4) for at in range(2, NEW - small.CHUNK))
    row, at = next(
        (r, i)
        for r, i in places
        if usual()[r][i] not in {*prompts()[r], *usual()[r][:i], *others(r)}
    )

    def poison(model):
        model.embed = nnx.Param(model.embed[...].at[usual()[row][at]].set(jnp.nan))

    results = decode(prompts(), changed(small.lm(), poison))
    for i, (expected, result) in enumerate(zip(usual(), results, strict=True)):
        if i == row:
            assert result.finish_reason == "error"
            assert result.tokens[: at + 1] == expected[: at + 1]
        else:
            assert (result.finish_reason, result.tokens) == ("length", expected)


def test_nan_behind_the_stop_is_nobodys():
    """A stop token is chosen and never read, so its embedding may hold anything."""
    read = {token for prompt in prompts() for token in prompt}
    stop = next(
        token
        for row in usual()
        for at, token in enumerate(row[: NEW - small.CHUNK])
        if at >= 2 and token not in read and token not in row[:at]
    )

    def poison(model):
        model.embed = nnx.Param(model.embed[...].at[stop].set(jnp.nan))

    results = decode(prompts(), changed(small.lm(), poison), stop_ids=(stop,))
    for expected, result in zip(usual(), results, strict=True):
        stopped = stop in expected
        assert result.finish_reason == ("stop" if stopped else "length")
        assert result.tokens == (expected[: expected.index(stop) + 1] if stopped else expected)


@pytest.fixture
def taken(monkeypatch) -> Callable[..., tuple[kvjax.Result, Batch]]:
    """Lets a batch of one row take whatever tokens a device is said to have chosen.

    Those are the first one, and a chunk. Returns the row's result, and the batch.
    """

    def take(chosen, *, finite: bool = True, lm=None, **options) -> tuple[kvjax.Result, Batch]:
        lm, found = lm or small.lm(), []

        def stand_in(lm, requests, planned, options, should_stop, *, alone):
            def output(tokens, finite: bool) -> ChunkOutput:
                tokens, one = jnp.asarray(tokens)[:, None], jnp.ones(1, int)
                held = jnp.ones((1, len(planned.geometry.layers), 1), int)
                counts = (one, held, held, 0 * one, None, None, None)
                return ChunkOutput(tokens, tokens >= 0, jnp.asarray([finite]), *counts)

            with Clock() as clock:
                batch = Batch(lm, collections.deque(requests), options, planned, clock, [])
                batch._together.append(batch)
                batch.admit()
                flights = list(batch.flights)
                yield from batch.take(output(chosen[:1], True), flights)
                yield from batch.take(output(chosen[1:], finite), flights)
            found.append(batch)

        generate = importlib.import_module("kvjax.decoding.generate")
        monkeypatch.setattr(generate, "decode_all", stand_in)
        [result] = decode(prompts()[:1], lm, **{"max_new_tokens": len(chosen)} | options)
        return result, found[0]

    return take


@pytest.mark.parametrize(
    ("chosen", "options", "reason", "count"),
    [
        ([7] * 600, {}, "repetition", 512),
        ([7, 8, 9, 5, 6], {"stop_texts": ("()",)}, "stop", 3),
        ([7, 8, 9], {"stop_texts": ("()",)}, "error", 3),  # chosen from the NaN itself
        ([7, 8, 9], {"stop_ids": (9,)}, "error", 3),
        ([7, 8, 9], {}, "error", 3),
        ([7, 8, 9], {"max_new_tokens": 4}, "error", 3),
    ],
)
def test_nan_behind_where_the_host_ends_a_row(taken, text_lm, chosen, options, reason, count):
    """The device goes on to the end of its chunk; what it finds there is no part of the answer."""
    result, batch = taken(chosen, finite=False, lm=text_lm, **options)
    assert (result.finish_reason, result.tokens) == (reason, tuple(chosen[:count]))
    lost = reason == "error"
    assert (result.error is not None, batch.numerical_error is not None) == (lost, lost)


@pytest.mark.parametrize(
    ("chosen", "options"),
    [([7] * 600, {}), ([7, 8, 9, 5, 6], {"stop_texts": ("()",)}), ([7] * 9, {})],
)
def test_tokens_behind_where_the_host_ends_a_row_are_not_counted(taken, text_lm, chosen, options):
    result, batch = taken(chosen, lm=text_lm, **options)
    for times in (result.report["timing"], batch._lap.as_dict()):
        counted = times["decode_tok_s"] * times["decode_s"]
        assert counted == pytest.approx(len(result.tokens) - 1)


def test_nan_in_the_only_prompt_raises(poisoned):
    with pytest.raises(kvjax.NumericalError, match=r"NaN .* tokens; check the weights") as error:
        decode([[95, *prompts()[0]]], poisoned)
    assert error.value.exit_code == 5


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_nan_in_a_batch_of_one_among_several_prompts(poisoned, order):
    """Batches hold one row each; the other prompt still gets its answer."""
    both = [prompts()[0], [95, *prompts()[1]]]
    results = decode([both[i] for i in order], poisoned, batch_size=1)
    assert reasons(results) == [["length", "error"][i] for i in order]
    assert results[order.index(0)].tokens == usual()[0]


def test_what_does_not_fit_in_memory(monkeypatch):
    module = importlib.import_module("kvjax.decoding.generate")
    monkeypatch.setattr(module, "device_memory", lambda: 10**6)
    with pytest.raises(kvjax.CapacityError, match=r"4 rows of .* pass a smaller --max-new-tokens"):
        decode(prompts(), max_new_tokens=1500)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("max_new_tokens", 0, "at least 1, got 0"),
        ("temperature", -0.1, "at least 0, got -0.1"),
        ("temperature", float("nan"), "at least 0, got nan"),
        ("top_k", -1, "at least 0, got -1"),
        ("top_p", 1.5, "between 0 and 1, got 1.5"),
        ("min_p", -1.0, "between 0 and 1, got -1.0"),
        ("seed", -1, "between 0 and 4294967295, got -1"),
        ("seed", 2**32, "got 4294967296"),
        ("batch_size", 0, "at least 1, got 0"),
        ("chunk", 0, "between 1 and 4096, got 0"),
    ],
)
def test_options_out_of_range(option, value, message):
    with pytest.raises(kvjax.UsageError, match=f"{option} must be .*{message}"):
        decode(prompts(), **{option: value})


WRONG_KINDS = """
import kvjax
from tests.decoding import small

lm = small.lm()
wrong = {
    "max_new_tokens": [1.5, "6"], "chunk": [2.5, 10**10], "batch_size": [2.5], "seed": [1.5],
    "top_k": [1.5, True], "temperature": ["hot"], "recipe": ["full"],
    "stop_ids": [["a"], 5, [10**12], [True]], "stop_texts": [5], "system_prompt": [3],
    "thinking": ["on"], "chat": [None], "repetition_stop": [2],
}
for name, values in wrong.items():
    for value in values:
        try:
            kvjax.generate(lm, [[3, 5, 7]], **{name: value})
        except kvjax.UsageError as error:
            assert name in str(error), (name, str(error))
        else:
            raise AssertionError((name, value))
for prompts in ("text", b"text", 5, None, [5], [None], [b"text"]):
    try:
        kvjax.generate(lm, prompts)
    except kvjax.UsageError as error:
        assert "prompts must be a list" in str(error), (prompts, str(error))
    else:
        raise AssertionError(prompts)
print("refused")
"""


def test_options_of_the_wrong_kind_are_refused():
    """In a process of its own: here annotations are checked, which a user's process does not do."""
    done = subprocess.run(
        [sys.executable, "-c", WRONG_KINDS], capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "refused\n", done.stderr


LIVE = """
from tests.decoding import small
import kvjax

events = kvjax.stream(small.lm(), [[3, 5, 7]], max_new_tokens=200)
next(event for event in events if event.kind == "text")
"""


def test_a_stream_that_is_alive_at_exit_leaves_quietly():
    done = subprocess.run([sys.executable, "-c", LIVE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
