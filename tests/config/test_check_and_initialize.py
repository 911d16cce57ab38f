"""`check` and `initialize` agree: of random files, those that check lets pass are those that initialize takes."""

import random
import warnings

import jax.numpy as jnp
import optax
import pytest

import zero2jax
from zero2jax.config.blocks import names_of
from zero2jax.config.check import examine
from zero2jax.config.params import OPTIMIZERS, SCHEDULERS
from zero2jax.config.schema import Config
from zero2jax.config.values import Refused

TYPES = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULERS}
WORDS = ["auto", "fp16", "bf16", "fp32", "none", "cpu", "sum", "mean", "dots", "nonesuch", "log"]
NUMBERS = [0, 1, 2, 3, 4, 8, 16, 64, 0.5, 0.9, 5e8, -1]
OTHERS = [True, False, None, {}, {"enabled": True}, {"enabled": False}, [0.9, 0.99], {"autotp_size": 2}]


def random_block(rng, cls, density):
    """Some keys of a block with values that the key alone allows."""
    block = {}
    for name, (field, _) in names_of(cls).items():
        if cls is Config and name in TYPES:
            if rng.random() < 0.5:
                kind = rng.choice(list(TYPES[name]))
                block[name] = {"type": kind, "params": random_block(rng, TYPES[name][kind], 0.3)}
        elif "block" in field.metadata:
            if rng.random() < 0.4:
                block[name] = random_block(rng, field.metadata["block"], density)
        elif rng.random() < density:
            allowed = [value for value in WORDS + NUMBERS + OTHERS if is_allowed(field, value)]
            if allowed:
                block[name] = rng.choice(allowed)
    return block


def is_allowed(field, value):
    try:
        field.metadata["rule"].convert(value)
    except Refused:
        return value == "auto"
    return True


def trains(raw):
    tx = None if "optimizer" in raw else optax.sgd(0.1)
    try:
        zero2jax.initialize(lambda params, batch: jnp.mean(batch @ params["w"]), tx, raw)
    except zero2jax.ConfigError:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
def test_what_check_lets_pass_is_what_initialize_takes(seed, monkeypatch):
    monkeypatch.setattr("zero2jax.config.initialize.observers_of", lambda *_: None)  # files, services
    rng = random.Random(seed)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", zero2jax.ConfigWarning)
        for _ in range(150):
            raw = random_block(rng, Config, rng.choice([0.03, 0.1, 0.2]))
            report = examine(raw, 8)
            if not any("initialize needs a mesh" in note for note in report.notes):
                assert trains(raw) == report.trains, raw
                found.append(report.trains)
    assert 10 < sum(found) < len(found) - 10
