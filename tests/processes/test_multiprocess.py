"""The engine in several real processes over gloo: the same numbers in each, and for any division into processes."""

import json

import numpy as np
import optax
import pytest
from helpers import make_batches, make_params, mean_loss, oracle
from spawn import TESTS, launch, results, write_program

EXAMPLE = TESTS.parent / "examples" / "gpt" / "train.py"

# Three steps of clipping and Adam on leaves that do not divide, at stage 3, which communicates in every way there is.
STEPS = """
import hashlib, json
import jax, numpy as np
import helpers, zero2jax

startup = zero2jax.init_distributed(initialization_timeout_s=120)
arena = startup.num_processes == 2  # the same bits with and without, too
engine = helpers.make_engine(
    jax.device_count(), stage=3, loss_fn=helpers.weighted_loss, clip_norm=0.5, arena=arena
)
state = engine.init(jax.tree.map(np.asarray, helpers.make_params()))
rows = zero2jax.local_rows(helpers.NUM_EXAMPLES, engine.mesh)
steps = []
for batch in helpers.make_batches(3):
    local = jax.tree.map(lambda x: x[rows], batch)
    placed = zero2jax.global_batch(local, engine.mesh, batch_size=helpers.NUM_EXAMPLES)
    state, metrics = engine.step(state, placed)
    steps.append([float(metrics[name]).hex() for name in ("loss", "grad_norm", "grad_norm_clipped")])
loss, aux = engine.evaluate(state, batch)  # the whole batch in every process does, too
params = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(engine.params(state)))
found = {
    "buffers": len(jax.tree.leaves(state)),
    "processes": [startup.num_processes, jax.device_count(), jax.local_device_count()],
    "numbers": [steps, float(loss).hex(), int(aux["examples"]), hashlib.sha256(params).hexdigest()],
}
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    program = write_program(tmp_path_factory.mktemp("engine"), STEPS)
    return {n: results(launch(program, processes=n, devices=8 // n)) for n in (1, 2, 4)}


def test_every_process_sees_the_same_numbers(runs):
    for n, found in runs.items():
        assert sorted(found) == list(range(n))
        assert all(other == found[0] for other in found.values())
        assert found[0][0]["processes"] == [n, 8, 8 // n]


def test_any_division_into_processes_gives_the_same_bits_in_an_arena_as_well(runs):
    one, two, four = (runs[n][0][0] for n in (1, 2, 4))
    assert one["numbers"] == two["numbers"] == four["numbers"]
    assert two["buffers"] < one["buffers"] == four["buffers"]


# What is given to process 1 alone, and refused: before training, or before the first step.
DIFFERENT = """
import json
import jax, numpy as np, optax
import helpers, zero2jax

me = zero2jax.init_distributed(initialization_timeout_s=120).process_index
callback = lambda p, b: (jax.debug.callback(lambda: None), helpers.mean_loss(p, b))[1]
scaled = lambda p, b: helpers.mean_loss(p, b) * (1.0 + me)
found = {}
for name, settings, seed, key in (
    ("alike", {"loss_fn": callback}, 0, None),
    ("seed", {"seed": me}, 0, None),
    ("clip", {"clip_norm": 1.0 + me, "stage": 2 - me}, 0, None),
    ("precision", {"precision": zero2jax.Precision((np.float32, "bfloat16")[me])}, 0, None),
    ("trainable", {"trainable": lambda path, leaf: me == 0 or "embed" not in path}, 0, None),
    ("values", {}, me, None),
    ("key", {}, 0, jax.random.key(me)),
    ("rate", {"tx": optax.sgd(0.1 * (1 + me))}, 0, None),
    ("loss", {"loss_fn": scaled}, 0, None),
):
    engine = helpers.make_engine(2, **settings)
    try:
        if key is None:
            state = engine.init(helpers.make_params(seed))
        else:
            state = engine.init(lambda key: {"w": jax.random.normal(key, (4, 4))}, key)
        engine.step(state, helpers.make_batch())
        found[name] = ""
    except ValueError as error:
        found[name] = str(error)
mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
alone = zero2jax.Engine(helpers.mean_loss, optax.sgd(0.1 + me), mesh, seed=me)  # its own on each process
alone.step(alone.init(helpers.make_params(me)), helpers.make_batch())
print(json.dumps(found), flush=True)
"""


def test_processes_with_other_settings_parameters_or_programs_are_refused_by_name(tmp_path):
    found = results(launch(write_program(tmp_path, DIFFERENT), processes=2))
    assert sorted(found) == [0, 1]
    for (refusals,) in found.values():
        assert refusals.pop("alike") == ""
        assert all("over 2 processes: process 1 (host " in text for text in refusals.values()), refusals
        said = {name: text.split(" over 2")[0] for name, text in refusals.items()}
        assert said == {
            "seed": "comparing seed",
            "clip": "comparing stage",
            "precision": "comparing precision",
            "trainable": "comparing names, shapes, dtypes and trainable of the parameters",
            "values": "comparing values of the parameters",
            "key": "comparing values of the parameters",
            "rate": "comparing the step's program (loss function, optimizer, learning rate)",
            "loss": "comparing the step's program (loss function, optimizer, learning rate)",
        }
        assert "comparing clip_norm" in refusals["clip"]


# Process 1 dies after a step that has been saved; what is left begins anew from there.
RESUMED = """
import json, os, signal, sys
import jax, numpy as np
import helpers, zero2jax

startup = zero2jax.init_distributed(initialization_timeout_s=120)
engine = helpers.make_engine(jax.device_count(), stage=2 if startup.num_restarts else 3)
params = jax.tree.map(np.asarray, helpers.make_params())
with zero2jax.Checkpointer(sys.argv[1], engine) as checkpointer:
    if checkpointer.latest_step() is None:
        state = engine.init(params)
    else:
        engine.abstract_state(params)
        state, extra = checkpointer.restore()
    first, losses = int(state.step) + 1, []
    for step, batch in enumerate(helpers.make_batches(5)[first - 1 :], first):
        state, metrics = engine.step(state, batch)
        losses.append(float(metrics["loss"]))
        checkpointer.save(step, state)
        if step == 3 and startup.num_restarts == 0:
            checkpointer.wait()
            if startup.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({"first": first, "processes": startup.num_processes, "losses": losses}), flush=True)
"""


def test_those_left_after_a_kill_continue_from_the_last_checkpoint(tmp_path):
    program = write_program(tmp_path, RESUMED)
    done = launch(program, tmp_path / "checkpoints", devices=2, options=["--max-restarts", "1"])
    (found,) = results(done)[0]
    assert (found["first"], found["processes"]) == (4, 1)
    _, losses, _ = oracle(mean_loss, optax.adam(1e-2), make_params(), make_batches(5))
    # fp32 sums over two devices instead of one, as in test_step
    np.testing.assert_allclose(found["losses"], losses[3:], rtol=5e-6)
    assert "process 1 failed first (SIGKILL)" in done.stderr


def test_the_example_runs_under_the_launcher_and_its_first_process_writes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 460)
    out = tmp_path / "out"
    arguments = ["--steps", 2, "--text", text, "--out", out]
    done = launch(EXAMPLE, *arguments, options=["--logs", str(tmp_path / "logs")])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert len(rows[1]["own_s"]) == 2
    assert rows[1]["slowest_process"] == int(rows[1]["own_s"][0] < rows[1]["own_s"][1])
    report = json.loads((out / "report.json").read_text())
    assert report["mesh"] == {"data": 2}
    assert report["held_out_loss"] < report["held_out_loss_before"]
    assert "held-out loss" in (tmp_path / "logs" / "process0.log").read_text()
    quiet = (tmp_path / "logs" / "process1.log").read_text().splitlines()
    assert not [line for line in quiet if not line.startswith(("[Gloo]", "WARNING: All log", "I0000"))]
