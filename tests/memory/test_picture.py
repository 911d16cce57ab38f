"""Pictures of measured memory: written, of the right size, and refused where there is nothing to draw."""

import dataclasses
import struct

import pytest

import zero2jax
from zero2jax.memory.report import DeviceMemory, MemoryUse
from zero2jax.programs.memory import MemoryReport, MemoryRow


def test_bars_and_a_timeline_are_drawn_each_alone_and_together(tmp_path):
    row = lambda name, measured, formula: MemoryRow(
        name=name, measured_bytes=measured, formula_bytes=formula, formula="", source=""
    )
    report = MemoryReport(2, 4, (row("master", 4096, 4000), row("temporary", 9000, None), row("x", None, 7)))
    device = DeviceMemory(device="gpu:0", by_class={"master": 4096}, in_use_bytes=5000, peak_bytes=9000)
    use = MemoryUse(
        devices=(device,),
        host_by_class={},
        process_bytes=1,
        host_used_bytes=1,
        host_total_bytes=2,
        has_statistics=True,
    )
    later = dataclasses.replace(use, devices=(dataclasses.replace(device, peak_bytes=None),))
    sizes = []
    for i, drawn in enumerate(
        ({"report": report}, {"steps": [use, use]}, {"report": report, "steps": [use, later]})
    ):
        path = tmp_path / f"{i}.png"
        zero2jax.draw_memory(path, **drawn)
        header = path.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        sizes.append(struct.unpack(">II", header[16:]))
    assert set(sizes) == {(1560, 585)}
    with pytest.raises(ValueError, match=r"there is nothing to draw. Give report=engine.memory"):
        zero2jax.draw_memory(tmp_path / "none.png")
