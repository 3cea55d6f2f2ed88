"""English about software from installed Python packages, as a file to train on.

    python -m kvjax.train.documents --characters 16000000 --out documents.jsonl

Takes the docstrings of every module but tests, those of one module being a document, and the
``.md`` and ``.rst`` files. A passage that was there before, or is shorter than ``--shortest``, is
left out. The order is drawn with ``--seed``; the same packages give the same file.
"""

import argparse
import ast
import json
import pathlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator

import numpy as np

from kvjax.command.entry import run_parsed
from kvjax.command.files import check_writable
from kvjax.command.interrupt import Interrupts
from kvjax.errors import UsageError
from kvjax.files import write_atomically
from kvjax.report.say import say

_PAGES = {".md", ".rst"}
_TESTS = {"test", "tests", "testing"}  # they say little, at length
_PARTS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documents(folder: pathlib.Path, shortest: int) -> Iterator[str]:
    """The documents of all files below a folder, by their names' order.

    Args:
        folder: such as ``site-packages``.
        shortest: characters that a passage has at least.
    """
    seen = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix not in {".py", *_PAGES} or _TESTS & set(path.parts) or not path.is_file():
            continue
        fresh = [one for one in passages(path) if len(one) >= shortest and one not in seen]
        seen.update(fresh)
        if fresh:
            yield "\n\n".join(dict.fromkeys(fresh))


def passages(path: pathlib.Path) -> list[str]:
    """The whole text of a page, or the docstrings of a module; none of what cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in _PAGES:
            return [text.strip()]
        with warnings.catch_warnings(action="ignore"):  # of others' escapes in their strings
            nodes = ast.walk(ast.parse(text))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return []
    found = (ast.get_docstring(node) for node in nodes if isinstance(node, _PARTS))
    return [one for one in found if one]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvjax.train.documents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON lines with a text")
    parser.add_argument("--characters", type=int, required=True, help="of all text, at most")
    parser.add_argument("--shortest", type=int, default=300, help="characters of a passage")
    parser.add_argument("--seed", type=int, default=0, help="of the documents' order")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path(sysconfig.get_path("purelib")),
        help="where to look (default: this Python's packages)",
    )
    parser.add_argument("--verbose", action="store_true", help="show where an error came from")
    return parser.parse_args(argv)


def run(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Write the file and return the exit code.

    Raises:
        UsageError: there is no document, or the file cannot be written.
    """
    del interrupts  # there is nothing to keep before the end
    if args.characters < 1:
        raise UsageError(f"--characters must be at least 1, got {args.characters}")
    if not args.folder.is_dir():
        raise UsageError(f"--folder: {args.folder} is no folder: name one that has packages")
    check_writable(str(args.out), "--out")
    found = list(documents(args.folder, args.shortest))
    if not found:
        raise UsageError(
            f"--folder: {args.folder} holds no passage of {args.shortest} characters: name another "
            "one, or a smaller --shortest"
        )
    order = np.random.default_rng(args.seed).permutation(len(found))
    lines, left = [], args.characters
    for index in order:
        text = found[index][:left]
        left -= len(text)
        lines.append(json.dumps({"text": text}))
        if not left:
            break
    try:
        write_atomically(args.out, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise UsageError(f"--out: cannot write {args.out}: {error.strerror}") from error
    say(f"kvjax: {len(lines):,} documents, {args.characters - left:,} characters in {args.out}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    return run_parsed(parse, argv, run)


if __name__ == "__main__":
    sys.exit(main())
