import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Lets wrong arguments past the annotations, as they come in a user's program."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
