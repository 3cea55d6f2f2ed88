"""A conversation in one safetensors file."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from kvjax.cache import init_cache, plan
from kvjax.cache.checked import check_counters, check_row
from kvjax.cache.packed import COUNTERS, named
from kvjax.decoding.conversation import Conversation, check_made_with, made_with
from kvjax.errors import UsageError
from kvjax.files import write_atomically
from kvjax.loading import LanguageModel
from kvjax.recipes import Recipe, full

FORMAT = "kvjax.cache.1"
_TOKENS = "tokens"
_FIELDS = ("format", "fingerprint", "model", "dtype", "recipe", "answered", "sha256")


def save_cache(conversation: Conversation, path: str | os.PathLike) -> None:
    """Write a conversation to a file, which is there complete or not at all.

    Args:
        conversation: ``Result.cache`` of a run with ``keep_cache``.
        path: of the file; an old one is replaced.

    Raises:
        UsageError: it cannot be written; an old file stays as it was.
    """
    tensors = dict(conversation.row) | {_TOKENS: np.array(conversation.tokens, np.int32)}
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    facts = made_with(conversation)
    metadata = facts | {
        "format": FORMAT,
        "recipe": json.dumps(facts["recipe"]),
        "answered": str(conversation.answered),
    }
    metadata["sha256"] = _digest(tensors, metadata)
    try:
        write_atomically(pathlib.Path(path), safetensors.numpy.save(tensors, metadata))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"keep_cache: cannot write {os.fspath(path)}: {reason}") from error


def load_cache(
    lm: LanguageModel, path: str | os.PathLike, *, recipe: Recipe | None = None
) -> Conversation:
    """Read a conversation that was saved, and see that it can be gone on from.

    Args:
        lm: the model that it was made with; its weights may be shapes alone.
        path: of a file that ``save_cache`` wrote.
        recipe: how the cache is kept, as it was then; ``kvjax.recipes.full()`` if None.

    Raises:
        UsageError: it cannot be read, is damaged, or was made with another model, dtype or recipe.
    """
    recipe = recipe or full()
    with _path_in_errors(path):
        metadata, tensors = _read(pathlib.Path(path))
        facts = _facts(metadata)
        check_made_with(facts, lm, recipe)
        if _digest(tensors, metadata) != facts["sha256"]:
            raise UsageError("it is damaged: its content is not what was written; copy it again")
        found = _conversation(facts, tensors, recipe)
        _check(found, lm)
    return found


def skim_cache(path: str | os.PathLike, *, recipe: Recipe | None = None) -> Conversation:
    """Read of a saved conversation how long it is, and not what its cache holds: to plan with.

    Args:
        path: as for ``load_cache``.
        recipe: as for ``load_cache``; that the conversation was kept so is not looked at.

    Raises:
        UsageError: it cannot be read, or its numbers contradict each other.
    """
    with _path_in_errors(path):
        metadata, tensors = _read(pathlib.Path(path), (_TOKENS, *COUNTERS))
        found = _conversation(_facts(metadata), tensors, recipe or full())
        _check_length(found)
    return found


@contextlib.contextmanager
def _path_in_errors(path: str | os.PathLike) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        reason = str(error).removeprefix("cache: ")
        raise UsageError(f"cache: {os.fspath(path)}: {reason}") from error


def _conversation(facts: Mapping[str, Any], tensors: dict, recipe: Recipe) -> Conversation:
    tokens = tensors.pop(_TOKENS, np.zeros(0, np.int32)).tolist()
    made = {name: facts[name] for name in ("answered", "fingerprint", "model", "dtype")}
    return Conversation(tuple(tokens), recipe=recipe, row=tensors, **made)


def _read(
    path: pathlib.Path, names: Collection[str] | None = None
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """The metadata, and the tensors of these names, or all."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with safe_open(path, framework="np") as file:
            held = sorted(file.keys())
            wanted = [name for name in held if names is None or name in names]
            return file.metadata() or {}, {name: file.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"it cannot be read: {reason}") from error


def _facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The metadata, with its texts read.

    Raises:
        UsageError: they are not those of a saved cache.
    """
    if metadata.get("format") != FORMAT or set(metadata) != set(_FIELDS):
        raise UsageError(f"it is no cache of format {FORMAT}")
    try:
        recipe, answered = json.loads(metadata["recipe"]), int(metadata["answered"])
    except (ValueError, RecursionError) as error:
        raise UsageError(f"its metadata cannot be read: {error}") from error
    if not isinstance(recipe, dict):
        raise UsageError("its metadata has no recipe")
    return dict(metadata) | {"recipe": recipe, "answered": answered}


def _check(conversation: Conversation, lm: LanguageModel) -> None:
    """Refuse what no run of the model can have left.

    Raises:
        UsageError: saying what it is.
    """
    _check_length(conversation)
    row, recipe = conversation.row, conversation.recipe
    count, context = len(conversation.tokens), lm.config.context_length
    if count > context:
        raise UsageError(f"it has {count} tokens, with a context of {context}")
    if not all(0 <= token < lm.config.vocab_size for token in conversation.tokens):
        raise UsageError(f"it has tokens beyond the model's {lm.config.vocab_size}")
    if not 0 <= conversation.answered <= count - conversation.prompt:
        raise UsageError(f"answered is {conversation.answered}, with {count} tokens")
    config = dataclasses.replace(lm.config, num_kv_heads=lm.config.num_kv_heads // lm.copies)
    planned = plan(
        config,
        recipe,
        batch_size=1,
        prompt_tokens=conversation.prompt,
        max_new_tokens=count - conversation.prompt,
        dtype=lm.dtype,
        parameter_bytes=0,
    )
    whole = jax.eval_shape(lambda: named(init_cache(planned.geometry)))
    forgets = recipe.retention is None or recipe.retention.forget
    check_row(row, whole, forgets=forgets)


def _check_length(conversation: Conversation) -> None:
    """Refuse numbers of tokens that contradict each other.

    Raises:
        UsageError: with the numbers.
    """
    check_counters(conversation.row)
    count, length = len(conversation.tokens), conversation.length
    if count != length + 1:
        raise UsageError(f"it has {count} tokens, of which the cache has read {length}")


def _digest(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """SHA-256 of arrays and what they are, and of all else that is said of them."""
    said = {name: text for name, text in metadata.items() if name != "sha256"}
    found = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name, array in sorted(tensors.items()):
        found.update(f"{name} {array.dtype.name} {array.shape} ".encode())
        found.update(np.asarray(array, order="C").reshape(-1).view(np.uint8))
    return found.hexdigest()
