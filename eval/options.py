"""What all evaluations are given: a model, recipes to compare, and a folder for what is found."""

import argparse
import dataclasses
import pathlib
from typing import Literal

from kvjax.command.decode_options import DecodeConfig
from kvjax.command.options import make_parser, option
from kvjax.errors import UsageError

EXITS = (
    "Exit codes: 0 done, 2 usage, input or output, 3 the model cannot be loaded, 4 does not fit, "
    "5 NaN or infinity, 6 some rows failed or some recipes could not run, 130 interrupted. The "
    "same command goes on where it ended."
)


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Options of every evaluation; see each one's help."""

    model: str | None = option(
        None, "model directory, GGUF file or hub id (default: the demo model)"
    )
    revision: str | None = option(None, "branch, tag or commit of a hub id")
    tokenizer: str | None = option(None, "directory or hub id of another tokenizer")
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "of the weights and activations")
    recipes: str | None = option(
        None,
        "YAML file with a list of recipes: a name, method and other cache flags of the decode "
        "command, or the share of a bare bf16 cache's bytes (default: the full cache alone)",
    )
    only: str | None = option(
        None, "regular expression of the names of the recipes that take part (default: all)"
    )
    out: str | None = option(None, "folder for rows and results; a run goes on there", "-o")
    batch_size: int = option(8, "rows read or decoded together", minimum=1)
    seed: int = option(0, "of samples and of random eviction", minimum=0, maximum=2**31 - 1)
    commit: str | None = option(None, "of the code, where this runs outside a checkout")
    quiet: bool = option(False, "no progress line")
    verbose: bool = option(False, "show where an error came from")

    def decoding(self) -> DecodeConfig:
        """What the decode command has of these options as well."""
        shared = {field.name for field in dataclasses.fields(DecodeConfig)}
        mine = {field.name for field in dataclasses.fields(self)}
        return DecodeConfig(**{name: getattr(self, name) for name in shared & mine})

    def folder(self) -> pathlib.Path:
        """Where results go.

        Raises:
            UsageError: none was named, or it cannot be made.
        """
        if self.out is None:
            raise UsageError("no output: name a folder for rows and results with --out")
        path = pathlib.Path(self.out)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out: cannot make {path}: {error.strerror}") from error
        return path


def eval_parser(table: type[EvalConfig], name: str, description: str) -> argparse.ArgumentParser:
    """Flags of every option of an evaluation, and of what is done with them."""
    parser = make_parser(
        table, prog=f"python -m kvjax.eval.{name}", description=description, epilog=EXITS
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags win over it")
    parser.add_argument(
        "--print-config", action="store_true", help="print the options as such a file and leave"
    )
    return parser
