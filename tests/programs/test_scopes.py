"""Operations by scope, phase and loop, against the hand count of a model of known sizes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.monitors.observers import StepRecord
from zero2jax.monitors.profiler import Profiler
from zero2jax.programs.audit import audit
from zero2jax.programs.scopes import _place, flops_by, scoped_products

INPUTS, WIDTH, LAYERS, ROWS, MICROBATCHES = 8, 16, 3, 4, 2  # rows of a microbatch on one device


def layer(x, w):
    with jax.named_scope("attention"):
        x = jnp.tanh(x @ w["a"])
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ w["m"])


def loss_fn(p, batch):
    with jax.named_scope("embed"):
        x = batch @ p["e"]
    x, _ = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, p["layers"])
    with jax.named_scope("head"):
        return jnp.mean(x**2)


@pytest.fixture(scope="module")
def read():
    """The audit of a step at stage 3, on two devices."""
    mesh = zero2jax.make_mesh(data=2)
    engine = zero2jax.Engine(loss_fn, optax.sgd(0.1), mesh, stage=3, num_microbatches=MICROBATCHES)
    square = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    embed = jax.ShapeDtypeStruct((INPUTS, WIDTH), jnp.float32)
    engine.abstract_state({"e": embed, "layers": {"a": square, "m": square}})
    return audit(engine.lower(jax.ShapeDtypeStruct((2 * MICROBATCHES * ROWS, INPUTS), jnp.float32)).compile())


def test_operations_are_those_of_a_hand_count(read):
    products = scoped_products(read.module)
    embed, square = 2 * ROWS * INPUTS * WIDTH * MICROBATCHES, 2 * ROWS * WIDTH**2 * MICROBATCHES * LAYERS
    assert flops_by(products, lambda one: (*one.scope, one.phase)) == {
        ("embed", "forward"): embed,
        ("embed", "backward"): embed,  # the batch has no gradient
        **{
            (name, phase): times * square
            for name in ("attention", "mlp")
            for phase, times in (("forward", 1), ("recompute", 1), ("backward", 2))
        },
    }
    assert flops_by(products, lambda one: one.loops) == {
        (MICROBATCHES, LAYERS): 8 * square,
        (MICROBATCHES,): 2 * embed,
    }


def test_what_zero_adds_to_a_step_has_scopes_of_its_own(read):
    """A trace of a step tells them apart by these names."""
    for kind, scope in (("all-gather", "zero_gather"), ("reduce-scatter", "zero_scatter")):
        found = [c for c in read.collectives if c.kind == kind]
        assert found
        assert all(f"/{scope}/" in c.op_name for c in found)
    names = {i.op_name for name in read.module.computations for i in read.module.instructions(name)}
    assert any("/zero_update/" in name for name in names)
    for product in scoped_products(read.module):  # all of this model's are the loss function's
        assert "zero_loss" in product.product.op_name


def test_the_report_names_scopes_phases_loops_and_time(read, tmp_path):
    path = tmp_path / "profile.txt"
    profiler = Profiler(
        2, lambda upcoming: read, lambda: ["model"], top_modules=2, output=str(path), peak_flops=1e9
    )
    upcoming = lambda step: type("Upcoming", (), {"step": step})
    record = lambda step: StepRecord(
        step=step, samples=0, num_examples=0, num_tokens=0, metrics={}, device_s=1.0
    )
    for step in (1, 2, 3):
        profiler.before(upcoming(step))
        profiler.after(record(step))
        assert path.exists() == (step >= 2)
    lines = path.read_text().splitlines()
    assert lines[:2] == ["profile of step 2, per device", "model"]
    assert "= forward 26.62 kFLOP, recompute 24.58 kFLOP, backward 51.2 kFLOP" in lines[2]
    assert "0.0% of its 16-bit peak" in lines[4]
    assert lines[5] in ("most at depth 1: attention 48%, mlp 48%", "most at depth 1: mlp 48%, attention 48%")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert rows["mlp"] == ["12.29", "kFLOP", "12.29", "kFLOP", "24.58", "kFLOP", "-", "49.15", "kFLOP", "48%"]
    assert rows["2"] == [
        "x",
        "3",
        "24.58",
        "kFLOP",
        "24.58",
        "kFLOP",
        "49.15",
        "kFLOP",
        "-",
        "98.3",
        "kFLOP",
        "96%",
    ]
    first_line, last_line = layer.__code__.co_firstlineno, loss_fn.__code__.co_firstlineno
    by_line = {int(name.rpartition(":")[2]): cells[-1] for name, cells in rows.items() if ".py:" in name}
    assert sorted(by_line.values()) == ["4%", "48%", "48%"]
    assert sum(first_line < line < last_line for line in by_line) == 2


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        ("jit(step)/shard_map/jvp(Block/mlp)/dot_general", ("Block", "mlp"), "forward"),
        (
            "jit(step)/transpose(jvp(Block))/while/body/closed_call/mlp/transpose",
            ("Block", "mlp"),
            "backward",
        ),
        ("jit(step)/transpose(jvp())/checkpoint/rematted_computation/mlp/dot", ("mlp",), "recompute"),
        ("jit(step)/jvp(mlp)/BTH,HF->BTF/dot_general", ("mlp",), "forward"),
        ("jit(step)/dot_general", (), "update"),
        ("", (), "update"),
    ],
)
def test_scope_and_phase_are_read_from_the_name(op_name, scope, phase):
    assert _place(op_name) == (scope, phase)
