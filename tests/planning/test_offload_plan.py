"""What offloading moves from the devices' memory to the host's, by construction; and for a GPU that is not here."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import make_batch, make_params, mean_loss
from plan_program import LAYERS, WIDTH, N, loss_fn, needs_compiler, program

import zero2jax
from zero2jax.base.tables import readable_bytes
from zero2jax.planning.offload_plan import offload_plan
from zero2jax.planning.targets import get_target

ELEMENTS = LAYERS * WIDTH * WIDTH
ROW = 4 * WIDTH  # of the batch, in fp32


def make_plan(target, offload=True, num_devices=N, num_microbatches=1):
    p = program(16)
    zero = {"stage": 2} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})
    config = {
        "zero_optimization": zero,
        "bf16": {"enabled": True},
        "train_batch_size": 16,
        "gradient_accumulation_steps": num_microbatches,
        "gradient_clipping": 1.0,
    }
    axes = {"data": num_devices}
    return zero2jax.plan(p.loss_fn, p.params, p.batch, tx=p.tx, config=config, target=target, axes=axes)


def test_the_devices_hold_16_bit_parameters_and_the_host_the_state():
    report = make_plan("cpu", num_microbatches=2)
    rows = {row.name: row for row in report.by_class}
    assert rows["master"].rest_bytes == rows["optimizer state"].rest_bytes == 0
    assert rows["parameters"].rest_bytes == 2 * ELEMENTS // N
    host = report.offload
    assert (host.master_bytes, host.optimizer_bytes) == (4 * ELEMENTS // N, 8 * ELEMENTS // N + 4)
    # two microbatches are summed in fp32
    assert (host.down_bytes, host.up_bytes, host.transfer_s) == (4 * ELEMENTS // N, 2 * ELEMENTS // N, None)
    assert (
        report.host_bytes
        == host.host_bytes
        == sum((host.master_bytes, host.optimizer_bytes, host.down_bytes, host.up_bytes))
    )
    assert json.loads(json.dumps(report.as_dict()))["offload"]["host_bytes"] == host.host_bytes
    assert "on the host per device" in str(report)
    assert make_plan("cpu", offload=False).offload is None


@needs_compiler
@pytest.mark.cuda_compiler
def test_a_step_for_an_h200_has_no_optimizer_state_in_device_memory_and_fits_where_it_did_not():
    on, off = (make_plan("h200", offload, num_devices=1) for offload in (True, False))
    batch, scalars = 16 * ROW, 4 + 4 * jax.random.key_data(jax.random.key(0)).size
    assert on.rest_bytes == 2 * ELEMENTS + batch + scalars
    assert off.rest_bytes == 12 * ELEMENTS + 4 + batch + scalars
    assert {row.name: row.peak_bytes for row in on.by_class}["optimizer state"] == 0
    assert on.device_bytes == on.headroom_bytes + 2 * ELEMENTS
    assert f"a device may store {readable_bytes(on.device_bytes)} (" in str(on)
    assert on.total_bytes + 8 * ELEMENTS < off.total_bytes
    assert on.offload.transfer_s == pytest.approx(4 * ELEMENTS / (0.8 * 34359738368))
    between = (on.total_bytes + off.total_bytes) // 2
    small = dataclasses.replace(get_target("h200"), memory_bytes=int(between / 0.94))
    assert make_plan(small, num_devices=1).fits
    assert not make_plan(small, offload=False, num_devices=1).fits


def test_a_part_of_the_state_is_counted_on_either_side():
    shapes = [jax.eval_shape(make) for make in (make_params, make_batch)]
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
    config = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": zero}
    report = zero2jax.plan(
        mean_loss, *shapes, tx=optax.adam(1e-2), config=config, axes={"data": 1}, target="cpu"
    )
    rows, host = {row.name: row for row in report.by_class}, report.offload
    # of the leaves b, w, embed, norm and scale the first two go to the host
    on_host, on_device = 15 + 75, 35 + 5 + 1
    assert (host.master_bytes, host.optimizer_bytes) == (4 * on_host, 8 * on_host + 4)
    assert (host.down_bytes, host.up_bytes) == (2 * on_host, 2 * on_host)
    assert (rows["master"].rest_bytes, rows["optimizer state"].rest_bytes) == (4 * on_device, 8 * on_device)
    assert rows["parameters"].rest_bytes == 2 * on_host
    assert sum(row.rest_bytes for row in report.by_class) == report.rest_bytes


def test_files_are_counted_as_their_own_class_twice_and_host_memory_by_chunks():
    p = program(16)
    settings = zero2jax.OffloadSettings(nvme_path="/nowhere", chunk_bytes=1, buffer_count=8)
    engine = zero2jax.Engine(p.loss_fn, p.tx, zero2jax.make_mesh(data=N), offload=settings)
    engine.abstract_state(p.params)
    found = offload_plan(engine, engine.functions._program.settings, get_target("cpu"), 2)
    assert found.disk_bytes == 2 * (12 * ELEMENTS // N + 4)
    # one leaf, so one chunk: all of it is there
    assert found.host_bytes == 14 * ELEMENTS // N + 4
    late = zero2jax.OffloadSettings(delay_after=0)
    engine = zero2jax.Engine(p.loss_fn, p.tx, zero2jax.make_mesh(data=N), offload=late)
    engine.abstract_state(p.params)
    twice = offload_plan(engine, engine.functions._program.settings, get_target("cpu"), 2)
    assert twice.older_bytes == twice.up_bytes == twice.moved_between_classes("parameters") > 0
    lines = found.lines()
    assert lines[0].startswith("on the disk per device: ")
    assert lines[0].endswith("on a host of 2")
    assert lines[1].startswith("in host memory per device: ")


def stack_plan(target, **settings):
    """A stack of layers at stage 3 on two devices, a layer's shard a chunk, and its number of parameters."""
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    num_layers, width = 8, 128
    settings = zero2jax.OffloadSettings(chunk_bytes=4 * width * width // 2, **settings)
    config = {"bf16": {"enabled": True}, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3}}
    args = loss_fn, {"w": shape(num_layers, width, width)}, shape(16, width)
    report = zero2jax.plan(
        *args, tx=optax.adam(1e-2), config=config, axes={"data": 2}, target=target, offload=settings
    )
    return report, num_layers * width * width


@needs_compiler
@pytest.mark.cuda_compiler
def test_for_an_h200_chunks_of_the_state_and_layers_of_the_parameters_are_on_the_device_at_a_time():
    report, num = stack_plan("h200", update_on="device", params=True)
    rows = {row.name: row for row in report.by_class}
    assert (rows["master"].rest_bytes, rows["optimizer state"].rest_bytes) == (0, 4)  # Adam's count
    assert rows["parameters"].rest_bytes == 0
    # Full ones of three layers of eight: in use, in another layout, and gathered an iteration early.
    assert rows["parameters"].peak_bytes <= 3 * 2 * num // 8
    # Gradients of 2 bytes, and of masters and moments (12 bytes) a chunk of an eighth; a state that came up in one
    # would take 12 alone.
    assert report.total_bytes < (2 + 5) * num // 2
    host = report.offload
    assert report.audit.memory.host_bytes == host.pinned_bytes == report.host_bytes == (12 + 2) * num // 2
    assert (host.down_bytes, host.up_bytes, host.fetched_bytes) == (
        14 * num // 2,
        12 * num // 2,
        4 * num // 2,
    )
    assert host.staged_bytes == 0
    assert "parameters for the loss" in str(report)
    assert "CPU comes on top" not in str(report)


def test_for_simulated_devices_what_is_pinned_counts_as_the_hosts():
    report, num = stack_plan("cpu", update_on="device", params=True)
    rest = {row.name: row.rest_bytes for row in report.by_class}
    assert (rest["master"], rest["optimizer state"], rest["parameters"]) == (0, 4, 0)
    assert report.host_bytes == 14 * num // 2
    assert sum(rest.values()) == report.rest_bytes < num


def test_on_the_host_two_chunks_are_there_at_a_time():
    report, num = stack_plan("cpu", params=True)
    assert (
        report.offload.staged_bytes == 2 * num // 2
    )  # of one leaf: bf16 gradients, and copies in their place
    shapes = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "abcd"}
    settings = zero2jax.OffloadSettings(chunk_bytes=64)
    loss = lambda params, batch: sum(jnp.mean((batch @ w) ** 2) for w in params.values())
    batch = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    several = zero2jax.plan(
        loss, shapes, batch, tx=optax.adam(1e-2), axes={"data": 2}, target="cpu", offload=settings
    )
    assert several.offload.staged_bytes == several.offload.down_bytes // 2 == several.offload.up_bytes // 2
