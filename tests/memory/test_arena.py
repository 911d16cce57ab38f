"""The state in an arena: the same bits as without, few buffers, checkpoints that either reads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, OPTIMIZERS, make_batches, make_params, mean_loss, train
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.memory import arena_plan
from zero2jax.memory.arena import Arena, ArenaCompiled
from zero2jax.memory.arena_plan import MOST_WASTE

MESHES = {
    "one": {"data": 1},
    "three": {"data": 3},
    "groups": {"replica": 2, "data": 2},
    "model": {"data": 2, "model": 2},
}
CASES = [
    # stage, mesh, optimizer, settings
    (0, "one", "lamb", {"num_microbatches": 2}),
    (1, "groups", "sgd_momentum", {"shard_over_replicas": True}),
    (
        2,
        "three",
        "adafactor",
        {"loss_scale": 8.0, "clip_norm": 0.1, "trainable": lambda path, leaf: "norm" not in path},
    ),
    (3, "model", "clip_adamw", {"model": True}),
]


def model_params():
    """Parameters of which some dims divide by two, for an axis `model`."""
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "blocks": {"w": jax.random.normal(keys[0], (3, 5, 4)), "v": jax.random.normal(keys[1], (3, 4, 5))},
        "scale": jnp.float32(0.7),
    }


def model_loss(params, batch):
    x = (batch["x"][:, None] + jnp.arange(5)[None]) / 7

    def block(x, layer):
        return x + jnp.tanh(x @ layer["w"]) @ layer["v"], None

    x, _ = jax.lax.scan(jax.checkpoint(block), x, params["blocks"])
    return params["scale"] * jnp.mean((x.sum(1) - batch["y"]) ** 2)


def engines(stage, mesh, optimizer, settings, *, arenas=(False, True)):
    """(engine, its first state) with and without an arena."""
    settings, loss, params = dict(settings), mean_loss, make_params()
    if settings.pop("model", False):
        loss, params = model_loss, model_params()
        settings["param_specs"] = {
            "blocks": {"w": P(None, None, "model"), "v": P(None, "model")},
            "scale": P(),
        }
    for arena in arenas:
        made = zero2jax.Engine(
            loss,
            OPTIMIZERS[optimizer](),
            zero2jax.make_mesh(**MESHES[mesh]),
            stage=stage,
            precision=FP32,
            arena=arena,
            **settings,
        )
        yield made, made.init(params)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize(("stage", "mesh", "optimizer", "settings"), CASES)
def test_an_arena_changes_no_bit(stage, mesh, optimizer, settings, monkeypatch):
    if stage > 1:  # every leaf is read where it lies, as large ones are
        monkeypatch.setattr(arena_plan, "GROUP_BYTES", 0)
    batches = make_batches(2)
    (plain, leaves), (packed, buffers) = engines(stage, mesh, optimizer, settings)
    assert isinstance(buffers.params, Arena)
    assert_same_bits(packed.unpacked(buffers), leaves)
    leaves, expected = train(plain, leaves, batches)
    buffers, found = train(packed, buffers, batches)
    assert_same_bits(found, expected)
    assert_same_bits(packed.unpacked(buffers), leaves)
    few = len(packed._compiled.arena.buffers)
    assert (
        len(jax.tree.leaves((buffers.params, buffers.opt_state))) == few <= 3 < len(jax.tree.leaves(leaves))
    )
    assert all(buffer.waste < MOST_WASTE for buffer in packed._compiled.arena.buffers)


@pytest.fixture(scope="module")
def pair():
    """Two engines of one training, the second with an arena, and their first states."""
    return list(engines(2, "three", "clip_adamw", {}))


def test_a_state_of_leaves_is_packed_and_a_donated_one_refused(pair, monkeypatch):
    (plain, _), (packed, _) = pair
    batch = make_batches(1)[0]
    leaves, buffers = plain.init(make_params()), packed.init(make_params())
    other, metrics = packed.step(packed.unpacked(buffers), batch)
    again, same = packed.step(buffers, batch)
    assert_same_bits(other, again)
    assert_same_bits(metrics, same)
    with pytest.raises(ValueError, match=r"This state was given to engine\.step, which donates it"):
        packed.step(buffers, batch)
    with pytest.raises(TypeError, match="expected the TrainState that engine"):
        packed.step(again.params, batch)
    with pytest.raises(ValueError, match="its arena is that of an engine of other parameters"):
        packed.step(again._replace(opt_state=again.params), batch)
    with pytest.raises(ValueError, match="the parameters"):
        plain.step(again, batch)
    masters = packed.memory(again, batch)["master"]
    assert masters.measured_bytes == zero2jax.live_bytes(again.params) >= masters.formula_bytes
    assert plain.unpacked(leaves) is leaves
    assert_same_bits(packed.params(packed.init(make_params())), plain.params(leaves))
    assert packed.evaluate(again, batch) == plain.evaluate(packed.unpacked(again), batch)
    monkeypatch.setattr(ArenaCompiled, "abstract_state", None)  # a step has no time to look at every leaf
    packed.step(again, batch)


def test_checkpoints_are_interchangeable_and_states_wait_on_the_host(pair, tmp_path):
    (plain, leaves), (packed, buffers) = pair
    batch = make_batches(1)[0]
    with zero2jax.Checkpointer(tmp_path / "a", packed) as checkpointer:
        assert checkpointer.save(0, buffers)
        from_arena, _ = checkpointer.restore(plain)
    with zero2jax.Checkpointer(tmp_path / "b", plain) as checkpointer:
        assert checkpointer.save(0, leaves)
        into_arena, _ = checkpointer.restore(packed)
    assert_same_bits(from_arena, leaves)
    assert_same_bits(packed.step(into_arena, batch)[1], plain.step(from_arena, batch)[1])
    waiting = packed.offload_state(buffers)
    assert buffers.params.buffers[0].is_deleted()
    back = packed.reload_state(waiting)
    assert_same_bits(back, leaves)
    state, _ = packed.step(back, batch)
    assert packed.reload_state(state) is state


def test_an_arena_inside_of_a_program_of_the_users(pair):
    (_, _), (packed, _) = pair
    batch = make_batches(1)[0]
    expected, _ = packed.step(packed.init(make_params()), batch)
    found, _ = jax.jit(packed.step)(packed.init(make_params()), batch)
    assert_same_bits(found, expected)


def test_what_does_not_go_with_an_arena_is_refused_when_the_engine_is_built():
    build = lambda **settings: zero2jax.Engine(
        mean_loss, optax.sgd(0.1), zero2jax.make_mesh(data=2), **settings
    )
    with pytest.raises(ValueError, match="arena=True with offload: the host stores"):
        build(arena=True, offload=zero2jax.OffloadSettings())
    with pytest.raises(ValueError, match="arena is 'yes'; it is True or False"):
        build(arena="yes")


def test_a_configuration_asks_for_an_arena():
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.0, "memory": {"arena": True}}
    build = lambda config: zero2jax.initialize(mean_loss, optax.sgd(0.1), config, zero2jax.make_mesh(data=2))
    assert build(config).arena
    said = lambda config: zero2jax.check_config(zero2jax.load_config(config)).effective
    assert said(config)["state between steps"].startswith("an arena: masters and optimizer state")
    assert "state between steps" not in said(config | {"memory": {}})
    config["zero_optimization"] = {"stage": 2, "contiguous_gradients": True}
    with pytest.warns(zero2jax.ConfigWarning, match="no effect here: .*contiguous_gradients"):
        assert not build(config | {"memory": {}}).arena  # which would be another state than before
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with pytest.raises(zero2jax.ConfigError, match=r"memory\.arena = true: beside offload_optimizer"):
        build(config)
