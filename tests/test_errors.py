"""Each error of a caller, by its words, before anything is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import make_batch, make_engine, make_params, mean_loss
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.base import losses


@pytest.fixture(scope="module")
def engine():
    return make_engine(8, num_microbatches=2)


@pytest.fixture(scope="module")
def state(engine):
    return engine.init(make_params())


@pytest.mark.parametrize("size", [24, 8, 17])
def test_a_batch_that_does_not_divide_shows_the_arithmetic(engine, state, size):
    nearest = max(size // 16, 1) * 16
    match = rf"{size} examples over 8 devices x 2 microbatches: {size} / \(8 \* 2\) = .*Use {nearest} or {nearest + 16}"
    with pytest.raises(ValueError, match=match):
        engine.step(state, make_batch(size))
    with pytest.raises(ValueError, match=match):
        engine.lower(make_batch(size))


def test_evaluate_must_divide_by_devices_only(engine, state):
    with pytest.raises(ValueError, match="12 examples over 8 devices x 1 microbatches"):
        engine.evaluate(state, make_batch(12))


def test_an_empty_batch_dim_is_refused(engine, state):
    with pytest.raises(ValueError, match="a batch of 0 examples"):
        engine.step(state, make_batch(0))


@pytest.mark.parametrize("scalar", [3.0, np.float32(1), jnp.int32(2)])
def test_a_batch_leaf_without_a_leading_dim_is_named(engine, state, scalar):
    with pytest.raises(ValueError, match="leaf 'temperature' is a scalar, without a leading dim"):
        engine.step(state, make_batch(16) | {"temperature": scalar})


def test_a_scalar_of_the_batch_is_sent_to_loss_args(engine, state):
    with pytest.raises(ValueError, match=r"engine.step\(state, batch, loss_args=\{'temperature': ...\}\)"):
        engine.step(state, make_batch(16) | {"temperature": 3.0})


@pytest.mark.parametrize("rows", [[1, 2, 3], (0.5,), [[1, 2], [3, 4]]])
def test_a_list_in_the_batch_is_told_apart_from_a_scalar(engine, state, rows):
    with pytest.raises(ValueError, match=r"'id(/0)?' is a Python list or tuple of numbers.*np\.asarray"):
        engine.step(state, make_batch(16) | {"id": rows})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (np.array(["a", "bc"]), "'text' is an array of <U2"),
        (np.array([b"a"]), "'text' is an array of |S1"),
        (np.array(["a", None]), "'text' is an array of object"),
        (["a", "b"], "'text/0' is a str"),
        ("abc", "'text' is a str"),
    ],
)
def test_text_in_the_batch_is_named(engine, state, text, found):
    with pytest.raises(TypeError, match=re.escape(found) + ".*Turn text into token ids"):
        engine.step(state, make_batch(16) | {"text": text})


def test_batch_leaves_of_different_length_are_named(engine, state):
    with pytest.raises(ValueError, match="leaf 'weight' has 16 examples and leaf 'x' has 32"):
        engine.step(state, make_batch(16) | {"x": np.zeros(32, np.int32)})


def test_a_batch_without_arrays_is_refused(engine, state):
    with pytest.raises(ValueError, match="it has no arrays"):
        engine.step(state, {})


def test_a_batch_of_another_size_than_configured_is_refused():
    engine = make_engine(2, batch_size=8)
    state = engine.init(make_params())
    with pytest.raises(ValueError, match="it has 4 examples, and the batch size was set to 8"):
        engine.step(state, make_batch(4))


def test_a_mesh_without_the_data_axis_is_refused():
    with pytest.raises(
        ValueError, match=r"axis 'data' in a mesh with axes \{'fsdp': 8\}.*make_mesh\(data=8\)"
    ):
        zero2jax.Engine(mean_loss, optax.sgd(1.0), zero2jax.make_mesh(fsdp=8))


def test_a_mesh_that_calls_its_data_axis_otherwise_is_told_how_to_say_so():
    mesh = zero2jax.make_mesh(dp=4)
    with pytest.raises(ValueError, match=r"axis 'data' in a mesh with axes \{'dp': 4\}.*axis_name='dp'"):
        zero2jax.Engine(mean_loss, optax.sgd(1.0), mesh)
    assert zero2jax.Engine(mean_loss, optax.sgd(1.0), mesh, axis_name="dp").num_shards == 4
    with pytest.raises(ValueError, match=r"so the mesh must have it. Make a mesh with .*make_mesh\(data=2\)"):
        zero2jax.Engine(mean_loss, optax.sgd(1.0), zero2jax.make_mesh(model=2))


@pytest.mark.parametrize("mesh", [8, {"data": 8}, "data=8"])
def test_what_is_no_mesh_is_refused(mesh):
    for make in (zero2jax.Engine, zero2jax.initialize):
        words = rf"reading the mesh: found {type(mesh).__name__}, expected a jax.sharding.Mesh. Make one with"
        with pytest.raises(TypeError, match=words):
            make(mean_loss, optax.sgd(1.0), mesh=mesh)


def test_an_unknown_axis_name_is_refused():
    with pytest.raises(ValueError, match=r"axis 'batch' in a mesh with axes {'data': 8}"):
        zero2jax.Engine(mean_loss, optax.sgd(1.0), zero2jax.make_mesh(), axis_name="batch")


def test_a_mesh_with_explicit_axes_is_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(ValueError, match=r"the axes \['data'\] are not of type Auto"):
        zero2jax.Engine(mean_loss, optax.sgd(1.0), mesh)


@pytest.mark.parametrize("axes", [{"data": 9}, {"data": 3, "model": 3}, {"data": -1, "model": 3}])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(axes):
    with pytest.raises(ValueError, match=r"there are 8.*jax_num_cpu_devices"):
        zero2jax.make_mesh(**axes)


@pytest.mark.parametrize("axes", [{"data": 0}, {"data": -2}, {"data": -1, "model": -1}])
def test_a_mesh_axis_of_no_size_is_refused(axes):
    with pytest.raises(
        ValueError, match="every axis size must be a positive number, and at most one may be -1"
    ):
        zero2jax.make_mesh(**axes)


@pytest.mark.parametrize("stage", [-1, 4, "2", None])
def test_a_stage_outside_0_to_3_is_refused(stage):
    with pytest.raises(ValueError, match="ZeRO has the stages 0, 1, 2 and 3"):
        make_engine(2, stage=stage)


@pytest.mark.parametrize("num", [0, -1, 1.5])
def test_a_number_of_microbatches_that_is_none_is_refused(num):
    with pytest.raises(ValueError, match=r"num_microbatches is .*whole number of at least 1"):
        make_engine(2, num_microbatches=num)


@pytest.mark.parametrize(("stage", "gather"), [(2, "never"), (3, "once"), (1, "once")])
def test_a_way_to_gather_that_the_stage_does_not_have_is_refused(stage, gather):
    with pytest.raises(ValueError, match=f"gather is '{gather}' at stage {stage}"):
        make_engine(2, stage=stage, gather=gather)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="reduction is 'max'; it is 'mean' or 'sum'"):
        make_engine(2, reduction="max")


def test_trainable_leaves_that_are_not_floating_are_all_named():
    params = make_params() | {"table": jnp.arange(4), "flag": jnp.array(True)}
    with pytest.raises(
        ValueError, match=r"not floating: 'flag' \(bool\[\]\), 'table' \(int32\[4\]\).*trainable="
    ):
        make_engine(2).init(params)


def test_a_complex_parameter_is_told_how_it_can_be_trained():
    with pytest.raises(
        ValueError, match=r"'z' \(complex64\[3\]\).*keep one as a real pair.*jax\.lax\.complex"
    ):
        make_engine(2).init({"z": jnp.ones(3, jnp.complex64), "w": jnp.ones(3)})


def test_an_init_function_without_its_key_is_told_where_to_pass_it():
    def init_fn(key, width=3):
        return {"w": jax.random.normal(key, (width,))}

    with pytest.raises(
        TypeError, match=r"by init_fn\(key, width=3\) with 0 arguments.*'key'.*engine\.init\(init_fn, jax"
    ):
        make_engine(2).init(init_fn)
    with pytest.raises(TypeError, match="with 3 arguments: too many positional arguments"):
        make_engine(2).init(init_fn, jax.random.key(0), 4, 5)


def test_params_of_another_structure_than_the_state_name_the_first_path(engine, state):
    wrong = dict(state.params)
    del wrong["embed"]
    with pytest.raises(ValueError, match=r"`state\.params` has no leaf 'embed'"):
        engine.step(state._replace(params=wrong), make_batch(16))
    with pytest.raises(ValueError, match=r"`state\.params` has a leaf 'more'"):
        engine.evaluate(state._replace(params=state.params | {"more": jnp.ones(())}), make_batch(16))


def test_an_optimizer_state_of_another_optimizer_is_refused(engine, state):
    other = make_engine(8, tx=optax.sgd(1e-2)).init(make_params())
    with pytest.raises(ValueError, match=r"`state\.opt_state` has no leaf '0/count'"):
        engine.step(state._replace(opt_state=other.opt_state), make_batch(16))


def test_trees_of_the_same_leaves_in_other_containers_are_refused(engine, state):
    with pytest.raises(ValueError, match="the containers differ"):
        engine.params(state._replace(opt_state=list(state.opt_state)))


def test_a_tree_of_flags_or_specs_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="`trainable` has no leaf 'blocks/b'"):
        make_engine(2, trainable={"embed": True}).init(make_params())
    with pytest.raises(ValueError, match="`param_specs` has no leaf 'blocks/b'"):
        make_engine(2, param_specs={"embed": P()}).init(make_params())


LOSSES = {
    "vector": (lambda p, b: p["scale"] * b["weight"], r"the loss is float32\[12\]"),
    "integer": (lambda p, b: jnp.int32(1), r"the loss is int32\[\]"),
    "dict": (lambda p, b: {"loss": p["scale"]}, "the loss is {'loss': 'float32"),
    "weight": (lambda p, b: (p["scale"], {"weight": b["weight"]}), r"aux\['weight'\] is float32\[12\]"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_not_a_floating_scalar_is_refused(name):
    loss_fn, found = LOSSES[name]
    engine = make_engine(2, loss_fn=loss_fn)
    state = engine.init(make_params())
    with pytest.raises(ValueError, match=f"tracing the loss function: {found}.*must be one floating scalar"):
        engine.step(state, make_batch(24))


def test_new_values_for_leaves_that_are_not_frozen_are_refused():
    loss_fn = lambda p, b: (p["scale"], {"frozen": {"scale": p["scale"]}})
    engine = make_engine(2, loss_fn=loss_fn, trainable=lambda path, _: path != "norm")
    state = engine.init(make_params())
    with pytest.raises(
        ValueError, match=r"leaf 'scale' of shape \(\) does not fit, expected one of .*'norm'"
    ):
        engine.step(state, make_batch(4))
    loss_fn = lambda p, b: (p["scale"], {"frozen": {"norm": p["norm"][:2]}})
    engine = make_engine(2, loss_fn=loss_fn, trainable=lambda path, _: path != "norm")
    state = engine.init(make_params())
    with pytest.raises(ValueError, match=r"leaf 'norm' of shape \(2,\) does not fit, expected shape \(5,\)"):
        engine.step(state, make_batch(4))


def test_new_values_without_any_frozen_leaf_ask_for_trainable():
    engine = make_engine(2, loss_fn=lambda p, b: (p["scale"], {"frozen": {"norm": p["norm"]}}))
    state = engine.init(make_params())
    with pytest.raises(
        ValueError, match=r"leaf 'norm', and no parameter is frozen.*trainable=lambda path, leaf: not"
    ):
        engine.step(state, make_batch(4))


def test_new_values_of_another_kind_are_refused():
    params = make_params() | {"key": jax.random.key(0)}
    for new in ({"key": jnp.zeros((), jnp.uint32)}, {"norm": jax.random.split(jax.random.key(0), 5)}):
        loss_fn = lambda p, b, new=new: (p["scale"], {"frozen": new})
        engine = make_engine(2, loss_fn=loss_fn, trainable=lambda path, _: path not in ("key", "norm"))
        state = engine.init(params)
        with pytest.raises(ValueError, match=r"does not fit, expected (key<fry>|float32) of shape"):
            engine.step(state, make_batch(4))


def test_keys_in_aux_are_refused_by_name():
    loss_fn = lambda p, b: (p["scale"], {"seen": {"key": jax.random.key(0)}})
    engine = make_engine(2, loss_fn=loss_fn)
    state = engine.init(make_params())
    with pytest.raises(TypeError, match=r"aux holds random keys, 'seen/key', which have no mean"):
        engine.step(state, make_batch(4))


def test_aux_that_is_per_example_is_warned_of():
    loss_fn = lambda p, b: (
        p["scale"],
        {"logits": jnp.ones((b["x"].shape[0], 7)) * p["scale"], "n": jnp.ones(2)},
    )
    engine = make_engine(2, loss_fn=loss_fn)
    state = engine.init(make_params())
    with pytest.warns(UserWarning, match=r"a row for each of the 4 examples of a slice: 'logits' \[4, 7\]\."):
        engine.step(state, make_batch(8))


def test_value_and_grad_in_the_place_of_the_loss_is_warned_of():
    engine = make_engine(2, loss_fn=jax.value_and_grad(mean_loss))
    state = engine.init(make_params())
    with pytest.warns(
        UserWarning, match=r"structure and the shapes of the parameters.*not jax\.value_and_grad of it"
    ):
        engine.step(state, make_batch(8))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sharding_constraint_over_the_data_axis_is_dropped_by_name(stage):
    mesh = zero2jax.make_mesh(data=2)

    def loss_fn(params, batch):
        x = jax.lax.with_sharding_constraint(batch["weight"], jax.NamedSharding(mesh, P("data")))
        return x.mean() * params["scale"]

    engine = make_engine(2, loss_fn=loss_fn, stage=stage)
    state, batch = engine.init(make_params()), make_batch(8)
    with pytest.warns(UserWarning, match=r"constraints in it name 'data' \(a data axis"):
        _, metrics = engine.step(state, batch)
    np.testing.assert_allclose(metrics["loss"], batch["weight"].mean() * make_params()["scale"], rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_axis_name_that_the_mesh_does_not_have_is_explained(stage):
    loss_fn = lambda p, b: jax.lax.pmean(p["scale"] * b["weight"].mean(), "batch")
    engine = make_engine(2, loss_fn=loss_fn, stage=stage)
    state = engine.init(make_params())
    with pytest.raises(NameError, match=r"may name the mesh axes \['data'\].*Engine\(axis_name=\.\.\.\)"):
        engine.step(state, make_batch(8))


def test_multi_steps_is_refused_as_an_object_and_inside_of_a_chain():
    multi = optax.MultiSteps(optax.adam(1e-2), 4)
    match = "contains optax.MultiSteps.*pass the inner transformation, and set num_microbatches"
    with pytest.raises(ValueError, match=match):
        make_engine(2, tx=multi)
    hidden = optax.chain(optax.clip(1.0), multi.gradient_transformation())
    with pytest.raises(ValueError, match=match):
        make_engine(2, tx=hidden).init(make_params())


def test_something_else_than_a_transformation_is_refused():
    with pytest.raises(TypeError, match=r"reading the optimizer: found function, expected an optax"):
        make_engine(2, tx=optax.adam)


def test_an_engine_that_has_seen_no_parameters_says_so(state):
    engine = make_engine(8)
    with pytest.raises(ValueError, match=r"it has not seen the parameters\. Call engine.init"):
        engine.step(state, make_batch(16))
    with pytest.raises(ValueError, match="it has not seen the parameters"):
        engine.layout  # noqa: B018


def test_parameter_leaves_that_are_no_arrays_are_named():
    params = {"w": jnp.ones((4, 4)), "act": jax.nn.relu, "name": "mlp"}
    with pytest.raises(TypeError, match=r"'act' \(custom_jvp\), 'name' \(str\).*equinox.partition"):
        make_engine(2).init(params)


def test_a_state_of_another_type_is_refused():
    engine = make_engine(2)
    engine.init(make_params())
    with pytest.raises(TypeError, match=r"found dict, expected the TrainState that engine\.init"):
        engine.step({"params": make_params()}, make_batch())


def test_a_state_of_other_shapes_is_refused():
    engine = make_engine(2)
    state = engine.init(make_params())
    engine.init({**make_params(), "norm": jnp.ones(9)})
    with pytest.raises(
        ValueError, match=r"leaf 'norm' is float32\[6\] and this engine keeps it as float32\[10\]"
    ):
        engine.step(state, make_batch())


def test_a_key_that_is_not_the_third_positional_argument_is_refused():
    for loss in (lambda p, b, *, rng=None: 0.0, lambda p, b, extra, key: 0.0):
        with pytest.raises(ValueError, match="is not the third positional one"):
            losses.takes_rng(loss)
