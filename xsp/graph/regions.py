"""Regions of memory: the bytes of a storage that a tensor covers, and who wrote which of them.

A region is a list of byte ranges. A tensor that covers its whole storage has the region None, so nothing is computed
for the usual tensors; only slices and other parts need the ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Region: TypeAlias = "np.ndarray | None"
"""Rows of start and end of byte ranges, ascending and disjoint; None for the whole storage."""

MOST_RANGES = 1 << 19
"""Most ranges of a region; a tensor with more counts as one range from its first to its last byte."""

_END = 1 << 62


def of_tensor(offset: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, size: int | None) -> Region:
    """Return the region of a tensor.

    Args:
        offset: place of its first element in the storage, in elements.
        shape: lengths of its dimensions.
        strides: strides in elements, not negative.
        item_bytes: bytes of an element.
        size: bytes of the storage; None if unknown.
    """
    import numpy as np

    if 0 in shape:
        return np.empty((0, 2), np.int64)
    run = 1
    steps: list[tuple[int, int]] = []
    for step, length in sorted((step, length) for step, length in zip(strides, shape, strict=True) if length > 1):
        if step <= run:  # it continues the range, or repeats it
            run += step * (length - 1)
        else:
            steps.append((step, length))
    count = 1
    for _, length in steps:
        count *= length
    if count > MOST_RANGES:
        run, steps = run + sum(step * (length - 1) for step, length in steps), []
    starts = np.array([offset], np.int64)
    for step, length in steps:
        starts = (starts[None, :] + step * np.arange(length, dtype=np.int64)[:, None]).ravel()
    starts.sort()
    gaps = np.flatnonzero(np.diff(starts) > run) + 1
    first, last = starts[np.concatenate(([0], gaps))], starts[np.concatenate((gaps - 1, [len(starts) - 1]))]
    region = np.stack((first, last + run), axis=1) * item_bytes
    return None if size is not None and len(region) == 1 and region[0, 0] <= 0 and region[0, 1] >= size else region


def is_exact(region: Region, elements: int, item_bytes: int) -> bool:
    """Return whether the ranges of a region have no byte that a tensor of so many distinct elements does not cover."""
    return region is None or int((region[:, 1] - region[:, 0]).sum()) <= elements * item_bytes


def union(regions: Sequence[Region]) -> Region:
    """Return the region of all bytes of several regions of a storage."""
    import numpy as np

    if any(region is None for region in regions):
        return None
    if len(regions) == 1:
        return regions[0]
    ranges = np.concatenate([region for region in regions if region is not None])
    ranges = ranges[np.argsort(ranges[:, 0])]
    if not len(ranges):
        return ranges
    ends = np.maximum.accumulate(ranges[:, 1])
    breaks = np.flatnonzero(ranges[1:, 0] > ends[:-1]) + 1
    first = ranges[np.concatenate(([0], breaks)), 0]
    return np.stack((first, ends[np.concatenate((breaks - 1, [len(ranges) - 1]))]), axis=1)


def overlap(first: Region, second: Region) -> bool:
    """Return whether two regions of a storage have bytes in common."""
    import numpy as np

    if first is None or second is None:
        return all(region is None or len(region) > 0 for region in (first, second))
    places = np.searchsorted(second[:, 0], first[:, 1], "left") - 1
    return bool(np.any((places >= 0) & (second[places, 1] > first[:, 0]))) if len(second) else False


def covers(outer: Region, inner: Region) -> bool:
    """Return whether a region has all bytes of another one."""
    import numpy as np

    if outer is None or (inner is not None and not len(inner)):
        return True
    if inner is None or not len(outer):
        return False
    places = np.searchsorted(outer[:, 0], inner[:, 0], "right") - 1
    return bool(np.all((places >= 0) & (outer[places, 1] >= inner[:, 1])))


class Contents:
    """The nodes that wrote the current content of a storage, by its parts."""

    def __init__(self, writers: tuple[int, ...]) -> None:
        """Begin with one content everywhere."""
        self._starts: np.ndarray | None = None
        self._owners: np.ndarray | None = None
        self._sets: list[tuple[int, ...]] = [writers]

    def writers(self, region: Region) -> tuple[int, ...]:
        """Return the nodes that wrote what is in a region, in order."""
        if self._starts is None or self._owners is None:
            return self._sets[0]
        if region is None:
            owners = self._owners
        else:
            import numpy as np

            ends = np.append(self._starts[1:], _END)
            places = np.searchsorted(region[:, 0], ends, "left") - 1
            inside = (places >= 0) & (region[places, 1] > self._starts) if len(region) else np.zeros(len(ends), bool)
            owners = self._owners[inside]
        return tuple(sorted({writer for owner in set(owners.tolist()) for writer in self._sets[owner]}))

    def write(self, region: Region, node: int, *, replaces: bool) -> None:
        """Enter a node as the writer of a region.

        Args:
            region: the region.
            node: the writer.
            replaces: whether it writes all of the region, so that nothing of the earlier content is left.
        """
        if region is None and replaces:
            self._starts = self._owners = None
            self._sets = [(node,)]
            return
        import numpy as np

        bounds = np.array([[0, _END]], np.int64) if region is None else region
        if not len(bounds):
            return
        starts = np.zeros(1, np.int64) if self._starts is None else self._starts
        owners = np.zeros(1, np.int64) if self._owners is None else self._owners
        cut = np.union1d(starts, bounds.ravel())
        owners = owners[np.searchsorted(starts, cut, "right") - 1]
        places = np.searchsorted(bounds[:, 0], cut, "right") - 1
        inside = (places >= 0) & (bounds[places, 1] > cut)
        if replaces:
            owners[inside] = self._number((node,))
        else:
            for owner in set(owners[inside].tolist()):
                owners[inside & (owners == owner)] = self._number((*self._sets[owner], node))
        changes = np.append(True, np.diff(owners) != 0)
        self._starts, self._owners = cut[changes], owners[changes]

    def _number(self, writers: tuple[int, ...]) -> int:
        self._sets.append(writers)
        return len(self._sets) - 1
