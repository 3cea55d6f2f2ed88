"""Settings of the whole test run: several CPU devices, no silent casts or broadcasts, and shapes
that are checked against their annotations."""

import pathlib

import jax
import jaxtyping
import pytest

# Where arrays are computed with; elsewhere tests pass wrong types on purpose.
CHECKED = (
    "kvjax.cache",
    "kvjax.codecs",
    "kvjax.compress",
    "kvjax.decoding",
    "kvjax.dynakv.cached",
    "kvjax.dynakv.coder",
    "kvjax.dynakv.forward",
    "kvjax.dynakv.mask",
    "kvjax.dynakv.pca",
    "kvjax.dynakv.spectrum",
    "kvjax.matching",
    "kvjax.models.attention",
    "kvjax.models.decoder",
    "kvjax.models.experts",
    "kvjax.models.forward",
    "kvjax.models.layers",
    "kvjax.models.rope",
    "kvjax.thoughts.density",
    "kvjax.thoughts.record",
    "kvjax.thoughts.sparsity",
    "kvjax.train.dynakv.loss",
    "kvjax.train.dynakv.state",
    "kvjax.train.matryoshka.projections",
    "kvjax.train.matryoshka.search",
    "kvjax.train.matryoshka.update",
    "pallas_kernels",
)

jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Every compiled program takes a few memory mappings, of which a process may have 65,530."""
    yield
    _forget_many()


@pytest.fixture(autouse=True)
def forget_programs_of_slow_tests(request):
    """Of which one module alone compiles too many."""
    yield
    if request.node.get_closest_marker("slow"):
        _forget_many()


def _forget_many() -> None:
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
