"""The exported model is the trained one, for kvjax and for transformers' tokenizer."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.decode import main as decode
from kvjax.models.config import ModelConfig
from kvjax.train.reasoner import vocabulary
from kvjax.train.reasoner.export import export, tokenizer
from kvjax.train.reasoner.model import CONFIG, graph_of, init
from kvjax.train.reasoner.task import problem

TINY = {**CONFIG, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    params = init(ModelConfig.from_hf(TINY), 3)
    directory = tmp_path_factory.mktemp("reasoner")
    export(directory, TINY, params, "python -m kvjax.train.reasoner --steps 7")
    return directory, params


def test_the_loaded_model_has_the_logits_of_the_trained_one(exported):
    directory, params = exported
    lm = kvjax.load(directory)
    graph = graph_of(ModelConfig.from_hf(TINY))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    trained = dataclasses.replace(lm, model=nnx.merge(graph, rounded))
    tokens = problem(200, 0).tokens
    np.testing.assert_array_equal(kvjax.forward(lm, tokens), kvjax.forward(trained, tokens))


def test_what_is_kept_fits_the_repository():
    config = ModelConfig.from_hf(CONFIG)
    shapes = jax.eval_shape(lambda: init(config, 0))
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    assert size <= 8_000_000 and 2 * size <= 16_000_000


def test_the_card_has_the_command_and_the_licence(exported):
    directory, _ = exported
    card = (directory / "README.md").read_text()
    assert "python -m kvjax.train.reasoner --steps 7" in card and "Apache-2.0" in card
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"


def test_texts_and_tokens_are_the_same(exported):
    loaded = kvjax.load(exported[0]).tokenizer
    for index in range(20):
        found = problem(500, index)
        prompt = tokenizer().decode(found.tokens[: found.prompt])
        assert prompt.startswith("Given: ") and prompt.endswith(" for the answer.")
        assert loaded.encode(prompt) == list(found.tokens[: found.prompt])
        text = tokenizer().decode(found.tokens)
        assert loaded.encode(text) == list(found.tokens[:-1])
        assert " ." not in text and " ," not in text and "\n\n " not in text


def test_a_streamed_text_is_the_whole_one(exported):
    lm = kvjax.load(exported[0])
    trace = problem(200, 3).tokens
    pieces = lm.tokenizer.detokenizer()
    text = "".join(pieces.push([token]) for token in trace[:-1]) + pieces.flush()
    assert text == tokenizer().decode(trace)


def test_the_command_decodes_with_it(exported, capsys):
    prompt = tokenizer().decode(problem(200, 0).tokens[: problem(200, 0).prompt])
    model = str(exported[0])
    assert decode(["--model", model, "-p", prompt, "--max-new-tokens", "3"]) == 0
    out = capsys.readouterr().out
    lm = kvjax.load(exported[0])
    [result] = kvjax.generate(lm, [prompt], max_new_tokens=3)
    assert out.strip() == result.text.strip() and lm.defaults.stop_ids == (vocabulary.EOS,)
