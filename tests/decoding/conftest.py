"""The small model with a tokenizer whose tokens are bytes, some of them parts of a character."""

import dataclasses
import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import kvjax
from kvjax.tokenizer import Tokenizer, from_directory
from tests.decoding import small
from tests.kernels.conftest import unchecked
from tests.test_tokenizer import alphabet

__all__ = ["text_lm", "tokenizer", "unchecked"]

END = 95
BYTES = [*range(32, 111), *"é世😀".encode(), *range(0xA0, 0xA7)]
TEMPLATE = "{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }};{% endfor %}A:"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    letters = alphabet()
    vocabulary = {letters[byte]: index for index, byte in enumerate(BYTES)}
    assert len(vocabulary) == END
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return from_directory(folder)


@pytest.fixture(scope="session")
def text_lm(tokenizer) -> kvjax.LanguageModel:
    return dataclasses.replace(small.lm(), tokenizer=tokenizer)
