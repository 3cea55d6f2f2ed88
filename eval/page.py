"""The page of a report: one HTML file that needs no other, and the pictures beside it."""

import base64
import dataclasses
import html
import importlib.util
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from kvjax.command.output import OutputError
from kvjax.errors import UsageError
from kvjax.eval.tables import (
    MANY,
    Table,
    answer_tables,
    choice_tables,
    curves,
    depth_tables,
    perplexity_tables,
    points,
)
from kvjax.files import write_atomically

KINDS = {
    "reasoning": ("Answers", "right answers, %"),
    "retrieval": ("Retrieval", "right answers, %"),
    "choice": ("Multiple choice", "right by summed likelihood, %"),
    "perplexity": ("Perplexity", "perplexity"),
}
"""Names of files of results, less their ending: the heading, and what is drawn."""
_TABLES = {
    "reasoning": answer_tables,
    "retrieval": answer_tables,
    "choice": choice_tables,
    "perplexity": perplexity_tables,
}
_STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; margin: 0 auto;
       max-width: 72rem; padding: 1rem }
h1 { font-size: 1.6rem; line-height: 1.2 } h2 { margin-top: 2.5rem; border-top: 2px solid #1f6f8b }
h3 { margin-bottom: .3rem } p.run { color: #555; margin-top: 0; overflow-wrap: anywhere }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600 }
img { width: 100%; height: auto; max-width: 36rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap }
p.refused { color: #8a1c2c; margin: .3rem 0 }
th { border-bottom: 2px solid #1f6f8b } tr + tr td, tr + tr th { border-top: 1px solid #ddd }
tr > :first-child { text-align: left; position: sticky; left: 0; background: #fff }
summary { font-weight: 600; margin-top: 1rem }
pre { background: #f4f4f2; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere }
@media (max-width: 30rem) { .pictures { grid-template-columns: 1fr } body { padding: .7rem } }
"""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A PNG, its name without ending, and what it shows."""

    name: str
    caption: str
    content: bytes


def write_report(folder: str, title: str) -> pathlib.Path:
    """Write the page and its pictures; returns the page's path.

    Args:
        folder: of results; folders in it are looked through as well.
        title: of the page.

    Raises:
        UsageError: there are no results, they cannot be read, or matplotlib is missing.
        OutputError: the page cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a report needs matplotlib: `pip install 'kvjax[eval]'` brings it")
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise UsageError(f"{folder} is no folder: name the --out of an evaluation")
    records = list(_records(root))
    if not records:
        names = ", ".join(f"{kind}.json" for kind in KINDS)
        raise UsageError(f"{folder} holds no results ({names}): run an evaluation with --out first")
    parts, pictures = [], []
    for path, record in records:
        drawn = list(_pictures(record, len(pictures)))
        pictures += drawn
        parts.append(_section(record, path.relative_to(root), drawn))
    try:
        for picture in pictures:
            write_atomically(root / f"report-{picture.name}.png", picture.content)
        write_atomically(root / "report.html", _page(title, parts).encode())
    except OSError as error:
        raise OutputError(f"cannot write to {folder}: {error.strerror}") from error
    return root / "report.html"


def _records(root: pathlib.Path) -> Iterator[tuple[pathlib.Path, dict[str, Any]]]:
    for kind in KINDS:
        for path in sorted(root.rglob(f"{kind}.json")):
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                whole = record["kind"] == kind and isinstance(record["results"], list)
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UsageError(f"{path} cannot be read: {error}") from error
            if not whole:
                raise UsageError(f"{path} holds no results of kvjax.eval.{kind}: move it away")
            yield path, record


def _pictures(record: dict[str, Any], first: int) -> Iterator[Picture]:
    from kvjax.eval import pictures

    kind = record["kind"]
    what = KINDS[kind][1]
    for task, found in points(record).items():
        yield Picture(
            f"{first}-{kind}-{_slug(task)}-bytes",
            f"{task}: {what} against bytes",
            pictures.against_bytes(found, what),
        )
        if len(found) > MANY:
            caption = f"{task}: {what} by recipe"
            name = f"{first}-{kind}-{_slug(task)}-recipes"
            yield Picture(name, caption, pictures.by_recipe(found, what))
        if content := pictures.against_budget(found, what):
            caption = f"{task}: {what} against budget"
            yield Picture(f"{first}-{kind}-{_slug(task)}-budget", caption, content)
        if content := pictures.tokens_and_time(found):
            caption = f"{task}: tokens against time to finish"
            yield Picture(f"{first}-{kind}-{_slug(task)}-time", caption, content)
    for task, found in curves(record).items():
        yield Picture(
            f"{first}-{kind}-{_slug(task)}-levels",
            f"{task}: {what} by {'length' if kind == 'retrieval' else 'level'}",
            pictures.by_level(found, what),
        )


def _slug(text: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def _section(record: dict[str, Any], path: pathlib.Path, drawn: list[Picture]) -> str:
    run = record["run"]
    heading = ": ".join([KINDS[record["kind"]][0], *path.parent.parts])
    facts = [record["model"], record["dtype"], run["device"], f"commit {run['commit']}", str(path)]
    images = "".join(_figure(picture) for picture in drawn)
    tables = _TABLES[record["kind"]](record) + depth_tables(record)
    commands = "\n".join(record["commands"])
    return (
        f"<h2>{_text(heading)}</h2><p class=run>{_text(' · '.join(facts))}</p>"
        f"<div class=pictures>{images}</div>{''.join(map(_table, tables))}"
        f"<details><summary>Made by</summary><pre>{_text(commands)}</pre></details>"
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.content).decode()
    caption = _text(picture.caption)
    return (
        f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" '
        f'src="data:image/png;base64,{data}"></figure>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.head)
    lines = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in line) + "</tr>"
        for line in table.lines
    )
    notes = "".join(f"<p class=refused>Refused: {_text(note)}</p>" for note in table.notes)
    shown = f"<div class=scroll><table><tr>{head}</tr>{lines}</table></div>" if lines else ""
    return f"<h3>{_text(table.title)}</h3>{shown}{notes}"


def _text(text: str) -> str:
    return html.escape(str(text))


def _page(title: str, parts: list[str]) -> str:
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><h1>{_text(title)}</h1>"
        "<p>Intervals are of 95 %. Lost and won count problems beside the full cache; p is of "
        "McNemar's exact test. Bytes are what a row's pages hold, measured.</p>"
        f"{''.join(parts)}</body></html>\n"
    )
