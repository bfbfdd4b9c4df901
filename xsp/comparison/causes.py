"""The causes of a change of the step, in words: the phases that account for it, and the activity of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xsp.analyses.phases import BETWEEN, PHASE_OF_KIND, REST
from xsp.comparison.evidence import FASTER, FASTER_HERE, SLOWER, SLOWER_HERE
from xsp.comparison.rows import ComparedRow, Comparison
from xsp.schema import WINDOW
from xsp.texts import ms_text

MIN_PART_SHARE = 0.25
"""Minimum change of a part, as a share of the change of the whole, for the part to be named."""

MIN_LAYER_SHARE = 0.5
"""Minimum change of a layer without a verdict, as a share of the change of the whole, for the layer to be named."""

MAX_GONE_SHARE = 0.05
"""A part that takes less than this share of its time on the other side is called gone, or new."""

MIN_STEP_SHARE = 0.05
"""Minimum change of device work or idle time, as a share of a step of A, to be mentioned."""

MIN_LAUNCH_CHANGE = 0.1
"""Minimum change of the number of launches, as a share, to be mentioned."""

MAX_PARTS = 3
"""Maximum number of parts named of each kind."""

PHASES = {REST: "the time outside the phases", BETWEEN: "work between steps"}
IDLE = {
    "data loading": "waiting for the data loader",
    "sync": "waiting for synchronising calls",
    "host-bound": "waiting for the host to launch",
    "kernel wait": "waiting of launched work for its turn",
    "unknown": "idle time without a known cause",
}


class ComparedPart(NamedTuple):
    """A part of the whole, with its time on both sides in milliseconds; 0 on a side that lacks it."""

    name: str
    a_ms: float
    b_ms: float

    @property
    def change_ms(self) -> float:
        """The time of B minus that of A."""
        return self.b_ms - self.a_ms

    def __str__(self) -> str:
        """Return the change in words."""
        times = f"({both_ms(self.a_ms, self.b_ms)})"
        if self.b_ms < MAX_GONE_SHARE * self.a_ms:
            return f"{self.name} is gone {times}"
        if self.a_ms < MAX_GONE_SHARE * self.b_ms:
            return f"{self.name} is new {times}"
        return f"{self.name} {more_or_less(self.change_ms)} {times}"


def parts(rows: Sequence[ComparedRow], names: dict[str, str] | None = None) -> list[ComparedPart]:
    """Return the rows of a section as parts."""
    return [ComparedPart((names or {}).get(row.name, row.name), row.a_ms or 0.0, row.b_ms or 0.0) for row in rows]


def main_parts(candidates: Sequence[ComparedPart], change_ms: float) -> list[ComparedPart]:
    """Return the parts with a large share of a change, then parts that changed as much the other way; largest first."""
    large = [part for part in candidates if abs(part.change_ms) >= MIN_PART_SHARE * abs(change_ms)]
    large.sort(key=lambda part: -abs(part.change_ms))
    same_direction = [part for part in large if part.change_ms * change_ms > 0]
    opposite = [part for part in large if part.change_ms * change_ms <= 0]
    return [*same_direction[:MAX_PARTS], *opposite[: MAX_PARTS - 1]] if same_direction else []


def sentence(changes: Sequence[ComparedPart], change_ms: float) -> str:
    """Return the parts in words: parts that changed in the same direction, and after a "but" the opposite ones."""
    same_direction = ", ".join(str(part) for part in changes if part.change_ms * change_ms > 0)
    opposite = ", ".join(str(part) for part in changes if part.change_ms * change_ms <= 0)
    return ", but ".join(filter(None, (same_direction, opposite)))


def more_or_less(change_ms: float) -> str:
    """Return a change in words, such as `3.2 ms less`."""
    return f"{ms_text(abs(change_ms))} {'more' if change_ms > 0 else 'less'}"


CHANGED = (SLOWER, FASTER, SLOWER_HERE, FASTER_HERE)


def iteration_or_step(comparison: Comparison) -> ComparedPart:
    """Return the whole that the phases are parts of: an iteration of the loop if both sides have it, else the step."""
    return parts([next(iter(comparison.section("loop")), comparison.step)])[0]._replace(name="step")


def figure_unit(comparison: Comparison) -> str:
    """Return the unit of the figures: a step, or the whole recording if a side has no steps."""
    has_no_step = WINDOW in comparison.step.name.split()
    return "in all that was recorded" if has_no_step else "a step"


def phases(comparison: Comparison) -> list[ComparedPart]:
    """Return the phases that account for the change of the whole."""
    return main_parts(parts(comparison.section("phase"), PHASES), iteration_or_step(comparison).change_ms)


def certain_phases(comparison: Comparison) -> list[ComparedPart]:
    """Return the phases that certainly changed, by a share of the whole or more, largest first.

    With several runs per side, the phases are tested themselves; with one, the calls that they consist of.
    """
    min_change_ms = MIN_STEP_SHARE * iteration_or_step(comparison).a_ms
    changed = {row.name for row in comparison.section("phase") if row.verdict in CHANGED}
    kinds = {row.name.partition(" ")[0] for row in comparison.section("call") if row.verdict in CHANGED}
    changed |= {PHASE_OF_KIND.get(kind, kind) for kind in kinds}
    rows = [row for row in comparison.section("phase") if row.name in changed]
    large = [part for part in parts(rows, PHASES) if abs(part.change_ms) >= min_change_ms]
    return sorted(large, key=lambda part: -abs(part.change_ms))


def on_device(comparison: Comparison) -> Iterator[str]:
    """Yield sentences on the device: its work by class and operator, the causes of idle time, and the launches."""
    min_change_ms, rows, unit = (
        MIN_STEP_SHARE * iteration_or_step(comparison).a_ms,
        comparison.section("kernel class"),
        figure_unit(comparison),
    )
    if not (any(row.a_ms for row in rows) and any(row.b_ms for row in rows)):
        return
    work = _total("device work", parts(rows))
    if abs(work.change_ms) < min_change_ms:
        yield f"Kernels and copies take about the same ({both_ms(work.a_ms, work.b_ms)} {unit})."
    else:
        by_class = sentence(main_parts(parts(rows), work.change_ms), work.change_ms)
        yield f"Kernels and copies take {_change_text(work, unit)}" + (f": {by_class}." if by_class else ".")
        operators = parts(comparison.section("operator on device"))
        total = _total("", operators)
        if by_operator := sentence(main_parts(operators, total.change_ms), total.change_ms):
            yield f"By operator: {by_operator}."
    causes = parts(comparison.section("idle"), IDLE)
    idle = _total("idle", causes)
    if abs(idle.change_ms) >= min_change_ms:
        reason = sentence(main_parts(causes, idle.change_ms), idle.change_ms)
        yield f"The device is idle {_change_text(idle, unit)}" + (f": {reason}." if reason else ".")
    for row in comparison.section("launch"):
        if row.a_calls and row.b_calls and abs(row.b_calls - row.a_calls) > MIN_LAUNCH_CHANGE * row.a_calls:
            yield f"The host launches {row.b_calls:,.0f} times {unit} instead of {row.a_calls:,.0f}."


def layers(comparison: Comparison) -> Iterator[str]:
    """Yield a sentence on the layers that account for the change of the whole and certainly changed.

    If the step certainly changed and no layer did, the sentence names the layer with the largest change, as uncertain:
    with three runs per side, a row among many is never certain while the step, which is a single row, may be.
    """
    change_ms = iteration_or_step(comparison).change_ms
    rows = comparison.section("layer")
    changed = [_layer(row) for row in rows if row.verdict in CHANGED]
    if changed:
        if text := sentence(main_parts(changed, change_ms), change_ms):
            yield f"By layer, on the host: {text}."
        return
    if comparison.step.verdict not in CHANGED:
        return
    large = [
        part for part in (_layer(row) for row in rows)
        if part.change_ms * change_ms > 0 and abs(part.change_ms) >= MIN_LAYER_SHARE * abs(change_ms)
    ]  # fmt: skip
    if large:
        largest = max(large, key=lambda part: abs(part.change_ms))
        change = f"{more_or_less(largest.change_ms)} ({both_ms(largest.a_ms, largest.b_ms)})"
        yield (
            f"The layer that changed most, on the host: {largest.name}, {change}; "
            "this needs more repeats to be certain."
        )


def _layer(row: ComparedRow) -> ComparedPart:
    return ComparedPart(f"{row.name} ({row.type})" if row.type else row.name, row.a_ms or 0.0, row.b_ms or 0.0)


def _total(name: str, summands: Sequence[ComparedPart]) -> ComparedPart:
    return ComparedPart(name, sum(part.a_ms for part in summands), sum(part.b_ms for part in summands))


def _change_text(part: ComparedPart, unit: str) -> str:
    return f"{more_or_less(part.change_ms)} {unit} ({both_ms(part.a_ms, part.b_ms)})"


def both_ms(a: float, b: float) -> str:
    """Return the times of both sides; the unit appears once if both have the same."""
    (value_a, unit_a), (value_b, unit_b) = ms_text(a).split(), ms_text(b).split()
    if not b:
        unit_b = unit_a
    if not a or unit_a == unit_b:
        return f"{value_a} → {value_b} {unit_b}"
    return f"{value_a} {unit_a} → {value_b} {unit_b}"
