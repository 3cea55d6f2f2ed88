"""What ``kvjax.forward`` accepts, and how it refuses the rest."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.models import goldens


@pytest.fixture
def lm() -> kvjax.LanguageModel:
    return goldens.load("llama")


@pytest.mark.parametrize("convert", [list, tuple, np.asarray, jnp.asarray, lambda ids: [ids]])
def test_every_spelling_of_tokens_gives_the_same(lm, convert):
    ids = [5, 1, 94, 0, 7]
    logits = kvjax.forward(lm, convert(ids))
    assert logits.shape == (1, 5, 96) and logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits, kvjax.forward(lm, np.asarray([ids], np.int64)))


def test_rows_of_a_batch_are_independent(lm):
    batch = np.asarray([[1, 2, 3], [4, 5, 6]])
    both = kvjax.forward(lm, batch)
    assert both.shape == (2, 3, 96)
    for row in range(2):
        np.testing.assert_allclose(both[row], kvjax.forward(lm, batch[row])[0], rtol=0, atol=1e-4)


def test_the_future_is_not_seen(lm):
    logits = kvjax.forward(lm, [1, 2, 3, 4])
    np.testing.assert_array_equal(kvjax.forward(lm, [1, 2, 3, 90])[0, :3], logits[0, :3])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "integers"),
        ([[]], "integers"),
        (3, "integers"),
        ([1.0, 2.0], "float64"),
        (["a"], "integers"),
        ([True, False], "bool"),
        ([[[1]]], r"\[1, 1, 1\]"),
        ([[1, 2], [3]], "same length"),
        ([1, 96], "96 is outside the vocabulary of 96"),
        ([-1], "-1 is outside"),
        ([2**40], "outside"),
    ],
)
def test_what_are_no_tokens_is_refused(lm, tokens, message):
    with pytest.raises(kvjax.UsageError, match=message):
        kvjax.forward(lm, tokens)


def test_a_sequence_beyond_the_context_is_refused(lm):
    with pytest.raises(kvjax.CapacityError, match=r"129 .* 128"):
        kvjax.forward(lm, [1] * 129)
