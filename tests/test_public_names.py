"""What `import zero2jax` brings, and what it leaves alone."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import yaml

import zero2jax

PACKAGE = Path(zero2jax.__file__).parent
ROOT = Path(__file__).parents[1]


def run(code):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )


def test_all_lists_what_the_package_exposes():
    exposed = {
        name
        for name, value in vars(zero2jax).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(zero2jax.__all__) == sorted(exposed)
    assert len(set(zero2jax.__all__)) == len(zero2jax.__all__)


def test_every_public_name_has_a_docstring_of_its_own():
    for name in zero2jax.__all__:
        assert (getattr(zero2jax, name).__doc__ or "").strip(), name


def test_import_starts_no_backend_reads_no_flax_or_orbax_and_leaves_the_environment_alone():
    code = """
import os, sys
before = dict(os.environ)
import zero2jax
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
loaded = [name for name in ("flax", "orbax", "matplotlib", "tensorstore") if name in sys.modules]
assert not loaded, loaded
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)  # raises once a backend runs
assert len(jax.devices()) == 3
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_no_module_uses_private_parts_of_jax():
    code = """
import pathlib, zero2jax
for path in pathlib.Path(zero2jax.__file__).parent.rglob("*.py"):
    assert "jax._src" not in path.read_text(), path
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_errors_and_warnings_are_called_by_their_public_name():
    errors = [value for value in map(vars(zero2jax).get, zero2jax.__all__) if isinstance(value, type)]
    errors = [value for value in errors if issubclass(value, Exception)]
    assert {f"{value.__module__}.{value.__name__}" for value in errors} == {
        "zero2jax.ArenaFullError",
        "zero2jax.CheckpointError",
        "zero2jax.CheckpointWarning",
        "zero2jax.ConfigError",
        "zero2jax.ConfigWarning",
        "zero2jax.DamagedError",
        "zero2jax.LossScaleError",
        "zero2jax.OffloadFileError",
        "zero2jax.OutOfMemoryError",
        "zero2jax.StartError",
    }


def test_the_source_of_every_other_public_object_can_be_looked_up():
    objects = [getattr(zero2jax, name) for name in zero2jax.__all__]
    objects = [value for value in objects if callable(value) and value.__module__ != "zero2jax"]
    assert len(objects) > 40
    for value in objects:
        assert f" {value.__name__}" in inspect.getsource(value)


def test_the_version_is_that_of_the_package_metadata():
    assert zero2jax.__version__ == importlib.metadata.version("zero2jax")


def test_no_public_name_hides_a_room():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms.isdisjoint(zero2jax.__all__)


needs_repository = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="the package is installed, the repository is elsewhere"
)


@needs_repository
def test_the_citation_names_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == zero2jax.__version__
    assert citation["license"] == "Apache-2.0"


@needs_repository
def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distribution = {"orbax": "orbax-checkpoint"}
    declared = lambda requirements: {re.match(r"[\w-]+", line)[0] for line in requirements}
    core, extras = declared(project["dependencies"]), project["optional-dependencies"]
    assert core == {"jax", "optax", "orbax-checkpoint", "numpy", "hjson"}
    allowed = {"cli": declared(extras["cli"]), "planning/picture.py": {"matplotlib"}} | {
        "memory/picture.py": {"matplotlib"}
    }
    assert {"matplotlib"} <= declared(extras["plan"])
    for path in PACKAGE.rglob("*.py"):
        here = path.relative_to(PACKAGE)
        known = core | allowed.get(here.parts[0], set()) | allowed.get(str(here), set())
        for name in imported(path) - set(sys.stdlib_module_names) - {"zero2jax"}:
            assert distribution.get(name, name) in known, f"{here} imports {name}, which is not declared"


def imported(path):
    """Top-level packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return {name.split(".")[0] for name in names}
