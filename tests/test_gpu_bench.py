"""`tests/benchmarks/gpu.py` runs to its end without a GPU, and says of every part what became of it."""

import dataclasses
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import gpu

    return gpu


def test_all_parts_run_to_the_end_and_write_what_they_found(gpu, tmp_path, monkeypatch):
    """In this process, and what differs by its name or by settings of GPUs alone is run once."""
    import gpu_case

    known, ran = {}, gpu.Bench._run

    def run(bench, command, timeout_s):
        if command[1] != str(gpu.CASE):
            return {"card": "cpu"} if "card" in command[-1] else {}
        case = gpu_case.Case(**json.loads(command[-1]) | {"preset": "tiny", "memory": {}, "options": None})
        if case.changes["num_layers"] != small["num_layers"]:  # as many layers as fit
            case = dataclasses.replace(case, changes=small, steps=3, batch_size=2, offload=None)
        key = json.dumps(dataclasses.asdict(case), sort_keys=True)
        if key not in known:
            known[key] = ran(bench, command, 60) if not known else gpu_case.measured(case)
        return known[key]

    monkeypatch.setattr(gpu.Bench, "_run", run)
    small = {"num_layers": 2, "hidden": 8, "num_heads": 1, "context": 7, "vocab": 16}
    monkeypatch.setattr(gpu, "TINY", small)  # of four lengths an eighth apart, all are 7
    results = gpu.main(["--tiny", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "gpu.json").read_text()) == results
    assert (tmp_path / "gpu.png").exists()
    assert results.keys() == {"environment", *gpu.GPT2, "offload", "settings", "fragmentation", "largest"}
    cases = {f"{part}, {name}": case for part, found in results.items() for name, case in found.items()}
    of_cases = [case for case in cases.values() if isinstance(case, dict)]
    assert not any(case.keys() & {"failed", "refused", "skipped"} for case in of_cases)
    assert len(list(gpu.rows(results))) == 26
    plain = results["small"]["plain"]["losses"]
    for stage in range(4):
        assert results["small"][f"stage {stage}"]["losses"] == pytest.approx(plain, rel=1e-2)  # bf16
    assert all(case <= 1e-5 for name, case in cases.items() if name.endswith("losses apart"))
    assert results["largest"]["all on the device, layers"]["layers"] > 1


def test_what_fails_or_finds_no_time_left_says_so_and_the_next_goes_on(gpu, tmp_path):
    bench = gpu.Bench(tmp_path, end_s=0.0, is_tiny=True)
    gpu.fragmentation(bench)
    gpu.draw(bench)
    assert {case["skipped"] for case in bench.results["fragmentation"].values()} == {"no time was left"}
    failed = bench._run([gpu.sys.executable, "-c", "raise SystemExit('no card')"], 30)
    assert failed == {"failed": "ended with 1: no card\n"}
