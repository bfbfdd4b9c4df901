"""SQLite files, as several profilers write them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

Tables = Mapping[str, tuple[Iterable[str], Sequence[Sequence[Any]]]]
"""Columns and rows of each table; a column may be followed by its type: `id INTEGER PRIMARY KEY`."""

RPD = {
    "rocpd_string": "id, string",
    "rocpd_op": "id, gpuId, queueId, sequenceId, completionSignal, start, end, description_id, opType_id",
    "rocpd_api": "id, pid, tid, start, end, apiName_id, args_id",
    "rocpd_api_ops": "id, api_id, op_id",
    "rocpd_copyapi": "api_ptr_id, stream, size",
    "rocpd_kernelapi": "api_ptr_id, gridX, gridY, gridZ, workgroupX, workgroupY, workgroupZ, groupSegmentSize",
}
"""The tables of an RPD file."""


def written(path: Path, tables: Tables) -> Path:
    """Write a file with these tables, and return its path."""
    with closing(sqlite3.connect(path)) as con:
        for name, (columns, rows) in tables.items():
            quoted = [f"[{column.partition(' ')[0]}] {column.partition(' ')[2]}" for column in columns]
            con.execute(f"CREATE TABLE [{name}] ({', '.join(quoted)})")
            con.executemany(f"INSERT INTO [{name}] VALUES ({', '.join('?' * len(quoted))})", rows)
        con.commit()
    return path


def rpd(path: Path, content: Mapping[str, Sequence[Sequence[Any]]]) -> Path:
    """Write an RPD file with these rows by table, and return its path."""
    return written(path, {name: (columns.split(", "), content[name]) for name, columns in RPD.items()})
