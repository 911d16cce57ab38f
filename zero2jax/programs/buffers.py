"""Pieces of memory by number, and which of them turn out to be one: union-find. Pure Python.

A value is what an instruction makes: a buffer, or a tuple of values, in the structure of the instruction's type.
"""

from zero2jax.programs.hlo import Array, Type

Value = int | tuple["Value", ...]

NO_BUFFER = -1  # in the place of a buffer, for what takes no memory worth counting


class Buffers:
    """All buffers of a program.

    The root of a joined set is its first buffer, and has the size of the largest. Roots change as long as buffers are
    joined: what is kept by root must be made afterwards.
    """

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.sizes: list[int] = []  # bytes
        self.elements: list[int] = []
        self.on_host: list[bool] = []
        self._parent: list[int] = []

    def __len__(self) -> int:
        return len(self._parent)

    def new(self, kind: Type) -> Value:
        """A buffer for each array of a type."""
        if not isinstance(kind, Array):
            return tuple(self.new(inner) for inner in kind)
        self._parent.append(len(self))
        self.arrays.append(kind)
        self.sizes.append(kind.num_bytes)
        self.elements.append(kind.size)
        self.on_host.append(kind.on_host)
        return len(self) - 1

    def root(self, buffer: int) -> int:
        """The buffer that stands for all that share memory with this one."""
        while self._parent[buffer] != buffer:
            self._parent[buffer] = self._parent[self._parent[buffer]]
            buffer = self._parent[buffer]
        return buffer

    def share(self, a: Value, b: Value) -> None:
        """Join the buffers of two values, leaf by leaf."""
        for x, y in zip(_leaves(a), _leaves(b), strict=False):
            if x != NO_BUFFER and y != NO_BUFFER:
                first, second = sorted((self.root(x), self.root(y)))
                self._parent[second] = first
                if self.sizes[second] > self.sizes[first]:
                    self.sizes[first], self.arrays[first] = self.sizes[second], self.arrays[second]


def buffers_of(*values: Value) -> list[int]:
    """The buffers of values, in the order of their leaves."""
    return [b for value in values for b in _leaves(value) if b != NO_BUFFER]


def element(value: Value, path: tuple[int, ...]) -> Value:
    """The part of a value that a path of indices leads to; what is no tuple is its own only part."""
    for index in path:
        value = value[index] if isinstance(value, tuple) else value
    return value


def without_buffers(kind: Type) -> Value:
    """A value of a type that takes no memory."""
    return NO_BUFFER if isinstance(kind, Array) else tuple(without_buffers(inner) for inner in kind)


def _leaves(value: Value) -> list[int]:
    return [value] if isinstance(value, int) else [b for inner in value for b in _leaves(inner)]
