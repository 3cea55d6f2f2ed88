"""``--plan``: what a run would allocate, from the model's shape alone."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax import loading, tokenizer
from kvjax.cache import plan
from kvjax.command.decode_options import DecodeConfig
from kvjax.command.inputs import model_source, read_input, stream_options
from kvjax.decoding.requests import Options, read_prompts
from kvjax.memory import device_memory
from kvjax.models.decoder import Decoder
from kvjax.report.units import table
from kvjax.weights.gguf import GGUFCheckpoint


def show_plan(config: DecodeConfig) -> int:
    """Print the plan; returns the exit code.

    Raises:
        CapacityError: it does not fit; the plan is printed all the same.
    """
    has_prompt = config.prompts or config.prompt_file or config.prompt is not None
    rows = read_input(config) if has_prompt else []
    lm = outline(config)
    # How tokens are chosen makes no difference to what they take.
    choice = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options = Options(**{**stream_options(config), **choice}, chunk=1, stop_ids=())
    prompts = [row.prompt for row in rows if row.prompt is not None]
    lengths = [len(request.ids) for request in read_prompts(lm, prompts, options)[0]]
    planned = plan(
        lm.config,
        options.recipe,
        batch_size=min(config.batch_size, len(lengths) or config.batch_size),
        prompt_tokens=max(lengths, default=1),
        max_new_tokens=config.max_new_tokens,
        dtype=lm.dtype,
        parameter_bytes=sum(
            math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(lm.model)
        ),
        memory_bytes=device_memory(),
    )
    print(table(planned.rows()), flush=True)
    planned.check()
    return 0


def outline(config: DecodeConfig) -> loading.LanguageModel:
    """The model with shapes in the place of its weights.

    Raises:
        ModelError: its configuration or tokenizer cannot be read.
    """
    source = model_source(config)
    path = loading.resolve(source, config.revision, weights=False)
    shape = loading.read_config(path)
    dtype = jnp.dtype(config.dtype)
    own = path if config.tokenizer is None else loading.resolve(config.tokenizer, weights=False)
    return loading.LanguageModel(
        config=shape,
        model=nnx.eval_shape(lambda: Decoder(shape, dtype=dtype, rngs=nnx.Rngs(0))),
        tokenizer=_tokenizer(own),
        dtype=dtype,
        defaults=loading.GenerationDefaults(),
        source=source,
        revision=config.revision,
        fingerprint="",
    )


def _tokenizer(path) -> tokenizer.Tokenizer | None:
    if path.is_file():
        checkpoint = GGUFCheckpoint(path)
        return tokenizer.from_gguf(checkpoint.source, checkpoint.metadata)
    return tokenizer.from_directory(path)
