"""The compiler for a GPU that need not be there."""

import jaxtyping
import pytest


@pytest.fixture(scope="session")
def h200(tmp_path_factory):
    """Compiles for an NVIDIA H200."""
    yield from compiler(tmp_path_factory, 1)


@pytest.fixture(scope="session")
def a100(tmp_path_factory):
    """Compiles for an NVIDIA A100."""
    from tests.aot.h200 import A100

    yield from compiler(tmp_path_factory, 1, target=A100)


@pytest.fixture(scope="session")
def four_h200s(tmp_path_factory):
    """Compiles for four of them in one host."""
    yield from compiler(tmp_path_factory, 4)


def compiler(tmp_path_factory, devices: int, **options):
    pytest.importorskip(
        "jax_cuda13_plugin", reason="needs the CUDA plug-in: `make test-all` sets it up"
    )
    # The plug-in comes without CUDA's own libraries, and would refuse to be without them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        from tests.aot.h200 import H200

        yield H200(tmp_path_factory.mktemp("dump"), devices, **options)


@pytest.fixture(scope="module", autouse=True)
def shapes_for_arrays():
    """Annotations say arrays, and here only their shapes go in."""
    checked = not jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", not checked)
