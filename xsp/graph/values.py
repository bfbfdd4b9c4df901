"""Data flow from storages: each write makes a new version, and edges follow from reads and writes of versions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from xsp.graph.node import Edge, EdgeKind, Role, Value

STRENGTH = (EdgeKind.DATA, EdgeKind.REUSE, EdgeKind.ORDER)


class Flow:
    """The values in the order of execution, and the edges between nodes.

    A storage is named by any hashable object: the address of a live storage, or a name in a program in which each name
    is written once.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._current: dict[Hashable, int] = {}
        self._writer: list[int | None] = []
        self._readers: list[list[int]] = []
        self._edges: dict[tuple[int, int], EdgeKind] = {}
        self._last_by_state: dict[str, int] = {}
        self._roles: dict[int, Role] = {}
        self._storages = 0

    def add_outside(self, storage: Hashable, role: Role, size: int | None) -> int:
        """Return the value of a storage that no node made, numbered at its first appearance."""
        number = self._current.get(storage)
        return self._make(storage, None, role, size) if number is None else number

    def has_value(self, storage: Hashable) -> bool:
        """Return whether a storage has a value."""
        return storage in self._current

    def current(self, storage: Hashable) -> int:
        """Return the current value of a storage.

        Raises:
            KeyError: the storage was never seen.
        """
        return self._current[storage]

    def read(self, node: int, storage: Hashable, through: int | None = None) -> int:
        """Return the value that a node reads, with an edge from its writer.

        Args:
            node: place of the reader.
            storage: storage that was seen before.
            through: node that made the tensor by which the storage is read, if that is a view.
        """
        number = self._current[storage]
        writer = self._writer[number]
        if writer is not None and not (through is not None and through > writer):
            self._join(writer, node, EdgeKind.DATA)
        if through is not None:
            self._join(through, node, EdgeKind.DATA)
        if not self._readers[number] or self._readers[number][-1] != node:
            self._readers[number].append(node)
        return number

    def write(self, node: int, storage: Hashable, role: Role, size: int | None) -> int:
        """Return the new value that a node makes in a storage, with edges from the users of the old one."""
        previous = self._current.get(storage)
        if previous is not None:
            for reader in self._readers[previous]:
                self._join(reader, node, EdgeKind.REUSE)
            writer = self._writer[previous]
            if writer is not None:
                self._join(writer, node, EdgeKind.REUSE)
            role, size = self.values[previous].role, self.values[previous].bytes
        return self._make(storage, node, role, size)

    def mark(self, storage: Hashable, role: Role) -> None:
        """Set the role of all values of a storage, if it becomes known only later."""
        if storage in self._current:
            self._roles[self.values[self._current[storage]].storage] = role

    def final_values(self) -> tuple[Value, ...]:
        """Return all values."""
        return tuple(replace(value, role=self._roles.get(value.storage, value.role)) for value in self.values)

    def add_order(self, node: int, state: str) -> None:
        """Add an edge to a node from the last one that changed the same state outside the tensors."""
        if state in self._last_by_state:
            self._join(self._last_by_state[state], node, EdgeKind.ORDER)
        self._last_by_state[state] = node

    def edges(self) -> tuple[Edge, ...]:
        """Return the edges found so far, in order."""
        return tuple(sorted(Edge(before, after, why) for (before, after), why in self._edges.items()))

    def _make(self, storage: Hashable, writer: int | None, role: Role, size: int | None) -> int:
        previous = self._current.get(storage)
        if previous is None:
            storage_number, version = self._storages, 0
            self._storages += 1
        else:
            storage_number, version = self.values[previous].storage, self.values[previous].version + 1
        number = self._current[storage] = len(self.values)
        self.values.append(Value(storage_number, version, role, size))
        self._writer.append(writer)
        self._readers.append([])
        return number

    def _join(self, before: int, after: int, why: EdgeKind) -> None:
        if before != after:
            existing = self._edges.get((before, after))
            if existing is None or STRENGTH.index(why) < STRENGTH.index(existing):
                self._edges[before, after] = why
