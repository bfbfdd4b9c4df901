"""What spans on threads have from one another: steps, layers, phases and keys from above, sums from inside.

A parent stands before its children in the order of the sweep. So what is handed down is known as the spans come, and
what is handed up follows in one pass backwards.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xsp.intake.sweep import CONTAINED, Placed
from xsp.span import Level

MOST = 2**63 - 1
"""Of bytes: the table holds no more."""

_WORD = 2**64 - 1
_MIX = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: an odd number whose product spreads what differs little."""


class Steps(NamedTuple):
    """The steps of a trace, in the order of their starts, in nanoseconds."""

    starts: Sequence[int]
    ends: Sequence[int]

    def at(self, time: int) -> int:
        """Return the number of the step in whose time something began; -1 if there is none."""
        step = bisect_right(self.starts, time) - 1
        return step if step >= 0 and time < self.ends[step] else -1


class Down(NamedTuple):
    """What a span has from above; -1 stands for none."""

    number: int
    parent: int
    step: int
    layer: int
    """The innermost: itself, or above."""

    key: int
    """Place in the structure of the step, in 64 bits."""

    rule: int
    phase: int
    layers: int
    """Above it, and itself."""

    layer_index: int
    """Of a layer: its place among those of its step."""


class Up(NamedTuple):
    """What is inside a span."""

    number: int
    allocated: int
    """Bytes; -1 on a thread without allocations, and where they are more than the table holds."""

    counted: int
    """A bit for each sort of figure that is known of a span inside."""


class Handing:
    """The spans of a trace, and what they hand on."""

    def __init__(self, steps: Steps, rooted: bool) -> None:
        """Begin.

        Args:
            steps: of the trace.
            rooted: the first span is the step that the trace is as a whole: what has no parent is inside it.
        """
        self.deepest = 0
        """Spans above the deepest one."""

        self._steps, self._rooted = steps, rooted
        self._numbers, self._parents, self._threads = array("q"), array("i"), array("i")
        self._rules, self._counted = bytearray(), bytearray()
        self._allocated: dict[int, int] = {}
        self._siblings: dict[int, dict[int, int]] = {}

        self.close = self._siblings.pop
        """To be called with the place of a span that nothing more can be inside of."""

    def down(self, placed: Iterable[Placed]) -> Iterator[Down | tuple[int, ...]]:
        """Yield what each span has from above, in the order of the sweep.

        A key is made of the parent's, of what a span is, and of its number among siblings that are alike. Stored runs
        hold keys, so how they are made must not change.
        """
        numbers, parents, threads, rules, figures = (
            self._numbers, self._parents, self._threads, self._rules, self._counted
        )  # fmt: skip
        step_of, layers, counts, keys, phases = array("i"), array("q"), array("h"), array("Q"), bytearray()
        siblings, layers_in, root = self._siblings, defaultdict[int, int](int), 0 if self._rooted else -1
        apart: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for place, (host, parent, rule, depth) in enumerate(placed):
            number, thread, _, level, _, start, _, _, _, _, _, code, phase, counted, allocated = host
            if parent < 0 and place:
                parent, rule = root, CONTAINED if self._rooted else 0
            if parent >= 0:
                step, layer, count, key = step_of[parent], layers[parent], counts[parent], keys[parent]
                phase = phase or phases[parent]
                if rule == CONTAINED:
                    alike = siblings.get(parent)
                    if alike is None:
                        alike = siblings[parent] = {}
                else:  # the parent may be closed, so those children are counted by themselves
                    alike = apart[rule, parent]
                up = numbers[parent]
            else:
                step, layer, count, key, up = self._steps.at(start), -1, 0, 0, -1
                alike = apart[rule, step]
            alike[code] = ordinal = alike.get(code, 0) + 1
            key = ((key ^ code) * _MIX + (ordinal << 2 | rule)) & _WORD
            key ^= key >> 32
            index = -1
            if level == Level.LAYER:
                layer, count, index = number, count + 1, layers_in[step]
                layers_in[step] = index + 1
            if depth > self.deepest:
                self.deepest = depth
            if allocated is not None:
                self._allocated[place] = allocated
            numbers.append(number)
            parents.append(parent)
            threads.append(thread)
            rules.append(rule)
            figures.append(counted)
            step_of.append(step)
            layers.append(layer)
            counts.append(count)
            keys.append(key)
            phases.append(phase)
            yield number, up, step, layer, key, rule, phase, count, index

    def up(self) -> Iterator[Up | tuple[int, ...]]:
        """Yield what is inside of the spans that there is something in; all spans must have been handed down."""
        if not self._allocated and not any(self._counted):
            return
        remembering = {self._threads[place] for place in self._allocated}
        sums, inside = dict(self._allocated), bytearray(len(self._numbers))
        for place in range(len(self._numbers) - 1, -1, -1):
            parent = self._parents[place]
            if parent >= 0:
                inside[parent] |= inside[place] | self._counted[place]
                if self._rules[place] == CONTAINED and place in sums:
                    sums[parent] = sums.get(parent, 0) + sums[place]
        for place, number in enumerate(self._numbers):
            remembers = self._threads[place] in remembering and place not in self._allocated
            allocated = sums.get(place, 0) if remembers else -1
            if remembers or inside[place]:
                yield number, allocated if allocated <= MOST else -1, inside[place]
