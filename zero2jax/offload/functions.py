"""What offloading makes of an engine: its layout, and its functions. On shapes; nothing is placed."""

from zero2jax.offload.offloaded import Offloaded
from zero2jax.offload.residents import with_residents
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.compiled import Compiled, CompilerOptions
from zero2jax.zero.state import Layout
from zero2jax.zero.step import StepProgram


def offloaded_layout(program: StepProgram, settings: OffloadSettings) -> Layout:
    """The program's layout, with what stays on the devices.

    Raises:
      ValueError: as `with_residents`.
    """
    return with_residents(program, settings.ratio)


def functions_of(
    program: StepProgram, options: CompilerOptions, settings: OffloadSettings | None
) -> Compiled:
    """The functions of an engine that offloads as its settings say, or not at all."""
    return Compiled(program, options) if settings is None else Offloaded(program, options, settings)
