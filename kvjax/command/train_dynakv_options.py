"""The options of ``python -m kvjax.train_dynakv``."""

import argparse
import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Literal

from kvjax.command.decode_options import DecodeConfig
from kvjax.command.options import make_parser, option
from kvjax.dynakv.settings import SpectralSettings
from kvjax.errors import KvjaxError, UsageError
from kvjax.train.dynakv.settings import DEFAULT_ALPHA, TrainSettings

_SPECTRAL, _TRAIN = SpectralSettings(), TrainSettings()


@dataclasses.dataclass(frozen=True)
class TrainDynaKVConfig:
    """What a training does; see each option's help."""

    model: str | None = option(
        None, "model directory, GGUF file or hub id (default: the demo model)"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "directory or hub id of another tokenizer")
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "of the model; bases and gates are float32"
    )
    data: tuple[str, ...] = option(
        (),
        "file to read: UTF-8 text, .jsonl with a text a line, or .npy with token ids [N], or rows "
        "[N, T] padded with -1; may be given several times",
    )
    text_field: str = option("text", "where a line of a .jsonl file has its text")
    self_data: int | None = option(
        None, "sample N rows from the model itself, in the place of --data", minimum=2
    )
    alpha: float | None = option(
        None,
        f"weight of the squared rate in the loss (default: {DEFAULT_ALPHA})",
        group="rate",
        minimum=0,
    )
    target_rate: float | None = option(
        None,
        "steer the weight so that this share of components is stored in the end (ours)",
        group="rate",
        minimum=0,
        exclusive=True,
        maximum=1,
    )
    harden: float = option(
        _TRAIN.harden,
        "share of the run after which the hard mask is read, with the soft one's gradients (ours)",
        minimum=0,
        maximum=1,
    )
    steps: int = option(_TRAIN.steps, "updates; 0 keeps what training would start from", minimum=0)
    seq_len: int = option(_TRAIN.seq_len, "tokens of a row", minimum=2)
    batch_size: int = option(
        _TRAIN.batch_size, "rows read together, spread over all devices", minimum=1
    )
    grad_accum: int = option(_TRAIN.grad_accum, "such batches for each update", minimum=1)
    lr_u: float = option(_TRAIN.lr_u, "peak learning rate of bases", minimum=0, exclusive=True)
    lr_gate: float = option(
        _TRAIN.lr_gate, "peak learning rate of the gates' weights", minimum=0, exclusive=True
    )
    lr_bias: float = option(
        _TRAIN.lr_bias, "peak learning rate of the gates' biases", minimum=0, exclusive=True
    )
    lr_model: float = option(
        _TRAIN.lr_model, "peak learning rate of the model", minimum=0, exclusive=True
    )
    warmup: int = option(
        _TRAIN.warmup, "updates over which learning rates rise, before a cosine to 0", minimum=0
    )
    clip: float = option(_TRAIN.clip, "largest norm of a gradient", minimum=0, exclusive=True)
    eval_every: int = option(_TRAIN.eval_every, "updates between evaluations", minimum=1)
    save_every: int = option(
        _TRAIN.save_every, "updates between checkpoints, each with an evaluation", minimum=1
    )
    eval_rows: int = option(_TRAIN.eval_rows, "rows held out for evaluations", minimum=1)
    calibration_tokens: int = option(
        _TRAIN.calibration_tokens, "tokens that the first bases are fitted to", minimum=1
    )
    keep: Literal["last", "best"] = option(_TRAIN.keep, "which checkpoint becomes the adapter")
    trains: Literal["spectral", "gate", "all"] = option(
        _TRAIN.trains, "bases and gates, gates alone, or the model as well"
    )
    remat: bool = option(_TRAIN.remat, "compute layers twice, to need less memory")
    seed: int = option(
        _TRAIN.seed, "of the order of rows and of --self-data", minimum=0, maximum=2**32 - 1
    )
    adapter: str | None = option(None, "folder of an adapter to start from")
    resume: bool = option(False, "go on from the last checkpoint in --out, if there is one")
    out: str | None = option(None, "folder for adapter, checkpoints and metrics", "-o")
    gate: Literal["token", "layer", "fixed"] = option(
        _SPECTRAL.gate, "ranks by token, one distribution a layer, or fixed (controls)"
    )
    key_rank: int | None = option(None, "rank of keys with --gate fixed", minimum=1)
    value_rank: int | None = option(None, "rank of values with --gate fixed", minimum=1)
    share_ranks: Literal["even", "fisher"] = option(
        _TRAIN.share_ranks, "as given, or the same sum by each layer's Fisher information (Palu)"
    )
    tau: float = option(
        _SPECTRAL.tau, "components with a mask above this are stored", minimum=0, maximum=1
    )
    tilt: float = option(
        _SPECTRAL.tilt, "rise of the gates' first bias; the rate starts at 1 - 1/X", minimum=0
    )
    inverse: Literal["inverse", "free", "orthogonal"] = option(
        _SPECTRAL.inverse, "rebuild by the basis' inverse, a free matrix, or an orthogonal basis"
    )
    centre: Literal["covariance", "moment", "mean"] = option(
        _SPECTRAL.centre, "first basis of the covariance, the second moment, or around the mean"
    )
    keys: Literal["normed", "raw"] = option(
        _SPECTRAL.keys, "compress keys behind or before their norm, if the model has one"
    )
    stored: Literal["plain", "masked"] = option(
        _SPECTRAL.stored, "store components as they are, or times their mask"
    )
    rank_multiple: int = option(
        _SPECTRAL.rank_multiple, "round ranks up to multiples of this", minimum=1
    )
    masks_own: bool = option(_SPECTRAL.masks_own, "a token sees itself compressed as well")
    basis_learns_from_gate: bool = option(
        _SPECTRAL.basis_learns_from_gate, "pass the gates' gradients on to bases"
    )
    quiet: bool = option(False, "say only what went wrong")
    verbose: bool = option(False, "show where an error came from")

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.data and self.self_data is not None:
            raise UsageError("--data and --self-data exclude each other: give one of them")
        if self.gate == "fixed" and self.target_rate is not None:
            raise UsageError("--target-rate has no effect with --gate fixed: drop it")
        if self.gate == "fixed" and self.harden != 1:
            raise UsageError("--harden has no effect with --gate fixed: drop it")
        if self.gate == "fixed" and self.trains == "gate":
            raise UsageError("--trains gate has nothing to train with --gate fixed: drop one")
        if self.gate != "fixed" and self.share_ranks == "fisher":
            raise UsageError("--share-ranks fisher shares out fixed ranks: pass --gate fixed")
        if self.trains == "all" and self.dtype != "float32":
            raise UsageError("--trains all needs --dtype float32, or small updates are lost")

    def spectral(self) -> SpectralSettings:
        """How keys and values are compressed.

        Raises:
            UsageError: values that cannot be.
        """
        with in_flags():
            return SpectralSettings(**self._of(SpectralSettings))

    def training(self) -> TrainSettings:
        """How it is trained."""
        values = self._of(TrainSettings)
        if self.alpha is None and self.target_rate is None:
            values["alpha"] = DEFAULT_ALPHA
        with in_flags():
            return TrainSettings(**values)

    def decoding(self) -> DecodeConfig:
        """Which model, as the decode command has it."""
        return DecodeConfig(
            model=self.model, revision=self.revision, tokenizer=self.tokenizer, dtype=self.dtype
        )

    def _of(self, settings: type) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(settings)}


@contextlib.contextmanager
def in_flags(table: type = TrainDynaKVConfig) -> Iterator[None]:
    """Has errors name a table's settings by their flags."""
    try:
        yield
    except KvjaxError as error:
        raise type(error)(as_flags(str(error), table)) from error


def as_flags(message: str, table: type = TrainDynaKVConfig) -> str:
    """The message with the name of every setting of a table as its flag."""
    names = [field.name for field in dataclasses.fields(table)]
    plain = "|".join(name for name in names if "_" in name)
    message = re.sub(rf"(?<![-\w])({plain})\b", _flag, message)
    return re.sub(rf"^({'|'.join(names)})\b(?! (makes|holds))", _flag, message)


def _flag(match: re.Match) -> str:
    return "--" + match[1].replace("_", "-")


def train_dynakv_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    parser = make_parser(
        TrainDynaKVConfig,
        prog="python -m kvjax.train_dynakv",
        description="Train bases and gates by which DynaKV stores each token's keys and values at "
        "a rank of its own.",
        epilog="Exit codes: 0 done, 2 usage, input or output, 3 the model cannot be loaded, 4 does "
        "not fit, 5 NaN or infinity, 130 interrupted.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags win over it")
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file and leave"
    )
    return parser
