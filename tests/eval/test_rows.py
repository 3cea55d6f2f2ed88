"""Rows that were finished stay, whatever ends a run."""

import errno
import json
import os

import pytest

from kvjax.command.output import OutputError
from kvjax.errors import UsageError
from kvjax.eval.rows import GatheredRows, Rows, write_results

PLACE = ("id", "sample")


def opened(path, count=0):
    rows = Rows(path, PLACE)
    for index in range(count):
        rows.add({"key": f"k{index}", "id": str(index), "sample": 0, "text": "né\n"})
    return rows


def test_rows_are_there_for_the_next_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    opened(path, 2).close()
    rows = opened(path)
    assert rows.has("k1", id="1", sample=0) and not rows.has("k1", id="1", sample=1)
    assert [row["id"] for row in rows.rows] == ["0", "1"]
    rows.close()


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_row_that_was_cut_off_is_computed_again_and_no_other(tmp_path, cut):
    path = tmp_path / "rows.jsonl"
    opened(path, 3).close()
    path.write_bytes(path.read_bytes()[:-cut])
    rows = opened(path)
    assert [row["id"] for row in rows.rows] == ["0", "1"]
    rows.add({"key": "k2", "id": "2", "sample": 0})
    rows.close()
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["0", "1", "2"]


def test_a_file_that_holds_less_than_a_line_is_begun_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"key": "k0", "id"')
    rows = opened(path, 1)
    rows.close()
    assert len(path.read_text().splitlines()) == 1


def test_rows_of_other_settings_are_refused(tmp_path):
    rows = opened(tmp_path / "rows.jsonl", 1)
    with pytest.raises(UsageError, match=r"id 0, sample 0.*another folder"):
        rows.has("other", id="0", sample=0)
    rows.close()


@pytest.mark.parametrize("line", ["{", "3", '{"id": "0"}', "[" * 100_000])
def test_damage_is_told(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    opened(path, 1).close()
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(UsageError, match=r"line 2 of .* is damaged"):
        opened(path)


def test_one_process_writes_at_a_time(tmp_path):
    rows = opened(tmp_path / "rows.jsonl")
    with pytest.raises(UsageError, match="another process"):
        opened(tmp_path / "rows.jsonl")
    rows.close()


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(UsageError, match="cannot write"):
        opened(tmp_path / "absent" / "rows.jsonl")


def test_a_full_disk_leaves_whole_rows(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    rows = opened(path, 2)
    before = path.read_bytes()

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, content):
            if len(content) < 40:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content[:20])

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr(rows, "_file", Full(rows._file))
    with pytest.raises(OutputError, match="No space left"):
        rows.add({"key": "k9", "id": "9", "sample": 0, "text": "x" * 40})
    rows.close()
    assert path.read_bytes() == before


def test_results_keep_the_commands_that_led_to_them(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    for words in (["a", "--x"], ["a", "--y"], ["a", "--x"]):
        monkeypatch.setattr("sys.argv", words)
        write_results(path, {"results": []}, "here")
    found = json.loads(path.read_text())
    assert [command.rpartition(" ")[2] for command in found["commands"]] == ["--x", "--y"]
    assert found["run"]["commit"] == "here" and found["run"]["device"]


def test_rows_of_several_folders_are_read_together(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        opened(tmp_path / name / "rows.jsonl", 2).close()
    with open(tmp_path / "a" / "rows.jsonl", "a") as file:
        file.write('{"key": "k2", "id": "2", "sample": 0}\n{"key": "cut off"')
    rows = GatheredRows(tmp_path, "rows.jsonl", PLACE)
    assert [row["id"] for row in rows.rows] == ["0", "1", "2"] and rows.has("k2", id="2", sample=0)
    own = r"^--gather: .*a/rows\.jsonl has the row of id 2, sample 0"
    with pytest.raises(UsageError, match=own):  # of a run with other settings
        rows.has("other", id="2", sample=0)
    with open(tmp_path / "b" / "rows.jsonl", "a") as file:
        file.write('{"key": "other", "id": "2", "sample": 0}\n')
    both = r"^--gather: .*a/rows\.jsonl and .*b/rows\.jsonl each have the row of id 2, sample 0"
    with pytest.raises(UsageError, match=both):
        GatheredRows(tmp_path, "rows.jsonl", PLACE)
    (tmp_path / "b" / "rows.jsonl").write_text("3\n")
    with pytest.raises(UsageError, match=r"^--gather: line 1 of .*b/rows\.jsonl is damaged"):
        GatheredRows(tmp_path, "rows.jsonl", PLACE)
    with pytest.raises(UsageError, match="no folder"):
        GatheredRows(tmp_path, "others.jsonl", PLACE)


def test_gathered_results_were_found_where_the_parts_were(tmp_path):
    for name, device in (("a", "H200"), ("b", "H200"), ("c", "cpu")):
        run = {"device": device, "commit": f"commit {name}", "jax": "1"}
        part = {"run": run, "commands": [f"part {name}"], "results": []}
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
    (tmp_path / "d.json").write_text("[")
    parts = [tmp_path / f"{name}.json" for name in "abcd"]
    write_results(tmp_path / "all.json", {"results": []}, None, parts)
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["run"]["device"] == "H200, cpu"
    assert found["run"]["commit"] == "commit a, commit b, commit c"
    assert found["commands"][:3] == ["part a", "part b", "part c"] and len(found["commands"]) == 4
