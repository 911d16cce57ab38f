"""What this package knows of the insides of a jaxpr, on the jax version at hand.

If a new jax turns these red: `scan_parts` reads where the operands of a scan lie, `bind_with` how a primitive takes
its sub-functions, `checkpoint_options` the parameters of `jax.checkpoint`, `CALL_PRIMITIVES` how calls are named.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal
from jax.experimental.xla_metadata import set_xla_metadata
from loss_cases import CASES, X

from zero2jax.base import jaxprs

pytestmark = pytest.mark.usefixtures("strict_promotion")


def equation(fun, *args, name=None):
    """The only equation of a function, or the first of that name."""
    jaxpr, _ = jaxprs.trace(fun, *args)
    found = [e for e in jaxprs.equations(jaxpr) if name in (None, e.primitive.name)]
    assert name or len(found) == 1
    return found[0]


def evaluated_again(loss, params, x):
    """`loss` as a function that evaluates its jaxpr."""
    jaxpr, out = jaxprs.trace(loss, params, x)

    def again(params, x):
        flat = jaxprs.evaluate(jaxpr, jax.tree.leaves((params, x)), jaxprs.bind)
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    return again


@pytest.mark.parametrize("name", CASES)
def test_evaluating_a_jaxpr_traces_to_the_same_equations(name):
    loss, params = CASES[name]
    x = X[:2]
    names = lambda fun: [e.primitive.name for e in jaxprs.equations(jax.make_jaxpr(fun)(params, x))]
    assert names(evaluated_again(loss, params, x)) == names(loss)


@pytest.mark.parametrize("name", ["scan_outputs", "custom_vjp", "custom_jvp", "cond", "while", "effects"])
def test_what_has_rules_or_bodies_of_its_own_has_the_same_gradients_when_evaluated(name):
    loss, params = CASES[name]
    x = X[:2]
    again = evaluated_again(loss, params, x)
    grad = lambda fun: jax.grad(lambda p: jax.tree.leaves(fun(p, x))[0], allow_int=True)
    plain, found = jax.jit(lambda p: (grad(loss)(p), grad(again)(p)))(params)
    assert_trees_equal(found, plain)


def test_evaluate_passes_constants_literals_and_unused_inputs():
    table = jnp.arange(4.0)
    jaxpr, _ = jaxprs.trace(lambda x, unused: (x * table[1:3] + 2.0, 7, x), jnp.ones(2), jnp.ones(3))
    seen = []

    def apply(eqn, operands):
        seen.append(eqn.primitive.name)
        return jaxprs.bind(eqn, operands)

    out = jaxprs.evaluate(jaxpr, [jnp.ones(2), jnp.ones(3)], apply)
    np.testing.assert_array_equal(out[0], [3.0, 4.0])
    assert out[1] == 7
    assert "mul" in seen


def test_trace_returns_the_tree_of_output_shapes():
    _, out = jaxprs.trace(lambda x: {"a": (x.sum(), None), "b": x > 0}, jnp.ones(3))
    assert jax.tree.map(lambda s: (s.shape, s.dtype), out) == {
        "a": (((), jnp.float32), None),
        "b": ((3,), jnp.bool_),
    }


@pytest.mark.parametrize("closed", [True, False])
def test_equations_and_inputs_of_open_and_closed_jaxprs(closed):
    jaxpr, _ = jaxprs.trace(lambda x, y: jnp.sin(x), 1.0, 2.0)
    jaxpr = jaxpr if closed else getattr(jaxpr, "jaxpr", jaxpr)
    assert [e.primitive.name for e in jaxprs.equations(jaxpr)] == ["sin"]
    assert len(jaxprs.inputs(jaxpr)) == 2


def test_calls_checkpoints_and_scans_are_told_apart():
    call = equation(jax.jit(lambda x: x + 1), 1.0)
    remat = equation(jax.checkpoint(lambda x: jnp.sin(x)), 1.0)
    scan = equation(lambda x: jax.lax.scan(lambda c, y: (c + y, c), x, jnp.ones(3)), 1.0, name="scan")
    kinds = lambda e: (jaxprs.is_call(e), jaxprs.is_checkpoint(e), jaxprs.is_scan(e))
    assert kinds(call) == (True, False, False)
    assert kinds(remat) == (False, True, False)
    assert kinds(scan) == (False, False, True)
    assert [e.primitive.name for e in jaxprs.equations(jaxprs.body(call))] == ["add"]
    assert [e.primitive.name for e in jaxprs.equations(jaxprs.body(remat))] == ["sin"]


@pytest.mark.parametrize("reverse", [False, True])
def test_scan_parts_counts_operands_in_order(reverse):
    def fun(a, b, c, xs, ys):
        step = lambda carry, x: ((carry[0] * a + x[0], carry[1] * 2), x[1] * b)
        return jax.lax.scan(step, (c, c + 1), (xs, ys), reverse=reverse, unroll=2)

    eqn = equation(fun, 1.0, 2.0, 3.0, jnp.ones(4), jnp.ones((4, 2)), name="scan")
    parts = jaxprs.scan_parts(eqn)
    assert (parts.num_consts, parts.num_carry) == (2, 2)
    assert len(eqn.invars) == 2 + 2 + 2
    assert eqn.invars[-1].aval.shape == (4, 2)
    assert parts.options == {"length": 4, "reverse": reverse, "unroll": 2}
    assert len(jaxprs.inputs(parts.body)) == 6


def test_a_rebuilt_scan_is_the_scan_it_was_made_from():
    def fun(a, c, xs):
        step = lambda carry, x: (carry * a + x["w"], x["w"] - carry)
        return jax.lax.scan(step, c, xs, reverse=True)

    a, c, xs = jnp.float32(2), jnp.float32(3), {"w": jnp.arange(4.0)}
    eqn = equation(fun, a, c, xs, name="scan")
    parts = jaxprs.scan_parts(eqn)

    def step(a, c, slices):  # the scanned-over operand is a pytree here
        return jaxprs.evaluate(parts.body, [a, c, slices["only"]], jaxprs.bind)

    operands = [a, c, {"only": xs["w"]}]
    again = jaxprs.rebuild_scan(step, parts.num_consts, parts.num_carry, operands, parts.options)
    assert_trees_equal(again, list(fun(a, c, xs)))


def test_checkpoint_options_rebuild_the_same_checkpoint():
    policy = jax.checkpoint_policies.dots_saveable
    eqn = equation(jax.checkpoint(lambda x: jnp.sin(x), policy=policy, prevent_cse=False), 1.0)
    assert jaxprs.checkpoint_options(eqn) == {"policy": policy, "prevent_cse": False}
    eqn = equation(jax.checkpoint(lambda x: jnp.sin(x)), 1.0)
    assert jaxprs.checkpoint_options(eqn) == {"policy": None, "prevent_cse": True}


@jax.custom_jvp
def with_own_rule(x):
    return jnp.sin(x)


with_own_rule.defjvp(lambda x, dx: (with_own_rule(*x), jnp.cos(*x) * dx[0]))

BODIES = {
    "cond": lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x),
    "while": lambda x: jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, x),
    "custom_jvp_call": with_own_rule,
    "debug_callback": lambda x: (jax.debug.callback(lambda y: None, x), x)[1],
}


@pytest.mark.parametrize("name", BODIES)
def test_equations_that_run_code_of_their_own_are_known(name):
    assert jaxprs.has_body(equation(BODIES[name], 1.0, name=name))


@pytest.mark.parametrize(
    "fun",
    [
        jnp.sin,
        lambda x: x @ x,
        lambda x: x[::2],
        lambda x: jnp.reshape(x, -1),
        lambda x: x.sum(),
        jax.lax.sort,
    ],
)
def test_plain_operations_have_no_body(fun):
    jaxpr, _ = jaxprs.trace(fun, jnp.ones((2, 2)))
    assert not any(jaxprs.has_body(e) for e in jaxprs.equations(jaxpr) if not jaxprs.is_call(e))


def test_bind_with_replaces_parameters():
    eqn = equation(lambda x: jnp.transpose(x, (1, 0)), jnp.ones((2, 3)))
    (out,) = jaxprs.bind_with(eqn, [jnp.ones((2, 3))], {"permutation": (0, 1)})
    assert out.shape == (2, 3)


def test_names_and_metadata_survive_evaluation():
    def fun(x):
        with jax.named_scope("outer"), jax.named_scope("inner"), set_xla_metadata(mark="yes"):
            return jnp.sin(x)

    jaxpr, _ = jaxprs.trace(fun, 1.0)
    again = jax.jit(lambda x: jaxprs.evaluate(jaxpr, [x], jaxprs.bind))
    text = again.lower(1.0).as_text(debug_info=True)
    assert "outer/inner/sin" in text
    assert 'mark = "yes"' in text


def test_a_run_of_equations_is_a_function_of_what_it_reads():
    def fun(x, y):
        a = jnp.sin(x)
        b = a * y
        c = b + a
        return c - x, b

    jaxpr, _ = jaxprs.trace(fun, jnp.float32(1), jnp.float32(2))
    (run,) = jaxprs.runs(jaxpr, [(1, 3)])  # b and c, from a and y
    assert len(run.inputs) == len(run.outputs) == 2
    seen = []
    apply_run = lambda part, operands: seen.append(part) or jaxprs.evaluate_run(part, operands, jaxprs.bind)
    x, y = jnp.float32(0.3), jnp.float32(-2)
    found = jaxprs.evaluate_by_runs(jaxpr, [x, y], [run], jaxprs.bind, apply_run)
    assert found == list(fun(x, y))
    assert seen == [run]


def test_what_comes_from_some_inputs_alone():
    jaxpr, _ = jaxprs.trace(lambda p, x: (p * 2).sum() + (p.T @ x).sum(), jnp.ones((2, 2)), jnp.ones((2, 2)))
    found = jaxprs.from_inputs(jaxpr, [True, False])
    alone = {e.primitive.name for e in jaxprs.equations(jaxpr) if all(v in found for v in e.outvars)}
    assert {"mul", "transpose", "reduce_sum"} >= alone >= {"mul", "transpose"}
    assert not any(
        e.outvars[0] in found for e in jaxprs.equations(jaxpr) if e.primitive.name == "dot_general"
    )


def test_names_of_tensors_are_found_at_every_depth():
    named = lambda x: jax.jit(lambda x: jax.ad_checkpoint.checkpoint_name(x, "inner"))(x)
    fun = lambda x: jax.lax.scan(lambda c, _: (named(c), None), x, None, length=2)[0]
    jaxpr, _ = jaxprs.trace(fun, jnp.ones(2))
    assert jaxprs.tensor_names(jaxpr) == {"inner"}


def test_products_are_counted_by_the_dtype_of_their_operands():
    def fun(x, w, stack):
        x = jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]  # bf16, 3 times
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: x, x)  # bf16, in one of two branches
        wide = jax.jit(lambda x: x.astype(jnp.float32))(x)
        return jax.checkpoint(lambda x, y: jnp.einsum("bi,bj->ij", x, y))(wide, wide)

    x, w = jnp.ones((2, 5), jnp.bfloat16), jnp.ones((5, 5), jnp.bfloat16)
    jaxpr, _ = jaxprs.trace(fun, x, w, jnp.ones((3, 5, 5), jnp.bfloat16))
    found = {}
    for product in jaxprs.products(jaxpr):
        found[product.dtype] = found.get(product.dtype, 0) + product.flops
    assert found == {
        jnp.dtype(jnp.bfloat16): 4 * 2 * (2 * 5 * 5),
        jnp.dtype(jnp.float32): 2 * (5 * 2 * 5),
    }


def test_a_product_of_two_dtypes_counts_as_the_wider_one_and_knows_its_line():
    def fun(x, w):
        return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    jaxpr, _ = jaxprs.trace(fun, jnp.ones((4, 5), jnp.bfloat16), jnp.ones((5, 2)))
    (product,) = jaxprs.products(jaxpr)
    assert product.dtype == jnp.float32
    assert "test_jaxprs.py:" in product.line


def test_a_part_of_a_jaxpr_is_what_some_outputs_need_and_dependencies_say_which_inputs():
    shift = np.float32([1, 2])

    @jax.jit
    def inner(a, b):
        return a * 2, b + shift

    def f(a, b, c):
        x, y = inner(a, b)
        return x, y + x, c, jnp.sum(c) + x, 3.0

    args = [jnp.float32([i, i + 1]) for i in range(3)]
    jaxpr = jaxprs.inlined(jaxprs.trace(f, *args)[0])
    assert jaxprs.dependencies(jaxpr) == [0b001, 0b011, 0b100, 0b101, 0]
    expected = f(*args)
    for which, needed in (([0], [0]), ([1], [0, 1]), ([2, 3], [0, 2]), ([4], [])):
        part, used = jaxprs.part_of(jaxpr, which)
        assert used == needed
        for found, i in zip(part(*[args[j] for j in used]), which, strict=True):
            np.testing.assert_array_equal(found, expected[i])
