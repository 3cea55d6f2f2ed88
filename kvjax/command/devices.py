"""The devices that a run computes on."""

import os

import jax

from kvjax.errors import UsageError


def check_devices() -> None:
    """See that there is one.

    Raises:
        UsageError: JAX cannot start what it was told to use.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where a plugin is missing
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).partition("\n")[0] or "it is not installed"
        raise UsageError(f"JAX cannot use JAX_PLATFORMS={asked!r}: {reason}") from error
