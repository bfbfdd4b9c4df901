"""A small rocpd database, as rocprofv3 writes it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlitefiles

SUFFIX = "_00000aaa_bbbb_7ccc"
GPU, CPU = 5, 1

SCHEMA = {
    "rocpd_info_agent": "id, type, absolute_index, type_index, name, product_name, extdata",
    "rocpd_info_process": "id, pid, command, environment",
    "rocpd_info_thread": "id, tid",
    "rocpd_info_kernel_symbol": "id, kernel_name, display_name, arch_vgpr_count",
    "rocpd_string": "id, string",
    "rocpd_event": "id, category_id, stack_id, extdata",
    "rocpd_region": "id, pid, tid, start, end, name_id, event_id",
    "rocpd_kernel_dispatch": "id, pid, tid, agent_id, kernel_id, queue_id, stream_id, start, end, workgroup_size_x, "
    "workgroup_size_y, workgroup_size_z, grid_size_x, grid_size_y, grid_size_z, group_segment_size, event_id",
    "rocpd_memory_copy": "id, pid, tid, start, end, name_id, dst_agent_id, src_agent_id, size, stream_id, event_id",
}
CONTENT: dict[str, list[tuple[Any, ...]]] = {
    "rocpd_info_agent": [(CPU, "CPU", 0, 0, "EPYC", "EPYC", "{}"),
                         (GPU, "GPU", 1, 0, "gfx942", "AMD Instinct MI300X", '{"cu_count": 304}')],
    "rocpd_info_process": [(7, 4242, "secret command", "secret environment")],
    "rocpd_info_thread": [(8, 4243)],
    "rocpd_info_kernel_symbol": [(1, "gemm.kd", "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1", 64)],
    "rocpd_string": [(1, "hipLaunchKernel"), (2, "hipMemcpyAsync"), (3, "MEMORY_COPY_HOST_TO_DEVICE"),
                     (4, "HIP_RUNTIME_API"), (5, "MARKER_CORE_API"), (6, "roctxRangePushA"),
                     (7, "hipDeviceSynchronize")],
    "rocpd_event": [(1, 4, 11, "{}"), (2, 4, 12, "{}"), (3, None, 11, "{}"), (4, None, 12, "{}"),
                    (5, 5, 13, '{"message": "model.layers.0"}'), (6, 4, 14, "{}")],
    "rocpd_region": [(1, 7, 8, 1010, 1020, 1, 1), (2, 7, 8, 1030, 1040, 2, 2), (3, 7, 8, 1000, 1050, 6, 5),
                     (4, 7, 8, 1060, 1500, 7, 6)],
    "rocpd_kernel_dispatch": [(1, 7, 8, GPU, 1, 3, 2, 1100, 1400, 256, 1, 1, 1024, 2, 1, 4096, 3)],
    "rocpd_memory_copy": [(1, 7, 8, 1400, 1450, 3, GPU, CPU, 512, 2, 4)],
}  # fmt: skip


def database(path: Path, content: Mapping[str, list[tuple[Any, ...]]] = CONTENT) -> Path:
    """Write the database with these rows by table, and return its path."""
    tables = {f"{name}{SUFFIX}": (columns.split(", "), content[name]) for name, columns in SCHEMA.items()}
    with closing(sqlite3.connect(sqlitefiles.written(path, tables))) as con:
        for name in SCHEMA:
            con.execute(f'CREATE VIEW {name} AS SELECT * FROM "{name}{SUFFIX}"')
        con.commit()
    return path
