"""README and docs: their code runs, their links lead somewhere, and every public name is documented."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FP32

import zero2jax
from zero2jax.cli.main import COMMANDS, main
from zero2jax.config.keys import KEYS, Treatment

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
MINIMAL = ROOT / "examples" / "minimal.py"
NOT_RUN = re.compile(r"<!-- not run: .+ -->")
BLOCK = re.compile(r"^(?:(<!-- .* -->)\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """The Python blocks of a page, each on the lines that it has there; "" for one that is marked as not run."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2))
        run = not (found[1] and NOT_RUN.match(found[1]))
        yield "\n" * line + found[2] if run else ""


def init_fn(key):
    return {name: 0.1 * jax.random.normal(k, (8, 8)) for name, k in zip("ab", jax.random.split(key))}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["a"]) @ params["b"] - batch) ** 2)


def taken_for_granted():
    """The names that every page may use: a user's model, optimizer and data."""
    key = jax.random.key(0)
    return {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "optax": optax,
        "zero2jax": zero2jax,
        "init_fn": init_fn,
        "loss_fn": loss_fn,
        "params": init_fn(key),
        "key": key,
        "tx": optax.adamw(3e-4),
        "mesh": zero2jax.make_mesh(data=8),
        "batches": [jax.random.normal(jax.random.key(i), (16, 8), jnp.bfloat16) for i in range(2)],
        "examples": np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32),
        "num_steps": 2,
    }


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))], ids=lambda page: page.stem)
def test_code_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    namespace = taken_for_granted()
    for block in blocks(page):
        exec(compile(block, page, "exec"), namespace)


def test_the_loop_of_checkpoints_ends_on_a_step_that_was_saved_and_runs_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = next(blocks(DOCS / "checkpoints.md"))
    at_each_step = block.replace("save_interval_steps=100", "save_interval_steps=1")
    assert at_each_step != block
    for _ in range(
        2
    ):  # to step 2, which is the last and is saved; and again, when there is nothing left to do
        namespace = taken_for_granted()
        exec(compile(at_each_step, "checkpoints.md", "exec"), namespace)
        assert int(namespace["state"].step) == namespace["checkpointer"].latest_step() == 2


def test_the_home_page_shows_the_program():
    (name,) = re.findall(r'^```{.python}\n--8<-- "(.+)"\n```$', (DOCS / "index.md").read_text(), re.MULTILINE)
    assert "zero2jax.Engine(" in (ROOT / name).read_text()


def test_most_pages_have_code_that_runs():
    assert sum(any(blocks(page)) for page in PAGES) >= 9
    marked = [found[1] for page in PAGES for found in BLOCK.finditer(page.read_text()) if found[1]]
    assert all(NOT_RUN.match(comment) for comment in marked)
    assert not [page.name for page in PAGES if re.search("^```py(thon)? ", page.read_text(), re.MULTILINE)]


def test_minimal_learns_and_is_what_the_readme_shows(capsys):
    num_lines = len(MINIMAL.read_text().splitlines())
    assert num_lines <= 30
    assert f"(examples/minimal.py), {num_lines} lines" in (ROOT / "README.md").read_text()
    runpy.run_path(str(MINIMAL))
    losses = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < losses[0] / 5
    _, after = blocks(ROOT / "README.md")
    lines = [line for line in after.strip().splitlines() if not line.startswith("#")]
    assert "\n".join(lines) in MINIMAL.read_text()


def test_relative_links_lead_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_are_named_exist():
    for page in PAGES:
        for name in re.findall(r"\b(?:zero2jax|tests|examples|configs)/[\w./-]*\w", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_command_lines_have_flags_that_exist(capsys):
    flags = {}
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        flags[command] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    seen = set()
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for command, words in re.findall(r"(?:^ +|[`(])zero2jax (\w+) ([^`\n]*)", text, re.MULTILINE):
            # what follows a launched script are flags of its own
            own = words.partition(".py")[0] if command == "launch" else words
            unknown = set(re.findall(r"--[\w-]+", own)) - flags[command]
            assert not unknown, f"{page.name}: zero2jax {command} has no {unknown}"
            seen.add(command)
    assert seen >= {"activations", "check", "estimate", "export", "launch", "plan"}


def test_every_public_name_has_an_entry_and_a_place_in_readme_docs_or_an_example():
    entries = re.findall(r"^::: zero2jax\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(entries) == sorted(zero2jax.__all__)
    elsewhere = [page for page in PAGES if page.name != "api.md"] + sorted(ROOT.glob("examples/**/*.py"))
    text = "\n".join(path.read_text() for path in elsewhere)
    missing = [name for name in zero2jax.__all__ if not re.search(rf"\bzero2jax\.{name}\b", text)]
    assert not missing


def test_every_metric_of_a_step_is_documented():
    engine = zero2jax.Engine(
        lambda params, batch: (loss_fn(params, batch), {"weight": 1, "other": 2}),
        optax.inject_hyperparams(optax.adamw)(1e-3),
        zero2jax.make_mesh(data=8),
        precision=FP32,
        clip_norm=1.0,
        loss_scale=8.0,
    )
    _, metrics = engine.step(engine.init(init_fn, jax.random.key(0)), np.ones((8, 8), np.float32))
    documented = set(re.findall(r"^\| `(\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    assert set(metrics) <= documented
    assert documented - set(metrics) == {"activation_profile"}  # which needs activation settings


def test_what_the_readme_says_is_not_there_is_what_the_engine_refuses():
    said = {
        "error feedback for quantised gradients": ("zero_optimization.zeropp_loco_param", Treatment.REFUSED),
        "updates before the gradients are judged": (
            "zero_optimization.offload_optimizer.super_offload",
            Treatment.REFUSED,
        ),
    }
    (paragraph,) = re.findall(
        r"^\*\*Not there:\*\*.*?\n\n", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    for words, (key, treatment) in said.items():
        assert words in paragraph.replace("\n", " ")
        assert KEYS[key].treatment is treatment, f"{key} is there now: README and {words!r}"


def test_the_page_of_deepspeed_keys_is_up_to_date():
    generate = runpy.run_path(str(DOCS / "generate.py"))
    assert generate["PAGE"].read_text() == generate["page"](), "run: python docs/generate.py"
