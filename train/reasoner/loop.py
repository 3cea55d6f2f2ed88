"""The training loop: Optax, Orbax, one compiled program for each level."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from kvjax.errors import NumericalError, UsageError
from kvjax.models.config import ModelConfig
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.claim import check_claim, claim
from kvjax.train.reasoner.data import LEVELS, Batch, Source, mix, read
from kvjax.train.reasoner.hiding import Hiding, first_hidden
from kvjax.train.reasoner.model import CONFIG, graph_of, init, logits, tie
from kvjax.train.reasoner.task import WIDTHS

State = dict[str, Any]
"""``params`` (float32), ``opt`` (Optax's) and ``step`` (int32, how many are done)."""
LINES = 50
"""Steps between two lines that tell how far a training is."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What makes a training what it is: the same settings, the same model.

    Attributes:
        steps: of the optimiser.
        batch_tokens: of a step, padding included, about.
        seed: of parameters, problems and hidden tokens.
        learning_rate: after ``warmup`` steps and until the last ``decay`` share of them, over which
            it falls to 0.
        weight_decay: of matrices.
        levels: of problems, keys of `WIDTHS`.
        config: the model's ``config.json``.
    """

    steps: int
    batch_tokens: int = 65536
    seed: int = 0
    learning_rate: float = 2e-3
    warmup: int = 200
    decay: float = 0.25
    weight_decay: float = 0.05
    levels: tuple[int, ...] = LEVELS
    config: dict[str, Any] = dataclasses.field(default_factory=lambda: CONFIG)

    def __post_init__(self):
        """Refuse what cannot be trained.

        Raises:
            UsageError: naming the setting.
        """
        for name, low in {"steps": 1, "batch_tokens": 1, "seed": 0, "warmup": 0}.items():
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise UsageError(f"{name} must be a whole number, at least {low}, got {value!r}")
        if self.seed >= 1 << 32:
            raise UsageError(f"seed must be below 4294967296, got {self.seed}")
        if not 0 < self.learning_rate < math.inf:
            raise UsageError(f"learning_rate must be above 0 and finite, got {self.learning_rate}")
        if not 0 <= self.decay <= 1:
            raise UsageError(f"decay must be from 0 to 1, got {self.decay}")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(f"weight_decay must be at least 0 and finite, got {self.weight_decay}")
        if not self.levels or list(self.levels) != [one for one in WIDTHS if one in self.levels]:
            known = ", ".join(map(str, WIDTHS))
            raise UsageError(
                f"levels must be of {known}, each once and in order, got {self.levels}"
            )

    @property
    def source(self) -> Source:
        return Source(self.steps, self.batch_tokens, self.seed, self.levels)

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        left = (self.steps - step) / max(self.decay * self.steps, 1)
        return self.learning_rate * min((step + 1) / max(self.warmup, 1), left, 1.0)

    def optimizer(self) -> optax.GradientTransformation:
        """All but the learning rate, so that programs serve any number of steps."""

        def matrices(params):
            return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(b1=0.9, b2=0.98, eps=1e-9),
            optax.add_decayed_weights(self.weight_decay, matrices),
        )


@dataclasses.dataclass(frozen=True)
class Programs:
    """The training of one setting, as functions of its state."""

    settings: Settings

    @functools.cached_property
    def graph(self) -> nnx.GraphDef:
        return graph_of(ModelConfig.from_hf(self.settings.config))

    def start(self) -> State:
        """The state before the first step."""
        return jax.jit(self._start)()

    def _start(self) -> State:
        params = init(ModelConfig.from_hf(self.settings.config), self.settings.seed)
        opt = self.settings.optimizer().init(params)
        return {"params": params, "opt": opt, "step": jnp.zeros((), jnp.int32)}

    def logits(self, params, batch: Batch, key: Array) -> Float[Array, "B T V"]:
        """Float32 logits of a model in bfloat16, the batch's tokens being hidden as it says."""
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tie(params))
        model = nnx.merge(self.graph, narrow)
        tokens = batch.tokens.astype(jnp.int32)
        hiding = Hiding(batch.share, batch.rough, batch.together)
        heads = model.config.num_kv_heads

        def leaves(layer: int):
            return first_hidden(key, layer, heads, tokens, batch.prompt, batch.length, hiding)

        return logits(model, tokens, leaves)

    def step(
        self, state: State, batch: Batch, rate: Float[Array, ""]
    ) -> tuple[State, Float[Array, ""]]:
        """One step of the optimiser, and the loss before it."""
        key = jax.random.fold_in(jax.random.key(self.settings.seed), state["step"])

        def loss(params):
            found = self.logits(params, batch, key)[:, :-1]
            targets, scored = targets_of(batch)
            each = optax.softmax_cross_entropy_with_integer_labels(found, targets)
            return (each * scored).sum() / scored.sum()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = self.settings.optimizer().update(grads, state["opt"], state["params"])
        updates = jax.tree.map(lambda leaf: -rate * leaf, updates)
        params = tie(optax.apply_updates(state["params"], updates))
        return {"params": params, "opt": opt, "step": state["step"] + 1}, value

    def judge(self, params, batch: Batch) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Of given traces: the share that is likeliest token by token, and of wrong tokens."""
        found = self.logits(params, batch, jax.random.key(0))[:, :-1].argmax(-1)
        targets, scored = targets_of(batch)
        wrong = (found != targets) & (scored > 0)
        return (~wrong.any(1)).mean(), wrong.sum() / scored.sum()

    def compile(self, state: State, levels: Iterable[int]) -> dict[int, tuple[Callable, Callable]]:
        """Step and judge of each level; side by side, since each takes a while."""
        step, judge = jax.jit(self.step, donate_argnums=0), jax.jit(self.judge)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
        rate = jax.ShapeDtypeStruct((), jnp.float32)

        def one(level: int):
            batch = shape_of(self.settings.source.rows(level), WIDTHS[level])
            lowered = step.lower(shapes, batch, rate), judge.lower(shapes["params"], batch)
            return tuple(program.compile() for program in lowered)

        levels = list(levels)
        with concurrent.futures.ThreadPoolExecutor(len(levels)) as pool:
            return dict(zip(levels, pool.map(one, levels), strict=True))


jax.tree_util.register_dataclass(
    Batch, data_fields=[field.name for field in dataclasses.fields(Batch)], meta_fields=[]
)


def targets_of(batch: Batch) -> tuple[Array, Float[Array, "B T"]]:
    """The tokens after each one, and 1 where they are the trace's."""
    at = jnp.arange(1, batch.tokens.shape[1], dtype=jnp.int32)[None]
    scored = (at >= batch.prompt[:, None]) & (at < batch.length[:, None])
    return batch.tokens[:, 1:].astype(jnp.int32), scored.astype(jnp.float32)


def shape_of(rows: int, width: int) -> Batch:
    whole, real = (jax.ShapeDtypeStruct((rows,), kind) for kind in (jnp.int32, jnp.float32))
    tokens = jax.ShapeDtypeStruct((rows, width), jnp.int16)
    return Batch(tokens, whole, whole, real, real, real)


def unseen(source: Source) -> dict[int, Batch]:
    """Problems of every level that are never trained on, in rows that lose nothing."""
    found = {}
    for level in source.levels:
        rows = source.rows(level)
        zeros = np.zeros(rows, np.float32)
        whole = np.full(rows, np.inf, np.float32)
        problems = read(level, 0, rows, split="validation")
        found[level] = Batch(*problems, whole, zeros, zeros)
    return found


def train(
    settings: Settings,
    *,
    checkpoints: pathlib.Path | None = None,
    workers: int = 0,
    every: int = 500,
    seconds: float | None = None,
    say: Callable[[str], None] = print,
    should_stop: Callable[[int], bool] = lambda step: False,
) -> tuple[Settings, State]:
    """Train a model, going on from the last checkpoint if there is one.

    Args:
        settings: what is trained.
        checkpoints: a directory for them, and for what the training is; None keeps none.
        workers: processes that make problems; 0 makes them here.
        every: steps between two checkpoints, each with a look at unseen problems.
        seconds: replaces ``settings.steps`` by what will take about so long on this device.
        say: gets the lines that tell how far it is.
        should_stop: asked after each step with the number of steps done; True ends the training
            there, with a checkpoint.

    Returns:
        The settings, with the steps that were chosen, and the state.

    Raises:
        UsageError: ``checkpoints`` is another training's, or cannot be used.
        NumericalError: the loss is not finite; the last checkpoint is from before.
    """
    if checkpoints is not None:
        settings, seconds = _going_on(checkpoints, settings, seconds)
    programs = Programs(settings)
    state = programs.start()
    size = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    say(f"{size:,} parameters, compiling")
    started = time.monotonic()
    compiled = programs.compile(state, settings.levels)
    say(f"compiled in {time.monotonic() - started:.0f} s")
    tests = unseen(settings.source)
    asked = {} if seconds is None else {"seconds": seconds}
    if seconds is not None:
        steps = _steps_for(seconds, settings, compiled, tests, state)
        settings = dataclasses.replace(settings, steps=steps)
        say(f"--steps {steps} will take about {seconds:.0f} s")
    if checkpoints is not None:
        claim(checkpoints, dataclasses.asdict(settings) | asked, resume=True)
    with contextlib.nullcontext() if checkpoints is None else Checkpoints(checkpoints) as manager:
        if manager is not None and manager.last is not None:
            state = manager.load(manager.last, state)
            say(f"going on after step {manager.last}")
        begun = int(state["step"])
        clock = _Clock(settings.steps, begun)
        for done, batch in enumerate(settings.source.batches(begun, workers), begun + 1):
            program, _ = compiled[settings.source.level(done - 1)]
            state, loss = program(state, batch, np.float32(settings.rate(done - 1)))
            clock.add(batch.tokens.size, loss)
            stop, due = should_stop(done) or done == settings.steps, done % every == 0
            if stop or due or done % LINES == 0:
                say(clock.line(done))
            if stop or due:
                if manager is not None:
                    manager.save(done, state, score=-done)  # the newest is the best, alone kept
                say(f"step {done} · {look(tests, compiled, state['params'])}")
            if stop:
                break
    return settings, state


def _going_on(
    checkpoints: pathlib.Path, settings: Settings, seconds: float | None
) -> tuple[Settings, float | None]:
    """The settings of the run that is there, and no seconds if they have been made into steps.

    Raises:
        UsageError: it is another run, or the folder cannot be used.
    """
    wanted = dataclasses.asdict(settings)
    if seconds is None:
        check_claim(checkpoints, wanted, resume=True)
        return settings, None
    del wanted["steps"]  # by the clock, each time would have another number
    before = check_claim(checkpoints, wanted | {"seconds": seconds}, resume=True)
    if not before:
        return settings, seconds
    return dataclasses.replace(settings, steps=before.get("steps")), None


class _Clock:
    """Losses and time since the last line."""

    def __init__(self, steps: int, begun: int):
        self._steps, self._last = steps, begun
        self._tokens, self._losses, self._since = 0, [], time.monotonic()

    def add(self, tokens: int, loss: Float[Array, ""]) -> None:
        self._tokens += tokens
        self._losses.append(loss)

    def line(self, done: int) -> str:
        """What to say after so many steps; waits for the device.

        Raises:
            NumericalError: a loss is not finite.
        """
        loss = float(np.mean([np.asarray(loss) for loss in self._losses]))
        if not math.isfinite(loss):
            raise NumericalError(f"the loss is {loss} after {done} steps")
        now = time.monotonic()
        passed = now - self._since
        left = passed / (done - self._last) * (self._steps - done)
        speed = self._tokens / passed
        self._tokens, self._losses, self._since, self._last = 0, [], now, done
        return (
            f"step {done}/{self._steps} · loss {loss:.4f} · {speed:,.0f} tok/s · {left:.0f} s left"
        )


def look(tests: dict[int, Batch], compiled, params) -> str:
    """How many unseen traces are right, all of the cache seen and parts of it."""
    parts = []
    for level, batch in tests.items():
        judge = compiled[level][1]
        found = [judge(params, _cut(batch, share)) for share in (np.inf, 0.5, 0.25)]
        parts.append(f"{level}: " + " ".join(f"{float(right):.2f}" for right, _ in found))
    return "right with all, 1/2, 1/4 of the trace · " + " · ".join(parts)


def _cut(batch: Batch, share: float) -> Batch:
    return dataclasses.replace(batch, share=np.full_like(batch.share, share))


def _steps_for(seconds: float, settings: Settings, compiled, tests, state: State) -> int:
    """The steps that take about so long, going by a few of every level."""
    each = []
    for level, batch in tests.items():
        trial = jax.tree.map(jnp.copy, state)
        times = []
        for _ in range(5):
            start = time.monotonic()
            trial, loss = compiled[level][0](trial, _cut(batch, 0.5), np.float32(0.0))
            jax.block_until_ready(loss)
            times.append(time.monotonic() - start)
        each.append(min(times))
    weights = np.array([mix(progress, settings.levels) for progress in np.arange(0, 1, 0.01)])
    weights /= weights.sum(1, keepdims=True)
    return max(int(seconds / float((weights @ np.array(each)).mean())), 1)
