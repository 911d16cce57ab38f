"""`zero2jax plan`: from words on a command line to a program, a mesh and a target. Sets up jax before it starts.

Planning for anything but the devices here keeps jax on the CPU, where it asks for no GPU, and simulates as many CPU
devices as the axes need for target `cpu`.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from zero2jax.base.checks import is_whole
from zero2jax.base.mesh import DATA_AXIS, REPLICA_AXIS
from zero2jax.base.names import nearest
from zero2jax.cli.usage import UsageError
from zero2jax.config.reading import DEFAULT_CONFIG, Source, read_config, spellings
from zero2jax.planning.planner import PlanSettings, Program, compile_plan, lower_plan, prepare_plan
from zero2jax.planning.policy_table import POLICIES, tabulate_policies
from zero2jax.planning.search import MICROBATCHES, PROGRAM, STAGE, config_with, search_plans
from zero2jax.planning.targets import DEVICES_PER_HOST, MEMORY_FRACTION, get_target, target_mesh

_MOST_DEVICES = 1 << 16  # each is an object here


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """What to compile for.

    Attributes:
        axes: Mesh axes, data=8 or data=25,model=16.
        target: v100-32gb, a100-80gb, h100-80gb, h200, b200, local or cpu.
        devices_per_host: Devices of one host.
        memory_fraction: Part of a card that the program may use (XLA_CLIENT_MEM_FRACTION).
    """

    axes: str
    target: str = "local"
    devices_per_host: int = DEVICES_PER_HOST
    memory_fraction: float = MEMORY_FRACTION


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """How fast the links are, instead of the target's figures.

    Attributes:
        in_node_gb_per_s: What one device can send to others of its host.
        across_gb_per_s: What one device can send to other hosts.
    """

    in_node_gb_per_s: float | None = None
    across_gb_per_s: float | None = None


def plan_settings(on: TargetOptions, links: LinkOptions | None = None) -> PlanSettings:
    """The settings that the options say.

    Raises:
      UsageError: an option cannot be read, or says what no target or mesh can be.
    """
    links = links or LinkOptions()
    axes = parse_axes(on.axes)
    try:
        in_node, across = (
            None if x is None else 1e9 * x for x in (links.in_node_gb_per_s, links.across_gb_per_s)
        )
        target = get_target(on.target).with_rates(in_node, across)
        return PlanSettings(axes, target, on.devices_per_host, on.memory_fraction)
    except ValueError as error:
        raise UsageError(str(error)) from error


def parse_axes(axes: str) -> dict[str, int]:
    """`"data=4,model=2"` as `{"data": 4, "model": 2}`."""
    if not re.fullmatch(r"\w+=\d+(,\w+=\d+)*", axes):
        raise UsageError(
            f"reading --axes {axes!r}: write NAME=SIZE, separated by commas, as in data=8 or data=4,model=2."
        )
    return _once(
        "--axes", ((name, int(size)) for name, size in (axis.split("=") for axis in axes.split(",")))
    )


def parse_vary(vary: Sequence[str]) -> dict[str, list[Any]]:
    """`["zero_optimization.stage=2,3"]` as `{"zero_optimization.stage": [2, 3]}`; values are read as JSON, or text."""
    pairs = (
        _key_and_value("--vary", item, "KEY=VALUE,VALUE", "gradient_accumulation_steps=1,2,4")
        for item in vary
    )
    return _once("--vary", ((name, [_json_or_text(x) for x in values.split(",")]) for name, values in pairs))


def parse_set(items: Sequence[str]) -> dict[str, Any]:
    """`["program.batch=32"]` as `{"program.batch": 32}`; a value is read as JSON, or is text."""
    pairs = (_key_and_value("--set", item, "KEY=VALUE", "program.batch=32") for item in items)
    return _once("--set", ((name, _json_or_text(value)) for name, value in pairs))


def _key_and_value(option: str, item: str, form: str, example: str) -> tuple[str, str]:
    """The two sides of the equals sign; the left one is a key path that there is."""
    name, equals, value = item.partition("=")
    if not equals or not name or not value:
        raise UsageError(
            f"reading {option} {item!r}: write {form} with a key path of the configuration or program.NAME, as in "
            f"{example}."
        )
    if not name.startswith(PROGRAM) and name not in (known := spellings()):
        near = nearest(name, known) or nearest(f"{PROGRAM}{name}", known)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"reading {option} {item!r}: the configuration has no key {name!r}.{hint} An argument of the program is "
            f"written {PROGRAM}NAME."
        )
    return name, value


def _once(option: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict; a name that comes twice would lose a value."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise UsageError(f"reading {option}: {name!r} is given twice. Give one value.")
        values[name] = value
    return values


def set_up_jax(target: str, axes: Mapping[str, int]) -> None:
    """Keep jax on the CPU for targets that are not here; before anything else uses jax."""
    if target == "local":
        return
    if jax.config.jax_platforms != "cpu":  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")
    num_devices = math.prod(axes.values())
    if num_devices > _MOST_DEVICES:
        raise UsageError(
            f"planning for {num_devices} devices: at most {_MOST_DEVICES} are planned for. Lower --axes."
        )
    simulated = jax.config.jax_num_cpu_devices or 0  # type: ignore[attr-defined]
    if target == "cpu" and simulated < num_devices:
        jax.config.update("jax_num_cpu_devices", num_devices)


def load_function(name: str) -> Callable[..., Program]:
    """The function that `MODULE:FUNCTION` names; modules of the current directory count, too.

    Raises:
      UsageError: no such module, or no such function in it; the name has another form.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise UsageError(
            f"reading {name!r}: write MODULE:FUNCTION, a function without arguments that returns a zero2jax.Program, "
            f"as in examples.gpt.program:program."
        )
    as_module = module_name.removesuffix(".py").replace(os.sep, ".").strip(".")
    if module_name != as_module or "" in module_name.split("."):
        raise UsageError(
            f"reading {name!r}: {module_name!r} is no module's name. Write it as after `import`, without .py and with "
            f"dots for slashes, as in {as_module or 'examples.gpt.program'}:{function_name}."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(  # the module is there; something that it imports is not
                f"importing {module_name!r}: {error}. Install it where you plan (the examples of a clone of zero2jax: "
                f"pip install '.[example,plan]')."
            ) from None
        raise UsageError(
            f"reading {name!r}: there is no module {error.name!r} here or on PYTHONPATH. Run from the directory that "
            f"it lies in, or install it."
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n, x in vars(module).items() if inspect.isfunction(x) and not n.startswith("_")]
        near = nearest(function_name, names, count=3) or sorted(names)[:6]
        raise UsageError(
            f"reading {name!r}: module {module_name!r} has no function {function_name!r}. It has {', '.join(near)}."
        )
    return function  # type: ignore[no-any-return]


def call_program(function: Callable[..., Program], **arguments: Any) -> Program:
    """The program that a function returns, checked."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in arguments if name not in parameters and not takes_any]
    if unknown:
        raise UsageError(
            f"setting program.{unknown[0]}: the function {function.__name__!r} has no argument of that name. It has "
            f"{', '.join(parameters) or 'none'}."
        )
    missing = [
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and name not in arguments
    ]
    if missing:
        raise UsageError(
            f"calling {function.__name__!r}: its arguments {', '.join(missing)} have no value. Give each one, --set "
            f"program.{missing[0]}=VALUE, or a default."
        )
    try:
        program = function(**arguments)
        if isinstance(program, Program):
            _check_dims(program)
    except (TypeError, ValueError) as error:
        if not arguments:
            raise
        given = ", ".join(f"{name} = {value!r}" for name, value in arguments.items())
        raise UsageError(
            f"calling {function.__name__!r} with {given}: {type(error).__name__}: {error}. Give values that it takes."
        ) from error
    if not isinstance(program, Program):
        raise UsageError(
            f"calling {function.__name__!r}: it returned a {type(program).__name__}, and must return a "
            f"zero2jax.Program(loss_fn, params, batch, tx), shapes only."
        )
    return program


def _check_dims(program: Program) -> None:
    """Raise a TypeError for shapes that jax takes and nothing can be made of: a dim given as text, say."""
    for x in jax.tree.leaves((program.params, program.batch)):
        if not all(is_whole(size) for size in getattr(x, "shape", ())):
            raise TypeError(f"it returned a shape {x.shape}, whose sizes are not all whole numbers")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a command line chooses to plan: a function, a configuration, and values that replace some of either.

    Attributes:
      function: makes the program.
      config: as given; None for the default.
      values: by key path of the configuration, or by `program.NAME`.
    """

    function: Callable[..., Program]
    config: Source | None
    values: Mapping[str, Any]

    def program(self, **arguments: Any) -> Program:
        """The program, with its own arguments before those chosen; the configuration's optimizer replaces its tx."""
        chosen = {k.removeprefix(PROGRAM): v for k, v in self.values.items() if k.startswith(PROGRAM)}
        program = call_program(self.function, **chosen | arguments)
        return program.for_config(self.config_for(program))

    def config_for(self, program: Program) -> Source | None:
        """The configuration with the values chosen, for a program whose batch it must fit."""
        if all(key.startswith(PROGRAM) for key in self.values):
            return self.config
        source = read_config(DEFAULT_CONFIG if self.config is None else self.config).source
        return config_with(source, self.values, program)


def check_devices(settings: PlanSettings) -> None:
    """Raise a UsageError if the target has no such devices."""
    try:
        target_mesh(settings.target, settings.axes, settings.devices_per_host)
    except ValueError as error:
        raise UsageError(str(error)) from error


def run_plan(chosen: Chosen, settings: PlanSettings, *, as_json: bool, png: str | None) -> bool:
    """Plan one program, and print the report; the picture goes to `png`. Whether it fits, as far as that is known."""
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png needs matplotlib, which is not installed: pip install 'zero2jax[plan]'.")
    if png is not None and not os.access(Path(png).parent, os.W_OK):
        raise UsageError(
            f"--png {png}: the folder {str(Path(png).parent)!r} is not there, or cannot be written to."
        )
    program = chosen.program()
    try:
        prepared = prepare_plan(program, chosen.config_for(program), settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with Console(stderr=True).status(f"compiling for {settings.target.name}"):
        report = compile_plan(lower_plan(prepared))
    print(json.dumps(report.as_dict(), indent=2) if as_json else report)
    if png is not None:
        report.save_picture(png)
        print(f"wrote {png}", file=sys.stderr)
    return report.fits is not False


@contextlib.contextmanager
def _progress(settings: PlanSettings) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; yields what is called with (plans done, plans in all)."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"compiling for {settings.target.name}", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def run_search(
    chosen: Chosen,
    settings: PlanSettings,
    vary: Mapping[str, Sequence[Any]],
    *,
    as_json: bool,
    write: str | None = None,
) -> bool:
    """Plan every combination of settings, and print the frontier and the cheapest that fits; its file goes to `write`.

    Whether one fits, as far as that is known; with `write`, whether there is a cheapest one to write.
    """
    if write is not None and not os.access(Path(write).parent, os.W_OK):
        raise UsageError(
            f"--write {write}: the folder {str(Path(write).parent)!r} is not there, or cannot be written to."
        )
    program = chosen.program()
    fixed = [name for name in vary if name in chosen.values]
    if fixed:
        raise UsageError(
            f"--set {fixed[0]} and --vary {fixed[0]}: a value is either set or varied. Drop one."
        )
    bounds = {
        name: values for name, values in _bounds(program, settings).items() if name not in chosen.values
    }
    with _progress(settings) as advance:
        config = chosen.config_for(program)
        search = search_plans(chosen.program, config, settings, bounds | dict(vary), advance=advance)
    print(json.dumps(search.as_dict(), indent=2) if as_json else search)
    if write is not None and search.cheapest is not None:
        _write_config(write, chosen, search.cheapest.varied)
    fits = any(c.report is not None and c.report.fits is not False for c in search.candidates)
    return fits if write is None else search.cheapest is not None


def _write_config(path: str, chosen: Chosen, varied: Mapping[str, Any]) -> None:
    """The configuration with the values of a setting and its batch, as JSON; the program's arguments are said."""
    arguments = {k.removeprefix(PROGRAM): v for k, v in varied.items() if k.startswith(PROGRAM)}
    program = chosen.program(**arguments)
    config = chosen.config_for(program)
    source = read_config(DEFAULT_CONFIG if config is None else config).source
    values = {MICROBATCHES: source.get(MICROBATCHES, 1), **varied}
    Path(path).write_text(json.dumps(config_with(source, values, program), indent=2) + "\n")
    of_program = {k: v for k, v in {**chosen.values, **varied}.items() if k.startswith(PROGRAM)}
    besides = ", ".join(f"{name} = {value}" for name, value in of_program.items())
    print(f"wrote {path}" + (f"; it goes with {besides}" if besides else ""), file=sys.stderr)


def run_activations(
    chosen: Chosen,
    settings: PlanSettings,
    policies: Sequence[str],
    *,
    as_json: bool,
) -> None:
    """Compile the program under each remat policy, and print the table."""
    config = chosen.config_for(chosen.program())
    with _progress(settings) as advance:
        table = tabulate_policies(chosen.program, config, settings, policies or POLICIES, advance=advance)
    print(json.dumps(table.as_dict(), indent=2) if as_json else table)


def _bounds(program: Program, settings: PlanSettings) -> dict[str, Sequence[Any]]:
    """What is varied unless said otherwise: stages 1 to 3, and 1, 2 or 4 microbatches where the batch divides."""
    num_batch_shards = settings.axes.get(DATA_AXIS, 1) * settings.axes.get(REPLICA_AXIS, 1)
    per_device = program.batch_size // num_batch_shards
    return {STAGE: [1, 2, 3], MICROBATCHES: [k for k in (1, 2, 4) if per_device % k == 0]}


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value
