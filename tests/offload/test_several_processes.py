"""Two processes, each the host of its own devices: the same numbers as on the devices, and only alike updates."""

import pytest
from spawn import run_processes

CODE = """
import helpers
devices = [d for d in jax.devices() if d.id % 4 < 2]
host = tuple(d for d in jax.devices() if d not in devices)
mesh = zero2jax.make_mesh(data=4, devices=devices)
found = {}
folder = os.environ["OFFLOAD_FOLDER"]
choices = {
    "on": zero2jax.OffloadSettings(host_devices=host),
    "disk": zero2jax.OffloadSettings(host_devices=host, nvme_path=folder),
    "device": zero2jax.OffloadSettings(update_on="device"),
    "off": None,
}
for name, offload in choices.items():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    engine = zero2jax.Engine(
        helpers.mean_loss, tx, mesh, precision=helpers.FP32, clip_norm=2.0, offload=offload
    )
    state = engine.init(jax.tree.map(np.asarray, make_params()))
    for batch in make_batches(3):
        state, metrics = engine.step(state, batch)
    full = engine.params(state)
    found[name] = [float(metrics["grad_norm"]), np.asarray(full["embed"]).tolist()]
    where = {s.device.id % 4 for x in jax.tree.leaves(state.opt_state) for s in x.addressable_shards}
    found[name + " at"] = sorted(where)
    found[name + " in"] = sorted({x.sharding.memory_kind for x in jax.tree.leaves(state.opt_state) if x.ndim})
    if name == "disk":
        found["step"] = int(zero2jax.reopen_state(engine, make_params()).step)
found["folders"] = sorted(os.listdir(folder))
engine = zero2jax.Engine(
    helpers.mean_loss, optax.adam(1e-2 * (1 + index)), mesh, precision=helpers.FP32,
    offload=zero2jax.OffloadSettings(host_devices=host),
)
try:
    engine.step(engine.init(jax.tree.map(np.asarray, make_params())), batch)
except ValueError as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def test_each_process_updates_the_shards_of_its_devices_and_all_by_the_same_rate(tmp_path, monkeypatch):
    monkeypatch.setenv("OFFLOAD_FOLDER", str(tmp_path))
    first, second = run_processes(CODE, 2)
    assert first["on"] == second["on"]
    assert (first["on at"], first["off at"]) == ([2, 3], [0, 1])
    # an ulp where a fused multiply-add rounds once, three steps of 1e-2
    assert first["on"][0] == pytest.approx(first["off"][0], rel=1e-6)
    for on, off in zip(first["on"][1], first["off"][1], strict=True):
        assert on == pytest.approx(off, abs=1e-6)
    assert first["disk"] == second["disk"] == first["on"]
    assert (first["device in"], first["off in"]) == (["pinned_host"], ["device"])
    assert first["device"] == second["device"]
    assert first["device"][0] == pytest.approx(first["off"][0], rel=1e-6)
    for row, off in zip(first["device"][1], first["off"][1], strict=True):
        assert row == pytest.approx(off, abs=1e-6)
    assert first["folders"] == ["process-0-of-2", "process-1-of-2"]
    assert first["step"] == second["step"] == 3
    assert "the step's program (loss function, optimizer, learning rate)" in first["refused"]
