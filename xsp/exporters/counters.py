"""Samples as counters of a Chrome JSON file: a track for each figure, under the process or device that it is of."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb

from xsp import table
from xsp.exporters.tracks import Track
from xsp.samples.reasons import HELD, MASK
from xsp.schema import Column

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
        SELECT time_ns - $1, pid, 'held', CASE WHEN value::BIGINT & {HELD} <> 0 THEN 1 ELSE 0 END, 'gpu.clock.held'
        FROM samples JOIN owners USING (rank, device)
        WHERE {_MEANWHILE} AND samples.name = '{MASK}'
    )
    SELECT '{{"ph":"C","cat":"samples","name":' || to_json(name) || ',"pid":' || pid || ',"tid":0,"ts":'
        || at_ns // 1000 || '.' || lpad((at_ns % 1000)::VARCHAR, 3, '0')
        || ',"args":{{' || to_json(unit) || ':' || value || '}}}}'
    FROM shown WHERE pid IS NOT NULL ORDER BY at_ns, name
"""
"""A line for each reading while the spans that were placed ran; whether clocks were held down is 1 or 0. Parameter: the
time that the file counts from."""


def make_owners(con: duckdb.DuckDBPyConnection, tracks: Sequence[Track], pids: Sequence[int]) -> None:
    """Make the table `owners`: the number under which viewers know a rank's process, and each of its devices.

    Args:
        con: holds `samples` and `placed`.
        tracks: all.
        pids: of each track.
    """
    owners: dict[tuple[int, int | None], int] = {}
    for track, pid in zip(tracks, pids, strict=True):
        owners.setdefault((track.rank, track.device), pid)
    table.create(con, "owners", _OWNERS)
    table.insert(con, "owners", [(*owner, pid) for owner, pid in owners.items()], _OWNERS)
