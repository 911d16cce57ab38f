"""What the compiled step holds: bytes, aliases, collectives, and that it is compiled once."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import LAYERS, bytes_on_device, count_primitives, make_batch, make_engine, make_params, mean_loss

from zero2jax.programs.hlo import collectives

N = 8
STACK = {"blocks/b", "blocks/w"}


@functools.cache
def compiled_step(stage, gather="auto", num_microbatches=1):
    engine = make_engine(
        N, tx=optax.adamw(1e-2), clip_norm=1.0, stage=stage, gather=gather, num_microbatches=num_microbatches
    )
    engine.abstract_state(make_params())
    lowered = engine.lower(make_batch(16 * num_microbatches))
    return engine, lowered, lowered.compile()


def found(stage, kind, **options):
    return [c for c in collectives(compiled_step(stage, **options)[2].as_text()) if c.kind == kind]


def total_bytes(stage, kind, **options):
    return sum(c.total_bytes for c in found(stage, kind, **options))


def sharded_bytes(engine, paths=None):
    """fp32 bytes, padding included, of the sharded leaves: what one gather, or one reduction, of each moves."""
    leaves = [leaf for leaf in engine.layout.params.leaves if leaf.dim is not None]
    return sum(4 * math.prod(leaf.rest_shape) for leaf in leaves if paths is None or leaf.path in paths)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_live_shards_hold_the_bytes_of_the_plan_and_the_step_gives_all_of_them_back(stage):
    engine, _, compiled = compiled_step(stage)
    state = engine.init(make_params())
    plans = engine.layout.params.rest_bytes + engine.layout.opt_state.rest_bytes
    other = state.step.nbytes + state.rng.nbytes
    for device in jax.devices():
        assert bytes_on_device((state.params, state.opt_state), device) == plans
        assert bytes_on_device(state, device) == plans + other
    assert compiled.memory_analysis().alias_size_in_bytes == plans + other


def test_sharded_adam_state_takes_12_bytes_per_parameter_over_n():
    engine = make_engine(N)
    state = engine.init({"w": jnp.ones((16, 8)), "v": jnp.ones((3, 40))})
    for device in jax.devices():
        held = bytes_on_device((state.params, state.opt_state[0].mu, state.opt_state[0].nu), device)
        assert held == 12 * (16 * 8 + 3 * 40) // N


def test_the_donated_state_is_gone_and_the_new_one_has_its_placement():
    engine = make_engine(N)
    state = engine.init(make_params())
    placement = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
    after, _ = engine.step(state, make_batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), after) == placement


COMPILATIONS = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **kwargs: (
        COMPILATIONS.append(kwargs) if name.endswith("backend_compile_duration") else None
    )
)


def test_the_second_step_traces_and_compiles_nothing():
    traces = []

    def loss(params, batch):
        traces.append(None)
        return mean_loss(params, batch)

    engine = make_engine(2, loss_fn=loss, tx=optax.inject_hyperparams(optax.adam)(learning_rate=1e-2))
    state = engine.init(make_params())
    on_device = jax.tree.map(jnp.asarray, make_batch(seed=3))
    COMPILATIONS.clear()
    # the first of each kind may compile: the step, the placement
    for batch in (make_batch(seed=1), on_device):
        state, _ = engine.step(state, batch)
        engine.evaluate(state, batch)
    assert COMPILATIONS
    COMPILATIONS.clear()
    num_traces = len(traces)
    for batch in (make_batch(seed=2), on_device):
        state, _ = engine.step(state, batch)
        engine.evaluate(state, batch)
    assert not COMPILATIONS
    assert len(traces) == num_traces


@pytest.mark.parametrize("stage", [2, 3])
def test_evaluate_and_params_gather_stacks_a_layer_at_a_time(stage):
    engine = make_engine(N, stage=stage)
    state = engine.init(make_params())
    for fun in (engine.params, lambda state: engine.evaluate(state, make_batch())):
        found = count_primitives(jax.make_jaxpr(fun)(state))
        assert found.in_loops["all_gather"] == len(STACK)
        # one layer of b and of w; embed
        assert {len(shape) for shape in found.shapes["all_gather"]} == {1, 2}
        assert not found.total("reduce_scatter")


# --- collectives -------------------------------------------------------------------------------------------------


def test_the_reader_finds_every_collective_of_the_text():
    for stage in (1, 2, 3):
        text = compiled_step(stage)[2].as_text()
        for kind in ("all-gather", "reduce-scatter", "all-reduce"):
            assert len(found(stage, kind)) == text.count(f" {kind}(") + text.count(f" {kind}-start("), (
                stage,
                kind,
            )


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_of_a_scanned_stack_leave_the_backward_loop_as_shards(stage):
    engine, lowered, _ = compiled_step(stage)
    reduces = found(stage, "reduce-scatter")
    in_loops = [c for c in reduces if c.loops]
    assert {c.trips for c in in_loops} == {LAYERS}
    assert sum(c.total_bytes for c in in_loops) == sharded_bytes(engine, STACK)
    assert lowered.as_text().count("stablehlo.reduce_scatter") == len({c.name for c in reduces})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_but_small_leaves_and_scalars_is_all_reduced_from_stage_1_on(stage):
    engine, _, _ = compiled_step(stage)
    sizes = sum(c.total_bytes for c in found(stage, "all-reduce"))
    whole = sum(4 * math.prod(leaf.shape) for leaf in engine.layout.params.leaves if leaf.dim is None)
    assert whole <= sizes <= whole + 64  # loss, weight and norm: a few scalars
    if stage > 0:
        assert whole == 4 * (5 + 1)  # norm and scale
    for kind in ("all-to-all", "collective-permute"):
        assert not found(stage, kind)


def test_bytes_of_stage_2_are_those_of_parameters_and_gradients():
    engine, _, _ = compiled_step(2)
    assert total_bytes(2, "reduce-scatter") == sharded_bytes(engine)
    assert total_bytes(2, "all-gather") == sharded_bytes(engine)


def test_stage_3_gathers_layers_again_in_backward():
    engine, _, _ = compiled_step(3)
    in_loops = sum(c.total_bytes for c in found(3, "all-gather") if c.loops)
    assert in_loops == 2 * sharded_bytes(engine, STACK)
    assert len({c.loops for c in found(3, "all-gather") if c.loops}) == 2  # the forward and the backward loop


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_stage_1_reduces_each_leaf_once_after_the_last_microbatch(num_microbatches):
    engine, _, _ = compiled_step(1, num_microbatches=num_microbatches)
    reduces = found(1, "reduce-scatter", num_microbatches=num_microbatches)
    assert sum(c.total_bytes for c in reduces) == sharded_bytes(engine)
    assert total_bytes(1, "all-gather", num_microbatches=num_microbatches) == sharded_bytes(engine)
    # stacks in a loop of their own over layers, that no other collective shares; the rest outside of loops
    loops = {c.loops for c in reduces if c.loops}
    assert {c.trips for c in reduces} == {1, LAYERS}
    assert len(loops) == 1
    assert len(next(iter(loops))) == 1
    assert not [c for c in found(1, "all-gather", num_microbatches=num_microbatches) if c.loops in loops]


def test_stage_2_gathering_once_moves_the_parameters_once_for_all_microbatches():
    for num_microbatches in (2, 3):
        options = {"gather": "once", "num_microbatches": num_microbatches}
        engine, _, _ = compiled_step(2, **options)
        assert total_bytes(2, "all-gather", **options) == sharded_bytes(engine)
        # the tied embedding is reduced at both of its uses at most, everything else once per microbatch
        least = num_microbatches * sharded_bytes(engine)
        most = least + num_microbatches * sharded_bytes(engine, {"embed"})
        assert least <= total_bytes(2, "reduce-scatter", **options) <= most


def test_stage_2_gathering_at_use_moves_layers_for_each_microbatch():
    options = {"gather": "use", "num_microbatches": 2}
    engine, _, _ = compiled_step(2, **options)
    # XLA moves the embedding's gather out of the loop
    least = 2 * sharded_bytes(engine, STACK) + sharded_bytes(engine, {"embed"})
    assert least <= total_bytes(2, "all-gather", **options) <= 2 * sharded_bytes(engine)
    assert total_bytes(2, "reduce-scatter", **options) == 2 * sharded_bytes(engine)


@pytest.mark.parametrize(
    ("stage", "clip", "num_scalars"), [(1, True, 4), (2, True, 4), (3, True, 4), (2, False, 3)]
)
def test_an_elementwise_optimizer_on_a_leaf_that_does_not_divide_communicates_scalars_only(
    stage, clip, num_scalars
):
    """13 x 5 over 8 devices: shards of two rows, the last ones padding.

    The scalars: loss, weight (where it is no constant to XLA), norm, and the norm that optax's clipping takes.
    """
    loss = lambda params, batch: jnp.tanh(batch @ params).mean()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)) if clip else optax.adamw(1e-2)
    engine = make_engine(N, loss_fn=loss, tx=tx, stage=stage)
    engine.abstract_state(jnp.ones((13, 5)))
    assert engine.layout.params.leaves[0].rest_shape == (16, 5)
    all_found = collectives(engine.lower(np.ones((N, 13), np.float32)).compile().as_text())
    kinds = [c.kind for c in all_found]
    assert kinds.count("reduce-scatter") == 1
    assert set(kinds) == {"reduce-scatter", "all-gather", "all-reduce"}
    scalars = sum(c.num_bytes for c in all_found if c.kind == "all-reduce") // 4
    assert num_scalars - 1 <= scalars <= num_scalars


# --- what only programs of some size show -------------------------------------------------------------------------


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def lowered_stage_3(width, **settings):
    """A step with three square matrices: of a plain product, of a custom derivative, of a `cond`."""

    def loss(p, x):
        x = jnp.tanh(product(jnp.tanh(x @ p["a"]), p["b"]))
        x = jax.lax.cond(x.sum() > 0, lambda x, w: jnp.tanh(x @ w), lambda x, w: x @ w, x, p["c"])
        return jnp.tanh(x).mean()

    engine = make_engine(2, loss_fn=loss, tx=optax.sgd(1e-2), stage=3, **settings)
    engine.abstract_state({name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in "abc"})
    return engine.lower(jax.ShapeDtypeStruct((2, width), jnp.float32))


def test_stage_3_gathers_what_has_more_than_100_000_elements_again():
    assert num_gathers(316) == 3  # 99,856 elements
    assert num_gathers(317) == 5  # 100,489; backward does not read the first matrix


def num_gathers(width, **settings):
    return lowered_stage_3(width, **settings).as_text().count("stablehlo.all_gather")


def test_stage_3_keeps_what_it_is_told_to_keep():
    size = 20 * 20
    assert num_gathers(20, max_kept_size=size) == 3
    assert num_gathers(20, max_kept_size=size - 1) == 5
    # "a" comes first, and is not gathered again anyway
    assert [num_gathers(20, max_kept_total=total) for total in (size, 2 * size, 3 * size)] == [5, 4, 3]


def test_the_compiler_does_not_take_both_gathers_of_stage_3_for_one():
    lowered = lowered_stage_3(320)
    assert lowered.as_text().count("stablehlo.optimization_barrier") == 3 + 1  # and the factor of the mean
    if jax.__version_info__ >= (0, 12):  # XLA's compiler for CPUs in jax 0.10 looks through the barrier
        compiled = collectives(lowered.compile().as_text())
        assert len([c for c in compiled if c.kind == "all-gather"]) == 5


def test_gather_auto_is_at_use_with_one_microbatch_and_once_with_several():
    text = lambda gather, num_microbatches: compiled_step(2, gather, num_microbatches)[1].as_text()
    assert text("auto", 1) == text("use", 1) != text("once", 1)
    assert text("auto", 2) == text("once", 2) != text("use", 2)


def temporary_bytes(loss, params, stage, num_rows=16):
    engine = make_engine(N, loss_fn=loss, tx=optax.sgd(1e-2), stage=stage)
    width = next(iter(params.values())).shape[-1]
    batch = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
    engine.abstract_state(params, batch=batch)
    return engine.lower(batch).compile().memory_analysis().temp_size_in_bytes


def test_a_stack_that_the_loss_makes_exists_in_full_at_stage_0_alone():
    """Twelve matrices. Stage 0 holds their stack and its gradient; stage 2 what its forward loop has gathered;
    stage 3 a layer or two, and shards.
    """
    num_layers, width = 12, 320
    names = [f"w{i}" for i in range(num_layers)]

    def loss(p, x):
        layers = jnp.stack([p[name] for name in names])
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0].mean()

    params = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in names}
    temporary = [temporary_bytes(loss, params, stage) / (4 * width**2) for stage in (0, 2, 3)]
    assert temporary[0] > 2 * num_layers
    assert num_layers < temporary[1] < 1.5 * num_layers
    assert temporary[2] < 0.5 * num_layers


def test_a_loop_holds_what_it_closes_over_no_longer_than_stage_2_does():
    names = [f"w{i}" for i in range(4)]

    def loss(p, x):
        for name in names:
            x = jax.lax.scan(lambda x, _, w=p[name]: (jnp.tanh(x @ w), None), x, None, length=6)[0]
        return x.mean()

    params = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in names}
    stages = [temporary_bytes(loss, params, stage) for stage in (1, 2, 3)]
    assert stages[1] <= stages[0]
    if jax.__version_info__ >= (0, 12):  # see above: with jax 0.10 on CPUs, both gathers become one
        assert stages[2] < stages[1]
