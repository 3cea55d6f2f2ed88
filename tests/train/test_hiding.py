"""Hidden tokens: the pattern, and attention that must not see them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.models.attention import masked_attention
from kvjax.models.config import ModelConfig
from kvjax.train.reasoner import vocabulary
from kvjax.train.reasoner.hiding import RECENT, Hiding, first_hidden
from kvjax.train.reasoner.model import CHUNKS, CONFIG, attend_hiding, chunk_of

HEADS = 2
CONFIGURED = ModelConfig.from_hf(
    {**CONFIG, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": 16}
)


@pytest.mark.parametrize("length", [64, 100, 192])
def test_attention_sees_what_is_not_hidden_and_nothing_else(length):
    rng = np.random.default_rng(length)
    q, k, v = (
        jnp.asarray(rng.normal(size=(3, length, heads, 16)), jnp.float32)
        for heads in (4, HEADS, HEADS)
    )
    chunk = -(-length // CHUNKS)
    at = np.arange(length)
    leaves = rng.integers(at[:, None] // chunk + 1, CHUNKS + 1, (3, length, HEADS))
    hidden = (leaves[:, None] <= at[:, None, None] // chunk) & (at[:, None] >= at)[..., None]
    assert hidden.any()
    out, _ = attend_hiding(CONFIGURED, lambda layer: jnp.asarray(leaves))(0, None, q, k, v, None)
    for head in range(HEADS):
        mask = jnp.asarray((at[:, None] >= at)[None] & ~hidden[..., head])
        group = slice(2 * head, 2 * head + 2)
        kv = slice(head, head + 1)
        expected, _ = masked_attention(
            q[:, :, group], k[:, :, kv], v[:, :, kv], mask, CONFIGURED.scale
        )
        np.testing.assert_allclose(out[:, :, group], expected, atol=2e-5)


def test_what_is_hidden_does_not_matter_at_all():
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, 128, heads, 16)), jnp.bfloat16)
        for heads in (4, HEADS, HEADS)
    )
    leaves = jnp.full((1, 128, HEADS), CHUNKS, jnp.int32).at[:, 10:20].set(40)
    attend = attend_hiding(CONFIGURED, lambda layer: leaves)
    out, _ = attend(0, None, q, k, v, None)
    poisoned, _ = attend(0, None, q, k.at[:, 10:20].set(300), v.at[:, 10:20].set(3e4), None)
    np.testing.assert_array_equal(out[:, 80:], poisoned[:, 80:])
    assert (out[:, 20:80] != poisoned[:, 20:80]).any()


ROWS, WIDTH, PROMPT = 16, 1280, 64
TRACE, CHUNK = WIDTH - PROMPT, WIDTH // CHUNKS
TOKENS = jax.random.randint(jax.random.key(1), (ROWS, WIDTH), 0, vocabulary.SIZE)


@jax.jit
def _leaves(key: int, layer: int, hiding: Hiding):
    prompt, length = (jnp.full((ROWS,), count, jnp.int32) for count in (PROMPT, WIDTH))
    return first_hidden(jax.random.key(key), layer, 4, TOKENS, prompt, length, hiding)


def leaves_of(share: float, rough: float = 0.0, together: float = 0.0, *, key=0, layer=0):
    """The first chunk of each token without it [B, T, Hkv]."""
    how = Hiding(*(jnp.full((ROWS,), value, jnp.float32) for value in (share, rough, together)))
    return np.asarray(_leaves(key, layer, how))


def test_the_prompt_and_the_last_tokens_stay():
    found = leaves_of(0.25, 0.8)
    assert (found[:, :PROMPT] == CHUNKS).all()
    at = np.arange(WIDTH)[None, :, None]
    assert (found * CHUNK >= at + RECENT)[found < CHUNKS].all()
    assert (found[:, PROMPT:] < CHUNKS).any()
    assert (leaves_of(np.inf, 0.8) == CHUNKS).all()


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_as_many_are_held_as_the_budget_says(share):
    found = leaves_of(share)
    for chunk in (20, 40, 63):
        there = chunk * CHUNK - PROMPT
        held = (found[:, PROMPT : PROMPT + there] > chunk).sum(1).mean()
        assert abs(held / min(share * TRACE, there) - 1) < 0.1


def test_tokens_leave_as_if_drawn_by_lot():
    """Of those that were there when the budget was full, exp(-t) are left after t budgets."""
    budget = 0.25 * TRACE
    early = leaves_of(0.25)[:, PROMPT : PROMPT + int(budget) - RECENT]
    for chunk in (26, 34, 50):
        budgets = (chunk * CHUNK - PROMPT - budget) / budget
        assert abs((early > chunk).mean() - np.exp(-budgets)) < 0.03


def test_heads_and_layers_drop_their_own_tokens_unless_together():
    first, second = (leaves_of(0.5, layer=layer) for layer in (0, 1))
    assert (first[..., 0] != first[..., 1]).any() and (first != second).any()
    first, second = (leaves_of(0.5, together=1.0, layer=layer) for layer in (0, 1))
    assert (first == first[..., :1]).all() and (first == second).all()
    assert (first != leaves_of(0.5, together=1.0, key=1)).any()


def test_rough_rows_drop_some_words_and_paragraphs_before_others():
    def spread(rough: float) -> float:
        """Of the mean time of a word, in one head of one row."""
        times = leaves_of(0.25, rough)[:, 200:700]
        words = np.asarray(TOKENS)[:, 200:700] % 4 == 0
        paragraph = (np.asarray(TOKENS) == vocabulary.BREAK).cumsum(1)[:, 200:700]
        means = [
            times[row, words[row] & (paragraph[row] == place), head].mean()
            for row in range(ROWS)
            for head in range(4)
            for place in np.unique(paragraph[row][words[row]])
        ]
        return float(np.std(means))

    assert spread(0.8) > 1.2 * spread(0.0)


def test_chunks_cover_a_row():
    at = chunk_of(jnp.arange(704, dtype=jnp.int32), 704)
    assert at[0] == 0 and at[-1] == CHUNKS - 1 and (np.diff(at) >= 0).all()
