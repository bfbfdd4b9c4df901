"""What spans on threads have from one another: steps, layers, phases and keys from above, sums from inside.

A parent stands before its children in the order of the sweep. So what is handed down is known as the spans come, and
each span hands up what it has itself as it comes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from xsp.correlate.sweep import CONTAINED, Placed
from xsp.schema import Level

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

    layers: int
    """Above it, and itself."""

    layer_index: int
    """Of a layer: its place among those of its step."""

    key: int
    """Place in the structure of the step, in 64 bits."""

    evidence: int
    """The rule, and four times the phase."""


class Up(NamedTuple):
    """What is inside a span."""

    number: int
    allocated: int
    """Bytes; -1 where they are more than the table holds."""

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
        self._numbers, self._parents, self._rules = array("q"), array("i"), bytearray()
        self._allocated: dict[int, int] = defaultdict(int)
        self._counted: dict[int, int] = defaultdict(int)
        self._siblings: dict[int, dict[int, int]] = {}

        self.close = self._siblings.pop
        """To be called with the place of a span that nothing more can be inside of."""

    def down(self, placed: Iterable[Placed]) -> Iterator[Down | tuple[int, ...]]:
        """Yield what each span has from above, in the order of the sweep.

        A key is made of the parent's, of what a span is, and of its number among siblings that are alike. Stored runs
        hold keys, so how they are made must not change.
        """
        numbers, parents, rules = self._numbers, self._parents, self._rules
        step_of, layers, counts, keys, phases = array("i"), array("q"), array("h"), array("Q"), bytearray()
        siblings, layers_in, root = self._siblings, defaultdict[int, int](int), 0 if self._rooted else -1
        apart: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for place, (host, parent, rule, depth) in enumerate(placed):
            number, _, level, _, start, _, _, _, code, phase, counted, allocated = host
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
            numbers.append(number)
            parents.append(parent)
            rules.append(rule)
            if allocated or counted:
                self._hand_up(place, allocated or 0, counted)
            step_of.append(step)
            layers.append(layer)
            counts.append(count)
            keys.append(key)
            phases.append(phase)
            yield number, up, step, layer, count, index, key, phase << 2 | rule

    def _hand_up(self, place: int, allocated: int, counted: int) -> None:
        """Let all spans above one know of what is inside them; an allocation counts where times say that it is."""
        above, parents, rules, inside = self._parents[place], self._parents, self._rules, self._counted
        outer, rule = above, rules[place]
        while allocated and outer >= 0 and rule == CONTAINED:
            self._allocated[outer] += allocated
            outer, rule = parents[outer], rules[outer]
        while above >= 0 and inside[above] | counted != inside[above]:
            inside[above] |= counted
            above = parents[above]

    def up(self) -> Iterator[Up | tuple[int, ...]]:
        """Yield what is inside of the spans that there is something in; all spans must have been handed down."""
        for place in self._allocated.keys() | self._counted.keys():
            allocated = self._allocated.get(place, 0)
            yield self._numbers[place], allocated if allocated <= MOST else -1, self._counted.get(place, 0)
