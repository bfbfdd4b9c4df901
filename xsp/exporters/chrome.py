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
from typing import Any, NamedTuple

import duckdb

from xsp import table
from xsp.exporters import traceevents, tracks
from xsp.exporters.contract import Choice, Written, atomic_file, check_steps
from xsp.exporters.tracks import Track, TrackLayout
from xsp.run import Device
from xsp.samples.nvml import MASK, THROTTLING_BITS
from xsp.schema import Column
from xsp.store.trace import Trace
from xsp.version import __version__

FORMAT = 1
"""Format number in the key `xsp`."""

SPANS_PER_QUERY = 50_000
"""Number of spans that are held in memory at a time."""

_FETCH = 5_000
_MAX_NUMBER = 2**31 - 1
"""Largest number that all viewers accept for a process or a thread."""

_SECOND = 1_000_000_000


class TrackIds(NamedTuple):
    """The numbers that identify a track in viewers."""

    track: int
    pid: int
    tid: int


_TRACK_IDS = (Column("track", "INTEGER", ""), Column("pid", "BIGINT", ""), Column("tid", "BIGINT", ""))


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
    layout = tracks.lay_out_tracks(trace.con, "spans", choice.steps)
    track_ids = _track_ids(layout.tracks)
    table.create(trace.con, "track_ids", _TRACK_IDS)
    table.insert(trace.con, "track_ids", track_ids, _TRACK_IDS)
    make_owners(trace.con, layout.tracks, [ids.pid for ids in track_ids])
    traceevents.make_views(trace.con)
    base = _base(trace.con)
    with atomic_file(path) as file:
        file.write(_head(trace, layout, base))
        file.write(",\n".join(_metadata(trace, layout.tracks, track_ids)))
        more_queries = [(query, [base]) for query in (traceevents.MEMORY, traceevents.FLOWS, COUNTERS)]
        for query, parameters in [*_slices(trace.con, base), *more_queries]:
            rows = trace.con.execute(query, parameters)
            while batch := rows.fetchmany(_FETCH):
                file.write("".join([f",\n{line}" for (line,) in batch]))
        file.write("\n]}\n")
    return layout.result()


# --- numbers and names ------------------------------------------------------------------------------------


def _track_ids(all_tracks: Sequence[Track]) -> list[TrackIds]:
    """Return the process and thread numbers of tracks: the real numbers, or free numbers where these would collide."""
    ranks = {track.rank for track in all_tracks}
    pids: dict[tuple[Any, ...], int] = {}
    tids: set[tuple[int, int]] = set()
    track_ids = []
    for track in sorted(all_tracks, key=lambda track: track.lane > 0):
        owner = (track.rank, track.process, track.device)
        if owner not in pids:
            preferred = track.process if track.device is None else track.device if len(ranks) == 1 else None
            pids[owner] = _free_number(preferred, set(pids.values()))
        used = {tid for pid, tid in tids if pid == pids[owner]} if track.lane or track.line is None else set()
        tid = _free_number(None if track.lane else track.line, used)
        tids.add((pids[owner], tid))
        track_ids.append(TrackIds(track.number, pids[owner], tid))
    return sorted(track_ids)


def _free_number(preferred: int | None, used: set[int]) -> int:
    if preferred is not None and 0 <= preferred <= _MAX_NUMBER and preferred not in used:
        return preferred
    return max((number for number in used if number < _MAX_NUMBER), default=0) + 1


def _metadata(trace: Trace, all_tracks: Sequence[Track], track_ids: Sequence[TrackIds]) -> Iterator[str]:
    """Yield the events that give tracks their names and their order."""
    multi_rank = len({track.rank for track in all_tracks}) > 1
    devices = trace.run.machine.devices
    described_pids: set[int] = set()
    for order, (track, ids) in enumerate(zip(all_tracks, track_ids, strict=True)):
        if ids.pid not in described_pids:
            described_pids.add(ids.pid)
            # The device's model in brackets, if it is known.
            name = track.owner + (
                f" ({devices[track.device]})" if track.device is not None and 0 <= track.device < len(devices) else ""
            )
            yield _metadata_event(ids, "process_name", name=f"rank {track.rank}, {name}" if multi_rank else name)
            yield _metadata_event(
                ids, "process_labels", labels="CPU" if track.device is None else f"GPU {track.device}"
            )
            yield _metadata_event(ids, "process_sort_index", sort_index=len(described_pids))
        yield _metadata_event(ids, "thread_name", name=track.name)
        yield _metadata_event(ids, "thread_sort_index", sort_index=order)


def _metadata_event(ids: TrackIds, event: str, **values: Any) -> str:
    return _json({"ph": "M", "name": event, "pid": ids.pid, "tid": ids.tid, "ts": 0, "args": values})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- the head ---------------------------------------------------------------------------------------------


def _base(con: duckdb.DuckDBPyConnection) -> int:
    """Return the last whole second before the first span."""
    [(first,)] = con.execute("SELECT coalesce(min(begin_ns), 0) FROM track_spans").fetchall()
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
    [(spans,)] = con.execute("SELECT count(*) FROM track_spans").fetchall()
    parts = -(-spans // SPANS_PER_QUERY)
    shares = [part / parts for part in range(1, parts)]
    [(quantiles,)] = con.execute("SELECT quantile_disc(begin_ns, ?::DOUBLE[]) FROM track_spans", [shares]).fetchall()
    bounds = [None, *dict.fromkeys(quantiles or []), None]
    for begin, end in pairwise(bounds):
        yield traceevents.EVENTS, [begin, begin, end, end, base]


# --- counters ----------------------------------------------------------------------------------------------------
# Samples as counters of a Chrome JSON file: a track for each figure, under its process or device.


_OWNERS = (Column("rank", "INTEGER", ""), Column("device", "INTEGER", ""), Column("pid", "BIGINT", ""))
_DURING_SPANS = (
    "time_ns BETWEEN (SELECT min(begin_ns) FROM track_spans) AND (SELECT max(begin_ns + width_ns) FROM track_spans)"
)

COUNTERS = f"""
    WITH counter_values AS (
        SELECT time_ns - $1 AS begin_ns, coalesce(owner.pid, host.pid) AS pid, unit, value,
               name || CASE WHEN owner.pid IS NULL AND samples.device IS NOT NULL THEN ' of device ' || samples.device
                            ELSE '' END AS name
        FROM samples
        LEFT JOIN owners owner ON owner.rank = samples.rank AND owner.device IS NOT DISTINCT FROM samples.device
        LEFT JOIN owners host ON host.rank = samples.rank AND host.device IS NULL
        WHERE {_DURING_SPANS} AND samples.name <> '{MASK}'
        UNION ALL
        SELECT time_ns - $1, pid, 'held', CASE WHEN value::BIGINT & {THROTTLING_BITS} <> 0 THEN 1 ELSE 0 END,
               'gpu.clock.held'
        FROM samples JOIN owners USING (rank, device)
        WHERE {_DURING_SPANS} AND samples.name = '{MASK}'
    )
    SELECT '{{"ph":"C","cat":"samples","name":' || to_json(name) || ',"pid":' || pid || ',"tid":0,"ts":'
        || {traceevents.microseconds("begin_ns")}
        || ',"args":{{' || to_json(unit) || ':' || value || '}}}}'
    FROM counter_values WHERE pid IS NOT NULL ORDER BY begin_ns, name
"""
"""A line for each sample taken while the spans ran; 1 or 0 for whether clocks were held down. Parameter: the
base time of the file."""


def make_owners(con: duckdb.DuckDBPyConnection, tracks: Sequence[Track], pids: Sequence[int]) -> None:
    """Make the table `owners`: the process number in viewers of a rank's process, and of each of its devices.

    Args:
        con: holds `samples` and `track_spans`.
        tracks: all tracks.
        pids: process number of each track.
    """
    owners: dict[tuple[int, int | None], int] = {}
    for track, pid in zip(tracks, pids, strict=True):
        owners.setdefault((track.rank, track.device), pid)
    table.create(con, "owners", _OWNERS)
    table.insert(con, "owners", [(*owner, pid) for owner, pid in owners.items()], _OWNERS)
