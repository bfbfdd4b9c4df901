"""PyTorch's snapshots of memory, which are pickles and are never run, and its memory timelines."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

import xsp
from xsp.analyses import ANALYSES
from xsp.errors import TraceError
from xsp.store.trace import Trace

MIB = 1 << 20
BEGAN_US = 1_700_000_000_000_000


def change(action: str, at_us: int, mib: int, address: int = 0, *frames: tuple[str, str, int]) -> dict[str, Any]:
    named = [{"name": name, "filename": file, "line": line} for name, file, line in frames]
    return {"action": action, "addr": address, "size": mib * MIB, "stream": 0, "time_us": BEGAN_US + at_us,
            "frames": named}  # fmt: skip


def snapshot() -> dict[str, Any]:
    """Three of twenty MiB are taken at the end, one of them since before the recording."""
    frames = ("malloc", "??", 0), ("linear", "/opt/torch/nn/linear.py", 3), ("step", "/home/ann/train.py", 12)
    events = [
        change("segment_alloc", 0, 10, 100),
        change("alloc", 10, 2, 100, *frames),
        change("alloc", 20, 8, 200),
        change("free_requested", 30, 8, 200),
        change("free_completed", 31, 8, 200),
        change("snapshot", 40, 0),
    ]
    blocks = [{"size": 2 * MIB, "state": "active_allocated"}, {"size": MIB, "state": "active_allocated"},
              {"size": 17 * MIB, "state": "inactive"}]  # fmt: skip
    segments = [{"device": 1, "address": 100, "total_size": 20 * MIB, "blocks": blocks}]
    return {"segments": segments, "device_traces": [[], events], "allocator_settings": {"x": (1, None, 0.5)}}


def rows(trace: Trace) -> list[tuple[Any, ...]]:
    table = ANALYSES["memory-timeline"](trace).select("device, start_mib, peak_mib, end_mib, allocated_mib, basis")
    return table.fetchall()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_says_what_was_taken_before_at_the_peak_and_at_the_end(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(snapshot(), protocol))
    trace = xsp.load(str(path))
    assert rows(trace) == [(1, 1.0, 11.0, 3.0, 10.0, "totals of the allocator")]
    told = trace.sql("SELECT start_ns, attributes FROM spans WHERE kind = 'alloc' ORDER BY start_ns").fetchall()
    assert told[0][0] == (BEGAN_US + 10) * 1000
    assert json.loads(told[0][1]) == {
        "device_type": "1", "device": "1", "address": "100", "total_allocated_bytes": 3 * MIB,
        "total_reserved_bytes": 20 * MIB, "frame": "step (train.py:12)",
    }  # fmt: skip
    (source,) = trace.run["imported"]["sources"]
    assert source["skipped"] == {"events free_requested": 1, "events snapshot": 1}


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("place", ["alone", "inside"])
def test_a_pickle_that_would_run_something_is_refused_and_nothing_is_run(place: str, tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "memory.pickle"
    harmful: Any = Harmful(mark)
    path.write_bytes(pickle.dumps(harmful if place == "alone" else {**snapshot(), "device_traces": [[harmful]]}))
    with pytest.raises(TraceError, match="nothing in it was run: it names"):
        xsp.load(str(path))
    assert not mark.exists()


def test_values_that_are_enormous_when_written_out_are_not_written_out(tmp_path: Path) -> None:
    name: Any = []
    for _ in range(64):
        name = [name, name]
    found = snapshot()
    for each in found["device_traces"][1]:
        each["frames"] = [{"name": name, "filename": "a.py", "line": name}]
        each["addr"] = name
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(found))
    assert rows(xsp.load(str(path)))[0][2] == 11.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"weights": [1]}), "not a memory snapshot"),
        (pickle.dumps(snapshot())[:-40], "nothing in it was run"),
        (pickle.dumps({"device_traces": [[{"action": "alloc"}]], "segments": []}), "is not in PyTorch's form"),
        (pickle.dumps({"device_traces": [[], []], "segments": []}), "_record_memory_history"),
        (b"[[1, 2], [[3", "delimiter|Expecting"),
        (b"[[1, 2, 3]]", "is not in PyTorch's form"),
    ],
    ids=["another pickle", "cut off", "no sizes", "without a history", "cut JSON", "another array"],
)
def test_what_is_no_snapshot_is_one_clear_error(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said):
        xsp.load(str(path))


def test_a_memory_timeline_has_its_categories(tmp_path: Path) -> None:
    """Parameters, then a temporary, which becomes two of activations."""
    sizes = [
        [0, 5 * MIB, 0, 0, 0, 0, 0, 0, 0],
        [0, 5 * MIB, 0, 0, MIB, 0, 0, 0, 0],
        [0, 5 * MIB, 0, 0, 0, 2 * MIB, 0, 0, 0],
    ]
    path = tmp_path / "timeline.json.gz"
    path.write_bytes(gzip.compress(json.dumps([[100, 101, 103], sizes]).encode()))
    trace = xsp.load(str(path))
    found = trace.sql(
        "SELECT type, sum(alloc_bytes) FROM spans WHERE kind = 'alloc' GROUP BY ALL ORDER BY 1"
    ).fetchall()
    assert found == [("activation", 2 * MIB), ("parameter", 5 * MIB), ("temporary", 0)]
    assert [row[2:4] for row in rows(trace)] == [(7.0, 7.0)]


def test_a_timeline_whose_gzip_is_damaged_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json.gz"
    packed = bytearray(gzip.compress(json.dumps([[*range(60_000)], [[0] * 9]]).encode(), compresslevel=0))
    packed[150_000:250_000] = b"\xff" * 100_000
    path.write_bytes(packed)
    with pytest.raises(TraceError, match="damaged gzip"):
        xsp.load(str(path))


def test_a_raw_timeline_counts_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "timeline.raw.json"
    path.write_text(json.dumps([[-1, 0, 3 * MIB, 0], [10_000, 1, MIB, 4], [12_000, 3, -MIB, 4]]))
    assert [row[2:4] for row in rows(xsp.load(str(path)))] == [(4.0, 3.0)]


def test_changes_at_impossible_times_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "timeline.raw.json"
    path.write_text(json.dumps([[10_000, 1, MIB, 4], [2**62, 1, MIB, 4]]))
    (source,) = xsp.load(str(path)).run["imported"]["sources"]
    assert source["skipped"] == {"a time before the epoch or in the far future": 1}
