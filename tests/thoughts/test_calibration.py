"""The calibration's file: nothing of it is believed before it is checked."""

import dataclasses
import json
import pathlib

import pytest

from kvjax.errors import UsageError
from kvjax.thoughts import calibration
from kvjax.thoughts.calibration import LARGEST, Calibration
from tests.decoding import small

GOOD = Calibration(
    fingerprint="0123456789abcdef" * 4,
    model="some-model",
    layers=(2, 0),
    thresholds=(0.25, 0.75),
    trimodal=(0.5, 0.0, 1.0),
    prompts=12,
    tokens=3456,
    settings=(("bandwidth", "scott"), ("grid", 512), ("top_k", None), ("prominence", 0.05)),
)
NONE = dataclasses.replace(GOOD, layers=(), thresholds=None, trimodal=(0, 0.0, 0.25))


@pytest.mark.parametrize("found", [GOOD, NONE], ids=["three kinds", "one kind"])
def test_what_is_saved_is_loaded(found, tmp_path):
    path = tmp_path / "calibration.json"
    found.save(path)
    assert Calibration.load(path) == found == Calibration.load(str(path))
    assert hash(found) == hash(Calibration.load(path))
    assert json.loads(path.read_text())["settings"] == dict(found.settings)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


BAD = [
    ("fingerprint", 5, "64 hexadecimal digits"),
    ("fingerprint", "0123", "64 hexadecimal digits"),
    ("fingerprint", "../" * 21 + "x", "64 hexadecimal digits"),
    ("fingerprint", GOOD.fingerprint + "\n", "64 hexadecimal digits"),
    ("model", None, "text"),
    ("model", ["a"], "text"),
    ("trimodal", [], "for each layer"),
    ("trimodal", [0.5, 1.5, 0], "for each layer"),
    ("trimodal", [0.5, float("nan"), 0], "for each layer"),
    ("trimodal", [0.5, True, 0], "for each layer"),
    ("trimodal", {"0": 1}, "for each layer"),
    ("trimodal", [[0.5], 0, 1], "for each layer"),
    ("layers", [0, 0], "distinct whole numbers from 0 to 2"),
    ("layers", [-1, 0], "distinct whole numbers"),
    ("layers", [3], "distinct whole numbers"),
    ("layers", [1.0], "distinct whole numbers"),
    ("layers", [True], "distinct whole numbers"),
    ("layers", "01", "distinct whole numbers"),
    ("layers", 1, "distinct whole numbers"),
    ("layers", [10**30], "distinct whole numbers"),
    ("layers", [[0]], "distinct whole numbers"),
    ("layers", [], "some with thresholds and none without"),
    ("thresholds", None, "some with thresholds and none without"),
    ("thresholds", [0.75, 0.25], "two ascending numbers"),
    ("thresholds", [0.5, 0.5], "two ascending numbers"),
    ("thresholds", [0.5], "two ascending numbers"),
    ("thresholds", [0.1, 0.2, 0.3], "two ascending numbers"),
    ("thresholds", [0.1, float("inf")], "two ascending numbers"),
    ("thresholds", [float("nan"), 0.5], "two ascending numbers"),
    ("thresholds", [-0.1, 0.5], "two ascending numbers"),
    ("thresholds", ["0.1", "0.2"], "two ascending numbers"),
    ("thresholds", 0.5, "two ascending numbers"),
    ("prompts", 0, "a whole number above 0"),
    ("prompts", 1.0, "a whole number above 0"),
    ("prompts", True, "a whole number above 0"),
    ("tokens", -5, "a whole number above 0"),
    ("tokens", None, "a whole number above 0"),
    ("settings", [["grid", 5]], "an object"),
    ("settings", None, "an object"),
    ("settings", {"grid": [1]}, "names with plain values"),
    ("settings", {"grid": {"a": 1}}, "names with plain values"),
    ("settings", {"grid": float("inf")}, "names with plain values"),
    ("format", 2, "must be 1"),
    ("format", None, "must be 1"),
]


def fields() -> dict:
    return {"format": 1} | dataclasses.asdict(GOOD) | {"settings": dict(GOOD.settings)}


@pytest.mark.parametrize(("field", "value", "wanted"), BAD)
def test_a_field_that_cannot_be_is_refused_by_name(field, value, wanted, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(fields() | {field: value}))
    with pytest.raises(UsageError) as refused:
        Calibration.load(path)
    message = str(refused.value)
    named = "layers" if wanted.startswith("some with") else field
    assert message.startswith(f"{path}: {named} must be") and wanted in message
    assert "python -m kvjax.calibrate" in message and len(message) < 400


@pytest.mark.parametrize("field", [*fields()][1:])
def test_a_missing_field_is_refused_by_name(field, tmp_path):
    path = tmp_path / "bad.json"
    held = fields()
    del held[field]
    path.write_text(json.dumps(held))
    with pytest.raises(UsageError, match=f"bad.json: {field} is missing"):
        Calibration.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not readable as JSON"),
        (b"{", "not readable as JSON"),
        (b"\xff\xfe{}", "not readable as JSON"),
        (b"[" * 200_000, "not readable as JSON"),
        (b'{"prompts": ' + b"9" * 10_000 + b"}", "not readable as JSON"),
        (b"[]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b"{}", "format must be 1"),
        (json.dumps(fields() | {"code": "x"}).encode(), "code is unknown"),
        (b" " * (LARGEST + 1), "more than"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(content, message, tmp_path):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"bad\.json: ") as refused:
        Calibration.load(path)
    assert message in str(refused.value)


def test_a_file_that_is_not_there_or_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*no\.json: No such file"):
        Calibration.load(tmp_path / "no.json")
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        Calibration.load(tmp_path)
    with pytest.raises(UsageError, match=r"cannot write .*: No such file"):
        GOOD.save(tmp_path / "no" / "a.json")
    with pytest.raises(UsageError, match=r"cannot write /dev/full: it is no regular file"):
        GOOD.save("/dev/full")


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(UsageError, match="/dev/zero: no calibration"):
        Calibration.load("/dev/zero")


def test_saving_follows_a_link_and_replaces_the_file(tmp_path):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    GOOD.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Calibration.load(tmp_path / "real.json") == GOOD


def test_the_calibration_of_another_model_is_refused():
    lm = small.lm()
    count = lm.config.num_layers
    mine = dataclasses.replace(
        GOOD, fingerprint=lm.fingerprint, layers=(0,), trimodal=(1.0,) * count
    )
    mine.check(lm)
    with pytest.raises(UsageError) as refused:
        GOOD.check(lm)
    for part in (GOOD.model, GOOD.fingerprint[:12], lm.fingerprint[:12], "kvjax.calibrate"):
        assert part in str(refused.value)
    with pytest.raises(UsageError, match=f"model of {count} layers and this one has {count + 1}"):
        mine.for_model(lm.fingerprint, count + 1)


def test_what_is_shipped_is_found_by_the_model_s_fingerprint(tmp_path, monkeypatch):
    folder = pathlib.Path(calibration.__file__).parent / "calibrations"
    files = sorted(folder.glob("*.json"))
    assert files
    for file in files:
        found = Calibration.load(file)
        assert Calibration.shipped(found.fingerprint) == found
    assert Calibration.shipped("0" * 64) is None
