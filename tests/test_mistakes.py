"""What a first hour gets wrong: each mistake is answered by name, before anything is compiled, with the way out."""

import functools
import math
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import FP32
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.cli.plan import load_function
from zero2jax.cli.usage import UsageError

PARAMS = {"b": np.zeros(8, np.float32), "w": np.ones((16, 8), np.float32)}
BATCH = {"x": np.ones((8, 16), np.float32), "y": np.zeros((8, 8), np.float32)}
TX = optax.sgd(0.1)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2)


def make(num_shards=2, loss_fn=loss_fn, **settings):
    return zero2jax.Engine(loss_fn, TX, zero2jax.make_mesh(data=num_shards), precision=FP32, **settings)


def init_fn(key):
    return {"w": jax.random.normal(key, (16, 8)), "b": jnp.zeros(8)}


@pytest.fixture(scope="module")
def engine():
    return make()


@pytest.fixture(scope="module")
def state(engine):
    return engine.init(PARAMS)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *[({"clip_norm": x}, "clip_norm is .* finite number above 0, or None") for x in (-1.0, 0, "1", True)],
        *[
            ({"clip_norm": x}, "clip_norm is .* finite number above 0, or None")
            for x in (math.inf, math.nan, 1e-320)
        ],
        *[
            ({"num_microbatches": x}, "num_microbatches is .* whole number of at least 1")
            for x in (True, "2")
        ],
        *[({"batch_size": x}, "batch_size is .* whole number of at least 1") for x in (0, 8.0, False)],
        *[({"seed": x}, "seed is .* whole number of 32 bits") for x in (0.5, 2**40, None, True)],
        *[({"stage": x}, "stage is .*; ZeRO has the stages") for x in (True, 2.0)],
        ({"skip_nonfinite": "no"}, "skip_nonfinite is 'no'; it is True or False"),
        ({"shard_over_replicas": 0}, "shard_over_replicas is 0; it is True or False"),
    ],
)
def test_a_setting_that_is_no_such_number_or_choice_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        make(**settings)


def test_numbers_of_numpy_are_numbers():
    settings = make(stage=np.int64(3), clip_norm=np.float32(0.5), seed=np.uint32(7)).settings.plain
    assert (settings["stage"], settings["clip_norm"], settings["seed"]) == (3, 0.5, 7)
    assert type(settings["stage"]) is type(settings["seed"]) is int


def dropout():
    return nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))


MESH = functools.partial(zero2jax.make_mesh, data=2)
BUILDING = {
    "mesh of 4": (lambda: zero2jax.Engine(loss_fn, TX, 4), "found int, expected a jax.sharding.Mesh"),
    "no loss": (lambda: zero2jax.Engine(3.0, TX, MESH()), "found float, expected a function loss_fn"),
    "mesh first": (lambda: zero2jax.shard_optimizer(MESH(), TX), "found optax.*, expected a jax.sharding.M"),
    "batch on None": (lambda: zero2jax.global_batch(BATCH, None), "found NoneType, expected a jax.sharding"),
    "axis without a name": (lambda: zero2jax.make_mesh(4), r"mesh of 4: every axis has a name.*data=4\)"),
    "size in words": (lambda: zero2jax.make_mesh(data="4"), "mesh of '4': every axis has a name"),
    "predicate": (
        lambda: make(trainable=lambda path: True).init(PARAMS),
        r"asking `trainable`.*\(path\) too many positional.*called as trainable\(path, leaf\)",
    ),
    "module": (
        lambda: make().init(nn.Dense(3), jax.random.key(0)),
        r"by a flax.*\.Dense: it is a module.*engine.init\(model.init",
    ),
    "Flax's optimizer": (
        lambda: zero2jax.Engine(loss_fn, nnx.Optimizer(dropout(), TX, wrt=nnx.Param), MESH()),
        "found Optimizer, expected an optax.GradientTransformation",
    ),
    "other state": (
        lambda: make().init(types.SimpleNamespace(params=PARAMS, opt_state=())),
        r"found a types.SimpleNamespace, which is a training state.*Pass its \.params\.$",
    ),
}


@pytest.mark.parametrize("name", BUILDING)
def test_something_else_than_what_is_asked_for_is_named(name):
    build, said = BUILDING[name]
    with pytest.raises(TypeError, match=said):
        build()


STEPPING = {
    "own state to init": (lambda e, s: e.init(s), TypeError, r"pass engine\.params\(state\)"),
    "other state to step": (
        lambda e, s: e.step(optax.MaskedState(()), BATCH),
        TypeError,
        r"found optax\..*MaskedState, expected the TrainState",
    ),
    "iterator": (lambda e, s: e.step(s, iter([BATCH])), TypeError, r"an iterator \(list_iterator\).*next"),
    "object": (lambda e, s: e.step(s, object()), TypeError, "it is of type object, which is neither"),
    "bare scalar": (lambda e, s: e.step(s, np.float32(3)), ValueError, r"it is a scalar \(numpy.float32\)"),
    "no examples": (
        lambda e, s: e.step(s, {"x": BATCH["x"][:0]}),
        ValueError,
        "must be above 0: the data may have ended",
    ),
}


@pytest.mark.parametrize("name", STEPPING)
def test_a_step_of_something_else_is_refused(engine, state, name):
    wrong, kind, said = STEPPING[name]
    with pytest.raises(kind, match=said):
        wrong(engine, state)


def test_a_number_in_the_place_of_the_key_is_named_when_it_fails(engine):
    with pytest.raises(TypeError) as caught:
        make().init(init_fn, 0)
    assert any("passed 0 on to the function" in note for note in caught.value.__notes__)
    make().init(lambda seed: init_fn(jax.random.key(seed)), 0)


def test_a_state_on_other_devices_is_sent_to_a_checkpoint(engine, state):
    more = make(4)
    more.init(PARAMS)
    with pytest.raises(ValueError, match=r"lies on 2 devices and .* has 4\. .*zero2jax\.Checkpointer"):
        more.step(state, BATCH)


def test_a_donated_state_is_named_where_its_bytes_are_counted(engine):
    gone = engine.init(PARAMS)
    for x in jax.tree.leaves(gone):
        x.delete()
    with pytest.raises(ValueError, match=r"leaf 'step' is gone\. It was donated"):
        zero2jax.live_bytes(gone)
    with pytest.raises(ValueError, match=r"leaf 'step' is gone\. This state was given to engine\.step"):
        engine.memory(gone, BATCH)


def test_keys_and_counters_among_the_parameters_are_named_with_the_way_to_freeze_them():
    params = nnx.split(dropout())[1]
    with pytest.raises(
        ValueError, match=r"'layers/1/rngs/count/value' \(uint32.*Freeze these with trainable="
    ):
        make().init(params)


def test_training_without_a_trainable_leaf_is_refused():
    with pytest.raises(ValueError, match=r"selects none of the 2 leaves, \['b', 'w'\] first"):
        make(trainable=lambda path, leaf: path.startswith("params/")).init(PARAMS)
    with pytest.raises(ValueError, match="no parameter is trained: they are none"):
        make().init({})


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_trainable_leaves_that_the_loss_does_not_use_are_named(stage):
    def uses_w(params, batch):
        _, kept = jax.lax.scan(lambda c, x: (c, x), params["b"], jnp.ones((2, 8)))  # carries b, for nothing
        return jnp.mean(batch["x"] @ params["w"]), {"reported": params["b"].sum(), "kept": kept.sum()}

    for loss, said in (
        (uses_w, "use the trainable parameters: 'b'"),
        (lambda p, b: jnp.mean(b["x"]), "any of"),
    ):
        unused = make(loss_fn=loss, stage=stage, num_microbatches=2)
        unused.abstract_state(PARAMS)
        with pytest.warns(UserWarning, match=said):
            unused.lower(BATCH)
        refusing = make(loss_fn=loss, stage=stage, unused="error")
        refusing.abstract_state(PARAMS)
        with pytest.raises(ValueError, match=said):
            refusing.lower(BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for settings in ({"loss_fn": loss_fn}, {"loss_fn": uses_w, "trainable": lambda path, _: path == "w"}):
            fine = make(stage=stage, **settings)
            fine.abstract_state(PARAMS)
            fine.lower(BATCH)


def test_an_evaluation_may_leave_parameters_out(engine, state):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(engine.evaluate(state, BATCH, loss_fn=lambda p, b: jnp.mean(p["w"]))) == 1.0


def test_a_loss_that_returns_nothing_is_refused():
    nothing = make(loss_fn=lambda params, batch: None)
    nothing.abstract_state(PARAMS)
    with pytest.raises(ValueError, match="the loss is None, and it must be one floating scalar"):
        nothing.lower(BATCH)


def test_a_process_that_was_launched_as_one_of_several_does_not_train_alone(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "ZERO2JAX_RESTARTS": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        zero2jax.StartError, match=r"zero2jax launch has started.* one of 2.*init_distributed\(\)"
    ):
        make()
    monkeypatch.setenv("WORLD_SIZE", "1")
    make()


def test_a_program_to_plan_whose_imports_are_missing_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        UsageError, match=r"importing 'needs_more': No module named 'not_there_at_all'\. Install"
    ):
        load_function("needs_more:program")


def test_parameters_on_one_device_are_sent_to_the_mesh_by_shard_optimizer():
    tx = zero2jax.shard_optimizer(TX, MESH())
    with pytest.raises(
        ValueError, match=r"'b' lies on 1 device.*jax\.device_put\(params, jax\.NamedSharding"
    ):
        tx.init(jax.device_put(PARAMS, jax.devices()[0]))
    tx.init(PARAMS)
    tx.init(jax.tree.map(jnp.asarray, PARAMS))
    tx.init(jax.device_put(PARAMS, jax.NamedSharding(MESH(), P())))


def test_a_step_to_save_that_is_no_number_is_named(tmp_path, engine, state):
    with zero2jax.Checkpointer(tmp_path, engine) as checkpointer:
        with pytest.raises(TypeError, match=r"the step is a zero2jax\..*TrainState.*save\(step, state\)"):
            checkpointer.save(state, 1)
        assert checkpointer.save(state.step, state)
