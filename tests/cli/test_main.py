"""The command line is an extra: the library does not import it, and says what to install where it is missing."""

import subprocess
import sys

import pytest
from spawn import environment


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120
    )


def test_the_library_imports_nothing_of_the_command_line():
    done = python(
        "import sys, zero2jax; print([m for m in sys.modules if m in ('rich', 'tyro', 'zero2jax.cli')])"
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize(("hidden", "named"), [(["tyro"], "tyro"), (["rich", "tyro"], "rich and tyro")])
def test_without_its_packages_the_command_line_says_what_to_install(hidden, named):
    done = python(f"""
import runpy, sys
sys.modules.update(dict.fromkeys({hidden}))  # as if they were not installed
sys.argv = ["zero2jax", "info"]
runpy.run_module("zero2jax", run_name="__main__")
""")
    said = f"zero2jax: the command line needs {named}: pip install 'zero2jax[cli]'.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
