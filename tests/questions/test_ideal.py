"""The distance of a step from the best installed kernels, from synthetic timings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from madetimings import make_timing, timed_graph_of

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from xsp import bound  # noqa: E402
from xsp import graph as graphs  # noqa: E402
from xsp.advise import AdviceContext  # noqa: E402
from xsp.advise.advisor import of  # noqa: E402
from xsp.bench.spec import Spec  # noqa: E402
from xsp.device import ceilings  # noqa: E402
from xsp.device.ceilings import Ceiling  # noqa: E402
from xsp.device.machine import cpu_model  # noqa: E402
from xsp.questions import budget, ideal  # noqa: E402
from xsp.questions.timedcalls import TimedGraph  # noqa: E402


@pytest.fixture(autouse=True)
def _ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("xsp.processes.cores", lambda: 2)  # timings are made for two threads
    ceilings.store({cpu_model() or "cpu": Ceiling("a cpu", {"fp32": 1e12}, {}, 1e12, "measured")})


def timed_graph(folder: Path) -> TimedGraph:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()

    def ns(spec: Spec) -> float | None:
        if spec.block.op == "aten::conv2d":
            return {"as-run": 2e6, "channels-last": 5e5, "autocast-bfloat16": 1e5}.get(spec.variant, 2e6)
        return 1e5 if spec.variant == "as-run" else None

    return timed_graph_of(graphs.of(model, torch.randn(1, 3, 32, 32)), folder, ns)


def test_the_ideal_is_shown_with_the_ceiling(tmp_path: Path) -> None:
    basis = timed_graph(tmp_path)
    first, *more_lines = ideal.lines(bound.of(basis.graph, timings=basis.timings, threads=2))
    ideal_text = "ideal call by call, with PyTorch's own kernels: 1.10 ms, 27 % of the step; at the peak rates of"
    assert first.startswith(ideal_text)
    assert "above it: choice of algorithm 3.00 ms" in more_lines
    assert more_lines[-1] == "furthest above their best, as run: conv2d 3.00 ms"


def test_without_timings_there_is_no_ideal(tmp_path: Path) -> None:
    empty = timed_graph_of(timed_graph(tmp_path).graph, tmp_path / "none", lambda spec: None)
    assert list(ideal.lines(bound.of(empty.graph, timings=empty.timings))) == []


def test_another_precision_is_never_the_best_of_a_bound(tmp_path: Path) -> None:
    basis = timed_graph(tmp_path)
    best = bound.of(basis.graph, timings=basis.timings, threads=2).figures["best"][0]
    assert best is not None
    assert best.ns == 5e5


def test_questions_on_a_model_are_answered_together(tmp_path: Path) -> None:
    basis = timed_graph(tmp_path)
    convert = {spec.key: spec for pairs in budget.rounds(basis.graph, 2, 2) for spec, _ in pairs}.values()
    basis.timings.add(make_timing(spec, 1e4) for spec in convert if spec.block.op == "aten::contiguous")
    context = AdviceContext(
        None, "a model", {}, {"timed-graph": lambda context: replace(basis), "ideal": lambda context: ("ideal: x",)}
    )
    report = of(context, only=["choice", "precision"])
    assert [piece.trial for piece in report.advice] == ["channels_last", "autocast=bfloat16"]
    assert [piece.option for piece in report.advice] == [False, True]
    assert report.advice[1].changes_numbers is not None
    assert report.combined_gain is None


def test_ceilings_that_the_step_beats_are_to_be_measured_again(tmp_path: Path) -> None:
    ceilings.cache_path().unlink(missing_ok=True)  # higher rates would be kept
    ceilings.store({cpu_model() or "cpu": Ceiling("a cpu", {"fp32": 1e6}, {}, 1e6, "measured")})
    basis = timed_graph(tmp_path)
    first, *_ = ideal.lines(bound.of(basis.graph, timings=basis.timings, threads=2))
    assert "nothing is faster" not in first
    assert first.endswith("measure them again: xsp doctor --measure")
