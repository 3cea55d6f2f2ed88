"""The flags of the cache: which recipe they make, and which of them are refused."""

import dataclasses
import json

import pytest

import kvjax
from kvjax import recipes
from kvjax.command.decode_options import DecodeConfig, decode_parser
from kvjax.command.options import entries, parse
from kvjax.command.recipe import EVICTING, FLAGS, given_recipe
from kvjax.compress import selectors
from kvjax.decode import main
from kvjax.matching import AttentionMatching

EVERY = {
    "method": "snapkv_decode",
    "kv-bits": "k4v2",
    "kv-bits-layers": "0:8,*:4",
    "kv-budget": "0.25",
    "sink-tokens": "2",
    "recent-window": "24",
    "compress-every": "64",
    "skip-layers": "-1,0",
    "compress": "prompt,think",
    "selector": "rkv",
    "page-size": "32",
}


def options(*argv: str) -> DecodeConfig:
    return parse(DecodeConfig, decode_parser(), argv)[0]


def flags(values: dict[str, str]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", value)]


UNAIDED = [name for name in recipes.METHODS if name not in recipes.ADAPTED]


@pytest.mark.parametrize("method", UNAIDED)
def test_a_method_alone_is_the_library_s_recipe(method):
    assert given_recipe(options("--method", method)) == recipes.METHODS[method]()


def test_the_names_that_flags_take_are_the_library_s():
    assert entries(DecodeConfig)["method"].choices == tuple(recipes.METHODS)
    assert entries(DecodeConfig)["selector"].choices == tuple(recipes.SELECTORS)
    assert {kind.__name__ for kind in recipes.SELECTORS.values()} == set(selectors.__all__)
    for name in EVICTING:
        recipe = recipes.METHODS[name]()
        assert recipe.selector is not None or recipe.retention is not None


def test_every_flag_reaches_its_field():
    recipe = given_recipe(options(*flags(EVERY)))
    assert recipe == recipes.Recipe(
        "snapkv_decode",
        page_size=32,
        codec="k4v2",
        layer_codecs=((0, "int8"), ("*", "int4")),
        selector=selectors.RKV(),
        budget=0.25,
        sinks=2,
        recent=24,
        every=64,
        compress=("prompt", "think"),
        skip_layers=(-1, 0),
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--method", "full", "--page-size", "16"], recipes.full(16)),
        (["--method", "uniform", "--kv-bits", "fp8"], recipes.uniform("fp8")),
        (["--method", "uniform", "--recent-window", "64"], recipes.uniform(window=64)),
        (["--method", "uniform", "--kv-bits", "nvfp4"], recipes.uniform("nvfp4")),
        (["--method", "kivi", "--kv-bits", "4"], recipes.kivi("kivi4")),
        (["--method", "kivi", "--recent-window", "64"], recipes.kivi(window=64)),
        (["--method", "h2o", "--kv-budget", "200"], recipes.h2o(budget=200)),
        (["--method", "h2o", "--kv-budget", "1.0"], recipes.h2o(budget=1.0)),
        (["--method", "h2o", "--protect-prompt"], recipes.h2o(protect_prompt=True)),
        (["--method", "h2o", "--compress-every", "0"], recipes.h2o(every=0)),
        (["--method", "rkv", "--skip-layers", "-1"], recipes.rkv(skip_layers=(-1,))),
        (["--method", "tova", "--compress", "answer"], recipes.tova(compress=("answer",))),
        (
            ["--method", "streaming", "--positions", "contiguous"],
            recipes.streaming(positions="contiguous"),
        ),
        (
            ["--method", "h2o", "--kv-bits", "4", "--kv-bits-layers", "-1:16"],
            recipes.h2o(codec="int4", layer_codecs=((-1, "bf16"),)),
        ),
        (["--method", "tam", "--paper"], recipes.tam(paper=True)),
        (
            ["--method", "pam", "--compress-once", "--kv-budget", "0.1", "--share-of", "longest"],
            recipes.pam(once=True, budget=0.1, share_of="longest"),
        ),
        (
            ["--method", "tam", "--paper", "--share-of", "held"],
            recipes.tam(paper=True, share_of="held"),
        ),
        (
            ["--method", "rkv", "--compactor", "faithful"],
            recipes.rkv(compactor=AttentionMatching(mode="faithful")),
        ),
        (
            ["--method", "tam", "--compactor", "none", "--selector", "omp"],
            recipes.tam(compactor=None, selector=selectors.OMP()),
        ),
        (
            ["--method", "thinkv", "--compactor", "matching"],
            recipes.thinkv(compactor=AttentionMatching()),
        ),
    ],
)
def test_flags_make_a_recipe(argv, expected):
    assert given_recipe(options(*argv)) == expected


def test_a_file_gives_the_shares_of_heads(decode, tmp_path):
    path = tmp_path / "shares.json"
    path.write_text("[[1, 2], [3, 4], [0, 1]]")
    argv = ["--method", "tam", "--kv-budget", "64", "--head-shares", str(path)]
    shares = ((1.0, 2.0), (3.0, 4.0), (0.0, 1.0))
    assert given_recipe(options(*argv)) == recipes.tam(budget=64, head_shares=shares)
    path.write_text("[[1, 2]]")
    outcome = decode("-p", "a", *argv)
    assert outcome.code == 2
    assert "--head-shares must be 3 layers of 2 KV heads, got (1, 2)" in outcome.err


def test_printed_recipes_read_back_to_the_same(capsys, tmp_path):
    argv = [*flags(EVERY), "--protect-prompt", "--stop", "a, b", "--stop", "\n", "--memory", "2GiB"]
    assert main([*argv, "--print-config"]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    assert options("--config", str(path)) == options(*argv)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("kv-bits: 4", "kv_bits", "4"),
        ("kv_budget: 0.25", "kv_budget", "0.25"),
        ("kv_budget: 1024", "kv_budget", "1024"),
        ("kv_budget_bytes: 65536", "kv_budget_bytes", "65536"),
        ("skip_layers: [0, -1]", "skip_layers", "0,-1"),
        ("skip_layers: -1,0", "skip_layers", "-1,0"),
        ("compress: [think, answer]", "compress", "think,answer"),
        ("fit: 2GiB", "fit", "2GiB"),
        ("memory: 1000000", "memory", "1000000"),
        ("stop: end", "stop", ("end",)),
        ('stop: ["a,b", "c"]', "stop", ("a,b", "c")),
        ("method: rkv", "method", "rkv"),
    ],
)
def test_a_file_may_say_it_in_its_own_way(tmp_path, line, field, value):
    path = tmp_path / "run.yaml"
    path.write_text(line)
    assert options("--config", str(path)) == DecodeConfig(**{field: value})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kv_bits: true", "kv_bits must be text"),
        ("kv_bits_layers: {0: 8}", "kv_bits_layers must be text"),
        ("skip_layers: []", "skip_layers must be text"),
        ("stop: [1]", "stop must be text or a list of texts, got [1]"),
        ('stop: ""', "--stop must not be empty"),
        ("method: magic", "method must be one of full, uniform"),
        ("sink_tokens: 1.5", "sink_tokens must be a whole number, got 1.5"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused(tmp_path, capsys, line, message):
    path = tmp_path / "run.yaml"
    path.write_text(line)
    assert main(["--config", str(path), "-p", "a"]) == 2
    assert message in capsys.readouterr().err


REFUSED = [
    # What a method would ignore.
    ("--kv-budget 64", "--kv-budget 64 has no effect with method full, which evicts nothing"),
    ("--method uniform --kv-budget 64", "--kv-budget 64 has no effect with method uniform"),
    (
        "--method kivi --kv-budget-bytes 1MiB",
        "--kv-budget-bytes 1MiB has no effect with method kivi",
    ),
    ("--method uniform --sink-tokens 4", "--sink-tokens 4 has no effect"),
    ("--method kivi --protect-prompt", "--protect-prompt has no effect"),
    ("--compress-every 16", "--compress-every 16 has no effect"),
    ("--method uniform --skip-layers 0", "--skip-layers 0 has no effect"),
    ("--compress think", "--compress think has no effect"),
    ("--positions original", "--positions original has no effect"),
    ("--method kivi --selector h2o", "pass --method with one of streaming, random, h2o"),
    ("--kv-bits 4", "which keeps every token as it was made: drop it, or pass --method uniform"),
    ("--kv-bits-layers 0:8", "--kv-bits-layers 0:8 has no effect with method full"),
    ("--recent-window 8", "--recent-window 8 has no effect with method full"),
    ("--method snapkv --compress-every 128", "or pass --method snapkv_decode"),
    (
        "--method h2o --positions contiguous",
        "not for method h2o: drop it, or pass --method streaming",
    ),
    ("--method streaming --selector h2o --positions contiguous", "not for selector h2o"),
    ("--method snapkv --protect-prompt", "--protect-prompt leaves nothing to evict"),
    ("--method snapkv --compress think", "--compress think leaves nothing to evict"),
    ("--method h2o --protect-prompt --compress prompt", "drop one of them"),
    ("--fit 1GiB --method h2o", "--method h2o and --fit exclude each other"),
    ("--fit 1GiB --kv-bits 4", "--kv-bits 4 and --fit exclude each other, since --fit chooses it"),
    ("--fit 1GiB --memory 1GiB", "--fit and --memory exclude each other"),
    ("--method h2o --kv-budget 64 --kv-budget-bytes 1MiB", "exclude each other: give one"),
    ("--method uniform --compactor matching", "--compactor matching has no effect"),
    ("--compress-once", "--compress-once has no effect with method full"),
    ("--method snapkv --compress-once", "--compress-once has no effect where nothing is evicted"),
    ("--method thinkv --share-of held", "--share-of held has no effect with method thinkv"),
    (
        "--method rkv --share-of held",
        "--share-of held has no effect with a budget of 1,024 tokens, which is no share",
    ),
    (
        "--method tam --kv-budget 512 --share-of longest",
        "--share-of longest has no effect with --kv-budget 512, which is no share: drop it, or "
        "give a --kv-budget of 1.0 or below",
    ),
    (
        "--method tam --paper --kv-budget-bytes 1MiB --share-of held",
        "--share-of held has no effect with --kv-budget-bytes 1MiB",
    ),
    ("--method h2o --paper", "--paper is for methods thinkv and tam"),
    ("--method thinkv --kv-bits nvfp4 --compactor matching", "--compactor changes single values"),
    ("--method h2o --head-shares none.json", "--head-shares none.json must be a JSON file"),
    # Values.
    ("--method h2o --kv-budget 10", "--kv-budget 10 is below the 4 first and the 32 last"),
    ("--method h2o --kv-budget 10", "pass 37"),
    ("--method h2o --kv-budget 60 --recent-window 64", "pass 69"),
    ("--method h2o --kv-budget 1.5", "--kv-budget must be a number of tokens or a share"),
    ("--method h2o --kv-budget half", "between 0 and 1, got 'half'"),
    ("--method h2o --kv-budget nan", "between 0 and 1, got nan"),
    ("--method h2o --kv-budget=-5", "between 0 and 1, got -5"),
    ("--method h2o --compress-every 20", "--compress-every 20 must be a multiple of the 16 steps"),
    ("--method h2o --compress-every 20", "pass 32"),
    ("--method h2o --compress-every -1", "--compress-every must be at least 0, got -1"),
    ("--method h2o --sink-tokens -1", "--sink-tokens must be at least 0, got -1"),
    ("--method uniform --recent-window 0", "--recent-window must be a whole number of at least 1"),
    ("--method uniform --kv-bits 5", "--kv-bits: no codec is named '5'; there are bf16"),
    ("--method uniform --kv-bits-layers 0:5", "--kv-bits-layers: no codec is named '5'"),
    ("--method uniform --kv-bits-layers 8", "--kv-bits-layers must be pairs of a layer (or *)"),
    ("--method uniform --kv-bits-layers x:8", "--kv-bits-layers must be pairs"),
    ("--method h2o --kv-bits nvfp4", "--kv-bits nvfp4 shares scales among tokens"),
    ("--method kivi --kv-bits nvfp4", "--kv-bits nvfp4 is not KIVI's"),
    ("--method h2o --skip-layers first", "--skip-layers must be numbers of layers"),
    ("--method h2o --compress thinking", "--compress takes prompt, think, answer, got thinking"),
    ("--method h2o --selector best", "invalid choice: 'best'"),
    ("--fit much", "--fit must be a size like 64MiB or 2GiB, or bytes, got 'much'"),
    ("--memory 0", "--memory must be a size"),
    ("--method h2o --kv-budget-bytes x", "--kv-budget-bytes must be a size"),
    # What the model or the prompt decides.
    ("--method h2o --skip-layers 3", "--skip-layers names layer 3, and the model has 3 layers"),
    ("--method uniform --kv-bits-layers 7:8", "--kv-bits-layers names layer 7"),
    ("--method kivi", "--kv-bits kivi2 shares a scale among 32 channels"),
    (
        "--method uniform --kv-bits kivi2-g8 --page-size 4",
        "--page-size 4 must be a multiple of the 8",
    ),
    (
        "--method h2o --protect-prompt --kv-budget 40",
        "--kv-budget 40 is below a prompt of 6 tokens",
    ),
    ("--method h2o --kv-budget-bytes 9", "--kv-budget-bytes 9 is too small: h2o keeps at least 37"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_what_cannot_work_is_refused_before_weights_load(decode, monkeypatch, argv, message):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    outcome = decode("-p", "a", *argv.split())
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvjax: ") and outcome.err.count("\n") == 1
    assert message in outcome.err


def test_a_field_of_every_option_has_its_flag():
    fields = {field.name for field in dataclasses.fields(recipes.Recipe)}
    # A segmenter and a retention have flags of their own.
    assert fields - set(FLAGS) == {
        "name",
        "tick",
        "segmenter",
        "retention",
        "projector",
    }
    names = {entry.flag for entry in entries(DecodeConfig).values()}
    assert set(FLAGS.values()) <= names


def test_a_compressed_answer_is_the_library_s_and_its_record_says_what_was_kept(decode, model):
    prompt = "tell me " * 12
    argv = ["--method", "tova", "--kv-budget", "48", "--kv-bits", "8", "--skip-layers", "0"]
    outcome = decode("-p", prompt, *argv, "--max-new-tokens", 40, "--format", "json", "--stats")
    assert outcome.code == 0
    record = json.loads(outcome.out)
    recipe = recipes.tova(budget=48, codec="int8", skip_layers=(0,))
    lm = kvjax.load(model)
    [result] = kvjax.generate(lm, [prompt], recipe=recipe, max_new_tokens=40, batch_size=1)
    assert record["text"] == result.text
    kv = record["kv"]
    assert (kv["method"], kv["budget"]) == ("tova", 48)
    assert kv["logical_tokens"] == record["usage"]["prompt"] + 39
    assert [layer["codec"] for layer in kv["per_layer"]] == ["int8"] * 3
    first, *others = [layer["live_tokens"] for layer in kv["per_layer"]]
    assert first == kv["logical_tokens"]
    assert all(live <= 48 + 16 + 16 for live in others)
    assert kv["live_tokens"]["end"] == pytest.approx((first + sum(others)) / 3)
    heads = 2
    assert kv["evictions"] == heads * sum(first - live for live in others)
    held = kv["bytes"]
    kinds = ("codes", "scales", "metadata", "fp_buffer")
    assert 0 < sum(held[kind] for kind in kinds) < held["total_live"]
    assert kv["ratio"]["end"] == held["total_live"] / held["full_bf16"]
    assert record["run"]["recipe"]["selector"] == {"name": "TOVA"}
    assert record["run"]["recipe"]["budget"] == 48
    cache = outcome.err.splitlines()[-1]
    assert cache.startswith(f"cache tova: live {kv['live_tokens']['end']:,.0f} of ")
    assert cache.endswith(f" · {kv['evictions']:,} evictions in all layers and heads")


@pytest.mark.parametrize("method", UNAIDED)
def test_a_plan_of_every_method_needs_no_weights(decode, model, tmp_path, method):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((model / name).read_bytes())
    extra = ["--kv-bits", "kivi2-g8"] if method == "kivi" else []
    outcome = decode(
        "--plan", "--method", method, *extra, "--memory", "30MiB", "-p", "a", model=tmp_path
    )
    assert (outcome.code, outcome.err) == (0, "")
    lines = dict(line.split("  ", 1) for line in outcome.out.splitlines())
    assert lines["method"].strip() == method
    assert lines["memory"].strip() == "30.00 MiB"
    assert int(lines["largest batch"]) > 8
    assert ("budget" in lines) == (method in EVICTING)


def test_memory_that_is_given_is_the_limit_of_plans_and_runs(decode, monkeypatch):
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    for argv in (["--plan"], []):
        outcome = decode("-p", "a", "--memory", "200KiB", *argv)
        assert outcome.code == 4
        assert "there are 200.00 KiB" in outcome.err


def test_compared_with_the_uncompressed_run(decode):
    prompt = "tell me " * 12
    argv = ["--method", "uniform", "--kv-bits", "2", "--compare", "full", "--max-new-tokens", 20]
    outcome = decode("-p", prompt, *argv, "--format", "json")
    quality = json.loads(outcome.out)["quality"]
    assert outcome.code == 0
    assert (quality["method"], quality["codec"]) == ("uniform", "int2")
    assert quality["kl_mean"] > 0 and 0 <= quality["top1_agreement"] <= 1
    assert len(quality["per_layer"]) == 3
    plain = decode("-p", prompt, "--compare", "full", "--max-new-tokens", 20)
    assert plain.code == 0 and "KL" in plain.err


@pytest.mark.slow
def test_compared_on_a_given_text(decode, model, tmp_path):
    """The text is the answer, and what is decoded makes no difference to the comparison."""
    file = tmp_path / "trace.txt"
    file.write_text("one two three " * 9 + "\n")
    prompt = "tell me " * 12
    argv = ["--method", "uniform", "--kv-bits", "4", "--format", "json", "--compare", "full"]
    outcome = decode("-p", prompt, *argv, "--compare-text", file, "--max-new-tokens", 3)
    record = json.loads(outcome.out)
    quality = record["quality"]
    lm = kvjax.load(model)
    text = lm.tokenizer.encode("one two three " * 9, starts=False)
    assert quality["prompt_tokens"] == record["usage"]["prompt"]
    assert quality["tokens"] == record["usage"]["prompt"] + len(text)
    [asked] = kvjax.generate(lm, [prompt], max_new_tokens=1)
    assert asked.prompt_tokens == quality["prompt_tokens"]
    missing = decode("-p", prompt, "--compare-text", file)
    assert missing.code == 2 and "--compare full" in missing.err
    absent = decode("-p", prompt, *argv, "--compare-text", tmp_path / "no.txt")
    assert absent.code == 2 and "--compare-text" in absent.err
