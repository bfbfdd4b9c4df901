"""A Spark cluster on loopback with separate executor processes, and a comparison of the answers of two engines."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

ENGINE = "local-cluster[2,1,1024]"
"""A master and two workers, each with one executor of one core and 1 GB."""


@contextmanager
def two_executors() -> Iterator[str]:
    """Yield the name of a cluster that the first `xsp.spark.load` starts; stop it and remove its logs at the end."""
    from pyspark.sql import SparkSession

    before = os.environ.get("SPARK_LOCAL_IP")
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    try:
        yield ENGINE
    finally:
        session = SparkSession.getActiveSession()
        if session is not None:
            logs = Path(sys.modules["pyspark"].__file__ or "").parent / "work" / session.sparkContext.applicationId
            session.stop()
            shutil.rmtree(logs, ignore_errors=True)
        if before is None:
            del os.environ["SPARK_LOCAL_IP"]
        else:
            os.environ["SPARK_LOCAL_IP"] = before


def differences(a_relation: duckdb.DuckDBPyRelation, b_relation: duckdb.DuckDBPyRelation) -> list[tuple[Any, ...]]:
    """Return at most ten differences between two answers: columns, types, number of rows, cells.

    Floating-point numbers are compared to nine digits, since engines sum them in different orders.
    """
    heads = [
        (str(a), str(b))
        for a, b in zip((a_relation.columns, a_relation.types), (b_relation.columns, b_relation.types), strict=True)
    ]
    rows, b_rows = a_relation.fetchall(), b_relation.fetchall()
    different: list[tuple[Any, ...]] = [pair for pair in [*heads, (len(rows), len(b_rows))] if pair[0] != pair[1]]
    for place, (row, b_row) in enumerate(zip(rows, b_rows, strict=False)):
        different += [
            (place, name, a, b) for name, a, b in zip(a_relation.columns, row, b_row, strict=True) if not _is_same(a, b)
        ]
    return different[:10]


def _is_same(a: Any, b: Any) -> bool:
    if isinstance(a, float):
        return b is not None and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(a, str) and a.startswith("{"):
        return bool(json.loads(a) == json.loads(b))
    return bool(a == b)
