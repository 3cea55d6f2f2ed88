"""Lists the packages: ``train/`` and ``eval/`` are installed inside the ``kvjax`` namespace.

They live at the top of the repository, but a user's own ``train.py`` must not shadow them. The
folders are mapped in pyproject.toml; only the list of packages, which must not be kept by hand,
is made here.
"""

from setuptools import find_packages, setup


def mapped(folder: str, name: str) -> list[str]:
    """The packages of ``folder``, which is imported as ``name``."""
    return [name, *(f"{name}.{package}" for package in find_packages(folder))]


setup(
    packages=[
        *find_packages(include=["kvjax", "kvjax.*", "pallas_kernels", "pallas_kernels.*"]),
        *mapped("train", "kvjax.train"),
        *mapped("eval", "kvjax.eval"),
    ]
)
