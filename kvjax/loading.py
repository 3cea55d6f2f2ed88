"""From a path or a hub id to a model that can decode."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax import tokenizer as tokenizers
from kvjax.errors import ModelError, UsageError
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Decoder
from kvjax.sharding import check_mesh, copies, device_bytes, shards, widened
from kvjax.tokenizer import Tokenizer
from kvjax.weights.assemble import check_tensors, fingerprint, load_decoder
from kvjax.weights.checkpoint import Checkpoint
from kvjax.weights.gguf import GGUFCheckpoint
from kvjax.weights.safetensors import SafetensorsCheckpoint

DTYPES = ("float32", "bfloat16")
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    _CONFIG,
    _GENERATION,
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
_TOKENIZER_FILES = (*_HUB_FILES[4:], _CONFIG)


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """How the model's authors would sample; None where they do not say.

    Attributes:
        temperature: 0 for greedy.
        top_k: how many of the likeliest tokens compete.
        top_p: the share of probability that competes.
        min_p: the least probability that competes, relative to the likeliest token's.
        stop_ids: every token that ends an answer.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    stop_ids: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder with all that belongs to it.

    Attributes:
        source: the path or hub id that was asked for.
        revision: the commit that a hub id led to, None for local files.
        fingerprint: names config and weights, whatever the dtype (see `weights.assemble`).
        mesh: the devices that the weights are spread over, if they are not on one alone.
        copies: devices that hold the same KV head, where there are more of them than heads;
            ``config`` counts each copy as a head.
    """

    config: ModelConfig
    model: Decoder
    tokenizer: Tokenizer | None
    dtype: Any
    defaults: GenerationDefaults
    source: str
    revision: str | None
    fingerprint: str
    mesh: Mesh | None = None
    copies: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of the weights on one device, also of those that are only shapes yet."""
        return device_bytes(self.model, shards(self.mesh))


def load(
    path_or_id: str | os.PathLike,
    *,
    dtype: Any = "float32",
    revision: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    mesh: Mesh | None = None,
) -> LanguageModel:
    """Load a model.

    Args:
        path_or_id: a directory with config.json and safetensors, a GGUF file, or a hub id
            ("owner/name").
        dtype: of the parameters, float32 or bfloat16.
        revision: branch, tag or commit of a hub id.
        tokenizer: a directory, GGUF file or hub id to take the tokenizer from, by default the
            model's own. A directory without one gives a model without a tokenizer.
        mesh: what ``kvjax.device_mesh`` made: weights are spread over its devices, each of which
            gets its part alone, and so is all that is decoded.

    Raises:
        ModelError: the model or its tokenizer cannot be loaded.
        UsageError: an argument cannot be used.
    """
    dtype = _dtype(dtype)
    path = resolve(path_or_id, revision)
    gguf = _open_gguf(path)
    fields = gguf.hf_config() if gguf else _read_config(path)
    config = ModelConfig.from_hf(fields)
    check_mesh(config, shards(mesh))
    own = tokenizer is None
    text = _tokenizer_of(path, gguf) if own else _load_other_tokenizer(tokenizer)
    if text is not None and text.vocab_size > config.vocab_size:
        raise ModelError(
            f"{path if own else tokenizer}: the tokenizer has a token of id {text.vocab_size - 1}, "
            f"and the model's end at {config.vocab_size - 1}; pass the tokenizer that belongs to "
            "the model"
        )
    checkpoint: Checkpoint = gguf or SafetensorsCheckpoint(path)
    return LanguageModel(
        config=widened(config, shards(mesh)),
        model=load_decoder(config, checkpoint, dtype, mesh),
        tokenizer=text,
        dtype=dtype,
        defaults=_defaults(path, fields, text),
        source=str(path_or_id),
        revision=None if _is_local(path_or_id) else path.name,
        fingerprint=fingerprint(config, checkpoint),
        mesh=mesh,
        copies=copies(config, shards(mesh)),
    )


def read_config(path: pathlib.Path) -> ModelConfig:
    """The model's shape, without its weights.

    Raises:
        ModelError: it cannot be read, or a GGUF file's tensors are not of this shape.
    """
    gguf = _open_gguf(path)
    config = ModelConfig.from_hf(gguf.hf_config() if gguf else _read_config(path))
    if gguf:  # a damaged header must not plan for thousands of layers
        check_tensors(config, gguf)
    return config


def read_fingerprint(path: pathlib.Path) -> str:
    """The fingerprint that the loaded model will have; reads a few bytes of each tensor."""
    gguf = _open_gguf(path)
    return fingerprint(read_config(path), gguf or SafetensorsCheckpoint(path))


def read_tokenizer(path: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a directory or GGUF file, None if a directory holds none."""
    return _tokenizer_of(path, _open_gguf(path))


def resolve(
    path_or_id: str | os.PathLike, revision: str | None = None, *, weights: bool = True
) -> pathlib.Path:
    """Where the model's files are, after fetching them if it is a hub id.

    A path that exists never touches the network, and neither does what can only be a path.

    Args:
        path_or_id: as for `load`.
        revision: as for `load`.
        weights: False fetches configuration and tokenizer only.
    """
    name = os.fspath(path_or_id)
    if _is_local(path_or_id):
        if revision is not None:
            raise UsageError(f"revision {revision!r} only applies to hub ids, but {name} is local")
        return pathlib.Path(name).expanduser()
    if not isinstance(path_or_id, str) or _must_be_path(name):
        raise ModelError(f"{name}: no such file or directory (a hub id would be owner/name)")
    return _download(name, revision, _HUB_FILES if weights else _TOKENIZER_FILES)


def _is_local(path_or_id: str | os.PathLike) -> bool:
    try:
        return pathlib.Path(path_or_id).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _must_be_path(name: str) -> bool:
    first = name.partition("/")[0]
    by_suffix = name.endswith((".gguf", ".safetensors", ".bin", ".json"))
    return not _HUB_ID.fullmatch(name) or by_suffix or _is_local(first)


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> pathlib.Path:
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns)
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name}: access is restricted; accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelError(
            f"{name}: the hub has no such model{at}; check the name and the revision, and set "
            "HF_TOKEN if it is private"
        ) from error
    except Exception as error:  # every other way in which a network, a hub or a disk can fail
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{name}: not in the local cache{at} and cannot be fetched ({why}); "
            "check the network, or fetch it elsewhere and pass its directory"
        ) from error
    return pathlib.Path(folder)


def _dtype(dtype: Any) -> Any:
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return jnp.dtype(name)


def _open_gguf(path: pathlib.Path) -> GGUFCheckpoint | None:
    """The checkpoint if the path is a file, None if it is a directory."""
    if path.is_dir():
        return None
    if path.suffix == ".safetensors":
        raise ModelError(f"{path}: a file of weights alone; pass its directory, with {_CONFIG}")
    return GGUFCheckpoint(path)


def _read_config(directory: pathlib.Path) -> dict[str, Any]:
    fields = _read_json(directory / _CONFIG)
    if fields is None:
        raise ModelError(
            f"{directory}: no {_CONFIG}, expected a Hugging Face model directory, a GGUF file or a "
            "hub id (owner/name)"
        )
    return fields


def _tokenizer_of(path: pathlib.Path, gguf: GGUFCheckpoint | None) -> Tokenizer | None:
    if gguf:
        return tokenizers.from_gguf(gguf.source, gguf.metadata)
    return tokenizers.from_directory(path)


def _load_other_tokenizer(path_or_id: str | os.PathLike) -> Tokenizer:
    path = resolve(path_or_id, weights=False)
    text = read_tokenizer(path)
    if text is None:
        raise ModelError(f"{path}: holds no tokenizer, expected tokenizer.json and its companions")
    return text


def _read_json(path: pathlib.Path) -> dict[str, Any] | None:
    """A JSON object, None if there is no such file."""
    try:
        fields = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(fields).__name__}")
    return fields


def _defaults(
    path: pathlib.Path, config: Mapping[str, Any], tokenizer: Tokenizer | None
) -> GenerationDefaults:
    file = path / _GENERATION
    generation = (_read_json(file) if path.is_dir() else None) or {}
    stops = set(tokenizer.stop_ids if tokenizer else ())
    for fields in (generation, config):
        given = fields.get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(stop) is int and abs(stop) < 2**31 for stop in ids):
            raise ModelError(f"{path}: eos_token_id must hold token ids, got {given!r}")
        stops.update(ids)
    if not generation.get("do_sample"):
        return GenerationDefaults(temperature=0.0, stop_ids=tuple(sorted(stops)))
    return GenerationDefaults(
        temperature=_setting(file, generation, "temperature", 0.0, default=1.0),
        top_k=_setting(file, generation, "top_k", 0, kind=int),
        top_p=_setting(file, generation, "top_p", 0.0, 1.0),
        min_p=_setting(file, generation, "min_p", 0.0, 1.0),
        stop_ids=tuple(sorted(stops)),
    )


def _setting(
    file: pathlib.Path,
    fields: Mapping[str, Any],
    name: str,
    low: float,
    high: float = float("inf"),
    *,
    kind: type = float,
    default: Any = None,
) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not low <= value <= high:
        raise ModelError(
            f"{file}: {name} is {value!r}, expected {kind.__name__} from {low} to {high}"
        )
    return kind(value)
