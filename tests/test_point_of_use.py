"""Parameters appear at their use, and gradients are those of the plain loss, whatever the loss is made of.

Each case is one compiled program that holds the plain loss and its gradient beside the ways in which parameters
appear: held (stage 2), regathered (stage 3), and held after being gathered once. Three shards, so that no
leaf divides.

Tolerances. Values and gradients are fp32 sums over at most 6 examples and 4 layers of width 5, taken in another order
over 3 devices: about log2(6 * 4 * 5) = 7 roundings of 2**-24 of addends that are at most about 10: 4e-6.
Where a case casts to fp16, a gradient of at most 0.1 is rounded to 2**-11 of itself, once per device: 2e-4.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FP32, count_primitives
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

import zero2jax
from zero2jax import gradients, jaxprs, losses, point_of_use
from zero2jax.gradients import GradientSettings
from zero2jax.point_of_use import scan_depths

NUM_SHARDS, WIDTH, LAYERS = 3, 5, 4
ATOL, ATOL_FP16 = 4e-6, 2e-4
WITH_FP16 = ("cast_before_scan", "deferred_into_checkpoint")

pytestmark = pytest.mark.usefixtures("strict_promotion", "small_counts_as_large")


@pytest.fixture
def small_counts_as_large(monkeypatch):
    """Treats the few elements of the parameters here as many, since small ones are not gathered twice."""
    monkeypatch.setattr(point_of_use, "_SMALL", 0)


POLICIES = jax.checkpoint_policies
SAVES_EVERYTHING = "ignore:a jax.checkpoint with the policy everything_saveable"  # said at stage 3
KEY = jax.random.key(0)
W = 0.5 * jax.random.normal(KEY, (WIDTH, WIDTH))
V = 0.5 * jax.random.normal(jax.random.key(1), (WIDTH, WIDTH))
STACK = 0.5 * jax.random.normal(jax.random.key(2), (LAYERS, WIDTH, WIDTH))
BIAS = 0.1 * jax.random.normal(jax.random.key(3), (LAYERS, WIDTH))
X = np.random.default_rng(0).normal(size=(6, WIDTH)).astype(np.float32)
CONSTANT = np.linspace(-1, 1, WIDTH, dtype=np.float32)[None]


def layer(x, w):
    return jnp.tanh(x @ w)


def over_layers(x, stack, body=layer, **options):
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, stack, **options)[0]


# --- the cases: (parameters, loss) ------------------------------------------------------------------------------


def call_jit(p, x):
    inner = jax.jit(lambda x, w: (layer(x, w), w))  # the parameter goes in and comes out again
    x, w = jax.jit(inner)(x, p["w"])
    return layer(x, w).mean()


def checkpoint(p, x, policy=None):
    def block(x, w, v):
        return layer(checkpoint_name(layer(x, w), "hidden"), v)

    return jax.checkpoint(block, policy=policy)(x, p["w"], p["v"]).mean()


def nested_checkpoint(p, x):
    inner = jax.checkpoint(layer)
    outer = jax.checkpoint(lambda x, w: layer(inner(x, w), w), policy=POLICIES.dots_saveable)
    return outer(x, p["w"]).mean()


def used_before_inside_and_after_a_checkpoint(p, x):
    x = layer(x, p["w"])
    x = jax.checkpoint(layer)(x, p["w"])
    return layer(x, p["w"]).mean()


def scan(p, x, **options):
    return over_layers(x, p["stack"], **options).mean()


def scan_of_checkpoint(p, x, policy=None):
    return over_layers(x, p["stack"], jax.checkpoint(layer, policy=policy)).mean()


def checkpoint_of_scan(p, x):
    return jax.checkpoint(over_layers)(x, p["stack"]).mean()


def scan_with_a_parameter_as_constant(p, x):
    return over_layers(x, p["stack"], lambda x, w: layer(layer(x, w), p["w"])).mean()


def scan_with_a_parameter_as_carry(p, x):
    step = lambda carry, w: ((layer(carry[0], w), carry[1] * 0.5 + w), None)
    (x, w), _ = jax.lax.scan(step, (x, p["w"]), p["stack"])
    return (x @ w).mean()


def scan_with_outputs(p, x):
    _, ys = jax.lax.scan(lambda x, w: (layer(x, w), (x.sum(), w)), x, p["stack"])
    return (ys[0][:, None, None] * ys[1]).mean()


def scanned_and_used_whole(p, x):
    return over_layers(x, p["stack"]).mean() + 0.1 * (p["stack"] ** 2).sum()


def cast_before_scan(p, x):
    stack = p["stack"].astype(jnp.float16).astype(jnp.float32)
    return over_layers(x, stack, jax.checkpoint(layer)).mean()


def nested_scan_over_reshaped_stack(p, x):
    groups = p["stack"].reshape(2, LAYERS // 2, WIDTH, WIDTH)
    return over_layers(x, groups, jax.checkpoint(over_layers)).mean()


def scan_over_several(p, x):
    def block(x, layer_params):
        return x + jnp.tanh(x @ layer_params["w"] + layer_params["b"][None])

    return over_layers(x, {"w": p["stack"], "b": p["bias"]}, block).mean()


def map_and_vmap(p, x):
    mapped = jax.lax.map(lambda w: layer(x, w), p["stack"]).mean()
    return mapped + jax.vmap(layer, in_axes=(None, 0))(x, p["stack"]).mean()


def fori_loop_that_picks_layers(p, x):
    pick = lambda i: jax.lax.dynamic_index_in_dim(p["stack"], i, keepdims=False)
    return jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, pick(i)), x).mean()


def python_index(p, x):
    for i in range(-1, LAYERS - 1):
        x = layer(x, p["stack"][i])
    return x.mean()


def python_iteration(p, x):
    for w in p["stack"]:
        x = jax.checkpoint(layer)(x, w)
    return x.mean()


def python_slices(p, x):
    first, last = p["stack"][:3], p["stack"][::3]
    return over_layers(over_layers(x, first), last).mean()


def index_from_the_batch(p, x):
    i = (x.sum() > 0).astype(jnp.int32)  # another one on each device
    w = jax.lax.dynamic_index_in_dim(p["stack"], i, keepdims=False)
    return layer(layer(x, w), p["stack"][i + 1]).mean()


def indexed_and_used_whole(p, x):
    return layer(x, p["stack"][1]).mean() + (p["stack"] ** 2).mean() + layer(x, p["stack"][2]).mean()


def slices_of_a_matrix(p, x):
    return layer(x[:, :3], p["w"][:3]).mean() + (x @ p["w"][:, 1:4]).mean() + p["w"][2, 3]


def cond(p, x):
    branch = lambda w, x: layer(x, w)
    other = lambda w, x: (x @ w @ w) * 0.5
    x = jax.lax.cond(x.sum() > 0, branch, other, p["w"], x)
    return jax.lax.switch(2, [branch, other, lambda w, x: x + w[:1]], p["v"], x).mean()


def while_loop(p, x):
    def body(state):
        i, x = state
        return i + 1, layer(x, p["w"])

    _, scale = jax.lax.while_loop(lambda s: s[0] < 3, body, (jnp.int32(0), jax.lax.stop_gradient(x)))
    return (layer(x, p["w"]) * jax.lax.stop_gradient(scale)).mean()


@jax.custom_vjp
def doubled_gradient(x, w):
    return x @ w


doubled_gradient.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda saved, g: (2 * g @ saved[1].T, 2 * saved[0].T @ g)
)


def custom_vjp(p, x):
    return jnp.tanh(doubled_gradient(layer(x, p["v"]), p["w"])).mean()


@jax.custom_jvp
def tripled_tangent(x, w):
    return x @ w


@tripled_tangent.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return x @ w, 3 * (dx @ w + x @ dw)


def custom_jvp(p, x):
    squashed = jax.nn.relu(p["v"]) + jax.nn.logsumexp(
        p["v"]
    )  # functions of a parameter alone, with own rules
    return (tripled_tangent(x, p["w"]) @ squashed).mean()


def gradient_inside(p, x):
    slope = jax.grad(lambda x: layer(x, p["w"]).sum())(x)
    return (slope**2).mean() + layer(x, p["w"]).mean()


def tied(p, x):
    hidden = layer(x, p["w"])
    rows = p["w"][jnp.array([0, 2, 2, 4])]
    return (hidden @ p["w"].T).mean() + (hidden @ rows.T).mean()


def parameter_with_itself(p, x):
    return (x @ (p["w"] @ p["w"] + p["w"].T * p["v"])).mean()


def transposed_and_cast_into_a_checkpoint(p, x):
    block = lambda x, w: jnp.tanh(x @ w.astype(jnp.float16).astype(jnp.float32))
    wide = jax.checkpoint(block)(x, p["w"].T)
    tall = jax.checkpoint(block)(x, jnp.expand_dims(p["v"].T, 0)[0])
    return (wide * tall).mean()


def reshaped(p, x):
    flat = p["stack"].reshape(-1)
    heads = p["w"].reshape(1, WIDTH, WIDTH).transpose(1, 0, 2)
    return (flat[: 2 * WIDTH].reshape(2, WIDTH) * x).mean() + jnp.einsum("bi,ihj->bhj", x, heads).mean()


def constants(p, x):
    return (layer(x, p["w"]) * CONSTANT + jnp.asarray(X)[:1]).mean()


def contexts(p, x):
    with jax.named_scope("named"):
        return jax.jit(layer, inline=False)(x, p["w"]).mean()


def effects(p, x):
    jax.debug.callback(lambda w: None, p["w"])
    body = lambda x, w: (jax.debug.callback(lambda w: None, w), layer(x, w))[1]
    return over_layers(x, p["stack"], jax.checkpoint(body)).mean()


def returned(p, x):
    return layer(x, p["w"]).mean(), {"w": p["w"], "stack": p["stack"][0]}


def odd_leaves(p, x):
    picked = jnp.take(x, p["table"], axis=1)
    return p["scale"] * layer(picked, p["w"]).mean() + p["empty"].sum() + (p["one"] * p["small"][None]).sum()


MATRICES = {"w": W, "v": V}
CASES = {
    "jit": (call_jit, {"w": W}),
    "checkpoint": (checkpoint, MATRICES),
    "dots_saveable": (functools.partial(checkpoint, policy=POLICIES.dots_saveable), MATRICES),
    "everything_saveable": (functools.partial(checkpoint, policy=POLICIES.everything_saveable), MATRICES),
    "save_names": (
        functools.partial(checkpoint, policy=POLICIES.save_only_these_names("hidden")),
        MATRICES,
    ),
    "nested_checkpoint": (nested_checkpoint, {"w": W}),
    "around_checkpoint": (used_before_inside_and_after_a_checkpoint, {"w": W}),
    "scan": (scan, {"stack": STACK}),
    "scan_reverse_unrolled": (functools.partial(scan, reverse=True, unroll=2), {"stack": STACK}),
    "scan_of_checkpoint": (scan_of_checkpoint, {"stack": STACK}),
    "scan_of_checkpoint_saving_dots": (
        functools.partial(scan_of_checkpoint, policy=POLICIES.dots_saveable),
        {"stack": STACK},
    ),
    "checkpoint_of_scan": (checkpoint_of_scan, {"stack": STACK}),
    "scan_const": (scan_with_a_parameter_as_constant, {"stack": STACK, "w": W}),
    "scan_carry": (scan_with_a_parameter_as_carry, {"stack": STACK, "w": W}),
    "scan_outputs": (scan_with_outputs, {"stack": STACK}),
    "scan_over_several": (scan_over_several, {"stack": STACK, "bias": BIAS}),
    "scanned_and_whole": (scanned_and_used_whole, {"stack": STACK}),
    "cast_before_scan": (cast_before_scan, {"stack": STACK}),
    "nested_scan": (nested_scan_over_reshaped_stack, {"stack": STACK}),
    "map_and_vmap": (map_and_vmap, {"stack": STACK}),
    "fori_loop": (fori_loop_that_picks_layers, {"stack": STACK}),
    "python_index": (python_index, {"stack": STACK}),
    "python_iteration": (python_iteration, {"stack": STACK}),
    "python_slices": (python_slices, {"stack": STACK}),
    "index_from_the_batch": (index_from_the_batch, {"stack": STACK}),
    "indexed_and_whole": (indexed_and_used_whole, {"stack": STACK}),
    "slices_of_a_matrix": (slices_of_a_matrix, {"w": W}),
    "cond": (cond, MATRICES),
    "while": (while_loop, {"w": W}),
    "custom_vjp": (custom_vjp, MATRICES),
    "custom_jvp": (custom_jvp, MATRICES),
    "gradient_inside": (gradient_inside, {"w": W}),
    "sum_and_product": (lambda p, x: jnp.mean(jnp.tanh(x + p["b"][None]) @ p["w"]), {"b": BIAS[0], "w": W}),
    "mask_and_indices": (
        lambda p, x: jnp.mean(jnp.where(p["mask"], (x @ p["w"]).sum(), p["w"])[p["index"]] ** 2),
        {"w": W, "mask": jnp.asarray(W > 0), "index": jnp.array([3, 0, 1, 4, 2])},
    ),
    "tied": (tied, {"w": W}),
    "parameter_with_itself": (parameter_with_itself, MATRICES),
    "deferred_into_checkpoint": (transposed_and_cast_into_a_checkpoint, MATRICES),
    "reshaped": (reshaped, {"stack": STACK, "w": W}),
    "constants": (constants, {"w": W}),
    "contexts": (contexts, {"w": W}),
    "effects": (effects, {"w": W, "stack": STACK}),
    "returned": (returned, {"w": W, "stack": STACK}),
    "odd_leaves": (
        odd_leaves,
        {
            "w": W,
            "scale": jnp.float32(0.3),
            "empty": jnp.zeros((0, 4)),
            "one": jnp.ones((1, 1)),
            "small": jnp.ones((2,)),
            "unused": jnp.ones((3, 4)),
            "table": jnp.array([3, 0, 1, 4, 2]),
        },
    ),
}
MODES = {"held": (2, False), "regathered": (3, False), "gathered once": (2, True)}


def settings_of(loss, params, stage, gather_once, num_shards=NUM_SHARDS):
    jaxpr, _ = jaxprs.trace(loss, params, jax.ShapeDtypeStruct((6 // num_shards, WIDTH), jnp.float32))
    depths = jax.tree.unflatten(jax.tree.structure(params), scan_depths(jaxpr, len(jax.tree.leaves(params))))
    plan = zero2jax.make_shard_plan(params, num_shards, layer_dims=depths)
    trainable = tuple(bool(jnp.issubdtype(leaf.dtype, jnp.floating)) for leaf in plan.leaves)
    return GradientSettings(plan, trainable, stage, 1, gather_once, FP32)


def sharded_gradients(loss, params, x, settings):
    """Gradients of the mean loss over three devices, as global arrays without padding; and the loss terms."""
    plan = settings.plan
    specs = [leaf.manual_spec() for leaf, t in zip(plan.leaves, settings.trainable, strict=True) if t]
    shapes = [leaf.shape for leaf, t in zip(plan.leaves, settings.trainable, strict=True) if t]

    def pad(leaf, p):
        return jnp.zeros(leaf.rest_shape, p.dtype).at[tuple(map(slice, p.shape))].set(p)

    key = losses.SliceKey(jax.random.key_data(KEY), *jnp.zeros(2, jnp.int32))
    run = jax.shard_map(
        lambda p, x: gradients.local_gradients(losses.normalized(loss), settings, p, x, key),
        mesh=zero2jax.make_mesh(data=plan.num_shards),
        in_specs=(plan.manual_specs(), P("data")),
        out_specs=(specs, P()),
        check_vma=False,
    )
    grads, totals = run(plan.map(pad, params), x)
    cut = [jax.lax.slice(g, [0] * g.ndim, shape) for g, shape in zip(grads, shapes, strict=True)]
    return [g / plan.num_shards for g in cut], losses.mean(totals)


@pytest.mark.filterwarnings(SAVES_EVERYTHING)
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
    assert {shape[-2:] for shape in found.shapes["reduce_scatter"]} == {
        (2, WIDTH)
    }  # 5 rows, padded to 6, over 3
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
    monkeypatch.setattr(point_of_use, "_SMALL", W.size)
    assert traced("sum_and_product", "regathered").outside_loops["all_gather"] == 2
    monkeypatch.setattr(point_of_use, "_SMALL", W.size - 1)
    assert traced("sum_and_product", "regathered").outside_loops["all_gather"] == 3


def test_a_mask_and_indices_are_gathered_again_where_backward_reads_them():
    mask, weights, index = 2, 2, 2  # `where` does not read the weights, the product before it does
    found = traced("mask_and_indices", "regathered").outside_loops["all_gather"]
    assert found >= mask + weights + index
    assert traced("mask_and_indices", "held").outside_loops["all_gather"] == 3


def test_a_parameter_held_in_one_scope_is_gathered_and_reduced_once():
    found = traced("tied", "held")
    assert found.outside_loops["all_gather"] == found.outside_loops["reduce_scatter"] == 1


@pytest.mark.parametrize("name", ["python_index", "python_iteration", "python_slices"])
@pytest.mark.parametrize("mode", ["held", "regathered"])
def test_layers_picked_from_a_stack_never_gather_the_whole_stack(name, mode):
    found = traced(name, mode)
    sizes = [np.prod(shape) for shape in found.shapes["all_gather"]]
    assert sizes
    assert max(sizes) < np.prod(STACK.shape)


@pytest.mark.filterwarnings(SAVES_EVERYTHING)
@pytest.mark.parametrize("name", ["dots_saveable", "everything_saveable", "scan_of_checkpoint_saving_dots"])
def test_a_policy_that_saves_matrix_products_still_does(name):
    """Two products forward, and two per product backward; recomputed ones would come on top."""
    loss, params = CASES[name]
    plain = count_primitives(jax.make_jaxpr(jax.grad(lambda p, x: loss(p, x)))(params, X))
    for mode in MODES:
        assert traced(name, mode).total("dot_general") == plain.total("dot_general"), mode


def test_scan_depths_reads_loops_picks_and_reshapes():
    def depth(name):
        loss, params = CASES[name]
        jaxpr, _ = jaxprs.trace(loss, params, X)
        return dict(zip(sorted(params), scan_depths(jaxpr, len(params)), strict=True))

    assert depth("scan") == {"stack": 1}
    assert depth("checkpoint_of_scan") == {"stack": 1}
    assert depth("nested_scan") == {"stack": 1}
    assert depth("scan_const") == {"stack": 1, "w": 0}
    assert depth("scan_over_several") == {"stack": 1, "bias": 1}
    assert depth("cast_before_scan") == {"stack": 1}
    assert depth("python_index") == depth("python_iteration") == {"stack": 1}
    assert depth("scanned_and_whole") == {"stack": 1}
    assert depth("checkpoint") == {"w": 0, "v": 0}


def test_nested_scans_take_two_dims_off():
    loss = lambda p, x: over_layers(x, p["w"], over_layers).mean()
    jaxpr, _ = jaxprs.trace(loss, {"w": jnp.zeros((2, 3, WIDTH, WIDTH))}, X)
    assert scan_depths(jaxpr, 1) == [2]


def test_a_stack_sharded_on_the_scanned_dim_is_gathered_whole_with_a_warning():
    loss, params = CASES["scan"]
    plan = zero2jax.make_shard_plan(params, 2)  # layer_dims unknown: 4 layers divide by 2, and 5 does not
    assert plan.leaves[0].dim == 0
    settings = GradientSettings(plan, (True,), 2, 1, False, FP32)
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
        settings = GradientSettings(settings.plan, settings.trainable, stage, 1, once, precision)
        batch = jnp.asarray(X, jnp.bfloat16)
        found = count_primitives(
            jax.make_jaxpr(lambda p, x, s=settings: sharded_gradients(loss, p, x, s))(params, batch)
        )
        assert set(found.dtypes["reduce_scatter"]) == {jnp.dtype(expected)}
        assert set(found.dtypes["all_gather"]) == {jnp.dtype(jnp.bfloat16)}
