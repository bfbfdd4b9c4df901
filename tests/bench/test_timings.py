"""The data base of timings: what is kept comes back, and nothing that is damaged becomes a figure."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from madegraphs import graph_of

from xsp import terminal
from xsp.bench import text
from xsp.bench.environment import Environment
from xsp.bench.spec import CacheState, Spec, Status, Timing, slowdown_text, spec_of, untimed
from xsp.bench.timings import Timings
from xsp.errors import BenchError
from xsp.graph.blocks import block

HERE = Environment({"cpu": "one", "cores": 2, "torch": "2"}, {"load": 0.5})
OTHER = Environment({"cpu": "another", "cores": 8, "torch": "2"})

GRAPH = graph_of(("aten::relu", ["x"], "a"), ("aten::exp", ["a"], "b"), ("aten::tanh", ["b"], "c"))


def spec(place: int = 0, **others: object) -> Spec:
    return dataclasses.replace(Spec(block(GRAPH, place, place + 1), threads=2), **others)  # type: ignore[arg-type]


def timing(of: Spec, ns: float = 1000.5, environment: Environment = HERE, **others: object) -> Timing:
    figures = {
        "trimmed_ns": ns, "low_ns": ns - 1, "high_ns": ns + 1, "least_ns": ns - 2, "host_ns": ns, "samples": 42,
        "kernels": ("jit:avx512", "brg"), "canary_ratio": 1.01, "taken_ns": 7, "xsp": "0.1",
    }  # fmt: skip
    return dataclasses.replace(untimed(of, Status.OK, environment=environment.hash), **{**figures, **others})  # type: ignore[arg-type]


def edit(part: Path, change: str) -> None:
    """Change a stored part as somebody with SQL would."""
    beside = part.with_name("beside.parquet")
    duckdb.sql(f"COPY (SELECT * REPLACE ({change}) FROM '{part}') TO '{beside}' (FORMAT parquet)")
    beside.replace(part)


def the_part(folder: Path) -> Path:
    (found,) = folder.glob("environment=*/part-*.parquet")
    return found


# --- environments -------------------------------------------------------------------------------------


def test_an_environment_with_devices_says_that_calls_are_timed_on_the_processor_and_how_to_choose() -> None:
    pair = [{"name": "NVIDIA H200", "sms": 132}] * 2
    both = Environment({**HERE.properties, "devices": [*pair, {"name": "NVIDIA A100"}]})
    assert both.name == "one, 2 cores, 2 × NVIDIA H200, NVIDIA A100, torch 2"
    assert "timed on the processor (one, 2 cores), not on 2 × NVIDIA H200, NVIDIA A100" in both.processor_note
    assert "xsp bound MODEL --device NAME" in both.processor_note
    assert HERE.name == "one, 2 cores, torch 2"
    assert Environment({**HERE.properties, "devices": []}).processor_note == HERE.processor_note == ""


def test_the_page_of_timings_says_that_they_are_the_processors(tmp_path: Path) -> None:
    pairs = [(spec(), 1)]
    there = Environment({**HERE.properties, "devices": [{"name": "NVIDIA H200"}]})
    for environment, count in ((HERE, 0), (there, 1)):
        timings = Timings.open(tmp_path, environment)
        page = " ".join(terminal.page(text.fill_document("net", pairs, timings, [], 1.0)).split())
        assert page.count("timed on the processor (one, 2 cores), not on NVIDIA H200") == count
        assert bool(text.fill_as_json("net", pairs, timings, [], 1.0)["processor_note"]) == bool(count)


# --- specs --------------------------------------------------------------------------------------------


def test_a_spec_is_another_one_if_anything_is_that_its_time_depends_on() -> None:
    specs = [
        spec(), spec(1), spec(variant="channels-last"), spec(state=CacheState.WARM), spec(threads=1),
        spec(runtime="onnxruntime"),
    ]  # fmt: skip
    assert len({each.key for each in specs}) == len(specs)
    assert [Spec.from_plain(each.to_plain()) for each in specs] == specs


def test_a_timing_has_enough_to_time_its_spec_again() -> None:
    assert spec_of(timing(spec(1))) == spec(1)
    with pytest.raises(ValueError, match="does not match its calls"):
        spec_of(dataclasses.replace(timing(spec()), calls=timing(spec(1)).calls))


# --- what is kept -------------------------------------------------------------------------------------


def test_timings_come_back_as_they_were_and_holes_are_no_zeros(tmp_path: Path) -> None:
    kept = [
        timing(spec()),
        untimed(spec(1), Status.TOO_LARGE, "8 GiB", HERE.hash),
    ]
    Timings.open(tmp_path / "t", HERE).add(kept)
    found = Timings.open(tmp_path / "t", HERE)
    assert sorted(found, key=lambda each: each.op) == sorted(kept, key=lambda each: each.op)
    asked = found.of([spec(), spec(1), spec(2)])
    assert [each.status for each in asked.values()] == [Status.OK, Status.TOO_LARGE, Status.MISSING]
    assert [each.trimmed_ns for each in asked.values()] == [1000.5, None, None]
    assert [each.is_timed for each in asked.values()] == [True, False, False]
    assert found.problems == []


def test_what_is_missing_is_not_kept_and_nothing_makes_no_folder(tmp_path: Path) -> None:
    found = Timings.open(tmp_path / "t", HERE)
    found.add([untimed(spec())])
    assert not (tmp_path / "t").exists()
    assert list(found) == []


def test_a_later_timing_replaces_an_earlier_one_in_whatever_order_parts_are_read(tmp_path: Path) -> None:
    for ns, taken in ((3.0, 3), (1.0, 1), (2.0, 2)):
        Timings.open(tmp_path, HERE).add([timing(spec(), ns, taken_ns=taken)])
    assert [each.trimmed_ns for each in Timings.open(tmp_path, HERE)] == [3.0]


def test_parts_become_one_and_hold_the_same(tmp_path: Path) -> None:
    for place in range(3):
        Timings.open(tmp_path, HERE).add([timing(spec(place))])
    before = set(Timings.open(tmp_path, HERE))
    assert Timings.open(tmp_path, HERE).compact() == 3
    the_part(tmp_path)
    assert set(Timings.open(tmp_path, HERE)) == before


def test_parts_that_another_process_merges_while_they_are_read_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in range(3):
        Timings.open(tmp_path, HERE).add([timing(spec(place))])
    rows = Timings._rows
    merged: list[bool] = []

    def while_others_merge(self: Timings, part: Path) -> object:
        if not merged:
            merged.append(True)
            assert Timings.open(tmp_path, HERE).compact() == 3
        return rows(self, part)

    monkeypatch.setattr(Timings, "_rows", while_others_merge)
    found = Timings.open(tmp_path, HERE)
    assert len(found) == 3
    assert found.problems == []


def test_timings_of_another_environment_are_used_only_when_asked_for_and_say_so(tmp_path: Path) -> None:
    Timings.open(tmp_path, OTHER).add([timing(spec(), 5.0, OTHER)])
    Timings.open(tmp_path, HERE).add([timing(spec(1), 6.0)])
    here = Timings.open(tmp_path, HERE)
    assert here.of([spec()])[spec().key].status is Status.MISSING
    like = Timings.open(tmp_path, HERE, like=OTHER.hash[:6])
    assert {each.environment for each in like.of([spec(), spec(1)]).values()} == {HERE.hash, OTHER.hash}
    assert [each.op for each in like] == ["aten::exp"]
    with pytest.raises(BenchError, match="'zz' is not one environment; there are"):
        Timings.open(tmp_path, HERE, like="zz")
    with pytest.raises(BenchError, match="does not belong"):
        here.add([timing(spec(), 5.0, OTHER)])


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    ["1.0 AS trimmed_ns", "'ok ' AS status", "'[]' AS calls", "'aten::exp' AS op", "4 AS threads", "NULL AS seal"],
)
def test_a_timing_that_somebody_changed_is_a_hole_and_named(tmp_path: Path, change: str) -> None:
    Timings.open(tmp_path, HERE).add([timing(spec())])
    edit(the_part(tmp_path), change)
    found = Timings.open(tmp_path, HERE)
    assert found.of([spec()])[spec().key].status is Status.MISSING
    assert len(found.problems) == 1
    assert "part-" in found.problems[0]


def test_a_part_with_a_changed_row_stays_when_the_others_become_one(tmp_path: Path) -> None:
    Timings.open(tmp_path, HERE).add([timing(spec())])
    changed = the_part(tmp_path)
    edit(changed, "1.0 AS trimmed_ns")
    for place in (1, 2):
        Timings.open(tmp_path, HERE).add([timing(spec(place))])
    assert Timings.open(tmp_path, HERE).compact() == 3
    assert changed.exists()
    assert len(list(changed.parent.iterdir())) == 2


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet", None])
def test_a_part_that_is_damaged_is_named_and_the_others_are_read(tmp_path: Path, content: bytes | None) -> None:
    Timings.open(tmp_path, HERE).add([timing(spec())])
    damaged = the_part(tmp_path)
    Timings.open(tmp_path, HERE).add([timing(spec(1))])
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2] if content is None else content)
    found = Timings.open(tmp_path, HERE)
    assert [each.op for each in found] == ["aten::exp"]
    assert len(found.problems) == 1


def test_a_part_of_another_environment_that_was_put_here_is_left_out(tmp_path: Path) -> None:
    Timings.open(tmp_path, HERE).add([timing(spec(1))])
    Timings.open(tmp_path, OTHER).add([timing(spec(), environment=OTHER)])
    (part,) = (tmp_path / f"environment={OTHER.hash}").iterdir()
    part.rename(tmp_path / f"environment={HERE.hash}" / part.name)
    found = Timings.open(tmp_path, HERE)
    assert [each.key for each in found] == [spec(1).key]
    assert "it belongs to environment" in found.problems[0]


@pytest.mark.parametrize("harm", ["changed", "damaged", "absent"])
def test_an_environment_whose_description_was_changed_is_not_believed(tmp_path: Path, harm: str) -> None:
    found = Timings.open(tmp_path, HERE)
    found.add([timing(spec())])
    found.add([timing(spec(1))])
    described = tmp_path / "environments" / f"{HERE.hash}.json"
    assert list(found.environments()) == [HERE.hash]
    whole = described.read_text()
    described.unlink()
    if harm != "absent":
        described.write_text(whole.replace('"one"', '"two"') if harm == "changed" else whole[:20])
    assert found.environments() == {}
    again = Timings.open(tmp_path, HERE)
    assert list(again) == again.all_of(HERE.hash) == []
    assert ("was changed" if harm == "changed" else "cannot be read") in again.problems[0]
    assert again.compact() == 2
    assert len(list((tmp_path / f"environment={HERE.hash}").iterdir())) == 2
    again.add([timing(spec(2))])
    assert len(Timings.open(tmp_path, HERE)) == 3  # what is written next describes the environment anew


def test_a_file_in_place_of_the_folder_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x")
    with pytest.raises(BenchError, match="not a folder of timings"):
        Timings.open(tmp_path / "t", HERE)


# --- one file -----------------------------------------------------------------------------------------


def test_one_file_carries_all_timings_elsewhere(tmp_path: Path) -> None:
    Timings.open(tmp_path / "a", HERE).add([timing(spec()), timing(spec(1))])
    Timings.open(tmp_path / "a", OTHER).add([timing(spec(), 9.0, OTHER)])
    assert Timings.open(tmp_path / "a", HERE).export(tmp_path / "all.parquet") == 3
    there = Timings.open(tmp_path / "b", HERE)
    assert there.import_file(tmp_path / "all.parquet") == (3, 2)
    assert set(there) == set(Timings.open(tmp_path / "a", HERE))
    assert there.environments() == Timings.open(tmp_path / "a", HERE).environments()
    assert there.import_file(tmp_path / "all.parquet") == (0, 2)


def test_timings_of_a_file_with_two_descriptions_of_an_environment_count_once(tmp_path: Path) -> None:
    for name, load in (("a", 1), ("b", 2)):
        described = dataclasses.replace(HERE, circumstances={"load": load})
        Timings.open(tmp_path / name, described).add([timing(spec(load))])
        Timings.open(tmp_path / name, described).export(tmp_path / f"{name}.parquet")
    both = ", ".join(f"'{tmp_path / name}.parquet'" for name in ("a", "b"))
    duckdb.sql(f"FROM read_parquet([{both}])").write_parquet(str(tmp_path / "both.parquet"))
    there = Timings.open(tmp_path / "c", HERE)
    assert there.import_file(tmp_path / "both.parquet") == (2, 1)
    assert len(there._parts(HERE.hash)) == 1


def test_what_was_taken_later_stays(tmp_path: Path) -> None:
    Timings.open(tmp_path / "a", HERE).add([timing(spec(), 1.0, taken_ns=1)])
    Timings.open(tmp_path / "a", HERE).export(tmp_path / "old.parquet")
    there = Timings.open(tmp_path / "b", HERE)
    there.add([timing(spec(), 2.0, taken_ns=2)])
    assert there.import_file(tmp_path / "old.parquet") == (0, 1)
    assert [each.trimmed_ns for each in there] == [2.0]


def test_nothing_to_export_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no timings to export"):
        Timings.open(tmp_path / "a", HERE).export(tmp_path / "all.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_or_damaged_file_is_one_error_and_changes_nothing(tmp_path: Path) -> None:
    Timings.open(tmp_path / "a", HERE).add([timing(spec())])
    Timings.open(tmp_path / "a", HERE).export(tmp_path / "all.parquet")
    (tmp_path / "text").write_text("no timings")
    (tmp_path / "half").write_bytes((tmp_path / "all.parquet").read_bytes()[:500])
    duckdb.sql(f"COPY (SELECT 1 AS key) TO '{tmp_path / 'foreign'}' (FORMAT parquet)")
    shutil.copy(the_part(tmp_path / "a"), tmp_path / "part")
    there = Timings.open(tmp_path / "b", HERE)
    for name in ("text", "half", "foreign", "part", "absent"):
        with pytest.raises(BenchError, match="not a file of timings"):
            there.import_file(tmp_path / name)
    duckdb.sql(f"COPY (FROM '{tmp_path / 'all.parquet'}' LIMIT 0) TO '{tmp_path / 'empty'}' (FORMAT parquet)")
    with pytest.raises(BenchError, match="empty: it holds no timings"):
        there.import_file(tmp_path / "empty")
    edit(tmp_path / "all.parquet", "1.0 AS trimmed_ns")
    with pytest.raises(BenchError, match="none of its 1 timings is valid"):
        there.import_file(tmp_path / "all.parquet")
    assert not (tmp_path / "b").exists()


# --- hot and cold -------------------------------------------------------------------------------------


def test_specs_and_their_keys_need_neither_torch_nor_the_table_engine() -> None:
    code = "import sys, xsp.bench.spec, xsp.graph.blocks; print({'torch', 'duckdb', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_ratio_of_hundreds_is_no_percentage() -> None:
    assert slowdown_text(1.12) == "up to 12 % longer in its slowest round"
    assert slowdown_text(436.26) == "up to 436 times as long in its slowest round"
