"""The causes of a change of the step, in words: the phases that account for it, and the activity of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xsp.analyses.phases import BETWEEN, DATA, REST
from xsp.comparison.evidence import FASTER, FASTER_HERE, SLOWER, SLOWER_HERE
from xsp.comparison.rows import Comparison, Row
from xsp.correlate.columns import WINDOW

WORTH_SAYING = 0.25
"""Minimum change of a part, as a share of the change of the whole, for the part to be named."""

MOST_OF_IT = 0.5
"""Minimum change of a layer without a verdict, as a share of the change of the whole, for the layer to be named."""

GONE = 0.05
"""A part that takes less than this share of its time on the other side is called gone, or new."""

SMALL = 0.05
"""Minimum change of device work or idle time, as a share of a step of A, to be mentioned."""

MANY_LAUNCHES = 0.1
"""Minimum change of the number of launches, as a share, to be mentioned."""

MOST = 3
"""Maximum number of parts named of each kind."""

PHASES = {DATA: "waiting for data", REST: "the rest of the step", BETWEEN: "work between steps"}
IDLE = {
    "data loading": "waiting for the data loader",
    "sync": "waiting for synchronising calls",
    "host-bound": "waiting for the host to launch",
    "kernel wait": "waiting of launched work for its turn",
    "unknown": "idle time without a known cause",
}


class Part(NamedTuple):
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
        if self.b_ms < GONE * self.a_ms:
            return f"{self.name} is gone {times}"
        if self.a_ms < GONE * self.b_ms:
            return f"{self.name} is new {times}"
        return f"{self.name} {more_or_less(self.change_ms)} {times}"


def parts(rows: Sequence[Row], names: dict[str, str] | None = None) -> list[Part]:
    """Return the rows of a section as parts."""
    return [Part((names or {}).get(row.name, row.name), row.a_ms or 0.0, row.b_ms or 0.0) for row in rows]


def main_parts(found: Sequence[Part], change_ms: float) -> list[Part]:
    """Return the parts with a large share of a change, then parts that changed as much the other way; largest first."""
    large = [part for part in found if abs(part.change_ms) >= WORTH_SAYING * abs(change_ms)]
    large.sort(key=lambda part: -abs(part.change_ms))
    along = [part for part in large if part.change_ms * change_ms > 0]
    against = [part for part in large if part.change_ms * change_ms <= 0]
    return [*along[:MOST], *against[: MOST - 1]] if along else []


def sentence(found: Sequence[Part], change_ms: float) -> str:
    """Return the parts in words: parts that changed in the same direction, and after a "but" the opposite ones."""
    along = ", ".join(str(part) for part in found if part.change_ms * change_ms > 0)
    against = ", ".join(str(part) for part in found if part.change_ms * change_ms <= 0)
    return ", but ".join(filter(None, (along, against)))


def more_or_less(change_ms: float) -> str:
    """Return a change in words, such as `3.2 ms less`."""
    return f"{ms(abs(change_ms))} {'more' if change_ms > 0 else 'less'}"


CHANGED = (SLOWER, FASTER, SLOWER_HERE, FASTER_HERE)


def whole(found: Comparison) -> Part:
    """Return the whole that the phases are parts of: an iteration of the loop if both sides have it, else the step."""
    return parts([next(iter(found.section("loop")), found.step)])[0]._replace(name="step")


def of_what(found: Comparison) -> str:
    """Return the unit of the figures: a step, or the whole recording if a side has no steps."""
    no_step = WINDOW in found.step.name.split()
    return "in all that was recorded" if no_step else "a step"


def phases(found: Comparison) -> list[Part]:
    """Return the phases that account for the change of the whole."""
    return main_parts(parts(found.section("phase"), PHASES), whole(found).change_ms)


def certain_phases(found: Comparison) -> list[Part]:
    """Return the phases that certainly changed, by a share of the whole or more, largest first.

    With several runs per side, the phases are tested themselves; with one, the calls that they consist of.
    """
    least = SMALL * whole(found).a_ms
    moved = {row.name for row in found.section("phase") if row.verdict in CHANGED}
    moved |= {row.name.partition(" ")[0] for row in found.section("call") if row.verdict in CHANGED}
    rows = [row for row in found.section("phase") if row.name in moved]
    large = [part for part in parts(rows, PHASES) if abs(part.change_ms) >= least]
    return sorted(large, key=lambda part: -abs(part.change_ms))


def on_device(found: Comparison) -> Iterator[str]:
    """Yield sentences on the device: its work by class and operator, the causes of idle time, and the launches."""
    least, rows, unit = SMALL * whole(found).a_ms, found.section("kernel class"), of_what(found)
    if not _on_both(rows):
        return
    work = _total("device work", parts(rows))
    if abs(work.change_ms) < least:
        yield f"Kernels and copies take about the same ({both_ms(work.a_ms, work.b_ms)} {unit})."
    else:
        by_class = sentence(main_parts(parts(rows), work.change_ms), work.change_ms)
        yield f"Kernels and copies take {_by(work, unit)}" + (f": {by_class}." if by_class else ".")
        operators = parts(found.section("operator on device"))
        total = _total("", operators)
        if by_operator := sentence(main_parts(operators, total.change_ms), total.change_ms):
            yield f"By operator: {by_operator}."
    causes = parts(found.section("idle"), IDLE)
    idle = _total("idle", causes)
    if abs(idle.change_ms) >= least:
        reason = sentence(main_parts(causes, idle.change_ms), idle.change_ms)
        yield f"The device is idle {_by(idle, unit)}" + (f": {reason}." if reason else ".")
    for row in found.section("launch"):
        if row.a_calls and row.b_calls and abs(row.b_calls - row.a_calls) > MANY_LAUNCHES * row.a_calls:
            yield f"The host launches {row.b_calls:,.0f} times {unit} instead of {row.a_calls:,.0f}."


def layers(found: Comparison) -> Iterator[str]:
    """Yield a sentence on the layers that account for the change of the whole and certainly changed.

    If the step certainly changed and no layer did, the sentence names the layer with the largest change, as uncertain:
    with three runs per side, a row among many is never certain while the step, which is a single row, may be.
    """
    change_ms = whole(found).change_ms
    rows = found.section("layer")
    moved = [_layer(row) for row in rows if row.verdict in CHANGED]
    if moved:
        if text := sentence(main_parts(moved, change_ms), change_ms):
            yield f"By layer, on the host: {text}."
        return
    if found.step.verdict not in CHANGED:
        return
    largest = [
        part for part in (_layer(row) for row in rows)
        if part.change_ms * change_ms > 0 and abs(part.change_ms) >= MOST_OF_IT * abs(change_ms)
    ]  # fmt: skip
    if largest:
        most = max(largest, key=lambda part: abs(part.change_ms))
        change = f"{more_or_less(most.change_ms)} ({both_ms(most.a_ms, most.b_ms)})"
        yield f"The layer that changed most, on the host: {most.name}, {change}; this needs more repeats to be certain."


def _layer(row: Row) -> Part:
    return Part(f"{row.name} ({row.type})" if row.type else row.name, row.a_ms or 0.0, row.b_ms or 0.0)


def _on_both(rows: Sequence[Row]) -> bool:
    return any(row.a_ms for row in rows) and any(row.b_ms for row in rows)


def _total(name: str, found: Sequence[Part]) -> Part:
    return Part(name, sum(part.a_ms for part in found), sum(part.b_ms for part in found))


def _by(part: Part, unit: str) -> str:
    return f"{more_or_less(part.change_ms)} {unit} ({both_ms(part.a_ms, part.b_ms)})"


def both_ms(a: float, b: float) -> str:
    """Return the times of both sides; the unit appears once if both have the same."""
    text_a, text_b = ms(a), ms(b)
    if text_a.split()[1] == text_b.split()[1] or not a:
        text_a = text_a.split()[0]
    return f"{text_a} → {text_b}"


def ms(value: float) -> str:
    """Return milliseconds with three digits, or seconds or microseconds."""
    if abs(value) >= 10_000:
        return f"{value / 1000:.3g} s"
    if 0 < abs(value) < 0.1:
        return f"{1000 * value:.3g} µs"
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"
