"""The functions of an engine whose masters and optimizer state are in files: read, updated and written in chunks.

As `offloaded`, but for what stands in the state: `DiskArray`s. While one chunk is updated, the next are read ahead and
those before are written behind, as far as `buffer_count` allows. A step returns when its files are on the disk and
recorded; where one cannot be written the state of the step before is as it was.
"""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from zero2jax.base import jaxprs
from zero2jax.base.mesh import moved
from zero2jax.base.pytrees import PyTree
from zero2jax.offload.chunks import IN_FLIGHT, ChunkedUpdate, Flat, Move
from zero2jax.offload.disk_arrays import DiskArray
from zero2jax.offload.disk_buffers import ALIGNMENT, Buffers
from zero2jax.offload.disk_files import OffloadFileError
from zero2jax.offload.disk_space import check_disks, disk_row, memory_row, num_chunks
from zero2jax.offload.disk_state import Pending, StateFiles
from zero2jax.offload.host_memory import check_hosts
from zero2jax.offload.offloaded import Offloaded, OffloadedStep
from zero2jax.offload.parts import Split, grouped
from zero2jax.offload.settings import OffloadSettings
from zero2jax.zero.compiled import CompilerOptions, Gather
from zero2jax.zero.placement import init_opt_state
from zero2jax.zero.state import TrainState
from zero2jax.zero.step import Metrics, StepProgram


class DiskOffloaded(Offloaded):
    """The functions of one layout whose masters and optimizer state are in files of each process."""

    def __init__(self, program: StepProgram, options: CompilerOptions, settings: OffloadSettings):
        super().__init__(program, options, settings)
        assert settings.nvme_path is not None
        self.files = StateFiles(settings.nvme_path, self.layout, program.mesh)

    @property
    def step(self) -> "DiskStep":
        """As `Offloaded.step`."""
        if self._step is None:
            self._step = DiskStep(self, self._halves, self._settings, self.options)
        return self._step  # type: ignore[no-any-return]

    def check_room(self, gather: Gather) -> None:
        """Raise a ValueError if hosts have no memory for the chunks in it, or disks no room for two states."""
        folder = self.files.start()
        check_hosts(
            *gather(memory_row(self.layout, self._program.settings, self._program.mesh, self._settings))
        )
        self.check_pinned_room(gather)
        check_disks(*gather(disk_row(self.files.num_bytes, folder.path)), folder.path.parent)

    def keep(self, position: int, x: jax.Array) -> Any:
        """As `Compiled.keep`: leaves of the host go to files one after the other."""
        return self.files.keep(position, x)

    def reopened(self, gather: Gather) -> list[Any]:
        """As `StateFiles.reopened`."""
        return self.files.reopened(gather)

    def first_opt_state(self, params: PyTree) -> PyTree:
        """As `Compiled.first_opt_state`, made and written in groups of leaves: the host never holds it all."""
        layout, mesh = self.layout, self._program.mesh
        assert layout.host is not None
        trained = jax.tree.leaves(layout.trained(params))
        init = functools.partial(init_opt_state, self._program.tx, layout, layout.host)
        shapes = layout.trained_params.rest_shapes(layout.host)
        jaxpr = jaxprs.inlined(jaxprs.trace(init, shapes)[0])
        there, homes = jax.tree.leaves(layout.opt_state.shardings(layout.host)), layout.homes(mesh)[1]
        first = 1 + len(layout.params.leaves)  # after `step` and the parameters
        made: list[Any] = []
        sizes = [leaf.rest_bytes for leaf in layout.opt_state.leaves]
        for which in grouped(sizes, self._settings.chunk_bytes):
            function, used = jaxprs.part_of(jaxpr, which)
            home_params = jax.tree.leaves(layout.trained_params.shardings(layout.host))
            given = moved([_in_memory(trained[i]) for i in used], [home_params[i] for i in used])
            group = jax.jit(function, out_shardings=[there[j] for j in which])(*given)
            group = moved(group, [homes[j] for j in which])
            made += [self.keep(first + j, x) for j, x in zip(which, group, strict=True)]
        return layout.opt_state.treedef.unflatten(made)

    @functools.cached_property
    def params(self) -> Any:
        """`parameters at rest -> full ones`, read from the files."""
        full = super().params
        return lambda params: full(jax.tree.map(_in_memory, params))

    def _at_rest(self, which: Sequence[int], trained: Sequence[Any]) -> list[jax.Array]:
        """As `Offloaded._at_rest`, read from the files."""
        return super()._at_rest(which, [_in_memory(x) for x in trained])


class DiskStep(OffloadedStep):
    """A step that leaves the new state in files."""

    _functions: DiskOffloaded

    def __call__(
        self,
        state: TrainState,
        batch: PyTree,
        loss_args: Mapping[str, PyTree],
        extra_args: Mapping[str, Any],
    ) -> tuple[TrainState, Metrics]:
        """See `Engine.step`.

        Raises:
          OffloadFileError: a file cannot be read or written; the state before is intact in the files.
        """
        files = self._functions.files
        folder = files.start()
        if self.rates is not None:
            self.rates.disk = {"read": folder.reads, "write": folder.writes}
        files.begin(int(np.asarray(state.step)))
        try:
            state, metrics = super().__call__(state, batch, loss_args, extra_args)
            files.commit(state)
        except OffloadFileError as error:
            raise OffloadFileError(f"{error} {files.way_back()}") from error
        return state, metrics

    def _update_on_host(self, flat: Flat, chunks: Split) -> ChunkedUpdate:
        layout = self._layout
        masters = sum(
            layout.trained_params.leaves[i].rest_bytes for part in chunks.parts for i in part.params
        )
        moments = sum(layout.opt_state.leaves[j].rest_bytes for part in chunks.parts for j in part.state)
        return DiskUpdate(
            flat,
            chunks,
            self._host_results,
            options=self._options,
            files=self._functions.files,
            num_chunks=num_chunks(self._settings, masters, moments),
            reuse=self.rates is None,
        )


class DiskUpdate(ChunkedUpdate):
    """An update whose own leaves come from files and go to files, in chunks.

    Args:
      flat: the update.
      split: its chunks.
      shardings: of its results.
      options: for the compiler.
      files: of the state.
      num_chunks: whose leaves may be in host memory: read, updated, or not yet written.
      reuse: as for `ChunkedUpdate`.
    """

    def __init__(
        self,
        flat: Flat,
        split: Split,
        shardings: Sequence[NamedSharding],
        *,
        options: Mapping[str, Any],
        files: StateFiles,
        num_chunks: int,
        reuse: bool,
    ):
        super().__init__(flat, split, shardings, complete=True, options=options, reuse=reuse, in_place=False)
        self._files, self._num_chunks = files, num_chunks
        self._buffers: Buffers | None = None  # made by the first step, which knows the files
        self._own = [(*part.params, *[flat.num_params + j for j in part.state]) for part in split.parts]

    def __call__(
        self, values: list[Any], sums: list[Any], down: Move | None = None, up: Move | None = None
    ) -> dict[int, Any]:
        """As `ChunkedUpdate`; of a leaf that is in files the result is a `DiskArray`, and its file is written."""
        apart = {i for own in self._own for i in own}
        for i, x in enumerate(values):
            if i not in apart and isinstance(x, DiskArray):  # shared by all chunks
                values[i] = x.load()
        if self._buffers is None:
            sizes = [sum(_buffer_bytes(values[i]) for i in own) for own in self._own]
            ends = range(self._num_chunks, max(self._num_chunks, len(sizes)) + 1)
            self._buffers = Buffers(max(sum(sizes[end - self._num_chunks : end]) for end in ends))
        buffers = self._buffers
        results: dict[int, Any] = {}
        reads: list[dict[int, Callable[[], jax.Array]]] = []
        writes: list[dict[int, Pending]] = []
        num_written = 0

        def read(k: int) -> None:
            """Begin to read a chunk, once that whose place in memory it takes is written."""
            nonlocal num_written
            while num_written <= k - self._num_chunks:
                results.update(_settled(writes[num_written]))
                num_written += 1
            reads.append(
                {i: values[i].reading(buffers) for i in self._own[k] if isinstance(values[i], DiskArray)}
            )

        in_flight: collections.deque[list[jax.Array]] = collections.deque()
        for k, own in enumerate(self._own):
            if len(reads) == k:
                read(k)
            for i, array in reads[k].items():
                values[i] = array()
            reads[k].clear()
            if len(in_flight) == IN_FLIGHT:
                jax.block_until_ready(in_flight.popleft())
            made, sent = self.update_part(k, values, sums, down, up)
            in_flight.append(sent)
            writes.append({i: self._files.writing(i, made.pop(i)) for i in own if self._files.holds(i)})
            results |= made
            for i in own:
                values[i] = None
            for ahead in range(len(reads), min(k + self._num_chunks, len(self._own))):
                read(ahead)
        for chunk in writes[num_written:]:
            results |= _settled(chunk)
        return results


def _buffer_bytes(x: Any) -> int:
    """Of the buffers for the shards of a leaf, rounded up as they are in an arena."""
    files = x.files.values() if isinstance(x, DiskArray) else []
    return sum(-(-file.num_bytes // ALIGNMENT) * ALIGNMENT for file in files)


def _settled(pending: Mapping[int, Pending]) -> dict[int, DiskArray]:
    return {i: leaf() for i, leaf in pending.items()}


def _in_memory(x: Any) -> jax.Array:
    return x.load() if isinstance(x, DiskArray) else x
