"""From the first projections to ranks for every rate."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.dynakv.forward import plain_states
from kvjax.errors import NumericalError, UsageError
from kvjax.files import write_atomically
from kvjax.models.decoder import Decoder
from kvjax.report.progress import ProgressLine
from kvjax.sharding import device_mesh
from kvjax.sharding.mesh import DATA
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.claim import claim
from kvjax.train.dynakv.data import Rows, batch_of, in_batches, split
from kvjax.train.dynakv.loop import CHECKPOINTS, calibration, check_fit
from kvjax.train.dynakv.metrics import METRICS, Metrics
from kvjax.train.matryoshka.files import Matryoshka, Point, save_matryoshka
from kvjax.train.matryoshka.projections import (
    LEVELS,
    Projections,
    principal_projections,
    rank_step,
    truncated_states,
)
from kvjax.train.matryoshka.search import costs_of, drops_to, levels_after, sweeps, uniform
from kvjax.train.matryoshka.settings import MatryoshkaSettings
from kvjax.train.matryoshka.update import Sums, begin, compared, projected, update

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

PATH = "search.json"
_HALF = 0.5  # the uniform rate of evaluations while training, as in the repository


def train(
    lm: "LanguageModel",
    rows: Rows,
    settings: MatryoshkaSettings,
    folder: str | pathlib.Path,
    progress: ProgressLine,
    *,
    name: str = "",
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    devices: list[jax.Device] | None = None,
) -> Matryoshka | None:
    """Train projections of a model's keys and values, find ranks, and write both.

    Args:
        lm: what ``kvjax.load`` returned; it stays as it is.
        rows: what it reads; the last rows are held out.
        settings: how.
        folder: for checkpoints, metrics, the search and, in the end, what was trained.
        progress: where the state is shown.
        name: of the model, for people.
        resume: go on from what the folder holds.
        should_stop: asked after every step and every sweep; True ends the run, to be resumed.
        devices: over which the rows of a batch are spread; all of them if None.

    Returns:
        What was trained, or None if the run was ended.

    Raises:
        KvjaxError: the settings do not fit the model, the data or what the folder holds, or
            something is not finite; checkpoints stay.
    """
    training, folder = settings.training, pathlib.Path(folder)
    devices = devices or jax.devices()
    check(lm, settings, len(devices))
    learned, held = split(rows, training)
    identity = {
        "fingerprint": lm.fingerprint,
        "dtype": str(lm.dtype),
        "data": rows.digest(),
        "devices": len(devices),
        "matryoshka": dataclasses.asdict(settings),
    }
    del identity["matryoshka"]["target_rates"]  # others can be found without training again
    claim(folder, identity, resume)
    progress.phase("finding principal components")
    start = principal_projections(lm.model, calibration(learned, training))
    run = _Run(lm.model, start, settings, devices, folder, progress, should_stop)
    projections = run.projections(learned, held)
    if projections is None:
        return None
    ranks = run.ranks(projections, learned)
    if ranks is None:
        return None
    points = []
    for rate, own in zip(settings.target_rates, ranks, strict=True):
        progress.phase("evaluating")
        points.append(Point(rate, own, run.measured(projections, own, held)))
    tokens = training.steps * training.rows_a_step * training.seq_len
    facts = {"data": identity["data"], "tokens": tokens, **dataclasses.asdict(settings)}
    found = Matryoshka(projections, tuple(points), lm.fingerprint, name or lm.source, facts)
    save_matryoshka(found, folder)
    return found


def check(lm: "LanguageModel", settings: MatryoshkaSettings, devices: int) -> None:
    """Refuse what can be seen not to fit before weights are there.

    Raises:
        UsageError: batches cannot be spread over the devices, or ranks not cut from heads.
        CapacityError: rows are longer than the model's context.
    """
    check_fit(lm, settings.training, devices)
    rank_step(lm.config)


class _Run:
    """One training and search, on some devices."""

    def __init__(
        self,
        model: Decoder,
        start: Projections,
        settings: MatryoshkaSettings,
        devices: list[jax.Device],
        folder: pathlib.Path,
        progress: ProgressLine,
        should_stop: Callable[[], bool],
    ):
        self._mesh = device_mesh(dp=len(devices), devices=devices)
        self._model, self._start = jax.device_put((model, start), self._place())
        self._settings, self._training = settings, settings.training
        self._folder, self._progress, self._should_stop = folder, progress, should_stop
        self._shape = start.mean.shape[:-1]

    def projections(self, rows: Rows, held: Rows) -> Projections | None:
        """All updates; None if they were ended."""
        training = self._training
        state = jax.device_put(begin(self._start, training), self._place())
        with Checkpoints(self._folder / CHECKPOINTS) as checkpoints:
            first = checkpoints.last or 0
            metrics = Metrics(self._folder / METRICS, checkpoints.last)
            if checkpoints.last is not None:
                state = checkpoints.load(first, state)
            self._progress.phase("compiling the step")
            for step in range(first, training.steps):
                stops = self._should_stop()
                if step > first and (stops or step % training.save_every == 0):
                    self._save(checkpoints, metrics, step, state, held)
                if stops:
                    return None
                batch = batch_of(rows, step, training)
                put = self._spread(batch, None, DATA)
                state, found = update(
                    self._model, self._start, state, np.int32(step), *put, settings=self._settings
                )
                values = {one: float(value) for one, value in jax.device_get(found).items()}
                _refuse(values, step)
                metrics.add("step", step + 1, values)
                shown = " · ".join(f"{one} {value:.4f}" for one, value in values.items())
                self._progress.update(f"step {step + 1:,}/{training.steps:,} · {shown}")
            if training.steps > first:
                self._save(checkpoints, metrics, training.steps, state, held)
        return _projected(self._start, state.parameters)

    def _save(
        self, checkpoints: Checkpoints, metrics: Metrics, step: int, state: Any, held: Rows
    ) -> None:
        """A checkpoint, with an evaluation of half of all components."""
        half = uniform(_HALF, self._start.mean.shape[-1], self._shape)
        found = self.measured(_projected(self._start, state.parameters), half, held)
        _refuse(found, step)
        metrics.add("eval", step, found)
        checkpoints.save(step, state, found["ce"])

    def measured(self, projections: Projections, ranks: np.ndarray, rows: Rows) -> dict[str, float]:
        """The rate, and on some rows divergence and cross-entropy."""
        parts = in_batches(rows, self._training.batch_size)
        put = (self._spread(part, DATA) for part in parts)
        found = [jax.device_get(_compared(self._model, projections, ranks, *one)) for one in put]
        nats, predicted = (np.sum(each, 0, np.float64) for each in zip(*found, strict=True))
        kl, ce = nats / predicted
        rate = ranks.mean() / projections.mean.shape[-1]
        return {"rate": float(rate), "kl": float(kl), "ce": float(ce)}

    def ranks(self, projections: Projections, rows: Rows) -> list[np.ndarray] | None:
        """Ranks for each target rate; None if the search was ended."""
        dim, rates = projections.mean.shape[-1], self._settings.target_rates
        if self._settings.ranks == "uniform":
            return [uniform(rate, dim, self._shape) for rate in rates]
        candidates = math.prod(self._shape)
        lengths = [drops_to(rate, candidates) for rate in rates]
        path = _read_path(self._folder / PATH, candidates)
        if len(path) < max(lengths):
            self._progress.phase("searching for ranks (compiles at first)")
            cost = costs_of(self._model, projections, *self._search_rows(rows))
            drops = self._settings.drops
            for longer in sweeps(cost, candidates, path, max(lengths), drops):
                path = longer
                _write_path(self._folder / PATH, path)
                self._progress.update(f"search · drop {len(path):,}/{max(lengths):,}")
                if len(path) < max(lengths) and self._should_stop():
                    return None
        step = dim // LEVELS
        levels = [levels_after(path[:length], candidates) for length in lengths]
        return [(step * one).astype(np.int32).reshape(self._shape) for one in levels]

    def _search_rows(self, rows: Rows) -> tuple[jax.Array, ...]:
        """The final states of the model as it is, [M, B, T, E], and the rows that they are of."""
        count, devices = self._settings.search_rows, self._mesh.size
        size = min(self._training.batch_size, -(-count // devices) * devices)
        parts = list(in_batches(rows.take(slice(count)), size))
        batches = Rows(*(np.stack([getattr(p, x) for p in parts]) for x in ("tokens", "valid")))
        tokens, valid = self._spread(batches, None, DATA)
        return _plain(self._model, tokens), tokens, valid

    def _spread(self, rows: Rows, *axes: str | None) -> list[jax.Array]:
        return [jax.device_put(x, self._place(*axes)) for x in (rows.tokens, rows.valid)]

    def _place(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec(*axes))


_projected = jax.jit(projected)


@jax.jit
def _compared(model, projections, ranks, tokens, valid) -> Sums:
    hidden = truncated_states(model, projections, ranks, tokens)
    return compared(model, hidden, plain_states(model, tokens), tokens, valid)


@jax.jit
def _plain(model, tokens) -> jax.Array:
    return jax.lax.map(lambda tokens: plain_states(model, tokens), tokens)


def _refuse(values: dict[str, float], step: int) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise NumericalError(
                f"{name} is {value} after {step} steps; the last checkpoint is kept: start again "
                "with a smaller lr_u"
            )


def _read_path(path: pathlib.Path, candidates: int) -> list[int]:
    """What an interrupted search has dropped.

    Raises:
        UsageError: the file is damaged.
    """
    if not path.exists():
        return []
    try:
        drops = json.loads(path.read_bytes())
        if not all(type(one) is int and 0 <= one < candidates for one in drops):
            raise ValueError("no list of drops")
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} cannot be used ({error}): remove it") from error
    return drops


def _write_path(path: pathlib.Path, drops: list[int]) -> None:
    try:
        write_atomically(path, json.dumps(drops).encode())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
