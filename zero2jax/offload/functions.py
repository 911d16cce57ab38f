"""What offloading makes of an engine: its layout, and its functions. On shapes; nothing is placed."""

import dataclasses

from zero2jax.offload.auto_ratio import ratio_that_fits
from zero2jax.offload.delayed import Delayed
from zero2jax.offload.disk_offloaded import DiskOffloaded
from zero2jax.offload.offloaded import Offloaded
from zero2jax.offload.residents import part_split, update_split, with_residents
from zero2jax.offload.settings import OffloadSettings
from zero2jax.offload.streamed import Streamed
from zero2jax.zero.compiled import Compiled, CompilerOptions
from zero2jax.zero.state import Layout
from zero2jax.zero.step import StepProgram


def offloaded_layout(program: StepProgram, settings: OffloadSettings) -> Layout:
    """The program's layout: which memory holds what, and what stays on the devices.

    Raises:
      ValueError: as `update_split` and `with_residents`; no ratio fits.
    """
    layout = dataclasses.replace(
        program.layout,
        on_disk=settings.nvme_path is not None,
        pinned_state=settings.update_on == "device",
        pinned_params=settings.params,
    )
    program, ratio = dataclasses.replace(program, layout=layout), settings.ratio
    split = update_split(program)
    if isinstance(ratio, str):
        assert settings.device_bytes is not None
        num_copies = 0 if settings.params else 1 if settings.delay_after is None else 2
        ratio = ratio_that_fits(program, part_split(split, ratio), settings.device_bytes, num_copies)
    return with_residents(program, split, ratio)


def functions_of(
    program: StepProgram, options: CompilerOptions, settings: OffloadSettings | None
) -> Compiled:
    """The functions of an engine that offloads as its settings say, or not at all."""
    if settings is None:
        return Compiled(program, options)
    kind = Offloaded if settings.delay_after is None else Delayed
    if settings.update_on == "device":
        kind = Streamed
    elif settings.nvme_path is not None:
        kind = DiskOffloaded
    return kind(program, options, settings)
