"""Each trace of `../shared/traces`, whichever lie there: xsp says of it what a plain reading of the file counts."""

from __future__ import annotations

import functools
import getpass
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import plain_reading
import pytest
from plain_reading import Reading

import xsp
from xsp import analyses
from xsp.errors import AnalysisError, XspError
from xsp.schema import Level
from xsp.store.trace import Trace

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "traces"
FILES = sorted(each for each in FOLDER.rglob("*") if each.name.endswith((".json", ".json.gz", ".sqlite")))
SMALL = {".gz": 500_000, ".json": 10_000_000, ".sqlite": 2_500_000}
"""Bytes of the files that `make test` reads; `make test-all` reads the larger ones too."""

FEW = {".gz": 100_000, ".json": 1_000_000, ".sqlite": 2_500_000}
"""Bytes of the files of which `make test` asks each analysis."""

pytestmark = pytest.mark.skipif(not FILES, reason="no traces of GPUs lie in ../shared/traces")


class Both(NamedTuple):
    """A file as it is read plainly, and as xsp reads it."""

    plain: Reading
    trace: Trace


@functools.cache
def plainly(path: Path) -> Reading | plain_reading.UnreadableError:
    """Return what the plain reader reads, or why there is nothing to read."""
    try:
        return plain_reading.read_trace(path)
    except plain_reading.UnreadableError as reason:
        return reason


@functools.cache
def loaded(path: Path) -> Both:
    plain = plainly(path)
    if isinstance(plain, plain_reading.UnreadableError):
        pytest.skip(f"no timeline: {plain}")
    return Both(plain, xsp.load(path))


def large(path: Path, most: dict[str, int] = SMALL) -> bool:
    return path.stat().st_size > most[path.suffix]


def marked(path: Path, most: dict[str, int] = SMALL) -> Any:
    """Return a file as a parameter, marked as slow if it is large."""
    marks = [pytest.mark.slow] if large(path, most) else []
    return pytest.param(path, marks=marks, id=path.name.partition(".")[0])


@pytest.fixture(params=[marked(path) for path in FILES])
def both(request: pytest.FixtureRequest) -> Both:
    return loaded(request.param)


def ask(trace: Trace, query: str) -> list[tuple[object, ...]]:
    return trace.sql(query).fetchall()


# --- what a device did ------------------------------------------------------------------------------------


def test_every_kernel_and_copy_is_there_with_its_name_place_and_time(both: Both) -> None:
    begin = min((each.start for each in both.plain.work), default=0)
    expected = [(w.name if not w.is_copy else "", w.is_copy, w.device, w.stream, w.start - begin, w.end - begin)
                for w in both.plain.work]  # fmt: skip
    found = ask(
        both.trace,
        """
        SELECT CASE WHEN kind = 'kernel' THEN name ELSE '' END, kind = 'copy', device, stream,
               start_ns - min(start_ns) OVER (), start_ns + dur_ns - min(start_ns) OVER ()
        FROM spans WHERE device IS NOT NULL
        """,
    )
    assert sorted(found) == sorted(expected)


def test_launches_that_are_found_and_missed(both: Both) -> None:
    ((launched,),) = ask(
        both.trace,
        """
        SELECT count(*) FROM spans work WHERE device IS NOT NULL AND EXISTS (
            SELECT 1 FROM spans call WHERE call.device IS NULL AND call.level = 60 AND call.rank = work.rank
            AND call.correlation_id = work.correlation_id
            AND call.process IS NOT DISTINCT FROM coalesce(work.process, call.process))
        """,
    )
    assert launched == both.plain.launched_count()


def test_device_time_idle_time_and_communication_of_each_device(both: Both) -> None:
    expected = {}
    for device in both.plain.devices():
        work = both.plain.on_device(device)
        talking = [each for each in work if plain_reading.communicates(each)]
        expected[device] = {
            "window_ms": plain_reading.window_ns(work),
            "busy_ms": plain_reading.busy_ns(work),
            "idle_ms": plain_reading.window_ns(work) - plain_reading.busy_ns(work),
            "communication_ms": plain_reading.busy_ns(talking),
            "exposed_communication_ms": plain_reading.exposed_ns(work),
            "kernels": len(both.plain.kernels(device)),
            "copies": len(both.plain.copies(device)),
        }
    if not expected:
        pytest.skip("the file holds no device work")
    table = xsp.analyses.ANALYSES["device-activity"](both.trace)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.fetchall()]
    found = {
        row["device"]: {
            name: round(row[name] * 1e6) if name.endswith("_ms") else row[name] for name in expected[row["device"]]
        }
        for row in rows if row["device"] is not None
    }  # fmt: skip
    assert found == expected


def test_idle_time_is_split_at_launches(both: Both) -> None:
    if not both.plain.places:
        pytest.skip("the plain reader knows no times of launches of this format")
    for device in both.plain.devices():
        gaps = both.plain.gaps(device)
        xsp.analyses.ANALYSES["idle-causes"](both.trace)
        ((idle, unknown, late, hosts),) = ask(
            both.trace,
            f"""
            SELECT sum(idle_ns), sum(idle_ns) FILTER (cause = 'unknown'),
                   (SELECT sum(greatest(0, late_ns)) FROM (SELECT DISTINCT idle_from, late_ns, cause = 'unknown' AS u
                    FROM idle_causes WHERE device = {device}) WHERE NOT u),
                   sum(idle_ns) FILTER (cause NOT IN ('unknown', 'kernel wait'))
            FROM idle_causes WHERE device = {device}
            """,
        )
        assert (idle or 0) == sum(gap for gap, _ in gaps)
        assert (unknown or 0) == sum(gap for gap, before in gaps if before is None)
        assert (late or 0) == sum(before for _, before in gaps if before is not None)
        assert (hosts or 0) >= (late or 0)


def test_device_time_by_the_name_of_the_kernel(both: Both) -> None:
    expected: dict[str, int] = {}
    for kernel in both.plain.kernels():
        expected[kernel.name] = expected.get(kernel.name, 0) + kernel.end - kernel.start
    rows = ask(both.trace, "SELECT name, sum(dur_ns)::BIGINT FROM spans WHERE kind = 'kernel' GROUP BY name")
    assert dict(rows) == expected


# --- what the host did ------------------------------------------------------------------------------------


def test_calls_and_time_of_each_operator(both: Both) -> None:
    names = list(both.plain.operators)
    rows = both.trace.sql(
        "SELECT name, count(*), sum(dur_ns)::BIGINT FROM spans WHERE device IS NULL AND kind <> 'module' "
        "AND parent_rule IS DISTINCT FROM 'order' AND name IN (SELECT unnest($1::VARCHAR[])) GROUP BY name",
        [names],
    ).fetchall()
    assert {name: (calls, ns) for name, calls, ns in rows} == {
        name: (both.plain.operators[name], both.plain.operators_ns[name]) for name in names
    }


def test_ops_hold_all_device_time_each_in_the_operator_around_its_launch(both: Both) -> None:
    if not both.trace.has(Level.OP):
        return
    found = analyses.operators(both.trace).filter("device IS NULL")
    ((shown, percent),) = found.aggregate("sum(device_ms), sum(percent_of_device_time)").fetchall()
    ((held,),) = ask(
        both.trace,
        "SELECT sum(coalesce(true_ns, raw_ns, dur_ns)) / 1e6 FROM merged WHERE kind IN ('kernel', 'copy')",
    )
    assert shown == (None if held is None else pytest.approx(held))
    assert percent == (None if held is None else pytest.approx(100))
    if both.plain.steps > 1 or not both.plain.nested:
        return  # of several steps the table holds one; a plain reading of nsys's ranges is not made
    expected: dict[str, float] = {}
    for work in both.plain.work:
        name = both.plain.enclosing_operator(work) or "(no operator)"
        expected[name] = expected.get(name, 0.0) + (work.end - work.start) / 1e6
    rows = dict(found.filter("device_ms IS NOT NULL").aggregate("name, sum(device_ms)").fetchall())
    assert rows.pop("(no operator)", 0.0) <= expected.pop("(no operator)", 0.0) + 1e-6, "what no step launched is left"
    assert rows == pytest.approx(expected)


def test_of_several_gpus_operators_and_kernels_hold_the_time_of_each_and_shares_of_its_own(both: Both) -> None:
    if len({work.device for work in both.plain.work}) < 2 or both.plain.steps > 1:
        return
    expected: dict[int, float] = {}
    for work in both.plain.work:
        expected[work.device] = expected.get(work.device, 0.0) + (work.end - work.start) / 1e6
    kernels: dict[int, float] = {}
    for work in both.plain.work:
        if not work.is_copy:
            kernels[work.device] = kernels.get(work.device, 0.0) + (work.end - work.start) / 1e6
    for table, ms, share, held in (
        (analyses.operators(both.trace), "device_ms", "percent_of_device_time", expected),
        (analyses.kernels_by_name(both.trace), "latency_ms", "percent_of_kernel_time", kernels),
    ):
        of_each = table.filter("device IS NOT NULL").aggregate(f"device, sum({ms}), sum({share}), max({share})")
        found = {device: row for device, *row in of_each.fetchall()}
        assert {device: row[0] for device, row in found.items()} == pytest.approx(held)
        assert all(row[1] == pytest.approx(100) and row[2] <= 100 for row in found.values())


def test_the_own_device_time_of_modules_adds_up_to_all_device_work(both: Both) -> None:
    if not both.trace.has(Level.LAYER):
        return
    for each in (analyses.modules_by_path, analyses.modules_by_class):
        found = each(both.trace)
        own, percent, most = found.aggregate(
            "sum(self_device_ms), sum(self_percent_of_device_time), max(percent_of_device_time)"
        ).fetchall()[0]
        held = analyses.operators(both.trace).filter("device IS NULL").aggregate("sum(device_ms)").fetchall()[0][0]
        assert own == (None if held is None else pytest.approx(held))
        assert percent == (None if held is None else pytest.approx(100))
        assert (most or 0) <= 100 + 1e-9


def test_modules_steps_and_rank(both: Both) -> None:
    ((modules, steps),) = ask(
        both.trace,
        "SELECT count(*) FILTER (kind = 'module'), count(*) FILTER (kind = 'step' AND name LIKE 'ProfilerStep#%') "
        "FROM spans",
    )
    ranks = {rank for (rank,) in ask(both.trace, "SELECT DISTINCT rank FROM spans")}
    assert (modules, steps, ranks) == (both.plain.modules, both.plain.steps, {both.plain.rank or 0})


def test_parents_stand_in_the_trace_and_none_is_its_own_ancestor(both: Both) -> None:
    parents = dict(ask(both.trace, "SELECT span_id, parent_id FROM spans"))
    assert parents.keys() >= set(parents.values()) - {None}
    reached: set[object] = {None}
    for span in parents:
        way = []
        while span not in reached:
            assert len(way) < 10_000, "a circle"
            way.append(span)
            span = parents[span]
        reached.update(way)


def test_device_work_hangs_where_its_launch_hangs(both: Both) -> None:
    wrong = ask(
        both.trace,
        """
        SELECT work.name, work.parent_id, call.parent_id FROM spans work JOIN spans call
        ON call.device IS NULL AND call.level = 60 AND call.rank = work.rank
        AND call.correlation_id = work.correlation_id
        AND call.process IS NOT DISTINCT FROM coalesce(work.process, call.process)
        WHERE work.device IS NOT NULL AND work.parent_rule = 'correlation' AND work.parent_id <> call.parent_id LIMIT 5
        """,
    )
    assert wrong == []


# --- analyses and privacy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [marked(path, FEW) for path in FILES], indirect=True)
@pytest.mark.parametrize("name", xsp.analyses.ANALYSES)
def test_an_analysis_answers_or_says_why_not(both: Both, name: str) -> None:
    try:
        xsp.analyses.ANALYSES[name](both.trace).fetchall()
    except AnalysisError:
        pass


def test_nothing_of_whose_trace_it_is_comes_along(both: Both, request: pytest.FixtureRequest) -> None:
    path = request.node.callspec.params["both"]
    told = json.dumps(both.trace.run.content)
    assert set(private(path)) & set(re.split(r'[",:\s]+', told)) == set()
    assert str(path.parent) not in told
    assert not re.search(r"(/home/|/root/|/tmp/|/Users/|[A-Z]:\\\\)", told)
    assert getpass.getuser() not in re.split(r"\W+", told)


def private(path: Path) -> list[str]:
    """Return what a Kineto file says at its top of names and paths; nsys's are not read here."""
    if path.suffix == ".sqlite":
        return []
    written = plain_reading.content(path)
    keys = [key for key in written if re.search("host|user|job|traceName|path|environment", key, re.IGNORECASE)]
    return [str(written[key]) for key in keys]


# --- several files ----------------------------------------------------------------------------------------


def folders() -> list[Path]:
    """Return the folders that hold the ranks of one job."""
    return sorted({each.parent for each in FILES if each.parent.name.startswith("multi_rank")})


@pytest.mark.slow
@pytest.mark.parametrize("folder", folders(), ids=lambda path: path.name)
def test_a_folder_of_ranks_is_one_job_with_the_work_of_all(folder: Path) -> None:
    plain = [plain_reading.read_trace(each) for each in FILES if each.parent == folder]
    trace = xsp.load(folder)
    rows = ask(trace, "SELECT rank, count(*), sum(dur_ns)::BIGINT FROM spans WHERE device IS NOT NULL GROUP BY rank")
    assert sorted(rows) == sorted((each.rank, len(each.work), plain_reading.total_ns(each.work)) for each in plain)


@pytest.mark.parametrize("size", ["small", pytest.param("large", marks=pytest.mark.slow)])
def test_what_is_no_timeline_is_refused_with_its_name(size: str) -> None:
    for path in FILES:
        if large(path) == (size == "large") and isinstance(plainly(path), plain_reading.UnreadableError):
            with pytest.raises(XspError, match=re.escape(path.name)):
                xsp.load(path)
