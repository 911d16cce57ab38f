"""A hundred random combinations of settings, losses and meshes against one device; see `fuzz`.

`make fuzz N=2000 FIRST=1000` tries others.
"""

import dataclasses
import os

import fuzz
import jax
import pytest

FIRST, NUM = int(os.environ.get("FUZZ_FIRST", "0")), int(os.environ.get("FUZZ_N", "100"))


@pytest.fixture
def drop_compiled():
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("drop_compiled")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM))
def test_a_random_combination_equals_one_device(seed):
    fuzz.check(fuzz.draw(seed))


def test_the_draws_hold_every_choice_and_every_model():
    draws = [fuzz.draw(seed) for seed in range(100)]
    seen = lambda name: {str(getattr(draw, name)) for draw in draws}
    assert seen("model") == set(fuzz.fuzz_models.MODELS)
    assert seen("mesh") == {str(mesh) for mesh in fuzz.MESHES}
    assert seen("optimizer") == set(fuzz.TRANSFORMATIONS)
    assert {(draw.stage, draw.gather) for draw in draws} >= {(2, "once"), *((n, "auto") for n in range(4))}
    grouped = [draw for draw in draws if "replica" in draw.mesh]
    together = {
        "groups and a frozen leaf": any(not all(draw.trainable) for draw in grouped),
        "groups and a sum": any(draw.reduction == "sum" for draw in grouped),
        "groups and microbatches": any(draw.over_replicas and draw.num_microbatches > 1 for draw in grouped),
        "bf16 and microbatches": any(d.compute_dtype == "bfloat16" and d.num_microbatches > 1 for d in draws),
        "a key and weights": any(draw.takes_rng and draw.weights == "some zero" for draw in draws),
        "a model axis and placed parameters": any("model" in d.mesh and d.kind.specs for d in draws),
        "a loss scale, weights and microbatches": any(
            d.loss_scale and d.weights == "some zero" and d.num_microbatches > 1 for d in draws
        ),
        "sums in order in groups": any(d.fp32_sum for d in grouped),
        "bf16 masters, microbatches and a frozen leaf": any(
            d.master_dtype == "bf16" and d.num_microbatches > 1 and not all(d.trainable) for d in draws
        ),
        "bf16 moments in groups": any(d.state_dtype == "bf16" for d in grouped),
        "an arena with a model axis, and with a frozen state": any(
            d.arena and "model" in d.mesh for d in draws
        )
        and any(d.arena and d.stored for d in draws),
        "quantised gradients in groups, with microbatches, with a loss scale": all(
            any("grads_bits" in d.quantize for d in draws)
            for draws in (
                [d for d in grouped if d.over_replicas],
                [d for d in grouped if not d.over_replicas],
                [d for d in draws if d.num_microbatches > 1],
                [d for d in draws if d.loss_scale],
            )
        ),
        "quantised parameters beside a model axis, and with bf16 masters": all(
            any("params_bits" in d.quantize for d in draws)
            for draws in (
                [d for d in draws if "model" in d.mesh],
                [d for d in draws if d.master_dtype == "bf16"],
            )
        ),
        "a partitioned activation": any((d.activations or {}).get("partition_axis") for d in draws),
    }
    assert all(together.values()), together


@pytest.fixture(scope="module")
def trained():
    """A draw with everything at once, and what the engine gives."""
    draw = dataclasses.replace(
        fuzz.draw(0),
        model="network",
        stage=2,
        mesh={"replica": 2, "data": 2},
        over_replicas=True,
        num_microbatches=2,
        optimizer="sgd_momentum",
        clip_norm=1.0,
        reduction="sum",
        weights="positive",
        takes_rng=True,
        master_dtype="fp32",
        state_dtype="fp32",
        stochastic_rounding=None,
    )
    return draw, fuzz.by_engine(draw)


@pytest.mark.parametrize(
    "other",
    [{"reduction": "mean"}, {"clip_norm": 1.01}, {"weights": "some zero"}, {"takes_rng": False}],
    ids=str,
)
def test_the_comparison_notices_another_setting(trained, other):
    """A norm clipped one percent higher is another training, too."""
    draw, found = trained
    with pytest.raises(AssertionError, match="found"):
        fuzz.compare(found, *fuzz.expected(dataclasses.replace(draw, **other)))


def test_the_note_on_a_failure_is_the_command_that_repeats_it(monkeypatch):
    def differ(*_):
        raise AssertionError("found")

    monkeypatch.setattr(fuzz, "by_engine", differ)
    with pytest.raises(AssertionError) as caught:
        fuzz.check(fuzz.draw(3))
    assert caught.value.__notes__[0].endswith("Repeat it with: make fuzz N=1 FIRST=3")
