"""What rank each token of a text is kept at, in every layer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.dynakv.forward import compressed_states
from kvjax.dynakv.projector import Projector, read_spectra
from kvjax.dynakv.spectrum import Spectra, key_width
from kvjax.models.decoder import Decoder
from kvjax.models.forward import check_tokens

if TYPE_CHECKING:
    from kvjax.loading import LanguageModel


def kept_ranks(
    lm: "LanguageModel", projector: Projector, ids: Sequence[int]
) -> Int[np.ndarray, "L 2 T"]:
    """Components stored of the keys (0) and values (1) of every token, whole blocks counted.

    Args:
        lm: the model.
        projector: as recipes have it.
        ids: the text's tokens.

    Raises:
        UsageError: no tokens, or an adapter that cannot be used.
        CapacityError: more tokens than the model's context holds.
    """
    tokens = jnp.asarray(check_tokens(ids, lm.config.vocab_size, lm.config.context_length))
    shares = _rates(lm.model, read_spectra(projector, lm), tokens)
    return np.rint(np.asarray(shares)[:, :, 0] * key_width(lm.config)).astype(np.int32)


@jax.jit
def _rates(model: Decoder, spectra: Spectra, tokens: Int[Array, "B T"]) -> Float[Array, "L 2 B T"]:
    _, (_, hard) = compressed_states(model, spectra, spectra.bases(), tokens, mode="hard")
    return hard
