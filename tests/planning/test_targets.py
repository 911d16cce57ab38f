"""The cards as text, and every one of them compiling a step of the example."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from plan_program import GPUS, needs_compiler

from zero2jax.planning import targets
from zero2jax.planning.targets import TARGETS, get_target, target_mesh


def test_names():
    assert GPUS == ["v100-32gb", "a100-80gb", "h100-80gb", "h200", "b200"]
    assert set(TARGETS) == {*GPUS, "local", "cpu"}


def test_text_holds_the_facts():
    text = TARGETS["v100-32gb"].config_text()
    assert "device_memory_size: 33871364096" in text
    assert "cuda_compute_capability { major: 7 minor: 0 }" in text
    assert 'platform_version: "Compute Capability 10.0a"' in TARGETS["b200"].config_text()


def test_usable_memory_leaves_room():
    assert TARGETS["h200"].usable_bytes(0.5) == 151397597184 // 2
    assert TARGETS["cpu"].usable_bytes() is None


def test_rates_by_kind_and_distance():
    h200 = TARGETS["h200"]
    assert h200.bytes_per_s("all-reduce", False) > h200.bytes_per_s("all-gather", False)
    assert h200.bytes_per_s("all-gather", True) == h200.across_bytes_per_s < h200.in_node_bytes_per_s


@pytest.mark.parametrize(
    ("name", "half", "tf32", "fp32"),  # dense TFLOP/s of NVIDIA's data sheets
    [
        ("v100-32gb", 125, 15.7, 15.7),  # no TF32
        ("a100-80gb", 312, 156, 19.5),
        ("h100-80gb", 989, 494.7, 66.9),
        ("h200", 989, 494.7, 66.9),
        ("b200", 2250, 1125, 75),
    ],
)
def test_rates_by_dtype_are_08_of_the_data_sheets(name, half, tf32, fp32):
    target = TARGETS[name]
    rates = [target.product_flops(*of) for of in (("bf16",), ("f32",), ("f32", "highest"), ("f64",))]
    assert rates == pytest.approx([0.8e12 * x for x in (half, tf32, fp32, fp32 / 2)], rel=0.01)
    assert target.product_flops("f8e4m3fn") == target.product_flops("f16") == target.peak_flops


def test_a_target_of_ones_own_needs_one_rate():
    own = dataclasses.replace(TARGETS["cpu"], peak_flops=1e12)
    assert own.product_flops("f32") == own.product_flops("bf16") == 1e12
    assert TARGETS["cpu"].product_flops("f32") is TARGETS["cpu"].product_flops("f64") is None


def test_unknown_target():
    with pytest.raises(ValueError, match=r"there is no target 'h300'\. There are v100-32gb, .*, local, cpu"):
        get_target("h300")


def test_only_gpus_have_a_text():
    with pytest.raises(ValueError, match="describing target 'cpu' to the CUDA compiler: it is no GPU"):
        TARGETS["cpu"].config_text()


def test_axes_must_be_positive():
    with pytest.raises(ValueError, match="every size must be a positive number"):
        target_mesh(TARGETS["h200"], {"data": -1})


def test_cpu_mesh_takes_simulated_devices():
    mesh = target_mesh(TARGETS["cpu"], {"data": 4, "model": 2})
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    with pytest.raises(ValueError, match=r'jax.config.update\("jax_num_cpu_devices", 16\)'):
        target_mesh(TARGETS["cpu"], {"data": 16})


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(targets, "CUDA_PACKAGES", ("jax-cuda12-plugin", "no-such-compiler"))
    with pytest.raises(
        ValueError, match=r"no-such-compiler of XLA's CUDA compiler .* pip install 'zero2jax\[plan\]'"
    ):
        target_mesh(TARGETS["h200"], {"data": 8})


@needs_compiler
@pytest.mark.cuda_compiler
def test_hosts_must_be_full():
    mesh = target_mesh(TARGETS["h200"], {"data": 16})
    assert [d.process_index for d in mesh.devices.flat] == [0] * 8 + [1] * 8
    assert len({d.process_index for d in target_mesh(TARGETS["h200"], {"data": 4}).devices.flat}) == 1
    with pytest.raises(ValueError, match="laying out 12 devices of target 'h200' over hosts of 8"):
        target_mesh(TARGETS["h200"], {"data": 12})


@needs_compiler
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("name", GPUS)
def test_every_card_compiles_a_matrix_product_and_a_sum_over_devices(name):
    mesh = target_mesh(TARGETS[name], {"data": 8})
    assert mesh.devices.flat[0].device_kind == TARGETS[name].gpu.device_name
    x = jax.ShapeDtypeStruct((64, 128), jnp.float16, sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x: x.T @ x, out_shardings=NamedSharding(mesh, P())).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 128 * 2 // 8
    assert "all-reduce" in compiled.as_text()


@needs_compiler
@pytest.mark.cuda_compiler
@pytest.mark.parametrize("devices_per_host", [8, 64])
def test_a_scalar_is_summed_over_64_devices_of_several_domains(devices_per_host):
    mesh = target_mesh(TARGETS["h100-80gb"], {"data": 64}, devices_per_host)
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    step = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    text = jax.jit(step).lower(x).compile().as_text()  # with one domain of 64 the compiler ends the process
    assert "all-reduce" in text
    assert "triton_collective" not in text  # a kernel that only peers in one domain can run


def test_a_target_can_be_changed():
    small = dataclasses.replace(TARGETS["cpu"], memory_bytes=1000)
    assert get_target(small) is small
    assert small.usable_bytes(0.9) == 900
