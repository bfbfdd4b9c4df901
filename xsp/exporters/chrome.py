"""Chrome's JSON trace format, which ui.perfetto.dev, chrome://tracing and tools for Kineto traces read.

Categories, names and arguments are those of Kineto where it has them, so that tools for traces of torch.profiler can
read the file: `ProfilerStep#N`, `nn.Module: NAME`, `cpu_op`, `cuda_runtime`, `kernel`, `correlation`, flows `ac2g`.
Other columns of the span table are in `args` under their names. The top-level key `xsp` marks the file as ours.

Times are microseconds after `baseTimeNanoseconds` with three decimals, formatted as text, so that no nanosecond is
lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import duckdb

from xsp import table
from xsp.exporters import traceevents, tracks
from xsp.exporters.contract import Choice, Written, check_steps, whole
from xsp.exporters.tracks import Track, TrackLayout
from xsp.run import Device
from xsp.samples.nvml import MASK, THROTTLING_BITS
from xsp.schema import Column
from xsp.store.trace import Trace
from xsp.version import __version__

FORMAT = 1
"""Format number in the key `xsp`."""

SLICE = 50_000
"""Number of spans that are held in memory at a time."""

_FETCH = 5_000
_HIGHEST = 2**31 - 1
"""Largest number that all viewers accept for a process or a thread."""

_SECOND = 1_000_000_000


class Place(NamedTuple):
    """The numbers that identify a track in viewers."""

    track: int
    pid: int
    tid: int


_PLACES = (Column("track", "INTEGER", ""), Column("pid", "BIGINT", ""), Column("tid", "BIGINT", ""))


def write(trace: Trace, path: Path, choice: Choice) -> Written:
    """Write the spans of all steps, or of some, with the flows from launches to device work, and samples as counters.

    Args:
        trace: the trace to write.
        path: the file; compressed if it ends in `.gz`.
        choice: the steps. Spans of the merged step have `true_ns` in their arguments.

    Raises:
        OutputError: the file cannot be written.
        UsageError: there is no such step.
    """
    check_steps(trace, choice.steps)
    layout = tracks.place(trace.con, "spans", choice.steps)
    places = _places(layout.tracks)
    table.create(trace.con, "places", _PLACES)
    table.insert(trace.con, "places", places, _PLACES)
    make_owners(trace.con, layout.tracks, [place.pid for place in places])
    traceevents.make_views(trace.con)
    base = _base(trace.con)
    with whole(path) as file:
        file.write(_head(trace, layout, base))
        file.write(",\n".join(_metadata(trace, layout.tracks, places)))
        extra = [(query, [base]) for query in (traceevents.MEMORY, traceevents.FLOWS, COUNTERS)]
        for query, parameters in [*_slices(trace.con, base), *extra]:
            _pour(trace.con.execute(query, parameters), file)
        file.write("\n]}\n")
    return layout.written()


def _pour(rows: duckdb.DuckDBPyConnection, file: IO[str]) -> None:
    while batch := rows.fetchmany(_FETCH):
        file.write("".join([f",\n{line}" for (line,) in batch]))


# --- numbers and names ------------------------------------------------------------------------------------


def _places(all_tracks: Sequence[Track]) -> list[Place]:
    """Return the process and thread numbers of tracks: the real numbers, or free numbers where these would collide."""
    ranks = {track.rank for track in all_tracks}
    pids: dict[tuple[Any, ...], int] = {}
    tids: set[tuple[int, int]] = set()
    places = []
    for track in sorted(all_tracks, key=lambda track: track.lane > 0):
        owner = (track.rank, track.process, track.device)
        if owner not in pids:
            preferred = track.process if track.device is None else track.device if len(ranks) == 1 else None
            pids[owner] = _free(preferred, set(pids.values()))
        used = {tid for pid, tid in tids if pid == pids[owner]} if track.lane or track.line is None else set()
        tid = _free(None if track.lane else track.line, used)
        tids.add((pids[owner], tid))
        places.append(Place(track.number, pids[owner], tid))
    return sorted(places)


def _free(preferred: int | None, used: set[int]) -> int:
    if preferred is not None and 0 <= preferred <= _HIGHEST and preferred not in used:
        return preferred
    return max((number for number in used if number < _HIGHEST), default=0) + 1


def _metadata(trace: Trace, all_tracks: Sequence[Track], places: Sequence[Place]) -> Iterator[str]:
    """Yield the events that give tracks their names and their order."""
    multi_rank = len({track.rank for track in all_tracks}) > 1
    devices = trace.run.machine.devices
    seen_pids: set[int] = set()
    for order, (track, place) in enumerate(zip(all_tracks, places, strict=True)):
        if place.pid not in seen_pids:
            seen_pids.add(place.pid)
            name = track.owner + _model(track, devices)
            yield _metadata_event(place, "process_name", name=f"rank {track.rank}, {name}" if multi_rank else name)
            yield _metadata_event(
                place, "process_labels", labels="CPU" if track.device is None else f"GPU {track.device}"
            )
            yield _metadata_event(place, "process_sort_index", sort_index=len(seen_pids))
        yield _metadata_event(place, "thread_name", name=track.name)
        yield _metadata_event(place, "thread_sort_index", sort_index=order)


def _model(track: Track, devices: Sequence[str]) -> str:
    """Return the device's model in brackets, if it is known."""
    return f" ({devices[track.device]})" if track.device is not None and 0 <= track.device < len(devices) else ""


def _metadata_event(place: Place, event: str, **values: Any) -> str:
    return _json({"ph": "M", "name": event, "pid": place.pid, "tid": place.tid, "ts": 0, "args": values})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- the head ---------------------------------------------------------------------------------------------


def _base(con: duckdb.DuckDBPyConnection) -> int:
    """Return the last whole second before the first span."""
    [(first,)] = con.execute("SELECT coalesce(min(at_ns), 0) FROM placed").fetchall()
    return int(first) // _SECOND * _SECOND


def _head(trace: Trace, layout: TrackLayout, base: int) -> str:
    """Return the file up to its first event; of the run, only the fields that Kineto has."""
    ranks = sorted({track.rank for track in layout.tracks})
    head: dict[str, Any] = {
        "schemaVersion": 1,
        "displayTimeUnit": "ns",
        "baseTimeNanoseconds": base,
        "traceName": trace.name,
        "xsp": {"format": FORMAT, "version": __version__, "spans": layout.spans, "ranks": ranks},
    }
    devices = [_device(number, properties) for number, properties in enumerate(trace.run.machine.device_properties)]
    if devices:
        head["deviceProperties"] = devices
    if len(ranks) == 1:
        head["distributedInfo"] = {"rank": ranks[0], "world_size": trace.run.world_size or 1}
    return _json(head)[:-1] + ',"traceEvents":[\n'


def _device(number: int, properties: Device) -> dict[str, Any]:
    """Return a device's properties under Kineto's names."""
    major, _, minor = (properties.compute or "").partition(".")
    fields = {
        "id": number,
        "name": properties.name,
        "numSms": properties.sms,
        "totalGlobalMem": properties.memory_bytes,
        "warpSize": properties.warp_size,
        "computeMajor": int(major) if major.isdigit() else None,
        "computeMinor": int(minor) if minor.isdigit() else None,
    }
    return {name: value for name, value in fields.items() if value is not None}


# --- the spans -------------------------------------------------------------------------------------------


def _slices(con: duckdb.DuckDBPyConnection, base: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the query of events with its parameters, for consecutive time intervals."""
    [(spans,)] = con.execute("SELECT count(*) FROM placed").fetchall()
    parts = -(-spans // SLICE)
    shares = [part / parts for part in range(1, parts)]
    [(quantiles,)] = con.execute("SELECT quantile_disc(at_ns, ?::DOUBLE[]) FROM placed", [shares]).fetchall()
    bounds = [None, *dict.fromkeys(quantiles or []), None]
    for first, last in pairwise(bounds):
        yield traceevents.EVENTS, [first, first, last, last, base]


# --- counters ----------------------------------------------------------------------------------------------------
# Samples as counters of a Chrome JSON file: a track for each figure, under its process or device.


_OWNERS = (Column("rank", "INTEGER", ""), Column("device", "INTEGER", ""), Column("pid", "BIGINT", ""))
_MEANWHILE = "time_ns BETWEEN (SELECT min(at_ns) FROM placed) AND (SELECT max(at_ns + for_ns) FROM placed)"

COUNTERS = f"""
    WITH shown AS (
        SELECT time_ns - $1 AS at_ns, coalesce(own.pid, host.pid) AS pid, unit, value,
               name || CASE WHEN own.pid IS NULL AND samples.device IS NOT NULL THEN ' of device ' || samples.device
                            ELSE '' END AS name
        FROM samples
        LEFT JOIN owners own ON own.rank = samples.rank AND own.device IS NOT DISTINCT FROM samples.device
        LEFT JOIN owners host ON host.rank = samples.rank AND host.device IS NULL
        WHERE {_MEANWHILE} AND samples.name <> '{MASK}'
        UNION ALL
        SELECT time_ns - $1, pid, 'held', CASE WHEN value::BIGINT & {THROTTLING_BITS} <> 0 THEN 1 ELSE 0 END,
               'gpu.clock.held'
        FROM samples JOIN owners USING (rank, device)
        WHERE {_MEANWHILE} AND samples.name = '{MASK}'
    )
    SELECT '{{"ph":"C","cat":"samples","name":' || to_json(name) || ',"pid":' || pid || ',"tid":0,"ts":'
        || at_ns // 1000 || '.' || lpad((at_ns % 1000)::VARCHAR, 3, '0')
        || ',"args":{{' || to_json(unit) || ':' || value || '}}}}'
    FROM shown WHERE pid IS NOT NULL ORDER BY at_ns, name
"""
"""A line for each sample taken while the placed spans ran; 1 or 0 for whether clocks were held down. Parameter: the
base time of the file."""


def make_owners(con: duckdb.DuckDBPyConnection, tracks: Sequence[Track], pids: Sequence[int]) -> None:
    """Make the table `owners`: the process number in viewers of a rank's process, and of each of its devices.

    Args:
        con: holds `samples` and `placed`.
        tracks: all tracks.
        pids: process number of each track.
    """
    owners: dict[tuple[int, int | None], int] = {}
    for track, pid in zip(tracks, pids, strict=True):
        owners.setdefault((track.rank, track.device), pid)
    table.create(con, "owners", _OWNERS)
    table.insert(con, "owners", [(*owner, pid) for owner, pid in owners.items()], _OWNERS)
