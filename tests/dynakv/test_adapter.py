"""The files of an adapter: what is written comes back, and nothing else is taken for it."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax.dynakv.adapter import RECORD, TENSORS, Adapter, arrays, load_adapter, save_adapter
from kvjax.errors import UsageError
from kvjax.models.decoder import Decoder
from tests.dynakv.tiny import fitted, perturbed, tiny
from tests.models.modules import randomised

FLAG = "--adapter"


@pytest.fixture
def adapter() -> Adapter:
    lm = tiny()
    spectra = perturbed(fitted(lm, inverse="free", centre="mean", tau=0.25))
    return Adapter(spectra, lm.fingerprint, lm.source, {"steps": 3}, {"rate_hard": 0.5})


@pytest.fixture
def folder(adapter, tmp_path):
    save_adapter(adapter, tmp_path / "new" / "adapter")
    return tmp_path / "new" / "adapter"


def test_what_is_written_comes_back(adapter, folder):
    assert sorted(path.name for path in folder.iterdir()) == [RECORD, TENSORS]
    again = load_adapter(folder, tiny(), flag=FLAG)
    assert again.spectra.settings == adapter.spectra.settings
    assert (again.training, again.measured) == (adapter.training, adapter.measured)
    assert again.decoder is None
    stored, expected = arrays(again.spectra), arrays(adapter.spectra)
    assert set(stored) == set(expected) and "layers.0.keys.u_inverse" in stored
    for name, value in expected.items():
        np.testing.assert_array_equal(stored[name], value)


def test_it_is_written_the_same_every_time(adapter, folder, tmp_path):
    save_adapter(adapter, tmp_path)
    for name in (TENSORS, RECORD):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


def test_a_trained_model_comes_with_it(adapter, tmp_path):
    lm = tiny()
    trained = randomised(lambda: Decoder(lm.config, dtype=lm.dtype, rngs=nnx.Rngs(0)), 1.0)
    save_adapter(dataclasses.replace(adapter, decoder=trained), tmp_path)
    again = load_adapter(tmp_path, lm, flag=FLAG)
    np.testing.assert_array_equal(again.decoder.embed[...], trained.embed[...])
    assert np.abs(again.decoder.embed[...] - lm.model.embed[...]).max() > 0.1


def test_another_models_is_refused(folder):
    with pytest.raises(UsageError, match=f"^{FLAG}: .*trained for tiny llama.*not for this model"):
        load_adapter(folder, tiny(layers=2), flag=FLAG)


@pytest.mark.parametrize("place", [0, 9, -1])
def test_a_changed_byte_is_noticed(folder, place):
    content = bytearray((folder / TENSORS).read_bytes())
    content[place] ^= 1
    (folder / TENSORS).write_bytes(content)
    with pytest.raises(UsageError, match=f"^{FLAG}: .*{TENSORS} is damaged"):
        load_adapter(folder, tiny(), flag=FLAG)


@pytest.mark.parametrize("name", [TENSORS, RECORD])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_file_cut_short_is_refused(folder, name, length):
    (folder / name).write_bytes((folder / name).read_bytes()[:length])
    with pytest.raises(UsageError, match=f"^{FLAG}: .*(damaged|not readable)"):
        load_adapter(folder, tiny(), flag=FLAG)


@pytest.mark.parametrize("name", [TENSORS, RECORD])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(UsageError, match=f"^{FLAG}: .*cannot read {name}: No such file"):
        load_adapter(folder, tiny(), flag=FLAG)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "no adapter of format 1"),
        ({"more": 1}, "more is unknown"),
        ({"spectral": []}, "spectral must be a dict"),
        ({"spectral": {"gate": "head"}}, "not usable with this version: gate"),
        ({"spectral": {"later": 1}}, "not usable with this version"),
        ({"spectral": {}}, "keys.mean is extra"),
        ({"fingerprint": 3}, "fingerprint must be a str"),
        ({"tensors_sha256": []}, "tensors_sha256 must be a str"),
    ],
)
def test_a_record_that_cannot_be_is_refused(folder, change, message):
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps(record | change))
    with pytest.raises(UsageError, match=f"^{FLAG}: .*{message}"):
        load_adapter(folder, tiny(), flag=FLAG)


@pytest.mark.parametrize("bad", ["shape", "type", "nan", "missing"])
def test_tensors_that_do_not_fit_are_refused(folder, bad):
    stored = safetensors.numpy.load_file(folder / TENSORS)
    name = "layers.0.values.w"
    value = stored.pop(name)
    changed = {"shape": value[:-1], "type": value.astype("f2"), "nan": value * np.nan}
    stored |= {} if bad == "missing" else {name: changed[bad]}
    content = safetensors.numpy.save(stored)
    (folder / TENSORS).write_bytes(content)
    record = json.loads((folder / RECORD).read_text())
    record["tensors_sha256"] = hashlib.sha256(content).hexdigest()
    (folder / RECORD).write_text(json.dumps(record))
    with pytest.raises(UsageError, match=f"^{FLAG}: .*{name} (must be|is)"):
        load_adapter(folder, tiny(), flag=FLAG)
