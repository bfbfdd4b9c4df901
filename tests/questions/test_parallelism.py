"""Advice on threads and branches, from synthetic timings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from madetimings import timed_graph_of

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from xsp import graph as graphs  # noqa: E402
from xsp.advise import AdviceContext  # noqa: E402
from xsp.bench.spec import Spec  # noqa: E402
from xsp.errors import AnalysisError  # noqa: E402
from xsp.graph import Graph  # noqa: E402
from xsp.graph.node import KnownBy  # noqa: E402
from xsp.questions import budget, parallelism  # noqa: E402
from xsp.questions.timedcalls import TimedGraph  # noqa: E402


class Branches(nn.Module):
    """Branches of three layers on one input, whose results are concatenated."""

    def __init__(self, count: int) -> None:
        super().__init__()
        layers = [nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))) for _ in range(count)]
        self.branches = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], -1)


def branches(count: int) -> Graph:
    return graphs.of(Branches(count).eval(), torch.randn(8, 16))


def chain() -> Graph:
    return graphs.of(nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))).eval(), torch.randn(8, 16))


def by_threads(spec: Spec, times: dict[int, float]) -> float | None:
    return times.get(spec.threads) if spec.variant == "as-run" else None


def timed_graph(graph: Graph, folder: Path, threads: int, **times: float) -> TimedGraph:
    times_by_count = {int(name[1:]): ns for name, ns in times.items()}
    return timed_graph_of(graph, folder, lambda spec: by_threads(spec, times_by_count), threads=threads)


def test_eight_threads_on_two_cores_get_the_fastest_number(tmp_path: Path) -> None:
    (piece,) = parallelism.thread_advice(timed_graph(chain(), tmp_path, 8, t1=900_000, t2=500_000, t8=2_000_000))
    assert piece.what == "8 threads share 2 cores"
    assert piece.trial == "threads=2"
    assert piece.gain.value == pytest.approx(12 * 1.5)
    assert "set_num_threads(2)" in piece.do
    assert piece.changes_numbers is None


def test_one_thread_where_two_help(tmp_path: Path) -> None:
    (piece,) = parallelism.thread_advice(timed_graph(chain(), tmp_path, 1, t1=900_000, t2=500_000))
    assert (piece.what, piece.trial) == ("one thread, although 2 of 2 cores help", "threads=2")
    assert piece.gain.value == pytest.approx(12 * 0.4)
    assert piece.of_step_percent == pytest.approx(100 * 4 / 9)


def test_two_threads_where_one_would_do(tmp_path: Path) -> None:
    (piece,) = parallelism.thread_advice(timed_graph(chain(), tmp_path, 2, t1=10_000, t2=30_000))
    assert (piece.trial, "would do" in piece.what) == ("threads=1", True)


@pytest.mark.parametrize(
    ("current", "one", "two"), [(2, 900_000, 500_000), (1, 500_000, 495_000), (2, 500_000, 505_000)]
)
def test_the_right_number_of_threads_is_left_alone(current: int, one: float, two: float, tmp_path: Path) -> None:
    assert list(parallelism.thread_advice(timed_graph(chain(), tmp_path, current, t1=one, t2=two))) == []


def test_without_timings_of_another_number_there_is_no_advice(tmp_path: Path) -> None:
    assert list(parallelism.thread_advice(timed_graph(chain(), tmp_path, 8, t8=2_000_000))) == []
    assert list(parallelism.thread_advice(timed_graph(chain(), tmp_path / "one", 1, t1=2_000_000))) == []


def test_small_calls_that_get_slower_count_against_more_threads(tmp_path: Path) -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU()))).eval()
    times = {"aten::linear": {1: 100_000.0, 2: 80_000.0}, "aten::relu": {1: 10_000.0, 2: 40_000.0}}
    timed = timed_graph_of(
        graphs.of(model, torch.randn(8, 16)), tmp_path, lambda spec: times[spec.block.op].get(spec.threads), threads=1
    )
    assert list(parallelism.thread_advice(timed)) == []


def test_four_branches_of_layers_that_scale_badly_gain_what_a_schedule_gains(tmp_path: Path) -> None:
    (piece,) = parallelism.branch_advice(timed_graph(branches(4), tmp_path, 2, t1=1_000_000, t2=900_000))
    # sequentially 12 × 0.9 ms; two at once 6 × 1 ms, followed by cat
    assert 3 < piece.gain.value < 4.8
    assert "independent branches" in piece.what
    assert piece.trial is None
    assert {place.module for place in piece.where} <= {f"branches.{a}.{b}" for a in range(4) for b in range(3)} | {None}


@pytest.mark.parametrize(("one", "two"), [(1_000_000, 510_000), (20_000, 19_000)])
def test_branches_that_scale_well_or_are_too_small_to_hand_over_are_left_alone(
    one: float, two: float, tmp_path: Path
) -> None:
    assert list(parallelism.branch_advice(timed_graph(branches(4), tmp_path, 2, t1=one, t2=two))) == []


def test_a_chain_has_no_branches(tmp_path: Path) -> None:
    assert list(parallelism.branch_advice(timed_graph(chain(), tmp_path, 2, t1=1_000_000, t2=990_000))) == []


def test_branches_are_not_advised_if_calls_overlapped_in_the_trace(tmp_path: Path) -> None:
    timed = replace(timed_graph(branches(4), tmp_path, 2, t1=1_000_000, t2=900_000), has_overlap=True)
    assert list(parallelism.branch_advice(timed)) == []


def test_branches_need_the_data_flow(tmp_path: Path) -> None:
    graph = replace(branches(4), known_by=KnownBy.ORDER)
    context = AdviceContext(
        None, "a run", {}, {"timed-graph": lambda context: timed_graph(graph, tmp_path, 2, t1=1_000_000, t2=900_000)}
    )
    with pytest.raises(AnalysisError, match="order of its calls"):
        list(parallelism.parallelism(context))


def test_many_cores_are_tried_in_powers_of_two() -> None:
    assert budget.thread_counts(2) == [1, 2]
    assert budget.thread_counts(3) == [1, 2, 3]
    assert budget.thread_counts(48) == [1, 2, 4, 8, 16, 32, 48]
