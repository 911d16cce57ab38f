"""The import rule: which room may import which, and by which modules. `zero2jax/__init__.py` imports them all."""

import ast
from pathlib import Path

import zero2jax

PACKAGE = Path(zero2jax.__file__).parent
CORE = {"base", "zero", "activations", "offload", "memory", "programs", "processes", "monitors"}
MAY_IMPORT = {
    "base": set(),
    "zero": {"base"},
    "activations": {"base"},
    "offload": {"base", "zero", "memory"},
    "processes": {"base"},
    "programs": {"base", "zero"},
    "memory": {"base", "zero", "programs"},
    "monitors": {"base", "programs"},
    "engine": CORE,
    "config": {*CORE, "engine"},
    "checkpoints": {*CORE, "engine"},
    "planning": {*CORE, "engine", "config"},
    "launching": {"processes"},
    "cli": {*CORE, "engine", "config", "checkpoints", "planning", "launching"},
    "__main__": {"cli"},
}
# Modules of a room that other rooms leave alone.
PRIVATE = {
    "zero": {"exchange", "point_of_use"},
    "activations": {"boundary", "layer_search", "rewriter"},
    "config": {
        "keys",
        "params",
        "rules",
        "schedules",
        "optimizers",
        "compiler_options",
        "observing",
        "schema",
        "translate",
        "auto",
        "blocks",
        "source",
        "suggestions",
    },
    "checkpoints": {
        "directory",
        "extra",
        "matching",
        "orbax_handler",
        "saver",
        "state_leaves",
        "safetensors_file",
    },
    "processes": {"roll_call"},
    "monitors": {"background", "outlets"},
    "planning": {"picture"},
    "launching": {"supervise"},
}


def imports(path):
    """(line, module in parts without the package, imported name) of each import of the package in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "zero2jax":
            for alias in node.names:
                yield node.lineno, [*node.module.split(".")[1:], alias.name], alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "zero2jax":
                    yield node.lineno, alias.name.split(".")[1:], ""


def test_rooms_import_only_what_they_may_and_only_through_doors():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE).with_suffix("").parts
        if here == ("__init__",):
            continue
        for line, parts, name in imports(path):
            where = f"{path.relative_to(PACKAGE)}:{line}"
            room, module = parts[0], parts[1] if len(parts) > 1 else ""
            if room != here[0] and room not in MAY_IMPORT[here[0]]:
                wrong.append(f"{where}: {here[0]} may not import {room}")
            if room != here[0] and module in PRIVATE.get(room, ()):
                wrong.append(f"{where}: {room}.{module} is private to its room")
            if name.startswith("_"):
                wrong.append(f"{where}: {name} is private to its module")
    assert not wrong, "\n".join(wrong)


def test_every_room_has_a_rule_and_says_what_it_is_for():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(MAY_IMPORT)
    for room in rooms:
        module = ast.parse((PACKAGE / room / "__init__.py").read_text())
        assert len(module.body) == 1, f"{room}/__init__.py is a docstring and nothing else"
        said = ast.get_docstring(module) or ""
        unsaid = [path.stem for path in (PACKAGE / room).glob("[a-z]*.py") if path.stem not in said]
        assert not unsaid, f"{room}/__init__.py does not name {unsaid}"
