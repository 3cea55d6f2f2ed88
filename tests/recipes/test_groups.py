"""Codecs whose tokens share scales, in the groups that they really have: whatever a prompt's length
and the windows, every token is read as its whole group was coded."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import recipes
from kvjax.cache import append, init_cache, plan, reserve_layer
from kvjax.codecs import kv_codec
from kvjax.compress.policy import policies
from kvjax.compress.selection import Rows
from kvjax.compress.settle import Incoming, leaving, settle
from kvjax.models.config import ModelConfig
from kvjax.thoughts import Given
from pallas_kernels.read import plain_keys, plain_values
from tests.models import configs

SLIDING, FULL = 0, 1
"""Layers of the model, by what they attend to."""
HEADS, DIM, MOST = 2, 64, 512


def model(window: int = 100) -> ModelConfig:
    fields = {"head_dim": DIM, "sliding_window": window, "max_position_embeddings": 10_000}
    return ModelConfig.from_hf(configs.small("gpt_oss", **fields))


class Layer:
    """One layer's cache with given keys and values; after each step all that it holds is compared.

    Attributes:
        prompt: tokens of each row's prompt; ``length`` of each row, so far.
    """

    def __init__(self, recipe, rows: int, index: int = FULL, window: int = 100):
        config = model(window)
        planned = plan(
            config,
            recipe,
            batch_size=rows,
            prompt_tokens=MOST // 2,
            max_new_tokens=MOST // 2,
            dtype="float32",
            parameter_bytes=0,
        )
        shape = planned.geometry
        geometry = dataclasses.replace(shape, layers=(shape.layers[index],))
        self.recipe, self.of_layer = recipe, policies(recipe, config)
        self.policy, self.window = self.of_layer[index], config.windows[index]
        [self.cached] = init_cache(geometry).layers
        rng = np.random.default_rng(rows)
        # Each token has a size of its own, so that no scale will do for another group.
        size = np.exp(1.5 * rng.standard_normal((2, rows, MOST, 1, 1)))
        self.k, self.v = np.float32(size * (2 + rng.standard_normal((2, rows, MOST, HEADS, DIM))))
        self.length = self.prompt = self.stored = np.zeros(rows, np.int32)
        given = {"index": 0, "recipe": recipe, "policy": self.policy, "scale": 1.0}
        self.settle = jax.jit(functools.partial(settle, window=self.window, select=False, **given))

    def read(self, counts, bucket: int) -> None:
        """Read a piece of every row's prompt; what pads it is NaN."""
        before = self.length
        self.length = self.prompt = before + np.asarray(counts, np.int32)
        there = np.arange(bucket)[None] < np.asarray(counts)[:, None]
        new = [np.where(there[..., None, None], x, np.nan) for x in self._new(before, bucket)]
        self._leave(before, Incoming(*map(jnp.asarray, new)))

    def step(self) -> None:
        """Read a tick of answers."""
        before, tick = self.length, self.recipe.tick
        self.length = before + tick
        pos = before[:, None] + np.arange(tick, dtype=np.int32)[None]
        new = map(jnp.asarray, self._new(before, tick))
        self.cached = _append(self.cached, jnp.asarray(self.length), *new, jnp.asarray(pos))
        self._leave(self.length, None)

    def rows(self, before) -> Rows:
        stored, length, prompt = map(jnp.asarray, (self.stored, self.length, self.prompt))
        below = leaving(self.recipe, self.of_layer, stored, length, prompt)
        none = jnp.zeros(len(length), bool)
        return Rows(jnp.asarray(before), length, prompt, stored, below, none, jnp.int32(0))

    def _new(self, start, count: int):
        return self._at(start[:, None] + np.arange(count)[None])

    def _at(self, at):
        return [np.take_along_axis(x, at[..., None, None], 1) for x in (self.k, self.v)]

    def _leave(self, before, incoming: Incoming | None) -> None:
        rows = self.rows(before)
        self.cached, crowded = self.settle(self.cached, rows=rows, incoming=incoming)
        assert not crowded.any(), "tokens found no slot"
        self.stored = np.asarray(rows.leaving)
        self._check()

    @functools.cached_property
    def coded(self) -> dict[int, list[np.ndarray]]:
        """Keys and values as they are read of each class in groups, from its first token on."""
        found = {}
        for c, codec in enumerate(self.cached.codecs):
            if codec.group > 1:
                base = self._base()
                whole = (MOST - base.max()) // codec.group * codec.group
                at = base[:, None] + np.arange(whole)[None]
                found[c] = [
                    np.asarray(_coded(part, x.swapaxes(1, 2)))
                    for part, x in zip((codec.k, codec.v), self._at(at), strict=True)
                ]
        return found

    def _base(self) -> np.ndarray:
        """Where groups are counted from: with thoughts, only answers have any."""
        return np.zeros_like(self.prompt) if self.recipe.segmenter is None else self.prompt

    def _check(self) -> None:
        positions = [
            np.asarray(pool.pos)[np.asarray(table)]
            for pool, table in zip(self.cached.pools, self.cached.tables, strict=True)
        ]
        for c, coded in self.coded.items():
            read = _read(self.cached.pools[c], self.cached.tables[c])
            for row, head in np.ndindex(len(self.length), HEADS):
                pos = positions[c][row, head]
                live = pos >= 0
                for held, x in zip(read, coded, strict=True):
                    expected = x[row, head][pos[live] - self._base()[row]]
                    held = np.asarray(held[row, head])[live]
                    np.testing.assert_allclose(held, expected, rtol=1e-5, atol=1e-6)
        for row, head in np.ndindex(len(self.length), HEADS):
            found = np.concatenate([pos[row, head].ravel() for pos in positions])
            found = found[found >= 0].tolist()
            assert len(found) == len({*found}), "a token is held twice"
            first = 0 if self.window is None else max(self.length[row] - self.window + 1, 0)
            assert {*range(first, self.length[row])} <= {*found} <= {*range(self.length[row])}


@functools.partial(jax.jit, static_argnums=0)
def _coded(codec, x):
    return codec.decode(codec.encode(x))


@jax.jit
def _append(layer, length, k, v, pos):
    return append(reserve_layer(layer, length), k, v, pos, jnp.ones(pos.shape, bool))


@jax.jit
def _read(pool, table):
    return [part(pool, table, jnp.float32) for part in (plain_keys, plain_values)]


def test_prompts_that_are_shorter_than_a_group():
    """By KIVI's defaults 32 tokens share scales; these prompts are read as a piece of 16."""
    layer = Layer(recipes.kivi(), rows=2)
    layer.read([10, 16], 16)
    for _ in range(3):
        layer.step()
    assert layer.stored.tolist() == [64, 64]


@pytest.mark.parametrize(
    ("codec", "window", "bucket"),
    [("kivi2", 34, 128), ("kivi2", 2, None), ("kivi4-g64", 18, 16), ("kivi4-g64", 18, None)],
)
def test_a_window_and_a_bucket_need_not_be_whole_groups(codec, window, bucket):
    layer = Layer(recipes.kivi(codec, window), rows=1)
    new = bucket and Incoming(*[jnp.zeros((1, bucket, HEADS, DIM))] * 2)
    layer.settle.trace(layer.cached, rows=layer.rows(layer.length), incoming=new)


@pytest.mark.parametrize(
    ("recipe", "window"),
    [
        (recipes.uniform("nvfp4"), 100),
        pytest.param(recipes.kivi(), 70, marks=pytest.mark.slow),
        pytest.param(recipes.uniform("kivi2-g64", window=2, tick=2), 68, marks=pytest.mark.slow),
        pytest.param(recipes.uniform("ternary"), 128, marks=pytest.mark.slow),
    ],
)
def test_a_sliding_window_cuts_no_group(recipe, window):
    """Prompts exceed the window, which ends within groups, and are read in two pieces."""
    layer = Layer(recipe, rows=2, index=SLIDING, window=window)
    layer.read([128, 121], 128)
    layer.read([40, 128], 128)
    for _ in range(150 // recipe.tick):
        layer.step()
    assert layer.length.min() > 256


def thoughts(codec: str, window: int, tick: int):
    """A recipe whose answers are in groups from their start."""
    segmenter = Given(every=2 * math.lcm(tick, kv_codec(codec).group))
    given = {"window": window, "tick": tick, "budget": None, "segmenter": segmenter}
    return recipes.thinkv(thought_codecs=(codec,) * 3, **given)


def test_an_answer_leaves_after_its_prompt():
    """What leaves at once is cut into groups from its first token on: these must be an answer's."""
    recipe = thoughts("nvfp4", 12, 32)
    of_layer = policies(recipe, model())
    prompt = jnp.arange(1, 60, dtype=jnp.int32)
    length, stored = prompt, jnp.zeros_like(prompt)
    for _ in range(5):
        below = leaving(recipe, of_layer, stored, length, prompt)
        assert ((stored >= prompt) | (below <= prompt)).all()
        assert ((below < prompt) | ((below - prompt) % 16 == 0)).all()
        length, stored = length + recipe.tick, below
    assert (stored > prompt + 64).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "window", "tick"),
    [("nvfp4", 12, 32), ("kivi2-g64", 30, 128), ("ternary", 31, 24), ("nvfp4", 16, 48)],
)
def test_an_answer_s_groups_are_counted_from_its_start(codec, window, tick):
    """Also where a tick reaches far beyond the prompt's last tokens, which fill no group."""
    layer = Layer(thoughts(codec, window, tick), rows=2)
    layer.read([51, 3], 64)
    for _ in range(256 // tick + 1):
        layer.step()
    assert (layer.stored > layer.prompt + 64).all()
