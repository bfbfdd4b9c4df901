"""Data flow from storages: each write makes a new version, and edges follow from reads and writes of memory.

A node depends on the nodes that wrote the bytes that it reads. Writes to disjoint parts of a storage are independent,
and a node that overwrites something without reading it only has to come later: this is reuse of memory, not data flow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace

from xsp.graph.node import Edge, EdgeKind, Role, Value
from xsp.graph.regions import Contents, Region, covers, overlap

STRENGTH = (EdgeKind.DATA, EdgeKind.REUSE, EdgeKind.ORDER)


class Flow:
    """The values in the order of execution, and the edges between nodes.

    A storage is named by any hashable object: the address of a live storage, or a name in a program in which each name
    is written once.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self._current: dict[Hashable, int] = {}
        self._contents: dict[Hashable, Contents] = {}
        self._readers: dict[Hashable, list[tuple[int, Region]]] = defaultdict(list)
        self._sources: dict[tuple[int, Hashable], set[int]] = {}
        """Node and storage that it read → the writers of what it read."""

        self._writes: set[tuple[int, Hashable]] = set()
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

    def read(self, node: int, storage: Hashable, through: int | None = None, region: Region = None) -> int:
        """Return the value that a node reads, with edges from its writers.

        Args:
            node: place of the reader.
            storage: storage that was seen before.
            through: node that made the tensor by which the storage is read, if that is a view.
            region: what it reads of the storage; for a view, what its results cover.
        """
        number = self._current[storage]
        writers = set(self._contents[storage].writers(region))
        seen = None
        if through is not None and (through, storage) not in self._writes:
            seen = self._sources.get((through, storage), set())
            # data reaches the reader through the view, unless what the view saw was overwritten since, at least partly
            self._join(through, node, EdgeKind.DATA if seen <= writers else EdgeKind.REUSE)
        for writer in writers if seen is None or not seen <= writers else writers - seen:
            self._join(writer, node, EdgeKind.DATA)
        self._sources.setdefault((node, storage), set()).update(writers)
        readers = self._readers[storage]
        if not (region is None and readers and readers[-1][0] == node and readers[-1][1] is None):
            readers.append((node, region))
        return number

    def write(
        self,
        node: int,
        storage: Hashable,
        role: Role,
        size: int | None,
        region: Region = None,
        *,
        through: int | None = None,
        replaces: bool = True,
    ) -> int:
        """Return the new value that a node makes in a storage, with edges from the users of what it overwrites.

        Args:
            node: place of the writer.
            storage: any storage.
            role: role of the storage if it is new.
            size: bytes of the storage if it is new.
            region: what it writes of the storage.
            through: node that made the tensor by which it writes, if that is a view.
            replaces: whether it writes all of the region; otherwise, only parts of it that are not known.
        """
        previous = self._current.get(storage)
        if previous is not None:
            for reader, read_region in self._readers[storage]:
                if overlap(read_region, region):
                    self._join(reader, node, EdgeKind.REUSE)
            for writer in self._contents[storage].writers(region):
                self._join(writer, node, EdgeKind.REUSE)
            if through is not None:
                self._join(through, node, EdgeKind.REUSE)
            if replaces:
                self._readers[storage] = [entry for entry in self._readers[storage] if not covers(region, entry[1])]
            self._contents[storage].write(region, node, replaces=replaces)
            role, size = self.values[previous].role, self.values[previous].bytes
        self._writes.add((node, storage))
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
            self._contents[storage] = Contents(() if writer is None else (writer,))
        else:
            storage_number, version = self.values[previous].storage, self.values[previous].version + 1
        number = self._current[storage] = len(self.values)
        self.values.append(Value(storage_number, version, role, size))
        return number

    def _join(self, before: int, after: int, why: EdgeKind) -> None:
        if before != after:
            existing = self._edges.get((before, after))
            if existing is None or STRENGTH.index(why) < STRENGTH.index(existing):
                self._edges[before, after] = why
