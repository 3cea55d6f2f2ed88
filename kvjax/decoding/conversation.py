"""A row that was decoded and can be gone on from."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from kvjax.cache import KVCache
from kvjax.cache.packed import Packed, pack_row, unpack_row
from kvjax.decoding.chunk import DecodeState
from kvjax.errors import UsageError
from kvjax.loading import LanguageModel
from kvjax.recipes import Recipe, as_dict

_SHOWN = 12  # characters of a fingerprint in a message


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What decoding goes on from: a cache, as it is kept, and the tokens that led to it.

    It is on the host, and stays as it is whatever is decoded from it.

    Attributes:
        tokens: all of them, whoever chose them; the last one is not in the cache yet.
        answered: how many of the last were chosen by the model since it was last given any.
        recipe: how the cache is kept.
        fingerprint: of the model.
        model: what the model was loaded from, for messages.
        dtype: of the model.
        row: what the cache holds.
    """

    tokens: tuple[int, ...]
    answered: int
    recipe: Recipe
    fingerprint: str
    model: str
    dtype: str
    row: Packed = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(
        cls,
        lm: LanguageModel,
        cache: KVCache,
        recipe: Recipe,
        tokens: Sequence[int],
        answered: int,
    ) -> "Conversation":
        """The only row of a cache, which has read all the tokens but those not in it yet."""
        given = tuple(tokens), answered, recipe, lm.fingerprint, lm.source, str(lm.dtype)
        return cls(*given, pack_row(cache, lm.copies))

    @property
    def length(self) -> int:
        """Tokens that the cache has read."""
        return int(self.row["length"])

    @property
    def prompt(self) -> int:
        """Tokens that it began with; what came since is read and kept as an answer is."""
        return int(self.row["prompt"])

    def state(self, lm: LanguageModel, blank: KVCache) -> DecodeState:
        """A state that goes on from here.

        Args:
            lm: the model, on whatever devices.
            blank: an empty cache of one row on them, which has room.
        """
        cache = unpack_row(blank, self.row, self.tokens[:-1], lm.copies)
        token = jnp.asarray(self.tokens[-1:], jnp.int32)
        return DecodeState(cache, token, jnp.ones_like(token), jnp.ones(1, bool))

    def check(self, lm: LanguageModel, recipe: Recipe) -> None:
        """Refuse another model, or another way to keep the cache.

        Raises:
            UsageError: with both.
        """
        check_made_with(made_with(self), lm, recipe)


def made_with(conversation: Conversation) -> dict[str, Any]:
    """What a conversation was made with, ready for JSON."""
    names = ("fingerprint", "model", "dtype")
    facts = {name: getattr(conversation, name) for name in names}
    return facts | {"recipe": recipe_facts(conversation.recipe)}


def check_made_with(facts: Mapping[str, Any], lm: LanguageModel, recipe: Recipe) -> None:
    """Refuse another model, or another way to keep the cache, than a conversation was made with.

    Raises:
        UsageError: with both.
    """
    if facts["fingerprint"] != lm.fingerprint:
        raise UsageError(
            f"cache: it was made with {facts['model']} (fingerprint "
            f"{facts['fingerprint'][:_SHOWN]}) and not with {lm.source} "
            f"({lm.fingerprint[:_SHOWN]}): pass the same model"
        )
    if facts["dtype"] != str(lm.dtype):
        raise UsageError(
            f"cache: it was made with dtype {facts['dtype']} and not {lm.dtype}: pass dtype "
            f"{facts['dtype']}"
        )
    kept, given = facts["recipe"], recipe_facts(recipe)
    # The method first: with another one, much else differs too.
    for name in ("name", *given):
        if name not in kept or kept[name] != given[name]:
            what = "method" if name == "name" else name
            raise UsageError(
                f"cache: it was kept with {what} {kept.get(name)} and not {given[name]}: pass the "
                "same method and options"
            )


def recipe_facts(recipe: Recipe) -> dict[str, Any]:
    """What a recipe does, ready for JSON: an adapter is its arrays, wherever they lie."""
    facts = as_dict(recipe)
    if facts["projector"] is not None:
        del facts["projector"]["folder"], facts["projector"]["model"]
    return facts
