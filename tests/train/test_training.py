"""The loop on a tiny model: it learns, it can be interrupted, and it stops at NaN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.errors import NumericalError, UsageError
from kvjax.models.config import ModelConfig
from kvjax.models.forward import forward
from kvjax.train.reasoner import data, loop
from kvjax.train.reasoner.data import Batch, Source
from kvjax.train.reasoner.model import CONFIG

TINY = {
    **CONFIG,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
SETTINGS = loop.Settings(
    steps=24, batch_tokens=640, warmup=4, learning_rate=1e-2, levels=(200,), config=TINY
)


@pytest.fixture(scope="module")
def programs():
    """Compiled once for all tests."""
    found = loop.Programs(SETTINGS)
    start = found.start()
    return found, found.compile(start, SETTINGS.levels), start


@pytest.fixture
def compiled(programs, monkeypatch):
    # A copy, since the first step takes the state over.
    monkeypatch.setattr(loop.Programs, "start", lambda self: jax.tree.map(jnp.copy, programs[2]))
    monkeypatch.setattr(loop.Programs, "compile", lambda self, state, levels: programs[1])
    return programs[1]


def train(**options):
    lines = []
    settings, state = loop.train(SETTINGS, every=8, say=lines.append, **options)
    return settings, state, lines


def losses_of(lines) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_the_loss_falls(compiled):
    _, state, lines = train()
    losses = losses_of(lines)
    assert losses[0] > 4 and losses[-1] < losses[0] - 1
    assert int(state["step"]) == SETTINGS.steps
    assert "tok/s" in lines[2] and "s left" in lines[2]


def test_interrupted_and_resumed_is_the_same_as_in_one_go(compiled, tmp_path):
    whole = train()[1]
    _, part, _ = train(checkpoints=tmp_path, should_stop=lambda step: step == 13)
    assert int(part["step"]) == 13 and not same(part, whole)
    _, resumed, lines = train(checkpoints=tmp_path, workers=1)
    assert any("after step 13" in line for line in lines)
    assert same(resumed, whole)
    assert not any("loss" in line for line in train(checkpoints=tmp_path)[2])


def test_another_training_is_not_gone_on_from(compiled, tmp_path):
    train(checkpoints=tmp_path, should_stop=lambda step: step == 8)
    for name, value in {"seed": 1, "learning_rate": 1e-3, "levels": (500,), "steps": 30}.items():
        other = dataclasses.replace(SETTINGS, **{name: value})
        with pytest.raises(UsageError, match=f"a run with {name} .*: it cannot be resumed"):
            loop.train(other, checkpoints=tmp_path)
    with pytest.raises(UsageError, match="a run with seconds None and not 5"):
        loop.train(SETTINGS, checkpoints=tmp_path, seconds=5.0)
    assert any("after step 8" in line for line in train(checkpoints=tmp_path)[2])
    # The newest checkpoint alone stays; it may be damaged in its numbers or in what it says.
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["24"]
    for part, message in (("state", "of step 24 cannot be read"), ("metrics", "cannot use")):
        for path in (tmp_path / "24" / part).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
        with pytest.raises(UsageError, match=message):
            train(checkpoints=tmp_path)


def test_steps_that_the_clock_chose_are_gone_on_with(compiled, tmp_path, monkeypatch):
    chosen = iter([10, 12])
    monkeypatch.setattr(loop, "_steps_for", lambda *args: next(chosen))
    for begun, until in ((0, 4), (4, 10)):
        settings, state, lines = train(
            checkpoints=tmp_path, seconds=0.5, should_stop=lambda step, until=until: step == until
        )
        assert settings.steps == 10 and int(state["step"]) == until
        assert any(f"after step {begun}" in line for line in lines) == bool(begun)
    with pytest.raises(UsageError, match=r"a run with seconds 0\.5 and not 0\.7"):
        train(checkpoints=tmp_path, seconds=0.7)
    settings = dataclasses.replace(SETTINGS, steps=10)
    assert loop.train(settings, checkpoints=tmp_path, say=lambda line: None)[0] == settings


def test_a_loss_that_is_not_finite_ends_the_training(compiled, tmp_path, monkeypatch):
    step, judge = compiled[200]

    def broken(state, batch, rate):
        state, loss = step(state, batch, rate)
        return state, jnp.where(state["step"] == 12, jnp.nan, loss)

    monkeypatch.setitem(compiled, 200, (broken, judge))
    with pytest.raises(NumericalError, match="after 16 steps"):
        train(checkpoints=tmp_path)
    monkeypatch.setitem(compiled, 200, (step, judge))
    assert any("after step 8" in line for line in train(checkpoints=tmp_path)[2])


def test_steps_can_be_chosen_by_the_clock(compiled):
    settings, state, lines = train(seconds=0.5, should_stop=lambda step: step == 1)
    assert settings.steps > 1 and any(f"--steps {settings.steps}" in line for line in lines)
    assert int(state["step"]) == 1


def test_the_rate_rises_stays_and_falls_to_nothing():
    rates = [SETTINGS.rate(step) for step in range(SETTINGS.steps)]
    assert rates[0] == pytest.approx(2.5e-3) and max(rates) == rates[10] == 1e-2
    assert rates[-1] == pytest.approx(1e-2 / 6) and SETTINGS.rate(SETTINGS.steps) == 0
    assert dataclasses.replace(SETTINGS, warmup=0).rate(0) == 1e-2


def test_embedding_and_head_stay_tied(programs, compiled):
    _, state, _ = train(should_stop=lambda step: step == 8)
    start = programs[2]["params"]
    for params in (start, state["params"]):
        np.testing.assert_array_equal(params["embed"][...], 16 * params["lm_head"][...])
    assert (start["embed"][...] != state["params"]["embed"][...]).any()


def test_logits_are_those_of_the_decoder(programs):
    """In a row that loses nothing."""
    state = programs[0].start()
    batch = jax.tree.map(jnp.asarray, loop.unseen(SETTINGS.source)[200])
    logits = jax.jit(programs[0].logits)
    found = logits(state["params"], batch, jax.random.key(0))
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state["params"])
    model = nnx.merge(programs[0].graph, narrow)
    expected = forward(_Loaded(ModelConfig.from_hf(TINY), model), np.asarray(batch.tokens, int))
    np.testing.assert_allclose(found, expected, atol=0.02)
    cut = logits(state["params"], loop._cut(batch, 0.25), jax.random.key(0))
    first = int(batch.prompt.max()) + data.WIDTHS[200] // 4
    prompt = int(batch.prompt.min())
    np.testing.assert_array_equal(cut[:, :prompt], found[:, :prompt])
    assert (cut[:, first:] != found[:, first:]).any()


@dataclasses.dataclass(frozen=True)
class _Loaded:
    config: ModelConfig
    model: nnx.Module


def test_only_the_trace_is_scored():
    batch = loop.unseen(SETTINGS.source)[200]
    targets, scored = loop.targets_of(batch)
    for row in range(len(batch.tokens)):
        trace = np.asarray(targets[row])[np.asarray(scored[row]) > 0]
        prompt, length = batch.prompt[row], batch.length[row]
        np.testing.assert_array_equal(trace, batch.tokens[row, prompt:length])


def test_batches_follow_from_their_step():
    source = Source(steps=100, tokens=1500, seed=3)
    once, again = (list(source.batches(95, workers=0)) for _ in range(2))
    assert len(once) == 5
    for a, b in zip(once, again, strict=True):
        assert all(
            np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
        )
    other = dataclasses.replace(source, seed=4)
    assert any(
        not np.array_equal(a.tokens, b.tokens)
        for a, b in zip(once, other.batches(95, 0), strict=True)
    )


def test_rows_lose_tokens_late_in_the_training_only():
    source = Source(steps=1000, tokens=32_000, levels=(200,))
    assert np.isinf(source.batch(100).share).all()
    late = np.concatenate([source.batch(step).share for step in range(900, 905)])
    assert 0.5 < np.isfinite(late).mean() < 0.8
    assert late[np.isfinite(late)].min() >= 0.25 and late[np.isfinite(late)].max() <= 1


def test_long_problems_come_late():
    source = Source(steps=1000, tokens=32_000)
    assert {source.level(step) for step in range(60)} <= {200, 500}
    assert {source.level(step) for step in range(900, 1000)} == set(data.LEVELS)


def test_every_problem_is_trained_once():
    source = Source(steps=50, tokens=1500, levels=(200,))
    tokens = np.concatenate([source.batch(step).tokens for step in range(20)])
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    tests = loop.unseen(source)[200].tokens
    assert len(np.unique(np.concatenate([tokens, tests]), axis=0)) == len(tokens) + len(tests)


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"batch_tokens": 0},
        {"seed": -1},
        {"seed": 1 << 32},
        {"warmup": -1},
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"decay": 1.5},
        {"weight_decay": -0.1},
        {"levels": ()},
        {"levels": (200, 300)},
        {"levels": (500, 200)},
        {"levels": (200, 200)},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        dataclasses.replace(SETTINGS, **wrong)


def test_a_batch_is_a_pytree():
    batch = Source(steps=10, tokens=640).batch(0)
    assert isinstance(jax.tree.map(lambda leaf: leaf, batch), Batch)
