"""What offloading makes of an engine: its layout, and its functions. On shapes; nothing is placed."""

import dataclasses

from zero2jax.offload.auto_ratio import ratio_that_fits
from zero2jax.offload.delayed import Delayed
from zero2jax.offload.disk_offloaded import DiskOffloaded
from zero2jax.offload.offloaded import Offloaded
from zero2jax.offload.residents import with_residents
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.compiled import Compiled, CompilerOptions
from zero2jax.zero.state import Layout
from zero2jax.zero.step import StepProgram


def offloaded_layout(program: StepProgram, settings: OffloadSettings) -> Layout:
    """The program's layout, with what stays on the devices.

    Raises:
      ValueError: as `with_residents`; no ratio fits.
    """
    ratio = settings.ratio
    if isinstance(ratio, str):
        assert settings.device_bytes is not None
        num_copies = 1 if settings.delay_after is None else 2
        ratio = ratio_that_fits(program, settings.device_bytes, num_copies)
    layout = with_residents(program, ratio)
    return dataclasses.replace(layout, on_disk=settings.nvme_path is not None)


def functions_of(
    program: StepProgram, options: CompilerOptions, settings: OffloadSettings | None
) -> Compiled:
    """The functions of an engine that offloads as its settings say, or not at all."""
    if settings is None:
        return Compiled(program, options)
    kind = Offloaded if settings.delay_after is None else Delayed
    if settings.nvme_path is not None:
        kind = DiskOffloaded
    return kind(program, options, settings)
