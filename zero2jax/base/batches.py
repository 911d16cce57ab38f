"""Batches: checked against devices and microbatches before anything is traced, and placed over the data axis.

Across processes a batch is one global array. `global_batch` makes it from what each process has loaded.

`BatchOrder` says which examples come next, each process its part. The order of an epoch is a permutation made from
seed and epoch; a batch is the next `batch_size` of it. Of these a process gets the rows that its devices hold along the
data axis. So batch number k holds the same examples however many processes there are, and `state`, the epoch and how
many of its examples have been drawn, resumes the order: on fewer processes and in batches of another size, too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero2jax.base.checks import type_name
from zero2jax.base.mesh import DATA_AXIS, AxisName, axis_size, data_axes, replicated
from zero2jax.base.pytrees import PyTree, check_alive, live_arrays, path_string, shapes_of


def check_batch(batch: PyTree, num_shards: int, num_microbatches: int, batch_size: int | None = None) -> int:
    """The number of examples in a global batch, after checking that it can be divided.

    Raises:
      TypeError: an iterator, or a leaf that is neither an array nor a number.
      ValueError: no leaves; a leaf without a leading dim; leaves of different length; a length that is not a
        multiple of devices x microbatches, or not the batch size that was configured.
    """
    if isinstance(batch, Iterator):
        raise TypeError(
            f"reading the batch: it is an iterator ({type_name(batch)}). A step takes one batch: next(...) of it."
        )
    _check_leaves(batch)
    leaves = [(path_string(path), np.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    if not leaves:
        raise ValueError(
            "reading the batch: it has no arrays. Pass a pytree of arrays of shape (batch, ...)."
        )
    path, shape = leaves[0]
    num_examples = shape[0]
    for other, other_shape in leaves[1:]:
        if other_shape[0] != num_examples:
            raise ValueError(
                f"reading the batch: leaf {path!r} has {num_examples} examples and leaf {other!r} has "
                f"{other_shape[0]}. All leaves must have the same leading dim."
            )
    parts = num_shards * num_microbatches
    if num_examples % parts or num_examples == 0:
        nearest = max(num_examples // parts, 1) * parts
        rule = "a whole number" if num_examples else "above 0: the data may have ended"
        raise ValueError(
            f"cutting a batch of {num_examples} examples over {num_shards} devices x {num_microbatches} microbatches: "
            f"{num_examples} / ({num_shards} * {num_microbatches}) = {num_examples / parts:g}, and it must be {rule}. "
            f"Use {nearest} or {nearest + parts} examples, or another number of microbatches."
        )
    if batch_size is not None and num_examples != batch_size:
        raise ValueError(
            f"reading the batch: it has {num_examples} examples, and the batch size was set to {batch_size} "
            f"(over all {num_shards} devices and {num_microbatches} microbatches). Pass full batches, or leave the "
            f"batch size out."
        )
    return num_examples


def _check_leaves(batch: PyTree) -> None:
    """Raise an error that names a leaf that has no leading dim, or that JAX has no dtype for."""
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        name, kind = path_string(path), getattr(getattr(x, "dtype", None), "kind", "")
        if isinstance(x, str | bytes) or kind in ("U", "S", "O"):
            found = f"an array of {x.dtype}" if kind else f"a {type(x).__name__}"
            raise TypeError(
                f"reading the batch: leaf {name!r} is {found}, and a step takes numbers only. Turn text into token ids "
                f"before, or leave the leaf out of the batch."
            )
        if path and isinstance(path[-1], jax.tree_util.SequenceKey) and not hasattr(x, "dtype"):
            raise ValueError(
                f"reading the batch: {path_string(path[:-1])!r} is a Python list or tuple of numbers, each of which "
                f"would be a scalar leaf ({name!r}). Every leaf must be an array of shape (batch, ...): take "
                f"np.asarray(...) of it."
            )
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            where = f"leaf {name!r} is" if path else "it is"
            raise TypeError(
                f"reading the batch: {where} of type {type_name(x)}, which is neither an array nor a container of "
                f"arrays. Pass a pytree of arrays of shape (batch, ...)."
            )
        if not path and not np.shape(x):
            raise ValueError(
                f"reading the batch: it is a scalar ({type_name(x)}), without a leading dim to shard over devices. "
                f"Pass a pytree of arrays of shape (batch, ...)."
            )
        if not np.shape(x):
            raise ValueError(
                f"reading the batch: leaf {name!r} is a scalar, without a leading dim to shard over devices. Every "
                f"leaf must be of shape (batch, ...): repeat the value per example, or, if it is one value for all "
                f"examples, hand it to the loss function by name: engine.step(state, batch, "
                f"loss_args={{{name!r}: ...}})."
            )


def check_apart(donated: PyTree, others: Mapping[str, PyTree], given: list[Any]) -> None:
    """Raise a ValueError if an array of a tree that a program donates is handed to it a second time.

    Its devices would find that out one by one, and those that run already wait for the others, or end the process.

    Args:
      donated: the tree.
      others: what else the program gets, by names for the error.
      given: the leaves of all of these.
    """
    if len(set(map(object.__hash__, given))) == len(
        given
    ):  # one per object, faster than `id` with its audit event
        return
    arrays = live_arrays(given)
    if len(set(map(id, arrays))) == len(arrays):
        return
    seen: dict[int, str] = {}
    for name, tree in {"the state": donated, **others}.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not live_arrays([x]):
                continue
            if id(x) in seen:
                raise ValueError(
                    f"reading {name}: leaf {path_string(path)!r} is the array {seen[id(x)]!r} of the state, which "
                    f"engine.step donates. Hand over engine.params(state), or a copy, jnp.copy(x)."
                )
            if tree is donated:
                seen[id(x)] = path_string(path)


def place_batch(batch: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """The batch as global arrays sharded over the data axis along their leading dim; arrays already there are kept.

    NumPy arrays are copied first: the step runs on while the caller fills the same buffer again. Of several processes
    each must pass the same global batch, which JAX compares; `global_batch` saves that.

    Raises:
      ValueError: the processes passed different batches; an array is gone, since it was donated.
    """
    check_alive(batch, "the batch", "It was donated to a program of yours: pass a batch that is still there.")
    way_out = "Pass each the same global batch, or join what each has loaded by zero2jax.global_batch."
    sharding = NamedSharding(mesh, P(axis_name))
    return jax.tree.map(lambda x: _placed(x, sharding, f"the batch: {way_out}"), batch)


def place_loss_args(loss_args: Mapping[str, PyTree] | None, mesh: Mesh) -> dict[str, PyTree]:
    """Arrays that the loss gets by name, on every device; Python numbers become arrays that promote as numbers do.

    Raises:
      TypeError: it is no dict by names, or a leaf is no array.
      ValueError: the processes passed different values; an array is gone, since it was donated.
    """
    if not isinstance(loss_args or {}, Mapping) or not all(isinstance(name, str) for name in loss_args or {}):
        raise TypeError(
            f"reading loss_args: found {type(loss_args).__name__}, expected a dict from names of parameters of the "
            f"loss function to arrays: engine.step(state, batch, loss_args={{'temperature': 0.5}})."
        )
    values = dict(loss_args or {})
    shapes_of(values)
    check_alive(
        values, "loss_args", "It was donated to a later step: take engine.params(state) of the new state."
    )
    way_out = "Pass each the same values."
    return {
        name: jax.tree.map(lambda x: _placed(x, replicated(mesh), f"loss_args: {way_out}"), value)
        for name, value in values.items()
    }


def _placed(x: Any, sharding: NamedSharding, what: str) -> jax.Array:
    if isinstance(x, jax.core.Tracer):  # the step stands in a program of the user's
        return jax.lax.with_sharding_constraint(x, sharding)
    if isinstance(x, jax.Array):
        # An equivalent placement on another mesh would bring that mesh's axes into the step.
        there = getattr(x.sharding, "mesh", None) == sharding.mesh
        if there and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
    elif isinstance(x, np.ndarray):
        x = np.array(x)
    try:
        return jax.device_put(x, sharding)
    except AssertionError as error:  # JAX's way to say so
        name, _, way_out = what.partition(": ")
        raise ValueError(
            f"placing {name}: an array of shape {np.shape(x)} is not the same in all {jax.process_count()} "
            f"processes. {way_out}"
        ) from error


def local_rows(batch_size: int, mesh: Mesh, axis_name: str = DATA_AXIS) -> np.ndarray:
    """Which rows of a batch of `batch_size` examples the devices of this process hold, ascending.

    Raises:
      ValueError: the batch does not divide over the devices.
    """
    axes = data_axes(mesh, axis_name).batch
    num_shards = axis_size(mesh, axes)
    if batch_size % num_shards or batch_size < 1:
        nearest = max(batch_size // num_shards, 1) * num_shards
        raise ValueError(
            f"cutting a batch of {batch_size} examples over {num_shards} devices: {batch_size} / {num_shards} = "
            f"{batch_size / num_shards:g}, and it must be a whole number. Use {nearest} or {nearest + num_shards} "
            f"examples."
        )
    held = NamedSharding(mesh, P(axes)).addressable_devices_indices_map((batch_size,))
    starts = {index[0].indices(batch_size)[:2] for index in held.values() if index is not None}
    return np.concatenate([np.arange(start, stop) for start, stop in sorted(starts)])


def global_batch(
    local_batch: PyTree, mesh: Mesh, *, batch_size: int | None = None, axis_name: str = DATA_AXIS
) -> PyTree:
    """One global array per leaf, sharded over the data axis, from the rows that each process has loaded.

    No communication. Every process must pass the same number of rows, and the same number of batches. A process cannot
    see that another has fewer, and would wait for it in the next step. Give `batch_size`, and an uneven last batch is
    refused; take as many batches as the process with the fewest has, or draw them by `BatchOrder`.

    Args:
      local_batch: pytree of arrays (rows of this process, ...); row i is row `local_rows(...)[i]` of the global batch.
      mesh: device mesh.
      batch_size: examples over all devices, if they are known.
      axis_name: mesh axis to shard over, and over the groups of an axis `replica`, too.

    Raises:
      ValueError: leaves without rows or of different length; a number of rows that does not divide over the devices of
        this process, or is not its part of `batch_size`.

    Example:
      >>> import zero2jax
      >>> global_batch({"x": np.zeros((4, 3))}, zero2jax.make_mesh(data=1))["x"].shape
      (4, 3)
    """
    axes = data_axes(mesh, axis_name).batch
    num_shards = axis_size(mesh, axes)
    num_local = len(local_rows(num_shards, mesh, axis_name))
    num_rows = check_batch(local_batch, num_local, 1)
    if batch_size is not None and num_rows * num_shards != batch_size * num_local:
        raise ValueError(
            f"joining the rows of all processes: this one ({jax.process_index()} of {jax.process_count()}) has "
            f"{num_rows}, and its part of a batch of {batch_size} is {batch_size} / {num_shards} devices * {num_local} "
            f"devices here = {batch_size / num_shards * num_local:g}. Leave an uneven last batch out, or fill it up "
            f"with examples of weight 0."
        )
    sharding = NamedSharding(mesh, P(axes))

    def join(x: Any) -> jax.Array:
        x = np.array(x)  # a copy: the caller may fill the buffer again while a step runs
        shape = (num_rows // num_local * num_shards, *x.shape[1:])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return jax.tree.map(join, local_batch)


def abstract_batch(batch: PyTree, mesh: Mesh, axis_name: AxisName) -> PyTree:
    """Shapes of the batch as `place_batch` places it."""
    return _abstract(batch, NamedSharding(mesh, P(axis_name)))


def abstract_loss_args(loss_args: Mapping[str, PyTree] | None, mesh: Mesh) -> dict[str, PyTree]:
    """Shapes of the loss arguments as `place_loss_args` places them."""
    return _abstract(dict(loss_args or {}), replicated(mesh))  # type: ignore[no-any-return]


def _abstract(tree: PyTree, sharding: NamedSharding) -> PyTree:
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, shapes_of(tree))


class BatchOrder:
    """An endless iterator over arrays of example indices, those of this process in each global batch.

    The last examples of an epoch's order that fill no batch are left out; another epoch, another order.

    Save `state`, plain values, and set it to continue. In batches of another size the order goes on at the next
    example: none comes twice in an epoch, and only the last ones, fewer than a batch, are left out, wherever the
    epoch was when the size changed. The next epoch begins at its first example.

    Args:
      num_examples: size of the data set. Its permutation is held, 8 bytes per example.
      batch_size: examples of a batch over all devices.
      mesh: device mesh; it says which rows of a batch belong to this process.
      seed: of the order.
      position: how many batches of `batch_size` have been drawn; or what `state` can be set to.
      axis_name: mesh axis that batches are sharded over.

    Raises:
      ValueError: the batch does not divide over the devices, or is larger than the data set; a position that is none.

    Example:
      >>> import zero2jax
      >>> mesh = zero2jax.make_mesh(data=1)
      >>> order = BatchOrder(10, 4, mesh, seed=1)
      >>> first, second, other_epoch = next(order), next(order), next(order)
      >>> len(set(first) | set(second)), order.position
      (8, 3)
      >>> order.position = 1
      >>> order.state
      {'epoch': 0, 'drawn': 4, 'num_examples': 10, 'seed': 1}
      >>> smaller = BatchOrder(10, 2, mesh, seed=1, position=order.state)
      >>> bool((next(smaller) == second[:2]).all())
      True
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        mesh: Mesh,
        *,
        seed: int = 0,
        position: int | Mapping[str, int] = 0,
        axis_name: str = DATA_AXIS,
    ):
        if not 0 < batch_size <= num_examples:
            raise ValueError(
                f"ordering {num_examples} examples in batches of {batch_size}: an epoch must hold at least one batch "
                f"of at least one example. Use a smaller batch, or more data."
            )
        self.num_examples, self.batch_size, self.seed = num_examples, batch_size, seed
        self._rows = local_rows(batch_size, mesh, axis_name)
        self._order_of = -1  # the epoch that `_order` belongs to
        self._order = np.arange(0)
        self._epoch, self._drawn = self._place(position)

    @property
    def batches_per_epoch(self) -> int:
        """Full batches in one pass over the data."""
        return self.num_examples // self.batch_size

    @property
    def state(self) -> dict[str, int]:
        """Where the next batch begins: the epoch, how many of its examples have been drawn, and of which order.

        Set it to a state that was saved; to `{"position": 10, "batch_size": 32}`, ten batches of 32; or to a plain
        number, batches of this order's own size. The second form is for what was saved as a number of batches of
        another size.

        Raises:
          ValueError: it is set to something else, or to the state of another data set or seed.
        """
        return self._state(self._epoch, self._drawn)

    @state.setter
    def state(self, state: int | Mapping[str, int]) -> None:
        self._epoch, self._drawn = self._place(state)

    @property
    def position(self) -> int:
        """How many batches of this size have been drawn. It means nothing to an order of another size: save `state`.

        Raises:
          ValueError: it is read where the batches drawn were of another size, and make no number of this one's.
        """
        batches, left_over = divmod(self._drawn, self.batch_size)
        if left_over:
            raise ValueError(
                f"counting the batches drawn: {self._drawn} examples of epoch {self._epoch} were drawn in batches of "
                f"another size, and make no number of batches of {self.batch_size}. Save `state` in place of "
                f"`position`."
            )
        return self._epoch * self.batches_per_epoch + batches

    @position.setter
    def position(self, position: int | Mapping[str, int]) -> None:
        self._epoch, self._drawn = self._place(position)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        if self._drawn + self.batch_size > self.num_examples:
            self._epoch, self._drawn = self._epoch + 1, 0
        if self._epoch != self._order_of:
            rng = np.random.default_rng((self.seed, self._epoch))
            self._order_of, self._order = self._epoch, rng.permutation(self.num_examples)
        start, self._drawn = self._drawn, self._drawn + self.batch_size
        return self._order[start + self._rows]

    def _place(self, state: int | Mapping[str, int]) -> tuple[int, int]:
        """(epoch, examples of it that have been drawn) of anything that `state` can be set to."""
        if not isinstance(state, Mapping):
            return self._after(_count(state, state), self.batch_size)
        values = {name: _count(value, state) for name, value in state.items()}
        if set(values) == {"position", "batch_size"} and 0 < values["batch_size"] <= self.num_examples:
            return self._after(values["position"], values["batch_size"])
        if (
            set(values) != {"epoch", "drawn", "num_examples", "seed"}
            or values["drawn"] > values["num_examples"]
        ):
            raise _no_place(state)
        saved = values["num_examples"], values["seed"]
        if saved != (self.num_examples, self.seed):
            raise ValueError(
                f"ordering examples from {dict(state)} on: it is a place in the order of {saved[0]} examples with "
                f"seed {saved[1]}, and this is another order, of {self.num_examples} with seed {self.seed}. Use that "
                f"data and seed; or begin an epoch of this order: set `state` to "
                f"{self._state(values['epoch'] + 1, 0)}."
            )
        return values["epoch"], values["drawn"]

    def _state(self, epoch: int, drawn: int) -> dict[str, int]:
        return {"epoch": epoch, "drawn": drawn, "num_examples": self.num_examples, "seed": self.seed}

    def _after(self, num_batches: int, batch_size: int) -> tuple[int, int]:
        """The place behind a number of batches of some size."""
        per_epoch = self.num_examples // batch_size
        # Between two epochs the first one is not left yet: a smaller batch may still fit into its end.
        epoch = max(num_batches - 1, 0) // per_epoch
        return epoch, (num_batches - epoch * per_epoch) * batch_size


def _count(value: Any, state: Any) -> int:
    found = np.asarray(value)
    if found.ndim or not np.issubdtype(found.dtype, np.integer) or found < 0:
        raise _no_place(state)
    return int(found)


def _no_place(state: Any) -> ValueError:
    return ValueError(
        f"ordering examples from position {state!r} on: it must be a `state` that was saved; or "
        f'{{"position": batches drawn, "batch_size": their size, at most the data set\'s}}; or the number of batches '
        f"of this order's size that have been drawn, whole and at least 0."
    )
