"""The engine in several real processes over gloo: the same numbers in each, and for any division into processes."""

import pytest
from processes import launch, results, write_program

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
