"""JAX settings of the whole test run: several CPU devices, and no silent casts or broadcasts."""

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
