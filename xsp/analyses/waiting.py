"""The walk along the critical path of a step: backwards, from its end, from each span to the span it waited for.

The rules (`xsp.analyses.critical` explains their basis):

- a host thread runs one span after the other (`program order`);
- device work begins when the previous work on its stream has ended (`stream order`), and not before its launch
  (`launch`): the return of the call, or the start of the work itself if the call returns later;
- device work that began more than `LATENCY_NS` after both waited for the work of another stream of its device that
  ended last before it began (`another stream`);
- a call that synchronises ends when the device work that it waits for has ended: the work that ended last while it ran,
  on its stream if that is known (`device work`). So does a call that starts a copy and returns after the end of the
  copy;
- a thread without an operator waits for the thread on which backward operators run (`backward thread`), and that
  thread, when it is idle, waits for the thread that called it (`forward thread`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xsp.schema import Kind
from xsp.store.devicework import SKEW_NS

LATENCY_NS = 10_000
"""Nanoseconds in which a launch reaches an idle device; a longer wait has another cause."""

CONTAINERS = frozenset({Kind.STEP, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.MODULE, Kind.USER, Kind.RUN})
"""Kinds of host spans that contain others; time that no other span covers is the program's own, or waiting."""

OPS = frozenset({Kind.OP, Kind.PRIMITIVE})

UNKNOWN_LAUNCH = "launch not in the trace"
_MAX_STUCK = 4

Thread = tuple[int | None, int | None]
"""Process and thread."""

_Call = tuple[int | None, int | None]
"""Process and correlation id; the process is None if the source does not record it for device work."""


class StepSpan(NamedTuple):
    """A span of the step, of the host or of a device; times in nanoseconds."""

    start: int
    end: int
    kind: str
    name: str
    process: int | None
    thread: int | None
    device: int | None
    stream: int | None
    correlation_id: int | None
    layer_id: str | None
    op: str | None
    in_step: bool
    """Whether it belongs to the step; device work of another step can delay it."""
    is_communication: bool
    is_backward: bool
    waits: bool
    """Whether the call synchronises: it returns when device work has ended."""
    waits_on: int | None
    """The stream that it waits for; None: any."""


class Label(NamedTuple):
    """The description of a segment of the path; many segments share one."""

    kind: str
    name: str
    op: str | None
    layer_id: str | None
    thread: int | None
    device: int | None
    stream: int | None
    rule: str
    """The rule for what had to end before the segment could begin."""


class _Timeline:
    """The activity of one thread: at each moment the innermost span, and the innermost operator."""

    def __init__(self, rows: Sequence[StepSpan]) -> None:
        """Divide the thread's time.

        Args:
            rows: spans in order of start, at equal starts the longest first.
        """
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.spans: list[StepSpan] = []
        self.ops: list[str | None] = []
        self._divide(rows)
        self.work_ends = [end for end, span in zip(self.ends, self.spans, strict=True) if span.kind not in CONTAINERS]
        self.is_backward = any(row.is_backward for row in rows)

    def _divide(self, rows: Sequence[StepSpan]) -> None:
        stack: list[tuple[int, StepSpan, str | None]] = []
        now = 0
        for row in rows:
            while stack and stack[-1][0] <= row.start:
                now = self._append_until(stack[-1][0], now, stack.pop())
            if stack:
                now = self._append_until(row.start, now, stack[-1])
            now = max(now, row.start)
            outer = stack[-1][2] if stack else None
            stack.append((row.end, row, row.name if row.kind == Kind.OP else outer))
        while stack:
            now = self._append_until(stack[-1][0], now, stack.pop())

    def _append_until(self, end: int, now: int, inner: tuple[int, StepSpan, str | None]) -> int:
        if end <= now:
            return now
        self.starts.append(now)
        self.ends.append(end)
        self.spans.append(inner[1])
        self.ops.append(inner[2])
        return end

    def index_before(self, now: int) -> int | None:
        """Return the place of the interval that covers the moment before `now`, or of the last one before it."""
        return bisect_left(self.starts, now) - 1 if self.starts and self.starts[0] < now else None

    def work_ended(self, after: int, until: int) -> int | None:
        """Return the last end in (after, until] of work in spans other than containers, or None."""
        index = bisect_right(self.work_ends, until)
        return self.work_ends[index - 1] if index and self.work_ends[index - 1] > after else None


class _Lane:
    """Device work in order of its end."""

    def __init__(self, rows: Iterable[StepSpan]) -> None:
        self.rows = sorted(rows, key=lambda row: (row.end, row.start))
        self.ends = [row.end for row in self.rows]

    def last_ended(self, until: int) -> StepSpan | None:
        """Return the work that ended last, at `until` or before."""
        index = bisect_right(self.ends, until)
        return self.rows[index - 1] if index else None


class Walk:
    """The critical path of the spans of one step."""

    def __init__(self, rows: Sequence[StepSpan], main: Thread, start: int, step_end: int) -> None:
        """Put the spans in order.

        Args:
            rows: the step's spans, and other work of its devices meanwhile; in order of start, the longest first.
            main: the thread of the step.
            start: start of the step.
            step_end: end of the step, where a segment is cut in two.
        """
        threads: dict[Thread, list[StepSpan]] = defaultdict(list)
        streams: dict[tuple[int, int | None], list[StepSpan]] = defaultdict(list)
        for row in rows:
            if row.device is None:
                threads[row.process, row.thread].append(row)
            else:
                streams[row.device, row.stream].append(row)
        self.main, self.start, self.step_end = main, start, step_end
        self.threads = {name: _Timeline(spans) for name, spans in threads.items()}
        self.backward_threads = [
            name for name, timeline in self.threads.items() if timeline.is_backward and name != main
        ]
        self.streams = {name: _Lane(spans) for name, spans in streams.items()}
        self.devices = {
            device: _Lane(row for (owner, _), spans in streams.items() if owner == device for row in spans)
            for device in {device for device, _ in streams}
        }
        self.copies: dict[_Call, StepSpan] = {
            (row.process, row.correlation_id): row
            for row in rows
            if row.kind == Kind.COPY and row.correlation_id is not None
        }
        self.launches: dict[_Call, StepSpan] = {
            (process, row.correlation_id): row
            for row in rows
            if row.device is None and row.correlation_id is not None
            for process in (row.process, None)
        }
        self.labels: dict[Label, int] = {}
        """Label → its number."""
        self.path: list[tuple[int, int]] = []
        """The segments, the last one first: start and label of each. A segment ends where the following one begins."""

    def trace_back(self, end: int, last: StepSpan | None) -> None:
        """Find the path.

        Args:
            end: end of the path.
            last: the device work that ends at `end`; None if the path ends on the host.
        """
        current: Thread | StepSpan = self.main if last is None else last
        now, stuck = end, 0
        while now > self.start:
            if isinstance(current, StepSpan):
                current, begin = self._device(current, now)
            else:
                current, begin = self._host(current, now, stuck > _MAX_STUCK)
            stuck = stuck + 1 if begin >= now else 0
            now = begin

    def _add(self, start: int, end: int, span: StepSpan, rule: str, op: str | None) -> int:
        """Put a span's time in front of the path, and return the start of the segment."""
        return self._put(start, end, _segment_kind(span), span.name, op, span, rule)

    def _put(self, start: int, end: int, kind: str, name: str, op: str | None, span: StepSpan | None, rule: str) -> int:
        start = max(start, self.start)
        if start >= end:
            return end
        location = (
            (span.layer_id, span.thread, span.device, span.stream) if span is not None else (None, None, None, None)
        )
        label = self.labels.setdefault(Label(kind, name, op, *location, rule), len(self.labels))
        if start < self.step_end < end:
            self.path.append((self.step_end, label))
        elif self.path and self.path[-1][1] == label and location[2] is None and end != self.step_end:
            self.path.pop()  # merge adjacent segments of the host with the same label
        self.path.append((start, label))
        return start

    def _device(self, work: StepSpan, now: int) -> tuple[Thread | StepSpan, int]:
        """Go from the end of device work to the span whose end let it begin."""
        launch = self.launches.get((work.process, work.correlation_id))
        ready, rule, source = self._released(work, launch)
        begin = self._add(work.start, now, work, rule, work.op)
        if rule == "launch" and launch is not None:
            self._put(ready, begin, "launch", launch.name, work.op, work, rule)
        else:
            self._put(ready, begin, "idle", "idle", work.op, work, rule)
        return source, min(ready, begin)

    def _released(self, work: StepSpan, launch: StepSpan | None) -> tuple[int, str, Thread | StepSpan]:
        """Return when device work could have begun, by which rule, and where the path continues."""
        ready, rule = self.start, UNKNOWN_LAUNCH
        source: Thread | StepSpan = self.main
        previous = self.streams[work.device or 0, work.stream].last_ended(work.start)
        if previous is not None:
            ready, rule, source = previous.end, "stream order", previous
        if launch is not None and (launch_end := min(launch.end, work.start)) > ready:
            ready, rule, source = launch_end, "launch", (launch.process, launch.thread)
        if work.start - ready > LATENCY_NS:
            last_work = self.devices[work.device or 0].last_ended(work.start)
            if last_work is not None and last_work.end > ready:
                ready, rule, source = last_work.end, "another stream", last_work
        return ready, rule, source

    def _host(self, thread: Thread, now: int, is_stuck: bool) -> tuple[Thread | StepSpan, int]:
        """Go from a moment of a thread to the work that it had waited for until then."""
        timeline = self.threads.get(thread)
        index = timeline.index_before(now) if timeline is not None else None
        if timeline is None or index is None:
            return self._gap(thread, self.start, now, is_stuck)
        begin, end, span, op = timeline.starts[index], timeline.ends[index], timeline.spans[index], timeline.ops[index]
        if end < now:
            return self._gap(thread, end, now, is_stuck)
        if span.kind in CONTAINERS:
            ended, backward_thread = (
                self._backward_ended(begin, now) if thread == self.main and not is_stuck else (begin, None)
            )
            if backward_thread is not None:
                return backward_thread, self._add(ended, now, span, "backward thread", op)
        else:
            work = self._waited_for(span, begin, now) if not is_stuck else None
            if work is not None:
                return work, self._add(min(work.end, now), now, span, "device work", op)
        return thread, self._add(begin, now, span, "program order", op)

    def _waited_for(self, call: StepSpan, begin: int, now: int) -> StepSpan | None:
        """Return the device work whose end let a call return, or None if the call does not wait."""
        if call.waits:
            lanes = [lane for (_, stream), lane in self.streams.items() if call.waits_on in (None, stream)]
            candidates = [work for lane in lanes if (work := lane.last_ended(now + SKEW_NS)) is not None]
        elif call.kind == Kind.LAUNCH:
            copies = (self.copies.get((process, call.correlation_id)) for process in (call.process, None))
            candidates = [copy for copy in copies if copy is not None and copy.end <= now + SKEW_NS]
        else:
            return None
        last = max(candidates, key=lambda work: work.end, default=None)
        return last if last is not None and last.end > begin else None

    def _backward_ended(self, after: int, until: int) -> tuple[int, Thread | None]:
        """Return when, and on which thread, a backward operator ended last in (after, until]."""
        end_times = [
            (end, name) for name in self.backward_threads if (end := self.threads[name].work_ended(after, until))
        ]
        return max(end_times, key=lambda pair: pair[0]) if end_times else (after, None)

    def _gap(self, thread: Thread, begin: int, now: int, is_stuck: bool) -> tuple[Thread | StepSpan, int]:
        """Continue from a moment at which a thread has no span."""
        main = self.threads.get(self.main)
        if thread != self.main and main is not None and not is_stuck:
            if begin <= self.start or main.work_ended(begin, now) is not None:
                return self.main, now
            return thread, self._put(begin, now, "host", "between operators", None, None, "program order")
        return thread, self._put(begin, now, "idle", "no span", None, None, "program order")


def _segment_kind(span: StepSpan) -> str:
    """Return the kind of a segment for the time of a span, in one word."""
    if span.is_communication:
        return "communication"
    if span.kind in OPS:
        return "op"
    return "host" if span.kind in CONTAINERS else span.kind
