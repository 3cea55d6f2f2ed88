"""The calibrate command from flags to files."""

import dataclasses
import json
import types

import numpy as np
import pytest

import kvjax
from kvjax.command import calibrate_run
from kvjax.command.calibrate_options import CalibrateConfig
from kvjax.command.prompts import Row
from kvjax.thoughts.calibration import Calibration
from tests.decoding import small
from tests.thoughts.conftest import WORDS
from tests.thoughts.test_density import one, three

SHORT = ("--max-new-tokens", "70")


@pytest.fixture
def never_loads(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(kvjax, "load", load)


@pytest.fixture
def measured(monkeypatch):
    """Stands in for the measurement: what it was asked, and samples of our choice.

    Layer 1 shows three modes always, layer 0 for every other prompt, the others never.
    """
    asked = []

    def record(lm, prompt, answer):
        seed = len(asked)
        asked.append((tuple(prompt), tuple(answer)))
        layers = [three(seed) if seed % 2 else one(seed), three(seed + 50)]
        rest = [one(seed + 100 + i) for i in range(lm.config.num_layers - 2)]
        return np.clip(np.stack(layers + rest), 0, 1)

    monkeypatch.setattr(calibrate_run, "record", record)
    return asked


def test_the_calibration_is_written_and_told(calibrate, prompts, measured, model, tmp_path):
    out, plot = tmp_path / "c.json", tmp_path / "c.png"
    outcome = calibrate("--prompts", prompts, "--out", out, "--plot", plot, *SHORT)
    assert (outcome.code, outcome.out) == (0, "")
    found = Calibration.load(out)
    found.check(kvjax.load(model))
    assert found.layers == (1, 0) and found.trimodal[:3] == (0.5, 1, 0)
    low, high = found.thresholds
    assert 0.4 < low < 0.5 and 0.7 < high < 0.8
    assert (found.model, found.prompts, found.tokens) == (model.name, 4, 4 * 1200)
    settings = dict(found.settings)
    assert settings["max_new_tokens"] == 70 and settings["prominence"] == 0.05
    *rows, layers, borders = outcome.err.splitlines()
    assert rows[-1] == "kvjax: 4/4 'p3': 70 tokens, length" and len(rows) == 4
    assert layers.endswith("three modes: 1 (100%), 0 (50%)")
    assert borders == f"kvjax: execution below {low:.4f}, transition above {high:.4f}: {out}"
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.json", "c.png", prompts.name]


def test_no_tri_modal_layer_is_said_and_written(calibrate, prompts, tmp_path):
    out = tmp_path / "c.json"
    outcome = calibrate("--prompts", prompts, "--out", out, *SHORT, "--quiet")
    assert outcome.code == 0 and outcome.out == ""
    [verdict] = outcome.err.splitlines()
    assert verdict.startswith("kvjax: no layer is tri-modal: one shows three modes on ")
    assert "4 bits throughout" in verdict
    found = Calibration.load(out)
    assert (found.layers, found.thresholds, found.tokens) == ((), None, 4 * 70)


def test_a_plot_is_drawn_without_thresholds_too(calibrate, prompts, tmp_path):
    plot = tmp_path / "c.png"
    outcome = calibrate("--prompts", prompts, "--out", tmp_path / "c", "--plot", plot, *SHORT)
    assert outcome.code == 0 and plot.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("sampled", [False, True])
def test_answers_are_those_of_generate(calibrate, prompts, measured, model, tmp_path, sampled):
    flags = ("--temp", "1.5", "--top-k", "40", "--seed", "3") if sampled else ()
    calibrate("--prompts", prompts, "--out", tmp_path / "c.json", *SHORT, *flags)
    options = {"temperature": 1.5, "top_k": 40, "seed": 3} if sampled else {"temperature": 0.0}
    lm = kvjax.load(model)
    results = kvjax.generate(lm, WORDS, max_new_tokens=70, **options)
    assert sorted(answer for _, answer in measured) == sorted(r.tokens for r in results)
    ids = lm.tokenizer.encode("u:hello|a:")
    assert tuple(ids) in [prompt for prompt, _ in measured]


def test_given_answers_are_measured_like_decoded_ones(calibrate, prompts, model, tmp_path):
    lm = kvjax.load(model)
    results = kvjax.generate(lm, WORDS, max_new_tokens=70)
    texts = tmp_path / "texts.jsonl"
    rows = [
        {"prompt": word, "answer": lm.tokenizer.decode(result.tokens)}
        for word, result in zip(WORDS, results, strict=True)
    ]
    assert all(len(row["answer"]) == 70 for row in rows)
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep = "--keep-samples"
    calibrate("--prompts", prompts, "--out", tmp_path / "a.json", *SHORT, keep)
    outcome = calibrate("--texts", texts, "--out", tmp_path / "b.json", keep)
    assert outcome.code == 0 and "1/4 1: 70 tokens, given" in outcome.err
    for i in range(4):
        a, b = (np.load(tmp_path / f"{name}.json.samples" / f"{i}.npy") for name in "ab")
        assert a.shape == (lm.config.num_layers, 70)
        np.testing.assert_array_equal(a, b)
    settings = dict(Calibration.load(tmp_path / "b.json").settings)
    assert settings["answers"] == "given" and "temperature" not in settings


def test_no_beginning_of_sequence_stands_before_a_given_answer():
    tokenizer = types.SimpleNamespace(
        has_chat_template=False,
        encode=lambda text, *, starts=True: [1] * starts + list(map(ord, text)),
    )
    lm = dataclasses.replace(small.lm(), tokenizer=tokenizer)
    asked = calibrate_run._ask(lm, Row(1, "q", answer="ab"), CalibrateConfig(texts="t"))
    assert asked.ids == (1, ord("q")) and asked.answer == (ord("a"), ord("b"))


def test_the_same_command_gives_the_same_files(calibrate, prompts, tmp_path):
    files = []
    for name in "ab":
        out, plot = tmp_path / f"{name}.json", tmp_path / f"{name}.png"
        calibrate("--prompts", prompts, "--out", out, "--plot", plot, *SHORT)
        files.append((out.read_bytes(), plot.read_bytes()))
    assert files[0] == files[1]


def test_limit_takes_the_first_lines(calibrate, prompts, measured, tmp_path):
    calibrate("--prompts", prompts, "--out", tmp_path / "c.json", *SHORT, "--limit", "2")
    assert len(measured) == 2 and Calibration.load(tmp_path / "c.json").prompts == 2


def test_kept_samples_are_fitted_anew_without_the_weights(
    calibrate, prompts, measured, tmp_path, monkeypatch
):
    out = tmp_path / "c.json"
    command = ("--prompts", prompts, "--out", out, *SHORT)
    calibrate(*command, "--keep-samples")
    first = Calibration.load(out)

    def load(*_, **__):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(kvjax, "load", load)
    outcome = calibrate(*command, "--min-share", "1")
    assert outcome.code == 0 and "going on after 4 of 4 prompts" in outcome.err
    again = Calibration.load(out)
    assert first.layers == (1, 0) and again.layers == (1,)
    assert not (tmp_path / "c.json.samples").exists()


def test_a_failure_keeps_the_samples_and_the_old_file(
    calibrate, prompts, measured, tmp_path, monkeypatch
):
    out = tmp_path / "c.json"
    out.write_text("old")
    command = ("--prompts", prompts, "--out", out, *SHORT, "--batch-size", "1")
    stand_in = calibrate_run.record

    def failing(lm, prompt, answer):
        if len(measured) == 2:
            raise kvjax.NumericalError("layer 1 holds NaN")
        return stand_in(lm, prompt, answer)

    monkeypatch.setattr(calibrate_run, "record", failing)
    outcome = calibrate(*command)
    assert (outcome.code, out.read_text()) == (5, "old")
    assert outcome.err.splitlines()[-1] == "kvjax: layer 1 holds NaN"
    monkeypatch.setattr(calibrate_run, "record", stand_in)
    outcome = calibrate(*command)
    assert outcome.code == 0 and "going on after 2 of 4 prompts" in outcome.err
    assert len(measured) == 4 and Calibration.load(out).prompts == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("--max-new-tokens", "71"), "max_new_tokens was 70 and is 71"),
        (("--limit", "3"), "prompts_sha256"),
        (("--no-chat-template",), "prompts_sha256"),
        (("--temp", "1"), "temperature was 0.0 and is 1.0"),
        (("--dtype", "bfloat16"), "dtype was 'float32' and is 'bfloat16'"),
    ],
)
def test_samples_of_other_options_are_refused(
    calibrate, prompts, measured, tmp_path, never_loads, monkeypatch, change, named
):
    command = ("--prompts", prompts, "--out", tmp_path / "c.json", *SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(kvjax, "load", kvjax.loading.load)
        calibrate(*command, "--keep-samples")
    outcome = calibrate(*command, *change)
    assert outcome.code == 2 and len(outcome.err.splitlines()) == 1
    assert "belongs to another run" in outcome.err and named in outcome.err
    assert len(list((tmp_path / "c.json.samples").glob("*.npy"))) == 4


def lines(tmp_path, *rows) -> str:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(row + "\n" for row in rows))
    return str(path)


MANY = ("--max-new-tokens", "65000", "--batch-size", "9999")
REFUSED = [
    ((), 2, "no output: name the file for the calibration with --out"),
    (("--out", "{tmp}/c"), 2, "no prompts: give --prompts or --texts"),
    (("--out", "{tmp}/c", "--prompts", "{p}", "--texts", "{p}"), 2, "exclude each other"),
    (("--out", "{tmp}/no/c", "--prompts", "{p}"), 2, "--out: cannot write"),
    (("--out", "{tmp}", "--prompts", "{p}"), 2, "no regular file"),
    (("--out", "/dev/null", "--prompts", "{p}"), 2, "no regular file"),
    (("--out", "{p}", "--prompts", "{p}"), 2, "--out: {p} is also an input"),
    (("--out", "{tmp}/c", "--plot", "{p}", "--prompts", "{p}"), 2, "--plot: {p} is also an input"),
    (("--out", "{tmp}/c", "--plot", "{tmp}/c", "--prompts", "{p}"), 2, "name two files"),
    (("--out", "{tmp}/c", "--prompts", "{tmp}/no"), 2, "--prompts: cannot read"),
    (("--out", "{tmp}/c", "--prompts", "{bad}"), 2, "line 2: `prompt` must be text"),
    (("--out", "{tmp}/c", "--texts", "{p}"), 2, "line 1: `answer` must be text"),
    (("--out", "{tmp}/c", "--texts", "{long}"), 4, "'x' and its answer have 70016 tokens"),
    (("--out", "{tmp}/c", "--texts", "{short}"), 2, "the longest answer has 2 tokens"),
    (("--out", "{tmp}/c", "--texts", "{p}", "--temp", "0"), 2, "--temperature has no effect"),
    (("--out", "{tmp}/c", "--prompts", "{p}", "--bandwidth", "wide"), 2, "--bandwidth must be"),
    (("--out", "{tmp}/c", "--prompts", "{p}", "--bandwidth", "-1"), 2, "--bandwidth must be"),
    (("--out", "{tmp}/c", "--prompts", "{p}", "--max-new-tokens", "63"), 2, "--min-samples 64"),
    (("--out", "{tmp}/c", "--prompts", "{p}", "--layers", "0"), 2, "--layers must be at least 1"),
    (("--out", "{tmp}/c", "--prompts", "{p}", "--model", "{tmp}/no"), 3, "no such file"),
    (
        (
            "--out",
            "{tmp}/c",
            "--prompts",
            "{p}",
            "--max-new-tokens",
            "65000",
            "--batch-size",
            "9999",
        ),
        4,
        "of cache beside",
    ),
]


@pytest.mark.parametrize(("argv", "code", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_can_be_refused_is_refused_before_weights_load(
    calibrate, prompts, tmp_path, never_loads, argv, code, message
):
    many = [json.dumps({"prompt": "x"})] * 9999
    files = {
        "tmp": tmp_path,
        "p": prompts,
        "bad": tmp_path / "bad.jsonl",
        "long": tmp_path / "long.jsonl",
        "short": tmp_path / "short.jsonl",
    }
    files["bad"].write_text('{"prompt": "x"}\n{"prompt": 5}\n')
    files["long"].write_text(
        json.dumps({"id": "x", "prompt": "0123456789a", "answer": "y" * 70000})
    )
    files["short"].write_text(json.dumps({"prompt": "x", "answer": "yy"}))
    if code == 4 and "--prompts" in argv:
        prompts.write_text("\n".join(many))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    outcome = calibrate(*(word.format(**files) for word in argv))
    assert (outcome.code, outcome.out) == (code, "")
    assert len(outcome.err.splitlines()) == 1 and message.format(**files) in outcome.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_plot_without_matplotlib_is_refused_first(
    calibrate, prompts, tmp_path, never_loads, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = calibrate("--prompts", "no", "--out", tmp_path / "c", "--plot", tmp_path / "d")
    assert outcome.code == 2
    assert outcome.err.startswith("kvjax: --plot needs matplotlib: install it with `pip install")


def test_a_model_of_windows_only_is_refused(calibrate, prompts, tmp_path, never_loads):
    from tests.models.goldens import FOLDER

    folder = tmp_path / "windows"
    folder.mkdir()
    config = json.loads((FOLDER / "qwen2_window" / "config.json").read_text())
    layers = config["num_hidden_layers"]
    config |= {"max_window_layers": 0, "layer_types": ["sliding_attention"] * layers}
    (folder / "config.json").write_text(json.dumps(config))
    outcome = calibrate("--prompts", prompts, "--out", tmp_path / "c", "--model", folder)
    assert outcome.code == 2 and "has a sliding window: none can be chosen" in outcome.err


def test_options_come_from_a_file_and_go_to_one(calibrate, tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text("bandwidth: 0.2\nlayers: 3\nout: x\n")
    outcome = calibrate("--config", path)
    assert outcome.code == 2 and "unknown key 'out'; did you mean output?" in outcome.err
    path.write_text("bandwidth: 0.2\nlayers: 3\n")
    outcome = calibrate("--config", path, "--layers", "2", "--print-config")
    assert outcome.code == 0
    path.write_text(outcome.out)
    again = calibrate("--config", path, "--print-config")
    assert again.out == outcome.out
    assert "bandwidth: '0.2'" in outcome.out and "layers: 2" in outcome.out
