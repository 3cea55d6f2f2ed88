"""The options of ``python -m kvjax.calibrate``."""

import argparse
import contextlib
import dataclasses
from typing import Literal

from kvjax.command.decode_options import DecodeConfig
from kvjax.command.options import make_parser, option
from kvjax.errors import UsageError
from kvjax.thoughts.settings import FitSettings

MAX_NEW_TOKENS = 2048
_DECODING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
_FIT = FitSettings()


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    """What a calibration does; see each option's help."""

    model: str | None = option(
        None, "model directory, GGUF file or hub id (default: the demo model)"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "directory or hub id of another tokenizer")
    dtype: Literal["float32", "bfloat16"] = option("float32", "of the weights and activations")
    prompts: str | None = option(
        None,
        'a file of JSON lines, each {"id": ..., "prompt": ...} or {"id": ..., "messages": [...]}, '
        "to be answered with the full cache; - reads standard input",
        group="prompts",
    )
    texts: str | None = option(
        None,
        'the same with an "answer" in each line, which is read instead of decoded',
        group="prompts",
    )
    limit: int | None = option(None, "take the first N lines only", minimum=1)
    output: str | None = option(None, "file for the calibration", "-o", "--out")
    plot: str | None = option(None, "PNG of the densities; needs matplotlib")
    keep_samples: bool = option(
        False, "leave the samples beside the calibration, for another fit without decoding"
    )
    system_prompt: str | None = option(
        None, "put before prompts that have no system message", blank=True
    )
    chat_template: bool = option(True, "pass prompts through the model's chat template")
    thinking: Literal["on", "off", "auto"] = option("auto", "the chat template's thinking block")
    max_new_tokens: int | None = option(
        None, f"tokens to decode at most (default: {MAX_NEW_TOKENS})", "--max-tokens", minimum=1
    )
    temperature: float | None = option(None, "default: 0, which is greedy", "--temp", minimum=0)
    top_k: int | None = option(None, "sample among the N likeliest tokens", minimum=0)
    top_p: float | None = option(
        None, "sample among the fewest tokens of this mass", minimum=0, exclusive=True, maximum=1
    )
    min_p: float | None = option(
        None, "sample among tokens this many times as likely as the likeliest", minimum=0, maximum=1
    )
    seed: int | None = option(None, "of the samples (default: 0)", minimum=0, maximum=2**32 - 1)
    batch_size: int = option(8, "prompts decoded together", minimum=1)
    layers: int = option(_FIT.layers, "layers to choose at most", minimum=1)
    min_share: float = option(
        _FIT.min_share,
        "share of prompts on which a layer has to show three modes",
        minimum=0,
        exclusive=True,
        maximum=1,
    )
    tie_break: Literal["depth", "first", "last"] = option(
        _FIT.tie_break, "among layers of equal share: the deepest valleys, or by index"
    )
    bandwidth: str = option(
        str(_FIT.bandwidth),
        "of the density: scott, silverman, or a factor on the standard deviation",
        joined=True,
    )
    grid: int = option(_FIT.grid, "points at which the density is taken", minimum=16)
    prominence: float = option(
        _FIT.prominence,
        "how far a mode has to stand out, relative to the highest",
        minimum=0,
        exclusive=True,
        maximum=1,
    )
    min_samples: int = option(_FIT.min_samples, "answers of fewer tokens take no part", minimum=2)
    quiet: bool = option(False, "say only what went wrong, or that no layer is tri-modal")
    verbose: bool = option(False, "show where an error came from")

    def __post_init__(self):
        """Refuse what can be seen to be wrong before anything is read.

        Raises:
            UsageError: options that do not go together.
        """
        if self.system_prompt is not None and not self.chat_template:
            raise UsageError("--system-prompt needs the chat template: drop --no-chat-template")
        given = [name for name in _DECODING if getattr(self, name) is not None]
        if self.texts and given:
            flag = "--" + given[0].replace("_", "-")
            raise UsageError(f"{flag} has no effect with --texts, which decodes nothing: drop it")
        if not self.texts and self.new_tokens < self.min_samples:
            raise UsageError(
                f"--max-new-tokens {self.new_tokens} is below --min-samples {self.min_samples}: "
                "no answer could take part"
            )

    @property
    def new_tokens(self) -> int:
        """Tokens to decode at most, with the default settled."""
        return self.max_new_tokens or MAX_NEW_TOKENS

    def fit_settings(self) -> FitSettings:
        """How thresholds are found.

        Raises:
            UsageError: ``bandwidth`` is neither a rule nor a factor.
        """
        bandwidth: str | float = self.bandwidth
        with contextlib.suppress(ValueError):
            bandwidth = float(bandwidth)
        names = {field.name for field in dataclasses.fields(FitSettings)} - {"bandwidth"}
        try:
            return FitSettings(bandwidth=bandwidth, **{name: getattr(self, name) for name in names})
        except UsageError as error:
            raise UsageError(f"--{error}") from error

    def decoding(self) -> DecodeConfig:
        """How prompts are read and answered, as the decode command has it."""
        return DecodeConfig(
            model=self.model,
            revision=self.revision,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            system_prompt=self.system_prompt,
            chat_template=self.chat_template,
            thinking=self.thinking,
            max_new_tokens=self.new_tokens,
            temperature=self.temperature or 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed or 0,
            batch_size=self.batch_size,
        )


def calibrate_parser() -> argparse.ArgumentParser:
    """Flags of every option, and of what is done with them."""
    parser = make_parser(
        CalibrateConfig,
        prog="python -m kvjax.calibrate",
        description="Find the layers and thresholds by which ThinKV tells a model's thoughts "
        "apart. An interrupted run goes on where it was.",
        epilog="Exit codes: 0 done, also where no layer is tri-modal, 2 usage, input or output, 3 "
        "the model cannot be loaded, 4 does not fit, 5 NaN or infinity, 130 interrupted.",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags win over it")
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file and leave"
    )
    return parser
