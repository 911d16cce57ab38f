"""What a configuration is read from: a path, text, base64 or a dict; what cannot be read says why."""

import base64
import contextlib
import json

import numpy as np
import pytest
from config_errors import errors_of
from hypothesis import given, settings
from hypothesis import strategies as st

from zero2jax.config.reading import Config, ConfigError, load_config, read_config


def test_path_text_dict_and_config_mean_the_same(tmp_path):
    raw = {"train_batch_size": 32, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(raw))
    loaded = load_config(raw)
    for source in (path, str(path), json.dumps(raw), loaded):
        assert load_config(source) == loaded
    assert hash(load_config(path)) == hash(loaded)


def test_hjson_comments_trailing_commas_and_bare_braces():
    text = """
    # a comment
    train_batch_size: 32
    zero_optimization: {
      stage: 2,  // two
      reduce_bucket_size: 5e8,
    }
    """
    config = load_config(text)
    assert (config.train_batch_size, config.zero_optimization.stage) == (32, 2)
    assert config.zero_optimization.reduce_bucket_size == 500_000_000


def test_dict_source_is_not_changed_nor_watched():
    raw = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    before = json.dumps(raw)
    config = read_config(raw)
    assert json.dumps(raw) == before
    raw["zero_optimization"]["stage"] = 3
    assert config.source["zero_optimization"]["stage"] == 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("/no/such/file.json", "cannot be read"),
        ("", "cannot be read"),
        ("/dev/null", "the file is empty: no key is set"),
        ("\n  \n", "the file is empty: no key is set"),
        ("# nothing\n", "the file is empty: no key is set"),
        ("{ /*", "not JSON or hjson"),
        ('{"a": 1 /* x', "not JSON or hjson"),
        ("{a: '''x", "not JSON or hjson"),
        ('{"a": ', "not JSON or hjson"),
        ('{"train_batch_size": 1e999}', "not JSON or hjson"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "not JSON or hjson"),
        ('[{"a": 1}]', "must be one JSON object"),
        (3, "a path, a dict, JSON text or a Config"),
    ],
)
def test_unreadable_source(source, words):
    assert words in errors_of(source)[0]


@pytest.mark.parametrize("name", ["run:1.json", "a{b}.json", "stage: 3"])
def test_a_path_that_exists_is_a_path(tmp_path, monkeypatch, name):
    (tmp_path / name).write_text('{"zero_optimization": {"stage": 3}}')
    monkeypatch.chdir(tmp_path)
    for source in (name, tmp_path / name, str(tmp_path / name)):
        assert read_config(source).zero_optimization.stage == 3


@pytest.mark.parametrize(
    "text", ["{'bf16': {'enabled': True}}", '{"gradient_clipping": NaN}', '{"seed": None}']
)
def test_the_words_of_python_are_told_from_those_of_json(text):
    (error,) = errors_of(text)
    assert error.endswith("its words are true, false and null, not True, None or NaN.")


def test_an_empty_file_is_an_error_and_an_empty_object_is_not(tmp_path):
    path = tmp_path / "empty.json"
    path.write_text("")
    assert "the file is empty" in errors_of(path)[0]
    path.write_text("{}")
    assert read_config(path) == Config()


def test_base64_of_a_text_is_read_as_by_deepspeed():
    encoded = base64.urlsafe_b64encode(b'{"zero_optimization": {"stage": 3}}').decode()
    assert read_config(encoded).zero_optimization.stage == 3


def test_duplicate_keys_are_named_with_their_path():
    found = errors_of(
        '{"bf16": {"enabled": true, "enabled": false}, "train_batch_size": 1, "train_batch_size": 2}'
    )
    assert found == (
        "bf16.enabled = false: the key is given twice. Keep one.",
        "train_batch_size = 2: the key is given twice. Keep one.",
    )


@pytest.mark.parametrize(
    "raw",
    [
        {"train_batch_size": 8, "steps_per_print": float("inf")},
        {"train_batch_size": np.int64(8), "gradient_clipping": np.float32(0.5)},
        {"train_batch_size": np.array(8), "bf16": {"enabled": np.bool_(True)}},
        {"optimizer": {"type": "Adam", "params": {"betas": (np.float64(0.9), 0.95)}}},
    ],
)
def test_values_that_deepspeed_takes_from_a_dict(raw):
    config = read_config(raw)
    assert set(raw) <= {path.split(".")[0] for path in config.given}
    json.dumps(config.source)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="{}[]\":,#\n abtrue019.e-\\/*'", max_size=30).map(lambda text: "{" + text))
def test_random_text_gives_a_config_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        read_config(text)
