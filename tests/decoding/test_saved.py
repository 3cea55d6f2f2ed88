"""A cache in a file: complete or not at all, and believed only if all of it can be true."""

import dataclasses
import json
import os
import resource
import signal

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

import kvjax
from kvjax.decoding import saved
from tests.decoding import small
from tests.decoding.test_conversation import FULL, RECIPES, decode, kept, prompt_of, same
from tests.models import goldens


def load(path, recipe=FULL, model=None) -> kvjax.Conversation:
    return kvjax.load_cache(model or small.lm(), path, recipe=recipe)


def rewritten(path, change) -> None:
    """Another content, with the right sum: what only the checks can tell."""
    with safe_open(path, framework="np") as file:
        facts = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, facts)
    facts["sha256"] = saved._digest(tensors, facts)
    path.write_bytes(safetensors.numpy.save(tensors, facts))


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "cache"
    kvjax.save_cache(kept(), found)
    return found


def test_what_is_saved_is_loaded(path):
    same(load(path), kept())
    with safe_open(path, framework="np") as file:
        assert file.metadata()["fingerprint"] == small.lm().fingerprint
        assert json.loads(file.metadata()["recipe"])["name"] == "full"
    rewritten(path, lambda tensors, facts: None)
    same(load(path), kept())


def test_how_long_it_is_takes_no_pages(path):
    found, whole = saved.skim_cache(path, recipe=FULL), load(path)
    assert found == whole and (found.length, found.prompt) == (whole.length, whole.prompt)
    assert sorted(found.row) == ["crowded", "length", "prompt", "stored"]
    rewritten(path, put("length", (), 39))
    with pytest.raises(kvjax.UsageError, match=f"cache: {path}: .*has read 39"):
        saved.skim_cache(path)


def test_free_pages_are_not_stored(path):
    """24 + 16 tokens are three pages a head, whatever was planned."""
    assert kept().row["0.0.k"].shape == (2 * 3, 16, 8)
    live = kept().row["0.0.pos"] >= 0
    assert (kept().row["0.0.k"][~live] == 0).all() and live.sum() == 2 * 40


def test_bfloat16_stays_what_it_is(tmp_path):
    half = {
        name: array.astype(jnp.bfloat16) if name.endswith((".k", ".v")) else array
        for name, array in kept().row.items()
    }
    conversation = dataclasses.replace(kept(), row=half, dtype="bfloat16")
    kvjax.save_cache(conversation, tmp_path / "half")
    model = dataclasses.replace(small.lm(), dtype=jnp.dtype("bfloat16"))
    same(load(tmp_path / "half", model=model), conversation)
    with pytest.raises(kvjax.UsageError, match="dtype bfloat16 and not float32: pass dtype"):
        load(tmp_path / "half")


def cut(name, at):
    return lambda tensors, _: tensors.update({name: tensors[name][at]})


def put(name, at, value):
    def change(tensors, _):
        tensors[name] = tensors[name].copy()
        tensors[name][at] = value

    return change


def fact(name, value):
    return lambda _, facts: facts.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors.pop("1.0.v"), "1.0.v is missing"),
        (lambda tensors, _: tensors.pop("tokens"), "0 tokens"),
        (lambda tensors, _: tensors.pop("length"), "length is missing"),
        (lambda tensors, _: tensors.update(x=np.zeros(1)), "x is unknown"),
        (cut("0.0.k", slice(1)), r"0.0.k must be float32 \[6, 16, 8\]"),
        (lambda t, _: t.update({"0.0.k": t["0.0.k"].astype(np.float16)}), "must be float32"),
        (put("0.0.k", (2, 3, 4), np.nan), "0.0.k is not finite"),
        (put("0.0.bias", (0, 3), np.nan), "bias is not finite"),
        (put("0.0.bias", (0, 3), -np.inf), "bias is not finite"),
        (put("0.0.bias", (0, 3), np.inf), "bias is not finite"),
        (put("0.0.bias", (2, 15), 0.0), "slots without a token"),
        (put("0.0.pos", (0, 3), 40), "not been read"),
        (put("0.0.pos", (0, 3), -2), "not been read"),
        (put("0.0.pos", (0, 3), 4), "a token twice"),
        (put("0.0.pos", (0, slice(2)), (1, 0)), "out of its place"),
        (put("0.0.pages", 0, -1), "must be float32|less than none"),
        (put("0.0.pages", slice(None), (7, -1)), "less than none"),
        (put("0.0.pages", slice(None), (6, 0)), "a token twice"),
        (put("length", (), 39), "has read 39"),
        (put("length", (), 0), "length is 0"),
        (put("prompt", (), 41), "prompt is 41"),
        (put("stored", (), -1), "stored is -1"),
        (put("crowded", (), -1), "crowded is -1"),
        (put("tokens", 3, 96), "beyond the model's 96"),
        (put("tokens", 3, -1), "beyond the model's 96"),
        (fact("answered", "18"), "answered is 18"),
        (fact("answered", "x"), "metadata cannot be read"),
        (fact("recipe", "[]"), "has no recipe"),
        (fact("recipe", "{}"), "kept with method None"),
        (fact("format", "kvjax.cache.2"), "no cache of format kvjax.cache.1"),
        (lambda _, facts: facts.pop("model"), "no cache of format"),
        (fact("fingerprint", "abc"), "made with .* pass the same model"),
    ],
)
def test_what_cannot_be_true_is_refused(path, change, message):
    rewritten(path, change)
    with pytest.raises(kvjax.UsageError, match=f"cache: {path}: .*({message})"):
        load(path)


def test_any_other_bytes_are_refused(path):
    """A bit that flips in the header or in the codes, and a file that is not whole."""
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [0, 3, *rng.integers(8, len(whole), 60)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(kvjax.UsageError, match="cache"):
            load(path)
    for size in (0, 4, 500, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(kvjax.UsageError, match="cannot be read"):
            load(path)


def test_another_model_or_recipe_is_refused(path, tmp_path):
    with pytest.raises(kvjax.UsageError, match="pass the same model"):
        load(path, model=goldens.load("qwen3"))
    with pytest.raises(kvjax.UsageError, match="method full and not streaming"):
        load(path, RECIPES["streaming"])
    with pytest.raises(kvjax.UsageError, match="cannot be read"):
        load(tmp_path / "nothing")
    with pytest.raises(kvjax.UsageError, match="directory"):
        load(tmp_path)


def test_an_old_file_stays_where_a_new_one_cannot_be_written(path, tmp_path):
    """A full disk, here a limit on the size of files."""
    whole = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) // 2, limits[1]))
    try:
        with pytest.raises(kvjax.UsageError, match="File too large"):
            kvjax.save_cache(kept(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == whole and os.listdir(tmp_path) == [path.name]
    with pytest.raises(kvjax.UsageError, match="cannot write"):
        kvjax.save_cache(kept(), tmp_path / "none" / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thinkv", "uniform", "h2o", "streaming"])
def test_every_array_is_looked_at(name, tmp_path):
    """Other recipes have scales, masses, levels and thoughts; all of them cut, and NaN."""
    recipe = RECIPES[name]
    conversation = decode(prompt_of(recipe), recipe, 70).cache
    path = tmp_path / name
    for array in conversation.row:
        kvjax.save_cache(conversation, path)
        same(load(path, recipe), conversation)
        stored = conversation.row[array]
        if stored.ndim and stored.size:
            rewritten(path, cut(array, slice(len(stored) - 1)))
            with pytest.raises(kvjax.UsageError, match=r"must be|missing"):
                load(path, recipe)
            if stored.dtype.kind == "f" and array != "thoughts.sparsity":
                kvjax.save_cache(conversation, path)
                rewritten(path, put(array, (0,) * stored.ndim, np.nan))
                with pytest.raises(kvjax.UsageError, match="not finite"):
                    load(path, recipe)
