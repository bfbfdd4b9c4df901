"""Device work through Kineto: on fabricated events everywhere, on a real device where there is one.

The fabricated events stand for what only a GPU can produce; they have the methods that torch's own have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp.correlate.evidence import correlate  # noqa: E402
from xsp.schema import Level  # noqa: E402
from xsp.testing import spans  # noqa: E402
from xsp_collectors.cuda import devices  # noqa: E402
from xsp_collectors.torchops import TorchOps, _spans_of  # noqa: E402

HOST, DEVICE = torch._C._autograd.DeviceType.CPU, torch._C._autograd.DeviceType.CUDA


@dataclass
class Fake:
    """An event as Kineto's results hold it."""

    what: str
    label: str
    start: int
    end: int
    correlation: int = 0
    on: Any = HOST
    resource: int = 1
    bytes: int = 0

    NAMES: ClassVar = {"activity_type": None}
    """What a test takes away is what an older torch does not have."""

    def __getattr__(self, name: str) -> Any:
        values = {
            "name": self.label, "activity_type": self.what, "start_ns": self.start * 1000, "device_type": self.on,
            "duration_ns": (self.end - self.start) * 1000, "correlation_id": self.correlation, "device_index": 0,
            "device_resource_id": self.resource, "start_thread_id": 1, "fwd_thread_id": 0, "sequence_nr": -1,
            "scope": 0, "shapes": [], "dtypes": [], "nbytes": self.bytes, "is_hidden_event": False,
            "concrete_inputs": [],
        }  # fmt: skip
        if name not in values or (name == "activity_type" and name not in self.NAMES):  # an older torch
            raise AttributeError(name)
        return lambda: values[name]


EVENTS = [
    Fake("cpu_op", "aten::relu", 20, 40),
    Fake("cuda_runtime", "cudaLaunchKernel", 25, 30, correlation=7),
    Fake("kernel", "relu_kernel", 60, 80, correlation=7, on=DEVICE, resource=3),
    Fake("gpu_memcpy", "Memcpy HtoD", 90, 95, correlation=8, on=DEVICE, resource=3),
    Fake("cuda_runtime", "cudaDeviceSynchronize", 41, 97),
]


def test_a_kernel_takes_the_parent_of_its_launch_and_device_work_without_one_is_an_orphan():
    step = spans("step net 0-100\nmodule relu 10-50 depth=0")
    device = [span._replace(process=1) for span in _spans_of(EVENTS, "torchops")]
    rows = {row.name: row for row in correlate([*step, *device])}
    names = {row.span_id: row.name for row in rows.values()}
    shown = [
        (row.name, row.kind, names.get(row.parent_id or ""), row.parent_rule)
        for row in rows.values()
        if row.level >= 60
    ]
    assert sorted(shown) == [
        ("Memcpy HtoD", "copy", None, None),
        ("cudaDeviceSynchronize", "sync", "net", "containment"),
        ("cudaLaunchKernel", "launch", "aten::relu", "containment"),
        ("relu_kernel", "kernel", "aten::relu", "correlation"),
    ]
    assert (rows["relu_kernel"].device, rows["relu_kernel"].stream) == (0, 3)


MEMORY = [
    Fake("cpu_instant_event", "[memory]", 22, 22, on=DEVICE, bytes=4096),
    Fake("cpu_instant_event", "[memory]", 23, 23, bytes=64),
    Fake("cpu_instant_event", "[memory]", 24, 24, on=DEVICE, bytes=-4096),
]


def test_memory_of_a_layer_is_the_devices_where_it_uses_one():
    step = spans("step net 0-100\nmodule relu 10-50 depth=0")
    seen = [span._replace(process=1) for span in _spans_of([*EVENTS, *MEMORY], "torchops")]
    known = {row.name: row.alloc_bytes for row in correlate([*step, *seen])}
    assert (known["relu"], known["aten::relu"]) == (4096, 4096)
    host = [span for span in seen if span.kind != "alloc" or span.device is None]
    assert {row.name: row.alloc_bytes for row in correlate([*step, *host])}["relu"] == 64


@pytest.mark.parametrize("told", [True, False], ids=["torch tells what an event is", "an older torch"])
def test_an_annotation_on_the_device_is_no_kernel_and_the_profilers_own_work_no_operator(monkeypatch, told):
    """As recorded on an H200: the annotation around an optimizer's kernels, the request of a buffer."""
    extra = [
        Fake("gpu_user_annotation", "Optimizer.step#SGD.step", 60, 80, on=DEVICE, resource=3),
        Fake("overhead", "Activity Buffer Request", 21, 24),
    ]
    for event in (*EVENTS, *extra):
        object.__setattr__(event, "is_user_annotation", lambda event=event: "annotation" in event.what)
    if not told:
        monkeypatch.delitem(Fake.NAMES, "activity_type")
    seen = [(span.kind, span.name) for span in _spans_of([*EVENTS, *extra], "torchops")]
    assert ("kernel", "Optimizer.step#SGD.step") not in seen
    assert ("overhead", "activity buffer request") in seen
    assert not [name for kind, name in seen if kind == "op" and name != "aten::relu"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_kernels_of_a_real_device_belong_to_their_layers(tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 3), torch.nn.ReLU()).cuda().eval()
    image = torch.randn(8, 3, 64, 64, device="cuda")
    with xsp.profile("gpu", out=tmp_path / "run", kernels="kineto") as prof, torch.inference_mode():
        for _ in range(prof.schedule.steps_for(3)):
            with prof.step():
                model(image)
    trace = xsp.load(tmp_path / "run")
    kernels = xsp.analyses.A8(trace).fetchall()
    assert {row[4] for row in kernels} <= {"cuDNN", "PyTorch", "device"}
    assert {row[2] for row in kernels} == {"0", "1"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_memory_of_a_layer_on_a_real_device_is_what_it_allocates_there(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024)).cuda().eval()
    rows = torch.randn(512, 256, device="cuda")
    with xsp.profile("gpu", out=tmp_path / "run", kernels="kineto") as prof, torch.inference_mode():
        for _ in range(prof.schedule.steps_for(3)):
            with prof.step():
                model(rows)
    trace = xsp.load(tmp_path / "run")
    output_bytes = 512 * 1024 * 4
    [(taken,)] = trace.sql("SELECT alloc_bytes FROM merged WHERE kind = 'module' AND name = '0'").fetchall()
    assert output_bytes <= taken < 16 * output_bytes


def test_a_device_that_failed_does_not_keep_torch_profiler_from_stopping(monkeypatch):
    """torch.profiler waits for the device before it stops; after a failed kernel it would go on, and end in a crash."""

    class Profile:
        use_device: str | None = "cuda"
        stopped = False
        kineto_results = None

        def __exit__(self, *error: object) -> None:
            if self.use_device is not None:
                raise RuntimeError("device-side assert")
            self.stopped = True

    def fail() -> None:
        raise RuntimeError("device-side assert")

    collector, profile = TorchOps(), Profile()
    collector.start(Level.OP, describe=False)  # what stops the counters expects that they were started
    collector.stop()
    list(collector.spans())
    collector._profile, collector._records_device = profile, True
    monkeypatch.setattr(devices, "wait", fail)
    collector.stop()
    assert (profile.stopped, list(collector.spans())) == (True, [])
    assert "1 steps after which the device had failed, and device work may be missing" in list(collector.notes())
