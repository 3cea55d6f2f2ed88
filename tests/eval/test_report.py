"""The page shows every recipe, on a phone too, and needs no other file."""

import base64
import html
import json
import re
import shutil
import subprocess

import pytest

from kvjax.eval import report, tables
from kvjax.eval.page import write_report
from kvjax.eval.summary import summarise

RUN = {"command": "python -m kvjax.eval.x --out y", "commit": "abc1234", "device": "cpu"}
HEAD = {"run": RUN, "commands": [RUN["command"]], "model": "small", "dtype": "bfloat16"}
OWN = {"codec": None, "row_bytes": 1}
NAMES = {
    "full": ("full", None),
    "rkv 1/4": ("rkv", 256),
    "rkv 1/2": ("rkv", 512),
    "<b>&": ("h2o", 64),
}


def answers(task, levels, **given):
    rows = []
    for recipe, (method, budget) in NAMES.items():
        share = recipe.rpartition(" ")[2] if "/" in recipe else None
        for level in levels:
            for number in range(6):
                good = number < {"full": 5, "rkv": 4, "h2o": 2}[method]
                own = {"task": task, "level": level, "id": str(number), "sample": 0}
                own |= {"recipe": recipe, "method": method, "budget": budget, "share": share}
                own |= {"right": good, "finish": "stop", "answer": "1", "generated": 900 + number}
                size = (budget or 1000) * 1000
                own |= {"prompt": 90, "think": 0, "seconds": 3.5, "live_tokens": 5.0}
                own |= {"bytes": {"peak": size, "mean": size / 2, "full_bf16": 10**6}}
                own |= {"ratio": {"peak": 0.5, "time_avg": 0.4, "end": 0.3}}
                rows.append(OWN | own | {"depth": number % 2 / 2})
    return rows


def results() -> dict[str, dict]:
    found = {}
    rows = answers("reasoner", (1000, 2000))
    found["reasoning"] = {"results": summarise(rows, lambda row: row["level"])}
    refused = {"task": "reasoner", "level": "all", "recipe": "tiny", "refused": "too few bytes"}
    found["reasoning"]["results"].append(refused)
    rows = answers("needle", (1024,))
    found["retrieval"] = {
        "results": summarise(rows, lambda row: row["level"]),
        "by_depth": summarise(rows, lambda row: (row["level"], row["depth"])),
    }
    base = {"method": "full", "budget": None, "share": None, "ratio": 1.0}
    base |= {"bytes": {"peak": 5000.0, "full_bf16": 5000.0}, "recipe": "full"}
    rule = {"right": 0.5, "interval": [0.3, 0.7]}
    item = OWN | base | {"task": "arc", "items": 9}
    found["choice"] = {
        "results": [item | dict.fromkeys(("sum", "per_character", "per_token"), rule)]
    }
    text = {"perplexity": 17.25, "interval": [16.0, 18.5], "kl": 0.01, "top1": 0.9}
    text |= {"ratio": {"peak": 1.0}, "nll": 2.8, "windows": 3, "scored": 1536}
    head = {"text": "wiki", "window": 1024, "stride": 512, "scored": 1536}
    found["perplexity"] = head | {"results": [OWN | base | text]}
    return {kind: HEAD | {"kind": kind} | own for kind, own in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    for n, (kind, record) in enumerate(results().items()):
        place = root / "deeper" if n == 1 else root
        place.mkdir(exist_ok=True)
        (place / f"{kind}.json").write_text(json.dumps(record))
    return root


@pytest.fixture(scope="module")
def page(folder):
    return write_report(str(folder), "A & B").read_text()


def test_the_command_says_where_the_page_is(page, folder, capsys):
    assert report.main([str(folder), "--title", "A & B"]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text() == page


def test_the_page_holds_all_and_needs_nothing(page, folder):
    pictures = re.findall(r'<img alt="([^"]+)" src="data:image/png;base64,([^"]+)"', page)
    names = [html.unescape(name) for name, _ in pictures]
    assert names == [
        "reasoner: right answers, % against bytes",
        "reasoner: right answers, % against budget",
        "reasoner: tokens against time to finish",
        "reasoner: right answers, % by level",
        "needle: right answers, % against bytes",
        "needle: right answers, % against budget",
        "needle: tokens against time to finish",
        "arc: right by summed likelihood, % against bytes",
        "wiki: perplexity against bytes",
    ]
    files = sorted(path.read_bytes() for path in folder.glob("report-*.png"))
    assert sorted(base64.b64decode(data) for _, data in pictures) == files and len(files) == 9
    assert not re.search(r'(?:src|href)="(?!data:)|<script|url\(|@import', page)
    assert "<title>A &amp; B</title>" in page and "<b>" not in page and "&lt;b&gt;&amp;" in page
    for text in (
        "66.7 %",
        "Refused: tiny: too few bytes",
        RUN["command"],
        "abc1234",
        "17.250",
        "depth 0.5",
    ):
        assert text in page, text
    assert page.count("<h2>") == 4 and "deeper/retrieval.json" in page


def test_tables_have_a_cell_for_every_heading(page):
    for table in re.findall(r"<table>(.*?)</table>", page, re.S):
        head, *lines = re.findall(r"<tr>(.*?)</tr>", table, re.S)
        assert lines and {line.count("<td>") for line in lines} == {head.count("<th>")}


def test_recipes_of_one_kind_are_a_line():
    record = results()["reasoning"]
    found = tables.points(record)["reasoner"]
    assert [point.series for point in found] == ["full", "rkv", "rkv", "<b>&"]
    assert [point.budget for point in found] == [None, 256, 512, 64]
    curves = tables.curves(record)["reasoner"]
    assert {(point.series, point.x) for point in curves} == {
        (name, level) for name in NAMES for level in (1000, 2000)
    }
    assert not tables.curves(results()["retrieval"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no results"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"kind": "choice", "results": []}', "move it away"),
    ],
)
def test_what_is_no_result_is_told(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "reasoning.json").write_text(content)
    assert report.main([str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert message in said.err and not said.out and not list(tmp_path.glob("report*"))


def test_a_folder_that_is_not_there_is_told(tmp_path, capsys):
    assert report.main([str(tmp_path / "absent")]) == 2
    assert "is no folder" in capsys.readouterr().err


PROBE = """<!DOCTYPE html><iframe id=f width={width} height=900></iframe><script>
const frame = document.getElementById("f");
frame.onload = () => {{
  const page = frame.contentDocument, root = page.documentElement;
  document.title = JSON.stringify({{
    wide: root.scrollWidth - frame.clientWidth,
    images: [...page.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width]),
    text: parseFloat(frame.contentWindow.getComputedStyle(page.body).fontSize),
    heading: page.querySelector("h1").innerText,
    rows: [...page.querySelectorAll("tr")].map(r => r.innerText.trim()).filter(Boolean).length,
    sticky: [...page.querySelectorAll(".scroll")].map(s => {{
      const cell = s.querySelector("td"), before = cell.getBoundingClientRect().left;
      s.scrollLeft = 200;
      return Math.abs(cell.getBoundingClientRect().left - before);
    }}),
  }});
  document.body.innerHTML = "<pre>" + document.title + "</pre>";
}};
frame.srcdoc = {page};
</script>"""


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it(page, tmp_path, width):
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("needs a browser: `apt-get install chromium` gets one")
    probe = tmp_path / "probe.html"
    inside = json.dumps(page).replace("</", "<\\/")
    probe.write_text(PROBE.format(width=width, page=inside))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    flags += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1000", "--dump-dom"]
    shown = subprocess.run(
        [browser, *flags, probe.as_uri()], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    found = json.loads(html.unescape(re.search(r"<pre>(\{.*?\})</pre>", shown, re.S)[1]))
    assert found["wide"] <= 0 and found["heading"] == "A & B" and found["text"] >= 16
    assert len(found["images"]) == 9 and found["rows"] > 20
    for natural, seen in found["images"]:
        assert natural > 600 and 250 < seen <= width
    assert max(found["sticky"]) < 1


def test_levels_of_other_sizes_have_pictures_of_their_own():
    rows = answers("reasoner", (1000, 2000))
    own = [row | {"row_bytes": row["level"] * (row["budget"] or 9)} for row in rows]
    for found, names in ((rows, ["reasoner"]), (own, ["reasoner, 1000", "reasoner, 2000"])):
        drawn = tables.points({"results": summarise(found, lambda row: row["level"])})
        assert list(drawn) == names
        assert all(len(one) == len(NAMES) for one in drawn.values())


def test_many_recipes_can_be_told_apart(tmp_path):
    rows = [
        row | {"recipe": f"{row['recipe']} {n} {row['share']}"}
        for row in answers("reasoner", (1000, 2000))
        if row["share"]
        for n in range(tables.MANY)
    ]
    rows += [row for row in answers("reasoner", (1000, 2000)) if row["method"] == "full"]
    record = HEAD | {"kind": "reasoning", "results": summarise(rows, lambda row: row["level"])}
    drawn = tables.curves(record)
    assert set(drawn) == {"reasoner, 1/4", "reasoner, 1/2"}
    for title, found in drawn.items():
        own = {point.recipe for point in found}
        assert "full" in own and all(name.endswith(title[-3:]) for name in own - {"full"})
    (tmp_path / "reasoning.json").write_text(json.dumps(record))
    page = write_report(str(tmp_path), "many").read_text()
    assert "reasoner: right answers, % by recipe" in page
