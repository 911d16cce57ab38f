"""The engine in several real processes over gloo: the same numbers in each, and for any division into processes."""

import json

import pytest
from processes import TESTS, launch, results, write_program

EXAMPLE = TESTS.parent / "examples" / "gpt" / "train.py"

# Three steps of clipping and Adam on leaves that do not divide, at stage 3, which communicates in every way there is.
STEPS = """
import hashlib, json
import jax, numpy as np
import helpers, zero2jax

startup = zero2jax.init_distributed(initialization_timeout_s=120)
engine = helpers.make_engine(jax.device_count(), stage=3, loss_fn=helpers.weighted_loss, clip_norm=0.5)
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
    "processes": [startup.num_processes, jax.device_count(), jax.local_device_count()],
    "numbers": [steps, float(loss).hex(), int(aux["examples"]), hashlib.sha256(params).hexdigest()],
}
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    program = write_program(tmp_path_factory.mktemp("engine"), STEPS)
    return {n: results(launch(program, processes=n, devices=4 // n)) for n in (1, 2, 4)}


def test_every_process_sees_the_same_numbers(runs):
    for n, found in runs.items():
        assert sorted(found) == list(range(n))
        assert all(other == found[0] for other in found.values())
        assert found[0][0]["processes"] == [n, 4, 4 // n]


def test_any_division_into_processes_gives_the_same_bits(runs):
    one, two, four = (runs[n][0][0]["numbers"] for n in (1, 2, 4))
    assert one == two == four


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
