"""Which examples come next, each process its part: reproducible, resumable, the same for any number of processes.

The order of an epoch is a permutation made from seed and epoch; a batch is the next `batch_size` of it. Of these a
process gets the rows that its devices hold along the data axis. So batch number k holds the same examples however many
processes there are, and one number, `position`, resumes the order, on fewer processes, too.
"""

from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

from zero2jax.base.batches import local_rows
from zero2jax.base.mesh import DATA_AXIS


class BatchOrder:
    """An endless iterator over arrays of example indices, those of this process in each global batch.

    The `num_examples % batch_size` last examples of an epoch's order are left out; another epoch, another order.

    Args:
      num_examples: size of the data set. Its permutation is held, 8 bytes per example.
      batch_size: examples of a batch over all devices.
      mesh: device mesh; it says which rows of a batch belong to this process.
      seed: of the order.
      position: how many batches have been drawn: 0 at first; set it to continue from a checkpoint.
      axis_name: mesh axis that batches are cut over.

    Raises:
      ValueError: the batch cannot be cut over the devices, or is larger than the data set.

    Example:
      >>> import zero2jax
      >>> order = BatchOrder(10, 4, zero2jax.make_mesh(data=1), seed=1)
      >>> first, second, other_epoch = next(order), next(order), next(order)
      >>> len(set(first) | set(second)), order.position
      (8, 3)
      >>> order.position = 1
      >>> bool((next(order) == second).all())
      True
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        mesh: Mesh,
        *,
        seed: int = 0,
        position: int = 0,
        axis_name: str = DATA_AXIS,
    ):
        if not 0 < batch_size <= num_examples:
            raise ValueError(
                f"ordering {num_examples} examples in batches of {batch_size}: an epoch must hold at least one batch "
                f"of at least one example. Use a smaller batch, or more data."
            )
        self.num_examples, self.batch_size, self.seed = num_examples, batch_size, seed
        self.position = _checked(position)
        self._rows = local_rows(batch_size, mesh, axis_name)
        self._epoch = -1
        self._order = np.arange(0)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over the data."""
        return self.num_examples // self.batch_size

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        epoch, batch = divmod(_checked(self.position), self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = (
                epoch,
                np.random.default_rng((self.seed, epoch)).permutation(self.num_examples),
            )
        self.position += 1
        return self._order[batch * self.batch_size + self._rows]


def _checked(position: int) -> int:
    found = np.asarray(position)
    if found.ndim or not np.issubdtype(found.dtype, np.integer) or found < 0:
        raise ValueError(
            f"ordering examples from position {position!r} on: it is the number of batches that have been drawn, a "
            f"whole number of at least 0. Set the `position` that was saved."
        )
    return int(found)
