"""A model's time from its blocks: sums, holes, covers by overlapping blocks, other models' timings, cost."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsp import bench, sections, testing
from xsp.bench.spec import CacheState, Status, Timing, untimed
from xsp.bound import construct, curves, curvetext, recordedcalls
from xsp.cli import main
from xsp.errors import GraphError
from xsp.graph import keys
from xsp.graph.node import Call, Graph, KnownBy, Node, NodeKind, Phase, Role, Source, Tensor, Value

HOW = construct.Conditions(CacheState.WARM, threads=2)


def chain(layers: Sequence[int], name: str = "m:chain", phases: Mapping[int, Phase] | None = None) -> Graph:
    """A chain of calls that differ where the numbers do, with a view behind the first one."""
    values = [Value(0, 0, Role.INPUT, 4)]
    nodes = []
    for place, number in enumerate(layers):
        made = Tensor("float32", (number,))
        call = Call("aten::mul" if number % 2 else "aten::add", (("self", made),), (made,))
        values.append(Value(len(values), 0, Role.ACTIVATION, 4))
        phase = (phases or {}).get(place, Phase.FORWARD)
        at = len(values) - 1
        module = f"block{place // 2}.layer{place}"
        nodes.append(Node(call, keys.key(call), NodeKind.COMPUTE, module, phase, (at - 1,), (at,), (at,)))
        if place == 0:
            view = Call("aten::alias", (("self", made),), (made,))
            nodes.append(Node(view, keys.key(view), NodeKind.VIEW, module, phase, (at,), (at,), ()))
    return Graph(name, Source.CAPTURED, tuple(nodes), (), tuple(values), KnownBy.STORAGE, "operators of ATen")


def timed(
    *graphs: Graph, sizes: Sequence[int] = (1,), stride: int | None = None, less: float = 0.0
) -> dict[str, Timing]:
    """Timings of all blocks: a hundred nanoseconds a unit, and less for each call that has company."""
    found = {}
    for graph, size in itertools.product(graphs, sizes):
        for spec, _ in bench.specs(graph, granularity=size, stride=stride, state=CacheState.WARM, threads=2):
            numbers = [call.inputs[0].elements or 0 for call in spec.block.calls if call.op != "aten::alias"]
            ns = 100 * sum(numbers) - less * (len(numbers) - 1)
            found[spec.key] = replace(
                untimed(spec, Status.OK), trimmed_ns=ns, low_ns=ns - 3.0, high_ns=ns + 3.0, samples=9
            )
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16])
def test_the_sum_of_all_blocks_is_the_model_for_every_size(size: int) -> None:
    graph = chain([1, 2, 3, 1, 2])
    made = construct.construct(graph, timed(graph, sizes=[size]), size, conditions=HOW)
    assert made.ns == pytest.approx(900)
    assert len(made.windows) == math.ceil(5 / size)
    assert [(each.start, each.stop) for each in made.windows] == [
        (first, min(first + size, 5)) for first in range(0, 5, size)
    ]
    assert not made.is_lower_limit
    assert made.holes == ()


def test_equal_blocks_share_their_error_and_are_run_once() -> None:
    graph = chain([1, 2, 1, 2, 1, 2])
    made = construct.construct(graph, timed(graph), 1, conditions=HOW)
    assert made.unique == 2
    assert made.half_ns == pytest.approx(math.sqrt(9**2 + 9**2))
    assert made.once_ns == pytest.approx(300)
    pairs = construct.construct(graph, timed(graph, sizes=[2], less=10), 2, conditions=HOW)
    assert pairs.ns == pytest.approx(900 - 3 * 10)


def test_blocks_do_not_cross_phases() -> None:
    graph = chain([1, 2, 3], phases={2: Phase.BACKWARD})
    made = construct.construct(graph, timed(graph, sizes=[3]), 3, conditions=HOW)
    assert [(each.start, each.stop) for each in made.windows] == [(0, 2), (2, 3)]


def test_a_hole_makes_no_total_and_is_named_with_its_reason() -> None:
    graph = chain([1, 2, 3, 3])
    known = timed(graph)
    failed = next(each for each in known.values() if each.trimmed_ns == 300)
    known[failed.key] = replace(failed, status=Status.FAILED, trimmed_ns=None, reason="no such operator")
    made = construct.construct(graph, known, 1, conditions=HOW)
    assert made.ns is None
    assert made.half_ns is None
    assert made.once_ns is None
    assert made.coverage.nodes == 2
    (hole,) = made.holes
    assert (hole.op, hole.count, hole.status, hole.reason) == ("aten::mul", 2, Status.FAILED, "no such operator")
    least = construct.construct(graph, known, 1, conditions=HOW, partial=True)
    assert least.ns == pytest.approx(300)
    assert least.is_lower_limit


def test_a_total_with_a_small_hole_is_at_least_and_has_no_error() -> None:
    graph = chain([500, 501, 2])
    known = {key: each for key, each in timed(graph).items() if each.trimmed_ns != 200}
    long = replace(next(iter(known.values())), trimmed_ns=1e9)
    known[long.key] = long
    made = construct.construct(graph, known, 1, conditions=HOW, partial=True)
    assert made.is_lower_limit
    assert [each.error for each in curves.curve(graph, known, 1e9, [1], conditions=HOW)] == [None]


def test_other_variants_and_failed_figures_never_enter() -> None:
    graph = chain([1, 2])
    known = {key: replace(each, status=Status.DIFFERENT) for key, each in timed(graph).items()}
    assert construct.construct(graph, known, 1, conditions=HOW, partial=True).ns is None
    assert (
        construct.construct(
            graph, timed(graph), 1, conditions=construct.Conditions(CacheState.COLD, 2), partial=True
        ).ns
        is None
    )
    assert (
        construct.construct(
            graph, timed(graph), 1, conditions=construct.Conditions(CacheState.WARM, 1), partial=True
        ).ns
        is None
    )


def test_a_graph_without_calls_is_refused() -> None:
    with pytest.raises(GraphError, match="no computing calls"):
        construct.construct(chain([]), {}, 1, conditions=HOW)
    with pytest.raises(GraphError, match="any call"):
        construct.cover(chain([]), {}, 2, conditions=HOW)


def test_glue_is_a_line_of_its_own() -> None:
    graph = chain([1, 2, 3])
    assert construct.module_calls(graph) == 5
    made = construct.construct(graph, timed(graph), 1, conditions=HOW, glue_ns=35)
    assert made.ns == pytest.approx(600)
    assert made.glue_ns == pytest.approx(35)
    assert made.with_glue_ns == pytest.approx(635)
    (point,) = curves.curve(graph, timed(graph), 1270, [1], conditions=HOW, glue_ns=35)
    assert point.error == pytest.approx(-0.5)


def test_a_curve_has_a_point_for_each_size_and_an_error_where_all_is_known() -> None:
    graph = chain([1, 2, 3, 1, 2, 3])
    found = curves.curve(graph, timed(graph, sizes=[1, 2, 3], less=10), 1200, [1, 2, 3, 4], conditions=HOW)
    assert [each.construction.granularity for each in found] == [1, 2, 3, 4]
    assert [each.error for each in found[:3]] == pytest.approx([0.0, 1170 / 1200 - 1, 1160 / 1200 - 1])
    assert found[3].error is None


# --- covers -------------------------------------------------------------------------------------------------


def test_the_best_cover_takes_blocks_wherever_they_begin() -> None:
    graph = chain([1, 2, 3, 4, 5])
    known = timed(graph, sizes=[1, 2, 3], stride=1, less=10)
    found = construct.cover(graph, known, 3, conditions=HOW)
    assert found.ns == pytest.approx(1500 - 30)
    assert [each.start for each in found.blocks] == [0, *(each.stop for each in found.blocks[:-1])]
    assert found.blocks[-1].stop == 5
    assert found.median_ns >= found.ns
    assert 0 <= found.spread < 0.03
    assert construct.cover(graph, known, 1, conditions=HOW).spread == 0


def test_a_call_that_no_timed_block_covers_is_named() -> None:
    graph = chain([1, 2, 3])
    known = {key: each for key, each in timed(graph).items() if each.trimmed_ns != 200}
    with pytest.raises(GraphError, match=r"do not cover call 1 \(aten::add\)"):
        construct.cover(graph, known, 1, conditions=HOW)


@st.composite
def arcs(draw: st.DrawFn) -> tuple[int, dict[tuple[int, int], float]]:
    count = draw(st.integers(1, 7))
    ends = st.tuples(st.integers(0, count - 1), st.integers(1, count)).filter(lambda each: each[0] < each[1])
    return count, draw(st.dictionaries(ends, st.floats(0, 100), max_size=20))


def paths(count: int, found: Mapping[tuple[int, int], float], at: int = 0) -> list[float]:
    if at == count:
        return [0.0]
    return [length + rest for (start, end), length in found.items() if start == at for rest in paths(count, found, end)]


@given(arcs())
def test_the_shortest_path_is_the_least_of_all_and_draws_are_of_them(
    drawn: tuple[int, dict[tuple[int, int], float]],
) -> None:
    count, found = drawn
    every = paths(count, found)
    path = construct.shortest(count, found)
    lengths = construct.draws(count, found, number=20)
    if not every:
        assert path is None
        assert lengths == []
        return
    assert path is not None
    assert math.fsum(found[each] for each in path) == pytest.approx(min(every))
    assert [end for _, end in path[:-1]] == [start for start, _ in path[1:]]
    assert all(any(length == pytest.approx(each) for each in every) for length in lengths)


def test_paths_are_drawn_with_equal_probability() -> None:
    found = {(0, 1): 1.0, (1, 3): 1.0, (0, 2): 10.0, (2, 3): 10.0, (0, 3): 100.0}
    lengths = construct.draws(3, found, number=3000)
    assert sorted(set(lengths)) == [2.0, 20.0, 100.0]
    assert all(850 < lengths.count(each) < 1150 for each in (2.0, 20.0, 100.0))


# --- other models ---------------------------------------------------------------------------------------------


def test_a_model_is_constructed_from_timings_that_were_taken_for_others() -> None:
    own, others = chain([1, 2, 3], "m:own"), [chain([3, 1], "m:a"), chain([2, 9], "m:b")]
    known = timed(own, *others, sizes=[1, 2])
    there = construct.spec_keys(others, 1, conditions=HOW)
    assert construct.construct(own, known, 1, conditions=HOW, only=there).ns == pytest.approx(600)
    some = construct.construct(
        own, known, 1, conditions=HOW, only=construct.spec_keys(others[:1], 1, conditions=HOW), partial=True
    )
    assert some.ns == pytest.approx(400)
    assert [each.op for each in some.holes] == ["aten::add"]
    pairs = curves.curve(own, known, 600, [2], conditions=HOW, only={2: construct.spec_keys(others, 2, conditions=HOW)})
    assert pairs[0].construction.coverage.nodes == 0
    assert pairs[0].error is None


def test_the_cost_is_of_different_blocks_and_models_with_holes_take_no_part() -> None:
    graphs = [chain([1, 2, 1, 2], "m:a"), chain([2, 2, 2], "m:b"), chain([1, 9], "m:hole"), chain([1], "m:unmeasured")]
    found = curves.cost(graphs, timed(*graphs[:2]), {"m:a": 600, "m:b": 600, "m:hole": 5}, 1, conditions=HOW)
    assert found.models == 2
    assert (found.blocks, found.unique) == (7, 2)
    assert found.saved == pytest.approx(1200 / 300)
    assert found.excluded == {"m:hole": "1 of 2 blocks are not timed", "m:unmeasured": "its step was not measured"}
    assert curves.cost([], {}, {}, conditions=HOW).saved is None


def test_the_curve_is_shown_in_80_columns_as_json_and_as_a_section(capsys) -> None:
    graph = chain([1, 2, 3, 1, 2, 3])
    known = timed(graph, sizes=[1, 2], stride=1)
    points = curves.curve(graph, known, 1200, [1, 2, 3], conditions=HOW, glue_ns=60)
    best = construct.cover(graph, known, 2, conditions=HOW)
    found = curves.Curve(graph, 2, 1200, tuple(points), best)
    assert found.best is points[0]
    for each in (found, replace(found, cover="no reason", measured_ns=None)):
        shown = curvetext.page(each, "m:chain")
        assert max(map(len, shown.splitlines())) <= 80
        assert "next: xsp bound m:chain --curve --fill 5m" in shown
        sections.of(json.loads(json.dumps({"xsp_section": 1, **sections.plain(curvetext.section(each))})))
        json.dumps(curvetext.as_json(each), allow_nan=False)
    plain = curvetext.as_json(found)
    assert [each["error"] for each in plain["points"]] == [pytest.approx(0.05), pytest.approx(0.05), None]
    assert plain["points"][2]["holes"][0]["status"] == "missing"
    assert plain["cover"]["ns"] == pytest.approx(1200)


def test_the_command_has_a_line_for_each_size_and_names_what_is_missing(tmp_path: Path, capsys) -> None:
    chain([1, 2, 3]).save(tmp_path / "g.json")
    asked = ["bound", str(tmp_path / "g.json"), "--curve", "--timings", str(tmp_path / "timings")]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "No cover by timed blocks" in shown
    assert "missing" in shown
    assert main([*asked, "--format", "json", "--html", str(tmp_path / "c.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["granularity"] for each in found["points"]] == list(range(1, 17))
    assert all(each["ns"] is None for each in found["points"])
    assert "By size of the blocks" in (tmp_path / "c.html").read_text(encoding="utf-8")
    assert main([*asked, "--construct", "4"]) != 0
    assert "--curve uses blocks of all sizes" in capsys.readouterr().err


def test_a_run_of_a_device_is_not_held_against_timings_of_this_processor(shared: Path, tmp_path: Path) -> None:
    trace = shared / "traces" / "kineto_nvidia" / "tracelens_h100_qwen1.5-0.5b.json.gz"
    with pytest.raises(GraphError, match="no timings here"):
        curves.of(str(trace), timings=tmp_path / "timings")


def test_a_run_of_another_model_makes_no_error_of_a_curve(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(recordedcalls, "is_foreign", lambda trace: False)
    step = "step train 0-100\n  forward Net 1-90\n    op aten::conv2d 2-80 input_shapes=[[1,3,8,8]] dtype=float"
    trace = testing.trace_of(testing.spans(step))
    with pytest.raises(GraphError, match="is not a run of m:chain"):
        curves.of(chain([1, 2, 3]), trace=trace, timings=tmp_path / "timings")


def test_of_a_run_the_curve_is_a_section_of_its_report(small_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run, tmp_path / "run"))
    graph = chain([1, 2])
    found = curves.Curve(graph, 2, None, tuple(curves.curve(graph, timed(graph), None, [1], conditions=HOW)), "none")
    assert curvetext.write_section(found, tmp_path) is None
    assert curvetext.write_section(found, run) == run / "sections" / "blocks.json"
    assert list(sections.read(run).sections) == ["blocks"]
