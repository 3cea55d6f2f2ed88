"""Settings that cannot be are refused by name."""

import pytest

from kvjax.dynakv.settings import SpectralSettings
from kvjax.errors import UsageError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gate": "head"}, "gate must be in"),
        ({"inverse": None}, "inverse must be in"),
        ({"tau": 1.0}, "tau must be from 0 to below 1, got 1.0"),
        ({"tau": float("nan")}, "tau"),
        ({"tau": "0.1"}, "tau"),
        ({"tilt": -1.0}, "tilt"),
        ({"rank_multiple": 0}, "rank_multiple must be a whole number above 0"),
        ({"masks_own": 1}, "masks_own must be true or false"),
        ({"key_rank": 4}, "key_rank must be left out with a gate by token"),
        ({"gate": "fixed", "key_rank": 4}, "value_rank must be a whole number"),
        ({"gate": "fixed", "key_rank": True, "value_rank": 4}, "key_rank"),
    ],
)
def test_a_value_that_cannot_be_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        SpectralSettings(**values)
