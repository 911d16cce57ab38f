"""Parameters appear at their use, and gradients are those of the plain loss, whatever the loss is made of.

Each case is one compiled program that holds the plain loss and its gradient beside the ways in which parameters
appear: held (stage 2), regathered (stage 3), and held after being gathered once. Three shards, so that no
leaf divides.

Tolerances. Values and gradients are fp32 sums over at most 6 examples and 4 layers of width 5, taken in another order
over 3 devices: about log2(6 * 4 * 5) = 7 roundings of 2**-24 of addends that are at most about 10: 4e-6.
Where a case casts to fp16, a gradient of at most 0.1 is rounded to 2**-11 of itself, once per device: 2e-4.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FP32, count_primitives
from jax.sharding import PartitionSpec as P
from loss_cases import CASES, KEY, LAYERS, STACK, WIDTH, W, X, layer, over_layers

import zero2jax
from zero2jax.base import jaxprs, losses
from zero2jax.zero import gradients, point_of_use
from zero2jax.zero.gradient_settings import GradientSettings
from zero2jax.zero.layer_dims import scan_depths
from zero2jax.zero.settings import StepSettings

NUM_SHARDS = 3
ATOL, ATOL_FP16 = 4e-6, 2e-4
WITH_FP16 = ("cast_before_scan", "deferred_into_checkpoint")

pytestmark = pytest.mark.usefixtures("strict_promotion", "small_counts_as_large")


def keep_up_to(monkeypatch, size):
    """Let stage 3 keep parameters of at most `size` elements, unless a test says otherwise."""
    monkeypatch.setitem(StepSettings.__init__.__kwdefaults__, "max_kept_size", size)


@pytest.fixture
def small_counts_as_large(monkeypatch):
    """Treats the few elements of the parameters here as many, since small ones are not gathered twice."""
    keep_up_to(monkeypatch, 0)


SAVES_EVERYTHING = "ignore:a jax.checkpoint with the policy everything_saveable"  # said at stage 3
HELD_BY_A_LOOP = "ignore:stage 3 holds parameter"  # a loop that stacks the layers it picks by its index
MODES = {"held": (2, False), "regathered": (3, False), "gathered once": (2, True)}


def settings_of(loss, params, stage, gather_once, num_shards=NUM_SHARDS):
    jaxpr, _ = jaxprs.trace(loss, params, jax.ShapeDtypeStruct((6 // num_shards, WIDTH), jnp.float32))
    depths = jax.tree.unflatten(jax.tree.structure(params), scan_depths(jaxpr, len(jax.tree.leaves(params))))
    plan = zero2jax.make_shard_plan(params, num_shards, layer_dims=depths)
    trainable = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in plan.leaves)
    return GradientSettings(
        plan,
        trainable,
        StepSettings(stage=stage, gather="once" if gather_once else "use", precision=FP32),
        num_shards,
    )


def sharded_gradients(loss, params, x, settings):
    """Gradients of the mean loss over three devices, as global arrays without padding; and the loss terms."""
    plan = settings.plan
    specs = [leaf.manual_spec() for leaf, t in zip(plan.leaves, settings.trainable, strict=True) if t]
    shapes = [leaf.shape for leaf, t in zip(plan.leaves, settings.trainable, strict=True) if t]

    def pad(leaf, p):
        return jnp.zeros(leaf.rest_shape, p.dtype).at[tuple(map(slice, p.shape))].set(p)

    key = losses.SliceContext(jax.random.key_data(KEY), *jnp.zeros(2, jnp.int32))
    run = jax.shard_map(
        lambda p, x: gradients.local_gradients(losses.normalized(loss), settings, p, x, key),
        mesh=zero2jax.make_mesh(data=plan.num_shards),
        in_specs=(plan.manual_specs(), P("data")),
        out_specs=(specs, P()),
        check_vma=False,
    )
    grads, totals = run(plan.map(pad, params), x)
    cut = [jax.lax.slice(g, [0] * g.ndim, shape) for g, shape in zip(grads, shapes, strict=True)]
    return [g / plan.num_shards for g in cut], totals.mean()


@pytest.mark.filterwarnings(SAVES_EVERYTHING, HELD_BY_A_LOOP)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_plain_ones(name):
    loss, params = CASES[name]

    @jax.jit
    def everything(params, x):
        found = {
            mode: sharded_gradients(loss, params, x, settings_of(loss, params, *how))
            for mode, how in MODES.items()
        }

        def plain(params, trained):  # the mean over devices of each device's loss
            full = iter(trained)
            leaves = [
                next(full) if jnp.issubdtype(p.dtype, jnp.floating) else p for p in jax.tree.leaves(params)
            ]
            params = jax.tree.unflatten(jax.tree.structure(params), leaves)
            parts = [loss(params, part) for part in jnp.split(x, NUM_SHARDS)]
            return sum(p[0] if isinstance(p, tuple) else p for p in parts) / NUM_SHARDS

        trained = [p for p in jax.tree.leaves(params) if jnp.issubdtype(p.dtype, jnp.floating)]
        return found, jax.value_and_grad(plain, argnums=1)(params, trained)

    found, (expected_loss, expected) = everything(params, X)
    atol = ATOL_FP16 if name in WITH_FP16 else ATOL
    for mode, (grads, terms) in found.items():
        np.testing.assert_allclose(terms.loss, expected_loss, rtol=0, atol=atol, err_msg=mode)
        assert len(grads) == len(expected)
        for grad, exact in zip(grads, expected, strict=True):
            np.testing.assert_allclose(grad, exact, rtol=0, atol=atol, err_msg=mode)
    if name == "returned":
        aux = found["regathered"][1].aux
        np.testing.assert_allclose(aux["w"], W, rtol=1e-6)
        np.testing.assert_allclose(aux["stack"], STACK[0], rtol=1e-6)


# --- where parameters are gathered and gradients reduced: read from the traced program, nothing is compiled ------


def traced(name, mode):
    loss, params = CASES[name]
    stage, gather_once = MODES[mode]
    settings = settings_of(loss, params, stage, gather_once)
    jaxpr = jax.make_jaxpr(lambda p, x: sharded_gradients(loss, p, x, settings))(params, X)
    return count_primitives(jaxpr)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name", ["scan", "scan_of_checkpoint", "checkpoint_of_scan", "nested_scan", "cast_before_scan"]
)
def test_a_scanned_stack_is_gathered_and_reduced_layer_by_layer(name, mode):
    found = traced(name, mode)
    rows = 2  # 5 rows, padded to 6, over 3
    assert {shape[-2:] for shape in found.shapes["reduce_scatter"]} == {(rows, WIDTH)}
    assert {len(shape) for shape in (*found.shapes["all_gather"], *found.shapes["reduce_scatter"])} == {2}
    assert found.outside_loops["reduce_scatter"] == found.outside_loops["all_gather"] == 0
    assert found.in_loops["reduce_scatter"] == 1


def test_held_parameters_are_gathered_once_and_regathered_ones_twice_around_a_checkpoint():
    assert traced("checkpoint", "held").outside_loops["all_gather"] == 2  # w and v
    assert traced("checkpoint", "regathered").outside_loops["all_gather"] == 4
    assert traced("checkpoint", "gathered once").outside_loops["all_gather"] == 2
    assert traced("scan_of_checkpoint", "held").in_loops["all_gather"] == 1
    assert traced("scan_of_checkpoint", "regathered").in_loops["all_gather"] == 2


def test_outside_of_checkpoints_only_what_backward_reads_and_is_not_small_is_gathered_again(monkeypatch):
    assert traced("sum_and_product", "held").outside_loops["all_gather"] == 2
    assert traced("sum_and_product", "regathered").outside_loops["all_gather"] == 3  # the factor twice
    keep_up_to(monkeypatch, W.size)
    assert traced("sum_and_product", "regathered").outside_loops["all_gather"] == 2
    keep_up_to(monkeypatch, W.size - 1)
    assert traced("sum_and_product", "regathered").outside_loops["all_gather"] == 3


def test_a_mask_and_indices_are_gathered_again_where_backward_reads_them():
    mask, weights, index = 2, 2, 2  # `where` does not read the weights, the product before it does
    found = traced("mask_and_indices", "regathered").outside_loops["all_gather"]
    assert found >= mask + weights + index
    assert traced("mask_and_indices", "held").outside_loops["all_gather"] == 3


def test_a_parameter_held_in_one_scope_is_gathered_and_reduced_once():
    found = traced("tied", "held")
    assert found.outside_loops["all_gather"] == found.outside_loops["reduce_scatter"] == 1


def test_a_small_parameter_is_gathered_and_reduced_once_however_often_it_is_used(monkeypatch):
    assert traced("tied", "regathered").outside_loops["reduce_scatter"] == 3  # one for each use
    keep_up_to(monkeypatch, W.size)
    found = traced("tied", "regathered")
    assert found.outside_loops["all_gather"] == found.outside_loops["reduce_scatter"] == 1


@pytest.mark.parametrize("name", ["python_index", "python_iteration", "python_slices"])
@pytest.mark.parametrize("mode", ["held", "regathered"])
def test_layers_picked_from_a_stack_never_gather_the_whole_stack(name, mode):
    found = traced(name, mode)
    sizes = [np.prod(shape) for shape in found.shapes["all_gather"]]
    assert sizes
    assert max(sizes) < np.prod(STACK.shape)


# --- what stays until backward: the arrays that `jax.vjp` saves, nothing is compiled ------------------------------


def saved_shapes(name, *, regather):
    """Shapes of what backward reads, on each device."""
    loss, params = CASES[name]
    settings = settings_of(loss, params, 3 if regather else 2, False)
    shapes = []

    def local(shards, x):
        jaxpr, _ = jaxprs.trace(loss, params, x)

        def objective(ports):
            standins = [
                point_of_use.Standin(use, shard, port)
                for use, shard, port in zip(settings.uses, shards, ports, strict=True)
            ]
            return point_of_use.evaluate(jaxpr, [*standins, x], regather=regather)[0]

        _, pull = jax.vjp(objective, [jnp.zeros_like(shard) for shard in shards])
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(pull))

    plan = settings.plan
    shards = [jax.ShapeDtypeStruct(leaf.rest_shape, jnp.float32) for leaf in plan.leaves]
    mesh = zero2jax.make_mesh(data=NUM_SHARDS)
    specs = [leaf.manual_spec() for leaf in plan.leaves]
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=None, check_vma=False)
    jax.eval_shape(run, shards, X)
    return shapes


@pytest.mark.parametrize(
    "name",
    ["cond", "custom_vjp", "custom_jvp_product", "scan_const", "rounded_weights", "stack_made_in_the_loss"],
)
def test_with_regather_no_full_parameter_stays_until_backward(name):
    full = lambda shapes: [shape for shape in shapes if shape[-2:] == (WIDTH, WIDTH)]
    assert full(saved_shapes(name, regather=False))
    assert not full(saved_shapes(name, regather=True))


@pytest.mark.parametrize(("name", "path"), [("loop_that_transposes", "w"), ("fori_loop", "stack")])
def test_a_parameter_that_stays_is_named_with_the_way_out(name, path):
    with pytest.warns(UserWarning, match=f"holds parameter '{path}' until backward.*jax.checkpoint around"):
        assert (WIDTH, WIDTH) in {shape[-2:] for shape in saved_shapes(name, regather=True)}


@pytest.mark.parametrize("name", ["cond", "custom_vjp", "scan_const"])
def test_what_runs_a_body_is_gathered_twice_and_run_once(name):
    held, regathered = traced(name, "held"), traced(name, "regathered")
    of_w = lambda found: sum(len(shape) == 2 for shape in found.shapes["all_gather"])
    assert of_w(regathered) > of_w(held)
    assert regathered.total("tanh") == held.total("tanh")


def test_a_stack_made_in_the_loss_is_gathered_and_reduced_layer_by_layer():
    for mode in ("held", "regathered"):
        found = traced("stack_made_in_the_loss", mode)
        assert found.outside_loops["all_gather"] == found.outside_loops["reduce_scatter"] == 0, mode


@pytest.mark.filterwarnings(SAVES_EVERYTHING)
@pytest.mark.parametrize("name", ["dots_saveable", "everything_saveable", "scan_of_checkpoint_saving_dots"])
def test_a_policy_that_saves_matrix_products_still_does(name):
    """Two products forward, and two per product backward; recomputed ones would come on top."""
    loss, params = CASES[name]
    plain = count_primitives(jax.make_jaxpr(jax.grad(lambda p, x: loss(p, x)))(params, X))
    for mode in MODES:
        assert traced(name, mode).total("dot_general") == plain.total("dot_general"), mode


def test_a_stack_sharded_on_the_scanned_dim_is_gathered_whole_with_a_warning():
    loss, params = CASES["scan"]
    plan = zero2jax.make_shard_plan(params, 2)  # layer_dims unknown: 4 layers divide by 2, and 5 does not
    assert plan.leaves[0].dim == 0
    settings = GradientSettings(plan, (True,), StepSettings(gather="use", precision=FP32), NUM_SHARDS)
    with pytest.warns(UserWarning, match="'stack' is scanned over, and its shards do not hold whole layers"):
        grads, _ = sharded_gradients(loss, params, X, settings)
    exact = jax.grad(loss)(params, X)["stack"]
    np.testing.assert_allclose(grads[0], exact, rtol=0, atol=ATOL)


def test_callbacks_run_once_per_device_and_layer_and_see_whole_parameters():
    seen = []

    def loss(p, x):
        jax.debug.callback(lambda w: seen.append(np.asarray(w)), p["w"])
        body = lambda x, w: (jax.debug.callback(lambda w: seen.append(np.asarray(w)), w), layer(x, w))[1]
        return over_layers(x, p["stack"], body).mean()

    params = {"w": W, "stack": STACK}
    for how in ((2, False), (3, False)):
        seen.clear()
        settings = settings_of(loss, params, *how)
        seen.clear()
        jax.block_until_ready(jax.jit(lambda p, x, s=settings: sharded_gradients(loss, p, x, s))(params, X))
        jax.effects_barrier()
        assert len(seen) == NUM_SHARDS * (1 + LAYERS)
        for value in (W, *STACK):
            assert sum(np.array_equal(value, s) for s in seen) == NUM_SHARDS


def test_names_and_metadata_of_the_loss_reach_the_lowered_step():
    from jax.experimental.xla_metadata import set_xla_metadata

    def loss(p, x):
        with jax.named_scope("my_scope"):
            x = jax.checkpoint(layer)(x, p["w"])
        with set_xla_metadata(my_attribute="yes"):
            return jnp.sin(x @ p["w"]).mean()

    for how in ((2, False), (3, False)):
        settings = settings_of(loss, {"w": W}, *how)
        lowered = jax.jit(lambda p, x, s=settings: sharded_gradients(loss, p, x, s)).lower({"w": W}, X)
        text = lowered.as_text(debug_info=True)
        assert "my_scope" in text
        assert 'my_attribute = "yes"' in text


@pytest.mark.parametrize("mode", ["held", "regathered"])
def test_gradients_are_reduced_in_the_dtype_of_the_port(mode):
    loss, params = CASES["scan_over_several"]
    stage, once = MODES[mode]
    for reduce_dtype, expected in ((None, jnp.bfloat16), (jnp.float32, jnp.float32)):
        settings = settings_of(loss, params, stage, once)
        precision = zero2jax.Precision(reduce_dtype=reduce_dtype)
        step = StepSettings(stage=stage, gather="once" if once else "use", precision=precision)
        settings = dataclasses.replace(settings, step=step)
        batch = jnp.asarray(X, jnp.bfloat16)
        found = count_primitives(
            jax.make_jaxpr(lambda p, x, s=settings: sharded_gradients(loss, p, x, s))(params, batch)
        )
        assert set(found.dtypes["reduce_scatter"]) == {jnp.dtype(expected)}
        assert set(found.dtypes["all_gather"]) == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("mode", ["held", "regathered"])
def test_a_leaf_that_is_kept_in_fp32_is_reduced_in_fp32(mode):
    loss, params = CASES["scan_over_several"]
    settings = settings_of(loss, params, *MODES[mode])
    precision = zero2jax.Precision(keep_fp32=lambda path, leaf: path == "bias")
    step = StepSettings(stage=settings.step.stage, gather="use", precision=precision)
    settings = dataclasses.replace(settings, step=step)

    def mixed(p, x):
        return loss({"stack": p["stack"].astype(jnp.float32), "bias": p["bias"]}, x)

    found = count_primitives(jax.make_jaxpr(lambda p, x: sharded_gradients(mixed, p, x, settings))(params, X))
    reduced = zip(found.shapes["reduce_scatter"], found.dtypes["reduce_scatter"], strict=True)
    assert set(reduced) == {((2, WIDTH), jnp.dtype(jnp.bfloat16)), ((1, 2), jnp.dtype(jnp.float32))}


@pytest.mark.parametrize("name", ["cond", "custom_vjp", "scan_const"])
def test_what_is_gathered_again_leaks_no_tracer(name):
    """On jax 0.12, which keeps the backward pass of a custom derivative in the program."""
    loss, params = CASES[name]
    settings = settings_of(loss, params, 3, False)
    with jax.checking_leaks():
        jax.make_jaxpr(lambda p, x: sharded_gradients(loss, p, x, settings))(params, X)


def test_a_loop_in_a_checkpoint_does_not_stack_what_it_gathers():
    found = traced("checkpoint_of_scan", "regathered")
    assert found.in_loops["all_gather"] == 3  # forward; in backward forward once more, and backward
    assert (LAYERS, WIDTH, WIDTH) not in found.shapes["scan"]
    assert (LAYERS, WIDTH, WIDTH) in traced("scan", "held").shapes["scan"]
