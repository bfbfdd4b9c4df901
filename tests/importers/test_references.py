"""Figures that other tools, or a plain reading of the file, give for public traces: the rows of `references.csv`.

The traces are not part of this repository: a test looks for its file in `../shared` and is skipped where it is absent.
The table holds figures only, each with the file of the project that states it, and its licence. A value `plain` is what
`tests/support/plain_reading.py` counts, for traces of which no other tool's figure is at hand.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_reading
import pytest

import xsp
from xsp.store.trace import Trace

SHARED = Path(__file__).resolve().parents[3] / "shared"
with open(Path(__file__).with_name("references.csv"), encoding="utf-8") as _file:
    ROWS = list(csv.DictReader(_file))
LARGE = 500_000
"""Bytes of the files that `make test` leaves out."""


def of_devices(column: str) -> Callable[[Trace, str], float]:
    """Return the sum over devices of a column of `device-activity`."""

    def figure(trace: Trace, _: str) -> float:
        rows = xsp.analyses.ANALYSES["device-activity"](trace).filter("rank IS NOT NULL")
        return float(rows.aggregate(f"sum({column})").fetchall()[0][0])

    return figure


def of_launched_work(is_busy: bool) -> Callable[[Trace, str], float]:
    """Return the busy or idle time of the device work whose launch was recorded."""

    def figure(trace: Trace, _: str) -> float:
        rows = trace.sql(
            "SELECT start_ns, start_ns + dur_ns FROM spans work WHERE device IS NOT NULL AND EXISTS (FROM spans call "
            "WHERE call.device IS NULL AND call.level = 60 AND call.correlation_id = work.correlation_id)"
        ).fetchall()
        work = [plain_reading.Work("", False, 0, 0, start, end, (0, 0)) for start, end in rows]
        busy_ns = plain_reading.busy_ns(work)
        return (busy_ns if is_busy else plain_reading.window_ns(work) - busy_ns) / 1e6

    return figure


def operator_ms(trace: Trace, name: str) -> float:
    rows = xsp.analyses.operators(trace).filter("device IS NULL").aggregate("name, sum(device_ms)").fetchall()
    return float(sum(ms or 0.0 for own, ms in rows if own.removesuffix("_100") == name))


def call_gflop(trace: Trace, name: str) -> float:
    """Return the operations of the largest call of an operator, in 10^9."""
    query = "SELECT max(flops) FROM spans WHERE name = ? AND kind = 'op'"
    return float(trace.con.execute(query, [name]).fetchall()[0][0]) / 1e9


def communication_kernels(trace: Trace, _: str) -> float:
    from xsp.store.devicework import prepare

    prepare(trace)
    query = "SELECT count(*) FROM device_work WHERE purpose = 'communication'"
    return float(trace.con.execute(query).fetchall()[0][0])


def collective_bytes(trace: Trace, kind: str) -> float:
    """Return the bytes of the longest collective of a kind."""
    from xsp.store.collectives import COLLECTIVES
    from xsp.store.devicework import prepare

    prepare(trace)
    query = f"WITH {COLLECTIVES} SELECT bytes FROM collectives WHERE collective = ? ORDER BY end_ns - start_ns DESC"
    return float(trace.con.execute(query, [kind]).fetchall()[0][0])


def queue_mean(trace: Trace, place: str) -> float:
    """Return the mean length of the queue of a stream, given as "device/stream"."""
    device, stream = place.split("/")
    rows = xsp.analyses.ANALYSES["queues"](trace).filter(f"device = {int(device)} AND stream = {int(stream)}")
    return float(rows.aggregate("any_value(mean_waiting)").fetchall()[0][0])


FIGURES: dict[str, Callable[[Trace, str], float]] = {
    **{
        name: of_devices(name)
        for name in ("busy_ms", "idle_ms", "window_ms", "computation_ms", "communication_ms", "exposed_copy_ms")
    },
    "launched_busy_ms": of_launched_work(is_busy=True),
    "launched_idle_ms": of_launched_work(is_busy=False),
    "operator_ms": operator_ms,
    "call_gflop": call_gflop,
    "communication_kernels": communication_kernels,
    "collective_bytes": collective_bytes,
    "queue_mean": queue_mean,
}


def plainly(path: Path, figure: str, of: str) -> float:
    reading = plain_reading.read_trace(path)
    if figure == "queue_mean":
        device, stream = map(int, of.split("/"))
        return reading.mean_queue(device, stream)
    choose: dict[str, Callable[[Any], Any]] = {
        "busy_ms": lambda work: work,
        "communication_ms": lambda work: [each for each in work if plain_reading.communicates(each)],
    }
    on_devices = [choose[figure](reading.on_device(device)) for device in reading.devices()]
    return sum(plain_reading.busy_ns(work) for work in on_devices) / 1e6


@functools.lru_cache(maxsize=2)
def loaded(*paths: Path) -> Trace:
    return xsp.load(list(paths)) if len(paths) > 1 else xsp.load(paths[0])


def parameter(row: dict[str, str]) -> Any:
    path = SHARED / row["trace"]
    is_large = path.is_file() and path.stat().st_size > LARGE
    name = f"{Path(row['trace']).name.partition('.')[0]} {row['figure']} {row['of']}".strip()
    return pytest.param(row, id=name, marks=[pytest.mark.slow] if is_large else [])


@pytest.mark.parametrize("row", [parameter(row) for row in ROWS])
def test_a_figure_is_what_its_reference_states(row: dict[str, str]) -> None:
    paths = [SHARED / name for name in (row["trace"], row["capture"]) if name]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        pytest.skip(f"{', '.join(missing)} of {row['source'].split()[0]} is not in ../shared")
    expected = plainly(paths[0], row["figure"], row["of"]) if row["value"] == "plain" else float(row["value"])
    found = FIGURES[row["figure"]](loaded(*paths), row["of"])
    assert found == pytest.approx(expected, rel=float(row["tolerance"]), abs=0.002)


def test_each_reference_states_its_source_and_licence() -> None:
    assert len(ROWS) >= 30
    assert all(row["source"] and row["licence"] and row["figure"] in FIGURES for row in ROWS)
