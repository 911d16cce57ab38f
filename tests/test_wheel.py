"""The package as others get it: a wheel in a fresh environment, used from a folder without the repository."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, cwd):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy: what an earlier build has left in the repository cannot get into it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "zero2jax", source / "zero2jax", ignore=shutil.ignore_patterns("__pycache__", ".*")
    )
    backend = [d.version for d in importlib.metadata.distributions(name="setuptools")]
    has_backend = any(int(version.split(".")[0]) >= 77 for version in backend)  # else pip fetches one
    run(
        sys.executable,
        *("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out),
        *(["--no-build-isolation"] if has_backend else []),
        source,
        cwd=source,
    )
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # after the environment's own packages, and without the .pth files there: an editable install is not seen
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_holds_every_module_the_marker_of_types_and_the_licence(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "zero2jax").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "zero2jax/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    rooms = {path.parent for path in (ROOT / "zero2jax").rglob("*.py")}
    assert not [room for room in rooms if not (room / "__init__.py").exists()]


def test_public_names_of_the_installed_package(environment, tmp_path):
    shutil.copy(ROOT / "tests" / "test_public_names.py", tmp_path)
    python = environment / "bin" / "python"
    where = run(python, "-c", "import zero2jax; print(zero2jax.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)
    output = run(
        python, *("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_public_names.py"), cwd=tmp_path
    )
    assert " passed" in output


def test_the_command_line_of_the_installed_package(environment, tmp_path):
    version = importlib.metadata.version("zero2jax")
    output = run(environment / "bin" / "zero2jax", "info", "--json", cwd=tmp_path)
    assert f'"zero2jax": "{version}"' in output
    assert not list(tmp_path.iterdir())
