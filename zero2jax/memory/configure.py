"""How the GPU client allocates memory. The one module that writes the environment, before a backend starts.

jaxlib reads these variables when it makes the client of a GPU, once per process; other backends have none of them:

    preallocate            XLA_PYTHON_CLIENT_PREALLOCATE              take the pool at the start, or as it is needed
    fraction               XLA_CLIENT_MEM_FRACTION                    size of the pool, of the device's memory
    allocator              XLA_PYTHON_CLIENT_ALLOCATOR                bfc (the default), cuda_async, vmm, platform, ...
    collective_memory_mb   XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB   a second pool, for buffers of collectives

Which of them exist, and which allocators, the installed jaxlib is asked: it turns the variables into options of its
client, and what it makes of them is compared with what was meant.
"""

import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any

import jax

from zero2jax.base.checks import is_whole
from zero2jax.base.versions import installed_version

# The older name of a fraction: jaxlib still reads it, and stops where both are set.
_OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FALSE = ("false", "False", "0")
_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """See `configure_memory`; None leaves a setting to the environment, and to jaxlib where that is silent.

    Raises:
      ValueError: a value is out of range, or two contradict each other.
    """

    preallocate: bool | None = None
    fraction: float | None = None
    allocator: str | None = None
    collective_memory_mb: int | None = None

    def __post_init__(self) -> None:
        doing = "configuring the memory of GPUs"
        if self.preallocate is not None and not isinstance(self.preallocate, bool):
            raise ValueError(f"{doing}: preallocate is {self.preallocate!r}; it is True or False.")
        fraction = self.fraction
        number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if fraction is not None and (not number or not 0 < fraction <= 1):
            raise ValueError(
                f"{doing}: fraction is {fraction!r}; it lies above 0 and at most at 1, the part of a device's memory "
                f"that the pool has. 0.9 leaves room for the CUDA context, NCCL and cuBLAS."
            )
        if self.allocator is not None and not isinstance(self.allocator, str):
            raise ValueError(f"{doing}: allocator is {self.allocator!r}; it is a name, 'cuda_async' say.")
        size = self.collective_memory_mb
        if size is not None and (not is_whole(size) or size < 0):
            raise ValueError(
                f"{doing}: collective_memory_mb is {size!r}; it is a whole number of MiB, 0 for none."
            )
        pointless = [
            name for name in ("preallocate", "fraction", "collective_memory_mb") if getattr(self, name)
        ]
        if self.allocator == "platform" and pointless:
            raise ValueError(
                f"{doing}: {pointless[0]} is {getattr(self, pointless[0])!r} and the allocator is 'platform', which "
                f"asks the driver for each buffer and has no pool. Choose another one, or leave {pointless[0]} out."
            )

    @classmethod
    def of(cls, env: Mapping[str, str]) -> "MemorySettings":
        """What the variables of an environment say.

        Raises:
          ValueError: a variable has a value that jaxlib cannot use, or contradicts another.
        """
        values: dict[str, Any] = {}
        for name, variable in variables_of(env).items():
            try:
                values[name] = _READERS[name](env[variable])
            except ValueError:
                raise ValueError(
                    f"reading the environment: {variable} is {env[variable]!r}, expected a number. Correct or unset it."
                ) from None
        return cls(**values)

    @property
    def given(self) -> dict[str, Any]:
        """The settings that are not left open."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}


_VARIABLES = {
    "preallocate": "XLA_PYTHON_CLIENT_PREALLOCATE",
    "fraction": "XLA_CLIENT_MEM_FRACTION",
    "allocator": "XLA_PYTHON_CLIENT_ALLOCATOR",
    "collective_memory_mb": "XLA_PYTHON_CLIENT_COLLECTIVE_MEM_SIZE_MB",
}
_READERS: dict[str, Any] = {
    "preallocate": lambda text: text not in _FALSE,
    "fraction": float,
    "allocator": str.lower,
    "collective_memory_mb": int,
}


def configure_memory(
    *,
    preallocate: bool | None = None,
    fraction: float | None = None,
    allocator: str | None = None,
    collective_memory_mb: int | None = None,
) -> dict[str, str]:
    """Decide how the GPU client of this process allocates memory. Call it before anything uses a device.

    In a JSON these are the keys of the block `memory`, which `initialize` applies where it makes the mesh itself; for
    several processes `zero2jax launch` has an option for each.

    Args:
      preallocate: take the pool at the start (jaxlib's default), or let it grow; growing pools fragment.
      fraction: part of the device's memory that the pool has, above 0 and at most 1; 0.75 by default.
      allocator: "bfc", "cuda_async", "vmm" or "platform", as far as the installed jaxlib has it.
      collective_memory_mb: MiB of a second pool, in which collectives on user buffers put theirs; 0 by default.

    Returns:
      The variables that were written; without those that the environment had already, with the same meaning.

    Raises:
      ValueError: a value is out of range, contradicts another one or the environment, or jaxlib does not know it.
      RuntimeError: a device has been used before, and the environment said otherwise then.

    Example:
      >>> configure_memory()
      {}
    """
    settings = MemorySettings(
        preallocate=preallocate,
        fraction=fraction,
        allocator=allocator if not isinstance(allocator, str) else allocator.lower(),
        collective_memory_mb=collective_memory_mb,
    )
    return write_memory(settings)


def write_memory(settings: MemorySettings, *, for_children: bool = False) -> dict[str, str]:
    """`configure_memory` of a record; for the processes that this one starts, whatever it has used itself."""
    wanted = missing_variables(settings, os.environ)
    if wanted and not for_children and backend_started():
        words = ", ".join(f"{name}={value!r}" for name, value in settings.given.items())
        raise RuntimeError(
            f"configuring the memory of GPUs by {words}: a device has been used before, and the client that allocates "
            f"was made then. Call zero2jax.configure_memory first, before make_mesh and jax.devices, or set "
            f"{', '.join(wanted)} before the program starts (zero2jax launch has options for them)."
        )
    os.environ.update(wanted)
    try:
        _check_understood(settings)
    except ValueError:
        for name in wanted:
            del os.environ[name]
        raise
    return wanted


def missing_variables(settings: MemorySettings, env: Mapping[str, str]) -> dict[str, str]:
    """The variables that say what `settings` do, without those that an environment has with the same meaning.

    Raises:
      ValueError: the environment says something else, or what it says contradicts the settings.
    """
    there, names = MemorySettings.of(env), variables_of(env)
    for name, value in settings.given.items():
        known = getattr(there, name)
        if known is not None and known != value:
            raise ValueError(
                f"configuring the memory of GPUs: {name} is {value!r}, and the environment says {names[name]}="
                f"{env[names[name]]}. Unset the variable, or leave {name} out."
            )
    MemorySettings(**{**there.given, **settings.given})
    return {_VARIABLES[name]: _text(x) for name, x in settings.given.items() if name not in names}


def variables_of(env: Mapping[str, str]) -> dict[str, str]:
    """The variable that an environment has for each setting that it has one for.

    Raises:
      ValueError: both names of a fraction are set, where jaxlib stops.
    """
    names = {name: variable for name, variable in _VARIABLES.items() if env.get(variable)}
    if env.get(_OLD_FRACTION):
        if "fraction" in names:
            raise ValueError(
                f"reading the environment: {names['fraction']} and its older name {_OLD_FRACTION} are both set, and "
                f"jaxlib stops there. Unset the latter."
            )
        names["fraction"] = _OLD_FRACTION
    return names


def backend_started() -> bool:
    """Whether a backend runs in this process; starts none.

    The number of simulated CPU devices can be set before and not after, and jax says so.
    """
    number = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", 3 if number == 2 else 2)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


def client_options() -> dict[str, Any] | None:
    """What the installed jaxlib makes of the environment, for the client of a GPU; None where it does not say.

    Raises:
      ValueError: it does not take a variable.
    """
    # no part of jax's public interface, and asked for by name: a jaxlib without it is taken at its variables
    client = importlib.import_module("jaxlib.xla_client")
    make = getattr(client, "generate_pjrt_gpu_plugin_options", None)
    return None if make is None else dict(make())


def _check_understood(settings: MemorySettings) -> None:
    version = installed_version("jaxlib")
    try:
        options = client_options()
    except ValueError as error:
        raise ValueError(
            f"configuring the memory of GPUs: jaxlib {version} refuses this: {error} Choose what it has."
        ) from error
    if options is None:
        return
    size = settings.collective_memory_mb
    meant = {
        "preallocate": settings.preallocate,
        "memory_fraction": settings.fraction,
        "allocator": settings.allocator,
        "collective_memory_size": None if size is None else size * _MIB,
    }
    for (name, variable), (option, value) in zip(_VARIABLES.items(), meant.items(), strict=True):
        if value is not None and options.get(option) != value:
            raise ValueError(
                f"configuring the memory of GPUs: jaxlib {version} does not read {variable}, so that {name} would have "
                f"no effect. Leave it out, or use another jaxlib."
            )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
