"""ThinKV on the command line: its flags, its record, its picture, its calibration."""

import json
import re

import pytest

import kvjax
from kvjax import recipes
from kvjax.compress.selectors import SnapKV
from kvjax.errors import UsageError
from kvjax.thoughts import Given, Retention, Sparsity
from kvjax.thoughts.calibration import Calibration
from tests.cli.test_recipes import options
from tests.decoding import small
from tests.thoughts.machine import Machine

slow = pytest.mark.slow
THOUGHTS = [
    "--calibration x.json",
    "--thoughts RT",
    "--labels past",
    "--sparsity-correction",
    "--segment-tokens 64",
    "--retention 8,4",
    "--retain-by random",
    "--shared-tokens",
    "--transition end",
    "--attend-evicted",
    "--prompt-budget 64",
]


def given(text: str) -> recipes.Recipe:
    from kvjax.command.recipe import given_recipe

    return given_recipe(options("--method", "thinkv", *text.split()))


def calibration(fingerprint: str, layers: int = 3, thresholds=(0.2, 0.6)) -> Calibration:
    return Calibration(
        fingerprint=fingerprint,
        model="a model",
        layers=(0, 2) if thresholds else (),
        thresholds=thresholds,
        trimodal=(1.0,) * layers,
        prompts=3,
        tokens=999,
        settings=(),
    )


R = Given("R")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("", recipes.thinkv()),
        ("--kv-budget 300", recipes.thinkv(300)),
        ("--kv-budget 0.5", recipes.thinkv(0.5)),
        ("--kv-budget all", recipes.thinkv(None)),
        ("--thoughts RRET", recipes.thinkv(segmenter=Given("RRET"))),
        ("--segment-tokens 64", recipes.thinkv(segmenter=Given("R", every=64))),
        (
            "--thoughts T --labels past --segment-tokens 32",
            recipes.thinkv(segmenter=Given("T", every=32, covers="past")),
        ),
        ("--retention 30,20,10", recipes.thinkv(retention=Retention((30, 20, 10)))),
        ("--retain-by strided", recipes.thinkv(retention=Retention(chooser="strided"))),
        ("--shared-tokens", recipes.thinkv(retention=Retention(shared=True))),
        ("--transition end", recipes.thinkv(retention=Retention(at="end"))),
        ("--attend-evicted", recipes.thinkv(retention=Retention(forget=False))),
        ("--paper", recipes.thinkv(paper=True)),
        (
            "--paper --transition end",
            recipes.thinkv(paper=True, retention=Retention(at="end", shared=True)),
        ),
        (
            "--paper --no-shared-tokens",
            recipes.thinkv(paper=True, retention=Retention(shared=False)),
        ),
        ("--kv-bits R:8,E:4,T:2", recipes.thinkv(thought_codecs=("int8", "int4", "int2"))),
        ("--kv-bits T:2,R:k4v2,E:4", recipes.thinkv(thought_codecs=("k4v2", "int4", "int2"))),
        ("--kv-bits 8", recipes.thinkv(thought_codecs=("int8",) * 3)),
        ("--kv-bits-layers 0:8", recipes.thinkv(layer_codecs=((0, "int8"),))),
        ("--prompt-bits 4", recipes.thinkv(prompt_codec="int4")),
        ("--recent-window 24", recipes.thinkv(window=24)),
        ("--page-size 16", recipes.thinkv(page_size=16)),
        ("--skip-layers 0,-1", recipes.thinkv(skip_layers=(0, -1))),
        ("--compress think", recipes.thinkv(compress=("think",))),
        (
            "--selector snapkv --prompt-budget 0.5",
            recipes.thinkv(selector=SnapKV(), prompt_budget=0.5),
        ),
        (
            "--selector snapkv --prompt-budget 80 --sink-tokens 8",
            recipes.thinkv(selector=SnapKV(), prompt_budget=80, sinks=8),
        ),
    ],
)
def test_every_switch_reaches_the_recipe(argv, expected):
    assert given(argv) == expected


def test_a_calibration_reaches_the_recipe(tmp_path):
    path = tmp_path / "calibration.json"
    calibration("a" * 64).save(path)
    found = given(f"--calibration {path}")
    told = Sparsity((0, 2), (0.2, 0.6), fingerprint="a" * 64)
    assert found == recipes.thinkv(segmenter=told)
    assert found == recipes.thinkv(calibration=calibration("a" * 64))
    assert found.thought_codecs == ("int4", "int4", "int2")
    assert given(f"--calibration {path} --no-sparsity-correction").segmenter.corrected is False
    paper = given(f"--calibration {path} --paper")
    assert paper == recipes.thinkv(calibration=calibration("a" * 64), paper=True)
    assert not paper.segmenter.corrected and paper.thought_codecs[2] == "ternary"
    assert given(f"--calibration {path} --paper --sparsity-correction").segmenter.corrected
    long = given(f"--calibration {path} --segment-tokens 64 --labels past").segmenter
    assert (long.every, long.covers, long.thresholds) == (64, "past", (0.2, 0.6))
    calibration("a" * 64, thresholds=None).save(path)
    assert given(f"--calibration {path}") == recipes.thinkv()
    with pytest.raises(UsageError, match="--sparsity-correction has no effect"):
        given(f"--calibration {path} --sparsity-correction")


@pytest.mark.parametrize("method", ["full", "uniform", "snapkv"])
@pytest.mark.parametrize("flag", THOUGHTS)
def test_switches_of_thoughts_are_for_thinkv(decode, monkeypatch, flag, method):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    outcome = decode("-p", "a", "--method", method, *flag.split())
    assert outcome.code == 2
    assert f"{flag} is for method thinkv: drop it, or pass --method thinkv" in outcome.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--thoughts RX", "--thoughts must be letters of RET, got 'RX'"),
        ("--thoughts R --calibration x.json", "--thoughts and calibration exclude each other"),
        ("--labels never", "--labels: invalid choice: 'never'"),
        ("--sparsity-correction", "--sparsity-correction has no effect without a calibration"),
        ("--thoughts R --no-sparsity-correction", "--sparsity-correction has no effect"),
        ("--segment-tokens 8", "--segment-tokens must be at least 16, got 8"),
        ("--segment-tokens 40", "--segment-tokens 40 must be a multiple of the 16 steps"),
        ("--segment-tokens 16", "--segment-tokens 16 must be .* at least 32"),
        ("--segment-tokens 48 --kv-bits kivi2", "--segment-tokens 48 .* 32 tokens that share a"),
        ("--retention 8,16", "--retention must be numbers of tokens that fall"),
        ("--retention a,b", "--retention must be numbers of tokens, as 64,32,16,8,4, got 'a,b'"),
        ("--retention 8,,4", "--retention"),
        ("--retain-by luck", "--retain-by: invalid choice: 'luck'"),
        ("--transition middle", "--transition: invalid choice: 'middle'"),
        ("--kv-budget all --retention 8,4", "--retention has no effect with budget all"),
        ("--kv-budget all --attend-evicted", "--attend-evicted has no effect with budget all"),
        ("--kv-budget all --shared-tokens", "--shared-tokens has no effect"),
        ("--kv-budget half", "--kv-budget must be a number of tokens or a share"),
        ("--kv-budget 0", "--kv-budget must be a number of tokens or a share"),
        ("--kv-budget 1.5", "--kv-budget must be a number of tokens or a share"),
        ("--kv-budget 4 --max-new-tokens 500", "--kv-budget 4 is below the 4 tokens that stay"),
        ("--kv-budget 4 --max-new-tokens 500", "pass 12"),
        ("--kv-bits R:4,E:4", "--kv-bits must name all of R, E, T"),
        ("--kv-bits R:4,E:4,E:4", "--kv-bits must name each of R, E, T once"),
        ("--kv-bits R:4,E:4,T:5", "--kv-bits: no codec is named '5'"),
        ("--prompt-bits 5", "--prompt-bits: no codec is named '5'"),
        ("--prompt-bits nvfp4", "--prompt-bits nvfp4 shares scales among tokens"),
        ("--kv-bits-layers 0:nvfp4", "--kv-bits-layers nvfp4 shares scales among tokens"),
        ("--paper", "shares a scale among 16 channels"),  # of a head of 8
        ("--prompt-budget 64", "--prompt-budget and a selector for the prompt need each other"),
        ("--selector snapkv", "--selector snapkv has no effect with method thinkv"),
        ("--selector snapkv --prompt-budget 9", "--prompt-budget 9 is below the 4 first"),
        ("--selector snapkv --prompt-budget x", "--prompt-budget must be a number of tokens or"),
        ("--compress-every 16", "--compress-every 16 has no effect with method thinkv"),
        ("--positions contiguous", "--positions contiguous has no effect with method thinkv"),
        ("--compress prompt", "--compress prompt leaves nothing to evict"),
        ("--sink-tokens 8", "--sink-tokens 8 has no effect with method thinkv, which keeps the"),
        ("--protect-prompt", "--protect-prompt has no effect with method thinkv"),
        (
            "--selector snapkv --prompt-budget 80 --protect-prompt",
            "--prompt-budget 80 has no effect with --protect-prompt, which keeps the prompt",
        ),
        (
            "--selector snapkv --prompt-budget 80 --compress think,answer",
            "--prompt-budget 80 has no effect with --compress think,answer, which keeps the",
        ),
        ("--kv-budget all --skip-layers 0", "--skip-layers 0 has no effect with --kv-budget all"),
        ("--kv-budget all --compress think", "--compress think has no effect with --kv-budget all"),
        (
            "--kv-budget all --selector snapkv --prompt-budget 80",
            "--selector snapkv has no effect with --kv-budget all, which evicts nothing",
        ),
        ("--recent-window 120", "--segment-tokens 128 must be .* at least 136"),
        ("--calibration no-such.json", "--calibration: cannot read no-such.json"),
        ("--trace run.jpg", "--trace draws a PNG: give a name that ends in .png, got run.jpg"),
        ("--fit 1GiB", "--method thinkv and --fit exclude each other"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(decode, monkeypatch, argv, message):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    outcome = decode("-p", "a", "--method", "thinkv", *argv.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1].startswith("kvjax: ")
    assert re.search(message, outcome.err.replace("argument ", ""))


def test_a_picture_is_of_one_answer(decode, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    outcome = decode("--prompts", prompts, "--trace", tmp_path / "run.png")
    assert outcome.code == 2 and "--trace draws one answer" in outcome.err
    assert not (tmp_path / "run.png").exists()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (calibration("b" * 64), "the calibration is for a model"),
        (None, "no calibration"),
    ],
)
def test_the_calibration_of_another_model_is_refused(decode, monkeypatch, tmp_path, found, message):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    path = tmp_path / "calibration.json"
    path.write_text("x" * (2 << 20))
    if found is not None:
        found.save(path)
    outcome = decode("-p", "a", "--method", "thinkv", "--calibration", path)
    assert outcome.code == 2 and outcome.err.startswith("kvjax: --calibration: ")
    assert message in outcome.err


def test_a_calibration_of_so_many_layers_is_another_model_s(decode, model, tmp_path):
    path = tmp_path / "calibration.json"
    calibration(kvjax.load(model).fingerprint, layers=4).save(path)
    outcome = decode("-p", "a", "--method", "thinkv", "--calibration", path)
    assert outcome.code == 2 and "4 layers and this one has 3" in outcome.err


def test_the_library_refuses_it_too(tmp_path):
    with pytest.raises(UsageError, match="calibration is for a model of fingerprint bbbbbbbbbbbb"):
        kvjax.generate(
            small.lm(), [[1, 2]], recipe=recipes.thinkv(calibration=calibration("b" * 64))
        )


@pytest.mark.parametrize("paper", [False, True])
@pytest.mark.parametrize("bits", [None, "8"])
def test_a_calibration_that_comes_with_kvjax_is_as_one_that_is_given(
    model, monkeypatch, tmp_path, paper, bits
):
    """By default it tells thoughts apart, and everything else is as if it had been named."""
    from kvjax.command.calibrated import calibrated

    own = calibration(kvjax.load(model).fingerprint)
    monkeypatch.setattr(Calibration, "shipped", lambda fingerprint: own)
    own.save(tmp_path / "own.json")
    argv = ["--model", str(model), "--method", "thinkv"]
    argv += ["--paper"] * paper + (["--kv-bits", bits] if bits else [])
    from kvjax.command.recipe import given_recipe

    config = options(*argv)
    named = given_recipe(options(*argv, "--calibration", str(tmp_path / "own.json")))
    assert calibrated(given_recipe(config), config) == named
    told = options(*argv, "--thoughts", "RT")
    assert calibrated(given_recipe(told), told) == given_recipe(told)


def test_a_plan(decode):
    outcome = decode("-p", "a", "--method", "thinkv", "--thoughts", "RET", "--plan",
                     "--kv-budget", "200", "--max-new-tokens", "2000")  # fmt: skip
    assert outcome.code == 0
    lines = dict(line.split("  ", 1) for line in outcome.out.splitlines())
    assert lines["method"].strip() == "thinkv"
    assert "200 tokens" in lines["budget"]
    assert {"3 layers, recent", "3 layers, int8", "3 layers, int4", "3 layers, int2"} <= set(lines)
    # 200 of the budget, a growing segment of 128, a tick of 16: 344 tokens in pages of 64.
    assert lines["3 layers, int4"].strip().startswith("6 pages a KV head")


def test_the_record_and_the_picture(decode, tmp_path):
    path = tmp_path / "run.png"
    outcome = decode(
        "-p", "tell me " * 4, "--method", "thinkv", "--thoughts", "RTE", "--segment-tokens", 32,
        "--retention", "16,8,4", "--kv-budget", 40, "--page-size", 16, "--max-new-tokens", 150,
        "--kv-bits", 4, "--prompt-bits", 4, "--retain-by", "strided", "--no-repetition-stop",
        "--format", "json", "--trace", path,
    )  # fmt: skip
    assert outcome.code == 0
    assert "thoughts as given: RTE" in outcome.err
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and path.stat().st_size > 5000
    assert list(tmp_path.iterdir()) == [path]
    record = json.loads(outcome.out)
    kv, thoughts = record["kv"], record["kv"]["thoughts"]
    # 149 tokens are read: the segments that begin after 0, 32, 64, 96 and 128 are told apart.
    assert thoughts["kinds"] == "RTERT"
    assert (thoughts["R"], thoughts["E"], thoughts["T"]) == (2, 1, 2)
    assert thoughts["sparsity"] == [None] * 5
    machine = Machine(32, (16, 8, 4))
    for done in range(0, 149, 16):
        if done % 32 == 0:
            machine.border(done // 32, "RTE"[done // 32 % 3])
        machine.fit(max(done - 16, 0) // 32, 40)
    assert thoughts["demotions"] == {
        "transition": machine.by_transition,
        "budget": machine.by_budget,
    }
    assert machine.by_transition > 2 and machine.by_budget > 2
    assert 0 < thoughts["eviction_rate"] < thoughts["refresh_rate"] * 2
    assert kv["budget"] == 40 and kv["crowded"] == 0
    prompt = record["usage"]["prompt"]
    assert kv["logical_tokens"] == prompt + 149
    assert kv["live_tokens"]["max"] <= prompt + 40 + 32 + 16 + 16
    assert kv["evictions"] == 6 * kv["logical_tokens"] - round(6 * kv["live_tokens"]["end"])
    assert 0 < kv["slots_reused"] < kv["evictions"]
    assert kv["bits"] == 4 + 16 / 8  # and a scale for every 8 numbers
    assert record["run"]["recipe"]["segmenter"] == {
        "name": "Given", "kinds": "RTE", "every": 32, "covers": "next",
    }  # fmt: skip
    assert record["run"]["recipe"]["retention"]["schedule"] == [16, 8, 4]


@slow
def test_a_run_by_sparsity(decode, model, tmp_path):
    path = tmp_path / "calibration.json"
    calibration(kvjax.load(model).fingerprint, thresholds=(0.0, 1.0)).save(path)
    outcome = decode(
        "-p", "tell me " * 4, "--method", "thinkv", "--calibration", path, "--segment-tokens", 32,
        "--max-new-tokens", 70, "--no-repetition-stop", "--format", "json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "thoughts by the attention sparsity of layers 0, 2: E < 0.000, T > 1.000" in outcome.err
    thoughts = json.loads(outcome.out)["kv"]["thoughts"]
    assert thoughts["kinds"] == "RRR"
    assert all(0 <= share < 1 for share in thoughts["sparsity"])


@slow
def test_compared_with_the_uncompressed_run(decode):
    argv = ["-p", "tell me " * 4, "--method", "thinkv", "--segment-tokens", 32, "--kv-budget", 40]
    outcome = decode(*argv, "--compare", "full", "--max-new-tokens", 100, "--format", "json")
    assert outcome.code == 0, outcome.err
    quality = json.loads(outcome.out)["quality"]
    assert quality["method"] == "thinkv" and quality["crowded"] == 0 and quality["kl_mean"] > 0


@slow
def test_a_budget_in_bytes(decode):
    argv = ["-p", "a", "--method", "thinkv", "--thoughts", "RT", "--max-new-tokens", 600]
    outcome = decode(*argv, "--kv-budget-bytes", "400KiB", "--plan")
    assert outcome.code == 0, outcome.err
    small_one = decode(*argv, "--kv-budget-bytes", "9", "--plan")
    assert small_one.code == 2 and "--kv-budget-bytes 9 is too small" in small_one.err
