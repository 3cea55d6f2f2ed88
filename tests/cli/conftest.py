"""A model small enough to decode in no time, with a tokenizer, and the command to run it."""

import dataclasses
import io
import json
import pathlib
import shutil
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, processors

from kvjax.decode import main

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "llama"
END = "<|end|>"


def save_tokenizer(folder: pathlib.Path, *, begins: bool = False) -> None:
    """One token a printable ASCII character; a line break is none of them.

    Args:
        folder: gets the tokenizer's files.
        begins: let every text begin with ``END``.
    """
    vocabulary = {chr(32 + i): i for i in range(95)} | {END: 95}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{END} $A", special_tokens=[(END, 95)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}a:",
    } | ({"bos_token": END} if begins else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> pathlib.Path:
    """Random llama weights with a long context and no token that ends an answer."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(GOLDEN / "model.safetensors", folder)
    config = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    save_tokenizer(folder)
    return folder


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of the command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def decode(model, capsys, monkeypatch):
    """Run the command on the small model in this process."""
    # The folder for compiled programs is a setting of the whole process.
    monkeypatch.setattr("kvjax.command.run.keep_compiled_programs", lambda: None)

    def run(*argv: object, stdin: bytes = b"", model: object = model) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        named = [] if model is None else ["--model", str(model)]
        code = main([*named, *map(str, argv)])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run
