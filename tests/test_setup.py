"""What `make` and `pip install` rely on."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("kvjax", "pallas_kernels", "train", "eval")
FINDER = ROOT / "tools" / "find_python.sh"
NAMES = ("python3.14", "python3.13", "python3.12", "python3")


def test_every_folder_of_modules_is_a_package():
    folders = {module.parent for name in SOURCES for module in (ROOT / name).rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_a_wheel_holds_the_calibrations_and_training_and_evaluation_inside_kvjax(tmp_path):
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "results")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=copy, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path for name in SOURCES for path in copy.joinpath(name).rglob("*.py")}
    data = set(copy.glob("kvjax/thoughts/calibrations/*.json"))
    names = {path.relative_to(copy).as_posix() for path in modules | data}
    assert data and held == {re.sub(r"^(train|eval)/", r"kvjax/\1/", name) for name in names}
    assert {"kvjax/train/__init__.py", "kvjax/eval/__init__.py"} <= held


def test_training_and_evaluation_are_imported_inside_kvjax():
    import kvjax.eval
    import kvjax.train

    assert pathlib.Path(kvjax.train.__file__) == ROOT / "train" / "__init__.py"
    assert pathlib.Path(kvjax.eval.__file__) == ROOT / "eval" / "__init__.py"


@pytest.fixture
def find_python(tmp_path):
    """Run the search where every known name is a shim that fails, but for the given ones."""

    def script(path: pathlib.Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def run(*good: str, versions: tuple[str, ...] = (), **environment: str):
        for name in NAMES:
            script(tmp_path / "bin" / name, "echo not selected >&2; exit 127")
        for name in good:
            script(tmp_path / "bin" / name, f'exec "{sys.executable}" "$@"')
        for version in versions:
            folder = tmp_path / ".pyenv" / "versions" / version / "bin"
            # The script's own check is Python, so these stand-ins answer for it.
            good_enough = tuple(map(int, version.split("."))) >= (3, 12)
            script(folder / "python", f"echo {version}" if good_enough else "exit 1")
        environment |= {"HOME": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.defpath}"}
        return subprocess.run([str(FINDER)], env=environment, capture_output=True, text=True)

    return run


def test_a_shim_that_fails_is_passed_over(find_python):
    found = find_python("python3.12")
    assert (found.returncode, found.stdout.strip()) == (0, sys.executable)


def test_the_newest_of_pyenv_s_versions_is_found(find_python):
    found = find_python(versions=("3.9.18", "3.12.1", "3.13.0", "3.11.7"))
    assert (found.returncode, found.stdout) == (0, "3.13.0\n")


def test_without_a_python_one_line_says_what_is_needed(find_python):
    found = find_python(versions=("3.11.7",))
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("kvjax needs Python 3.12 or newer")
    assert found.stderr.count("\n") == 1


def test_a_python_that_is_named_is_the_only_candidate(find_python, tmp_path):
    found = find_python("python3", PYTHON=str(tmp_path / "bin" / "python3.14"))
    assert found.returncode == 1
    assert "PYTHON=" in found.stderr
    assert find_python(PYTHON=sys.executable).stdout.strip() == sys.executable


def test_the_readme_s_make_commands_exist():
    targets = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= targets
    for target in targets:
        subprocess.run(
            ["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True
        )
