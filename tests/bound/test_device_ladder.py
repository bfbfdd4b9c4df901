"""The ladder of an accelerator: on the stand-in, whose times are stated, and on timings that an H200 had recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from depth import deep, first

torch = pytest.importorskip("torch")

import recordeddevice  # noqa: E402
import standin  # noqa: E402

import xsp  # noqa: E402
from xsp import bench, cli  # noqa: E402
from xsp.bench import steps  # noqa: E402
from xsp.bench.environment import Environment, current_environment  # noqa: E402
from xsp.bench.timings import Timings  # noqa: E402
from xsp.bound import Bound, curves, targets, text  # noqa: E402
from xsp.bound.ladder import LAUNCHES, NEIGHBOURS, Rung  # noqa: E402
from xsp.errors import AnalysisError, BenchError, DeviceError, UsageError  # noqa: E402


@pytest.fixture
def model(tmp_path: Path) -> str:
    return standin.written_model(tmp_path)


# --- on the stand-in ----------------------------------------------------------------------------------------------


def test_a_step_that_the_host_limits_is_said_to_be_with_what_its_capture_would_give(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    words = ["bound", model, "--device", "standin:0", "--timings", str(tmp_path / "timings")]
    assert cli.main([*words, "--fill", "40s", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    totals = {name: rung["sequential_ns"] for name, rung in found["rungs"].items()}
    device_ns = 6 * standin.LAUNCH_NS
    assert device_ns < totals["as_run"] < 1.01 * 6 * (standin.LAUNCH_NS + 3)
    assert totals["replayed"] == pytest.approx(totals["as_run"], rel=0.01)
    assert totals["issued"] >= 6 * standin.ISSUE_NS
    assert totals["measured"] >= totals["issued"]
    assert totals["with_framework"] is None
    gain = totals["measured"] / totals["replayed"]
    assert found["limit"].startswith("the host limits: it takes ")
    assert found["limit"].endswith(f"capture it: up to {gain:.1f} times as fast")
    names = [difference["name"] for difference in found["differences"]]
    assert names[-3:] == [NEIGHBOURS, LAUNCHES, "waiting and interference"]
    assert sum(difference["ns"] for difference in found["differences"]) == pytest.approx(
        totals["measured"] - totals["fused_ceiling"]
    )
    assert cli.main(words) == 0
    page = capsys.readouterr().out
    assert f"timings of {standin.PRODUCT}" in page
    assert "the host limits" in page
    assert cli.main([*words, "--html", str(tmp_path / "bound.html")]) == 0
    assert "replayed" in (tmp_path / "bound.html").read_text()


@pytest.mark.slow
def test_the_energy_of_a_step_is_that_of_its_time_waited_for_and_captured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch, watts=500)
    words = ["bound", model, "--device", "standin:0", "--timings", str(tmp_path / "timings")]
    assert cli.main([*words, "--fill", "180s", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step_ns, settings = found["rungs"]["measured"]["sequential_ns"], found["settings"]
    assert settings["joules"] == pytest.approx(500 * step_ns / 1e9, rel=0.05)
    assert settings["watts"] == pytest.approx(500, rel=0.05)
    assert 0 < settings["replayed_joules"] < settings["joules"]
    assert cli.main(words) == 0
    page = capsys.readouterr().out
    assert "energy: " in page
    (watts,) = re.findall(r"J a step that is waited for, ([\d.]+) W", page)
    assert float(watts) == pytest.approx(500, rel=0.05)


@pytest.mark.slow
def test_what_cannot_be_captured_or_was_not_timed_is_a_named_hole(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch, faults={"capture": "no"})
    folder = tmp_path / "timings"
    untimed = xsp.bound.of(model, device="standin", timings=folder)
    assert (
        f"the whole step was not timed: xsp bench {untimed.graph.name} --device standin" in untimed.absent["replayed"]
    )
    assert untimed.limit_text == ""
    found = xsp.bound.of(model, device="standin", timings=folder, fill=40)
    assert found.absent["replayed"] == "the step cannot be captured (it reads a value)"
    assert found.rungs["issued"].sequential is not None
    assert "its calls alone" in found.limit_text


@pytest.mark.slow
def test_a_step_of_which_only_the_whole_is_timed_is_not_said_to_be_untimed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    timings = Timings.open(tmp_path / "timings", current_environment(standin.StandIn()))
    waited = next(spec for spec in steps.specs(xsp.graph.of(model), model) if spec.op == steps.WAITED)
    bench.fill([waited], timings, 30, device=standin.StandIn())
    found = xsp.bound.of(model, device="standin", timings=timings)
    assert found.rungs["measured"].sequential
    assert found.absent["replayed"].startswith("the captured step was not timed: xsp bench")
    assert found.absent["issued"].startswith("neither the captured step nor enough of its calls are timed: xsp bench")


@pytest.mark.slow
def test_a_device_that_is_too_small_is_the_reason_for_what_is_not_timed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path / "site", monkeypatch, free_bytes=1000)
    found = xsp.bound.of(model, device="standin", timings=tmp_path / "timings", fill=20)
    assert found.absent["as_run"].startswith("no call is timed (too-large: its tensors take")
    assert "of 500 B allowed" in found.absent["as_run"]


@pytest.mark.slow
def test_blocks_of_calls_are_timed_on_a_device_and_compared_with_its_replayed_step(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    folder = tmp_path / "timings"
    found = curves.of(model, device="standin", timings=folder, fill=60, most=3)
    assert found.measured_ns == pytest.approx(6 * standin.LAUNCH_NS, rel=0.01)
    assert [point.construction.coverage.is_complete for point in found.points] == [True] * 3
    assert all(abs(point.error) < 0.05 for point in found.points if point.error is not None)
    with pytest.raises(UsageError, match="--run and --threads are of the processor"):
        curves.of(model, device="standin", timings=folder, threads=2)
    with pytest.raises(AnalysisError, match="there are no timings of H100"):
        curves.of(model, device="H100", timings=folder)
    assert cli.main(["bound", model, "--curve", "--device", "standin", "--timings", str(folder)]) == 0
    assert "blocks" in capsys.readouterr().out


def test_a_product_without_timings_has_the_operators_and_the_precision_of_its_kind(model: str, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3), torch.nn.BatchNorm2d(64)).train()
    image, folder = torch.zeros(8, 64, 56, 56), tmp_path / "timings"
    found = {name: xsp.bound.of(net, image, device=name, timings=folder, train=True) for name in ("H100", "MI300X")}
    norms = {name: next(n.call.op for n in bound.graph.computing if "batch_norm" in n.call.op)
             for name, bound in found.items()}  # fmt: skip
    assert norms == {"H100": "aten::cudnn_batch_norm", "MI300X": "aten::native_batch_norm"}
    assert {name: bound.settings.get("convolutions") for name, bound in found.items()} == {
        "H100": "tf32", "MI300X": None,
    }  # fmt: skip
    timings = Timings.open(folder, Environment({"device": {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3"}}))
    timings.add([recordeddevice._timing(steps.specs(found["H100"].graph)[0], 1e6, host_ns=1e5)])
    timed = xsp.bound.of(net, image, device="H100", timings=folder, train=True)
    assert timed.rungs["ceiling"].sequential == found["H100"].rungs["ceiling"].sequential, "whether or not it is timed"
    untimed = xsp.bound.of(model, device="H100", timings=folder, batch=4)
    assert f"xsp bench {untimed.graph.name} --device cuda --batch 4" in untimed.absent["replayed"]


def test_what_takes_the_missing_timings_of_a_product_runs_where_it_is() -> None:
    for device, says in (
        ("H200", "xsp bound 'a b' --curve --fill 5m --device cuda:0 where H200 is, and xsp bench --export there"),
        ("cuda:1", "xsp bound 'a b' --device cuda:1 --curve --fill 5m"),
    ):
        assert targets.filled(f"xsp bound 'a b' --device {device} --curve", "5m").startswith(says)
    assert targets.filled("xsp bound x", "60s") == "xsp bound x --fill 60s"


def test_a_product_without_peak_rates_has_its_timings_and_no_ceiling(model: str, tmp_path: Path) -> None:
    environment = Environment({"device": {"kind": "cuda", "name": "NVIDIA FooBar 9000"}, "torch": "2"})
    timings, graph = Timings.open(tmp_path, environment), xsp.graph.of(model, device="cuda")
    pairs = bench.specs(graph, environment=environment)
    timings.add([recordeddevice._timing(spec, 1e6, cold_ns=2e6) for spec, _ in pairs])
    found = xsp.bound.of(model, device="FooBar", timings=tmp_path)
    assert found.rungs["as_run"].sequential == 6e6
    assert found.caches_text.endswith(", 12.0 ms with cold ones")
    assert found.absent["ceiling"].startswith("no peak rates of NVIDIA FooBar 9000 are known: quote them in a file")
    assert "no peak rates of NVIDIA FooBar 9000" in text.page(found, model, step="--device FooBar")
    with pytest.raises(AnalysisError, match="no ceiling of the device"):
        xsp.bound.of(model, device="BarFoo", timings=tmp_path)


def test_bad_requests_are_one_error_each(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path / "site", monkeypatch)
    folder = tmp_path / "timings"
    with pytest.raises(DeviceError, match="there is no device standin:3 here"):
        xsp.bound.of(model, device="standin:3", timings=folder)
    with pytest.raises(UsageError, match="is the name of a product"):
        xsp.bound.of(model, device="H100", timings=folder, fill=10)
    with pytest.raises(UsageError, match="--threads is of the processor"):
        xsp.bound.of(model, device="standin", timings=folder, threads=2)
    other = Environment({"device": {"kind": "cuda", "name": "NVIDIA A100"}, "torch": "2"})
    here = current_environment(standin.StandIn())
    for environment in (other, here):
        specs = steps.specs(xsp.graph.of(model))
        Timings.open(folder, environment).add([recordeddevice._timing(specs[0], 1e6, host_ns=1e5)])
    with pytest.raises(BenchError, match="are of NVIDIA A100, not of Stand-in 1: they cannot replace its own"):
        xsp.bound.of(model, device="standin", timings=folder, like=other.hash)
    with pytest.raises(BenchError, match="are of NVIDIA A100, not of "):
        xsp.bound.of(model, timings=folder, like=other.hash)


def test_the_processor_by_its_identifier_is_the_processor(model: str, tmp_path: Path) -> None:
    plain, named = (xsp.bound.of(model, device=device, timings=tmp_path / "timings") for device in (None, "cpu"))
    assert text.as_json(plain) == text.as_json(named)
    assert "device" not in named.settings


# --- recorded on an H200 ------------------------------------------------------------------------------------------

SUMS = {
    "torchvision-resnet50-b32": (1.06, 1.00), "torchvision-resnet50-b1": (1.23, 1.12),
    "transformers-bert-b8": (0.94, 1.09), "transformers-gpt2-b4-train": (1.16, None),
    "torchvision-resnet18-b64-train": (1.22, None), "torchvision-mobilenet_v3_large-b32": (1.07, 1.01),
    "torchvision-convnext_tiny-b16": (1.01, 0.99), "timm-vit_base_patch16_224-b16": (1.00, 1.00),
}  # fmt: skip
"""Sum of the calls alone, and the replayed step, both over the kernels of the step."""


@pytest.fixture(scope="module")
def recorded(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Timings]:
    folder = shared / "gpu"
    if not (folder / "isolated.json.gz").exists():
        pytest.skip("shared/gpu, recorded on an H200, is not beside the checkout")
    return folder, recordeddevice.stored(folder, tmp_path_factory.mktemp("timings"))


def bound_of(recorded: tuple[Path, Timings], name: str, **options: object) -> tuple[Bound, float]:
    """Return the bound of a recorded step, and the nanoseconds of its kernels."""
    folder, timings = recorded
    entry = next(
        entry for entry in recordeddevice.read(folder)["models"] if recordeddevice.step_name(entry) == name
    )  # fmt: skip
    graph = recordeddevice.graph_of(folder, entry)
    found = xsp.bound.of(graph, device="H200", timings=timings.folder, **options)
    return found, entry["profile"]["kernel_ms"] * 1e6


@pytest.mark.parametrize("name", first(2, SUMS))
def test_the_ladder_of_recorded_timings_meets_the_kernels_of_the_step(
    name: str, recorded: tuple[Path, Timings]
) -> None:
    found, kernels_ns = bound_of(recorded, name)
    alone, replayed = SUMS[name]
    assert found.coverage.share == 1.0
    assert found.rungs["as_run"].sequential / kernels_ns == pytest.approx(alone, abs=0.006)
    if replayed is None:
        assert found.rungs["replayed"].sequential is None
        source = ":".join(name.split("-")[:2])
        assert f"xsp bench {source} --device cuda" in found.absent["replayed"]
    else:
        assert found.rungs["replayed"].sequential / kernels_ns == pytest.approx(replayed, abs=0.006)
    assert {Rung.CEILING, Rung.FUSED, Rung.ISSUED, Rung.MEASURED} <= {*found.ladder}
    assert "with warm caches" in " ".join(found.problems) or "mobilenet" in name


@pytest.mark.parametrize(
    "name",
    [
        "torchvision-resnet50-b32", deep("torchvision-resnet50-b1"), deep("torchvision-mobilenet_v3_large-b32"),
        deep("torchvision-convnext_tiny-b16"),
    ],
)  # fmt: skip
def test_calls_alone_exceed_the_kernels_by_less_than_a_gap_for_each(name: str, recorded: tuple[Path, Timings]) -> None:
    """A gap between two queued kernels is 1.3 µs in the traces (median), and a sum of kernels leaves it out."""
    found, kernels_ns = bound_of(recorded, name)
    models = recordeddevice.read(recorded[0])["models"]
    (kernels,) = (each["profile"]["kernels"] for each in models if recordeddevice.step_name(each) == name)
    excess_ns = (found.rungs["as_run"].sequential - kernels_ns) / kernels
    assert 500 < excess_ns < 1300


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("torchvision-resnet50-b1", "the host limits: it takes 4.82 ms to issue the step, and the device 901 µs; "
         'capture it (CUDA graphs, torch.compile(mode="reduce-overhead")): up to 5.2 times as fast'),
        deep("transformers-gpt2-b4-train", "and its calls alone 14.2 ms; capture it"),
        ("timm-vit_base_patch16_224-b16", "the device limits: the device 16.5 ms of 16.8 ms; the largest difference "
         "is kernel efficiency, 7.7"),
    ],
)  # fmt: skip
def test_what_limits_a_recorded_step_is_a_sentence(name: str, sentence: str, recorded: tuple[Path, Timings]) -> None:
    found, _ = bound_of(recorded, name)
    assert sentence in found.limit_text
    page = text.page(found, "graph.json", step="--device H200")
    assert sentence[:60] in " ".join(page.split())
    assert "--fill" not in page, "the calls of a product cannot be timed here"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("transformers-bert-b8", "its calls alone take 6.00 ms with warm caches, 6.93 ms with cold ones: they explain "
         "up to 938 µs of the 973 µs that the replayed step takes longer"),
        ("timm-vit_base_patch16_224-b16", "its calls alone take 16.5 ms with warm caches, 16.9 ms with cold ones: they "
         "explain all of the "),
        deep("torchvision-resnet50-b32", "its calls alone take 5.21 ms with warm caches, 5.73 ms with cold ones"),
    ],
)  # fmt: skip
def test_how_much_of_a_longer_replayed_step_cold_caches_explain_is_said(
    name: str, sentence: str, recorded: tuple[Path, Timings]
) -> None:
    found, _ = bound_of(recorded, name)
    assert found.caches_text.startswith(sentence)
    entry = next(each for each in recordeddevice.read(recorded[0])["models"] if recordeddevice.step_name(each) == name)
    cold_ns = sum(call["cold_ms"] * call["count"] for call in entry["calls"]) * 1e6
    assert found.settings["as_run_cold_ns"] == pytest.approx(cold_ns, rel=2e-3), "equal calls of other steps are one"
    assert found.caches_text[:60] in " ".join(text.page(found, "graph.json", step="--device H200").split())


@pytest.mark.slow
def test_the_step_alone_is_the_measured_one_and_not_that_under_a_profiler(recorded: tuple[Path, Timings]) -> None:
    name = "torchvision-resnet50-b1"
    trace = recorded[0] / "traces" / f"{name}.json.gz"
    found, kernels_ns = bound_of(recorded, name, trace=trace)
    assert found.rungs["measured"].sequential == pytest.approx(4.687e6, rel=1e-3)
    assert found.rungs["in_place"].sequential == pytest.approx(kernels_ns, rel=0.01)
    assert "not under the profiler" in " ".join(found.problems)
    alone = xsp.bound.of(trace, device="H200", timings=recorded[1].folder.parent / "none")
    assert [rung.value for rung in alone.ladder] == ["ceiling", "in_place", "measured"]
    assert "there are no timings of H200" in alone.absent["as_run"]


@pytest.mark.slow
def test_peak_rates_of_another_product_than_that_of_a_trace_are_noted(recorded: tuple[Path, Timings]) -> None:
    trace = recorded[0] / "traces" / "torchvision-resnet50-b1.json.gz"
    for device, notes in (("A100", ["ceiling: of A100 SXM4 80GB, and torchvision-resnet50-b1 ran on NVIDIA H200"]),
                          ("H200", [])):  # fmt: skip
        found = xsp.bound.of(trace, device=device, timings=recorded[1].folder.parent / "none")
        assert [
            text.partition(":")[0] + ":" + text.split(":")[1] for text in found.problems if "ran on" in text
        ] == notes


def test_a_damaged_description_of_timings_is_said(recorded: tuple[Path, Timings], tmp_path: Path) -> None:
    folder = tmp_path / "timings"
    file = tmp_path / "h200.parquet"
    recorded[1].export(file)
    Timings.open(folder).import_file(file)
    for description in (folder / "environments").iterdir():
        description.write_text('{"broken')
    found = xsp.bound.of(recorded[0] / "graphs" / "torchvision-resnet50-b1.json.gz", device="H200", timings=folder)
    assert any("the description of an environment cannot be read" in problem for problem in found.problems)


def test_a_run_of_another_device_is_refused(recorded: tuple[Path, Timings], tmp_path: Path) -> None:
    folder, timings = recorded
    other = Environment({**timings.environment.properties, "device": {"kind": "cuda", "name": "NVIDIA H100"}})
    entry = recordeddevice.read(folder)["models"][1]
    graph = recordeddevice.graph_of(folder, entry)
    Timings.open(tmp_path, other).add(recordeddevice._of_step(entry, graph, other))
    trace = folder / "traces" / f"{recordeddevice.step_name(entry)}.json.gz"
    with pytest.raises(UsageError, match="ran on NVIDIA H200, and the timings are of NVIDIA H100"):
        xsp.bound.of(graph, device="H100", timings=tmp_path, trace=trace)


def test_timings_of_a_product_are_imported_with_its_environment(
    recorded: tuple[Path, Timings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "h200.parquet"
    recorded[1].export(file)
    assert cli.main(["bench", "--import", str(file), "--timings", str(tmp_path / "mine")]) == 0
    graph = recorded[0] / "graphs" / "torchvision-resnet50-b1.json.gz"
    capsys.readouterr()
    assert cli.main(["bound", str(graph), "--device", "H200", "--timings", str(tmp_path / "mine")]) == 0
    assert "up to 5.2 times as fast" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "alone", "all_calls"),
    [("torchvision:resnet18", 64, 0.70, 1.02), deep("transformers:gpt2", 4, 0.83, 1.00)],
)
def test_the_calls_of_a_training_step_meet_its_kernels_once_the_devices_operators_are_captured(
    model: str, batch: int, alone: float, all_calls: float, recorded: tuple[Path, Timings]
) -> None:
    """Calls with the device's own operators were not timed alone there: they count as in the trace of the step."""
    pytest.importorskip(model.partition(":")[0])
    folder, timings = recorded
    name = f"{model.replace(':', '-')}-b{batch}-train"
    graph = xsp.graph.of(model, batch=batch, train=True, device="cuda")
    found = xsp.bound.of(graph, device="H200", timings=timings.folder, trace=folder / "traces" / f"{name}.json.gz")
    entry = next(each for each in recordeddevice.read(folder)["models"] if recordeddevice.step_name(each) == name)
    kernels_ns = entry["profile"]["kernel_ms"] * 1e6
    rows = [
        (single, traced)
        for single, traced, computes in zip(
            found.figures["as_run"], found.figures["in_place"], found.is_computing, strict=True
        )
        if computes
    ]
    assert all(single or traced for single, traced in rows)
    timed_ns = sum(single.ns for single, _ in rows if single is not None)
    total_ns = timed_ns + sum(traced.ns for single, traced in rows if single is None and traced is not None)
    assert timed_ns / kernels_ns == pytest.approx(alone, abs=0.01)
    assert total_ns / kernels_ns == pytest.approx(all_calls, abs=0.01)
    assert abs(total_ns / kernels_ns - 1) <= 0.08
