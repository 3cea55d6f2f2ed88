"""The loop: steps, evaluations and checkpoints, from the first basis to the adapter."""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from kvjax.dynakv.adapter import Adapter, save_adapter
from kvjax.dynakv.pca import spectra_of
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import Spectra
from kvjax.errors import CapacityError, NumericalError, UsageError
from kvjax.train.checkpoints import Checkpoints
from kvjax.train.claim import claim
from kvjax.train.dynakv.alpha import AlphaControl
from kvjax.train.dynakv.data import Rows, batch_of, in_batches, split
from kvjax.train.dynakv.evaluate import evaluate, plain_nats, score
from kvjax.train.dynakv.fisher import fisher_ranks
from kvjax.train.dynakv.metrics import METRICS, Metrics
from kvjax.train.dynakv.settings import TrainSettings
from kvjax.train.dynakv.state import Trainer, TrainState

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        kind: a "phase" begins, a "step" is done, an "eval" or a "save"; "done" or "interrupted".
        step: updates so far.
        values: of a step or an evaluation, its numbers.
        phase: which one begins.
        adapter: with "done", what was trained.
    """

    kind: Literal["phase", "step", "eval", "save", "done", "interrupted"]
    step: int = 0
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    phase: str = ""
    adapter: Adapter | None = None


def train(
    lm: "LanguageModel",
    rows: Rows,
    spectral: SpectralSettings,
    settings: TrainSettings,
    folder: str | pathlib.Path,
    *,
    name: str = "",
    start: Spectra | None = None,
    resume: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
    devices: list[jax.Device] | None = None,
) -> Iterator[Event]:
    """Train bases and gates for a model, telling what happens as it happens.

    Args:
        lm: what ``kvjax.load`` returned.
        rows: what it reads; the last rows are held out.
        spectral: how keys and values are compressed.
        settings: how it is trained.
        folder: for checkpoints, metrics and, in the end, the adapter.
        name: of the model, for people.
        start: spectra to start from, in the place of principal components.
        resume: go on from the folder's last checkpoint, if it has one.
        should_stop: asked after every step; True ends the run with a checkpoint.
        devices: over which batches are spread; all of them if None.

    Raises:
        KvjaxError: the settings do not fit the model, the data or what the folder holds, or a loss
            is not finite; checkpoints stay.
    """
    devices = devices or jax.devices()
    check_fit(lm, settings, len(devices))
    check_start(start, settings)
    training, held = split(rows, settings)
    folder = pathlib.Path(folder)
    identity = identity_of(lm, rows, spectral, settings, len(devices))
    claim(folder, identity, resume)
    control = AlphaControl(settings.alpha, settings.target_rate, settings.steps)
    if start is None:
        if settings.share_ranks == "fisher":
            yield Event("phase", phase="sharing out ranks")
            spectral = fisher_ranks(lm.model, calibration(training, settings), spectral)
        yield Event("phase", phase="finding the first bases")
        start = spectra_of(lm.model, calibration(training, settings), spectral)
    trainer, state = Trainer.start(lm.model, start, settings, control.start(), devices)
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        first = checkpoints.last or 0
        if checkpoints.last is not None:
            state = checkpoints.load(first, state)
        loop = _Loop(lm, trainer, control, held, checkpoints, folder)
        state = yield from loop.run(state, training, first, should_stop)
        if state is None:
            return
        chosen = checkpoints.best if settings.keep == "best" else settings.steps
        if chosen != settings.steps:
            state = checkpoints.load(chosen, state)
        trained = trainer.trained(state)
        adapter = Adapter(
            spectra=trained.spectra,
            decoder=trained.model if settings.trains == "all" else None,
            fingerprint=lm.fingerprint,
            model=name or lm.source,
            training={"step": chosen, "data": identity["data"], "tokens": loop.tokens(chosen)}
            | dataclasses.asdict(settings),
            measured=loop.measured(state, chosen),
        )
    save_adapter(adapter, folder)
    yield Event("done", step=chosen, values=adapter.measured, adapter=adapter)


def identity_of(
    lm: "LanguageModel",
    rows: Rows | None,
    spectral: SpectralSettings,
    settings: TrainSettings,
    devices: int,
) -> dict[str, Any]:
    """What makes a run what it is: all of it, or all but the rows if they are still to come."""
    known = {
        "fingerprint": lm.fingerprint,
        "dtype": str(lm.dtype),
        "devices": devices,
        "spectral": dataclasses.asdict(spectral),
        "training": dataclasses.asdict(settings),
    }
    return known if rows is None else known | {"data": rows.digest()}


def check_fit(lm: "LanguageModel", settings: TrainSettings, devices: int) -> None:
    """Refuse what can be seen not to fit before weights are there.

    Raises:
        UsageError: batches cannot be spread over the devices, or weights cannot be trained.
        CapacityError: rows are longer than the model's context.
    """
    if settings.seq_len > lm.config.context_length:
        raise CapacityError(
            f"seq_len {settings.seq_len} exceeds the model's context of {lm.config.context_length}"
        )
    if settings.batch_size % devices:
        raise UsageError(
            f"batch_size {settings.batch_size} must be a multiple of the {devices} devices that "
            "its rows are spread over"
        )
    if settings.trains == "all" and lm.dtype != np.float32:
        raise UsageError("trains all needs a float32 model, or small updates are lost")


def check_start(start: Spectra | None, settings: TrainSettings) -> None:
    """Refuse settings of the first ranks where those are given.

    Raises:
        UsageError: ranks were to be shared out.
    """
    if start is not None and settings.share_ranks != "even":
        raise UsageError(
            f"share_ranks {settings.share_ranks} has no effect where an adapter is given to start "
            "from, whose ranks stay as they are: drop one of the two"
        )


class _Loop:
    """The steps of one run."""

    def __init__(
        self,
        lm: "LanguageModel",
        trainer: Trainer,
        control: AlphaControl,
        held: Rows,
        checkpoints: Checkpoints,
        folder: pathlib.Path,
    ):
        self._lm, self._trainer, self._control = lm, trainer, control
        self._held, self._checkpoints = held, checkpoints
        self._settings = trainer.settings
        self._metrics = Metrics(folder / METRICS, checkpoints.last)
        self._plain: float | None = None
        self._latest: tuple[int, dict[str, Any]] = (-1, {})

    def tokens(self, step: int) -> int:
        return step * self._settings.rows_a_step * self._settings.seq_len

    def measured(self, state: TrainState, step: int) -> dict[str, Any]:
        """The evaluation of a state, made at most once."""
        if self._latest[0] != step:
            if self._plain is None:
                self._plain = plain_nats(self._trainer, self._lm.model, self._held)
            found = {"ce_plain": self._plain} | evaluate(self._trainer, state, self._held)
            self._latest = (step, found)
        return self._latest[1]

    def run(
        self, state: TrainState, rows: Rows, first: int, should_stop: Callable[[], bool]
    ) -> Iterator[Event]:
        """All steps from ``first`` on; returns the last state, or None if it was interrupted."""
        settings, step = self._settings, first
        if self._checkpoints.last is None:
            yield from self._look(state, 0)
            yield from self._save(state, 0)
        yield Event("phase", step=step, phase="compiling the step")
        while step < settings.steps:
            if should_stop():
                yield from self._save(state, step)
                yield Event("interrupted", step=step)
                return None
            state, values = self._step(state, rows, step)
            step += 1
            self._metrics.add("step", step, values)
            yield Event("step", step=step, values=values)
            saves = step % settings.save_every == 0 or step == settings.steps
            if saves or step % settings.eval_every == 0:
                yield from self._look(state, step)
            if saves:
                yield from self._save(state, step)
        return state

    def _step(
        self, state: TrainState, rows: Rows, step: int
    ) -> tuple[TrainState, dict[str, float]]:
        batch, began = batch_of(rows, step, self._settings), time.perf_counter()
        alpha = float(state.control[1])
        sharp = step >= self._settings.harden * self._settings.steps
        state, found = self._trainer.update(state, batch.tokens, batch.valid, sharp)
        found = jax.device_get(found)
        sums = found["sums"]
        values = {
            "loss": float(found["loss"]),
            "ce": float(sums.nats / sums.predicted),
            "rate_soft": float(sums.soft.mean() / sums.tokens),
            "rate_hard": float(sums.hard.mean() / sums.tokens),
            "alpha": alpha,
            "gradient_norm": float(found["gradient_norm"]),
        }
        if not all(math.isfinite(value) for value in values.values()):
            self._refuse(step, values)
        control = self._control.update(state.control, step, values["rate_hard"])
        seconds = time.perf_counter() - began
        return state._replace(control=control), values | {"seconds": seconds}

    def _refuse(self, step: int, values: dict[str, float]) -> None:
        broken = next(name for name, value in values.items() if not math.isfinite(value))
        raise NumericalError(
            f"{broken} is {values[broken]} in step {step + 1}; the checkpoint of step "
            f"{self._checkpoints.last} is kept: start again with smaller learning rates"
        )

    def _look(self, state: TrainState, step: int) -> Iterator[Event]:
        yield Event("phase", step=step, phase="evaluating")
        found = self.measured(state, step)
        if not math.isfinite(found["ce_hard"]) or not math.isfinite(found["condition"]):
            self._refuse(step - 1, {k: found[k] for k in ("ce_hard", "condition")})
        self._metrics.add("eval", step, found)
        yield Event("eval", step=step, values=found)

    def _save(self, state: TrainState, step: int) -> Iterator[Event]:
        if step == self._checkpoints.last:
            return
        self._checkpoints.save(step, state, score(self.measured(state, step), self._settings))
        yield Event("save", step=step)


def calibration(rows: Rows, settings: TrainSettings) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of tokens that first bases are fitted to, and which of them are no padding."""
    count = min(len(rows), -(-settings.calibration_tokens // settings.seq_len))
    for part in in_batches(rows.take(slice(count)), min(count, settings.batch_size)):
        yield part.tokens, part.valid
