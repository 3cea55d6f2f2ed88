"""Settings of the whole test run: several CPU devices, no silent casts or broadcasts, and shapes
that are checked against their annotations."""

import jax
import jaxtyping

# Where arrays are computed with; elsewhere tests pass wrong types on purpose.
CHECKED = (
    "kvjax.cache",
    "kvjax.codecs",
    "kvjax.compress",
    "kvjax.decoding",
    "kvjax.models.attention",
    "kvjax.models.decoder",
    "kvjax.models.experts",
    "kvjax.models.forward",
    "kvjax.models.layers",
    "kvjax.models.rope",
    "pallas_kernels",
)

jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
