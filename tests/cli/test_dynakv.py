"""DynaKV on the command line: its flags, its record, its picture."""

import json
import pathlib

import numpy as np
import pytest

import kvjax
from kvjax.compress.selectors import SnapKV
from kvjax.dynakv.adapter import Adapter, save_adapter
from kvjax.dynakv.settings import SpectralSettings
from kvjax.dynakv.spectrum import blank
from kvjax.report.ranks import shown
from tests.cli.test_recipes import options
from tests.dynakv.tiny import perturbed


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> str:
    """Of the small model, each token at a rank of its own."""
    folder, lm = tmp_path_factory.mktemp("adapter"), kvjax.load(str(model))
    found = perturbed(blank(lm.config, SpectralSettings(tilt=0.0)), gate=1.5)
    save_adapter(Adapter(found, lm.fingerprint, "small", {}, {}), folder)
    return str(folder)


def given(*argv: object) -> kvjax.recipes.Recipe:
    from kvjax.command.recipe import given_recipe

    return given_recipe(options("--method", "dynakv", *map(str, argv)))


def test_flags_reach_the_recipe(adapter):
    assert given("--adapter", adapter) == kvjax.recipes.dynakv(adapter)
    found = given(
        "--adapter", adapter, "--tau", 0.3, "--latent-rate", 0.5, "--latent-blocks", 4,
        "--kv-bits", 4, "--page-size", 32, "--recent-window", 16,
    )  # fmt: skip
    assert found == kvjax.recipes.dynakv(
        adapter, 0.3, rate=0.5, blocks=4, codec="int4", page_size=32, window=16
    )
    found = given("--adapter", adapter, "--selector", "snapkv", "--kv-budget", 64)
    assert found == kvjax.recipes.dynakv(adapter, selector=SnapKV(), budget=64)


def test_an_answer_and_its_record(decode, adapter):
    outcome = decode(
        "-p", "Why?", "--method", "dynakv", "--adapter", adapter, "--kv-bits", 8,
        "--max-new-tokens", 40, "--format", "json", "--stats", "--no-repetition-stop",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out)
    kv, layers = record["kv"], record["kv"]["per_layer"]
    assert kv["method"] == "dynakv" and 8 < kv["bits"] < 17
    assert set(kv["rates"]) == {"hard", "keys", "values", "blocks"}
    assert all(0 < layer["rate_keys"] <= 1 and layer["codec"] == "int8" for layer in layers)
    assert record["run"]["recipe"]["projector"]["settings"]["tau"] == 0.1
    last = outcome.err.splitlines()[-1]
    assert last.endswith(
        f"rank {kv['rates']['hard']:.3f} of full (keys {kv['rates']['keys']:.3f}, values "
        f"{kv['rates']['values']:.3f})"
    )


def test_a_plan_needs_no_weights(decode, model, adapter, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    argv = ("--plan", "--method", "dynakv", "--adapter", adapter, "-p", "a")
    outcome = decode(*argv, model=tmp_path)
    assert (outcome.code, outcome.err) == (0, "")
    assert " a block of 16 slots of " in outcome.out


def test_the_ranks_of_a_text_are_shown(decode, adapter, model, tmp_path):
    picture = tmp_path / "ranks.png"
    argv = ("--method", "dynakv", "--adapter", adapter, "--explain", "Why not?")
    outcome = decode(*argv, "--trace", picture, "--quiet")
    assert (outcome.code, outcome.err) == (0, "")
    head, *lines, total = outcome.out.splitlines()
    assert head.startswith("token") and head.endswith("(all of 16)")
    assert [line.split("  ")[0].strip() for line in lines] == [repr(c) for c in "Why not?"]
    assert all(len(line.split()[-1]) == 3 for line in lines)  # a sign a layer
    assert total.startswith("all tokens")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_shades_say_how_much_is_kept():
    ranks = np.array([[[32, 4], [32, 4]], [[16, 0], [0, 8]]])
    _, first, second, _ = shown(ranks, ["a", "\n" * 20], 32).splitlines()
    assert first == "'a'               0.75  0.50    █▂"
    assert second == "'\\n\\n\\n\\n\\n\\n\\n…  0.06  0.19    ▁▁"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--method dynakv", "--method dynakv needs --adapter DIR"),
        ("--method dynakv --adapter none", "--adapter: none: cannot read adapter.json"),
        ("--adapter {}", "is for methods dynakv and thinkv: drop it, or pass one of them"),
        ("--method h2o --tau 0.2", "--tau 0.2 is for methods dynakv and thinkv"),
        ("--method dynakv --adapter {} --tau 1", "--tau must be from 0 to below 1, got 1.0"),
        ("--method dynakv --adapter {} --latent-blocks 5", "--latent-blocks must divide the 16"),
        ("--method dynakv --adapter {} --kv-bits kivi2", "--kv-bits kivi2 is not for latents"),
        ("--method dynakv --adapter {} --prompt-bits 8", "--prompt-bits 8 has no effect"),
        (
            "--method dynakv --adapter {} --kv-budget 64",
            "--kv-budget 64 has no effect with method dynakv, which evicts nothing without "
            "--selector",
        ),
        ("--method dynakv --adapter {} --selector h2o", "--selector H2O needs more than keys"),
        ("--fit 1GiB --adapter {}", "and --fit exclude each other"),
    ],
)
def test_what_cannot_work_is_refused_before_weights_load(
    decode, adapter, monkeypatch, argv, message
):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    outcome = decode("-p", "a", *argv.format(adapter).split())
    assert (outcome.code, outcome.out) == (2, "")
    assert message in outcome.err and outcome.err.count("\n") == 1


def test_another_models_adapter_is_refused_before_weights_load(
    decode, adapter, model, tmp_path, monkeypatch
):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    argv = ("--method", "dynakv", "--adapter", adapter, "-p", "a")
    outcome = decode(*argv, model=tmp_path)
    assert outcome.code == 2 and "trained for small (fingerprint" in outcome.err


@pytest.mark.parametrize("name", ["adapter.json", "adapter.safetensors"])
@pytest.mark.parametrize("flag", ["-o", "--save-cache"])
def test_no_answer_takes_the_adapters_place(decode, adapter, name, flag):
    file = pathlib.Path(adapter, name)
    before = file.read_bytes()
    outcome = decode("-p", "a", "--method", "dynakv", "--adapter", adapter, flag, file)
    assert outcome.code == 2 and f"{file} is also an input" in outcome.err
    assert file.read_bytes() == before


def test_explaining_needs_an_adapter_and_gives_no_answer(decode, adapter):
    assert "--explain shows ranks: pass --method dynakv" in decode("--explain", "a").err
    outcome = decode("--explain", "a", "--method", "dynakv", "--adapter", adapter, "-o", "x")
    assert "--output is for answers" in outcome.err
