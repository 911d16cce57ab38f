"""The allocator's variables: written before a backend starts, refused after, never in silence."""

import json
import subprocess
import sys

import pytest

from zero2jax.memory import configure
from zero2jax.memory.configure import MemorySettings, configure_memory, missing_variables

OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


def test_settings_are_written_read_back_and_refused_once_a_backend_runs():
    code = """
import json, os, zero2jax
before = dict(os.environ)
wrong = {}
def refused(**settings):
    try:
        zero2jax.configure_memory(**settings)
    except (ValueError, RuntimeError) as error:
        assert dict(os.environ) == before, "something was written"
        return f"{type(error).__name__}: {error}"
wrong["name"] = refused(allocator="slab", fraction=0.5)
written = zero2jax.configure_memory(preallocate=False, fraction=0.8, allocator="CUDA_ASYNC", collective_memory_mb=64)
assert {k: os.environ[k] for k in written} == written
before = dict(os.environ)
from jaxlib import xla_client
options = xla_client.generate_pjrt_gpu_plugin_options()
assert zero2jax.configure_memory(fraction=0.8) == {}
wrong["other"] = refused(fraction=0.7)
import jax
assert len(jax.devices()) == 1  # asking whether a backend runs has started none, and changed none
assert zero2jax.configure_memory(fraction=0.8) == {}
del os.environ["XLA_CLIENT_MEM_FRACTION"]
before = dict(os.environ)
wrong["late"] = refused(fraction=0.8)
print(json.dumps({"written": written, "options": options, "wrong": wrong}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["written"] == {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        NEW: "0.8",
        "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
        "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": "64",
    }
    wanted = {
        "preallocate": False,
        "memory_fraction": 0.8,
        "allocator": "cuda_async",
        "collective_memory_size": 64 * 2**20,
    }
    assert found["options"].items() >= wanted.items()
    assert "refuses this" in found["wrong"]["name"]
    assert '"bfc"' in found["wrong"]["name"]
    assert f"fraction is 0.7, and the environment says {NEW}=0.8" in found["wrong"]["other"]
    assert found["wrong"]["late"].startswith(
        "RuntimeError: configuring the memory of GPUs by fraction=0.8: a device"
    )
    assert f"set {NEW} before the program starts" in found["wrong"]["late"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fraction": 0}, "fraction is 0; it lies above 0 and at most at 1"),
        ({"fraction": 1.5}, "fraction is 1.5"),
        ({"fraction": float("nan")}, "fraction is nan"),
        ({"fraction": True}, "fraction is True"),
        ({"preallocate": "yes"}, "preallocate is 'yes'; it is True or False"),
        ({"allocator": 3}, "allocator is 3; it is a name"),
        ({"collective_memory_mb": -1}, "collective_memory_mb is -1; it is a whole number of MiB"),
        ({"collective_memory_mb": 1.5}, "collective_memory_mb is 1.5"),
        ({"allocator": "platform", "fraction": 0.5}, "fraction is 0.5 and the allocator is 'platform'"),
        (
            {"allocator": "Platform", "preallocate": True},
            "preallocate is True and the allocator is 'platform'",
        ),
    ],
)
def test_values_out_of_range_and_contradictions_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        configure_memory(**settings)


def test_what_the_environment_says_counts():
    settings = MemorySettings(fraction=0.5, collective_memory_mb=0)
    names = {NEW: "0.5", "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB": "0"}
    assert missing_variables(settings, {}) == names
    assert list(missing_variables(settings, {OLD: "0.50"})) == ["XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB"]
    for env, said in (
        ({OLD: "0.4"}, f"the environment says {OLD}=0.4"),
        ({OLD: "0.5", NEW: "0.5"}, f"{NEW} and its older name {OLD} are both set"),
        ({NEW: "half"}, f"{NEW} is 'half', expected a number"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "the allocator is 'platform'"),
    ):
        with pytest.raises(ValueError, match=said):
            missing_variables(settings, env)


def test_a_jaxlib_that_does_not_read_a_variable_is_named(monkeypatch):
    monkeypatch.setattr(configure, "client_options", lambda: {"allocator": "bfc"})
    monkeypatch.setattr(configure, "backend_started", lambda: False)
    with pytest.raises(
        ValueError, match="does not read XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB, so that collective"
    ):
        configure_memory(collective_memory_mb=8)
