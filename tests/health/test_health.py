"""Findings on traces with device work, and the grade that follows from them."""

from __future__ import annotations

from typing import Any

import pytest

from xsp.health import grade, health
from xsp.health.finding import Finding, Severity
from xsp.importers.contract import CPU_SAMPLES, CUDA_BACKTRACES, OS_BACKTRACES, PYTHON_FRAMES
from xsp.testing import spans, trace_of

LAUNCHED = """
    step s 0-1000
      module conv 10-400
        op aten::conv2d 20-300
          launch cudaLaunchKernel 30-40 correlation_id=1
    kernel gemm 50-450 correlation_id=1
"""


def found(text: str, subject: str, **run: Any) -> list[Finding]:
    made = trace_of(spans(text), dict(run))
    return [entry for entry in health(made) if entry.subject == subject]


@pytest.mark.parametrize(
    ("change", "subject", "says", "best"),
    [
        ("", "launches", "all 1 kernels and copies have a launch", "A"),
        (
            "kernel lost 500-900 correlation_id=9",
            "launches",
            "1 of 2 kernels and copies (50 % of their time)",
            "C",
        ),
        ("kernel lost 500-1900 correlation_id=9", "launches", "(77.8 % of their time) have no launch", "D"),
        ("kernel lost 5-9 correlation_id=9", "launches", "1 of them began before its first launch", "B"),
        ("", "layers", "100 % exact, 0 % inferred, 0 % unknown", "A"),
        ("launch l 600-610 correlation_id=2\nkernel early 590-700 correlation_id=2", "clocks", "by up to 10 µs", "C"),
        (
            "op aten::tanh 20-30 thread=7\nop aten::sum 40-50 thread=7",
            "parents",
            "2 of 6 spans have no parent: 2 (op: aten::sum, aten::tanh) ran on 1 thread without a step",
            "C",
        ),
        (
            "op aten::late 2000-2100",
            "parents",
            "1 (op: aten::late) ran on 1 thread of the program outside of all other spans there",
            "C",
        ),
        (
            "op aten::tanh 20-400 thread=7\nprimitive conv 100-200 thread=None",
            "parents",
            "1 (primitive: conv) ran in parallel with others and could have several parents: `xsp run --resolve`",
            "C",
        ),
        ("primitive conv 3000-3100 thread=None", "parents", "1 (primitive: conv) have no thread, and no span", "C"),
        ("overhead flush 500-600 thread=None", "overhead", "1 records of the profiler's own work, 0.1 ms (10 %", "C"),
    ],
)
def test_device_work_is_looked_at(change: str, subject: str, says: str, best: str) -> None:
    (finding,) = found(LAUNCHED + change, subject)
    assert (says in finding.text, finding.best_grade) == (True, best)


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ("", "A"),
        ("launch cudaLaunchKernel 480-485 correlation_id=2\nkernel late 490-900 correlation_id=2", "A"),
        ("launch cudaLaunchKernel 500-505 correlation_id=2\nkernel late 510-900 correlation_id=2", "B"),
        ("launch cudaLaunchKernel 700-705 correlation_id=2\nkernel late 710-900 correlation_id=2", "C"),
        ("launch cudaLaunchKernel 50-55 correlation_id=2\nkernel waits 710-900 correlation_id=2", "A"),
        ("kernel unlaunched 710-900", "A"),
    ],
)
def test_recorded_stacks_cost_the_grade_by_how_long_the_device_waited_for_launches(change: str, best: str) -> None:
    source = {"skipped": {PYTHON_FRAMES: 14_794}}
    (finding,) = found(LAUNCHED + change, "stacks", imported={"sources": [source]})
    assert (finding.best_grade, "14794 frames" in finding.text) == (best, True)
    assert found(LAUNCHED + change, "stacks", imported={"sources": [{"skipped": {}}]}) == []


@pytest.mark.parametrize(
    ("recorded", "says", "best"),
    [
        ({CUDA_BACKTRACES: 5}, "--cudabacktrace", "C"),
        ({OS_BACKTRACES: 5}, "--trace=osrt", "B"),
        ({CPU_SAMPLES: 5}, "--sample", "B"),
        ({CPU_SAMPLES: 50, CUDA_BACKTRACES: 5}, "(5 frames, --cudabacktrace)", "C"),
    ],
)
def test_stacks_of_nsight_systems_cost_the_grade_where_the_verdict_is_of_the_host(
    recorded: dict[str, int], says: str, best: str
) -> None:
    late = "launch cudaLaunchKernel 700-705 correlation_id=2\nkernel late 710-900 correlation_id=2"
    (finding,) = found(LAUNCHED + late, "stacks", imported={"sources": [{"skipped": recorded}]})
    assert (says in finding.text, finding.best_grade) == (True, best)
    (finding,) = found(LAUNCHED, "stacks", imported={"sources": [{"skipped": recorded}]})
    assert finding.best_grade == "A"


def test_a_machine_with_devices_that_recorded_no_device_work() -> None:
    (finding,) = found("step s 0-10", "device", machine={"devices": ["NVIDIA H200"]})
    assert (finding.best_grade, "NVIDIA H200" in finding.text) == ("D", True)


def test_the_worst_finding_decides() -> None:
    findings = [Finding(Severity.NOTE, "a", "x"), Finding(Severity.WARNING, "b", "y", "C")]
    assert grade(findings) == ("C", ["y"])
    assert grade([]) == ("A", [])
