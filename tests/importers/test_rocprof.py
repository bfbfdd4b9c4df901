"""What rocprofv3 writes: the same program as a rocpd database and as JSON, written out here."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from rocpd import CONTENT, database

import xsp
from xsp.analyses import ANALYSES
from xsp.errors import TraceError
from xsp.store.trace import Trace

DISPATCH = """{"rocprofiler-sdk-tool": [{"buffer_records": {"kernel_dispatch": [
    {"dispatch_info": {"agent_id": 1, "workgroup_size": {"x": SIZE}}, "start_timestamp": 1, "end_timestamp": 2}
]}}]}"""


def document(path: Path) -> Path:
    def call(kind: int, operation: int, correlation: int, start: int, end: int, **more: Any) -> dict[str, Any]:
        return {"kind": kind, "operation": operation, "thread_id": 4243, "start_timestamp": start,
                "end_timestamp": end, "correlation_id": {"internal": correlation, "external": 0}, **more}  # fmt: skip

    info = {"agent_id": {"handle": 900}, "queue_id": {"handle": 3}, "kernel_id": 1, "group_segment_size": 4096,
            "workgroup_size": {"x": 256, "y": 1, "z": 1}, "grid_size": {"x": 1024, "y": 2, "z": 1}}  # fmt: skip
    tool = {
        "metadata": {"pid": 4242, "command": "secret command"},
        "agents": [
            {"id": {"handle": 800}, "type": 1, "name": "EPYC", "node_id": 0},
            {"id": {"handle": 900}, "type": 2, "name": "gfx942", "product_name": "AMD Instinct MI300X", "node_id": 1,
             "cu_count": 304},
        ],
        "strings": {
            "buffer_records": [
                {"kind": "NONE", "operations": []},
                {"kind": "HIP_RUNTIME_API",
                 "operations": ["hipLaunchKernel", "hipMemcpyAsync", "hipDeviceSynchronize"]},
                {"kind": "MEMORY_COPY", "operations": ["MEMORY_COPY_HOST_TO_DEVICE"]},
                {"kind": "MARKER_CORE_API", "operations": ["roctxRangePushA"]},
                {"kind": "KERNEL_DISPATCH", "operations": ["COMPLETE"]},
            ],
            "marker_api": [{"key": 13, "value": "model.layers.0"}],
        },
        "kernel_symbols": [{"kernel_id": 1, "kernel_name": "gemm.kd", "arch_vgpr_count": 64,
                            "formatted_kernel_name": CONTENT["rocpd_info_kernel_symbol"][0][2]}],
        "buffer_records": {
            "hip_api": [call(1, 0, 11, 1010, 1020), call(1, 1, 12, 1030, 1040), call(1, 2, 14, 1060, 1500)],
            "marker_api": [call(3, 0, 13, 1000, 1050)],
            "kernel_dispatch": [call(4, 0, 11, 1100, 1400, dispatch_info=info, stream_id={"handle": 2})],
            "memory_copy": [call(2, 0, 12, 1400, 1450, dst_agent_id={"handle": 900}, src_agent_id={"handle": 800},
                                 stream_id={"handle": 2}, bytes=512)],
        },
    }  # fmt: skip
    path.write_text(json.dumps({"rocprofiler-sdk-tool": [tool]}))
    return path


@pytest.fixture(params=[database, document], ids=["rocpd", "JSON"])
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Trace:
    return xsp.load(str(request.param(tmp_path / "results.file")))


def test_kernels_copies_calls_and_ranges_are_spans_joined_by_their_correlation(trace: Trace) -> None:
    rows = trace.sql(
        "SELECT kind, name, device, stream, start_ns, dur_ns, process FROM spans WHERE kind <> 'step' ORDER BY start_ns"
    ).fetchall()
    assert rows == [
        ("module", "model.layers.0", None, None, 1000, 50, 4242),
        ("launch", "hipLaunchKernel", None, None, 1010, 10, 4242),
        ("launch", "hipMemcpyAsync", None, None, 1030, 10, 4242),
        ("sync", "hipDeviceSynchronize", None, None, 1060, 440, 4242),
        ("kernel", "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1", 0, 2, 1100, 300, 4242),
        ("copy", "Memcpy HtoD", 0, 2, 1400, 50, 4242),
    ]
    layers = trace.sql("SELECT layer.name FROM spans k JOIN spans layer ON k.layer_id = layer.span_id "
                       "WHERE k.kind IN ('kernel', 'copy')").fetchall()  # fmt: skip
    assert layers == [("model.layers.0",)] * 2


def test_what_is_known_of_the_device_and_of_the_launch_comes_along(trace: Trace) -> None:
    assert trace.run["machine"]["devices"] == ["AMD Instinct MI300X"]
    ((told,),) = trace.sql("SELECT attributes FROM spans WHERE kind = 'kernel'").fetchall()
    assert json.loads(told) == {"grid": [4, 2, 1], "block": [256, 1, 1], "registers": 64, "shared_bytes": 4096}
    ((told,),) = trace.sql("SELECT attributes FROM spans WHERE kind = 'copy'").fetchall()
    assert json.loads(told) == {"bytes": 512, "copy": "HtoD"}
    assert "secret" not in json.dumps(trace.run.content)
    assert ANALYSES["device-activity"](trace).select("busy_ms, kernels, copies").fetchall() == [(0.00035, 1, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"rocprofiler-sdk-tool": [', "JSON|Expecting"),
     ('{"rocprofiler-sdk-tool": [{"agents": 3}]}', "not in rocprofv3's form"),
     ('{"rocprofiler-sdk-tool": [{"buffer_records": {"kernel_dispatch": [{}]}}]}', "not in rocprofv3's form"),
     (DISPATCH.replace("SIZE", '"abc"'), "not in rocprofv3's form"),
     (DISPATCH.replace("SIZE", "1e999"), "not in rocprofv3's form")],
)  # fmt: skip
def test_damaged_json_is_one_clear_error(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=said):
        xsp.load(str(path))


def test_a_schema_that_is_not_known_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    con = sqlite3.connect(path)
    con.execute("CREATE TABLE rocpd_kernel_dispatch_x (id, start_id, end_id)")
    con.commit()
    con.close()
    with pytest.raises(TraceError, match="--output-format json"):
        xsp.load(str(path))


def test_json_whose_gzip_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "results.json.gz"
    packed = bytearray(gzip.compress(json.dumps({"rocprofiler-sdk-tool": [[0] * 200_000]}).encode(), compresslevel=0))
    packed[150_000:250_000] = b"\xff" * 100_000
    path.write_bytes(packed)
    with pytest.raises(TraceError, match="damaged gzip"):
        xsp.load(str(path))


def test_kernels_of_a_gpu_that_is_not_listed_are_counted(tmp_path: Path) -> None:
    path = document(tmp_path / "results.json")
    path.write_text(path.read_text().replace('"agent_id": {"handle": 900}', '"agent_id": {"handle": 901}', 1))
    (source,) = xsp.load(str(path)).run["imported"]["sources"]
    assert source["changed"] == {"kernels of an unknown GPU, taken as those of device 0": 1}
