"""Compiled programs kept from one run of a command to the next."""

import os
import warnings

import jax

from kvjax.fetch_model import cache_folder


def keep_compiled_programs() -> None:
    """Let JAX keep them in kvjax's cache folder, unless the user chose one or it cannot be made."""
    if jax.config.jax_compilation_cache_dir is not None:
        return
    folder = cache_folder() / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return
    # A full disk is no reason to interrupt: what is not kept is compiled again.
    warnings.filterwarnings("ignore", message="Error (read|writ)ing persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
