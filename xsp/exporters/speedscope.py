"""Speedscope's file format: a profile of open and close events for each thread and each stream.

speedscope.app, its offline copy (`npm install -g speedscope`) and other viewers open it. Its time-order view shows the
track over time, its left-heavy view merges equal stacks. Times are nanoseconds after the first span.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import duckdb

from xsp.exporters import tracks
from xsp.exporters.contract import Choice, Written, atomic_file, check_steps
from xsp.schema import Kind
from xsp.store.trace import Trace
from xsp.version import __version__

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

_ROWS = f"""
    SELECT track, begin_ns - $1, begin_ns - $1 + width_ns,
           CASE WHEN kind = '{Kind.MODULE}' AND type IS NOT NULL THEN name || ' (' || type || ')' ELSE name END
    FROM track_spans WHERE kind <> '{Kind.ALLOC}' ORDER BY track, begin_ns, width_ns DESC, level, depth, span_id
"""


def write(trace: Trace, path: Path, choice: Choice) -> Written:
    """Write a profile for each thread and each stream, over all steps or some.

    Args:
        trace: the trace to write.
        path: the file; compressed if it ends in `.gz`.
        choice: the steps.

    Raises:
        OutputError: the file cannot be written.
        UsageError: there is no such step.
    """
    check_steps(trace, choice.steps)
    layout = tracks.lay_out_tracks(trace.con, "spans", choice.steps)
    multi_rank = len({track.rank for track in layout.tracks}) > 1
    frames: dict[str, int] = {}
    with atomic_file(path) as file:
        file.write(
            f'{{"$schema":{_json(SCHEMA)},"exporter":"xsp@{__version__}","name":{_json(trace.name)},"profiles":['
        )
        for index, (number, spans) in enumerate(groupby(_spans(trace.con), itemgetter(0))):
            track = layout.tracks[number]
            name = f"rank {track.rank}, {track.title}" if multi_rank else track.title
            file.write(
                f'{"," if index else ""}\n{{"type":"evented","name":{_json(name)},"unit":"nanoseconds","events":['
            )
            file.write(f'\n],"startValue":0,"endValue":{_write_track(spans, frames, file)}}}')
        names = ",\n".join(f'{{"name":{_json(name)}}}' for name in frames)
        file.write(f'\n],"shared":{{"frames":[\n{names}\n]}}}}\n')
    return layout.result(memory=False)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _spans(con: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    [(first,)] = con.execute("SELECT coalesce(min(begin_ns), 0) FROM track_spans").fetchall()
    return tracks.fetch_rows(con.execute(_ROWS, [first]))


def _write_track(spans: Iterator[tuple[Any, ...]], frames: dict[str, int], file: IO[str]) -> int:
    """Write the open and close events of a track, and return the time of the last one."""
    time, separator = 0, ""
    for kind, time, frame in _events(spans, frames):
        file.write(f'{separator}\n{{"type":"{kind}","frame":{frame},"at":{time}}}')
        separator = ","
    return time


def _events(spans: Iterator[tuple[Any, ...]], frames: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Yield open and close events in order of time: the type, the time, and the number of the frame.

    Args:
        spans: rows `track, start, end, name` of a track, which nest, sorted by start.
        frames: numbers of the names; new names are added.
    """
    stack: list[tuple[int, int]] = []  # end and frame of open spans
    for _, start, end, name in spans:
        while stack and stack[-1][0] <= start:
            yield "C", *stack.pop()
        frame = frames.setdefault(name, len(frames))
        yield "O", start, frame
        stack.append((end, frame))
    while stack:
        yield "C", *stack.pop()
