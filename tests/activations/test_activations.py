"""Activation settings in the engine: every stage trains the same, and each option leaves its trace in the program.

Recomputation gives the same values; where the compiler fuses the loops in another way, they differ in the last bits.
"""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32, assert_trees_close, assert_trees_equal, count_primitives
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax.config.reading import ConfigError, ConfigWarning
from zero2jax.programs.hlo import arrays

LAYERS, WIDTH, HIDDEN, VOCAB = 3, 6, 10, 7
BATCH = np.random.default_rng(0).integers(0, VOCAB, (16, 2)).astype(np.int32)
ALL_ON = zero2jax.ActivationSettings(policy="dots", num_checkpoints=2, offload=True, barrier=True)
SPECS = {"down": P(None, "model"), "embed": None, "up": P(None, None, "model")}


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "down": 0.4 * jax.random.normal(keys[0], (LAYERS, HIDDEN, WIDTH)),
        "embed": jax.random.normal(keys[1], (VOCAB, WIDTH)),
        "up": 0.4 * jax.random.normal(keys[2], (LAYERS, WIDTH, HIDDEN)),
    }


def loss(params, batch, rng, wrap=lambda block: block):
    """Tied embedding, dropout in every layer."""

    def block(x, inputs):
        layer, key = inputs
        hidden = jnp.tanh(x @ layer["up"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.75, hidden.shape), hidden / 0.75, 0)
        return x + hidden @ layer["down"], None

    stack = {name: params[name] for name in ("down", "up")}
    # a generator that compiles fast
    keys = jax.random.wrap_key_data(jnp.tile(jax.random.key_data(rng), 2), impl="unsafe_rbg")
    keys = jax.random.split(keys, LAYERS)
    x, _ = jax.lax.scan(wrap(block), params["embed"][batch[:, 0]], (stack, keys))
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1]).mean()


def make_engine(activations=None, stage=2, axes=None, num_microbatches=1, precision=FP32, loss_fn=loss):
    axes = axes or {"data": 2}
    engine = zero2jax.Engine(
        loss_fn,
        optax.sgd(0.1),
        zero2jax.make_mesh(**axes),
        stage=stage,
        num_microbatches=num_microbatches,
        precision=precision,
        param_specs=SPECS if "model" in axes else None,
        activations=activations,
    )
    engine.abstract_state(make_params(), batch=BATCH)
    return engine


def stepped(engine):
    state, metrics = engine.step(engine.init(make_params(), batch=BATCH), BATCH)
    return engine.params(state), metrics["loss"]


@pytest.mark.parametrize(
    ("stage", "num_devices", "num_microbatches", "bf16"),
    [(0, 2, 1, False), (1, 2, 2, False), (2, 2, 2, True), (3, 8, 1, False)],
)
def test_a_step_equals_that_of_the_unwrapped_loss(stage, num_devices, num_microbatches, bf16):
    precision = zero2jax.Precision() if bf16 else FP32
    make = functools.partial(
        make_engine,
        stage=stage,
        axes={"data": num_devices},
        num_microbatches=num_microbatches,
        precision=precision,
    )
    params, value = stepped(make(ALL_ON))
    expected, expected_value = stepped(make())
    # the last segment is a loop of its own, and gradients of at most 1 join in another order: 2**-24 (bf16: 2**-9)
    assert abs(value - expected_value) < (1e-2 if bf16 else 1e-6)
    assert_trees_close(params, expected, atol=0.1 * 2**-8 if bf16 else 1e-6)


def test_the_options_make_the_program_that_a_checkpoint_in_the_model_makes():
    written = make_engine(loss_fn=functools.partial(loss, wrap=jax.checkpoint))
    asked_for = make_engine(zero2jax.ActivationSettings(policy="nothing"))
    assert_trees_equal(stepped(asked_for), stepped(written))


@pytest.mark.parametrize("stage", [2, 3])
def test_partitioned_over_the_model_axis(stage):
    axes = {"data": 4, "model": 2}
    engine = make_engine(zero2jax.ActivationSettings(partition_axis="model", offload=True), stage, axes)
    params, value = stepped(engine)
    expected, expected_value = stepped(make_engine(None, stage, axes))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    assert_trees_close(
        params, expected, atol=1e-6
    )  # products over the model axis are summed in another order
    state = engine.layout.abstract_state(engine.mesh)
    program = engine._blueprint.program(engine.layout)
    jaxpr = jax.make_jaxpr(program.gradients)(state, jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype), {})
    # 4 examples of width 6 on each data shard: flat, of which each device of the model axis keeps half
    assert (LAYERS, 4 * WIDTH) in count_primitives(jaxpr).shapes["scan"]
    assert (LAYERS, 4, WIDTH) not in count_primitives(jaxpr).shapes["scan"]


def test_a_segment_gathers_its_slice_in_backward():
    lowered = make_engine(
        zero2jax.ActivationSettings(partition_axis="model"), 2, {"data": 4, "model": 2}
    ).lower(BATCH)
    text = lowered.compile().as_text()
    assert re.search(r"f32\[24\]\S* all-gather\(\S*f32\[12\]|f32\[24\]\S* all-gather", text)


def test_saved_activations_are_one_buffer_of_the_loop():
    engine = make_engine(zero2jax.ActivationSettings(contiguous=True))
    module = zero2jax.audit(engine.lower(BATCH).compile()).module
    loops = [i for name in module.computations for i in module.instructions(name) if i.opcode == "while"]
    stacked = [a.shape for i in loops for a in arrays(i.type) if a.shape == (LAYERS, 8, WIDTH)]
    # one buffer, written by the forward loop and read by the backward loop; no other array of a layer's activations
    assert 1 <= len(stacked) <= len(loops)


def test_barriers_are_in_the_lowered_step():
    count = lambda activations: make_engine(activations).lower(BATCH).as_text().count("optimization_barrier")
    # the compiler takes barriers out when all its passes are through: the compiled text has none
    assert count(zero2jax.ActivationSettings(barrier=True)) == count(zero2jax.ActivationSettings()) + 2


def test_evaluation_saves_nothing_and_stays_as_it_is():
    engine = make_engine(zero2jax.ActivationSettings(policy="dots"))
    state = engine.init(make_params(), batch=BATCH)
    plain = make_engine()
    expected = plain.evaluate(plain.init(make_params(), batch=BATCH), BATCH)
    assert engine.evaluate(state, BATCH) == expected


def test_the_profile_is_printed_once_and_in_the_metrics(capsys):
    engine = make_engine(zero2jax.ActivationSettings(num_checkpoints=2, profile=True))
    state, metrics = engine.step(engine.init(make_params(), batch=BATCH), BATCH)
    longer, shorter = metrics["activation_profile"]["segments"]
    assert (longer["num_layers"], longer["num_runs"]) == (2, 1)
    assert (shorter["num_layers"], shorter["num_runs"]) == (1, 1)
    # 8 examples of width 6 on each of 2 devices, fp32; more if nothing is recomputed
    assert longer["saved_bytes"] == shorter["saved_bytes"] == 8 * WIDTH * 4
    assert longer["everything_bytes"] > shorter["everything_bytes"] > shorter["saved_bytes"]
    for phase in ("forward", "backward"):
        assert longer[phase]["seconds"] > 0
    assert longer["recompute_s"] >= 0
    printed = capsys.readouterr().out
    assert re.search(r"segment of +runs +forward +recompute +backward +saved +instead of", printed)
    _, again = engine.step(state, BATCH)
    assert again["activation_profile"] == metrics["activation_profile"]
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="this engine leaves them to the loss function"):
        make_engine().activation_profile(BATCH)


# --- the block of a configuration -------------------------------------------------------------------------------


def initialized(block, **axes):
    config = {"zero_optimization": {"stage": 2}, "activation_checkpointing": block}
    mesh = zero2jax.make_mesh(**(axes or {"data": 2}))
    return zero2jax.initialize(loss, optax.sgd(0.1), config, mesh)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"partition_activations": False, "profile": False, "number_checkpoints": None}, None),
        ({"number_checkpoints": 2}, {"num_checkpoints": 2}),
        ({"cpu_checkpointing": True}, {"offload": True}),
        ({"synchronize_checkpoint_boundary": True}, {"barrier": True}),
        ({"profile": True}, {"profile": True}),
        ({"policy": "dots"}, {"policy": "dots"}),
        ({"policy": {"attention": "save"}}, {"policy": {"attention": "save"}}),
        (
            {
                "partition_activations": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 3,
            },
            {"partition_axis": "model", "contiguous": True, "num_checkpoints": 3},
        ),
    ],
)
def test_each_key_of_the_block_acts(block, expected):
    found = initialized(block, data=4, model=2).activations
    assert found == (None if expected is None else zero2jax.ActivationSettings(**expected))


def test_partitioning_without_a_model_axis_warns_by_name():
    with pytest.warns(
        ConfigWarning, match="activation_checkpointing.partition_activations has nothing to save"
    ):
        engine = initialized({"partition_activations": True})
    assert engine.activations == zero2jax.ActivationSettings()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"policy": "dotz"}, "activation_checkpointing.policy: .*Did you mean 'dots'"),
        ({"policy": 3}, "activation_checkpointing.policy = 3: must be a remat policy: a word"),
        ({"policy": []}, "must be a remat policy"),
        ({"policy": {"attention": "keep"}}, "tensor 'attention' has the action 'keep'"),
        (
            {"contiguous_memory_optimization": True},
            "partition_activations = false: contiguous_memory_optimization needs it",
        ),
        ({"number_checkpoints": 0}, "number_checkpoints = 0: must be"),
    ],
)
def test_errors_of_the_block(block, message):
    with pytest.raises(ConfigError, match=message):
        initialized(block)


def test_more_checkpoints_than_layers_is_an_error_when_traced():
    engine = initialized({"number_checkpoints": 4})
    with pytest.raises(ValueError, match="num_checkpoints is 4 and the model has 3 layers"):
        engine.abstract_state(make_params(), batch=BATCH)


def temporary_layers(stage, **settings):
    """Temporary bytes of a step, in units of one layer's weights, which outweigh everything else."""
    width, layers = 64, 6

    def loss(stack, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0].mean()

    engine = zero2jax.Engine(
        loss,
        optax.sgd(0.1),
        zero2jax.make_mesh(data=4),
        stage=stage,
        precision=FP32,
        activations=zero2jax.ActivationSettings(**settings),
    )
    shapes = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    batch = jax.ShapeDtypeStruct((4, width), jnp.float32)
    engine.abstract_state(shapes, batch=batch)
    return engine.lower(batch).compile().memory_analysis().temp_size_in_bytes / (width * width * 4)


def test_a_segment_of_several_layers_holds_no_gathered_weights_at_stage_3():
    each, segments, nested = (
        temporary_layers(3, **s) for s in ({}, {"num_checkpoints": 2}, {"policy": "nested"})
    )
    assert temporary_layers(2, num_checkpoints=2) > each + 5  # where they are held
    # slices of the stack's shards, (3 + 3) / 4 of a layer, and as much of its gradient's; no whole layer more
    assert segments < each + 3.5
    assert nested < each + 3.5


def test_stage_3_says_that_saving_everything_holds_the_weights():
    with pytest.warns(UserWarning, match="everything_saveable saves the parameters that stage 3 gathers"):
        held = temporary_layers(3, policy="everything")
    assert held > temporary_layers(3) + 4


def profiled(loss_fn):
    settings = zero2jax.ActivationSettings(profile=True)
    return zero2jax.Engine(
        loss_fn, optax.sgd(0.1), zero2jax.make_mesh(data=2), activations=settings, precision=FP32
    )


def test_a_profile_that_cannot_be_measured_leaves_the_state_alone():
    def loss(params, batch):
        body = lambda x, w: (jax.lax.pmean(jnp.tanh(x @ w), "data"), None)
        return jax.lax.scan(body, batch, params["w"])[0].mean()

    engine = profiled(loss)
    state = engine.init({"w": jnp.ones((2, 4, 4))})
    with pytest.raises(NameError, match="data"):
        engine.step(state, np.ones((4, 4), np.float32))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_the_profile_counts_the_runs_of_equal_blocks_and_tells_others_apart():
    wide = zero2jax.layer(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))
    narrow = zero2jax.layer(lambda w, x: jnp.tanh(x @ w))

    def loss(params, batch):
        x = batch
        for w in (params["a"], params["b"], params["c"]):
            x = narrow(w, wide(w, x))
        return x.mean()

    engine = profiled(loss)
    engine.abstract_state({name: jax.ShapeDtypeStruct((4, 4), jnp.float32) for name in "abc"})
    found = engine.activation_profile(jax.ShapeDtypeStruct((4, 4), jnp.float32)).segments
    assert [(s.num_layers, s.num_runs) for s in found] == [(1, 3), (1, 3)]


@pytest.mark.parametrize("settings", [{"num_checkpoints": 2}, {"policy": "nested"}])
def test_stacks_cut_into_segments_stay_in_shards_beside_a_model_axis(settings):
    engine = make_engine(zero2jax.ActivationSettings(**settings), stage=3, axes={"data": 2, "model": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a stack that is gathered whole would be named
        found = count_primitives(
            jax.make_jaxpr(engine._blueprint.program(engine.layout).gradients)(*traced_inputs(engine))
        )
    assert {len(shape) for shape in found.shapes["all_gather"]} == {2}


def traced_inputs(engine):
    return engine.layout.abstract_state(engine.mesh), jax.ShapeDtypeStruct(BATCH.shape, BATCH.dtype), {}
