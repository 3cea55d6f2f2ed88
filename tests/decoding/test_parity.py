"""The cached path against PyTorch's golden values and against ``kvjax.forward``."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import init_cache, plan
from kvjax.cache.plan import PREFILL_CHUNK
from kvjax.decoding import decode_chunk, prefill_chunk, start_decoding
from tests import smollm2
from tests.decoding import small
from tests.models import goldens

TOLERANCE = 1e-4
FAST = ("gpt_oss", "llama_llama3", "qwen2_window", "qwen3_window")  # a model of each family
WINDOWS = ("gpt_oss", "qwen2_window")
NAMES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in goldens.NAMES
]


@pytest.mark.parametrize("name", NAMES)
def test_step_by_step_equals_pytorch(name):
    lm, golden = goldens.load(name), goldens.values(name)
    [result] = kvjax.generate(
        lm, [golden["prompt"].tolist()], max_new_tokens=64, stop_ids=(), repetition_stop=False
    )
    assert result.tokens == tuple(golden["greedy"].tolist())
    assert result.finish_reason == "length"


@pytest.mark.parametrize("name", NAMES)
def test_prefill_in_one_piece_equals_pytorch(name):
    lm, golden = goldens.load(name), goldens.values(name)
    [(cache, logits)] = small.prefilled(lm, [golden["prompt"]], [[48]], bucket=64)
    assert goldens.relative_error(logits[0], golden["logits"][-1]) < TOLERANCE
    assert cache.length.tolist() == [48]


SPLITS = [(16, 16, 16, 0, 0, 0, 0), (5, 11, 0, 1, 15, 16, 0), (1, 2, 3, 16, 7, 8, 11)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in WINDOWS else pytest.mark.slow) for n in goldens.NAMES]
)
def test_prefill_in_pieces_equals_pytorch(name):
    """Three splits at once; the logits after every piece are those of that position."""
    lm, golden = goldens.load(name), goldens.values(name)
    read = np.zeros(len(SPLITS), int)
    pieces = list(zip(*SPLITS, strict=True))
    prompts = [golden["prompt"]] * len(SPLITS)
    for count, (cache, logits) in zip(
        pieces, small.prefilled(lm, prompts, pieces, bucket=16, page_size=16), strict=True
    ):
        read += count
        np.testing.assert_array_equal(cache.length, read)
        expected = golden["logits"][read - 1]
        assert goldens.relative_error(logits, expected) < TOLERANCE
    assert (read == 48).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_window", "gpt_oss", "gpt_oss_mxfp4"])
def test_a_prompt_of_several_chunks(name):
    """History in several blocks, windows across the boundary, and a short row before it."""
    lm, new = small.lm(name), 4
    short, long = small.prompts([40, PREFILL_CHUNK + 1025], seed=1)

    def recomputed(sequence, length):
        return np.asarray(kvjax.forward(lm, sequence + [0] * (length - len(sequence))))[0]

    expected = recomputed(long, len(long) + new)
    pieces = [[len(short), PREFILL_CHUNK], [0, 1025]]
    size = {"prompt_tokens": len(long), "max_new_tokens": new}
    steps = small.prefilled(lm, [short, long], pieces, bucket=PREFILL_CHUNK, **size)
    for (_, logits), read in zip(steps, (PREFILL_CHUNK, len(long)), strict=True):
        assert goldens.relative_error(logits[1], expected[read - 1]) < TOLERANCE

    options = {"max_new_tokens": new, "stop_ids": (), "chunk": 3}
    results = kvjax.generate(lm, [short, long], **options)
    for prompt, result, length in zip([short, long], results, (64, len(long) + new), strict=True):
        logits = recomputed([*prompt, *result.tokens[:-1]], length)
        chosen = logits[len(prompt) - 1 : len(prompt) - 1 + new].argmax(-1)
        assert result.tokens == tuple(chosen.tolist())


def test_greedy_decoding_is_repeated_recomputation():
    lm, prompts = small.lm(), small.prompts()
    for prompt, generated in zip(prompts, small.usual(), strict=True):
        sequence = list(prompt)
        for _ in range(small.NEW):
            padded = sequence + [0] * (64 - len(sequence))
            sequence.append(int(kvjax.forward(lm, padded)[0, len(sequence) - 1].argmax()))
        assert tuple(sequence[len(prompt) :]) == generated
    assert len(set(small.usual())) == len(prompts)


def test_inside_a_callers_own_program():
    """Prefill, the first token and a chunk in one jit of somebody else's."""
    lm = small.lm()
    prompt = small.prompts()[0]
    planned = plan(
        lm.config,
        kvjax.recipes.full(),
        batch_size=1,
        prompt_tokens=len(prompt),
        max_new_tokens=6,
        dtype=lm.dtype,
        parameter_bytes=0,
    )

    @jax.jit
    def answer(model, tokens):
        count = jnp.full(1, tokens.shape[1], jnp.int32)
        logits = jnp.zeros((1, lm.config.vocab_size))
        cache, logits = prefill_chunk(model, init_cache(planned.geometry), logits, tokens, count)
        state, first = start_decoding(cache, logits, None, jnp.full(1, 6, jnp.int32), stop_ids=())
        halt = jnp.zeros(1, bool)
        _, rest = decode_chunk(model, state, None, halt, steps=8, stop_ids=())
        return jnp.concatenate([first.tokens, rest.tokens]), jnp.concatenate(
            [first.real, rest.real]
        )

    tokens, real = answer(lm.model, jnp.asarray([prompt], jnp.int32))
    assert real[:, 0].tolist() == [True] * 6 + [False] * 3
    assert tuple(tokens[:6, 0].tolist()) == small.usual()[0][:6]
    assert set(tokens[6:, 0].tolist()) == {int(tokens[5, 0])}


@pytest.mark.slow
def test_smollm2_equals_pytorch():
    lm = kvjax.load(smollm2.path())
    with np.load(goldens.FOLDER / "smollm2.npz") as file:
        logits, greedy = file["logits"], file["greedy"]
    ids = json.loads((goldens.FOLDER / "smollm2.json").read_text())["prompt_ids"]
    [result] = kvjax.generate(lm, [ids], max_new_tokens=len(greedy))
    assert result.tokens == tuple(greedy.tolist())
    assert result.text == lm.tokenizer.decode(greedy.tolist())
    size = {"prompt_tokens": len(ids), "max_new_tokens": len(greedy)}
    [(_, after)] = small.prefilled(lm, [ids], [[len(ids)]], bucket=64, **size)
    assert goldens.relative_error(after[0], logits[-1]) < TOLERANCE
