"""A trained model as a Hugging Face directory, which kvjax and transformers load."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from kvjax.files import write_atomically
from kvjax.models.config import ModelConfig
from kvjax.train.reasoner import vocabulary
from kvjax.weights.assemble import parameter_plan

WEIGHTS = "model.safetensors"
_CARD = """---
license: apache-2.0
library_name: transformers
tags: [reasoning, kv-cache]
---
# The reasoner of kvjax

A language model of {parameters:,} parameters (Qwen3 architecture, bfloat16) that derives named
quantities step by step, for judging what a compressed KV cache costs a chain of thought. It knows
nothing else: its language has {words} words. `docs/reasoner.md` describes the task and how far the
model gets.

Trained from scratch on problems that are generated from a fixed seed, no other data, by

    {command}

```
python -m kvjax.decode --model eval/models/reasoner --max-new-tokens 1000 -p "{prompt}"
```

Licence: Apache-2.0, as kvjax itself. The training data are synthetic and nobody else's.
"""
_PROMPT = (
    "Given: c7 = k6 + 6. r0 = 51. i1 = c7 + q4. q4 = 81. k6 = q4 - 5. "
    "Notes: k6 should be q4 + 3. Question: find i1 for the answer."
)


def export(directory: pathlib.Path, fields: Mapping[str, Any], params: nnx.State, command: str):
    """Write weights in bfloat16, config, tokenizer and model card, each file whole or not at all.

    Args:
        directory: made if it is not there.
        fields: of config.json.
        params: a decoder's parameters.
        command: that trained the model.

    Raises:
        OSError: a file cannot be written; one that is there stays as it was.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(ModelConfig.from_hf(fields), params)
    names = {"bos": vocabulary.BOS, "eos": vocabulary.EOS, "pad": vocabulary.PAD}
    special = {f"{name}_token": vocabulary.WORDS[index] for name, index in names.items()}
    spoken = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "unk_token": vocabulary.WORDS[vocabulary.UNKNOWN],
        **special,
    }
    parameters = sum(tensor.size for tensor in tensors.values())
    card = _CARD.format(
        parameters=parameters, words=len(vocabulary.WORDS), command=command, prompt=_PROMPT
    )
    # Older readers of safetensors ask for the format.
    write_atomically(directory / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    for name, text in {
        "config.json": _json({**fields, "dtype": "bfloat16"}),
        "tokenizer.json": tokenizer().to_str(pretty=True),
        "tokenizer_config.json": _json(spoken),
        "README.md": card,
    }.items():
        write_atomically(directory / name, text.encode())


def tokenizer() -> Tokenizer:
    """Words and signs; texts are written as in English, without spaces before signs."""
    found = Tokenizer(
        models.WordLevel(vocabulary.IDS, unk_token=vocabulary.WORDS[vocabulary.UNKNOWN])
    )
    found.add_special_tokens(list(vocabulary.SPECIAL))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(vocabulary.PARAGRAPH, "isolated"),
            pre_tokenizers.Split(Regex(" +"), "removed"),
            pre_tokenizers.Split(Regex("[.,:?]"), "isolated"),
        ]
    )
    bos = vocabulary.WORDS[vocabulary.BOS]
    found.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, vocabulary.BOS)]
    )
    found.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix="##", cleanup=True),
            decoders.Fuse(),
            decoders.Replace(" :", ":"),
            decoders.Replace(f" {vocabulary.PARAGRAPH}", vocabulary.PARAGRAPH),
            decoders.Replace(f"{vocabulary.PARAGRAPH} ", vocabulary.PARAGRAPH),
        ]
    )
    return found


def _tensors(config: ModelConfig, params: nnx.State) -> dict[str, np.ndarray]:
    flat = dict(nnx.to_flat_state(params))
    found = {}
    for path, parts in parameter_plan(config).items():
        whole = np.asarray(flat[path][...]).astype(ml_dtypes.bfloat16)
        for part in parts:
            found[part.name] = np.ascontiguousarray(whole[part.place].reshape(part.shape))
    return found


def _json(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, indent=1) + "\n"
