"""One run with latents that several modules look at."""

import pytest

import kvjax
from tests.dynakv.decoding import OPTIONS, TOTAL, Run, forced, saved, spectra
from tests.dynakv.tiny import tiny, tokens


@pytest.fixture(scope="session")
def plain(tmp_path_factory) -> Run:
    """Two rows through the cache of a llama of two layers."""
    lm, found = tiny("llama", 2), spectra()
    ids = tokens(lm, (2, TOTAL))
    recipe = kvjax.recipes.dynakv(saved(tmp_path_factory.mktemp("plain"), found, lm), **OPTIONS)
    return Run(lm, found, recipe, ids, *forced(lm, recipe, ids))
