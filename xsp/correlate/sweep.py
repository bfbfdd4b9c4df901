"""The parents of millions of host spans: one pass over them in the order of their starts, with a stack for each thread.

The rules are those of `xsp.correlate`: the innermost span around it on its thread that is no deeper in the stack; and
a backward operator belongs to the layer, else to the step, of the forward operator with its sequence number. Intervals
that overlap without one holding the other do occur, where clocks differ; a stack is right for those too.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from xsp.schema import DEEPEST, Level

MOST_OPEN = 2 * DEEPEST
"""Spans on a thread that are looked at for one that is around another. More are open only where spans overlap without
one holding the other, and by far not each can be tried for each."""

PHASES = ("forward", "backward", "optimizer")
BACKWARD = 2

CONTAINED, FOLLOWED = 1, 2
"""How a parent was found; 0 where there is none."""


class Host(NamedTuple):
    """A span on a thread. Spans come in the order in which an outer one stands before those inside it."""

    number: int
    """Its name in the table, not below 0."""

    thread: int
    level: int
    deepest: int
    """Of the levels that may be around it."""

    start: int
    end: int
    sequence: int | None
    forward_thread: int | None

    code: int
    """What it is, in 64 bits; the same for all that are alike."""

    phase: int
    """Its place among `PHASES`, from 1; 0 where it is that of the span above."""

    counted: int
    """A bit for each sort of figure that is known of the span itself."""

    allocated: int | None
    """Bytes, where it is an allocation; then nothing is inside it, whatever the times say."""


Placed = tuple[Any, int, int, int]
"""A `Host`; the place of its parent in the order of the sweep, -1 where it has none; the rule; the spans above it."""


def sweep(
    hosts: Iterable[Host | tuple[Any, ...]],
    tolerance: int,
    processes: Sequence[int],
    closed: Callable[[int, None], object],
) -> Iterator[Placed]:
    """Yield where each span belongs, in the order in which they come.

    Args:
        hosts: sorted: see `Host`.
        tolerance: nanoseconds by which a span may stick out of its parent.
        processes: of the threads, by their numbers.
        closed: called with the place of a span in the order, from 0, when nothing more can be inside it.
    """
    parents, depths, levels = array("q"), array("i"), array("h")
    sequences = _Sequences()
    stacks: dict[int, list[tuple[int, int, int, int]]] = {}
    for place, host in enumerate(hosts):
        _, thread, level, deepest, start, end, number, forward, _, phase, _, allocated = host
        stack = stacks.get(thread)
        if stack is None:
            stack = stacks[thread] = []
        middle = (start + end) // 2
        earliest = start if level >= Level.OP else start - tolerance  # nothing that follows begins before
        while stack and stack[-1][0] < earliest:
            closed(stack.pop()[3], None)
        parent, rule = -1, 0
        for outer_end, outer_start, outer_level, outer in islice(reversed(stack), MOST_OPEN):
            if outer_level <= deepest and outer_start <= middle <= outer_end and end <= outer_end + tolerance:
                parent, rule = outer, CONTAINED
                break
        if number is not None:
            process, backward = processes[thread], phase == BACKWARD
            if backward and not sequences.is_frame(parent, number):
                maker = sequences.maker(process, forward, number)
                while maker >= 0 and levels[maker] >= Level.OP:
                    maker = parents[maker]
                if maker >= 0 and (parent < 0 or levels[maker] == Level.LAYER):
                    parent, rule = maker, FOLLOWED
            sequences.add(place, process, thread, number, backward, inside=parent)
        parents.append(parent)
        levels.append(level)
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths.append(depth)
        if allocated is None and depth < DEEPEST:
            stack.append((end, start, level, place))
        yield host, parent, rule, depth


class _Sequences:
    """Which operator made which autograd node."""

    def __init__(self) -> None:
        self._makers: dict[tuple[int, int], int] = {}
        self._threads: dict[tuple[int, int], int] = {}
        self._frames: dict[int, int] = {}

    def is_frame(self, parent: int, number: int) -> bool:
        """Return whether the span around follows the same number, so that this one is inside it."""
        return self._frames.get(parent) == number

    def maker(self, process: int, thread: int | None, number: int) -> int:
        """Return the last forward operator with a number; -1 if there is none, or if it may be of several threads."""
        if thread is None:
            thread = self._threads.get((process, number), -1)
        return self._makers.get((thread, number), -1)

    def add(self, place: int, process: int, thread: int, number: int, backward: bool, inside: int) -> None:
        """Take note of an operator."""
        if backward:
            self._frames[place] = number
            return
        self._makers[thread, number] = place
        if inside not in self._frames:
            known = self._threads.setdefault((process, number), thread)
            if known != thread:
                self._threads[process, number] = -1
