"""The formulas on shapes, against sums written out by hand: stages, microbatches, frozen leaves, another mesh axis."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.programs.formulas import CLASSES, GRADIENTS, MASTER, OPTIMIZER, PARAMETERS, class_formulas
from zero2jax.zero.gradient_settings import GradientSettings

N, LAYERS, WIDTH = 4, 3, 8
P = jax.sharding.PartitionSpec
SHAPES = {
    "blocks": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32),  # halved by the axis `model`
    "embed": jax.ShapeDtypeStruct((5, WIDTH), jnp.float32),
    "frozen": jax.ShapeDtypeStruct((16,), jnp.bfloat16),
}
BLOCKS, EMBED, FROZEN = LAYERS * WIDTH * WIDTH // 2, 5 * WIDTH, 16


def formulas(**settings):
    engine = zero2jax.Engine(
        lambda params, batch: params["embed"].sum(),
        optax.sgd(1e-2, momentum=0.9),
        zero2jax.make_mesh(data=N, model=2),
        layer_dims={"blocks": 1, "embed": 0, "frozen": 0},
        param_specs={"blocks": P(None, None, "model"), "embed": P(), "frozen": P()},
        trainable={"blocks": True, "embed": True, "frozen": False},
        **settings,
    )
    engine.abstract_state(SHAPES)
    layout = engine.layout
    settings = GradientSettings.of(layout, engine.settings, engine.mesh)
    return class_formulas(layout, settings, engine.mesh)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_formulas_are_the_sums_over_the_leaves(stage):
    found = formulas(stage=stage)
    assert list(found) == list(CLASSES[:4])
    shards = N if stage else 1
    assert found[MASTER].num_bytes == (4 * (BLOCKS + EMBED) + 2 * FROZEN) // shards
    assert found[OPTIMIZER].num_bytes == 4 * (BLOCKS + EMBED) // shards  # the frozen leaf has no momentum
    assert found[GRADIENTS].num_bytes == 2 * (BLOCKS + EMBED) // (N if stage else 1)  # of one microbatch
    in_step = {True: 2 * (BLOCKS + EMBED + FROZEN), False: 2 * max(BLOCKS // LAYERS, EMBED, FROZEN)}
    assert found[PARAMETERS].num_bytes == in_step[stage < 3]
    assert found[MASTER].words == "parameters at rest" + (" / 4" if stage else "")
    assert found[GRADIENTS].words == "gradients" + (" / 4" if stage else "")


def test_microbatches_accumulate_at_the_accumulators_width():
    assert formulas(num_microbatches=2)[GRADIENTS].num_bytes == 4 * (BLOCKS + EMBED) // N
    assert formulas(num_microbatches=2, stage=1)[GRADIENTS].num_bytes == 4 * (BLOCKS + EMBED)
