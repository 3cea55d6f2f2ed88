"""One run of the train_dynakv command: from its options to the adapter."""

import collections
import contextlib
import dataclasses
import importlib.util
import io
import os
import pathlib
import statistics
import sys
from collections.abc import Iterator

import jax
import numpy as np

import kvjax
from kvjax import loading
from kvjax.command.compile_cache import keep_compiled_programs
from kvjax.command.inputs import model_name
from kvjax.command.interrupt import INTERRUPTED, Interrupts
from kvjax.command.outline import shape_of_model
from kvjax.command.train_dynakv_options import TrainDynaKVConfig, in_flags
from kvjax.dynakv.adapter import load_adapter
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import Spectra, key_width
from kvjax.errors import UsageError
from kvjax.files import write_atomically
from kvjax.report.progress import ProgressLine
from kvjax.report.say import say
from kvjax.train.claim import check_claim
from kvjax.train.dynakv.data import Rows, read_rows, split
from kvjax.train.dynakv.loop import Event, check_fit, check_start, identity_of, train
from kvjax.train.dynakv.metrics import METRICS, PICTURE, draw, read
from kvjax.train.dynakv.sample import sample_rows
from kvjax.train.dynakv.settings import TrainSettings

SELF_DATA = "self_data.npy"
_RECENT = 20  # steps whose median gives the speed
_OFF = 0.1  # a rate this far from its target, relative to it, is worth a line


def run(config: TrainDynaKVConfig, interrupts: Interrupts, config_file: str | None = None) -> int:
    """Train and return the exit code. All that can be refused is refused before weights load.

    Raises:
        KvjaxError: nothing more can be done; checkpoints stay.
    """
    spectral, settings = config.spectral(), config.training()
    folder = _folder(config, config_file)
    keep_compiled_programs()
    shape = shape_of_model(config.decoding())
    path = loading.resolve(shape.source, config.revision)
    shape = dataclasses.replace(shape, fingerprint=loading.read_fingerprint(path))
    with in_flags():
        spectral.check_width(key_width(shape.config), shape.config.num_layers)
        check_fit(shape, settings, jax.device_count())
    start = _start(config, shape, spectral)
    with in_flags():
        check_start(start, settings)
    rows = _read(config, shape, settings, folder)
    with in_flags():
        identity = identity_of(shape, rows, spectral, settings, jax.device_count())
        check_claim(folder, identity, config.resume)
    progress = ProgressLine(sys.stderr, enabled=not config.quiet)
    try:
        progress.phase(f"loading {shape.source}")
        lm = kvjax.load(
            shape.source, dtype=config.dtype, revision=config.revision, tokenizer=config.tokenizer
        )
        interrupts.wait_for_answers()
        if rows is None:
            rows = _sample(config, lm, settings, folder, progress, interrupts)
        if rows is None:
            progress.clear()
            say("kvjax: interrupted before the first step")
            return INTERRUPTED
        with in_flags():
            events = train(
                lm,
                rows,
                spectral,
                settings,
                folder,
                name=model_name(shape.source),
                start=start,
                resume=config.resume,
                should_stop=interrupts.requested,
            )
            return _follow(events, config, settings, folder, progress)
    finally:
        progress.clear()


def _folder(config: TrainDynaKVConfig, config_file: str | None) -> pathlib.Path:
    if config.out is None:
        raise UsageError("no output: name a folder for the adapter with --out")
    if not config.data and config.self_data is None:
        raise UsageError("no data: give --data or --self-data")
    folder = pathlib.Path(config.out)
    named = (*config.data, config.model, config.tokenizer, config.adapter, config_file)
    inputs = [pathlib.Path(name) for name in named if name and os.path.exists(name)]
    if folder.exists():
        if not folder.is_dir():
            raise UsageError(f"--out: {folder} is no folder; name another one")
        if any(one.is_dir() and one.samefile(folder) for one in inputs):
            raise UsageError(f"--out: {folder} is also an input; name another folder")
    return folder


def _start(
    config: TrainDynaKVConfig, shape: loading.LanguageModel, spectral: SpectralSettings
) -> Spectra | None:
    if config.adapter is None:
        return None
    found = load_adapter(config.adapter, shape, flag="--adapter")
    if found.decoder is not None:
        raise UsageError(f"--adapter: {config.adapter} holds a trained model, which cannot go on")
    spectra = found.spectra
    for name, wanted in dataclasses.asdict(spectral).items():
        if (own := getattr(spectra.settings, name)) != wanted:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"--adapter: {config.adapter} was trained with {flag} {own} and not {wanted}: give "
                f"the same"
            )
    return spectra


def _read(
    config: TrainDynaKVConfig,
    shape: loading.LanguageModel,
    settings: TrainSettings,
    folder: pathlib.Path,
) -> Rows | None:
    """Rows of files, or those that an interrupted run has sampled; None if they are to be."""
    if not config.data:
        path = folder / SELF_DATA
        kept = config.resume and path.exists()
        return _sampled_before(config, path, shape, settings) if kept else None
    try:
        with in_flags():
            rows = read_rows(config.data, shape, settings, text_field=config.text_field)
            split(rows, settings)
            return rows
    except UsageError as error:
        raise UsageError(f"--data: {error}") from error


def _sampled_before(
    config: TrainDynaKVConfig,
    path: pathlib.Path,
    shape: loading.LanguageModel,
    settings: TrainSettings,
) -> Rows:
    with in_flags():
        rows = read_rows([str(path)], shape, settings, whole=True)
    if len(rows) != config.self_data:
        raise UsageError(
            f"--self-data: {path.parent} holds a run with {len(rows)} sampled rows and not "
            f"{config.self_data}: give --self-data {len(rows)}, or name another folder"
        )
    return rows


def _sample(
    config: TrainDynaKVConfig,
    lm: loading.LanguageModel,
    settings: TrainSettings,
    folder: pathlib.Path,
    progress: ProgressLine,
    interrupts: Interrupts,
) -> Rows | None:
    """Sampled rows, which are kept for a run that goes on; None if it was interrupted."""
    progress.phase("sampling rows from the model (compiles at first)")
    wanted = config.self_data * settings.seq_len
    rows = sample_rows(
        lm,
        config.self_data,
        settings,
        progress=lambda done: progress.update(f"sampling · token {done:,}/{wanted:,}"),
        should_stop=interrupts.requested,
    )
    if rows is not None:
        content = io.BytesIO()
        np.save(content, rows.tokens)
        _write(folder / SELF_DATA, content.getvalue())
    return rows


def _follow(
    events: Iterator[Event],
    config: TrainDynaKVConfig,
    settings: TrainSettings,
    folder: pathlib.Path,
    progress: ProgressLine,
) -> int:
    """Tell what happens, to the end."""

    def tell(text: str) -> None:
        progress.clear()
        if not config.quiet:
            say(f"kvjax: {text}")

    recent: collections.deque[float] = collections.deque(maxlen=_RECENT)
    for event in events:
        if event.kind == "phase":
            progress.phase(event.phase)
        elif event.kind == "step":
            recent.append(event.values["seconds"])
            progress.update(_step_line(event, settings, statistics.median(recent)))
        elif event.kind == "eval":
            tell(f"step {event.step}: {_evaluation(event.values)}")
        elif event.kind == "interrupted":
            progress.clear()
            say(
                f"kvjax: interrupted after step {event.step} of {settings.steps}; its checkpoint "
                f"is in {folder}, and the same command goes on from there with --resume"
            )
            return INTERRUPTED
        elif event.kind == "done":
            progress.clear()
            _draw(folder, event.adapter.model, config.quiet)
            tell(f"adapter of step {event.step} in {folder}: {_evaluation(event.values)}")
            _warn(event, settings, tell)
    return 0


def _step_line(event: Event, settings: TrainSettings, seconds: float) -> str:
    """What the progress line says of a step."""
    found = event.values
    left = round((settings.steps - event.step) * seconds)
    tokens = settings.rows_a_step * settings.seq_len
    parts = [
        f"step {event.step:,}/{settings.steps:,}",
        f"loss {found['loss']:.4f}",
        f"R soft {found['rate_soft']:.3f} hard {found['rate_hard']:.3f}",
        f"alpha {found['alpha']:.3g}",
        f"{tokens / seconds:,.0f} tok/s",
        f"ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}",
    ]
    return " · ".join(parts)


def _evaluation(found: dict) -> str:
    return (
        f"held-out cross-entropy {found['ce_hard']:.4f} (full cache {found['ce_plain']:.4f}) at a "
        f"rate of {found['rate_hard']:.3f} (keys {found['rate_keys']:.3f}, values "
        f"{found['rate_values']:.3f}, soft {found['rate_soft']:.3f}), condition "
        f"{found['condition']:.1f}"
    )


def _warn(event: Event, settings: TrainSettings, tell) -> None:
    target, found = settings.target_rate, event.values["rate_hard"]
    if target is not None and abs(found - target) > _OFF * target:
        tell(
            f"the rate is {found:.3f} and --target-rate {target}: give more --steps, or a larger "
            "--lr-gate and --lr-bias"
        )
    if event.values["condition"] > 1e3:
        tell("a basis is close to singular (condition above 1,000): lower --lr-u")


def _draw(folder: pathlib.Path, name: str, quiet: bool) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        if not quiet:
            say(f"kvjax: no {PICTURE}, which needs matplotlib: `pip install 'kvjax[plot]'`")
        return
    _write(folder / PICTURE, draw(read(folder / METRICS), f"DynaKV of {name}"))


def _write(path: pathlib.Path, content: bytes) -> None:
    try:
        with contextlib.suppress(FileExistsError):
            path.parent.mkdir(parents=True)
        write_atomically(path, content)
    except OSError as error:
        raise UsageError(f"--out: cannot write {path}: {error.strerror}") from error
