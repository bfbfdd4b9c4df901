"""RPD files of ROCm: a small one written out here, and a real one."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlitefiles

import xsp
from xsp.errors import TraceError

REAL = Path(__file__).resolve().parents[3] / "shared/reports/traces/matmul_result.rpd"

CONTENT: dict[str, list[tuple[Any, ...]]] = {
    "rocpd_string": [(1, ""), (2, "hipLaunchKernel"), (3, "gemm"), (4, "KernelExecution"), (5, "CopyHostToDevice"),
                     (6, "hipMemcpyAsync"), (7, "UserMarker"), (8, "layer"), (9, "hipStreamSynchronize"),
                     (10, "OpTable::writeRows"), (11, "BarrierOp"), (12, "CopyDeviceToDevice")],
    "rocpd_api": [(1, 42, 43, 1000, 1050, 7, 8), (2, 42, 43, 1010, 1020, 2, 1), (3, 42, 43, 1030, 1040, 6, 1),
                  (4, 42, 43, 1060, 1500, 9, 1), (5, 42, 44, 1070, 1080, 10, 1)],
    "rocpd_op": [(1, 3, 0, 0, "", 1100, 1400, 3, 4), (2, 3, 1, 0, "", 1400, 1450, 1, 5),
                 (3, 3, 1, 0, "", 1450, 1451, 1, 11), (4, 3, 1, 0, "", 1460, 1470, 1, 12)],
    "rocpd_api_ops": [(1, 2, 1), (2, 3, 2)],
    "rocpd_copyapi": [(3, "0x0", 512)],
    "rocpd_kernelapi": [(2, 4, 2, 1, 256, 1, 1, 4096)],
}  # fmt: skip


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return sqlitefiles.rpd(tmp_path / "small.rpd", CONTENT)


def test_work_has_its_launch_and_its_sizes_and_barriers_are_no_work(small: Path) -> None:
    trace = xsp.load(small)
    rows = trace.sql(
        "SELECT name, kind, device, stream, correlation_id, attributes FROM spans WHERE level = 70 ORDER BY start_ns"
    ).fetchall()
    assert [row[:5] for row in rows] == [
        ("gemm", "kernel", 0, 0, 2), ("Memcpy HtoD", "copy", 0, 1, 3), ("Memcpy DtoD", "copy", 0, 1, None),
    ]  # fmt: skip
    assert json.loads(rows[0][5]) == {"block": [256, 1, 1], "grid": [4, 2, 1], "shared_bytes": 4096}
    assert json.loads(rows[1][5]) == {"bytes": 512, "copy": "HtoD"}
    calls = trace.sql("SELECT name, kind, thread FROM spans WHERE level < 70 AND kind <> 'step' ORDER BY start_ns")
    assert calls.fetchall() == [
        ("layer", "user", 43), ("hipLaunchKernel", "launch", 43), ("hipMemcpyAsync", "launch", 43),
        ("hipStreamSynchronize", "sync", 43),
    ]  # fmt: skip
    notes = " ".join(str(note) for note in trace.run["notes"])
    assert "1 spans were left out: barriers on devices" in notes
    assert "1 spans were left out: the profiler's own work" in notes


def test_a_damaged_file_is_one_error(small: Path) -> None:
    small.write_bytes(small.read_bytes()[:9000])
    with pytest.raises(TraceError, match=r"small\.rpd"):
        xsp.load(small)


@pytest.mark.skipif(not REAL.exists(), reason="no such file lies in ../shared/reports/traces")
def test_a_real_file_has_what_a_plain_reading_counts() -> None:
    con = sqlite3.connect(f"file:{REAL}?mode=ro&immutable=1", uri=True)
    plain = con.execute(
        "SELECT starts_copy, count(*), sum(end - start) FROM "
        "(SELECT substr(opType, 1, 4) = 'Copy' AS starts_copy, * FROM op) GROUP BY 1 ORDER BY 1"
    ).fetchall()
    found = xsp.load(REAL).sql(
        "SELECT kind = 'copy', count(*), sum(dur_ns)::BIGINT, count(*) FILTER (parent_id IS NULL) FROM spans "
        "WHERE level = 70 GROUP BY 1 ORDER BY 1"
    )
    assert found.fetchall() == [(bool(is_copy), count, ns, 0) for is_copy, count, ns in plain]
