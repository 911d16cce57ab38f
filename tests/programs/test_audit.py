"""Reading any compiled step, and the assertions that users make of theirs."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import LAYERS, WIDTH, make_batch, make_engine, make_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zero2jax


def compiled_sum(num_layers=3, donate=True):
    """A loop of `num_layers` all-gathers over `data` and one all-reduce over both axes: 4 x 2 devices, fp32."""
    mesh = zero2jax.make_mesh(data=4, model=2)

    def local(w, x):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)), None

        x, _ = jax.lax.scan(layer, x, w)
        return w + 1, jax.lax.psum(x, ("data", "model"))

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "data"), P()), out_specs=(P(None, "data"), P()), check_vma=False
    )
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    shapes = place((num_layers, 16, 16), P(None, "data")), place((8, 16), P())
    return jax.jit(step, donate_argnums=(0,) if donate else ()).lower(*shapes).compile()


@pytest.fixture(scope="module")
def compiled():
    return compiled_sum()


def test_memory_of_known_arrays(compiled):
    memory = zero2jax.audit(compiled).memory
    weights, x = 3 * 4 * 16 * 4, 8 * 16 * 4
    assert memory.argument_bytes == weights + x
    assert memory.alias_bytes == weights
    assert memory.total_bytes == memory.argument_bytes + memory.output_bytes - weights + memory.temp_bytes
    assert memory.host_bytes == 0


def test_collectives_by_kind_and_axis_with_loops_multiplied(compiled):
    gather, reduce = zero2jax.audit(compiled).rows()
    assert (gather.kind, gather.axis, gather.num_instructions, gather.num_runs) == (
        "all-gather",
        "data",
        1,
        3,
    )
    assert gather.bytes_per_step == 3 * 16 * 16 * 4
    assert gather.largest_bytes == 16 * 16 * 4
    assert (reduce.kind, reduce.axis, reduce.bytes_per_step) == ("all-reduce", "data+model", 8 * 16 * 4)


def test_hosts_tell_in_node_from_across(compiled):
    rows = zero2jax.audit(compiled, devices_per_host=8).rows()
    assert [row.across for row in rows] == [False, False]
    rows = zero2jax.audit(compiled, devices_per_host=2).rows()  # `model` neighbours share a host of 2
    assert [row.across for row in rows] == [True, True]


def test_table_and_json(compiled):
    found = zero2jax.audit(compiled)
    assert "all-gather" in str(found)
    assert found.as_dict()["collectives"][0]["bytes_per_step"] == 3072
    assert found.as_dict()["mesh"] == {"data": 4, "model": 2}


def test_what_is_expected_passes(compiled):
    zero2jax.assert_collectives(
        compiled,
        {"all-gather": 3, "all-reduce": range(1, 2)},
        bytes_per_step={"all-gather": 3072},
        small_bytes=0,
        donated=False,
    )
    zero2jax.assert_collectives(compiled, {"all-gather": 3}, axis="data", small_bytes=0)
    zero2jax.assert_collectives(compiled, {}, donated=True)  # nothing above 64 KiB


@pytest.mark.parametrize(
    ("expected", "options", "message"),
    [
        (
            {"all-gather": 2, "all-reduce": 1},
            {},
            r"all-gather: 3 runs per step, expected 2: .*1,024 bytes x 3, from jit",
        ),
        ({"all-gather": 3}, {}, "all-reduce: 1 runs per step, expected 0"),
        ({"all-gather": range(4, 6)}, {"axis": "data"}, "3 runs per step, expected 4 to 5"),
        (
            {"all-gather": 3, "all-reduce": 1},
            {"bytes_per_step": {"all-gather": 1}},
            "all-gather: 3,072 bytes per step, expected 1",
        ),
    ],
)
def test_what_is_not_expected_is_named(compiled, expected, options, message):
    with pytest.raises(AssertionError, match=message):
        zero2jax.assert_collectives(compiled, expected, small_bytes=0, **options)


def test_outputs_that_are_not_donated_are_named():
    with pytest.raises(AssertionError, match="bytes of the outputs are not written into donated arguments"):
        zero2jax.assert_collectives(
            compiled_sum(donate=False), {"all-gather": 3, "all-reduce": 1}, small_bytes=0, donated=True
        )


def test_unknown_kind(compiled):
    with pytest.raises(ValueError, match=r"there is no kind 'gather'\. There are all-gather,"):
        zero2jax.assert_collectives(compiled, {"gather": 1})


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_of_the_engine_scatters_once_per_layer_and_gives_everything_back(stage):
    engine = make_engine(8, stage=stage, tx=optax.adamw(1e-2))
    engine.abstract_state(make_params())
    compiled = engine.lower(make_batch(16)).compile()
    layer = WIDTH * WIDTH * 4  # the least a padded layer's matrix takes
    zero2jax.assert_collectives(
        compiled,
        {"reduce-scatter": range(LAYERS, LAYERS + 4), "all-gather": range(LAYERS, 3 * LAYERS + 4)},
        small_bytes=layer - 1,
        donated=True,
    )
