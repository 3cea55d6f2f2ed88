import json
import pathlib
import shutil
import subprocess
import sys
import types

import huggingface_hub
import jax
import numpy as np
import pytest
from huggingface_hub import errors

from kvjax import loading
from kvjax.errors import ModelError, UsageError
from kvjax.models.forward import forward
from tests import smollm2

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def directory(tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(GOLDEN / "llama", tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("asked the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub that knows owner/llama; records what it is asked for."""
    asked = []
    snapshot = tmp_path / "snapshots" / COMMIT
    shutil.copytree(GOLDEN / "llama", snapshot)

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def write_generation(directory: pathlib.Path, **fields) -> None:
    (directory / "generation_config.json").write_text(json.dumps(fields))


def test_load_a_directory():
    lm = loading.load(GOLDEN / "llama")
    assert lm.config == loading.read_config(GOLDEN / "llama")
    assert (lm.dtype, lm.revision, lm.tokenizer) == ("float32", None, None)
    assert lm.source == str(GOLDEN / "llama")
    assert all(leaf.dtype == lm.dtype for leaf in jax.tree.leaves(lm.model))


def test_fingerprint_does_not_depend_on_dtype():
    assert loading.load(GOLDEN / "llama").fingerprint == (
        loading.load(str(GOLDEN / "llama"), dtype="bfloat16").fingerprint
    )


@pytest.mark.parametrize("dtype", ["float16", "int8", "double", "nonsense", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(UsageError, match="dtype must be one of float32, bfloat16"):
        loading.load(GOLDEN / "llama", dtype=dtype)


@pytest.mark.parametrize(
    "name",
    [
        "/no/such/model",
        "./no/such",
        "../no",
        "~/no-such-model",
        "no-such-model",
        "some/deep/path",
        "owner/model.gguf",
        "owner/model.safetensors",
        "",
        ".",
        "a b/c",
        "tests/no-such-model",  # a folder of that name is here
        "owner/\0",
    ],
)
def test_what_looks_like_a_path_never_asks_the_hub(name, monkeypatch):
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    with pytest.raises(ModelError, match=r"no such file or directory|no config\.json"):
        loading.load(name)


def test_a_path_object_never_asks_the_hub():
    with pytest.raises(ModelError, match="no such file"):
        loading.load(pathlib.Path("owner/name"))


def test_a_revision_of_a_local_path_is_refused():
    with pytest.raises(UsageError, match="revision 'main' only applies to hub ids"):
        loading.load(GOLDEN / "llama", revision="main")


def test_hub_id(hub):
    lm = loading.load("owner/llama", revision="v1")
    assert (lm.source, lm.revision) == ("owner/llama", COMMIT)
    ((name, revision, patterns),) = hub
    assert (name, revision) == ("owner/llama", "v1")
    assert {"config.json", "model*.safetensors", "tokenizer*", "chat_template*"} <= set(patterns)
    assert not any(
        pattern.endswith((".bin", ".py", "*")) and "." in pattern for pattern in patterns
    )


def test_only_the_tokenizer_is_fetched_of_another_model(hub, directory):
    with pytest.raises(ModelError, match="holds no tokenizer"):
        loading.load(directory, tokenizer="owner/llama")
    ((_, _, patterns),) = hub
    assert not any("safetensors" in pattern for pattern in patterns)


def hub_error(kind: type) -> Exception:
    return kind("first line\nsecond line", response=types.SimpleNamespace(headers={}, request=None))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (lambda: hub_error(errors.GatedRepoError), "set HF_TOKEN"),
        (lambda: hub_error(errors.RepositoryNotFoundError), "no such model at revision 'v1'"),
        (lambda: hub_error(errors.RevisionNotFoundError), "no such model at revision 'v1'"),
        (lambda: hub_error(errors.HfHubHTTPError), "first line"),
        (lambda: errors.LocalEntryNotFoundError("no connection"), "check the network"),
        (lambda: ConnectionError("connection refused"), "connection refused"),
        (lambda: OSError(28, "No space left on device"), "No space left"),
    ],
)
def test_network_failures_say_what_to_do(monkeypatch, failure, message):
    def download(*args, **kwargs):
        raise failure()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=message) as error:
        loading.load("owner/name", revision="v1")
    assert str(error.value).startswith("owner/name: ")
    assert "\n" not in str(error.value)


def test_offline_is_honoured(tmp_path):
    """In a process of its own: huggingface_hub reads the variable when it is imported."""
    program = "import kvjax\ntry: kvjax.load('owner/name')\nexcept Exception as e: print(repr(e))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("ModelError('owner/name: not in the local cache")
    assert "HF_HUB_OFFLINE is set" in done.stdout


def test_directory_without_a_config(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        loading.load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_broken_json(directory, name, text):
    (directory / name).write_bytes(text)
    with pytest.raises(ModelError, match=name) as error:
        loading.load(directory)
    assert "\n" not in str(error.value)


def test_a_file_of_weights_alone(directory):
    with pytest.raises(ModelError, match="pass its directory"):
        loading.load(directory / "model.safetensors")


def test_a_broken_tokenizer(directory):
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer cannot be loaded") as error:
        loading.load(directory)
    assert "\n" not in str(error.value)


def write_tokenizer(directory: pathlib.Path, vocabulary: dict[str, int]) -> None:
    # Written by hand: the package complains of one with gaps that it is to save.
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    whole = {"version": "1.0", "added_tokens": [], "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("largest", [95, 96, 1000])
def test_no_id_of_the_tokenizer_is_beyond_the_models(directory, largest):
    """However few they are: JAX would take the last row of the table for one that is."""
    write_tokenizer(directory, {"a": 3, "b": largest})
    if largest > 95:
        message = rf"has a token of id {largest}, and the model's end at 95; pass the tokenizer"
        with pytest.raises(ModelError, match=message):
            loading.load(directory)
        return
    text = loading.load(directory).tokenizer
    assert text.encode("ab") == [3, 95]
    assert {i: one for i, one in enumerate(text.texts()) if one} == {3: "a", 95: "b"}


def test_greedy_without_a_generation_config(directory):
    assert loading.load(directory).defaults == loading.GenerationDefaults(temperature=0.0)


def test_greedy_unless_the_authors_sample(directory):
    write_generation(directory, do_sample=False, temperature=0.7, top_p=0.9, eos_token_id=3)
    assert loading.load(directory).defaults == loading.GenerationDefaults(0.0, stop_ids=(3,))


def test_sampling_as_the_authors_do(directory):
    write_generation(directory, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.05)
    assert loading.load(directory).defaults == loading.GenerationDefaults(0.6, 20, 0.95, 0.05)
    write_generation(directory, do_sample=True)
    assert loading.load(directory).defaults == loading.GenerationDefaults(1.0)


def test_every_stop_id_counts(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    write_generation(directory, eos_token_id=[5, 9, 5])
    assert loading.load(directory).defaults.stop_ids == (5, 7, 9)


@pytest.mark.parametrize("ids", [1.5, "x", [1, "a"], {"a": 1}, [[1]], True, 10**12])
def test_stop_ids_that_are_none(directory, ids):
    write_generation(directory, eos_token_id=ids)
    with pytest.raises(ModelError, match="eos_token_id must hold token ids, got"):
        loading.load(directory)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1}, {"top_p": 1.5}, {"top_k": 0.5}, {"min_p": "a"}, {"temperature": True}],
)
def test_settings_out_of_range(directory, fields):
    write_generation(directory, do_sample=True, **fields)
    (name,) = fields
    with pytest.raises(ModelError, match=rf"generation_config\.json: {name} is"):
        loading.load(directory)


def test_smollm2_logits_and_greedy_tokens_as_transformers_gives_them():
    lm = loading.load(smollm2.path())
    record = json.loads((GOLDEN / "smollm2.json").read_text())
    prompt = record["prompt_ids"]
    with np.load(GOLDEN / "smollm2.npz") as golden:
        expected, greedy = golden["logits"], golden["greedy"]
    logits = np.asarray(forward(lm, [*prompt, *greedy[:-1].tolist()]))[0]
    error = np.abs(logits[len(prompt) - 4 : len(prompt)] - expected).max()
    assert error <= 1e-4 * np.abs(expected).max()
    np.testing.assert_array_equal(logits[len(prompt) - 1 :].argmax(-1), greedy)
    assert lm.defaults == loading.GenerationDefaults(temperature=0.0, stop_ids=(2,))
