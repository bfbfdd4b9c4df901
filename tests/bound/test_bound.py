"""The ladder of bounds: rungs, named differences, coverage, and what is joined with a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import exit_code
from hypothesis import given, settings
from hypothesis import strategies as st

import xsp
from xsp import testing, texts
from xsp.bench.environment import Environment
from xsp.bench.plan import overheads, specs
from xsp.bench.spec import Spec, Status, Timing, untimed
from xsp.bench.timings import Timings
from xsp.bound import ladder, planned, recordedcalls, section, text
from xsp.bound.ladder import Rung
from xsp.bound.totals import Figure, Total, coverage, half, total
from xsp.cli import main
from xsp.device import ceilings
from xsp.device.ceilings import Ceiling
from xsp.device.machine import cpu_model
from xsp.errors import BenchError, GraphError, UsageError
from xsp.graph import Graph
from xsp.graph.keys import key
from xsp.graph.node import Call, Edge, EdgeKind, KnownBy, Node, NodeKind, Phase, Role, Source, Tensor, Value
from xsp.sections import Branch, Chart, Text, Tree
from xsp.store.trace import Trace

HERE = Environment({"cpu": "a cpu", "cores": 2, "torch": "2"})
ELSEWHERE = Environment({"cpu": "another cpu", "cores": 2, "torch": "2"})
CPU = Ceiling("a cpu", {"fp32": 1e9, "fp64": 1e9}, {}, 1e9, "measured")
X = Tensor("float32", (10, 100))
W = Tensor("float32", (100, 100))


def node(op: str, module: str, reads: int, writes: int, *inputs: Tensor, kind: NodeKind = NodeKind.COMPUTE) -> Node:
    call = Call(f"aten::{op}", tuple((f"input{place}", each) for place, each in enumerate(inputs)), (X,))
    return Node(call, key(call), kind, module, Phase.FORWARD, (reads,) * len(inputs), (writes,), (writes,))


def chain() -> Graph:
    """Return a graph of four calls: linear, relu, a view, linear; the two products are equal."""
    nodes = (
        node("linear", "first", 0, 1, X, W),
        node("relu", "act", 1, 2, X),
        node("view", "", 2, 2, X, kind=NodeKind.VIEW),
        node("linear", "second", 2, 3, X, W),
    )
    values = tuple(Value(each, 0, Role.ACTIVATION, 4000) for each in range(4))
    edges = tuple(Edge(each, each + 1, EdgeKind.DATA) for each in range(3))
    return Graph("chain", Source.CAPTURED, nodes, edges, values, KnownBy.STORAGE, "calls", 10_000)


def timed(spec: Spec, ns: float, variant: str = "as-run", environment: Environment = HERE, **changed: object) -> Timing:
    taken = replace(spec, variant=variant)
    figures = {"trimmed_ns": ns, "low_ns": ns - 10, "high_ns": ns + 10, "samples": 9, "taken_ns": 1}
    known = {"status": Status.OK, "environment": environment.hash, **figures, **changed}
    return replace(untimed(taken), **known)  # type: ignore[arg-type]


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timings:
    """Timings of no call yet, and ceilings of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("xsp.processes.cores", lambda: 2)  # timings are made for two threads
    ceilings.store({cpu_model() or "cpu": CPU})
    return Timings.open(tmp_path / "timings", HERE)


Fill = Callable[..., Timings]


@pytest.fixture
def filled(known: Timings) -> Fill:
    """Return timings of the operators of a graph, by name."""

    def fill(graph: Graph, **by_op: float) -> Timings:
        wanted = [spec for spec, _ in specs(graph, threads=2)]
        known.add(timed(spec, by_op[short]) for spec in wanted if (short := spec.block.op[6:]) in by_op)
        return known

    return fill


# --- totals ---------------------------------------------------------------------------------------------


def test_equal_calls_share_the_error_of_their_timing() -> None:
    assert half([Figure(5, 3, "a"), Figure(5, 3, "a")]) == 6
    assert half([Figure(5, 3, "a"), Figure(5, 4, "b")]) == 5
    assert half([Figure(5, 3), Figure(5, 4), None]) == 5


def test_coverage_is_of_calls_and_of_expected_time() -> None:
    found = coverage([Figure(90), None, None], [True, True, False], [90.0, 10.0, None])
    assert (found.nodes, found.of_nodes, found.time) == (1, 2, 0.9)
    assert coverage([Figure(90), None], [True, True], [90.0, None]).time is None
    assert coverage([Figure(90)], [True], [90.0], unattributed_ns=90).time == 0.5


def test_below_95_percent_there_is_no_total_unless_it_is_asked_for() -> None:
    graph = chain()
    figures = [Figure(900.0), Figure(50.0), None, None]
    counted = [True, True, False, True]
    found = total(graph, figures, counted, [900.0, 50.0, None, 900.0], 2)
    assert (found.sequential, found.parallel, found.is_lower_limit) == (None, None, True)
    partial = total(graph, figures, counted, [900.0, 50.0, None, 900.0], 2, partial=True)
    assert (partial.sequential, partial.parallel, partial.is_lower_limit) == (950, 950, True)
    assert total(graph, figures, counted, [900.0, 50.0, None, 5.0], 2).sequential == 950


def test_where_the_order_alone_is_known_nothing_is_said_of_parallel_runs() -> None:
    graph = replace(chain(), known_by=KnownBy.ORDER)
    found = total(graph, [Figure(1.0)] * 4, [True] * 4, [None] * 4, 2)
    assert (found.sequential, found.parallel, found.machine, found.schedule) == (4, None, None, None)


# --- ladder ---------------------------------------------------------------------------------------------

SOME = st.lists(st.none() | st.integers(0, 1000), min_size=4, max_size=4)


@pytest.mark.slow
@given(SOME, SOME, SOME, st.integers(0, 9000))
@settings(max_examples=200)
def test_the_differences_add_up_exactly_whatever_is_missing(low: list, middle: list, high: list, step: int) -> None:
    counted = [True, True, False, True]
    graph = chain()
    rungs = (Rung.CEILING, Rung.BEST, Rung.AS_RUN)
    figures = {
        rung.value: [None if each is None else Figure(float(each)) for each in those]
        for rung, those in zip(rungs, (low, middle, high), strict=True)
    }
    of = {name: total(graph, those, counted, [None] * 4, 2, partial=True) for name, those in figures.items()}
    of["measured"] = Total(coverage([Figure(step)], [True], [1.0]), float(step), 1.0)
    order = [each for each in (*rungs, Rung.MEASURED) if of[each.value].sequential is not None]
    found = ladder.differences(order, of, figures, counted)
    first, last = of[order[0].value].sequential, of[order[-1].value].sequential
    assert first is not None
    assert sum(each.ns for each in found) == (last or 0.0) - first


def test_a_graph_without_timings_has_a_ceiling_and_says_what_is_missing(known: Timings) -> None:
    found = xsp.bound.of(chain(), timings=known)
    # 200,000 FLOPs at 1 GFLOP/s; 8,000 bytes at 1 GB/s
    assert [each and each.ns for each in found.figures["ceiling"]] == [200_000, 8_000, 0, 200_000]
    assert found.rungs["ceiling"].sequential == found.rungs["ceiling"].parallel == 408_000
    assert found.rungs["best"].sequential is None
    assert found.absent["as_run"] == "no call is timed"
    assert (found.rungs["as_run"].coverage.nodes, found.rungs["as_run"].coverage.of_nodes) == (0, 3)
    assert "--fill 60s" in text.page(found, "chain.json")


def test_the_ceiling_of_many_tiny_calls_is_not_nothing(known: Timings) -> None:
    tiny = replace(chain(), nodes=tuple(node("relu", "", 0, 1, X) for _ in range(4)), edges=())
    ceilings.store({cpu_model() or "cpu": Ceiling("a cpu", {"fp32": 1e15, "fp64": 1e15}, {}, 2e13, "measured")})
    total = xsp.bound.of(tiny, timings=known).rungs["ceiling"].sequential
    assert total == pytest.approx(4 * 8000 / 2e13 * 1e9, rel=1e-2)  # 0.4 ns a call
    assert texts.ns_text(0.33) == "0.33 ns"
    assert [texts.ns_text(each) for each in (0.0, 1.0, 12.4)] == ["0 ns", "1 ns", "12 ns"]


def test_rungs_differences_and_interval_of_a_timed_graph(filled: Fill) -> None:
    graph = chain()
    known = filled(graph, linear=250_000.0, relu=10_000.0)
    wanted = [spec for spec, _ in specs(graph, threads=2)]
    known.add(timed(each, 220_000.0, "channels-last") for each in wanted if each.block.op == "aten::linear")
    found = xsp.bound.of(graph, timings=known, threads=2)
    assert found.rungs["best"].sequential == 450_000
    assert found.rungs["as_run"].sequential == 510_000
    assert found.rungs["as_run"].half_ns == pytest.approx((20**2 + 10**2) ** 0.5)
    assert [(each.name, each.ns) for each in found.differences] == [
        ("intermediate results", 8_000), ("kernel efficiency", 42_000), ("choice of algorithm", 60_000)
    ]  # fmt: skip
    assert found.coverage.is_complete
    assert found.layers[0].name in ("first", "second")
    assert dict(found.layers[0].differences) == {"kernel efficiency": 20_000, "choice of algorithm": 30_000}
    page = text.page(found, "chain.json")
    assert max(map(len, page.splitlines())) <= 79
    assert "kernel efficiency" in page


def test_a_bound_of_a_model_beside_a_device_says_that_it_is_the_processors(known: Timings, tmp_path: Path) -> None:
    device = {"name": "NVIDIA H200"}
    beside = Timings.open(tmp_path / "beside", Environment({**HERE.properties, "devices": [device]}))
    for timings, count in ((known, 0), (beside, 1)):
        found = xsp.bound.of(chain(), timings=timings, threads=2)
        page = text.page(found, "chain.json")
        assert " ".join(page.split()).count("on the processor (a cpu, 2 cores), not on NVIDIA H200") == count
        assert max(map(len, page.partition("fused ceiling")[0].splitlines())) <= 79
        assert ("processor_note" in text.as_json(found)["settings"]) is bool(count)


def test_a_hole_is_named_with_its_reason_and_no_total_is_given(filled: Fill) -> None:
    graph = chain()
    known = filled(graph, relu=10_000.0)
    (spec,) = [spec for spec, _ in specs(graph, threads=2) if spec.block.op == "aten::linear"]
    known.add([replace(untimed(spec, Status.TOO_LARGE, "4 GiB"), environment=HERE.hash, taken_ns=1)])
    found = xsp.bound.of(graph, timings=known, threads=2)
    assert found.rungs["as_run"].sequential is None
    assert [(each.op, each.reason, each.calls) for each in found.holes] == [("aten::linear", "too-large: 4 GiB", 2)]
    assert found.coverage.time is not None
    assert found.coverage.time < 0.1
    partial = xsp.bound.of(graph, timings=known, threads=2, partial=True)
    assert (partial.rungs["as_run"].sequential, partial.rungs["as_run"].is_lower_limit) == (10_000, True)
    assert "(at least)" in text.page(partial, "chain.json", partial=True)
    assert sum(each.ns for each in partial.differences) == 10_000 - 400_000


def test_a_call_below_its_ceiling_is_counted(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=100.0, relu=10_000.0), threads=2)
    assert found.below_ceiling == 2


def test_a_ceiling_above_what_was_timed_is_neither_drawn_nor_subtracted(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=100.0, relu=10_000.0), threads=2)
    assert found.rungs["ceiling"].sequential is None
    assert "not valid" in found.absent["ceiling"]
    assert not {Rung.FUSED, Rung.CEILING} & {*found.ladder}
    assert not any(Rung.CEILING in (each.below, each.above) for each in found.differences)
    assert all(layer.ns.get(Rung.CEILING) is None for layer in found.layers)
    assert "not valid" in " ".join(text.page(found, "chain.json").split())


def test_ceilings_that_are_not_valid_are_measured_again_where_time_may_be_spent(
    filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    higher = Ceiling(cpu_model() or "cpu", {"fp32": 1e13}, {}, 1e12, "measured: again")
    monkeypatch.setattr(ceilings, "measured", lambda device: higher)
    monkeypatch.setattr("xsp.bound.sources._fill", lambda *_: [])
    known = filled(chain(), linear=100_000.0, relu=10_000.0)
    assert xsp.bound.of(chain(), timings=known, threads=2).rungs["ceiling"].sequential is None
    found = xsp.bound.of(chain(), timings=known, threads=2, fill=1)
    assert found.rungs["ceiling"].sequential == pytest.approx(2 * 48 + 8, rel=0.01)  # ns, by bytes
    assert "ceiling" not in found.absent
    assert xsp.bound.of(chain(), timings=known, threads=2).rungs["ceiling"].sequential is not None


def test_a_layer_that_is_faster_than_its_ceiling_has_none() -> None:
    times = {Rung.CEILING: [Figure(200.0), Figure(1.0)], Rung.BEST: [Figure(100.0), Figure(150.0)]}
    figures = {rung.value: tuple(known) for rung, known in times.items()}
    one, other = (ladder._layer("a", [number], list(times), figures) for number in (0, 1))
    assert one.ns[Rung.CEILING] is None
    assert not one.differences
    assert other.ns[Rung.CEILING] == 1
    assert other.differences == (("kernel efficiency", 149.0),)


def test_page_faults_are_a_difference_of_their_own_within_what_is_left() -> None:
    def parts(step_ns: float, fault_ns: float) -> dict[str, float]:
        rungs = {"with_framework": Total(coverage([Figure(1)], [True], [1.0]), 1000.0, 1.0),
                 "measured": Total(coverage([Figure(1)], [True], [1.0]), step_ns, 1.0)}  # fmt: skip
        order = (Rung.FRAMEWORK, Rung.MEASURED)
        return {each.name: each.ns for each in ladder.differences(order, rungs, {}, [], 0.0, Figure(fault_ns, 50.0))}

    assert parts(3000.0, 800.0) == {"page faults": 800.0, "waiting and interference": 1200.0}
    assert parts(1500.0, 800.0) == {"page faults": 500.0, "waiting and interference": 0.0}
    assert parts(900.0, 800.0) == {"waiting and interference": -100.0}


def test_what_a_bound_says_is_about_single_calls(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=500_000.0, relu=20_000.0), threads=2)
    assert found.scope == "call by call, with PyTorch's own kernels"
    assert f"{found.scope}; fused calls at least 400 µs" in text.page(found, "chain.json")
    assert text.as_json(found)["scope"] == found.scope


def test_another_variant_never_raises_best_and_a_different_one_never_counts(filled: Fill) -> None:
    graph = chain()
    known = filled(graph, linear=250_000.0, relu=10_000.0)
    (spec,) = [spec for spec, _ in specs(graph, threads=2) if spec.block.op == "aten::linear"]
    known.add([timed(spec, 900_000.0, "onednn-off")])
    assert xsp.bound.of(graph, timings=known, threads=2).rungs["best"].sequential == 510_000
    known.add([timed(spec, 1.0, "half", status=Status.DIFFERENT)])
    assert xsp.bound.of(graph, timings=known, threads=2).rungs["best"].sequential == 510_000


def test_timings_of_another_environment_count_only_if_asked_for_and_it_is_said(tmp_path: Path, known: Timings) -> None:
    graph = chain()
    theirs = Timings.open(known.folder, ELSEWHERE)
    theirs.add(timed(spec, 300_000.0, environment=ELSEWHERE) for spec, _ in specs(graph, threads=2))
    assert xsp.bound.of(graph, timings=known, threads=2).rungs["as_run"].sequential is None
    borrowed = Timings.open(known.folder, HERE, like=ELSEWHERE.hash[:6])
    found = xsp.bound.of(graph, timings=borrowed, threads=2)
    assert found.rungs["as_run"].sequential == found.rungs["best"].sequential == 900_000
    assert found.settings["borrowed"] == 2
    assert any(ELSEWHERE.hash in each for each in found.problems)
    with pytest.raises(BenchError, match="xsp bench --list"):
        Timings.open(known.folder, HERE, like="beef")


def test_timings_of_another_environment_fill_gaps_and_replace_none(known: Timings) -> None:
    graph = chain()
    wanted = [spec for spec, _ in specs(graph, threads=2)]
    theirs = Timings.open(known.folder, ELSEWHERE)
    theirs.add(timed(spec, 100_000.0, environment=ELSEWHERE) for spec in wanted)
    known.add(timed(spec, 300_000.0) for spec in wanted if spec.block.op == "aten::linear")
    borrowed = Timings.open(known.folder, HERE, like=ELSEWHERE.hash)
    found = xsp.bound.of(graph, timings=borrowed, threads=2)
    assert found.rungs["best"].sequential == found.rungs["as_run"].sequential == 700_000
    assert found.settings["borrowed"] == 1


def test_blocks_are_a_rung_of_their_own(filled: Fill) -> None:
    graph = chain()
    known = filled(graph, linear=250_000.0, relu=10_000.0)
    assert "blocks" in xsp.bound.of(graph, timings=known, threads=2, granularity=2).absent
    known.add(timed(spec, 240_000.0) for spec, _ in specs(graph, granularity=2, threads=2))
    found = xsp.bound.of(graph, timings=known, threads=2, granularity=2)
    assert found.rungs["blocks"].sequential == 480_000
    assert ("neighbours", -10_000) in [(each.name, each.ns) for each in found.differences]


def test_calls_of_modules_and_views_are_a_rung_where_empty_ones_were_timed(filled: Fill) -> None:
    graph = chain()
    known = filled(graph, linear=250_000.0, relu=10_000.0)
    module, view = overheads(2)
    known.add([timed(module, 5_000.0, module.variant), timed(view, 1_000.0, view.variant)])
    found = xsp.bound.of(graph, timings=known, threads=2)
    assert found.rungs["with_framework"].sequential == 510_000 + 4 * 5_000 + 1_000  # three modules and the outermost
    assert found.differences[-1].name == "framework"


@pytest.mark.slow
def test_what_is_missing_is_timed_and_a_bound_of_it_is_whole(known: Timings, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    own = Timings.open(tmp_path / "own")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    found = xsp.bound.of(model, torch.zeros(8, 64), timings=own, fill=60)
    assert found.coverage.is_complete
    best, as_run = found.rungs["best"].sequential, found.rungs["as_run"].sequential
    assert best is not None
    assert as_run is not None
    assert 0 < best <= as_run
    assert found.rungs["with_framework"].sequential is not None


def test_the_json_has_the_documented_keys_and_no_figure_that_is_not_one(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=250_000.0), threads=2, partial=True)
    plain = json.loads(json.dumps(text.as_json(found), allow_nan=False))
    page = (Path(__file__).parents[2] / "docs" / "use" / "bound.md").read_text(encoding="utf-8")
    keys = [*plain, *plain["rungs"]["best"], *plain["rungs"]]
    assert [each for each in keys if f"`{each}`" not in page] == []
    assert plain["rungs"]["measured"]["sequential_ns"] is None


def test_a_bound_becomes_a_section_of_run_directories_alone(filled: Fill, tmp_path: Path) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=250_000.0, relu=9_000.0), threads=2)
    assert section.write_section(found, tmp_path / "no run") is None
    assert section.write_section(found, tmp_path) is None
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    assert section.write_section(found, tmp_path) == tmp_path / "sections" / "bound.json"


def leaves(branch: Branch) -> list[Branch]:
    return [each for inner in branch.inside for each in leaves(inner)] if branch.inside else [branch]


def test_the_section_says_which_figures_are_doubtful(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=250_000.0, relu=10_000.0), threads=2)
    parts = section.section(replace(found, problems=("ceiling: it is above the best",))).parts
    assert Text("ceiling: it is above the best") in parts


def test_the_section_has_the_ladder_the_waterfall_and_the_calls_with_their_longest_path(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=250_000.0, relu=10_000.0), threads=2)
    parts = section.section(found).parts
    charts = {each.title: each for each in parts if isinstance(each, Chart)}
    assert charts["Ladder"].at == ("fused ceiling", "ceiling", "best", "as run")
    waterfall = charts["Waterfall by layer"]
    assert [each.name for each in waterfall.series] == ["ceiling", "kernel efficiency", "choice of algorithm"]
    ends = {name: sum(each.values[place] or 0.0 for each in waterfall.series)
            for place, name in enumerate(waterfall.at)}  # fmt: skip
    assert ends == pytest.approx({"first": 0.25, "act": 0.01, "second": 0.25})
    (tree,) = [each for each in parts if isinstance(each, Tree)]
    assert tree.columns == ("inputs", "ceiling_ms", "best_ms", "as run_ms")
    (whole,) = tree.branches
    assert whole.cells == ("4 calls", 0.408, 0.51, 0.51)
    of = {each.name: each for each in leaves(whole)}
    assert {name: each.marked for name, each in of.items()} == {
        "aten::linear": True, "aten::relu": True, "aten::view": False
    }  # fmt: skip
    assert of["aten::relu"].cells == ("10×100", 0.008, 0.01, 0.01)
    assert of["aten::view"].cells == ("10×100", None, None, None)
    assert "longest path" in tree.mark
    said = " ".join(each.text for each in parts if isinstance(each, Text))
    assert "has 3 of 3 calls, and takes 0.51 ms of 0.51 ms by the times of the estimate best" in said


def test_lower_limits_and_layers_without_a_bar_are_said_to_be_such(filled: Fill) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), relu=10_000.0), threads=2, partial=True)
    parts = section.section(found).parts
    charts = {each.title: each for each in parts if isinstance(each, Chart)}
    assert charts["Ladder"].at == ("fused ceiling", "ceiling", "best (at least)", "as run (at least)")
    assert charts["Waterfall by layer"].at == ("act",)
    assert any("2 of 3 layers have no bar" in each.text for each in parts if isinstance(each, Text))


def test_a_bar_of_the_waterfall_ends_at_the_highest_rung_whatever_is_missing_below_it() -> None:
    apart = (("choice of algorithm", 1e6), ("kernel efficiency", 5e5))
    known = {Rung.CEILING: None, Rung.BEST: 2e6, Rung.AS_RUN: 3e6}
    assert section._steps(ladder.LadderLayer("a", (0,), known, apart)) == [("best", 2e6), ("choice of algorithm", 1e6)]
    known = {Rung.CEILING: 1e6, Rung.BEST: None, Rung.AS_RUN: None, Rung.IN_PLACE: 4e6}
    assert section._steps(ladder.LadderLayer("a", (0,), known, apart)) == [("ceiling", 1e6), ("kernel efficiency", 3e6)]
    assert section._steps(ladder.LadderLayer("a", (0,), dict.fromkeys(known), apart)) == []


def test_of_ten_thousand_layers_the_largest_are_shown_and_the_others_counted(
    filled: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = xsp.bound.of(chain(), timings=filled(chain(), linear=250_000.0, relu=10_000.0), threads=2)
    many = tuple(
        ladder.LadderLayer(f"layer{number}", (0,), {Rung.CEILING: 1e6, Rung.BEST: 2e6}, (("kernel efficiency", 1e6),))
        for number in range(10_000)
    )
    monkeypatch.setattr(section, "MOST_CALLS", 3)
    parts = section.section(replace(found, layers=many)).parts
    charts = {each.title: each for each in parts if isinstance(each, Chart)}
    assert len(charts["Waterfall by layer"].at) == section.MOST_LAYERS
    said = " ".join(each.text for each in parts if isinstance(each, Text))
    assert "40 of 10,000 layers" in said
    assert "Its 4 calls are not shown singly" in said
    assert not any(isinstance(each, Tree) for each in parts)


def test_nothing_to_bound_and_no_time_to_fill_are_refused(known: Timings) -> None:
    with pytest.raises(GraphError, match="no bound"):
        xsp.bound.of(replace(chain(), nodes=(), edges=()), timings=known)
    with pytest.raises(UsageError, match="above 0"):
        xsp.bound.of(chain(), timings=known, fill=0)


# --- traces ---------------------------------------------------------------------------------------------


def test_a_run_of_a_graph_is_joined_call_by_call(small_run: Path, known: Timings) -> None:
    trace = xsp.load(small_run)
    found = xsp.bound.of(trace, timings=known)
    assert found.rungs["measured"].sequential
    assert found.rungs["in_place"].sequential
    assert sum(each.ns for each in found.differences) == (
        found.rungs["measured"].sequential - found.rungs[found.ladder[0].value].sequential
    )


def test_a_run_of_something_else_is_refused(small_run: Path, known: Timings) -> None:
    torch = pytest.importorskip("torch")
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Sigmoid(), torch.nn.MaxPool2d(2))
    with pytest.raises(GraphError, match="is not a run of"):
        xsp.bound.of(other, torch.zeros(1, 3, 8, 8), trace=small_run, timings=known)


def run_of(calls: list[tuple[str, str, list[int]]]) -> Trace:
    """Return a trace of a step: operators with their module and the shape of their first input, 90 µs each."""
    lines = [f"step train 0-{len(calls)}50", f"  forward Net 1-{len(calls)}40", f"    module Net 2-{len(calls)}30"]
    for place, (op, module, shape) in enumerate(calls):
        begin = place * 100 + 3
        shapes = json.dumps([shape]).replace(" ", "")
        lines.append(f"      module {module} {begin}-{begin + 95}")
        lines.append(f"        op aten::{op} {begin + 1}-{begin + 91} input_shapes={shapes} dtype=float")
    return testing.trace_of(testing.spans("\n".join(lines)))


SEEN = [("linear", "first", [10, 100]), ("relu", "act", [10, 100]), ("linear", "second", [10, 100])]


@pytest.mark.parametrize(("peak", "is_valid"), [(1.16e9, True), (1.1e9, False)])
def test_a_compiled_run_may_be_faster_than_single_calls_and_not_than_fused_ones(
    peak: float, is_valid: bool, known: Timings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordedcalls, "is_compiled", lambda trace: True)
    monkeypatch.setattr("xsp.bound.sources._ceiling", lambda *_: replace(CPU, vector={"fp32": peak}))
    run = run_of([("sigmoid", "compiled", [10, 100])] * 3)  # a step of 350 µs; single calls take 353 or 372
    found = xsp.bound.of(chain(), trace=run, timings=known)
    assert found.rungs["ceiling"].sequential is None
    said = "the calls of this run are fused" if is_valid else "not valid"
    assert said in found.absent["ceiling"]
    assert ("fused_ceiling" in found.absent) != is_valid
    if is_valid:
        assert [each.name for each in found.differences] == ["kernel efficiency and waiting"]


def test_calls_are_paired_by_place_and_by_order_and_the_rest_is_counted(known: Timings) -> None:
    found = xsp.bound.of(chain(), trace=run_of(SEEN), timings=known)
    assert found.join is not None
    assert found.join.rules == {"place": 3, "name": 0, "type": 0}
    assert [each and each.ns for each in found.figures["in_place"]] == [90_000, 90_000, None, 90_000]
    moved = [("linear", "first", [10, 100]), ("sigmoid", "act", [10, 100]), ("linear", "other", [10, 100])]
    found = xsp.bound.of(chain(), trace=run_of(moved), timings=known)
    assert found.join is not None
    assert found.join.rules == {"place": 1, "name": 1, "type": 0}
    assert found.join.unmatched_nodes == (1,)
    assert [found.join.calls[each].op for each in found.join.unmatched_calls] == ["aten::sigmoid"]


def test_a_run_with_another_batch_is_refused(known: Timings) -> None:
    with pytest.raises(GraphError, match="other shapes: 3 of 3 calls"):
        xsp.bound.of(chain(), trace=run_of([(op, module, [20, 100]) for op, module, _ in SEEN]), timings=known)


def test_a_run_whose_model_has_other_calls_here_is_bound_by_its_own_calls(
    known: Timings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of([(op, module, [20, 100]) for op, module, _ in SEEN])
    monkeypatch.setattr(planned, "_model_graph", lambda trace: chain())
    found = xsp.bound.of(run, timings=known)
    assert found.graph.source is Source.SPANS
    assert "that of its model does not match" in found.problems[0]
    assert found.join is None
    with pytest.raises(GraphError, match="other shapes"):
        xsp.bound.of(chain(), trace=run, timings=known)


def test_a_saved_graph_of_one_run_is_paired_with_the_calls_of_another(known: Timings) -> None:
    graph = xsp.graph.of(run_of(SEEN))
    longer = run_of([*SEEN, ("relu", "last", [10, 100])])
    found = xsp.bound.of(graph, trace=longer, timings=known)
    assert found.join is not None
    assert found.join.rules == {"place": 3, "name": 0, "type": 0}
    assert [found.join.calls[each].module for each in found.join.unmatched_calls] == ["last"]
    assert xsp.bound.of(graph, trace=run_of(SEEN), timings=known).join is None


def test_a_run_is_not_compared_with_another_run(known: Timings) -> None:
    run = run_of(SEEN)
    with pytest.raises(UsageError, match="is itself a run"):
        xsp.bound.of(run, trace=run_of(SEEN), timings=known)
    assert xsp.bound.of(run, trace=run, timings=known).rungs["in_place"].sequential


def test_options_of_a_run_may_be_abbreviated() -> None:
    command = ["xsp", "profile", "micro:path-3", "--seq", "64", "--tr", "--in=3x4x5"]
    trace = testing.trace_of(testing.spans("step s 0-10"), {"command": command, "batch_size": 2})
    settings = {"train": True, "batch": 2, "sequence": 64, "shape": (3, 4, 5)}
    assert planned._model_of(trace) == ("micro:path-3", settings)


def test_the_measured_step_has_the_batch_of_the_merged_one() -> None:
    rows = [
        row
        for step, (end, batch) in enumerate([(9_000, 3), *[(20_000, 4)] * 5])
        for row in testing.spans(f"step s 0-{end} batch_size={batch}", step=step)
    ]
    found = recordedcalls.step_time(testing.trace_of(rows))
    assert found is not None
    assert found.ns == pytest.approx(20e6)


def test_timings_of_this_processor_are_not_taken_for_another_device(known: Timings) -> None:
    with pytest.raises(UsageError, match="omit --fill and --construct"):
        xsp.bound.of(chain(), timings=known, device="H100", fill=1)
    found = xsp.bound.of(run_of(SEEN), timings=known, granularity=2)
    assert any("--fill, --construct and --like have no effect" in each for each in found.problems)


def with_shapes(shared: Path) -> list[tuple[Path, bool]]:
    found = {
        "kineto_nvidia/tracelens_h100_owlv2": True, "kineto_nvidia/tracelens_h100_qwen1.5-0.5b": True,
        "kineto_nvidia/kineto_sample_resnet50_workers0_1623143089861": True,
        "kineto_nvidia/kineto_sample_resnet50_workers4_1623212756351": True,
        "kineto_amd/tracelens_mi300x_resnet_ddp_rank0of8": True,
        "kineto_amd/tracelens_mi300x_torch_compile_triton": True,
        "multi_rank/hta_sampled_rank-0": True, "multi_rank/hta_sampled_rank-1": True,
        "kineto_nvidia/hta_a100_alexnet_critical_path": False,
        "kineto_nvidia/hta_a100_nccl_metadata_rank0of2": False,
        "et_pair/hta_simple_add_kineto": False,
    }  # fmt: skip
    return [(shared / "traces" / f"{name}.json.gz", has) for name, has in found.items()]


@pytest.mark.slow
def test_every_trace_with_shapes_has_ceilings_and_the_others_are_refused(shared: Path) -> None:
    for path, has in with_shapes(shared):
        if not path.is_file():
            pytest.skip(f"{path.name} is not there")
        if not has:
            with pytest.raises(GraphError, match="no shapes"):
                xsp.bound.of(path, device="H100")
            continue
        found = xsp.bound.of(path, device="H100", partial=True)
        ceiling = found.rungs["ceiling"]
        assert ceiling.sequential
        assert ceiling.coverage.nodes > 0.8 * ceiling.coverage.of_nodes
        assert all(each.reason for each in found.holes)
        assert found.rungs["measured"].sequential is not None


# --- the command ----------------------------------------------------------------------------------------


def test_the_command_shows_one_screen(
    known: Timings, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XSP_TIMINGS", str(tmp_path / "timings"))
    chain().save(tmp_path / "chain.json")
    assert main(["bound", str(tmp_path / "chain.json"), "--html", str(tmp_path / "bound.html")]) == 0
    shown = capsys.readouterr().out
    assert "ceiling" in shown
    assert "next: xsp bound" in shown
    assert len(shown.splitlines()) <= 40
    assert "Ladder" in (tmp_path / "bound.html").read_text(encoding="utf-8")
    assert main(["bound", str(tmp_path / "chain.json"), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["rungs"]["ceiling"]["sequential_ns"] == 408_000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--fill", "nothing"], "not a duration"),
        (["--fill", "0s"], "not a duration"),
        (["--device", "no such device"], "here are cpu"),
        (["--device", "no such device"], "no ceiling of the device"),
        (["--device", "H20"], "did you mean H200"),
        (["--like", "beef"], "is not one environment"),
        (["--like", "beef", "--device", "H100"], "--like"),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    more: list[str], said: str, known: Timings, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XSP_TIMINGS", str(tmp_path / "timings"))
    chain().save(tmp_path / "chain.json")
    assert exit_code("bound", str(tmp_path / "chain.json"), *more) != 0
    assert said in capsys.readouterr().err
