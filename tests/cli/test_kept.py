"""``--save-cache`` and ``--load-cache``."""

import importlib
import json

import pytest

import kvjax
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.outline import outline
from kvjax.command.prompts import Row
from kvjax.recipes import full

PROMPT = ("-p", "Tell me a story.", "--method", "uniform", "--page-size", "16", "--greedy")
REST = ("--method", "uniform", "--page-size", "16", "--greedy")


def tokens(outcome) -> str:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)["text"]


@pytest.mark.slow
def test_an_answer_goes_on(decode, tmp_path):
    """Through a file, with a next turn and without one."""
    path = tmp_path / "cache"
    form = ("--format", "json")
    whole = decode(*PROMPT, *form, "--max-new-tokens", 40)
    first = decode(*PROMPT, *form, "--max-new-tokens", 23, "--save-cache", path)
    on = decode(*REST, *form, "--max-new-tokens", 17, "--load-cache", path)
    assert tokens(first) + tokens(on) == tokens(whole)
    assert json.loads(on.out)["usage"]["cached"] == json.loads(first.out)["usage"]["prompt"] + 22
    how = ("--max-new-tokens", 9, "--load-cache", path, "--save-cache", path)
    turn = decode(*REST, *form, *how, "-p", "More")
    usage = json.loads(turn.out)["usage"]
    assert usage["prompt"] - usage["cached"] == 1 + len("|u:More|a:")
    assert len(tokens(turn)) == 9
    again = decode(*REST, *form, *how, "-p", "More")
    assert json.loads(again.out)["usage"]["prompt"] > usage["prompt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture
def saved(decode, folder):
    """A cache of the model."""
    if not (folder / "cache").exists():
        outcome = decode("-p", "Hello", "--max-new-tokens", 4, "--save-cache", folder / "cache")
        assert outcome.code == 0 and len(outcome.out) == 5
    return folder / "cache"


@pytest.fixture
def load(decode, saved):
    """Goes on from it."""

    def run(*argv, **how):
        return decode("--load-cache", saved, "--max-new-tokens", 4, *argv, **how)

    return run


SAVED, TURN, CONTEXT = len("u:Hello|a:") + 4, len("|u:x|a:"), 1 << 16


@pytest.mark.parametrize("plan", [True, False])
@pytest.mark.parametrize(("argv", "read"), [(("-p", "x"), SAVED + TURN), ((), SAVED)])
def test_what_was_read_counts_in_the_context(decode, saved, monkeypatch, plan, argv, read):
    monkeypatch.setattr(kvjax, "stream", lambda *_, **__: iter(()))
    room = CONTEXT - read
    argv = [*argv, "--load-cache", saved, *(["--plan"] if plan else []), "--max-new-tokens"]
    assert decode(*argv, room).err == ""
    assert decode(*argv, room + 1).err == (
        f"kvjax: --max-new-tokens {room + 1}: the model's context of {CONTEXT} tokens leaves "
        f"{room} beside what has been read\n"
    )


@pytest.mark.parametrize("argv", [("-p", "x"), ()])
def test_a_run_is_planned_as_it_is(decode, model, saved, monkeypatch, argv):
    """With what has been read, which makes it more than a page long, before weights load."""
    planned, new = [], 45
    module = importlib.import_module("kvjax.decoding.generate")
    monkeypatch.setattr(module, "decode_all", lambda *args, **_: planned.append(args[2]) or ())
    how = ("--load-cache", saved, "--max-new-tokens", new)
    assert decode(*argv, *how).code == 0
    config = DecodeConfig(model=str(model), load_cache=str(saved), max_new_tokens=new)
    found = outline(config, [Row(1, argv[1] if argv else [])]).plan(full())
    assert found.geometry == planned[0].geometry
    monkeypatch.setattr(kvjax, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    lines = decode(*argv, *how, "--plan").out
    assert f"{found.tokens}" in next(line for line in lines.splitlines() if "tokens a row" in line)
    short = decode(*argv, *how, "--memory", found.nbytes - 1)
    assert short.code == 4 and f"1 row of {found.tokens} tokens" in short.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--method", "uniform"), "it was kept with method full and not uniform"),
        (("--page-size", 32), "it was kept with page_size 64 and not 32"),
        (("--dtype", "bfloat16"), "made with dtype float32 and not bfloat16"),
        (("--system-prompt", "x"), "--system-prompt does not go with --load-cache"),
        (("--fit", "1GiB"), "--fit does not go with --load-cache"),
        (("-n", 2, "--temperature", 1), "--samples does not go with --load-cache"),
        (("--compare", "full"), "--compare does not go with --load-cache"),
    ],
)
def test_what_does_not_go_together(load, argv, message):
    outcome = load("-p", "x", *argv)
    assert outcome.code == 2 and message in outcome.err and outcome.out == ""
    assert outcome.err.count("\n") == 1


def test_no_cache_is_one_line(decode, saved, tmp_path):
    cut = tmp_path / "cut"
    cut.write_bytes(saved.read_bytes()[:-1])
    for path in (cut, tmp_path / "none", tmp_path):
        for more in ((), ("--plan",), ("--memory", "1GiB")):
            outcome = decode("--load-cache", path, "-p", "x", *more)
            assert outcome.code == 2 and outcome.out == ""
            assert outcome.err.startswith(f"kvjax: --load-cache: {path}: it cannot be read")
            assert outcome.err.count("\n") == 1


def test_where_it_cannot_be_saved(decode, load, saved, tmp_path):
    for path in (tmp_path, tmp_path / "none" / "x"):
        outcome = decode("-p", "x", "--save-cache", path)
        assert outcome.code == 2 and "--save-cache" in outcome.err
    outcome = load("-p", "x", "-o", saved)
    assert outcome.code == 2 and "is also an input" in outcome.err


def test_a_full_disk_leaves_the_answer(decode, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvjax.decoding.saved.write_atomically", full)
    path = tmp_path / "cache"
    outcome = decode("-p", "Hello", "--max-new-tokens", 4, "--save-cache", path)
    assert outcome.code == 2 and len(outcome.out) == 5 and not path.exists()
    assert f"--save-cache: cannot write {path}: No space left on device" in outcome.err
