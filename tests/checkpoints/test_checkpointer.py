"""Checkpoints: the same logical values on any mesh and stage, the same run after a resume, and what is selected."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers import (
    FP32,
    OPTIMIZERS,
    assert_trees_equal,
    make_batches,
    make_engine,
    make_params,
    mean_loss,
    train,
)
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax import Checkpointer, CheckpointError
from zero2jax.checkpoints import extra as checkpoint_extra
from zero2jax.checkpoints import state_leaves
from zero2jax.checkpoints.format import Checkpoint, cut_into_blocks
from zero2jax.checkpoints.matching import CheckpointWarning


def logical(engine, state):
    """The leaves of a state by name, without padding."""
    plans = [*engine.layout.params.leaves, *engine.layout.opt_state.leaves]
    names = ["params/" + leaf.path for leaf in engine.layout.params.leaves]
    names += ["opt_state/" + leaf.path for leaf in engine.layout.opt_state.leaves]
    values = [*jax.tree.leaves(state.params), *jax.tree.leaves(state.opt_state)]
    found = {"step": np.asarray(state.step), "rng": np.asarray(state.rng)}
    for name, plan, x in zip(names, plans, values, strict=True):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        found[name] = np.asarray(x)[tuple(slice(0, n) for n in plan.shape)]
    return found


def assert_same_values(found, expected):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def assert_rests_as_planned(engine, state):
    abstract = engine.layout.abstract_state(engine.mesh)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for x, rest in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (x.shape, x.dtype) == (rest.shape, rest.dtype)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # jax writes their specs in another way
        assert x.sharding.is_equivalent_to(rest.sharding, x.ndim) if is_key else x.sharding == rest.sharding
        assert not getattr(x, "weak_type", False)


def seen(num_shards, params=None, **settings):
    """An engine that has seen the shapes and nothing else."""
    engine = make_engine(num_shards, **settings)
    engine.abstract_state(make_params() if params is None else params)
    return engine


def trained(num_steps=2, num_shards=8, **settings):
    engine = make_engine(num_shards, **settings)
    state, _ = train(engine, engine.init(make_params()), make_batches(num_steps))
    return engine, state


CHAIN = [(8, 2), (4, 3), (2, 0), (1, 1), (8, 0), (3, 3), (5, 1), (8, 3)]  # (devices, stage) after (3, 2)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_state_survives_every_change_of_devices_and_stage_bit_for_bit(tmp_path, asynchronous):
    engine, state = trained(num_shards=3, stage=2)
    expected = logical(engine, state)
    for i, (num_shards, stage) in enumerate(CHAIN):
        with Checkpointer(tmp_path / str(i), engine, asynchronous=asynchronous) as checkpointer:
            assert checkpointer.save(i, state)
        engine = seen(num_shards, stage=stage)
        state, extra = Checkpointer(tmp_path / str(i)).restore(engine)
        assert extra is None
        assert_rests_as_planned(engine, state)
        assert_same_values(logical(engine, state), expected)


def test_padding_of_a_restored_state_is_zero(tmp_path):
    engine, state = trained(num_shards=2)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)
    other = seen(8)
    state, _ = Checkpointer(tmp_path).restore(other)
    padded = False
    for plan, x in zip(other.layout.params.leaves, jax.tree.leaves(state.params), strict=True):
        rest = np.array(x)
        rest[tuple(slice(0, n) for n in plan.shape)] = 0
        padded |= plan.rest_shape != plan.shape
        assert not rest.any()
    assert padded


def test_what_is_saved_does_not_know_devices_or_stage(tmp_path):
    def leaves(name, **settings):
        engine, state = trained(0, **settings)
        with Checkpointer(tmp_path / name, engine) as checkpointer:
            checkpointer.save(0, state)
        return {
            k: (x.shape, x.dtype, x.trainable) for k, x in Checkpoint(tmp_path / name / "0").leaves.items()
        }

    found = leaves("a", num_shards=8, stage=3)
    assert found == leaves("b", num_shards=1, stage=0)
    assert found["params/embed"] == ((7, 5), np.float32, True)
    assert found["opt_state/0/mu/blocks/w"] == ((3, 5, 5), np.float32, None)
    assert found["opt_state/0/count"] == found["step"] == ((), np.int32, None)


def assert_resumes_bitwise(directory, engine, state, batches):
    """Half of the steps, a save, the other half; then again from the checkpoint: the same losses and state."""
    half = len(batches) // 2
    state, _ = train(engine, state, batches[:half])
    with Checkpointer(directory, engine) as checkpointer:
        checkpointer.save(half, state, {"next": half})
        state, expected = train(engine, state, batches[half:])
        expected_state = logical(engine, state)
        checkpointer.wait()
        state, extra = Checkpointer(directory).restore(engine)
    state, found = train(engine, state, batches[extra["next"] :])
    assert_same_values(logical(engine, state), expected_state)
    assert [float(m["loss"]) for m in found] == [float(m["loss"]) for m in expected]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_six_steps_after_a_resume_equal_the_last_six_of_twelve(tmp_path, optimizer):
    engine = make_engine(8, tx=OPTIMIZERS[optimizer](), stage=2)
    assert_resumes_bitwise(tmp_path, engine, engine.init(make_params()), make_batches(12))


@pytest.mark.parametrize("kind", ["Adam", "Lamb", "Lion", "Adagrad", "SGD", "Muon"])
def test_optimizers_of_a_configuration_resume_bitwise(tmp_path, kind):
    config = {"optimizer": {"type": kind, "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3}}
    config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 8}}
    engine = zero2jax.initialize(mean_loss, None, config, zero2jax.make_mesh(data=3))
    assert_resumes_bitwise(tmp_path, engine, engine.init(make_params()), make_batches(6))
    assert Checkpointer(tmp_path).info()["config"] == config


def test_fifty_steps_after_a_resume_in_a_new_engine_equal_the_last_fifty_of_a_hundred(tmp_path):
    """With a schedule and random numbers in the loss: both go on where they were."""

    def loss(params, batch, rng):
        return jnp.square(batch @ params["w"] + jax.random.normal(rng, (len(batch), 3))).mean()

    def make():
        tx = optax.inject_hyperparams(optax.adamw)(optax.warmup_cosine_decay_schedule(0, 0.1, 10, 100))
        return make_engine(8, loss_fn=loss, tx=tx, seed=5)

    batches = [np.random.default_rng(i).normal(size=(8, 5)).astype(np.float32) for i in range(100)]
    engine = make()
    state, _ = train(engine, engine.init({"w": jnp.ones((5, 3))}), batches[:50])
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(50, state)
    state, expected = train(engine, state, batches[50:])
    other = make()
    other.abstract_state({"w": jnp.ones((5, 3))})
    resumed, found = train(other, Checkpointer(tmp_path).restore(other)[0], batches[50:])
    assert_same_values(logical(other, resumed), logical(engine, state))
    for name in ("loss", "learning_rate"):
        assert [float(m[name]) for m in found] == [float(m[name]) for m in expected]


def test_training_goes_on_while_a_save_is_written(tmp_path, may_write):
    """The state is donated before a byte is written, and what is written is the state that was saved."""
    engine, state = trained()
    expected = logical(engine, state)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state)
        after, _ = train(engine, state, make_batches(3))
        assert state.params["embed"].is_deleted()
        assert checkpointer.latest_step() is None
        jax.block_until_ready(after)
        may_write.set()
        state, _ = checkpointer.restore()
    assert_same_values(logical(engine, state), expected)


def num_compiled_steps(caplog, engine, state, num_batches):
    """How often the engine's step is compiled in some steps."""
    caplog.clear()
    with jax.log_compiles():
        train(engine, state, make_batches(num_batches))
    return sum(message.startswith("Compiling jit(step)") for message in caplog.messages)


def test_restoring_inside_and_outside_set_mesh_gives_the_same_state_and_no_second_compilation(
    tmp_path, caplog
):
    engine, state = trained()
    expected = logical(engine, state)
    with Checkpointer(tmp_path, engine) as checkpointer:
        with jax.set_mesh(engine.mesh):
            checkpointer.save(2, state)
            checkpointer.wait()
        for within in (True, False):
            fresh = seen(8)
            if within:
                with jax.set_mesh(fresh.mesh):
                    restored, _ = checkpointer.restore(fresh)
            else:
                restored, _ = checkpointer.restore(fresh)
            assert restored.step.sharding.is_fully_replicated
            assert restored.step.sharding.mesh == fresh.mesh
            assert_rests_as_planned(fresh, restored)
            assert_same_values(logical(fresh, restored), expected)
            assert num_compiled_steps(caplog, fresh, restored, 3) == 1
        # an engine that has stepped before restores and goes on with the program it has
        assert num_compiled_steps(caplog, engine, checkpointer.restore(engine)[0], 2) == 0


def test_leaves_of_every_kind_come_back(tmp_path):
    params = {
        "w": jnp.arange(35.0).reshape(7, 5),
        "frozen": {
            "bf16": jnp.arange(13, dtype=jnp.bfloat16),
            "fp8": jnp.arange(9).astype(jnp.float8_e4m3fn),
            "int4": jnp.arange(7).astype(jnp.int4),
            "empty": jnp.zeros((0, 3)),
            "flag": jnp.bool_(True),
            "complex": jnp.complex64(1 + 2j),
            "key": jax.random.split(jax.random.key(3), 4),
            "rbg": jax.random.key(3, impl="rbg"),
            "bytes": jnp.arange(200, dtype=jnp.uint8),
        },
    }
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    make = lambda n: seen(n, params, loss_fn=loss, trainable=lambda path, _: path == "w")
    engine = make(8)
    state = engine.init(params)
    expected = logical(engine, state)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)
        other = make(3)
        state, _ = checkpointer.restore(other)
    assert_rests_as_planned(other, state)
    assert_same_values(logical(other, state), expected)
    assert jax.random.key_impl(state.params["frozen"]["rbg"]) == jax.random.key_impl(params["frozen"]["rbg"])
    engine_of_other_keys = seen(
        8,
        {**params, "frozen": {**params["frozen"], "rbg": jax.random.key(3)}},
        loss_fn=loss,
        trainable=lambda path, _: path == "w",
    )
    with pytest.raises(
        CheckpointError, match=r"'params/frozen/rbg' key<fry>\[\]: .* keys of rbg uint32\[4\]"
    ):
        Checkpointer(tmp_path).restore(engine_of_other_keys)


def test_tensor_parallel_shards_move_to_another_mesh(tmp_path):
    loss = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
    params = {"w": jnp.arange(48.0).reshape(12, 4)}

    def make(data, model):
        engine = zero2jax.Engine(
            loss,
            optax.adam(1e-2),
            zero2jax.make_mesh(data=data, model=model),
            param_specs={"w": P(None, "model")},
        )
        engine.abstract_state(params)
        return engine

    engine = make(4, 2)
    state = engine.init(params)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)
    for data, model in ((2, 1), (2, 4), (8, 1), (3, 2)):
        other = make(data, model)
        found, _ = Checkpointer(tmp_path).restore(other)
        assert_same_values(logical(other, found), logical(engine, state))


@pytest.mark.parametrize("over", [False, True])
def test_groups_of_devices_save_once_and_restore_like_any_mesh(tmp_path, over):
    """With a replica axis, the state is cut inside groups, or over all devices."""

    def make(replica, data, over):
        mesh = zero2jax.make_mesh(replica=replica, data=data)
        return zero2jax.Engine(mean_loss, optax.adam(1e-2), mesh, precision=FP32, shard_over_replicas=over)

    engine = make(2, 4, over)
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(1, state)
    leaves = Checkpoint(tmp_path / "1").leaves.values()
    assert all(sum(np.prod(b.shape) for b in leaf.blocks) == np.prod(leaf.shape) for leaf in leaves)
    others = [make(4, 2, False), make(2, 4, not over), seen(3, stage=3)]
    for other in others:
        other.abstract_state(make_params())
        found, _ = Checkpointer(tmp_path).restore(other)
        assert_rests_as_planned(other, found)
        assert_same_values(logical(other, found), logical(engine, state))


def test_no_block_is_read_twice_and_a_part_reads_a_part(tmp_path):
    engine, state = trained(seed=3)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)
    checkpoint, other = Checkpoint(tmp_path / "0"), seen(3)
    blocks = [(leaf, block) for leaf in checkpoint.leaves.values() for block in leaf.blocks]
    # Restored right, every block that is not zero was read; in as many bytes, none was read again.
    assert all(checkpoint.read_block(leaf, block).any() for leaf, block in blocks)
    checkpointer = Checkpointer(tmp_path)
    restored, _ = checkpointer.restore(other)
    assert_same_values(logical(other, restored), logical(engine, state))
    assert checkpointer.restored_from.bytes_read == checkpoint.bytes_read
    checkpoint = Checkpoint(tmp_path / "0")
    leaf = checkpoint.leaves["params/blocks/w"]
    out = np.empty((3, 1, 5), np.float32)
    checkpoint.fill(leaf, [(((0, 3), (0, 1), (0, 5)), out)])
    assert checkpoint.bytes_read == out.nbytes  # one shard's block


def test_parameters_alone_and_a_fresh_optimizer(tmp_path):
    engine, state = trained()
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state)
    other = make_engine(3, tx=optax.sgd(0.1, momentum=0.9))
    fresh = other.init(make_params(seed=9))
    with pytest.raises(
        CheckpointError,
        match=r"(?s)opt_state/0/trace.*only in the checkpoint: .*opt_state/0/mu.*Only the optim",
    ):
        Checkpointer(tmp_path).restore(other)
    with pytest.raises(CheckpointError, match=r"do not come from it.*into=engine.init"):
        Checkpointer(tmp_path).restore(other, select="params")
    for select in ("params", ("params/",), lambda name, leaf: name.startswith("params/")):
        found, _ = Checkpointer(tmp_path).restore(other, into=fresh, select=select)
        expected = logical(engine, state)
        for name, x in logical(other, found).items():
            source = expected if name.startswith("params/") else logical(other, fresh)
            np.testing.assert_array_equal(x, source[name])
    found, _ = Checkpointer(tmp_path).restore(other, into=fresh, select=("params", "step", "rng"))
    assert int(found.step) == 2


def test_another_optimizer_whose_state_looks_the_same_is_refused(tmp_path):
    engine, state = trained()
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state)
    assert Checkpointer(tmp_path).info()["containers"] == {"opt_state/0": "ScaleByAdamState"}
    other = seen(2, tx=optax.adabelief(1e-2))
    with pytest.raises(
        CheckpointError, match=r"'opt_state/0' is ScaleByBeliefState in this engine, ScaleByAdamState in the"
    ):
        Checkpointer(tmp_path).restore(other)
    fresh = other.init(make_params())
    Checkpointer(tmp_path).restore(other, select="params", into=fresh)
    Checkpointer(tmp_path).restore(other, strict=False)


def test_renamed_missing_and_reshaped_leaves(tmp_path):
    engine, state = trained()
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state)
    renamed = {**make_params(), "layers": make_params()["blocks"]}
    del renamed["blocks"]
    loss = lambda params, batch: mean_loss({**params, "blocks": params["layers"]}, batch)
    other = seen(4, renamed, loss_fn=loss)
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path).restore(other)
    assert "not in the checkpoint: 'params/layers/w' float32[3, 5, 5]" in str(error.value)
    assert "only in the checkpoint: 'params/blocks/w' float32[3, 5, 5]" in str(error.value)
    rename = lambda name: name.replace("layers", "blocks")
    found, _ = Checkpointer(tmp_path).restore(other, rename=rename)
    np.testing.assert_array_equal(
        logical(other, found)["params/layers/w"], logical(engine, state)["params/blocks/w"]
    )
    moments = {f"opt_state/0/{m}/layers": f"opt_state/0/{m}/blocks" for m in ("mu", "nu")}
    again, _ = Checkpointer(tmp_path).restore(other, rename={"params/layers": "params/blocks", **moments})
    assert_trees_equal(jax.device_get(again), jax.device_get(found))

    into = other.init(renamed)
    loose, _ = Checkpointer(tmp_path).restore(other, into=into, strict=False)
    np.testing.assert_array_equal(logical(other, loose)["params/layers/w"], renamed["layers"]["w"])
    np.testing.assert_array_equal(
        logical(other, loose)["params/embed"], logical(engine, state)["params/embed"]
    )

    reshaped = {**make_params(), "norm": jnp.ones((6,)), "scale": jnp.float32(1)}
    with pytest.raises(
        CheckpointError,
        match=r"dtype: 'params/norm' float32\[6\]: the checkpoint has 'params/norm' float32\[5\]",
    ):
        Checkpointer(tmp_path).restore(seen(4, reshaped), into=None, strict=False)


def test_frozen_leaves_may_be_left_out(tmp_path):
    make = lambda: seen(8, trainable=lambda path, _: path.startswith("blocks"))
    engine = make()
    state, _ = train(engine, engine.init(make_params()), make_batches(1))
    with Checkpointer(tmp_path, engine, save_frozen=False) as checkpointer:
        checkpointer.save(1, state)
    saved = Checkpoint(tmp_path / "1").leaves
    assert "params/blocks/w" in saved
    assert "params/embed" not in saved
    with pytest.raises(
        CheckpointError, match=r"'params/embed' float32\[7, 5\] \(frozen, and frozen leaves were not saved\)"
    ):
        Checkpointer(tmp_path).restore(make())
    other = make()
    found, _ = Checkpointer(tmp_path).restore(other, into=other.init(make_params()))
    assert_same_values(logical(other, found), logical(engine, state))


def test_another_floating_dtype_is_converted_and_named(tmp_path):
    params = {"w": jnp.ones((4, 3)), "base": jnp.linspace(0, 1, 12).reshape(4, 3)}
    loss = lambda params, batch: jnp.mean((batch @ (params["w"] + params["base"])) ** 2)
    settings = {"loss_fn": loss, "trainable": lambda path, _: path == "w"}
    engine = seen(2, params, **settings)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, engine.init(params))
    half = seen(4, {**params, "base": params["base"].astype(jnp.bfloat16)}, **settings)
    with pytest.warns(CheckpointWarning, match=r"converted 'params/base' \(float32 to bfloat16\)\.$"):
        state, _ = Checkpointer(tmp_path).restore(half)
    np.testing.assert_array_equal(
        logical(half, state)["params/base"], np.asarray(params["base"]).astype(ml_dtypes.bfloat16)
    )
    whole = seen(4, {**params, "base": jnp.ones((4, 3), jnp.int32)}, **settings)
    with pytest.raises(CheckpointError, match="of another shape or dtype: 'params/base' int32"):
        Checkpointer(tmp_path).restore(whole)


def test_compute_dtype_does_not_matter(tmp_path):
    engine, state = trained(precision=zero2jax.Precision())
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state)
    other = seen(4)
    assert_same_values(logical(other, Checkpointer(tmp_path).restore(other)[0]), logical(engine, state))


EXTRA = {
    "position": {"epoch": 2, "index": 17, "rng": np.random.default_rng(3).bit_generator.state},
    "weights": (np.arange(3, dtype=np.float16), [jnp.arange(2), np.float64(0.1)]),
    "text": "é\n",
    "raw": b"\x00\xff",
    "numbers": [0.1, float("inf"), float("-inf"), 2**200, True, None],
    5: {"empty": [], "none": {}},
    ("a", 1): np.zeros((0, 2), np.int8),
    "half": np.array([1, 2], ml_dtypes.bfloat16),
}


def test_extra_comes_back_as_it_was(tmp_path):
    engine, state = trained(0)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state, EXTRA)
        _, found = checkpointer.restore()

    def compare(x, y):
        if isinstance(y, dict):
            assert list(x) == list(y)
            x, y = list(x.values()), list(y.values())
        if isinstance(y, list | tuple):
            assert type(x) is type(y)
            for a, b in zip(x, y, strict=True):
                compare(a, b)
        elif hasattr(y, "dtype"):
            assert (type(x), x.dtype) == (np.ndarray, y.dtype)
            np.testing.assert_array_equal(x, y)
        else:
            assert type(x) is type(y)
            assert x == y

    compare(found, EXTRA)
    assert type(found["position"]["rng"]["state"]["state"]) is int
    assert found["raw"] == b"\x00\xff"
    json.loads(json.dumps(checkpoint_extra.encode(EXTRA)[0], allow_nan=False))
    assert np.isnan(checkpoint_extra.decode(*checkpoint_extra.encode(float("nan"))))


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"a": [object()]}, r"extra\['a'\]\[0\]: found a builtins.object"),
        (np.array(["x"]), "extra: found an array of <U1"),
        ({object(): 1}, r"extra \(a key\)"),
        (jax.random.key(0), "extra: found an array of key<fry>"),
        (lambda: 0, "extra: found a builtins.function"),
        (np.ma.array([1, 2], mask=[0, 1]), "extra: found a numpy.ma"),
        (np.zeros(2, [("a", "i4")]), "extra: found an array of"),
        ([np.void(b"abc")], r"extra\[0\]: found a numpy.void"),
        ({np.complex64(1): 2}, r"extra \(a key\): found a numpy.complex64"),
        (functools.reduce(lambda x, _: [x], range(2000), 1), "extra: its containers are nested too deeply"),
    ],
)
def test_extra_that_would_need_pickling_is_refused(tmp_path, extra, path):
    engine, state = trained(0)
    with Checkpointer(tmp_path, engine) as checkpointer:
        with pytest.raises(TypeError, match=path):
            checkpointer.save(0, state, extra)
        assert checkpointer.all_steps() == []
        checkpointer.save(0, state, {"a": 1})


def test_extra_with_keys_and_numbers_of_numpy_and_numbers_of_any_size(tmp_path):
    extra = {
        np.int64(3): 1,
        (np.int32(4), "a"): np.arange(3, dtype=">f4"),
        np.float32(0.5): 2**70,
        "huge": [-(10**5000), 2**63, -(2**63)],
    }
    engine, state = trained(0)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state, extra)
        _, found = checkpointer.restore()
    assert list(found) == list(extra)
    assert [type(key) for key in found] == [int, tuple, float, str]
    assert found["huge"] == extra["huge"]
    assert found[0.5] == 2**70
    assert found[4, "a"].dtype == np.float32
    np.testing.assert_array_equal(found[4, "a"], [0, 1, 2])


def test_settings_that_are_numbers_of_numpy_are_saved(tmp_path):
    engine, state = trained(0, seed=np.int64(3), batch_size=np.int64(24))
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)
    assert Checkpointer(tmp_path).info()["engine"]["seed"] == 3


def test_a_leaf_may_be_called_as_a_block_of_another(tmp_path):
    engine = make_engine(
        2, loss_fn=lambda params, batch: sum(x.sum() for x in params.values()) * batch.mean()
    )
    state = engine.init({"w": jnp.zeros(2), "w[0:1]": jnp.ones(1), "w[1:2]": jnp.full(1, 2.0)})
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(0, state)
        assert_trees_equal(checkpointer.restore()[0].params, state.params)


def test_blocks_cover_a_box_once_and_stay_below_the_limit():
    for shape in [(), (1,), (7, 5), (3, 1, 9), (0, 4), (2, 3, 4, 5)]:
        for limit in (1, 4, 12, 40, 80, 1000):
            start = [2] * len(shape)
            count = np.zeros([2 + n for n in shape], int)
            for box in cut_into_blocks(start, shape, 4, limit):
                count[tuple(slice(a, b) for a, b in box)] += 1
                assert np.prod([b - a for a, b in box]) * 4 <= max(4, limit)
            inside = count[tuple(slice(2, None) for _ in shape)]
            assert (inside == 1).all()
            assert count.sum() == inside.sum()


def test_large_leaves_are_cut_into_blocks_and_put_together_again(tmp_path, monkeypatch):
    monkeypatch.setattr(state_leaves, "cut_into_blocks", lambda *args: cut_into_blocks(*args, 16))
    monkeypatch.setattr(state_leaves, "_HOST_BYTES", 64)
    engine, state = trained(num_shards=3)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state)
    leaf = Checkpoint(tmp_path / "2").leaves["params/blocks/w"]
    assert len(leaf.blocks) > 18
    assert all(np.prod(b.shape) <= 4 for b in leaf.blocks)
    other = seen(8)
    assert_same_values(logical(other, Checkpointer(tmp_path).restore(other)[0]), logical(engine, state))


def test_files_are_safetensors_and_hold_no_pickle(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    engine, state = trained(num_shards=1)
    with Checkpointer(tmp_path, engine) as checkpointer:
        checkpointer.save(2, state, EXTRA)
    found = safetensors.load_file(tmp_path / "2" / "state" / "00000-of-00001.safetensors")
    np.testing.assert_array_equal(found["params/embed"], logical(engine, state)["params/embed"])
    kinds = {p.suffix or p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert kinds == {".safetensors", ".json", ".sha256", ".txt", "_CHECKPOINT_METADATA"}


def test_parameters_that_are_one_array(tmp_path):
    loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
    engine = seen(3, jnp.ones((7, 2)), loss_fn=loss)
    state = engine.init(jnp.arange(14.0).reshape(7, 2))
    with Checkpointer(tmp_path / "c", engine) as checkpointer:
        checkpointer.save(0, state)
    other = seen(8, jnp.ones((7, 2)), loss_fn=loss)
    state, _ = Checkpointer(tmp_path / "c").restore(other)
    np.testing.assert_array_equal(logical(other, state)["params/"], np.arange(14.0).reshape(7, 2))
    out = tmp_path / "model.safetensors"
    zero2jax.export_checkpoint(tmp_path / "c", out)
    np.testing.assert_array_equal(
        zero2jax.load_exported(out, jnp.ones((7, 2))), np.arange(14.0).reshape(7, 2)
    )


def test_two_leaves_of_one_name_are_refused(tmp_path):
    loss = lambda params, batch: params["a"]["b"].sum() + params["a/b"].sum()
    engine = seen(2, {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, loss_fn=loss)
    with Checkpointer(tmp_path, engine) as checkpointer:
        state = engine.init({"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)})
        with pytest.raises(CheckpointError, match=r"'params/a/b'.* would each be the name of two leaves"):
            checkpointer.save(0, state)


def test_random_keys_of_another_kind_are_refused(tmp_path):
    with jax.default_prng_impl("rbg"):
        engine, state = trained(0)
        with Checkpointer(tmp_path, engine) as checkpointer:
            checkpointer.save(0, state)
    with jax.default_prng_impl("unsafe_rbg"):
        with pytest.raises(
            CheckpointError, match="its random keys are of 'rbg' and this program's of 'unsafe_rbg'"
        ):
            Checkpointer(tmp_path).restore(seen(2))
        other = make_engine(2)
        state, _ = Checkpointer(tmp_path).restore(
            other, into=other.init(make_params()), select=lambda name, _: name != "rng"
        )
    with pytest.raises(CheckpointError, match=r"'rng' uint32\[2\]: the checkpoint has 'rng' uint32\[4\]"):
        Checkpointer(tmp_path).restore(seen(2))
