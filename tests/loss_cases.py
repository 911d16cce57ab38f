"""Loss functions of many kinds, each with its parameters: what a model may do with a parameter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

WIDTH, LAYERS = 5, 4

POLICIES = jax.checkpoint_policies
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


@jax.custom_vjp
def rounded(w):
    return jnp.round(8 * w) / 8


rounded.defvjp(lambda w: (rounded(w), None), lambda saved, g: (g,))


def rounded_weights(p, x):
    return layer(layer(x, rounded(p["w"])), rounded(p["v"])).mean()


def checkpoint_in_cond(p, x):
    return jax.lax.cond(x.sum() > 0, jax.checkpoint(layer), lambda x, w: x @ w, x, p["w"]).mean()


def loop_that_transposes(p, x):
    return over_layers(x, jnp.zeros(LAYERS), lambda x, _: layer(x, p["w"].T)).mean()


def stack_made_in_the_loss(p, x):
    x = over_layers(x, jnp.stack([p["w"], p["v"], p["w"]]))
    return over_layers(x, jnp.concatenate([p["stack"][:1], p["stack"][2:]])).mean()


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
    "custom_jvp_product": (lambda p, x: jnp.tanh(tripled_tangent(layer(x, p["v"]), p["w"])).mean(), MATRICES),
    "rounded_weights": (rounded_weights, MATRICES),
    "checkpoint_in_cond": (checkpoint_in_cond, {"w": W}),
    "loop_that_transposes": (loop_that_transposes, {"w": W}),
    "stack_made_in_the_loss": (stack_made_in_the_loss, {**MATRICES, "stack": STACK}),
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
