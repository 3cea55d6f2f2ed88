"""Queries of a model that repeats its context, against one pass over all that it reads."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import init_cache, plan
from kvjax.cache.ledger import empty_ledger
from kvjax.decoding import notes
from kvjax.decoding.prefill import prefill_chunk
from kvjax.decoding.repeat import repeated_queries
from kvjax.matching import AttentionMatching
from kvjax.models.attention import add_sinks, causal_mask, masked_attention
from tests.decoding import small
from tests.test_tokenizer import make

COUNT = 7  # queries, which no length here is a multiple of
INSTRUCTION = (11, 12, 13)
RECIPE = kvjax.recipes.am(
    budget=64,
    every=64,
    codec="bf16",
    compactor=AttentionMatching(reference="repeat", queries=COUNT),
)


def asked(model, read: list[int]) -> list[np.ndarray]:
    """Queries [T, Hq, D] of every layer, as the model attends to all of ``read`` densely."""
    config, found = model.config, []
    positions = jnp.arange(len(read), dtype=jnp.int32)[None]

    def attend(index, cache, q, k, v, sinks):
        found.append(np.asarray(q[0]))
        mask = causal_mask(positions, positions, config.windows[index])
        out, lse = masked_attention(q, k, v, mask, config.scale)
        return add_sinks(out, lse, sinks), cache

    model.model(jnp.asarray([read], jnp.int32), positions, attend, (None,) * config.num_layers)
    return found


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_queries_are_those_of_one_pass(name):
    model, prompts = small.lm(name), small.prompts()
    planned = plan(
        model.config,
        RECIPE,
        batch_size=len(prompts),
        prompt_tokens=32,
        max_new_tokens=64,
        dtype=model.dtype,
        parameter_bytes=0,
    )
    cache = init_cache(planned.geometry)
    ledger = dataclasses.replace(cache.ledger, instruction=jnp.asarray(INSTRUCTION, jnp.int32))
    padded = np.full((len(prompts), 32), 7, np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    cache, _ = prefill_chunk(
        model.model,
        dataclasses.replace(cache, ledger=ledger),
        jnp.zeros((len(prompts), model.config.vocab_size), jnp.float32),
        padded,
        np.array([len(prompt) for prompt in prompts], np.int32),
        recipe=RECIPE,
    )
    found = repeated_queries(model.model, cache, RECIPE)
    for row, prompt in enumerate(prompts):
        length = len(prompt)
        at = length + len(INSTRUCTION) + np.arange(COUNT) * length // COUNT
        for mine, theirs in zip(found, asked(model, [*prompt, *INSTRUCTION, *prompt]), strict=True):
            np.testing.assert_allclose(mine[row], theirs[at], rtol=0, atol=1e-4)


@pytest.mark.parametrize("begins", [True, False])
def test_the_instruction_begins_no_new_text(begins):
    """It stands behind what the row has read, where no BOS belongs."""
    tokenizer = make("gpt-2", add_bos_token=begins)
    model = dataclasses.replace(small.lm(), tokenizer=tokenizer)
    ledger = notes.with_vocabulary(empty_ledger(1, 8, tokenizer.vocab_size), model)
    assert tokenizer.encode("")[:1] == [tokenizer.bos_id] * begins
    assert tokenizer.decode(ledger.instruction.tolist()) == notes.INSTRUCTION
    assert ledger.instruction[0] != tokenizer.bos_id
