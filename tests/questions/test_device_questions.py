"""Advice from timings of a device: on the stand-in, whose times are stated, and on those recorded of an H200."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import recordeddevice  # noqa: E402
import standin  # noqa: E402
from madetimings import make_timing  # noqa: E402
from torch import nn  # noqa: E402

import xsp  # noqa: E402
from xsp import advise, bench, cli  # noqa: E402
from xsp.advise import advisor  # noqa: E402
from xsp.bench import steps  # noqa: E402
from xsp.bench.environment import Environment, current_environment  # noqa: E402
from xsp.bench.spec import AS_RUN, Timing  # noqa: E402
from xsp.bench.timings import Timings  # noqa: E402
from xsp.bench.variants import PRECISIONS, VARIANTS  # noqa: E402
from xsp.bound.totals import Figure  # noqa: E402
from xsp.errors import AnalysisError, DeviceError, UsageError  # noqa: E402
from xsp.questions import choice, launches, parallelism, precision  # noqa: E402
from xsp.questions.timedcalls import TimedGraph, WholeStep  # noqa: E402

H200 = Environment({"device": {"kind": "cuda", "name": "NVIDIA H200", "caches": [[2, 60 << 20]]}, "torch": "2"})


@pytest.fixture
def model(tmp_path: Path) -> str:
    return standin.written_model(tmp_path)


# --- on the stand-in ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_is_advised_on_a_device_that_is_named(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    words = ["advise", model, "--device", "standin:0", "--timings", str(tmp_path / "timings")]
    assert cli.main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--fill 60s" in said
    assert "record more steps" not in said
    assert cli.main([*words, "--fill", "40s", "--format", "json", "-q"]) == 0
    found = json.loads(capsys.readouterr().out)
    (piece,) = [piece for piece in found["advice"] if piece["question"] == "launches"]
    whole = {timing.op: timing for timing in Timings.open(tmp_path / "timings", current_environment(standin.StandIn()))}
    waited, replayed = whole[steps.WAITED].trimmed_ns, whole[steps.REPLAYED].trimmed_ns
    assert piece["gain_ms"]["value"] == pytest.approx((waited - replayed) / 1e6)
    assert "capture the step once and replay it; or a larger batch" in piece["do"]
    assert "thread-count" not in found["asked"]
    assert {"launches", "choice", "precision", "parallelism", "fusion", "removable"} <= {*found["asked"]}
    assert any(f"at the peak rates of {standin.PRODUCT}" in each["says"] for each in found["statements"])
    assert cli.main([*words, "--only", "launches"]) == 0
    assert "the device waits for the host" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_device_that_cannot_be_used_to_time_a_model_is_an_error(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch, obstacle="standin:0 is busy")
    words = ["advise", model, "--device", "standin", "--timings", str(tmp_path / "timings"), "--fill", "10s"]
    assert cli.main(words) != 0
    assert "xsp: error: standin:0 is busy" in capsys.readouterr().err
    assert not (tmp_path / "timings").exists()


def test_a_device_that_is_not_here_is_refused_before_anything_is_captured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    captured: list[str] = []
    monkeypatch.setattr("xsp.graph.sources.of", lambda *args, **options: captured.append("graph"))
    with pytest.raises(DeviceError, match=r"no device standin:4 here; here are cpu, .*standin:0"):
        advisor.context_of(model, {"device": "standin:4"})
    with pytest.raises(UsageError, match="is the name of a product, whose calls cannot be timed here"):
        advisor.context_of(model, {"device": "H100", "fill": 10.0})
    with pytest.raises(AnalysisError, match="NoSuchGpu"):
        advisor.context_of(model, {"device": "NoSuchGpu"})
    assert captured == []


def test_a_model_without_a_device_says_that_the_processor_answers(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "the calls are timed on the processor"
    for devices, is_said in ([], False), ([{"name": "NVIDIA H200"}], True):
        properties = {**current_environment().properties, "devices": devices}
        monkeypatch.setattr("xsp.questions.target.current_environment", lambda p=properties: Environment(p))
        assert cli.main(["advise", model, "--timings", str(tmp_path / "timings")]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) == is_said
    assert cli.main(["advise", model, "--device", "cpu", "--timings", str(tmp_path / "timings")]) == 0
    assert note not in " ".join(capsys.readouterr().out.split())


# --- made timings of a GPU ----------------------------------------------------------------------------------------


def device_graph(
    module: nn.Module,
    *inputs: torch.Tensor,
    folder: Path,
    ns: dict[str, dict[str, float]],
    whole: tuple[float, ...] = (),
) -> TimedGraph:
    """Return a graph with timings of an H200: nanoseconds by operator and variant, and the step waited, issued,
    replayed."""
    graph = xsp.graph.of(module, *inputs)
    timings = Timings.open(folder, H200)
    pairs = bench.specs(graph, variants=(AS_RUN, *VARIANTS, *PRECISIONS), environment=H200)
    for spec, _ in pairs:
        by_variant = ns.get(spec.block.op.partition("::")[2], {AS_RUN: 1000.0})
        if spec.variant in by_variant:
            timings.add([_of_device(make_timing(spec, by_variant[spec.variant], error=1e-3))])
    if whole:
        waited, replayed = steps.specs(graph)
        timings.add([replace(_of_device(make_timing(waited, whole[0])), host_ns=whole[1])])
        timings.add([_of_device(make_timing(replayed, whole[2]))] if len(whole) > 2 else [])
    return TimedGraph(graph, timings, 1, 1)


def _of_device(timing: Timing) -> Timing:
    return replace(timing, environment=H200.hash, device_ns=timing.trimmed_ns)


IMAGES = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


def test_algorithms_of_cudnn_and_precisions_are_advised_with_their_gain_and_error(tmp_path: Path) -> None:
    ns = {"conv2d": {AS_RUN: 100e3, "cudnn-benchmark": 60e3, "tf32": 30e3, "autocast-bfloat16": 20e3}}
    graph = device_graph(IMAGES, torch.zeros(2, 3, 16, 16), folder=tmp_path, ns=ns)
    (piece,) = choice.pieces(graph)
    assert (piece.trial, piece.side, piece.at_most) == ("cudnn_benchmark", "device", False)
    assert piece.gain.value == pytest.approx(2 * 40e3 / 1e6)
    assert "NVIDIA H200" in piece.why[0]
    assert "threads" not in " ".join(piece.why)
    by_trial = {piece.trial: piece for piece in precision.pieces(graph)}
    assert {*by_trial} == {"tf32", "autocast=bfloat16"}
    assert by_trial["tf32"].gain.value == pytest.approx(2 * 70e3 / 1e6)
    assert by_trial["autocast=bfloat16"].do == "with torch.autocast(x.device.type, dtype=torch.bfloat16): ..."
    assert all(piece.option and "up to 0.1 %" in str(piece.changes_numbers) for piece in by_trial.values())


@pytest.mark.parametrize(
    ("issue_us", "left_us"),
    [(10.0, 80.0), (260.0, 40.0), (300.0, 0.0)],
)
def test_the_gain_of_device_work_is_at_most_what_the_host_leaves(
    issue_us: float, left_us: float, tmp_path: Path
) -> None:
    ns = {"conv2d": {AS_RUN: 100e3, "cudnn-benchmark": 60e3}}
    step = (300e3, issue_us * 1e3, 201e3)
    graph = device_graph(IMAGES, torch.zeros(2, 3, 16, 16), folder=tmp_path, ns=ns, whole=step)
    assert graph.total_ns == 300e3
    (piece,) = choice.pieces(graph)
    assert piece.gain.value == pytest.approx(left_us / 1e3, abs=1e-6)
    assert WholeStep(100.0, 100.0, 50.0).left_by_host_ns(30.0) == 0.0


def test_a_capture_is_worth_what_the_replayed_step_is_shorter(tmp_path: Path) -> None:
    image = torch.zeros(2, 3, 16, 16)
    with pytest.raises(AnalysisError, match="the whole step is not timed"):
        list(launches.pieces(device_graph(IMAGES, image, folder=tmp_path / "0", ns={})))
    (piece,) = launches.pieces(device_graph(IMAGES, image, folder=tmp_path / "1", ns={}, whole=(4.7e6, 4.6e6, 0.9e6)))
    assert (piece.gain.value, piece.at_most, piece.side) == (pytest.approx(3.8), False, "host")
    assert "CUDA graphs" in piece.do
    (piece,) = launches.pieces(device_graph(IMAGES, image, folder=tmp_path / "2", ns={}, whole=(4.7e6, 4.6e6)))
    assert piece.at_most, "without a replay all calls alone are an upper bound"
    assert not list(
        launches.pieces(device_graph(IMAGES, image, folder=tmp_path / "3", ns={}, whole=(1e6, 1e5, 0.98e6)))
    )


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([head(x) for head in self.heads])


def test_branches_are_worth_streams_only_where_they_leave_the_device_unused(tmp_path: Path) -> None:
    ns = {"linear": {AS_RUN: 50e3}, "cat": {AS_RUN: 10e3}}
    graph = device_graph(Branches(), torch.zeros(8, 64), folder=tmp_path, ns=ns)
    small, full = ([Figure(share * 50e3)] * len(graph.graph.nodes) for share in (0.01, 0.6))
    (piece,) = parallelism.stream_advice(graph, small)
    assert (piece.at_most, piece.side) == (True, "device")
    assert piece.gain.value == pytest.approx(3 * 50e3 / 1e6)
    assert not list(parallelism.stream_advice(graph, full))
    with pytest.raises(AnalysisError, match="peak rates are unknown"):
        list(parallelism.stream_advice(graph, None))


class Reads(Branches):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.max().item()


def test_a_step_that_reads_a_value_is_not_advised_streams_and_a_capture_only_without_the_read(tmp_path: Path) -> None:
    ns = {"linear": {AS_RUN: 50e3}, "cat": {AS_RUN: 10e3}}
    graph = device_graph(Reads(), torch.zeros(8, 64), folder=tmp_path, ns=ns, whole=(4.7e6, 4.6e6))
    assert not list(parallelism.stream_advice(graph, [Figure(0.01 * 50e3)] * len(graph.graph.nodes)))
    (piece,) = launches.pieces(graph)
    assert piece.do.startswith("keep on the device what the step reads (item), then capture the step once")


# --- recorded on an H200 ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_advice_on_a_model_from_recorded_timings(shared: Path, tmp_path: Path) -> None:
    folder = shared / "gpu"
    if not (folder / "isolated.json.gz").exists():
        pytest.skip("shared/gpu, recorded on an H200, is not beside the checkout")
    timings = recordeddevice.stored(folder, tmp_path / "timings")
    gains = {}
    for entry in recordeddevice.read(folder)["models"]:
        name = recordeddevice.step_name(entry)
        settings = {"device": "H200", "timings": timings.folder}
        report = advise.of(str(folder / "graphs" / f"{name}.json.gz"), settings=settings)
        gains[name] = {piece.question: piece.of_step_percent for piece in report.advice}
    assert gains["torchvision-resnet50-b1"]["launches"] == pytest.approx(100 * (1 - 0.90 / 4.69), abs=1)
    for name in ("timm-vit_base_patch16_224-b16", "transformers-bert-b8", "torchvision-convnext_tiny-b16"):
        assert max(gains[name].values(), default=0.0) <= 10, name  # sound ones, which the device limits


def test_a_trace_of_a_device_uses_the_timings_of_that_device_and_says_what_is_missing(
    shared: Path, tmp_path: Path
) -> None:
    """The calls of a trace have the device's operators, which were not timed alone: a reason, and what to type."""
    folder = shared / "gpu"
    if not (folder / "isolated.json.gz").exists():
        pytest.skip("shared/gpu, recorded on an H200, is not beside the checkout")
    timings = recordeddevice.stored(folder, tmp_path / "timings", "torchvision-resnet50-b1")
    path = str(folder / "traces" / "torchvision-resnet50-b1.json.gz")
    for stored in (timings.folder, tmp_path / "none"):
        report = advise.of(path, settings={"timings": stored})
        reason = report.unanswered["choice"]
        assert "single calls of NVIDIA H200 are not timed: xsp bench --missing-of " in reason
        assert "--fill" not in reason
    with pytest.raises(UsageError, match="ran on NVIDIA H200, and the timings are of NVIDIA H100"):
        advisor.context_of(path, {"timings": _of_another(tmp_path), "device": "H100"})


def _of_another(folder: Path) -> Path:
    environment = Environment({"device": {"kind": "cuda", "name": "NVIDIA H100"}, "torch": "2"})
    ((spec, _),) = bench.specs(xsp.graph.of(nn.Linear(4, 4), torch.zeros(1, 4)), environment=environment)
    Timings.open(folder / "other", environment).add([replace(make_timing(spec, 1e3), environment=environment.hash)])
    return folder / "other"
