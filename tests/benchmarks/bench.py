"""One table of zero2jax beside what one would use instead: `make bench`, 15 minutes on two idle cores.

    python tests/benchmarks/bench.py [--parts table h200 growth] [--torch-python PATH] [--out DIR] [--docs]

Writes `bench.json`, `table.md` and a picture per axis of `growth.py` into the folder; parts that are not asked for stay
as an earlier run left them there. `--docs` puts all that there is into `docs/benchmarks.md`; `--parts` may be none.

Eight simulated CPU devices train one small GPT (`gpt.py`) in fp32 from the same parameters on the same data, in every
way of `programs.py`: first their losses are compared, then their steps take turns. Torch's rows are eight processes of
`--torch-python`, an interpreter with torch and deepspeed, in the same turns. Where the extra `plan` is installed, the
same programs at 6.66e9 parameters are compiled for 8 x H200 (`aot.py`): hidden shares are read there, since simulated
devices hide nothing. What cannot be had is named below the table.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

import aot
import gpt
import growth
import measure
import peers
import programs

DOCS = Path(__file__).parents[2] / "docs"
PARTS = ("table", "h200", "growth")
MODEL = gpt.Config(num_layers=4, hidden=256, num_heads=4, context=64, vocab=256)
QUICK = gpt.Config(num_layers=1, hidden=16, num_heads=2, context=8, vocab=32, scanned=False)
QUICK_LEAVES_OUT = {
    "zero2jax stage 1": "with one microbatch it runs stage 2's program",
    **dict.fromkeys(peers.KINDS, "it takes a minute to start"),
}
NUM_STEPS = 5  # whose losses are compared


def table_rows(
    model: gpt.Config,
    devices: tuple,
    rounds: int,
    lower_rounds: int,
    torch_python: str,
    left_out: dict[str, str],
) -> tuple[dict[str, measure.Row], dict[str, str]]:
    """(rows, why each absent one is absent) of the programs here but those `left_out`; a sequence per device.

    Raises:
      measure.LossesDiffer: a row of JAX trains otherwise than the plain step.
    """
    case = programs.Case(
        loss=functools.partial(gpt.loss_fn, model),
        shapes=gpt.shapes(model),
        devices=devices,
        batch_shape=(len(devices), model.context + 1),
        layer_dims=gpt.layer_dims(model),
        hooks=gpt.Hooks,
        logical_axes=gpt.LOGICAL_AXES,
    )
    refused = {name: why for name in programs.PROGRAMS if (why := programs.refusal(name, case))}
    absent = {**refused, **left_out}
    names = [name for name in programs.PROGRAMS if name not in absent]
    measured = measure.Measured(case, names, lower_rounds)
    params = gpt.first_params(model)
    two = np.random.default_rng(1).integers(0, model.vocab, (2, *case.batch_shape)).astype(np.int32)
    batches = two[np.arange(NUM_STEPS) % 2]  # seen again, so that the losses fall
    measured.train(params, batches)
    for name, row in measured.rows.items():
        print(f"losses of {name:26} {' '.join(f'{x:.6f}' for x in row['losses'])}", flush=True)
    measure.check_losses(measured.rows)

    running = {}
    for name in [name for name in peers.KINDS if name not in absent]:
        try:
            running[name] = peer = start_peer(name, torch_python, case, model, params, batches)
            steps = [peer.step() for _ in range(NUM_STEPS)]
            row = {
                "losses": [step["loss"] for step in steps],
                "sent_bytes": steps[-1]["sent_bytes"],
                "versions": peer.versions,
            }
            print(f"losses of {name:26} {' '.join(f'{x:.6f}' for x in row['losses'])}", flush=True)
            measure.check_losses({**measured.rows, name: row})
            measured.rows[name] = row
        except (peers.Absent, measure.LossesDiffer) as error:
            absent[name] = str(error)
            if name in running:
                running.pop(name).close()
    try:
        measured.time(
            rounds, {name: lambda peer=peer: peer.step()["seconds"] for name, peer in running.items()}
        )
    finally:
        for peer in running.values():
            peer.close()
    return measured.rows, absent


def start_peer(
    name: str, python: str, case: programs.Case, model: gpt.Config, params: Any, batches: np.ndarray
) -> peers.Peer:
    """A row of torch on the same case."""
    flat = {".".join(key.key for key in path): x for path, x in jax.tree.leaves_with_path(params)}
    return peers.Peer(
        name,
        python,
        len(case.devices),
        flat,
        batches,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        batch_size=case.batch_shape[0],
        learning_rate=case.learning_rate,
        weight_decay=programs.WEIGHT_DECAY,
        clip_norm=programs.CLIP_NORM,
    )


def h200_rows() -> tuple[dict[str, measure.Row], str]:
    """(rows, why there are none or "")."""
    try:
        case = aot.make_case()
    except ValueError as error:  # the packages of the CUDA compiler are missing
        return {}, str(error)
    rows = {}
    for name, row in aot.compiled_rows(
        case, [name for name in programs.PROGRAMS if not programs.refusal(name, case)]
    ):
        rows[name] = row
        print(aot.line(name, row), flush=True)
    return rows, ""


def table(results: dict[str, Any]) -> str:
    """The one table in Markdown, and what is absent from it."""
    here, there = results["table"]["rows"], results.get("h200", {}).get("rows", {})
    spread = lambda row, what: (
        "{:.2f} ({:.2f} to {:.2f})".format(*row[f"{what}_ratio"]) if f"{what}_ratio" in row else ""
    )
    once = lambda row, what: f"{row[f'{what}_ratio'][0]:.2f}" if f"{what}_ratio" in row else ""
    mib = lambda row, what: f"{row[what] / 2**20:.1f}" if what in row else ""
    gib = lambda row, what: f"{row[what] / 2**30:.2f}" if what in row else ""
    hidden = lambda row: (
        f"{row['hidden_alone']:.0%}, {row['hidden_with_memory']:.0%}" if "hidden_alone" in row else ""
    )
    lines = [
        "| step | time / plain | trace and lower / plain | compile / plain | peak, MiB | sent, MiB | "
        "8 x H200: peak, GiB | sent, GiB | hidden |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in [*programs.PROGRAMS, *peers.KINDS]:
        if name not in here:
            continue
        row, big = here[name], there.get(name, {})
        cells = [
            name,
            spread(row, "step"),
            spread(row, "lower"),
            once(row, "compile"),
            mib(row, "peak_bytes"),
            mib(row, "sent_bytes"),
            gib(big, "peak_bytes"),
            gib(big, "sent_bytes"),
            hidden(big),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    plain = here[programs.PLAIN]
    times = [1e3 * plain["step_s"], plain["lower_s"], plain["compile_s"]]
    lines += [
        "",
        "Plain data parallel: step {:.0f} ms, trace and lower {:.2f} s, compile {:.2f} s.".format(*times),
    ]
    absent = dict(results["table"]["absent"])
    if why := results.get("h200", {}).get("absent", "this part was not run"):
        absent["8 x H200"] = why
    lines += [f"Absent: {name}: {why}." for name, why in absent.items()]
    for name, row in here.items():
        if "versions" in row:
            lines.append(f"{name}: {', '.join(f'{key} {x}' for key, x in row['versions'].items())}.")
    return "\n".join(lines)


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Markdown by part."""
    found = {}
    if "table" in results:
        found["table"] = table(results)
    if rows := results.get("h200", {}).get("rows"):
        found["h200"] = "\n".join([aot.HEADER, *(aot.line(name, row) for name, row in rows.items())])
    if "growth" in results:
        axes = results["growth"]["axes"]
        pictures = [f"![What a step costs, by {axis}]({growth.file_name(axis)})" for axis in axes]
        found["growth"] = "\n".join([*pictures, "", growth.table(axes)])
    for part in found:
        run = results[part]["environment"]
        found[part] += f"\n\n{', '.join(f'{key} {x}' for key, x in run.items())}."
    return found


def write_docs(results: dict[str, Any]) -> None:
    """Put the tables between the comments of `docs/benchmarks.md` that name them, and the pictures beside it."""
    page = DOCS / "benchmarks.md"
    text = page.read_text()
    for part, section in sections(results).items():
        begin, end = f"<!-- make bench: {part} -->\n", "<!-- end -->"
        before, _, after = text.partition(begin)
        text = f"{before}{begin}{section}\n{end}{after.partition(end)[2]}"
    page.write_text(text)
    for axis, rows in results.get("growth", {}).get("axes", {}).items():
        growth.picture(axis, rows, DOCS / growth.file_name(axis))


def environment() -> dict[str, str]:
    """What a part ran on."""
    return {name: version(name) for name in ("jax", "flax", "optax")} | {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "cores": str(os.cpu_count()),
        "load before": load(),
    }


def load() -> str:
    """Processes that want a core: other work on the machine, beside this one's."""
    return f"{os.getloadavg()[0]:.1f}"


def run(part: str, args: argparse.Namespace, earlier: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of one part, again as they grow, and its pictures; `earlier` ones are of axes not asked for."""
    if part == "table":
        devices = tuple(jax.devices()[: 2 if args.quick else 8])
        how = (QUICK, devices, 0, 0) if args.quick else (MODEL, devices, args.rounds, 5)
        rows, absent = table_rows(*how, args.torch_python, QUICK_LEAVES_OUT if args.quick else {})
        yield {"rows": rows, "absent": absent}
    elif part == "h200":
        rows, why = h200_rows()
        yield {"rows": rows, "absent": why}
    else:
        axes = dict(earlier.get("axes", {}))
        asked = growth.QUICK if args.quick else {axis: growth.AXES[axis] for axis in args.axes}
        for axis, what in asked.items():
            axes[axis] = {}
            for value, rows in growth.points(what, rounds=0 if args.quick else growth.ROUNDS):
                axes[axis][str(value)] = rows
                print(f"{axis} {value}", flush=True)
            growth.picture(axis, axes[axis], args.out / growth.file_name(axis))
            yield {"axes": axes}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--axes", nargs="+", choices=growth.AXES, default=[*growth.AXES], help="of growth")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with torch, deepspeed")
    parser.add_argument("--docs", action="store_true", help="put tables and pictures into docs/benchmarks.md")
    parser.add_argument("--quick", action="store_true", help="tiny, to see whether it works")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "bench.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    for part in PARTS:
        if part not in args.parts or (args.quick and part == "h200"):
            continue
        before = environment()
        try:
            for found in run(part, args, results.get(part, {})):
                results[part] = {"environment": before | {"load after": load()}, **found}
                file.write_text(json.dumps(results, indent=1))
        except measure.LossesDiffer as error:
            sys.exit(str(error))
    text = "\n\n".join(sections(results).values()) + "\n"
    (args.out / "table.md").write_text(text)
    print(f"\n{text}")
    if args.docs:
        write_docs(results)


if __name__ == "__main__":
    main()
