"""Device work through CUPTI on a real GPU: against Kineto, beside it, after it, and when things go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp_collectors.cuda import cuptitrial, recordbuffers  # noqa: E402
from xsp_collectors.cuda.cupti import CuptiActivities  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class Net(torch.nn.Module):
    """Convolutions, a matrix product, and a branch on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
        )
        self.branch = torch.nn.Conv2d(64, 64, 3, padding=1)
        self.head = torch.nn.Linear(64, 1000)
        self.stream = torch.cuda.Stream()

    def forward(self, image: Any) -> Any:
        x = self.features(image)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            y = self.branch(x)
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.head((x + y).mean((2, 3)))


@pytest.fixture(scope="module")
def training() -> Any:
    torch.manual_seed(0)
    model = Net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    image, target = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(1000, (32,), device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(image), target).backward()
        optimizer.step()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def run(out: Path, step: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
    with xsp.profile("net", out=out, **settings) as prof:
        for _ in range(prof.schedule.steps_for(3)):
            with prof.step():
                step()
    return xsp.load(out), json.loads((out / "run.json").read_text())


def kernels(trace: Any) -> list[tuple[str, float]]:
    """Return names and median durations of a step's kernels, in the order in which they began."""
    rows = trace.sql(
        "SELECT step, name, dur_ns FROM spans WHERE kind = 'kernel' AND timed AND rung >= 70 ORDER BY step, start_ns"
    ).fetchall()
    steps = [[(name, ns) for number, name, ns in rows if number == step] for step in sorted({row[0] for row in rows})]
    return [(each[0][0], median(ns for _, ns in each)) for each in zip(*steps, strict=True)]


def kineto_sees_kernels(step: Any) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        step()
        torch.cuda.synchronize()
    return any(event.device_type == torch.autograd.DeviceType.CUDA for event in prof.events())


def test_at_least_99_percent_of_device_time_has_an_exact_layer_forward_and_backward(tmp_path, training):
    trace, content = run(tmp_path / "run", training, kernels="cupti")
    assert content["kernels"]["source"] == "cupti"
    assert content["kernels"]["details"]["clock_error_ns"] <= cuptitrial.CLOCK_BOUND_NS
    ((share,),) = trace.sql(
        "SELECT sum(dur_ns) FILTER (grade = 'exact') / sum(dur_ns) FROM spans "
        "WHERE device IS NOT NULL AND timed AND phase IN ('forward', 'backward')"
    ).fetchall()
    assert share >= 0.99
    ((streams, phases),) = trace.sql(
        "SELECT count(DISTINCT stream), count(DISTINCT phase) FROM spans WHERE kind = 'kernel'"
    ).fetchall()
    assert (streams >= 2, phases >= 2) == (True, True)
    assert not [note for note in content["notes"] if "dropped" in note["text"] or "not ended" in note["text"]]


def test_the_kernels_are_kinetos_by_name_and_their_durations_agree(tmp_path, training):
    torch.backends.cudnn.deterministic = True
    ours, _ = run(tmp_path / "cupti", training, kernels="cupti")
    theirs, _ = run(tmp_path / "kineto", training, kernels="kineto")
    mine, its = kernels(ours), kernels(theirs)
    assert Counter(name for name, _ in mine) == Counter(name for name, _ in its)
    assert sum(ns for _, ns in mine) == pytest.approx(sum(ns for _, ns in its), rel=0.05)


def test_buffers_and_objects_of_the_binding_have_the_same_kernels(tmp_path, training, monkeypatch):
    monkeypatch.setenv(recordbuffers.CHOICE, "1")
    of_buffers, content = run(tmp_path / "buffers", training, kernels="cupti")
    if content["kernels"]["details"]["records"] != recordbuffers.RecordBuffers.form:
        pytest.skip("this version of CUPTI is not known")
    monkeypatch.delenv(recordbuffers.CHOICE)
    of_objects, content = run(tmp_path / "objects", training, kernels="cupti")
    assert content["kernels"]["details"]["records"] != recordbuffers.RecordBuffers.form
    mine, its = kernels(of_buffers), kernels(of_objects)
    assert [name for name, _ in mine] == [name for name, _ in its]
    assert sum(ns for _, ns in mine) == pytest.approx(sum(ns for _, ns in its), rel=0.05)


def test_kineto_works_after_a_run_with_cupti_and_cupti_after_kineto(tmp_path, training):
    assert kineto_sees_kernels(training)
    for name in ("first", "second"):
        trace, content = run(tmp_path / name, training, kernels="cupti")
        assert content["kernels"]["source"] == "cupti"
        assert kernels(trace)
        assert kineto_sees_kernels(training)


def test_no_record_of_many_small_kernels_is_dropped(tmp_path):
    value = torch.ones(1, device="cuda")

    def step() -> None:
        for _ in range(8_000):
            value.add_(1)

    trace, content = run(tmp_path / "run", step, kernels="cupti", levels="model/kernel", settle=0)
    assert len(kernels(trace)) == 8_000
    assert not [note["text"] for note in content["notes"] if "dropped" in note["text"]]


def script(tmp_path: Path, body: str, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a script under `xsp run`, and return what came of it."""
    path, out = tmp_path / "script.py", tmp_path / "run"
    path.write_text("import torch\n" + textwrap.dedent(body))
    command = [sys.executable, "-m", "xsp.cli", "run", "--quiet", "-o", str(out), *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False), out


INFERENCE = """
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.Flatten(), torch.nn.Linear(64 * 900, 512))
    net = net.cuda().eval()
    image = torch.randn(8, 3, 32, 32, device="cuda")
    with torch.inference_mode():
        for _ in range(30):
            net(image)
"""


def test_libraries_name_their_own_calls(tmp_path):
    done, out = script(tmp_path, INFERENCE, "--kernels", "cupti")
    assert done.returncode == 0, done.stderr
    said = "attributes ->> 'library', attributes ->> 'evidence'"
    found = xsp.load(out).sql(f"SELECT DISTINCT {said} FROM spans WHERE kind = 'call' AND level = 50").fetchall()
    assert {evidence for _, evidence in found} == {"nvtx"}
    assert {library for library, _ in found} & {"cuBLAS", "cuBLASLt"}
    assert "cuDNN" in {library for library, _ in found}


def test_a_program_whose_kernel_fails_sees_its_own_error_and_xsp_what_it_lost(tmp_path):
    body = """
        net = torch.nn.Embedding(4, 8).cuda().eval()
        good, bad = torch.tensor([1], device="cuda"), torch.tensor([99], device="cuda")
        with torch.inference_mode():
            for number in range(12):
                net(good)
            net(bad)
            torch.cuda.synchronize()
    """
    done, out = script(tmp_path, body, "--kernels", "cupti")
    assert done.returncode == 1
    assert "device-side assert" in done.stderr
    assert json.loads((out / "run.json").read_text())["finished"] is True


def test_cupti_that_somebody_else_holds_is_said(tmp_path):
    body = """
        from cupti import cupti
        import xsp
        held = cupti.subscribe(lambda *args: None, None)
        torch.ones(1, device="cuda")
        with xsp.profile("net", out="{out}", kernels="cupti"):
            pass
    """
    path = tmp_path / "script.py"
    path.write_text("import torch\n" + textwrap.dedent(body.format(out=tmp_path / "run")))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    # a holder that gives no name looks as an idle Kineto does; then the trial decides
    assert done.returncode == 0 or "CUPTI is held by" in done.stderr


def test_the_trial_passes_and_leaves_cupti_free():
    torch.ones(1, device="cuda")
    assert CuptiActivities().trial() is None
    assert CuptiActivities().trial() is None
