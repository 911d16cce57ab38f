"""Where Flax's metadata places parameters, as PartitionSpecs. Shapes alone; outside `shard_map`; Flax is not imported.

Linen puts a parameter into a box with a name per dim (`nn.with_partitioning`, `nn.with_logical_partitioning`), NNX
keeps the names in its Variable. A logical name becomes mesh axes by the rules that come with it or that are in context
(`nn.logical_axis_rules`). Then, of each name:

  another mesh axis   the dim is sharded over it: tensor parallelism
  a data axis         left to the shard plan, which shards the state over it along the dim that pads least
  anything else       dropped, with a notice: a logical name without a rule, an axis that this mesh does not have
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.notices import warn
from zero2jax.base.pytrees import PyTree, path_string


def specs_of_metadata(params: PyTree, mesh: Mesh, data_axes: Sequence[str]) -> PyTree | None:
    """A PartitionSpec, or None, per parameter for the axes of a mesh other than its data axes.

    Args:
      params: parameters, or their shapes, some of them boxed.
      mesh: device mesh.
      data_axes: those that hold different examples.

    Returns:
      In the structure of `params`; None if the metadata places nothing.
    """
    if set(mesh.axis_names) <= set(data_axes):
        return None
    context = _rules_in_context()
    flat = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: _names(x) is not None)
    specs: list[P | None] = []
    unknown: dict[str, str] = {}
    for path, box in flat:
        entries = []
        for name in _names(box) or ():
            axes = _axes(name, {**context, **_rules(box)})
            for axis in axes:
                if axis not in mesh.shape:
                    unknown.setdefault(axis, path_string(path))
            kept = tuple(axis for axis in axes if axis in mesh.shape and axis not in data_axes)
            entries.append(kept[0] if len(kept) == 1 else kept or None)
        specs += [P(*entries) if any(entries) else None] * len(jax.tree.leaves(box))
    if unknown:
        warn(
            f"placing parameters by their Flax metadata: the mesh has the axes {dict(mesh.shape)} and none called "
            + ", ".join(f"{axis!r} (of {path!r})" for axis, path in list(unknown.items())[:5])
            + ", so no dim is sharded over that. For a logical name, call engine.init inside of "
            "nn.logical_axis_rules(rules), or pass param_specs=, a PartitionSpec per parameter."
        )
    return jax.tree.unflatten(jax.tree.structure(params), specs) if any(specs) else None


def _metadata(x: Any) -> Mapping[str, Any]:
    """The fields of a Linen box or an NNX Variable."""
    if hasattr(x, "get_partition_spec") and hasattr(x, "names"):
        return vars(x)
    own = getattr(x, "get_metadata", None)
    return own() if callable(own) else {}


def _names(x: Any) -> Sequence[Any] | None:
    """The name of each dim, where there is metadata that says so."""
    metadata = _metadata(x)
    names: Any = metadata.get("names") or metadata.get("out_sharding") or None
    return tuple(names.spec) if isinstance(names, NamedSharding) else names  # type: ignore[no-any-return]


def _rules(x: Any) -> dict[str, Any]:
    metadata = _metadata(x)
    return _first(metadata.get("rules") or metadata.get("sharding_rules") or ())


def _rules_in_context() -> dict[str, Any]:
    flax = sys.modules.get("flax.core.spmd")
    return _first(flax.get_logical_axis_rules()) if flax else {}


def _first(rules: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(list(rules)))


def _axes(name: Any, rules: Mapping[str, Any]) -> tuple[str, ...]:
    """The mesh axes of one entry: a name, several, or None."""
    if isinstance(name, tuple):
        return tuple(axis for part in name for axis in _axes(part, rules))
    name = rules.get(name, name)
    return name if isinstance(name, tuple) else () if name is None else (name,)
