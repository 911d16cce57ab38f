"""What `import zero2jax` brings, and what it leaves alone."""

import subprocess
import sys
import types

import zero2jax


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
