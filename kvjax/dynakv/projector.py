"""What a recipe knows of an adapter: how it compresses, and not its arrays."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import safetensors

from kvjax.dynakv.adapter import (
    COMMAND,
    MODEL_PREFIX,
    RECORD,
    TENSORS,
    load_adapter,
    read_record,
)
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import Spectra, key_width, with_settings
from kvjax.errors import UsageError
from kvjax.models.config import ModelConfig

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel

BLOCKS = 8
"""Blocks that a latent is cut into, if not told otherwise."""
HEAD_ROOM = 1.25
"""Room for so many times the blocks that were measured when the adapter was trained."""


@dataclasses.dataclass(frozen=True)
class Projector:
    """Keys and values are stored as the first components of latents, a token's rank of each.

    Attributes:
        folder: of the adapter.
        fingerprint: of the model that it was trained for.
        model: the model's name.
        digest: SHA-256 of its arrays.
        settings: how it compresses, with the threshold to be used.
        blocks: latents are cut into so many blocks, and ranks rounded up to whole ones.
        rates: share of its keys' and its values' blocks that room is made for in every layer; one
            pair for all layers, or one each.
    """

    folder: str
    fingerprint: str
    model: str
    digest: str
    settings: SpectralSettings
    blocks: int = BLOCKS
    rates: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike,
        *,
        tau: float | None = None,
        rate: float | None = None,
        blocks: int = BLOCKS,
    ) -> "Projector":
        """Read an adapter's record.

        Args:
            folder: what ``python -m kvjax.train_dynakv`` wrote.
            tau: the threshold of masks, instead of the one that it was trained with.
            rate: share of all blocks to make room for, instead of 1.25 times what was measured
                after training (a fixed rank takes what it takes). A threshold below the trained one
                keeps more than was measured, and has room for everything.
            blocks: see the class.

        Raises:
            UsageError: there is no such adapter, it cannot be decoded with, or a value cannot be;
                begins with the argument.
        """
        try:
            path = pathlib.Path(folder)
            record = read_record(path)
            settings = SpectralSettings(**record["spectral"])
            _check(settings)
            measured = _measured(record["measured"], _layers(path))
        except (TypeError, UsageError) as error:
            raise UsageError(f"adapter: {os.fspath(folder)}: {error}") from error
        trained = settings.tau
        if tau is not None:
            settings = dataclasses.replace(settings, tau=tau)
        if not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1:
            raise UsageError(f"blocks must be a whole number above 0, got {blocks!r}")
        if rate is not None and not (isinstance(rate, float | int) and 0 < rate <= 1):
            raise UsageError(f"rate must be a share above 0 and at most 1, got {rate!r}")
        rates = ((float(rate),) * 2,) if rate is not None else ((1.0, 1.0),)
        if rate is None and measured and settings.tau >= trained:
            rates = tuple(
                tuple(_room(share, settings, blocks) for share in pair) for pair in measured
            )
        own = (record[name] for name in ("fingerprint", "model", "tensors_sha256"))
        return cls(os.fspath(folder), *own, settings, blocks, rates)

    def for_model(self, fingerprint: str, source: str) -> None:
        """Refuse another model than the one that the adapter was trained for.

        Raises:
            UsageError: naming both.
        """
        if self.fingerprint != fingerprint:
            raise UsageError(
                f"adapter: {self.folder}: trained for {self.model} (fingerprint "
                f"{self.fingerprint[:12]}) and not for {source} ({fingerprint[:12]}); train one: "
                f"{COMMAND}"
            )

    def check(self, config: ModelConfig, bits: int) -> None:
        """Refuse a model whose keys cannot be cut so, or cannot be rebuilt block by block.

        Args:
            config: the model's.
            bits: of a stored component.

        Raises:
            UsageError: with what would do.
        """
        width = key_width(config)
        self.settings.check_width(width, config.num_layers)
        if self.settings.keys == "raw" and config.qk_norm:
            raise UsageError(
                "adapter: it compresses keys before their norm (--keys raw), which are rebuilt in "
                f"whole or not at all: train one with --keys normed: {COMMAND}"
            )
        if len(self.rates) not in (1, config.num_layers):
            raise UsageError(
                f"adapter: it has {len(self.rates)} layers, and the model {config.num_layers}"
            )
        if width % self.blocks or (width // self.blocks * bits) % 8:
            raise UsageError(
                f"blocks must divide the {width} components of this model's keys, into whole bytes "
                f"of {bits}-bit codes, got {self.blocks}: {_fitting(width, bits)} would do"
            )

    def in_blocks(self, width: int) -> SpectralSettings:
        """The settings with ranks rounded up to whole blocks."""
        block = width // self.blocks
        multiple = self.settings.rank_multiple
        multiple = multiple if multiple % block == 0 else block
        return dataclasses.replace(self.settings, rank_multiple=multiple)

    def deep_blocks(self, layer: int) -> float:
        """Blocks of a token's keys and values beyond the first of each that room is made for."""
        pair = self.rates[layer if len(self.rates) > 1 else 0]
        return sum(max(share * self.blocks - 1, 0.0) for share in pair)


def _room(share: float, settings: SpectralSettings, blocks: int) -> float:
    """Share of the blocks to make room for, where so many of the components are stored."""
    if settings.gate == "fixed":
        return math.ceil(share * blocks - 1e-6) / blocks
    # A rank ends somewhere in its last block: in the middle, on average.
    return min(HEAD_ROOM * (share + 0.5 / blocks), 1.0)


def read_spectra(projector: Projector, lm: "LanguageModel") -> Spectra:
    """The bases and gates, with ranks as the cache rounds them up.

    Raises:
        UsageError: the adapter is not what it was when the recipe was made, or for another model.
    """
    if read_record(pathlib.Path(projector.folder))["tensors_sha256"] != projector.digest:
        raise UsageError(f"adapter: {projector.folder}: it has changed since it was looked at")
    spectra = load_adapter(projector.folder, lm, flag="adapter").spectra
    return with_settings(spectra, projector.in_blocks(key_width(lm.config)))


def _check(settings: SpectralSettings) -> None:
    if not settings.masks_own:
        raise UsageError(
            "it was trained to see a token's own key and value uncompressed (--no-masks-own), "
            f"which a cache of latents does not hold: train one without that: {COMMAND}"
        )


def _layers(path: pathlib.Path) -> int:
    """How many there are bases for, and for nothing else."""
    try:
        with safetensors.safe_open(path / TENSORS, "numpy") as tensors:
            names = list(tensors.keys())
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"cannot read {TENSORS}: {error}") from error
    if any(name.startswith(MODEL_PREFIX) for name in names):
        raise UsageError(
            "it holds a model that was trained with it (--trains all), and the decoder takes only "
            f"bases and gates: train one with --trains spectral: {COMMAND}"
        )
    return len({name.rpartition(".keys.")[0] for name in names if ".keys." in name})


def _measured(found: Mapping[str, Any], layers: int) -> list[list[float]] | None:
    """The shares of keys and of values that every layer was found to keep, if they are told."""
    rates = found.get("rate_by_layer")
    if rates is None:
        return None
    pairs = rates if isinstance(rates, list) and len(rates) == layers else [None]
    for pair in pairs:
        two = isinstance(pair, list) and len(pair) == 2
        if not two or not all(type(share) in (int, float) and 0 <= share <= 1 for share in pair):
            raise UsageError(
                f"{RECORD}: measured.rate_by_layer must hold two shares from 0 to 1 for each of "
                f"the {layers} layers: it is damaged, copy the folder again"
            )
    return rates


def _fitting(width: int, bits: int) -> int:
    return max(n for n in range(1, BLOCKS + 1) if not width % n and not width // n * bits % 8)
