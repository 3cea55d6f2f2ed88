"""Going on from a cache: as if the run had never ended, and as if a turn had been decoded."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import recipes
from kvjax.cache import plan
from kvjax.cache.packed import pack_row
from kvjax.decoding import loop
from kvjax.decoding.chunk import DecodeState, decode_chunk
from kvjax.decoding.clock import Clock
from kvjax.decoding.empty import empty_cache
from kvjax.decoding.forced import force_chunk
from kvjax.decoding.maintain import maintain
from kvjax.decoding.prompts import prefill_prompts, seed_bits
from tests.decoding import small
from tests.decoding.small import PAGE, SAMPLED
from tests.decoding.test_inflight import RECIPES
from tests.models import goldens

slow = pytest.mark.slow
FULL = recipes.full(PAGE)
STREAMING = RECIPES["streaming"]
HOW = {"batch_size": 1, "repetition_stop": False, "stop_ids": (), "keep_cache": True}
RECIPES = RECIPES | {"full": FULL}
QUICK = ("full",)


def decode(prompt, recipe=FULL, new: int = 20, model=None, **options) -> kvjax.Result:
    how = HOW | {"recipe": recipe, "max_new_tokens": new} | options
    return small.decode([prompt], model, **how)[0]


def prompt_of(recipe) -> list[int]:
    return small.prompts([24 if recipe is FULL else 40], seed=5)[0]


def same(left: kvjax.Conversation, right: kvjax.Conversation) -> None:
    """Tokens and every buffer, bit by bit."""
    assert left == right
    assert left.row.keys() == right.row.keys()
    for name, array in left.row.items():
        assert array.dtype == right.row[name].dtype, name
        assert array.shape == right.row[name].shape, name
        assert array.tobytes() == right.row[name].tobytes(), name


def near(left: kvjax.Conversation, right: kvjax.Conversation) -> None:
    """The same but for sums, which pools of another size round otherwise."""
    assert left == right and left.row.keys() == right.row.keys()
    for name, array in left.row.items():
        if array.dtype.kind == "f":
            digit = np.finfo(array.dtype).eps  # the last one of a scale may be another
            np.testing.assert_allclose(array, right.row[name], digit, 1e-4, err_msg=name)
        else:
            assert (array == right.row[name]).all(), name


@functools.cache
def kept(name: str = "full", new: int = 17) -> kvjax.Conversation:
    recipe = RECIPES[name]
    return decode(prompt_of(recipe), recipe, new).cache


def model_of(recipe, text_lm):
    return text_lm if recipe.needs_text else small.lm()


CASES = [
    pytest.param(
        name, how, marks=() if name in QUICK and not how else slow, id=f"{name}, {how_name}"
    )
    for name in RECIPES
    for how_name, how in (("greedy", {}), ("sampled", {"seed": 3} | SAMPLED))
]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_two_halves_are_the_whole(name, how, text_lm, tmp_path):
    """In memory and through a file, on and off a tick's border."""
    recipe = RECIPES[name]
    how = how | {"model": model_of(recipe, text_lm)}
    prompt, sizes = prompt_of(recipe), ((64, 64), (37, 59))
    if name in QUICK:
        sizes = ((17, 15),) if recipe is FULL else ((33, 31), (21, 43))
    whole = decode(prompt, recipe, sum(sizes[0]), **how)
    for first, second in sizes:
        before = decode(prompt, recipe, first, **how)
        path = tmp_path / f"{first}"
        kvjax.save_cache(before.cache, path)
        loaded = kvjax.load_cache(how["model"], path, recipe=recipe)
        same(loaded, before.cache)
        after = decode([], recipe, second, cache=loaded, **how)
        assert before.tokens + after.tokens == whole.tokens[: first + second]
        if first + second == len(whole.tokens):
            alike = near if name == "a share" else same  # a longer row, larger pools
            alike(after.cache, whole.cache)
        assert after.prompt_tokens == len(prompt) + first
        assert after.report["usage"]["cached"] == len(prompt) + first - 1


def read_by_hand(lm, recipe, prompt, rest) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A prompt, and tokens one by one as if they had been chosen; logits at the end, and cache."""
    planned = plan(
        lm.config,
        recipe,
        batch_size=1,
        prompt_tokens=len(prompt),
        max_new_tokens=len(rest) + 1,
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    cache, logits = prefill_prompts(lm, empty_cache(lm, planned.geometry), [prompt], recipe, 0)
    state = DecodeState(cache, jnp.zeros(1, jnp.int32), jnp.full(1, len(rest)), jnp.ones(1, bool))
    for done in range(0, len(rest), recipe.tick):
        if not recipe.keeps_all:
            how = {"config": lm.config, "recipe": recipe, "model": lm.model}
            state = maintain(state, np.ones(1, bool), seed_bits(0), done=done, **how)
        tokens = np.zeros((recipe.tick, 1), np.int32)
        given = rest[done : done + recipe.tick]
        tokens[: len(given), 0] = given
        state, logits, _, _ = force_chunk(
            lm.model, state, jnp.asarray(tokens), width=None, recipe=recipe
        )
        logits = logits[len(given) - 1]
    return np.asarray(logits[0]), pack_row(state.cache)


@slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_turn_is_read_as_it_would_have_been_decoded(name, text_lm):
    """Token by token, with the maintenance where decoding has it: the same up to rounding."""
    recipe = RECIPES[name]
    lm = model_of(recipe, text_lm)
    [turn] = small.prompts([6 if recipe is FULL else 45], seed=9)
    first = decode(prompt_of(recipe), recipe, 17, model=lm)
    second = decode(turn, recipe, 9, model=lm, cache=first.cache)
    prompt, tokens = prompt_of(recipe), second.cache.tokens
    assert tokens == (*prompt, *first.tokens, *turn, *second.tokens)
    before = tokens[: -len(second.tokens)]
    logits, _ = read_by_hand(lm, recipe, prompt, before[len(prompt) :])
    assert int(logits.argmax()) == second.tokens[0]
    _, row = read_by_hand(lm, recipe, prompt, tokens[len(prompt) : -1])
    assert row.keys() == second.cache.row.keys()
    for place in [name for name in row if name.endswith((".pos", ".pages", "kind", "level"))]:
        assert (row[place] == second.cache.row[place]).all(), place
    # A code on the edge of two may become the other one, which later layers see.
    tolerance = 5e-3 if any(name.endswith("k_scale") for name in row) else 2e-4
    for place in [name for name in row if name.endswith(".0.k")]:
        np.testing.assert_allclose(row[place], second.cache.row[place], atol=tolerance)


@pytest.mark.parametrize("texts", [("?",), pytest.param(("And?", "Again?"), marks=slow)])
def test_turns_of_a_chat(texts, text_lm, tmp_path):
    """In memory and each in a run of its own; the first one's system text once."""
    turns = [decode("Hi", new=17, model=text_lm, system_prompt="Be calm.")]
    for text in texts:
        kvjax.save_cache(turns[-1].cache, tmp_path / text)
        turns.append(decode(text, new=8, model=text_lm, cache=turns[-1].cache))
        loaded = kvjax.load_cache(text_lm, tmp_path / text, recipe=FULL)
        same(decode(text, new=8, model=text_lm, cache=loaded).cache, turns[-1].cache)
    said = [text_lm.tokenizer.decode(turn.tokens) for turn in turns]
    asked = [f";U:{text};A:" for text in texts]
    whole = ["S:Be calm.;U:Hi;A:", said[0]]
    for question, answer in zip(asked, said[1:], strict=True):
        whole += [question, answer]
    tokens = list(turns[-1].cache.tokens)
    assert text_lm.tokenizer.decode(tokens) == "".join(whole)
    # As if all of it had been a prompt.
    best = np.asarray(kvjax.forward(text_lm, tokens)[0].argmax(-1))
    assert tuple(best[-9:-1]) == turns[-1].tokens


def test_text_where_the_host_ends_it(text_lm):
    """The device is ahead by then; what is kept ends with the answer."""
    whole = decode(prompt_of(FULL), new=32, model=text_lm)
    text = text_lm.tokenizer.decode(whole.tokens[19:21])
    stopped = decode(prompt_of(FULL), new=32, model=text_lm, stop_texts=(text,))
    count = len(stopped.tokens)
    assert stopped.finish_reason == "stop" and 17 <= count < 32
    same(stopped.cache, decode(prompt_of(FULL), new=count, model=text_lm).cache)
    on = decode([], new=32 - count, model=text_lm, cache=stopped.cache)
    assert stopped.tokens + on.tokens == whole.tokens


@slow
def test_what_cannot_go_back_is_read_again(text_lm):
    """Where the host ends an answer and the recipe has gone on working on the cache."""
    recipe = RECIPES["tova"]
    prompt = prompt_of(recipe)
    whole = decode(prompt, recipe, 64, model=text_lm)
    text = text_lm.tokenizer.decode(whole.tokens[20:22])
    for past, first in ((None, prompt), (decode(prompt, recipe, 5, model=text_lm).cache, [])):
        stopped = decode(first, recipe, 64, model=text_lm, stop_texts=(text,), cache=past)
        assert stopped.finish_reason == "stop"
        count = len(stopped.cache.tokens) - len(prompt)
        apart = decode(prompt, recipe, count, model=text_lm).cache
        assert stopped.cache.tokens == apart.tokens
        for name, array in apart.row.items():
            if name.endswith((".pos", ".pages")):
                assert (array == stopped.cache.row[name]).all(), name
        on = decode([], recipe, 64 - count, model=text_lm, cache=stopped.cache)
        assert (*stopped.cache.tokens, *on.tokens) == (*prompt, *whole.tokens)


def test_interrupted(text_lm):
    """What was decoded by then is kept, all that the caller was told of."""
    asked = iter([False] * 4 + [True] * 9)
    stopped = decode(prompt_of(FULL), new=32, model=text_lm, should_stop=lambda: next(asked))
    assert stopped.finish_reason == "interrupted" and 17 <= len(stopped.tokens) < 32
    count = len(stopped.tokens)
    same(stopped.cache, decode(prompt_of(FULL), new=count, model=text_lm).cache)


@pytest.mark.parametrize(
    ("turn", "new", "decode_s", "ttft_s"),
    [
        pytest.param(5, 22, 2, 0, marks=slow),  # the first token, 5 up to a tick's end, a tick
        pytest.param(5, 4, 1, 0, marks=slow),
        (0, 27, 2, 2),  # 11 and a tick, which is dispatched before the 11 are read
        (0, 11, 1, 1),
    ],
)
def test_times_count_every_chunk(monkeypatch, turn, new, decode_s, ttft_s):
    """By a clock that is a second a chunk: also the one up to a tick's end, from its dispatch."""
    now, recipe = [0.0], recipes.uniform("int8")
    cache = decode(prompt_of(recipe), recipe, 22).cache

    def second(*given, **how):
        now[0] += 1
        return decode_chunk(*given, **how)

    monkeypatch.setattr(Clock, "now", lambda clock: now[0])
    monkeypatch.setattr(Clock, "_listen", lambda *_, **__: None)
    monkeypatch.setattr(loop, "decode_chunk", second)
    result = decode([7] * turn, recipe, new, cache=cache)
    assert len(result.tokens) == new
    times, counted = result.report["timing"], new - bool(turn)
    assert (times["prefill_s"], times["ttft_s"]) == (0, ttft_s)
    assert (times["decode_s"], times["decode_tok_s"]) == (decode_s, counted / decode_s)
    assert times["ms_per_token"]["p50"] > 0


@slow
def test_pools_grow():
    """A longer run than the first one was planned for."""
    on, whole = decode([], new=100, cache=kept()), decode(prompt_of(FULL), new=117)
    assert kept().tokens[24:] + on.tokens == whole.tokens
    assert (on.cache.row["0.0.pos"] == whole.cache.row["0.0.pos"]).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": STREAMING}, "kept with method full and not streaming"),
        ({"recipe": recipes.full(32)}, "kept with page_size 16 and not 32"),
        ({"system_prompt": "x"}, "system_prompt has no effect"),
        ({"samples": 2, "temperature": 1.0}, "cache is for one prompt and one answer"),
        ({"model": "other"}, "made with .* pass the same model"),
        ({"stop_ids": "last"}, "the answer has ended"),
        ({"new": 1 << 14, "prompt": [5] * (1 << 14)}, "context holds"),
    ],
)
def test_what_cannot_go_on_is_refused(options, message):
    if options.get("model") == "other":
        options = options | {"model": goldens.load("llama_yarn")}
    if options.get("stop_ids") == "last":
        options = options | {"stop_ids": kept().tokens[-1:]}
    prompt = options.pop("prompt", []) if "prompt" in options else []
    with pytest.raises(kvjax.KvjaxError, match=message):
        decode(prompt, cache=kept(), **options)


def test_one_answer_is_kept():
    with pytest.raises(kvjax.UsageError, match="keep_cache is for one prompt"):
        small.decode(small.prompts(), keep_cache=True)
