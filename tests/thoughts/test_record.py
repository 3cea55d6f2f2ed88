"""The pass over prompt and answer against queries and keys out of a plain forward pass."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.models.attention import add_sinks, causal_mask, masked_attention
from kvjax.thoughts.record import QUERY_BLOCK, record
from tests.decoding import small
from tests.thoughts import oracles


def expected(lm, ids: list[int], prompt: int) -> np.ndarray:
    """Float64 [layers, answer tokens]."""
    tokens = jnp.asarray([ids], jnp.int32)
    positions = jnp.arange(len(ids), dtype=jnp.int32)[None]
    found = []

    def attend(index, cache, q, k, v, sinks):
        mask = causal_mask(positions, positions, lm.config.windows[index])
        rows = [np.asarray(a[:, prompt:] if a is not k else a) for a in (q, k, mask)]
        found.append(oracles.all_rows(*rows, lm.config.scale)[0])
        out, lse = masked_attention(q, k, v, mask, lm.config.scale)
        return add_sinks(out, lse, sinks), cache

    lm.model(tokens, positions, attend, (None,) * lm.config.num_layers)
    return np.stack(found)


def tokens_of(lm, count: int) -> list[int]:
    return np.random.default_rng(count).integers(0, lm.config.vocab_size, count).tolist()


@pytest.mark.parametrize("name", ["llama", "qwen2_window", "gpt_oss"])
def test_every_step_has_the_sparsity_of_a_plain_pass(name):
    lm = small.lm(name)
    ids = tokens_of(lm, 45)
    found = record(lm, ids[:18], ids[18:])
    assert found.dtype == np.float32 and found.shape == (lm.config.num_layers, 27)
    assert (found.std(1) > 0.05).all()  # there is something to measure
    # A weight right at the border may fall on either side of it.
    np.testing.assert_allclose(found, expected(lm, ids, 18), atol=1.01 / 18)
    assert np.mean(found == expected(lm, ids, 18).astype(np.float32)) > 0.99


def test_more_than_one_block_of_queries():
    lm = small.lm()
    ids = tokens_of(lm, QUERY_BLOCK + 40)
    found = record(lm, ids[:-30], ids[-30:])
    assert np.mean(found == expected(lm, ids, len(ids) - 30).astype(np.float32)) > 0.99


def test_what_comes_later_makes_no_difference():
    lm = small.lm()
    ids = tokens_of(lm, 60)
    whole = record(lm, ids[:9], ids[9:])
    np.testing.assert_allclose(record(lm, ids[:9], ids[9:30]), whole[:, :21], atol=0.06)
    assert np.mean(record(lm, ids[:9], ids[9:30]) == whole[:, :21]) > 0.99


def test_tokens_that_cannot_be_used_are_refused():
    lm = small.lm()
    with pytest.raises(kvjax.UsageError, match="need a token each, got 0 and 1"):
        record(lm, [], [1])
    with pytest.raises(kvjax.UsageError, match="outside the vocabulary"):
        record(lm, [1], [lm.config.vocab_size])
    with pytest.raises(kvjax.CapacityError, match="context"):
        record(small.lm(context=8), [1] * 5, [1] * 4)


def test_weights_that_give_nan_are_an_error():
    def spoil(decoder):
        norm = decoder.layers[1].input_norm
        norm[...] = norm[...].at[0].set(jnp.nan)

    with pytest.raises(kvjax.NumericalError, match="layer 1 holds NaN"):
        record(small.changed(small.lm(), spoil), [1, 2], [3, 4])
