"""Named methods: what of a token is stored, for how long, and in which numbers."""

import dataclasses
import math
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.codecs import kv_codec
from kvjax.compress import Selector
from kvjax.compress.selectors import H2O, RKV, TOVA, Random, SnapKV, Streaming
from kvjax.errors import UsageError

PHASES = ("prompt", "think", "answer")
DECODING_BUDGET = 1024
"""Tokens a KV head of the recipes that evict, unless one is given."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a cache is kept: which parts work on it, and when.

    Attributes:
        name: what ``--method`` calls it.
        page_size: slots a page, a power of two.
        codec: the numbers that stored tokens are kept in, a name of ``kvjax.codecs.kv_codec``;
            None keeps every token as it was made, where it was written.
        layer_codecs: pairs of a layer's index (from the end if negative) or "*", and a codec. The
            first that names a layer wins; ``codec`` is for the layers that none names.
        selector: what decides which tokens stay; None keeps all.
        budget: tokens that a KV head may hold after a selection, recent ones included; or, if it is
            a float of at most 1, their share of the tokens that the row has read.
        sinks: how many of the first tokens stay in any case.
        recent: how many of the last tokens stay in any case.
        protect_prompt: the whole prompt stays.
        every: decode steps between two selections; 0 selects only while the prompt is read.
        compress: in which phases tokens are selected at all.
        skip_layers: layers (from the end if negative) whose tokens all stay.
        positions: "original", or "contiguous": queries see the sinks right before the recent
            tokens, as if nothing had been between them (for ``streaming``).
        when_full: what happens to tokens that find no slot in their class: "end" ends the row as
            ``cache_full``, "evict" makes room by evicting the class's oldest tokens, "next" puts
            them into the next class. The planner gives every class all that it can need, so that
            this is for classes that are smaller.
        window: the last tokens that are kept as they were made.
        tick: decode steps after which the oldest of them are coded and stored.
    """

    name: str
    page_size: int = 64
    codec: str | None = "bf16"
    layer_codecs: tuple[tuple[int | str, str], ...] = ()
    selector: Selector | None = None
    budget: int | float | None = None
    sinks: int = 4
    recent: int = 32
    protect_prompt: bool = False
    every: int = 16
    compress: tuple[Literal["prompt", "think", "answer"], ...] = PHASES
    skip_layers: tuple[int, ...] = ()
    positions: Literal["original", "contiguous"] = "original"
    when_full: Literal["end", "evict", "next"] = "end"
    window: int = 16
    tick: int = 16

    def __post_init__(self):
        """Refuse what cannot work.

        Raises:
            UsageError: naming the field, its value and what would do.
        """
        size = self.page_size
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise UsageError(f"page_size must be a power of two, got {size!r}; 64 is the default")
        for name, least in (("sinks", 0), ("recent", 0), ("every", 0), ("window", 1), ("tick", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(
                    f"{name} must be a whole number of at least {least}, got {value!r}"
                )
        if self.keeps_all:
            return
        codecs = [kv_codec(spec) for spec in (self.codec, *(s for _, s in self.layer_codecs))]
        unknown = set(self.compress) - set(PHASES)
        if unknown:
            raise UsageError(f"compress takes {', '.join(PHASES)}, got {', '.join(unknown)}")
        if self.selector is None:
            return
        if self.every % self.tick:
            raise UsageError(
                f"every {self.every} must be a multiple of the {self.tick} steps after which "
                f"tokens are stored: pass {math.ceil(self.every / self.tick) * self.tick}"
            )
        for codec in codecs:
            if codec.group > 1:
                raise UsageError(
                    f"codec {codec.name} shares scales among tokens, so none can be evicted alone: "
                    f"use it with method uniform, or another codec with {self.name}"
                )
        self._check_budget()

    def _check_budget(self) -> None:
        budget, least = self.budget, self.floor
        if isinstance(budget, float) and 0 < budget <= 1:
            return
        if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
            raise UsageError(
                f"budget must be a number of tokens or a share between 0 and 1, got {budget!r}"
            )
        if budget < least:
            raise UsageError(
                f"budget {budget} is below the {self.sinks} first and the "
                f"{max(self.recent, self.window)} last tokens that stay, and one more: pass {least}"
            )

    @property
    def keeps_all(self) -> bool:
        """Whether every token stays where it was written, as it was made."""
        return self.codec is None

    @property
    def floor(self) -> int:
        """The fewest tokens that can be kept."""
        return self.sinks + max(self.recent, self.window) + 1

    @property
    def needs_mass(self) -> bool:
        return self.selector is not None and self.selector.needs_mass

    @property
    def needs_queries(self) -> int:
        return 0 if self.selector is None else self.selector.needs_queries

    @property
    def spares_prompt(self) -> bool:
        """Whether the prompt's tokens all stay."""
        return self.protect_prompt or "prompt" not in self.compress

    def room(self, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """Tokens that each row may hold, once it has read ``length``."""
        if isinstance(self.budget, int):
            return jnp.full(length.shape, self.budget, jnp.int32)
        share = jnp.ceil(jnp.float32(self.budget) * length.astype(jnp.float32))
        return jnp.maximum(share.astype(jnp.int32), self.floor)

    def most(self, tokens: int) -> int:
        """``room`` of a row of so many tokens, as a number."""
        if self.selector is None or self.budget is None:
            return tokens
        if isinstance(self.budget, int):
            return min(self.budget, tokens)
        return min(max(math.ceil(self.budget * tokens) + 1, self.floor), tokens)


def full(page_size: int = 64) -> Recipe:
    """Keep every token, in the model's own dtype: what every other recipe is compared with."""
    return Recipe("full", page_size, codec=None)


def uniform(codec: str = "int4", **options) -> Recipe:
    """Keep every token in one codec."""
    return Recipe("uniform", codec=codec, **options)


def kivi(codec: str = "kivi2", window: int = 32, **options) -> Recipe:
    """KIVI: asymmetric groups, keys along tokens and values along channels (arXiv 2402.02750).

    Keys and values both leave the recent window a group at a time; KIVI's own values leave it one
    by one, which differs for the few tokens between.

    Args:
        codec: "kivi4", "kivi2", "kivi2-g64" and the like, or a width: "4" or "2".
        window: the last tokens that are kept as they were made.
        **options: fields of ``Recipe``.

    Raises:
        UsageError: any other codec.
    """
    codec = _kivi_codec(codec)
    group = kv_codec(codec).group
    return Recipe("kivi", codec=codec, window=window, tick=options.pop("tick", group), **options)


def streaming(**options) -> Recipe:
    """StreamingLLM: the first tokens and the last ones (arXiv 2309.17453)."""
    return _evicting("streaming", Streaming(), **options)


def random(**options) -> Recipe:
    """Evict uniformly at random: the control that every other selector has to beat."""
    return _evicting("random", Random(), **options)


def h2o(**options) -> Recipe:
    """H2O: tokens that have received the most attention (arXiv 2306.14048)."""
    return _evicting("h2o", H2O(), **options)


def tova(**options) -> Recipe:
    """TOVA: tokens that the last query attends to most (arXiv 2401.06104)."""
    return _evicting("tova", TOVA(), **options)


def snapkv(**options) -> Recipe:
    """SnapKV: select the prompt once, by what its last queries attend to (arXiv 2404.14469)."""
    return _evicting("snapkv", SnapKV(), **{"every": 0} | options)


def snapkv_decode(**options) -> Recipe:
    """SnapKV's scores, also while decoding."""
    return _evicting("snapkv_decode", SnapKV(), **{"every": 128} | options)


def rkv(**options) -> Recipe:
    """R-KV: importance minus redundancy, every 128 steps (arXiv 2505.24133)."""
    return _evicting("rkv", RKV(), **{"every": 128} | options)


METHODS = {
    recipe.__name__: recipe
    for recipe in (full, uniform, kivi, streaming, random, h2o, tova, snapkv, snapkv_decode, rkv)
}
"""Recipes by the name that ``--method`` takes."""

SELECTORS: dict[str, type[Selector]] = {
    "h2o": H2O,
    "random": Random,
    "rkv": RKV,
    "snapkv": SnapKV,
    "streaming": Streaming,
    "tova": TOVA,
}
"""Selectors by the name that ``--selector`` takes."""


def parse(method: str, **given: Any) -> Recipe:
    """A method's recipe, with fields as a command line or a file has them.

    Args:
        method: a name of ``METHODS``.
        **given: fields of ``Recipe``; None is not given. Texts are read for ``codec`` ("k4v2"),
            ``layer_codecs`` ("0:8,*:4"), ``selector`` (a name of ``SELECTORS``), ``budget`` ("256"
            or "0.25"), ``compress`` ("think,answer") and ``skip_layers`` ("0,-1").

    Raises:
        UsageError: beginning with the field that is wrong.
    """
    if method not in METHODS:
        raise UsageError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    fields = {name: value for name, value in given.items() if value is not None}
    for name, read in _READERS.items():
        if isinstance(fields.get(name), str):
            fields[name] = read(fields[name])
    selector = fields.pop("selector", None)
    if method == "full" and (unused := set(fields) - {"page_size"}):
        raise UsageError(f"{min(unused)} has no effect with method full")
    recipe = METHODS[method](**fields)
    if selector is None:
        return recipe
    if recipe.selector is None:
        raise UsageError(f"selector has no effect with method {method}, which evicts nothing")
    return dataclasses.replace(recipe, selector=selector)


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe's fields, ready for JSON."""
    fields = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    fields |= {name: list(value) for name, value in fields.items() if isinstance(value, tuple)}
    fields["layer_codecs"] = [list(pair) for pair in recipe.layer_codecs]
    if recipe.selector is not None:
        parameters = dataclasses.asdict(recipe.selector)
        fields["selector"] = {"name": type(recipe.selector).__name__, **parameters}
    return fields


def _read_budget(text: str) -> int | float:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    raise UsageError(f"budget must be a number of tokens or a share between 0 and 1, got {text!r}")


def _codec(field: str, text: str) -> str:
    try:
        return kv_codec(text.strip()).name
    except UsageError as error:
        raise UsageError(f"{field}: {error}") from error


def _read_layer_codecs(text: str) -> tuple[tuple[int | str, str], ...]:
    pairs = []
    for item in text.split(","):
        layer, colon, codec = (part.strip() for part in item.partition(":"))
        if not colon or not (layer == "*" or _is_whole(layer)):
            raise UsageError(
                f'layer_codecs must be pairs of a layer (or *) and a codec, as in "0:8,*:4", '
                f"got {text!r}"
            )
        pairs.append((layer if layer == "*" else int(layer), _codec("layer_codecs", codec)))
    return tuple(pairs)


def _read_skip_layers(text: str) -> tuple[int, ...]:
    layers = [item.strip() for item in text.split(",")]
    if not all(map(_is_whole, layers)):
        raise UsageError(f'skip_layers must be numbers of layers, as in "0,-1", got {text!r}')
    return tuple(map(int, layers))


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _read_selector(text: str) -> Selector:
    if text not in SELECTORS:
        raise UsageError(f"selector must be one of {', '.join(SELECTORS)}, got {text!r}")
    return SELECTORS[text]()


def _kivi_codec(codec: str) -> str:
    name = kv_codec(codec).name
    name = {"int2": "kivi2", "int4": "kivi4"}.get(name, name)
    if not name.startswith("kivi"):
        raise UsageError(
            f"codec {codec} is not KIVI's: method kivi takes 2, 4, kivi2, kivi4, and kivi2-g64 and "
            "the like; method uniform takes all"
        )
    return name


_READERS = {
    "codec": lambda text: _codec("codec", text),
    "layer_codecs": _read_layer_codecs,
    "selector": _read_selector,
    "budget": _read_budget,
    "compress": lambda text: tuple(item.strip() for item in text.split(",")),
    "skip_layers": _read_skip_layers,
}


def _evicting(name: str, selector: Selector, **options) -> Recipe:
    return Recipe(name, selector=selector, **{"budget": DECODING_BUDGET} | options)
