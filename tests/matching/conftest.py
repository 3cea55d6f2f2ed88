from tests.kernels.conftest import unchecked

__all__ = ["unchecked"]
