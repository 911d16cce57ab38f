"""Presets and options of the step: what the installed compiler has, applies; what it does not have, is named."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.base.versions import installed_version
from zero2jax.memory import step_options
from zero2jax.memory.step_options import PRESETS, installed_options, preset_options, refused_options
from zero2jax.planning.targets import CUDA_PACKAGES, get_target, target_mesh

UNKNOWN = "xla_gpu_no_such_option"
BATCH = np.arange(16, dtype=np.float32).reshape(8, 2) / 7


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def engine_of(**settings):
    return zero2jax.Engine(loss_fn, optax.sgd(0.1), zero2jax.make_mesh(data=2), precision="fp32", **settings)


def test_each_preset_compiles_here_and_changes_no_bit():
    params = {}
    for preset in (None, *PRESETS):
        engine = engine_of(compiler_options=preset)
        state, _ = engine.step(engine.init({"w": np.full((2, 2), 0.5, np.float32)}), BATCH)
        params[preset] = np.asarray(engine.params(state)["w"])
        assert engine.compiler_options == ({} if preset is None else preset_options(preset, "cpu"))
        np.testing.assert_array_equal(params[preset], params[None])


@pytest.mark.skipif(
    None in map(installed_version, CUDA_PACKAGES), reason="the CUDA compiler's packages are not installed"
)
@pytest.mark.cuda_compiler
def test_each_preset_compiles_for_an_h200_without_what_the_compiler_lacks():
    mesh = target_mesh(get_target("h200"), {"data": 2}, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for preset in PRESETS:
            engine = zero2jax.Engine(loss_fn, optax.sgd(0.1), mesh, compiler_options=preset)
            # large enough for a kernel that the compiler chooses by its tables, which a preset must not take away
            engine.abstract_state({"w": jax.ShapeDtypeStruct((256, 256), jnp.float32)})
            engine.lower(jax.ShapeDtypeStruct((512, 256), jnp.float32)).compile()
            wanted = preset_options(preset, "gpu")
            taken = {name: x for name, x in engine.compiler_options.items() if name in wanted}
            left_out = wanted.keys() - taken
            assert taken
            assert taken.items() <= wanted.items()
            assert left_out == refused_options(wanted, mesh.devices.flat[0]).keys()
            said = " ".join(str(w.message) for w in caught if preset in str(w.message))
            # of two names of one thing the compiler has one
            assert [name for name in left_out if name not in said] == (
                ["xla_gpu_enable_pipelined_reduce_scatter"] if preset == "latency" else []
            )


def test_an_option_that_the_compiler_lacks_is_named_before_the_step_is_compiled():
    options = {"xla_cpu_enable_fast_math": False, UNKNOWN: True, "xla_gpu_autotune_level": "many"}
    engine = engine_of(compiler_options=options)
    state = engine.init({"w": np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match="refuses 2 of the 3 compiler options") as error:
        engine.step(state, BATCH)
    assert f"{UNKNOWN} = True: INVALID_ARGUMENT: No such compile option" in str(error.value)
    assert "xla_gpu_autotune_level = 'many': " in str(error.value)
    assert not state.params["w"].is_deleted()
    with pytest.raises(
        ValueError, match="there is no preset 'fast', only latency, memory, once, deterministic"
    ):
        engine_of(compiler_options="fast")


def test_an_option_of_a_preset_that_the_compiler_lacks_is_left_out_and_named(monkeypatch):
    monkeypatch.setitem(step_options._ON_CPU, "latency", {UNKNOWN: 1, "xla_cpu_enable_fast_math": False})
    with pytest.warns(
        UserWarning,
        match=rf"does not take {UNKNOWN} here, left out. The others apply: xla_cpu_enable_fast_math",
    ):
        assert installed_options("latency", jax.devices()[0]) == {"xla_cpu_enable_fast_math": False}


def test_a_configuration_names_a_preset_and_its_own_keys_go_before_it():
    scheduler = "xla_gpu_enable_latency_hiding_scheduler"
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.0, "xla_preset": "memory"}
    settings = lambda **zero: zero2jax.check_config(
        zero2jax.load_config({**config, "zero_optimization": {"stage": 3, **zero}})
    ).effective[f"on GPUs: {scheduler}"]
    assert (settings(), settings(overlap_comm=True)) == ("false", "true")
    shapes = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    batch = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    report = zero2jax.plan(
        loss_fn, shapes, batch, tx=optax.sgd(0.1), config=config, axes={"data": 2}, target="cpu"
    )
    assert report.as_dict()["compiler_options"] == preset_options("memory", "cpu")
    assert "- compiled with xla_cpu_enable_concurrency_optimized_scheduler=False" in str(report)
