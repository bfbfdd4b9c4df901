"""A trace larger than the budget → an overview and detail traces, of which the original can be made again."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import duckdb
import pytest
from fuzzing import examples
from hypothesis import given
from hypothesis import strategies as st

from xsp import table
from xsp.errors import UsageError
from xsp.schema import COLUMNS, Kind, Level, Span

pytest.importorskip("numpy", reason="the extra `otel` is not installed")

from xsp.otlp import zoom

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "00000000deadbeef"


def number(place: int) -> str:
    return f"{place + 1:016x}"


def span(place: int, parent: int | str | None, level: Level = Level.OP, **more: Any) -> Span:
    known: dict[str, Any] = {"name": "aten::add", "kind": "op", "start_ns": 1000 + place, "dur_ns": 10, "process": 1}
    parent_id = number(parent) if isinstance(parent, int) else parent
    return Span(trace_id=TRACE, span_id=number(place), parent_id=parent_id, level=int(level), **{**known, **more})


class Split(NamedTuple):
    overview: list[dict[str, Any]]
    details: list[dict[str, Any]]


def taken_apart(spans: Sequence[Span], budget: int) -> Split:
    con = table.connect()
    table.create(con, "given")
    table.insert(con, "given", spans)
    tables = zoom.split(con, "given", budget)
    return Split(*([*(list(rows(con, name)) for name in tables), []][:2]))


def rows(con: duckdb.DuckDBPyConnection, name: str) -> Iterator[dict[str, Any]]:
    found = con.execute(f"SELECT * FROM {name}")
    names = [column[0] for column in found.description]
    for row in found.fetchall():
        known = dict(zip(names, row, strict=True))
        yield {**known, "links": json.loads(known.get("links") or "[]"), "own": json.loads(known["attributes"] or "{}")}


def put_together(split: Split) -> Counter[Span]:
    """Follow the two rules that the module states for importers."""
    found = []
    for row in [*split.overview, *split.details]:
        own = dict(row["own"])
        if "xsp.fold.count" in own:
            continue
        again = {column.name: row[column.name] for column in COLUMNS}
        again["trace_id"] = own.pop("xsp.trace_id", row["trace_id"])
        again["parent_id"] = own.pop("xsp.parent_id", row["parent_id"]) or None
        again["attributes"] = json.dumps(own) if own else None
        found.append(Span(**again))
    return Counter(found)


def totals(rows: list[dict[str, Any]]) -> dict[tuple[int, str], list[int]]:
    """Return count and nanoseconds by level and kind, kept and folded."""
    found: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        sums = found[row["level"], row["kind"]]
        sums[0] += row["own"].get("xsp.fold.count", 1)
        sums[1] += row["own"].get("xsp.fold.sum_ns", row["dur_ns"])
    return dict(found)


def by_trace(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row["trace_id"]].append(row)
    return dict(found)


def assert_sound(spans: Sequence[Span], budget: int) -> Split:
    """Assert what holds of every trace that was split."""
    split = taken_apart(spans, budget)
    assert totals(split.overview) == totals([{**each._asdict(), "own": {}} for each in spans])
    for trace_id, part in by_trace(split.overview + split.details).items():
        most = max(budget, len({(each.level, each.kind, each.rank, each.process) for each in spans}))
        assert len(part) <= (most if trace_id == TRACE else budget)
        ids = {row["span_id"] for row in part}
        assert len(ids) == len(part)
        inside = {row["parent_id"] for row in part} <= ids | {None, CALLER}
        assert inside, "a parent that the trace had is in the trace"
    everywhere = {(row["trace_id"], row["span_id"]) for row in split.overview + split.details}
    assert {tuple(link) for row in split.overview + split.details for link in row["links"]} <= everywhere
    for part in by_trace(split.details).values():
        assert [row["kind"] for row in part if row["parent_id"] is None] == [zoom.DETAILS_KIND], "one root"
    assert put_together(split) == Counter(spans)
    return split


# --- shapes -----------------------------------------------------------------------------------------------


def test_a_trace_within_the_budget_stays_as_it_is() -> None:
    con = table.connect()
    table.create(con, "given")
    table.insert(con, "given", [span(0, None), span(1, 0)])
    assert zoom.split(con, "given", 2) == ["given"]


def test_what_is_deeper_than_the_overview_is_folded_under_the_nearest_span_that_was_kept() -> None:
    spans = [
        span(0, None, Level.LAYER, name="layer", kind="module"),
        *(span(1 + place, 0, start_ns=2000 + 100 * place, dur_ns=10 + place) for place in range(4)),
        span(9, 1, Level.KERNEL, kind="kernel", name="gemm", device=0, stream=7, start_ns=9000, dur_ns=5),
    ]
    split = assert_sound(spans, 4)
    layer, op, kernel = sorted(split.overview, key=lambda row: row["level"])
    assert (layer["span_id"], layer["own"]) == (spans[0].span_id, {})
    assert (op["name"], op["parent_id"], op["start_ns"], op["dur_ns"]) == ("aten::add", layer["span_id"], 2000, 313)
    assert op["own"] == {
        "xsp.fold.count": 4, "xsp.fold.sum_ns": 46, "xsp.fold.min_ns": 10, "xsp.fold.median_ns": 11,
        "xsp.fold.max_ns": 13, "xsp.fold.details": 2,
    }  # fmt: skip
    assert (kernel["name"], kernel["parent_id"], kernel["device"], kernel["stream"]) == ("gemm", layer["span_id"], 0, 7)
    roots = [row for row in split.details if row["kind"] == zoom.DETAILS_KIND]
    assert sorted(op["links"]) == sorted([row["trace_id"], row["span_id"]] for row in roots)
    assert roots[0]["links"] == [[TRACE, op["span_id"]]]
    assert roots[0]["name"] == "details 1 of 2: layer"


def test_a_million_steps_in_one_trace_are_folded_too() -> None:
    spans = [span(place, CALLER, Level.MODEL, kind="step", name="step") for place in range(0, 100, 2)]
    spans += [
        span(place, place - 1, Level.LAYER, kind="module", name=f"layer {place % 3}") for place in range(1, 100, 2)
    ]
    split = assert_sound(spans, 10)
    step, *layers = sorted(split.overview, key=lambda row: row["level"])
    assert (step["own"]["xsp.fold.count"], step["parent_id"]) == (50, CALLER)
    assert [row["parent_id"] for row in layers] == [step["span_id"]] * 3


def test_a_thousand_names_under_one_parent_are_lumped_and_the_largest_stay() -> None:
    spans = [span(0, None, Level.MODEL, kind="step")]
    spans += [span(place, 0, name=f"op {place}", dur_ns=place) for place in range(1, 1001)]
    split = assert_sound(spans, 20)
    assert len(split.overview) == 20
    [others] = [row for row in split.overview if row["name"] == zoom.LUMP_NAME]
    assert others["own"]["xsp.fold.sum_ns"] == sum(range(1, 1001 - 18))
    assert {row["name"] for row in split.overview} >= {f"op {place}" for place in range(983, 1001)}


def test_layers_stay_when_what_is_under_them_fits_only_without_its_names() -> None:
    spans = [span(0, None, Level.MODEL, kind="step")]
    spans += [span(place, 0, Level.LAYER, kind="module", name=f"layer {place}") for place in range(1, 11)]
    spans += [span(100 * layer + op, layer, name=f"op {op}", dur_ns=op) for layer in range(1, 11) for op in range(1, 6)]
    split = assert_sound(spans, 30)
    assert [row["span_id"] for row in split.overview if row["kind"] == "module"] == [s.span_id for s in spans[1:11]]
    others = [row for row in split.overview if row["name"] == zoom.LUMP_NAME]
    assert len({row["parent_id"] for row in others}) == len(others) == 10
    assert [row["name"] for row in split.overview].count("op 5") == 9


def test_a_chain_of_5_000_needs_no_recursion() -> None:
    chain = [span(0, None, Level.MODEL, kind="step"), *(span(place, place - 1) for place in range(1, 5_000))]
    split = assert_sound(chain, 1_000)
    assert len(split.overview) == 2
    assert len(by_trace(split.details)) == 6


def test_ranks_and_processes_fold_each_for_itself() -> None:
    spans = [span(place, None, rank=place % 2, process=place % 3) for place in range(60)]
    split = assert_sound(spans, 10)
    assert sorted((row["rank"], row["process"], row["own"]["xsp.fold.count"]) for row in split.overview) == [
        (rank, process, 10) for rank in range(2) for process in range(3)
    ]


def test_spans_that_failed_are_counted_on_their_fold() -> None:
    split = assert_sound([span(place, None, status="error:ValueError" if place < 3 else "ok") for place in range(9)], 5)
    assert [row["own"]["xsp.fold.errors"] for row in split.overview] == [3]


def test_the_ids_of_a_second_attempt_are_those_of_the_first_whatever_the_order() -> None:
    spans = [span(0, None, Level.MODEL), *(span(place, place // 2, name=f"op {place % 5}") for place in range(1, 90))]
    first, again, other = (taken_apart(each, budget) for each, budget in ((spans, 9), (spans[::-1], 9), (spans, 8)))

    def ids(split: Split) -> set[tuple[str, str, str]]:
        return {(row["trace_id"], row["span_id"], str(row["parent_id"])) for row in split.overview + split.details}

    assert ids(first) == ids(again)
    made = {row["trace_id"] for row in first.details} & {row["trace_id"] for row in other.details}
    assert made == set(), "another budget makes other detail traces"


def test_traces_of_one_table_are_split_each_for_itself() -> None:
    small = [span(place, None)._replace(trace_id="f" * 32) for place in range(5)]
    large = [span(place, None) for place in range(50)]
    split = taken_apart(small + large, 5)
    assert Counter(row["trace_id"] for row in split.overview) == {"f" * 32: 5, TRACE: 1}
    assert put_together(split) == Counter(small + large)


def test_spans_that_are_their_own_ancestors_are_kept_apart_and_restored() -> None:
    assert_sound([span(0, 1), span(1, 0), span(2, 2), span(3, 1), *(span(place, 3) for place in range(4, 9))], 3)


def test_attributes_and_links_of_a_span_are_kept_beside_those_that_are_added() -> None:
    texts = ["{}", ' { "a.b" : [1, null] } ', '{"x": "}"}', None]
    spans = [span(place, None, attributes=text) for place, text in enumerate(texts * 2)]
    found = put_together(taken_apart(spans, 4))
    known = Counter(str(json.loads(each.attributes or "{}")) for each in found.elements())
    assert known == Counter(str(json.loads(each.attributes or "{}")) for each in spans)


@pytest.mark.parametrize("budget", [1, 0, -5])
def test_a_budget_that_holds_no_detail_trace_is_refused(budget: int) -> None:
    with pytest.raises(UsageError, match="too small: allow 2 or more"):
        zoom.split(table.connect(), "given", budget)


# --- any shape --------------------------------------------------------------------------------------------

LEVELS = [Level.MODEL, Level.LAYER, Level.OP, Level.KERNEL]


@st.composite
def forests(draw: st.DrawFn) -> list[Span]:
    count = draw(st.integers(1, 40))
    spans = []
    for place in range(count):
        parent = draw(st.sampled_from([None, CALLER, *range(place)]))
        spans.append(
            span(
                place, parent, draw(st.sampled_from(LEVELS)), name=draw(st.sampled_from(["a", "b", "ü"])),
                kind=draw(st.sampled_from([Kind.OP.value, Kind.KERNEL.value])), rank=draw(st.integers(0, 1)),
                device=draw(st.sampled_from([None, 0])), start_ns=draw(st.integers(0, 5)),
                dur_ns=draw(st.sampled_from([0, 1, 7, 2**53 + 1])),
            )
        )  # fmt: skip
    return spans


@pytest.mark.slow
@given(forests(), st.integers(2, 50))
@examples(40)
def test_every_forest_within_every_budget_keeps_its_totals_and_can_be_put_together(
    spans: list[Span], budget: int
) -> None:
    assert_sound(spans, budget)
