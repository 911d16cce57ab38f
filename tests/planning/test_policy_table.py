"""The table of remat policies: bytes and recomputed products, read from programs compiled for CPU devices."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.cli import main as cli
from zero2jax.planning.planner import PlanSettings
from zero2jax.planning.policy_table import tabulate_policies
from zero2jax.planning.targets import get_target

LAYERS, WIDTH, HIDDEN, ROWS, DEVICES = 4, 16, 64, 64, 2


def loss(params, batch):
    def block(x, layer):
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None

    return jax.lax.scan(block, batch, params)[0].mean()


def program():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    params = {"up": shape(LAYERS, WIDTH, HIDDEN), "down": shape(LAYERS, HIDDEN, WIDTH)}
    return zero2jax.Program(loss, params, shape(ROWS, WIDTH), optax.sgd(0.1))


def test_policies_trade_bytes_for_products():
    config = {"zero_optimization": {"stage": 2}}
    settings = PlanSettings({"data": DEVICES}, get_target("cpu"))
    table = tabulate_policies(program, config, settings, ("nothing", "dots", "everything", "save_qkv"))
    nothing, dots, everything, refused = table.rows
    # backward needs the hidden units: one product per layer and device again
    assert nothing.recomputed_flops == LAYERS * 2 * (ROWS // DEVICES) * WIDTH * HIDDEN
    assert dots.recomputed_flops == everything.recomputed_flops == 0
    hidden_bytes = LAYERS * (ROWS // DEVICES) * HIDDEN * 4
    assert dots.activation_bytes - nothing.activation_bytes > hidden_bytes / 2
    assert everything.activation_bytes >= dots.activation_bytes
    assert "names the tensor 'qkv_proj'" in refused.refused
    assert "names the tensor 'qkv_proj'" in str(table)
    rows = json.loads(json.dumps(table.as_dict()))["policies"]
    assert [row["policy"] for row in rows] == ["nothing", "dots", "everything", "save_qkv"]


def test_policies_refused_for_one_reason_share_a_line():
    settings = PlanSettings({"data": DEVICES}, get_target("cpu"))
    table = tabulate_policies(
        program, None, settings, ("save_qkv", "dots", "save_projections", "offload_projections")
    )
    text = str(table)
    assert text.count("there is none of that name") == 1
    assert "- refused: save_qkv, save_projections, offload_projections: applying a remat policy to" in text
    assert [row.split()[-1] for row in text.splitlines()[1:5] if "dots" not in row] == ["refused"] * 3
    # as data each has its own
    assert all("there is none" in row.refused for row in table.rows if row.policy != "dots")


def test_the_command_names_an_unknown_policy(capsys):
    arguments = ["activations", "module:function", "--axes", "data=2", "--target", "cpu"]
    assert cli.main([*arguments, "--policies", "nothng"]) == 2
    assert (
        "reading --policies nothng: there is no such policy. Did you mean 'nothing'?"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_the_policy_of_a_plan_comes_from_its_configuration(policy):
    config = {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"policy": policy}}
    shape = program()
    report = zero2jax.plan(
        shape.loss_fn,
        shape.params,
        shape.batch,
        tx=shape.tx,
        config=config,
        axes={"data": DEVICES},
        target="cpu",
    )
    products = 7 if policy == "nothing" else 6
    assert report.timeline.flops == products * LAYERS * 2 * (ROWS // DEVICES) * WIDTH * HIDDEN
