"""Parameters whose gradients a compiled step of stage 3 reduces more than once. Arithmetic on shapes.

At stage 3 a parameter is gathered where it is used, and its gradient is reduce-scattered there. A loss that uses it in
several places (tied embeddings, a penalty on the parameters) reduces it at each of them, unless the compiler adds the
gradients first. What is reduced is compared with the parameters by numbers of elements, since the compiler joins
collectives and chooses their dtype.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from zero2jax.programs.hlo import Collective
from zero2jax.zero.shard_plan import LeafPlan

_NEGLIGIBLE = 0.01  # of the elements: padding


@dataclasses.dataclass(frozen=True)
class Repeated:
    """Reductions beyond one per parameter and microbatch.

    Attributes:
      reduced_elements: elements that are reduce-scattered per step.
      expected_elements: the same if each gradient is reduced once per microbatch.
      leaves: the parameters whose size the superfluous ones have, by path; empty if none has.
    """

    reduced_elements: int
    expected_elements: int
    leaves: tuple[str, ...]


def repeated_reductions(
    reductions: Iterable[Collective], leaves: Sequence[LeafPlan], num_microbatches: int, mesh: Mesh
) -> Repeated | None:
    """What is reduced more than once; None if nothing is.

    Args:
      reductions: the reduce-scatters over the axis that state is sharded over.
      leaves: the trained leaves.
      num_microbatches: slices of the batch per step.
      mesh: the mesh of the step, for the other axes that shard a leaf.
    """
    counts: dict[int, int] = {}  # runs per step by number of elements
    for c in reductions:
        for array in c.operands:
            counts[array.size] = counts.get(array.size, 0) + c.trips
    sharded = [leaf for leaf in leaves if leaf.dim is not None]
    full = {leaf.names: math.prod(leaf.rest_shape) // leaf.num_model_shards(mesh) for leaf in sharded}
    num_layers = {leaf.names: max(math.prod(leaf.shape[: leaf.layer_dims]), 1) for leaf in sharded}
    expected = num_microbatches * sum(full.values())
    reduced = sum(size * count for size, count in counts.items())
    if reduced <= expected * (1 + _NEGLIGIBLE):
        return None
    for names, size in full.items():
        layer = size // num_layers[names]
        counts[layer] = counts.get(layer, 0) - num_microbatches * num_layers[names]
    superfluous = {size for size, count in counts.items() if count > 0}
    repeated = [names for names, size in full.items() if superfluous & {size, size // num_layers[names]}]
    named = [leaf.path for leaf in sharded if leaf.names in repeated]
    return Repeated(reduced, expected, tuple(named))
