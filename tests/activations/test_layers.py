"""Layers under `jax.checkpoint` by settings: the same loss and gradients, bit for bit, and the memory promised.

Bitwise in loops, because recomputation runs the same operations on the same values in the same order: what a segment
recomputes is what forward computed. Where there is no loop around a layer, or the loop is cut into two, the compiler
fuses across layers and sums in another order: gradients of at most 1, sums of at most 6 * 8 addends, 6 roundings of
2**-24 of each, over 5 layers: 2e-6.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, assert_trees_equal, count_primitives
from jax.ad_checkpoint import checkpoint_name

import zero2jax
from zero2jax.activations import layers
from zero2jax.activations.layers import ActivationSettings, remat_layers
from zero2jax.activations.remat import layer, remat
from zero2jax.base import jaxprs

LAYERS, WIDTH, ROWS = 5, 8, 6
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "w": 0.5 * jax.random.normal(KEYS[0], (LAYERS, WIDTH, WIDTH)),
    "b": 0.1 * jax.random.normal(KEYS[1], (LAYERS, WIDTH)),
    "embed": jax.random.normal(KEYS[2], (7, WIDTH)),
}
TOKENS = np.arange(ROWS) % 7


def block(x, p, key=None):
    y = jnp.tanh(checkpoint_name(x @ p["w"] + p["b"][None], "hidden"))
    if key is not None:
        y = jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y / 0.8, 0)
    return x + y


def around(layers):
    """A loss with a tied embedding, its layers in between."""

    def loss(params, tokens):
        stack = {name: params[name] for name in ("w", "b")}
        x = layers(params["embed"][tokens], stack)
        return jax.nn.logsumexp(x @ params["embed"].T, -1).mean()

    return loss


def over(body, **options):
    return lambda x, stack: jax.lax.scan(lambda x, p: (body(x, p), None), x, stack, **options)[0]


def scan_with_dropout(x, stack):
    keys = jax.random.split(jax.random.key(1), LAYERS)
    return jax.lax.scan(lambda x, p: (block(x, p[0], p[1]), None), x, (stack, keys))[0]


def scan_with_outputs(x, stack):
    x, sums = jax.lax.scan(lambda x, p: (block(x, p), x.sum()), x, stack)
    return x * 0.02 * sums[:, None, None].mean(0)


def in_a_chunked_loop(x, stack):
    return jax.lax.map(lambda half: over(block)(half, stack), x.reshape(2, -1, WIDTH)).reshape(x.shape)


def unrolled(body, x, stack):
    mask = jnp.linspace(0, 1, WIDTH)[None]  # shared by all blocks: no boundary activation
    call = body(lambda p, x, mask: block(x * mask, p))
    for i in range(LAYERS):
        x = call(jax.tree.map(lambda a: a[i], stack), x, mask) * 1.0  # noqa: B023
    return x


def scan_with_scalars(x, stack):
    """A Python scalar and a flag in the carry, as a sum of auxiliary losses starts."""

    def body(carry, p):
        x, total, first = carry
        x = block(x, p)
        return (x, total + jnp.where(first, 0.0, 0.01 * x.mean()), False), None

    x, total, _ = jax.lax.scan(body, (x, 0.0, True), stack)[0]
    return x * (1 + total)


MODELS = {
    "scan_with_scalars": scan_with_scalars,
    "scan": over(block),
    "reversed_scan": over(block, reverse=True),
    "scan_of_checkpoint": over(jax.checkpoint(block)),
    "jit_of_scan": jax.jit(over(jax.jit(block))),
    "scan_with_dropout": scan_with_dropout,
    "scan_with_outputs": scan_with_outputs,
    "in_a_chunked_loop": in_a_chunked_loop,
    "marked_blocks": functools.partial(unrolled, layer),
    "checkpointed_blocks": functools.partial(unrolled, jax.checkpoint),
}
IN_LOOPS = (
    "scan",
    "reversed_scan",
    "scan_of_checkpoint",
    "jit_of_scan",
    "scan_with_dropout",
    "in_a_chunked_loop",
)
ATOL = 2e-6
SETTINGS = {
    "each_layer": {},
    "dots": {"policy": "dots"},
    "names": {"policy": {"hidden": "save"}},
    "segments": {"num_checkpoints": 3},
    "nested": {"policy": "nested"},
    "partitioned": {"partition_axis": "model"},
    "everything_on": {"num_checkpoints": 2, "partition_axis": "model", "offload": True, "barrier": True},
}
CASES = [
    (model, settings)
    for model in MODELS
    for settings in SETTINGS
    if model in ("scan", "marked_blocks") or settings in ("nested", "everything_on")
]


@functools.cache
def mesh(model=3):
    return zero2jax.make_mesh(data=2, model=model)  # 48 activations over 3; 7 below do not divide


@functools.cache
def plain(model):
    return jax.jit(jax.value_and_grad(around(MODELS[model])))(PARAMS, TOKENS)


@pytest.mark.filterwarnings("ignore:activation settings. the jax.checkpoint around:UserWarning")
@pytest.mark.parametrize(("model", "settings"), CASES)
def test_loss_and_gradients_equal_the_unwrapped_models(model, settings):
    loss = remat_layers(around(MODELS[model]), ActivationSettings(**SETTINGS[settings]), mesh())
    found = jax.jit(jax.value_and_grad(loss))(PARAMS, TOKENS)
    if model in IN_LOOPS:
        assert_trees_equal(found, plain(model))
    else:
        assert_trees_close(found, plain(model), atol=ATOL)


@pytest.mark.parametrize("num_checkpoints", [1, 2, 3, 4, 5])
@pytest.mark.filterwarnings("ignore:activation settings. one jax.checkpoint:UserWarning")
def test_layers_are_cut_into_that_many_segments(num_checkpoints):
    settings = ActivationSettings(num_checkpoints=num_checkpoints)
    for model in ("scan", "marked_blocks"):
        jaxpr, _ = jaxprs.trace(remat_layers(around(MODELS[model]), settings), PARAMS, TOKENS)
        if model == "scan":
            loops = [e for e in jaxprs.equations(jaxpr) if jaxprs.is_scan(e)]
            assert sum(jaxprs.scan_parts(e).options["length"] for e in loops) == num_checkpoints
        else:
            assert count_primitives(jaxpr).total("remat2") + count_primitives(jaxpr).total("checkpoint") == (
                num_checkpoints
            )


def temp_bytes(settings, num_layers, rows=256, width=32, hidden=8):
    """Temporary bytes of the gradient of a model whose layers have `hidden` hidden units per input."""
    body = lambda x, p: x + jnp.tanh(jnp.sin(x @ p["up"])) @ p["down"]
    loss = lambda params, x: over(body)(x, params).mean()
    params = {
        "up": jnp.ones((num_layers, width, hidden * width)),
        "down": jnp.ones((num_layers, hidden * width, width)),
    }
    wrapped = loss if settings is None else remat_layers(loss, ActivationSettings(**settings))
    compiled = jax.jit(jax.grad(wrapped)).lower(params, jnp.ones((rows, width))).compile()
    return compiled.memory_analysis().temp_size_in_bytes


BOUNDARY_BYTES = 256 * 32 * 4
SMALL_BYTES = 4096  # loop counters, and what is small and per layer


def test_temporary_bytes_grow_by_the_boundary_only():
    two, four, eight = (temp_bytes({}, num_layers) for num_layers in (2, 4, 8))
    assert abs(four - two - 2 * BOUNDARY_BYTES) < SMALL_BYTES
    assert abs(eight - four - 4 * BOUNDARY_BYTES) < SMALL_BYTES
    assert eight < temp_bytes(None, 8) - 8 * 8 * BOUNDARY_BYTES  # each layer's hidden units, at least once


def test_memory_of_segments_is_that_of_boundaries_and_one_segment():
    two, four = (temp_bytes({"num_checkpoints": s}, 36) for s in (2, 4))
    assert two - four > 9 * 8 * BOUNDARY_BYTES  # 18 layers at once, against 9
    # 6 + 6 boundaries, against 36; weights are small here, and the loops hold copies of them
    each, nested = (temp_bytes(s, 36, rows=2048, hidden=1) for s in ({}, {"policy": "nested"}))
    assert each - nested > 20 * 8 * BOUNDARY_BYTES


def saved_shapes(loss):
    """Shapes that the forward loop hands to the backward loop, stacked along the layers."""
    jaxpr = jax.make_jaxpr(jax.grad(loss))(PARAMS, TOKENS)
    forward = next(e for e in jaxprs.equations(jaxpr) if jaxprs.is_scan(e))
    num_carry = jaxprs.scan_parts(forward).num_carry
    return sorted(v.aval.shape for v in forward.outvars[num_carry:])


def test_what_is_saved_follows_the_settings():
    shapes = lambda **settings: saved_shapes(
        remat_layers(around(MODELS["scan"]), ActivationSettings(**settings), mesh())
    )
    whole = (LAYERS, ROWS, WIDTH)
    assert shapes() == [whole]
    assert shapes(policy={"hidden": "save"}) == [whole, whole]
    assert shapes(partition_axis="model") == [(LAYERS, ROWS * WIDTH)]
    assert shapes(offload=True) == [whole]
    assert len(shapes(policy="everything")) >= 2


def test_partitioning_pads_what_does_not_divide():
    loss = lambda params, x: over(block)(x, params).mean()
    params = {name: PARAMS[name] for name in ("w", "b")}
    x = jnp.ones((1, WIDTH))  # 8 activations over 3
    wrapped = remat_layers(loss, ActivationSettings(partition_axis="model"), mesh())
    assert_trees_close(jax.jit(jax.grad(wrapped))(params, x), jax.jit(jax.grad(loss))(params, x), atol=ATOL)
    jaxpr = jax.make_jaxpr(jax.grad(wrapped))(params, x)
    assert (LAYERS, 9) in count_primitives(jaxpr).shapes["scan"]


def test_the_boundary_is_named_and_goes_to_pinned_host_memory():
    loss = remat_layers(around(MODELS["scan"]), ActivationSettings(offload=True, num_checkpoints=2))
    assert "<host>" in str(jax.make_jaxpr(jax.grad(loss))(PARAMS, TOKENS))


def test_a_barrier_stands_at_each_boundary_in_forward_and_backward():
    count = lambda **settings: count_primitives(
        jax.make_jaxpr(jax.grad(remat_layers(around(MODELS["scan"]), ActivationSettings(**settings))))(
            PARAMS, TOKENS
        )
    ).in_loops["optimization_barrier"]
    assert count(barrier=True) - count() == 2


def test_an_existing_checkpoint_is_replaced_and_said_once():
    model = around(MODELS["scan_of_checkpoint"])
    loss = remat_layers(model, ActivationSettings(policy="dots"))
    with pytest.warns(UserWarning, match="policy 'nothing' by 'dots'"):
        jaxpr = jax.make_jaxpr(loss)(PARAMS, TOKENS)
    jax.make_jaxpr(loss)(PARAMS, TOKENS)  # says no more: a warning would be an error
    found = count_primitives(jaxpr)
    assert found.total("checkpoint") + found.total("remat2") == 1
    kept = remat_layers(around(over(remat(block, policy="dots"))), ActivationSettings(barrier=True))
    assert saved_shapes(kept) == saved_shapes(loss)  # no policy asked for: the model's own


@pytest.mark.parametrize("layers", ["scan", "marked_blocks"])
def test_the_whole_net_in_one_checkpoint_warns(layers):
    whole = around(jax.checkpoint(MODELS[layers]))
    with pytest.warns(UserWarning, match="one jax.checkpoint around all layers at once saves nothing"):
        found = jax.jit(jax.grad(remat_layers(whole, ActivationSettings())))(PARAMS, TOKENS)
    assert_trees_close(found, plain(layers)[1], atol=ATOL)
    one = remat_layers(around(MODELS[layers]), ActivationSettings(num_checkpoints=1))
    with pytest.warns(UserWarning, match="saves nothing"):
        jax.make_jaxpr(one)(PARAMS, TOKENS)


def test_a_model_without_layers_is_left_alone_and_warns():
    loss = lambda params, tokens: (params["embed"][tokens] ** 2).mean()
    with pytest.warns(UserWarning, match="has no layers to act on.*zero2jax.layer"):
        value = remat_layers(loss, ActivationSettings(policy="dots"))(PARAMS, TOKENS)
    assert value == loss(PARAMS, TOKENS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_checkpoints": 6}, "num_checkpoints is 6 and the model has 5 layers"),
        ({"policy": {"hiden": "save"}}, "names the tensor 'hiden'.* Did you mean 'hidden'"),
        ({"policy": ["dots", {"nowhere": "offload"}]}, "names the tensor 'nowhere'.* There is: hidden"),
    ],
)
@pytest.mark.parametrize("model", ["scan", "marked_blocks"])
def test_errors_when_traced(model, settings, message):
    loss = remat_layers(around(MODELS[model]), ActivationSettings(**settings))
    with pytest.raises(ValueError, match=message):
        jax.make_jaxpr(loss)(PARAMS, TOKENS)


def test_one_buffer_for_an_unrolled_model_is_refused():
    loss = remat_layers(around(MODELS["marked_blocks"]), ActivationSettings(contiguous=True))
    with pytest.raises(ValueError, match=r"in one buffer: the model's 5 layers are unrolled.* jax.lax.scan"):
        jax.make_jaxpr(loss)(PARAMS, TOKENS)
    assert remat_layers(around(MODELS["scan"]), ActivationSettings(contiguous=True))(PARAMS, TOKENS)


def test_settings_are_checked_at_once():
    with pytest.raises(ValueError, match=r"no.* of that name. Did you mean 'nothing'"):
        ActivationSettings(policy="nothin")
    with pytest.raises(ValueError, match="num_checkpoints is 0"):
        ActivationSettings(num_checkpoints=0)
    with pytest.raises(ValueError, match=r"axis 'model': the mesh has the axes \{'data': 2\}"):
        remat_layers(
            around(MODELS["scan"]), ActivationSettings(partition_axis="model"), zero2jax.make_mesh(data=2)
        )
    with pytest.warns(UserWarning, match="over axis 'data' saves nothing: each of its shards works on other"):
        remat_layers(around(MODELS["scan"]), ActivationSettings(partition_axis="data"), mesh())


def test_offloading_without_host_memory_warns_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(layers, "has_host_memory", lambda mesh: False)
    with pytest.warns(UserWarning, match="no memory of kind 'pinned_host', so the activations stay in"):
        loss = remat_layers(around(MODELS["scan"]), ActivationSettings(offload=True))
    assert "<host>" not in str(jax.make_jaxpr(jax.grad(loss))(PARAMS, TOKENS))
    assert_trees_equal(jax.jit(jax.value_and_grad(loss))(PARAMS, TOKENS), plain("scan"))


def two_loops(params, x):
    """An encoder of five layers and a decoder of two, each with a tensor name of its own."""
    body = lambda name: lambda x, w: (jnp.tanh(checkpoint_name(x @ w, name)), None)
    x, _ = jax.lax.scan(body("encoder"), x, params["w"])
    return jax.lax.scan(body("decoder"), x, params["w"][:2])[0].mean()


def test_a_policy_may_name_tensors_of_several_loops_and_a_shorter_one_has_fewer_segments():
    x = jnp.ones((ROWS, WIDTH))
    settings = ActivationSettings(policy={"encoder": "save", "decoder": "recompute"}, num_checkpoints=4)
    segments = []
    wrapped = remat_layers(two_loops, settings, on_segment=segments.append)
    found, exact = (jax.jit(jax.value_and_grad(f))(PARAMS, x) for f in (wrapped, two_loops))
    assert_trees_close(found, exact, atol=ATOL)
    assert (
        sum(s.num_layers * s.num_runs for s in {(s.num_layers, s.num_runs): s for s in segments}.values())
        == 7
    )
    with pytest.raises(ValueError, match="num_checkpoints is 6 and the model has 5 layers"):
        jax.eval_shape(remat_layers(two_loops, ActivationSettings(num_checkpoints=6)), PARAMS, x)
    with pytest.raises(ValueError, match="names the tensor 'middle'"):
        jax.eval_shape(remat_layers(two_loops, ActivationSettings(policy={"middle": "save"})), PARAMS, x)


def test_marked_blocks_go_before_a_loop_over_chunks_of_a_parameter():
    def loss(params, tokens):
        x = unrolled(layer, params["embed"][tokens], {name: params[name] for name in ("w", "b")})
        chunks = params["embed"][:6].reshape(2, 3, WIDTH)
        most, _ = jax.lax.scan(
            lambda most, rows: (jnp.maximum(most, (x @ rows.T).max(-1)), None), jnp.zeros(ROWS), chunks
        )
        return most.mean()

    segments = []
    wrapped = remat_layers(loss, ActivationSettings(num_checkpoints=3), on_segment=segments.append)
    found, exact = (jax.jit(jax.value_and_grad(f))(PARAMS, TOKENS) for f in (wrapped, loss))
    assert_trees_close(found, exact, atol=ATOL)
    assert {s.num_layers for s in segments} == {1, 2}
    with pytest.raises(ValueError, match="5 layers are unrolled"):
        jax.eval_shape(remat_layers(loss, ActivationSettings(contiguous=True)), PARAMS, TOKENS)


def test_nested_says_that_it_replaces_the_models_own_policy():
    own = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)
    with pytest.warns(UserWarning, match="'dots' by 'nested'"):
        jax.eval_shape(remat_layers(around(over(own)), ActivationSettings(policy="nested")), PARAMS, TOKENS)


def test_any_axis_of_examples_saves_nothing():
    mesh = zero2jax.make_mesh(fsdp=2)
    with pytest.warns(UserWarning, match="over axis 'fsdp' saves nothing: each of its shards"):
        remat_layers(two_loops, ActivationSettings(partition_axis="fsdp"), mesh, data_axes=("fsdp",))


@pytest.mark.parametrize(("policy", "message"), [(3, "3 is none"), ({"a": "keep"}, "has the action 'keep'")])
def test_a_policy_that_is_none_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        ActivationSettings(policy=policy)
