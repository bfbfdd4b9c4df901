"""Kernels of replayed graphs get the operators of the capture, or of a step that ran without graphs, if names agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from enginetraces import box

import xsp
from xsp.cli import main
from xsp.ingest import sources
from xsp.store.trace import Trace

Layer = tuple[str, str, str, Any]
"""Module, operator, kernel, shapes."""

MODEL: list[Layer] = [
    ("Linear_0", "aten::mm", "gemm_a", [[8, 16], [16, 32]]),
    ("ReLU_0", "aten::relu", "relu_k", [[8, 32]]),
    ("Linear_1", "aten::mm", "gemm_b", [[8, 32], [32, 4]]),
]


class Made:
    """The events of a made trace, in the order of time."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 1000.0
        self.correlation = 0

    def step(self, number: int) -> None:
        """Mark all that was added since the last step as a step."""
        begin = self.events[-1]["end"] if self.events and "end" in self.events[-1] else 1000.0
        mark = box("user_annotation", f"ProfilerStep#{number}", begin, self.now - begin) | {"end": self.now}
        self.events.append(mark)

    def eager(self, layers: Sequence[Layer] = MODEL, captured: bool = False, model: str = "Net_0") -> None:
        """Add a pass that launches its kernels one by one; one that is captured runs none, and names them."""
        begin = self.now
        if captured:
            self.events.append(box("cuda_runtime", "hipStreamBeginCapture", self.now - 5, 2))
        for module, operator, kernel, shapes in layers:
            self.correlation += 1
            at, link = self.now, {"correlation": self.correlation}
            types = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
            launch = {**link, "kernel": kernel} if captured else link
            self.events += [
                box("python_function", f"nn.Module: {module}", at, 50),
                box("cpu_op", operator, at + 5, 40, **types),
                box("cuda_runtime", "hipLaunchKernel", at + 10, 10, **launch),
            ]
            if not captured:
                self._work(kernel, at + 30, 20.0, **link)
            self.now += 100
        if captured:
            self.events.append(box("cuda_runtime", "hipStreamEndCapture", self.now, 2))
        self.events.append(box("python_function", f"nn.Module: {model}", begin - 2, self.now - begin + 1))
        self.now += 100

    def replay(self, kernels: Sequence[str], nodes: Sequence[int] = (), streams: Sequence[int] = ()) -> None:
        """Add the launch of a graph with these kernels, in an annotation."""
        self.correlation += 1
        self.events += [
            box("user_annotation", "run graph", self.now, 60),
            box("cuda_runtime", "cudaGraphLaunch", self.now + 5, 50, correlation=self.correlation),
        ]
        for place, kernel in enumerate(kernels):
            node = {"graph node id": nodes[place]} if nodes else {}
            stream = streams[place] if streams else 7
            self._work(kernel, self.now + 80 + 30 * place, 25.0, stream, correlation=self.correlation, **node)
        self.now += 100 + 30 * len(kernels)

    def _work(self, name: str, start: float, duration: float, stream: int = 7, **args: Any) -> None:
        place = {"pid": 0, "tid": stream}
        self.events.append(box("kernel", name, start, duration, device=0, stream=stream, **args) | place)

    def write(self, path: Path) -> Path:
        """Write the file."""
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events}))
        return path


KERNELS = [kernel for _, _, kernel, _ in MODEL]


def attributed(trace: Trace) -> list[tuple[Any, ...]]:
    """Return the kernels of replays with their operator, its shapes and module, the rule, and the grade."""
    return trace.sql(
        """
        SELECT k.name, op.name, op.input_shapes, layer.name, k.parent_rule, k.grade FROM spans k
        JOIN spans launch ON launch.name LIKE '%GraphLaunch' AND launch.correlation_id = k.correlation_id
        LEFT JOIN spans op ON op.span_id = k.parent_id AND op.kind = 'op'
        LEFT JOIN spans layer ON layer.span_id = k.layer_id AND layer.kind = 'module'
        WHERE k.kind = 'kernel' ORDER BY k.start_ns
        """
    ).fetchall()


OF_MODEL = [
    ("gemm_a", "aten::mm", "[[8,16],[16,32]]", "Linear_0", "order", "inferred"),
    ("relu_k", "aten::relu", "[[8,32]]", "ReLU_0", "order", "inferred"),
    ("gemm_b", "aten::mm", "[[8,32],[32,4]]", "Linear_1", "order", "inferred"),
]


def notes(trace: Trace) -> str:
    return " ".join(note.text for note in trace.run.notes)


def plain(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows with shapes without spaces."""
    return [tuple(value.replace(" ", "") if isinstance(value, str) else value for value in row) for row in rows]


def test_a_graph_that_is_launched_twice_has_the_operators_of_a_step_without_graphs(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    made.replay(KERNELS)
    made.replay(KERNELS)
    trace = xsp.load(made.write(tmp_path / "t.json"))
    assert plain(attributed(trace)) == OF_MODEL * 2
    assert "6 of 6 kernels and copies of replayed graphs have the operator at their place in a step" in notes(trace)
    assert trace.sql("SELECT count(*) FROM spans WHERE parent_rule = 'order' AND dur_ns = 0").fetchall() == [(2 * 7,)]
    products = trace.sql("SELECT DISTINCT flops FROM spans WHERE name = 'aten::mm' ORDER BY 1").fetchall()
    assert products == [(2 * 8 * 32 * 4,), (2 * 8 * 16 * 32,)]


def test_device_time_by_operator_includes_replays_and_nothing_is_counted_twice(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    made.replay(KERNELS)
    trace = xsp.load(made.write(tmp_path / "t.json"))
    rows = xsp.analyses.operators(trace).select("name, kernels, device_ms").fetchall()
    found: dict[str, list[float]] = {}
    for name, kernels, device_ms in rows:
        found.setdefault(name, []).append(device_ms)
        assert kernels
    assert {name: sum(times) for name, times in found.items()} == pytest.approx({"aten::mm": 0.09, "aten::relu": 0.045})


def test_a_replay_whose_kernels_are_others_is_refused(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    made.replay([*KERNELS[:2], "gemm_c"])
    trace = xsp.load(made.write(tmp_path / "t.json"))
    assert {(row[1], row[3], row[4]) for row in attributed(trace)} == {(None, None, "graph")}
    assert "of 1 replays of graphs 1 have no operators: 1 whose kernels" in notes(trace)
    names = [name for (name,) in xsp.analyses.operators(trace).select("name").fetchall()]
    assert "(no operator)" in names
    assert "run graph" not in names


def test_the_trace_of_the_capture_gives_the_operators_of_the_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, capture = Made(), Made()
    for _ in range(2):
        made.replay(KERNELS)
    capture.eager(captured=True)
    files = [str(made.write(tmp_path / "exec.json")), str(capture.write(tmp_path / "capture.json"))]
    assert main(["import", *files, "-o", str(tmp_path / "run")]) == 0
    assert "6 of 6 kernels and copies" in capsys.readouterr().err
    trace = xsp.load(tmp_path / "run")
    assert plain(attributed(trace)) == OF_MODEL * 2
    assert "with the captures of capture: 6 of 6 kernels" in notes(trace)
    assert "have no operators" not in notes(trace)
    assert plain(attributed(xsp.load(list(reversed(files))))) == OF_MODEL * 2


def test_a_capture_of_other_kernels_stays_a_run_of_its_own_and_a_note_says_why(tmp_path: Path) -> None:
    made, capture = Made(), Made()
    made.replay(["other_kernel"])
    capture.eager(captured=True)
    files = [str(made.write(tmp_path / "exec.json")), str(capture.write(tmp_path / "capture.json"))]
    runs = sources.import_into(tmp_path / "runs", files)
    assert len(runs) == 2
    said = " ".join(note.text for run in runs.values() for note in run.notes)
    assert "with the captures of capture: of 1 replays of graphs 1 have no operators" in said


def test_consecutive_graphs_of_a_step_are_consecutive_captures(tmp_path: Path) -> None:
    """Four layers with the same kernels are four graphs: the place in the step tells which is which."""
    made, capture = Made(), Made()
    layers = [[(f"Block_{number}", "aten::mm", "gemm", [[8, 8], [8, 8]])] for number in range(4)]
    for _ in range(2):
        for _ in layers:
            made.replay(["gemm"])
        made.step(_)
    for layer in layers:
        capture.eager(layer, captured=True)
    trace = xsp.load([made.write(tmp_path / "exec.json"), capture.write(tmp_path / "capture.json")])
    assert [row[3] for row in attributed(trace)] == ["Block_0", "Block_1", "Block_2", "Block_3"] * 2


def test_where_places_differ_in_shapes_and_modules_these_stay_unknown(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    made.eager([(f"Other{module}", operator, kernel, [[4, 4], [4, 4]]) for module, operator, kernel, _ in MODEL])
    made.replay(KERNELS)
    rows = attributed(xsp.load(made.write(tmp_path / "t.json")))
    assert [row[1:4] for row in rows] == [
        ("aten::mm", None, None),
        ("aten::relu", None, None),
        ("aten::mm", None, None),
    ]


def test_where_places_differ_in_an_operator_the_replay_is_refused(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    made.eager([("Linear_0", "aten::addmm", "gemm_a", [[8, 16]]), *MODEL[1:]])
    made.replay(KERNELS)
    trace = xsp.load(made.write(tmp_path / "t.json"))
    assert {row[4] for row in attributed(trace)} == {"graph"}
    assert "1 whose kernels run in places with different operators" in notes(trace)


def test_nodes_of_the_graph_give_the_order_where_streams_ran_beside_each_other(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    made.replay([KERNELS[1], KERNELS[0], KERNELS[2]], nodes=[12, 11, 13], streams=[8, 7, 7])
    rows = plain(attributed(xsp.load(made.write(tmp_path / "t.json"))))
    assert sorted(rows) == sorted(OF_MODEL)


def test_of_captures_of_several_sizes_the_smallest_that_holds_the_tokens_counts(tmp_path: Path) -> None:
    made, capture = Made(), Made()
    made.events.append(box("user_annotation", "execute_context_0(0)_generation_6(6)", 990, 300))
    made.replay(KERNELS)
    for size in (16, 8, 4):
        begin = capture.now
        capture.eager([(*layer[:3], [[size, 16]]) for layer in MODEL], captured=True)
        capture.events.append(box("user_annotation", f"capture_{size}_FULL", begin - 10, capture.now - begin))
    trace = xsp.load([made.write(tmp_path / "exec.json"), capture.write(tmp_path / "capture.json")])
    assert {row[2] for row in plain(attributed(trace))} == {"[[8,16]]"}


def test_a_module_that_launches_the_replay_stands_for_itself_in_the_capture(tmp_path: Path) -> None:
    made = Made()
    made.eager()
    begin = made.now
    made.replay(KERNELS)
    made.events.append(box("python_function", "nn.Module: Net_0", begin - 2, 80))
    trace = xsp.load(made.write(tmp_path / "t.json"))
    assert trace.sql("SELECT count(*) FROM spans WHERE name = 'Net_0'").fetchall() == [(2,)]
    [(outer,)] = trace.sql(
        "SELECT up.name FROM spans s JOIN spans up ON up.span_id = s.parent_id "
        "WHERE s.name = 'ReLU_0' AND s.parent_rule = 'order'"
    ).fetchall()
    assert outer == "Net_0"


def test_a_capture_that_records_one_more_call_than_the_graph_has_kernels_still_fits(tmp_path: Path) -> None:
    made, capture = Made(), Made()
    made.replay(KERNELS)
    capture.eager([*MODEL, ("Net_1", "aten::copy_", "copy_kernel", [[1]])], captured=True)
    capture.eager()
    capture.replay(["another kernel"])
    trace = xsp.load([made.write(tmp_path / "exec.json"), capture.write(tmp_path / "capture.json")])
    assert plain(attributed(trace)) == OF_MODEL


@pytest.mark.slow
def test_each_rank_has_the_capture_of_its_own_rank_and_a_trace_may_have_several_captures(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        made, capture, other = Made(), Made(), Made()
        made.replay(KERNELS)
        made.replay(["other_kernel"])
        capture.eager([(f"Rank{rank}_{module}", *rest) for module, *rest in MODEL], captured=True)
        other.eager([(f"Rank{rank}_Other", "aten::abs", "other_kernel", [[rank]])], captured=True)
        for name, each in (("exec", made), ("capture", capture), ("other", other)):
            path = each.write(tmp_path / f"{name}_{rank}.json")
            document = json.loads(path.read_text()) | {"distributedInfo": {"rank": rank, "world_size": 2}}
            path.write_text(json.dumps(document))
            files.append(path)
    trace = xsp.load(files)
    rows = trace.sql(
        "SELECT k.rank, layer.name FROM spans k JOIN spans layer ON layer.rank = k.rank AND layer.span_id = k.layer_id "
        "WHERE k.kind = 'kernel' AND k.parent_rule = 'order' ORDER BY k.rank, k.start_ns"
    ).fetchall()
    own = ["Linear_0", "ReLU_0", "Linear_1", "Other"]
    assert rows == [(rank, f"Rank{rank}_{name}") for rank in range(2) for name in own]


@pytest.mark.slow
def test_many_replays_of_captures_of_many_sizes_are_paired_in_a_moment(tmp_path: Path) -> None:
    made, capture = Made(), Made()
    for _ in range(300):
        for _ in range(8):
            made.replay(KERNELS)
    for size in range(40):
        for layer in range(8):
            capture.eager([(f"Block{layer}", *rest[:2], [[size]]) for _, *rest in MODEL], captured=True)
    trace = xsp.load([made.write(tmp_path / "exec.json"), capture.write(tmp_path / "capture.json")])
    rows = attributed(trace)
    assert len(rows) == 300 * 8 * 3
    assert {row[1] for row in rows} == {"aten::mm", "aten::relu"}
    assert {row[2] for row in rows} == {None}
