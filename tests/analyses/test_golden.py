"""The analyses' own formulas over the figures that XSP's paper publishes (arXiv 1908.06869, tables II to X)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from xsp.analyses import model_roofline, model_sweep, optimal_batch
from xsp.analyses.kernel import attainable, intensity, memory_bound, occupancy, roofs, share, throughput
from xsp.device.ceilings import ceiling
from xsp.testing import spans, trace_of

V100 = ceiling("Tesla V100-SXM2-16GB")

# ResNet50 v1.5 on a V100, table V: batch size, latency and kernel latency (ms), GFLOP, DRAM reads and writes, occupancy
A15 = [
    (1, 6.21, 5.01, 7.94, 192.49, 194.16, 22.65),
    (16, 21.90, 20.14, 118.04, 3969.19, 3024.09, 35.58),
    (32, 40.03, 37.14, 232.78, 7711.50, 5823.97, 38.76),
    (256, 275.05, 254.25, 1742.39, 23185.11, 31095.45, 43.15),
]


def asked(question: str, rows: Sequence[Sequence[Any]], columns: str) -> list[tuple[Any, ...]]:
    """Ask SQL of rows, with the roof of a V100 in view."""
    values = ", ".join(f"({', '.join(map(repr, row))})" for row in rows)
    return duckdb.sql(f"WITH {roofs(V100)}, given({columns}) AS (VALUES {values}) {question}").fetchall()


@pytest.mark.parametrize(
    ("device", "ideal"),
    [("Quadro RTX 6000", 26.12), ("Tesla V100-SXM2-16GB", 17.44), ("Tesla P100-PCIE-16GB", 12.70), ("Tesla P4", 28.34),
     ("Tesla M60", 30.12)],
)  # fmt: skip
def test_the_ideal_intensity_of_the_papers_five_devices(device: str, ideal: float) -> None:
    # the paper's own peaks are rounded to two figures, which of the P4 and the M60 shows
    assert ceiling(device).ideal_intensity() == pytest.approx(ideal, rel=0.012)


def test_the_model_is_memory_bound_at_batch_sizes_16_and_32_alone() -> None:
    bytes_of = [f"{column} * 1048576" for column in ("read_mib", "write_mib")]
    rows = asked(
        f"SELECT batch, {intensity('gflop * 1e9', *bytes_of)} AS ai, {memory_bound('ai', 'ideal')} "
        "FROM given, roofs WHERE precision = 'fp32' ORDER BY batch",
        A15,
        "batch, ms, kernel_ms, gflop, read_mib, write_mib, occupancy",
    )
    assert [(batch, round(at, 2), bound) for batch, at, bound in rows] == [
        (1, 19.58, False), (16, 16.10, True), (32, 16.40, True), (256, 30.61, False),
    ]  # fmt: skip


def test_what_the_paper_calls_MB_are_MiB() -> None:
    kernel = [(62.89e9, 11.55, 283.05)]  # table III: the dearest kernel, AI 203.58
    ((mib, mb),) = asked(
        f"SELECT {intensity('flops', 'r * 1048576', 'w * 1048576')}, {intensity('flops', 'r * 1e6', 'w * 1e6')} "
        "FROM given",
        kernel,
        "flops, r, w",
    )
    assert mib == pytest.approx(203.58, abs=0.01)
    assert mb == pytest.approx(213.5, abs=0.1)


def test_of_37_models_20_are_memory_bound_and_intensities_are_those_published(shared: Path) -> None:
    published = shared / "golden" / "xsp_table9.csv"
    rows = duckdb.sql(
        f"""
        WITH {roofs(V100)}, given AS (FROM read_csv('{published}'))
        SELECT {intensity("gpu_gflops * 1e9", "dram_read_gb * 1e9", "dram_write_gb * 1e9")} AS ai, arith_intensity,
               {memory_bound("ai", "ideal")} AS bound, memory_bound_computed,
               {throughput("gpu_gflops * 1e9", "batch_latency_ms * gpu_latency_pct / 100 * 1e6")} / 1e3, arith_tflops
        FROM given, roofs WHERE precision = 'fp32'
        """
    ).fetchall()
    assert len(rows) == 37
    assert sum(bound for _, _, bound, *_ in rows) == 20
    assert all(bound == published for _, _, bound, published, *_ in rows)
    assert all(at == pytest.approx(published, rel=0.01) for at, published, *_ in rows)
    assert all(rate == pytest.approx(published, rel=0.01) for *_, rate, published in rows)
    assert max(rate for *_, rate, _ in rows) * 1e12 < 0.525 * (V100.peak() or 0), "no model exceeds 52 %"


def test_the_papers_optimum_is_the_highest_throughput_and_the_literal_rule_gives_64() -> None:
    # latencies of A15, and between them table VI's gains of 3.6 % and 3.9 %
    at_128 = 275.05 / 2 * 1.039
    best = optimal_batch([1, 16, 32, 64, 128, 256], [6.21, 21.90, 40.03, at_128 / 2 * 1.036, at_128, 275.05])
    assert (best.first_plateau, best.max_throughput) == (64, 256)


def test_shares_and_occupancies_of_several_kernels() -> None:
    rows = asked(
        f"SELECT {occupancy('occupancy', 'ns')}, {share('sum(ns)', '1000')} FROM given",
        [(100.0, 0.5), (300.0, 0.1)],
        "ns, occupancy",
    )
    assert rows == [(pytest.approx(0.2), 40.0)]


def test_the_roof_is_slanted_below_the_ideal_intensity_and_flat_above() -> None:
    height = attainable("ai", "peak_gflop_per_s", "bandwidth_gbyte_per_s")
    rows = asked(f"SELECT {height} FROM given, roofs WHERE precision = 'fp32'", [(1.0,), (17.44,), (100.0,)], "ai")
    assert [round(row[0]) for row in rows] == [900, 15696, 15700]


@pytest.mark.slow
def test_A1_and_A15_over_a_sweep_by_the_same_formulas() -> None:
    """Steps with the published figures of each batch size, as a counter would give them."""
    machine = {"machine": {"devices": ["Tesla V100-SXM2-16GB"]}}
    traces = [
        trace_of(
            spans(f"step resnet 0-{ms * 1000} batch_size={batch}\nkernel all 0-{kernel_ms * 1000} dtype=float"
                  f" flops={round(gflop * 1e9)} dram_read_bytes={round(read * 2**20)}"
                  f" dram_write_bytes={round(write * 2**20)}"),
            machine,
        )
        for batch, ms, kernel_ms, gflop, read, write, _ in reversed(A15)
    ]  # fmt: skip
    rows = model_roofline(traces).select("batch_size, kernel_percent_of_wall, flop_per_byte, memory_bound").fetchall()
    assert [(batch, round(percent, 1), round(at, 2), bound) for batch, percent, at, bound in rows] == [
        (1, 80.7, 19.58, False), (16, 92.0, 16.10, True), (32, 92.8, 16.40, True), (256, 92.4, 30.61, False),
    ]  # fmt: skip
    sweep = model_sweep(traces, target_ms=50).select("batch_size, max_throughput, within_target").fetchall()
    assert sweep == [(1, False, False), (16, False, False), (32, False, True), (256, True, False)]
