"""What was trained, as files: ``matryoshka.safetensors`` and, beside it, ``matryoshka.json``."""

import dataclasses
import hashlib
import json
import os
import pathlib
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from jaxtyping import Int

from kvjax.dynakv.adapter import write_pair
from kvjax.errors import UsageError
from kvjax.train.matryoshka.projections import Projections

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

TENSORS, RECORD = "matryoshka.safetensors", "matryoshka.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Point:
    """Ranks for one target rate.

    Attributes:
        target_rate: what was asked for.
        ranks: int32[L, 2, Hkv], of keys (0) and values (1).
        measured: on held-out rows: the rate, and in nats a token the cross-entropy ``ce`` and the
            divergence ``kl`` from the model as it is.
    """

    target_rate: float
    ranks: Int[np.ndarray, "L 2 H"]
    measured: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Matryoshka:
    """Projections of a model and the ranks to use them with.

    Attributes:
        projections: of every head.
        points: ranks for each target rate.
        fingerprint: of the model that they were trained for.
        model: its name, for people.
        training: how they were trained.
    """

    projections: Projections
    points: tuple[Point, ...]
    fingerprint: str
    model: str
    training: dict[str, Any]


def save_matryoshka(found: Matryoshka, folder: pathlib.Path) -> None:
    """Write both files, the record last, since it names the tensors by their content.

    Raises:
        UsageError: they cannot be written.
    """
    record = {
        "format": FORMAT,
        "fingerprint": found.fingerprint,
        "model": found.model,
        "training": found.training,
        "points": [
            dataclasses.asdict(point) | {"ranks": point.ranks.tolist()} for point in found.points
        ],
    }
    tensors = found.projections._asdict()
    write_pair(folder, "kvjax.matryoshka", (TENSORS, tensors), (RECORD, record))


def load_matryoshka(
    folder: str | os.PathLike, lm: "LanguageModel", *, flag: str = "folder"
) -> Matryoshka:
    """Read what `save_matryoshka` wrote.

    Args:
        folder: where it is.
        lm: the model; its weights may be shapes alone.
        flag: what the folder was given as, for messages.

    Raises:
        UsageError: it cannot be read, is damaged, or belongs to another model.
    """
    try:
        return _load(pathlib.Path(folder), lm)
    except UsageError as error:
        raise UsageError(f"{flag}: {os.fspath(folder)}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{flag}: cannot use {os.fspath(folder)}: {error}") from error


def _load(folder: pathlib.Path, lm: "LanguageModel") -> Matryoshka:
    record = json.loads((folder / RECORD).read_bytes())
    if record["format"] != FORMAT:
        raise UsageError(f"{RECORD} is not of format {FORMAT}")
    if record["fingerprint"] != lm.fingerprint:
        raise UsageError(f"trained for {record['model']} and not for this model")
    content = (folder / TENSORS).read_bytes()
    if hashlib.sha256(content).hexdigest() != record["tensors_sha256"]:
        raise UsageError(f"{TENSORS} is damaged: its content is not what {RECORD} says")
    projections = Projections(**safetensors.numpy.load(content))
    heads, dim = (lm.config.num_layers, 2, lm.config.num_kv_heads), lm.config.head_dim
    shapes = Projections((*heads, dim, dim), (*heads, dim))
    for name, value, shape in zip(Projections._fields, projections, shapes, strict=True):
        if value.shape != shape or value.dtype != np.float32 or not np.isfinite(value).all():
            raise UsageError(f"{TENSORS}: {name} must be finite float32 {list(shape)}")
    points = []
    for one in record["points"]:
        ranks = np.asarray(one["ranks"], np.int32)
        if ranks.shape != heads or ranks.min() < 1 or ranks.max() > dim:
            raise UsageError(f"{RECORD}: ranks must be from 1 to {dim}, {list(heads)} of them")
        points.append(Point(one["target_rate"], ranks, one["measured"]))
    facts = (record[name] for name in ("fingerprint", "model", "training"))
    return Matryoshka(Projections(*map(jnp.asarray, projections)), tuple(points), *facts)
