"""``--compare full``."""

import shutil

import kvjax
from kvjax.command import quality
from kvjax.command.decode_options import DecodeConfig
from tests.cli.conftest import save_tokenizer


def test_no_beginning_of_sequence_stands_before_a_given_answer(model, tmp_path, monkeypatch):
    for name in ("model.safetensors", "config.json"):
        shutil.copy(model / name, tmp_path)
    save_tokenizer(tmp_path, begins=True)
    lm = kvjax.load(tmp_path)
    begin = lm.tokenizer.bos_id
    assert begin is not None and lm.tokenizer.encode("ab")[0] == begin
    monkeypatch.setattr(quality, "compare", lambda lm, tokens, **_: tokens)
    config = DecodeConfig(compare="full", compare_text="x", chat_template=False)
    ids = quality.compared(lm, "ab", kvjax.recipes.full(), config, "cd")
    assert ids == [begin, *(ord(letter) - 32 for letter in "abcd")]
