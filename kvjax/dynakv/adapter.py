"""The trained spectra as files: ``adapter.safetensors`` and, beside it, ``adapter.json``."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import Spectra, blank
from kvjax.errors import UsageError
from kvjax.files import write_atomically
from kvjax.models.decoder import Decoder

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

TENSORS, RECORD = "adapter.safetensors", "adapter.json"
COMMAND = "python -m kvjax.train_dynakv"
FORMAT = 1
"""Of the record; another number is refused."""
LARGEST = 1 << 24
"""Bytes of a record that can still be one."""
_FIELDS = ("format", "fingerprint", "model", "spectral", "training", "measured", "tensors_sha256")
MODEL_PREFIX = "model."
"""Before the names of the model's own tensors."""
_SHOWN = 12  # characters of a fingerprint in a message


@dataclasses.dataclass(frozen=True)
class Adapter:
    """What makes a model's keys and values compressible.

    Attributes:
        spectra: the bases and gates.
        fingerprint: of the model that they were trained for.
        model: its name, for people.
        training: how they were trained.
        measured: what the trained model does on held-out text.
        decoder: the model, where it was trained as well; None where its own weights serve.
    """

    spectra: Spectra
    fingerprint: str
    model: str
    training: dict[str, Any]
    measured: dict[str, Any]
    decoder: Decoder | None = None


def save_adapter(adapter: Adapter, folder: str | os.PathLike) -> None:
    """Write both files, the record last, since it names the tensors by their content.

    Raises:
        UsageError: they cannot be written.
    """
    record = {
        "format": FORMAT,
        "fingerprint": adapter.fingerprint,
        "model": adapter.model,
        "spectral": dataclasses.asdict(adapter.spectra.settings),
        "training": adapter.training,
        "measured": adapter.measured,
    }
    write_pair(pathlib.Path(folder), "kvjax.dynakv", (TENSORS, _tensors(adapter)), (RECORD, record))


def write_pair(
    folder: pathlib.Path,
    kind: str,
    tensors: tuple[str, Mapping[str, Any]],
    record: tuple[str, dict[str, Any]],
) -> None:
    """Write tensors and then the record that names them by their content.

    Args:
        folder: is made if it is not there.
        kind: what the tensors' file says that it is.
        tensors: name of their file, and arrays by name.
        record: name of its file, and what it says beside ``tensors_sha256``.

    Raises:
        UsageError: they cannot be written.
    """
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors[1].items()}
    content = safetensors.numpy.save(arrays, metadata={"format": kind})
    said = record[1] | {"tensors_sha256": hashlib.sha256(content).hexdigest()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / tensors[0], content)
        write_atomically(folder / record[0], f"{json.dumps(said, indent=1)}\n".encode())
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from error


def load_adapter(
    folder: str | os.PathLike, lm: "LanguageModel", *, flag: str = "adapter"
) -> Adapter:
    """Read an adapter for a model.

    Args:
        folder: what `save_adapter` wrote.
        lm: the model; its weights may be shapes alone.
        flag: what the folder was given as, for messages.

    Raises:
        UsageError: it cannot be read, is damaged, or belongs to another model.
    """
    try:
        return _load(pathlib.Path(folder), lm)
    except UsageError as error:
        raise UsageError(f"{flag}: {os.fspath(folder)}: {error}") from error


def arrays(module: nnx.Module) -> dict[str, np.ndarray]:
    """Every array by its name, such as ``layers.3.keys.u``."""
    return {name: np.asarray(leaf[...]) for name, leaf in _places(nnx.state(module)).items()}


def _places(state: nnx.State) -> dict[str, nnx.Variable]:
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def _tensors(adapter: Adapter) -> dict[str, np.ndarray]:
    """What is stored: the arrays of spectra, and those of the model if it was trained."""
    model = {} if adapter.decoder is None else arrays(adapter.decoder)
    return arrays(adapter.spectra) | {MODEL_PREFIX + name: value for name, value in model.items()}


def _load(folder: pathlib.Path, lm: "LanguageModel") -> Adapter:
    record = read_record(folder)
    if record["fingerprint"] != lm.fingerprint:
        raise UsageError(
            f"trained for {record['model']} (fingerprint {record['fingerprint'][:_SHOWN]}) and not "
            f"for this model ({lm.fingerprint[:_SHOWN]}); train one: {COMMAND}"
        )
    content = _read_bytes(folder / TENSORS)
    if hashlib.sha256(content).hexdigest() != record["tensors_sha256"]:
        raise UsageError(
            f"{TENSORS} is damaged: its content is not what {RECORD} says; copy the folder again"
        )
    try:
        spectra = blank(lm.config, SpectralSettings(**record["spectral"]))
        stored = safetensors.numpy.load(content)
    except (TypeError, UsageError, ValueError, safetensors.SafetensorError) as error:
        raise UsageError(f"not usable with this version: {error}") from error
    own = {name: value for name, value in stored.items() if not name.startswith(MODEL_PREFIX)}
    _fill(spectra, own)
    decoder = None
    if len(own) < len(stored):
        decoder = nnx.clone(lm.model)
        names = stored.keys() - own.keys()
        _fill(decoder, {name.removeprefix(MODEL_PREFIX): stored[name] for name in names})
    facts = (record[name] for name in ("fingerprint", "model", "training", "measured"))
    return Adapter(spectra, *facts, decoder=decoder)


def _read_bytes(path: pathlib.Path, limit: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {path.name}: {reason}") from error


def read_record(folder: pathlib.Path) -> dict[str, Any]:
    """What an adapter's record says.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    content = _read_bytes(folder / RECORD, LARGEST)
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{RECORD} is not readable as JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UsageError(f"{RECORD} is no adapter of format {FORMAT}")
    if wrong := sorted(set(_FIELDS) ^ record.keys()):
        what = "missing" if wrong[0] in _FIELDS else "unknown"
        raise UsageError(f"{RECORD}: {wrong[0]} is {what}")
    texts = dict.fromkeys(("fingerprint", "model", "tensors_sha256"), str)
    kinds = texts | {"spectral": dict, "measured": dict}
    for name, kind in kinds.items():
        if not isinstance(record[name], kind):
            raise UsageError(f"{RECORD}: {name} must be a {kind.__name__}, got {record[name]!r}")
    return record


def _fill(module: nnx.Module, stored: dict[str, np.ndarray]) -> None:
    """Put stored arrays in their places."""
    state = nnx.state(module)
    places = _places(state)
    if wrong := sorted(places.keys() ^ stored.keys()):
        raise UsageError(f"{TENSORS}: {wrong[0]} is {'missing' if wrong[0] in places else 'extra'}")
    for name, place in places.items():
        value = stored[name]
        if value.shape != place.shape or value.dtype != np.float32:
            raise UsageError(
                f"{TENSORS}: {name} must be float32 {list(place.shape)}, got {value.dtype} "
                f"{list(value.shape)}"
            )
        if not np.isfinite(value).all():
            raise UsageError(f"{TENSORS}: {name} is not finite")
        place.set_value(jnp.asarray(value, place.dtype))
    nnx.update(module, state)
