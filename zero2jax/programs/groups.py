"""Which devices take part in a collective, in any of the ways to write it, and along which axes of a mesh."""

import itertools
import math
import re
from collections.abc import Mapping

import numpy as np


def replica_groups(attributes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a collective, from any of the ways to write them."""
    # mesh['data'=4,'model'=2] {'data'}: by name
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if mesh:
        names = re.findall(r"'([^']+)'=(\d+)", mesh.group(1))
        sizes = [int(size) for _, size in names]
        chosen = re.findall(r"'([^']+)'", mesh.group(2))
        axes = [[name for name, _ in names].index(name) for name in chosen]
        return axis_groups(sizes, axes)
    # [2,4]<=[4,2]T(1,0): 0, 1, 2, ... in the shape on the right, transposed, as 2 groups of 4
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        dims = [int(d) for d in iota.group(3).split(",")]
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota.group(4):
            ids = ids.transpose([int(d) for d in iota.group(4).split(",")])
        return _rows(ids.reshape(int(iota.group(1)), int(iota.group(2))))
    # {{0,1},{2,3}}
    listed = re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", attributes)
    if listed:
        return tuple(
            tuple(int(d) for d in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", listed.group(1))
        )
    pairs = re.search(r"source_target_pairs=\{([\d,{} ]*)\}", attributes)
    if pairs:
        return tuple((int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs.group(1)))
    return ()


def axis_groups(sizes: list[int], axes: list[int]) -> tuple[tuple[int, ...], ...]:
    """The groups of a grid of devices along some of its axes: those that differ in these axes alone."""
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    kept = [i for i in range(len(sizes)) if i not in axes]
    size = math.prod(sizes[i] for i in axes)
    return _rows(ids.transpose([*kept, *axes]).reshape(-1, size))


def axis_names(groups: tuple[tuple[int, ...], ...], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of a mesh along which a collective's groups lie; empty if they lie along none of them."""
    # Sets, since neither groups nor the devices in them come in an order that means anything.
    wanted = {frozenset(g) for g in groups}
    names = [name for name, size in mesh_shape.items() if size > 1]
    sizes = [mesh_shape[name] for name in names]
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(range(len(names)), count):
            if {frozenset(g) for g in axis_groups(sizes, list(chosen))} == wanted:
                return tuple(names[i] for i in chosen)
    return ()


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(x) for x in row) for row in ids)
