"""What `zero2jax info` finds wrong in an environment: each with its remedy, and nothing in a sound one."""

import pytest

from zero2jax.cli.doctor import Problem, System, problems

SOUND = System(has_gpus=True, locked_bytes=None, shared_bytes=2**33)
PROXY = {"grpc_proxy": "http://proxy:3128", "MASTER_ADDR": "node1"}


def test_a_sound_environment_has_no_problems():
    env = {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_FLAGS": "--a=1 --b=2 --a=1", "JAX_PLATFORMS": "cuda"}
    assert problems(env, SOUND) == []
    assert problems({}, System.here()._replace(has_gpus=False)) == []


@pytest.mark.parametrize(
    ("env", "system", "what", "remedy"),
    [
        ({"XLA_CLIENT_MEM_FRACTION": "0.99"}, SOUND, "to have 0.99 of each GPU", "Lower it to 0.9"),
        ({"XLA_CLIENT_MEM_FRACTION": "x"}, SOUND, "is 'x', expected a number", "Correct these variables"),
        (
            {"XLA_CLIENT_MEM_FRACTION": "0.9", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},
            SOUND,
            "are both set, and jaxlib stops there",
            "Correct these",
        ),
        (
            {"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
            SOUND,
            "jax does not read it",
            "configure_memory(allocator=",
        ),
        ({"XLA_FLAGS": "--a=1 --a=2"}, SOUND, "XLA_FLAGS has --a as 1 and as 2", "the last one counts"),
        (PROXY, SOUND, "a proxy stands between", "Add node1 to no_proxy"),
        ({"JAX_PLATFORMS": "cpu"}, SOUND, "hides this host's GPUs", "Unset it"),
        ({"CUDA_VISIBLE_DEVICES": ""}, SOUND, "CUDA_VISIBLE_DEVICES hides", "Unset it, or name some"),
        ({"LD_LIBRARY_PATH": "/usr/local/cuda/lib64"}, SOUND, "a CUDA of the system", "Unset it"),
        ({}, SOUND._replace(locked_bytes=2**16), "may lock 64.00 KiB", "ulimit -l unlimited"),
        ({}, SOUND._replace(shared_bytes=2**26), "/dev/shm has 64.00 MiB", "--shm-size"),
    ],
)
def test_each_problem_comes_with_its_remedy(env, system, what, remedy):
    (found,) = problems(env, system)
    assert isinstance(found, Problem)
    assert what in found.what
    assert remedy in found.remedy


def test_limits_of_a_host_without_gpus_are_nobodys_business():
    without = System(has_gpus=False, locked_bytes=2**16, shared_bytes=2**26)
    assert problems({"JAX_PLATFORMS": "cpu", "LD_LIBRARY_PATH": "/cuda"}, without) == []
