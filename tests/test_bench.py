"""`make bench`: every row is there or named as absent, and they train alike."""

import json
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent / "benchmarks"


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import bench

    with jax.numpy_rank_promotion("allow"):  # the model is written as most are
        yield bench


def test_the_quick_table_has_every_row_and_all_lose_alike(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "DOCS", tmp_path)
    page = tmp_path / "benchmarks.md"
    page.write_text(
        "<!-- make bench: table -->\n<!-- end -->\nkept\n<!-- make bench: growth -->\n<!-- end -->\nkept\n"
    )
    bench.main(["--quick", "--docs", "--out", str(tmp_path)])
    first = page.read_text()
    bench.main(["--quick", "--parts", "--docs", "--out", str(tmp_path)])  # of what is there
    assert page.read_text() == first
    assert first.count("\nkept\n") == 2
    assert bench.sections(json.loads((tmp_path / "bench.json").read_text()))["table"] in first
    results = json.loads((tmp_path / "bench.json").read_text())
    rows, absent = results["table"]["rows"], results["table"]["absent"]
    names = {*bench.programs.PROGRAMS, *bench.peers.KINDS}
    assert rows.keys() | absent.keys() == names
    assert not rows.keys() & absent.keys()
    assert rows.keys() >= {"constraints in the model", "zero2jax stage 2", "zero2jax stage 3"}
    plain = rows[bench.programs.PLAIN]["losses"]
    for row in rows.values():
        assert row["losses"] == pytest.approx(plain, rel=1e-5)
        assert row["peak_bytes"] > 0
        assert row["sent_bytes"] > 0
    assert (
        rows["zero2jax stage 3"]["rest_bytes"] < 0.6 * rows[bench.programs.PLAIN]["rest_bytes"]
    )  # two devices
    text = (tmp_path / "table.md").read_text()
    assert all(f"| {name} |" in text for name in rows)
    assert all(f"Absent: {name}: {why}." in text for name, why in absent.items())
    assert results["growth"]["axes"].keys() == {"leaves"}
    assert (tmp_path / "growth_leaves.png").stat().st_size < 60_000


def test_a_row_that_trains_otherwise_stops_the_table(bench):
    rows = {bench.programs.PLAIN: {"losses": [3.0, 2.0]}, "another": {"losses": [3.0, 2.0001]}}
    with pytest.raises(bench.measure.LossesDiffer, match=r"losses of 'another' are .* No table"):
        bench.measure.check_losses(rows)
