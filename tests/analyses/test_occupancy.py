"""Theoretical occupancy: the arithmetic of the CUDA toolkit's header, and where a trace gets it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from xsp.device.occupancy import LIMITS, estimate, resident_blocks
from xsp.ingest import load
from xsp.testing import spans, trace_of


@pytest.mark.parametrize(
    ("compute", "threads", "registers", "shared_bytes", "expected"),
    [
        ("9.0", 1024, 32, 0, 1.0),  # two blocks of 32 warps
        ("9.0", 256, 255, 0, 8 / 64),  # 8192 registers a warp: two in each part, so eight warps: one block
        ("9.0", 256, 32, 100 * 1024, 16 / 64),  # 101 KiB with the driver's: two blocks
        ("9.0", 32, 16, 0, 32 / 64),  # as many blocks as there may be
        ("7.5", 1024, 64, 0, 1.0),
        ("7.5", 256, 168, 0, 8 / 32),  # 5376 registers a warp: three in each part, twelve: one block
        ("8.6", 128, 40, 48 * 1024, 8 / 48),  # 49 KiB each, 100 in all
        ("8.9", 768, 40, 0, 1.0),
        ("6.0", 64, 37, 0, 50 / 64),  # 1280 registers a warp: 25 in each of two parts
        ("12.0", 100, 0, 0, 1.0),  # four warps, the last one not full
    ],
)
def test_warps_registers_shared_memory_or_blocks_limit(
    compute: str, threads: int, registers: int, shared_bytes: int, expected: float
) -> None:
    assert estimate(compute, threads, registers, shared_bytes) == pytest.approx(expected)


def test_a_small_grid_limits_too() -> None:
    assert estimate("9.0", 256, 32, 0, blocks=66, sms=132) == 0.5 * 8 / 64
    assert estimate("9.0", 256, 32, 0, blocks=10**6, sms=132) == 1
    assert estimate("9.0", 256, 32, 0, blocks=66) == 1


@pytest.mark.parametrize(
    ("compute", "threads", "registers", "shared_bytes"),
    [("4.2", 256, 32, 0), ("None", 256, 32, 0), ("9.0", 0, 32, 0), ("9.0", 256, -1, 0), ("7.5", 256, 32, 70_000)],
)
def test_what_is_unknown_or_impossible_has_no_estimate(
    compute: str, threads: int, registers: int, shared_bytes: int
) -> None:
    assert estimate(compute, threads, registers, shared_bytes) is None


@pytest.mark.parametrize("compute", LIMITS)
def test_full_blocks_fill_every_device(compute: str) -> None:
    assert resident_blocks(LIMITS[compute], 16, 32, 1024) * 16 == LIMITS[compute].warps


DEVICES = {"machine": {"devices": ["H200"], "device_properties": [{"compute": "9.0", "sms": 132}]}}
KERNELS = """
step train 0-100
  op aten::mm 10-50
    launch cudaLaunchKernel 20-30 correlation_id=1
kernel whole 40-60 correlation_id=1 attributes={"grid":[1320,1,1],"block":[256,1,1],"registers":32,"shared_bytes":0}
kernel small 60-70 attributes={"grid":[66,1,1],"block":[256,1,1],"registers":32,"shared_bytes":0}
kernel known 70-80 occupancy_source=counter attributes={"grid":[66,1,1],"block":[256,1,1],"registers":32}
kernel untold 80-90 attributes={"grid":[66,1,1],"block":[256,1,1]}
kernel elsewhere 90-95 device=5 attributes={"grid":[66,1,1],"block":[256,1,1],"registers":32}
"""


def test_kernels_without_a_measured_occupancy_get_an_estimate() -> None:
    rows = [row._replace(occupancy=0.9) if row.name == "known" else row for row in spans(KERNELS)]
    result = trace_of(rows, DEVICES).sql(
        "SELECT name, occupancy, occupancy_source FROM merged WHERE kind = 'kernel' ORDER BY start_ns"
    )
    assert result.fetchall() == [
        ("whole", 1.0, "estimate"),
        ("small", 0.0625, "estimate"),
        ("known", 0.9, "counter"),
        ("untold", None, None),
        ("elsewhere", None, None),
    ]


def test_without_the_device_there_is_no_estimate() -> None:
    trace = trace_of(spans(KERNELS.replace("occupancy_source=counter ", "")), {"machine": {"device_properties": "?"}})
    assert trace.sql("SELECT count(occupancy) FROM merged").fetchall() == [(0,)]


TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces" / "kineto_nvidia"


@pytest.mark.slow
@pytest.mark.skipif(not TRACES.is_dir(), reason="real traces are not beside the repository")
@pytest.mark.parametrize(
    "name",
    ["hta_a100_nccl_metadata_rank0of2", "kineto_sample_resnet50_workers0_1623143089861", "tracelens_h100_qwen1.5-0.5b"],
)
def test_on_real_launches_it_is_what_pytorch_estimates(name: str) -> None:
    """PyTorch writes whole percent, and 0 for blocks with more than 48 KiB of shared memory."""
    trace = load.load(TRACES / f"{name}.json.gz")
    device = trace.run["machine"]["device_properties"][0]
    launches = trace.sql(
        "SELECT DISTINCT attributes, occupancy FROM spans WHERE kind = 'kernel' AND occupancy IS NOT NULL"
    ).fetchall()
    assert launches
    for attributes, theirs in launches:
        launch = json.loads(attributes)
        blocks, threads = prod(launch["grid"]), prod(launch["block"])
        ours = estimate(device["compute"], threads, launch["registers"], launch["shared_bytes"], blocks, device["sms"])
        assert ours == pytest.approx(theirs, abs=0.0051) or (theirs == 0 and launch["shared_bytes"] > 48 * 1024)
    zeros = "SELECT count(*) FROM merged WHERE kind = 'kernel' AND occupancy = 0"
    assert trace.sql(zeros).fetchall() == [(0,)]
