"""Running out of memory says who holds what, the largest leaves, and what would free how much."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zero2jax
from zero2jax.memory.out_of_memory import explained, wanted_bytes, ways_out

P = {"big": np.ones((64, 32), np.float32), "small": np.ones(32, np.float32)}
NUM = 64 * 32 + 32
X = np.ones((8, 64), np.float32)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["big"] + params["small"][None]) ** 2)


def too_large(params, batch):
    """A real one: XLA has to sort 2^44 numbers."""
    many = jnp.broadcast_to(loss_fn(params, batch), (2**20, 2**24)) * jnp.arange(2.0**24)[None]
    return jnp.sort(many, axis=1).mean()


def refused(params, batch):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50MiB.")


def engine_of(loss=loss_fn, **settings):
    return zero2jax.Engine(loss, optax.adam(1e-2), zero2jax.make_mesh(data=4), **settings)


def test_an_evaluation_that_does_not_fit_says_who_holds_what():
    engine = engine_of(stage=1, num_microbatches=2)
    state = engine.init(P)
    with pytest.raises(zero2jax.OutOfMemoryError, match=r"a program asked for 64\.00 TiB at once") as error:
        engine.evaluate(state, X, loss_fn=too_large)
    assert error.value.wanted_bytes == 2**46
    assert isinstance(error.value.__cause__, jax.errors.JaxRuntimeError)
    text = str(error.value)
    assert "RESOURCE_EXHAUSTED" in text
    assert f"{4 * NUM // 4 / 1024:.2f} KiB" in text  # masters, by the plan
    assert text.index("float32[64, 32]  master") < text.index("Ways out, cheapest first:")
    assert "1. stage=2" in text
    assert engine.evaluate(state, X) > 0  # and the state is still there


def test_a_step_and_init_raise_the_same_error_chained_to_the_first():
    state = (engine := engine_of(refused)).init(P)
    with pytest.raises(zero2jax.OutOfMemoryError, match=r"asked for 1\.50 MiB at once") as error:
        engine.step(state, X)
    assert type(error.value.__cause__) is jax.errors.JaxRuntimeError
    with pytest.raises(zero2jax.OutOfMemoryError):
        engine_of(refused).init(refused, P, X)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^INTERNAL") as other:
        engine_of().init(
            lambda: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("INTERNAL: something else"))
        )
    assert not isinstance(other.value, zero2jax.OutOfMemoryError)


def test_of_pinned_host_memory_its_limits_are_named_and_no_devices(monkeypatch):
    monkeypatch.setattr("zero2jax.memory.out_of_memory.pinned_limit_bytes", lambda: 64 << 30)
    monkeypatch.setattr("zero2jax.memory.out_of_memory.locked_limit_bytes", lambda: 2**23)
    text = "RESOURCE_EXHAUSTED: Out of host memory allocating 2048 bytes."
    message = (
        r"pinned host memory .* asked for 2.00 KiB .* 64.00 GiB .*LIMIT_GB to more .* ulimit -l is 8.00 MiB"
    )
    with pytest.raises(zero2jax.OutOfMemoryError, match=message), explained(lambda: None):
        raise jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", 2**46),
        ("Out of memory while trying to allocate 12,345 bytes.", 12345),
        ("Failed to allocate request for 1.50GiB (1610612736B) on device", None),
        ("Out of memory while trying to allocate 2.00GiB. ", 2**31),
        ("RESOURCE_EXHAUSTED: out of registers", None),
    ],
)
def test_the_bytes_that_were_asked_for_are_read(text, num_bytes):
    assert wanted_bytes(text) == num_bytes


def test_ways_out_are_the_differences_of_the_formulas_cheapest_first():
    def ways(stage, wanted=None, **settings):
        engine = engine_of(stage=stage, **settings)
        engine.abstract_state(P)
        return {way.change: way.freed_bytes for way in ways_out(engine.functions.program, wanted)}

    states = 12 * NUM + 4  # fp32 masters, two moments, a count
    assert list(ways(0)) == ["stage=1", "stage=2", "stage=3"]
    assert abs(ways(0)["stage=1"] - 0.75 * (states + 2 * NUM)) < 16  # and bf16 gradients
    assert ways(1, num_microbatches=2)["stage=2"] == 4 * NUM * 3 // 4  # fp32 sums of gradients
    # 1000 bytes of activations beside gradients and parameters in bf16
    assert ways(2, wanted=2 * NUM // 4 + 2 * NUM + 1000)["num_microbatches=2"] == 500
    offload = ways(3)["offload=OffloadSettings()"]
    assert abs(offload - (states - 2 * NUM) / 4) < 16
    apart = ways(3, arena=True)
    assert list(apart) == ["arena=False", "offload=OffloadSettings()"]
    assert 0 <= apart["arena=False"] - 8 * NUM / 4 < 16  # two moments, a count
    assert "arena=False" in ways(0, arena=True)
