"""The CUPTI collector in its process: on a scripted binding everywhere, see `fakecupti`; for real in test_gpu."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fakecupti import KERNEL, MARKER, OVERHEAD, RUNTIME, FakeCupti, FakeLibcupti, record

torch = pytest.importorskip("torch")

import xsp  # noqa: E402
from xsp.errors import PluginError, UsageError  # noqa: E402
from xsp.schema import Level  # noqa: E402
from xsp.testing import check_collector  # noqa: E402
from xsp_collectors import kinetouse  # noqa: E402
from xsp_collectors.cuda import claim, cupti, cuptitrial, libcupti, libraries, recordbuffers, recording  # noqa: E402
from xsp_collectors.cuda.cupti import CuptiActivities  # noqa: E402
from xsp_collectors.torchops import TorchOps  # noqa: E402

LIBRARY = torch.library.Library("xsp_test", "DEF")
LIBRARY.define("gemm(Tensor x) -> Tensor")
DEVICE: list[FakeCupti] = []


@torch.library.impl(LIBRARY, "gemm", "CPU")
def _gemm(x: Any) -> Any:
    DEVICE[-1].gemm()
    return x + 1


class Gemm(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.ops.xsp_test.gemm(x)


NET = torch.nn.Sequential(Gemm(), Gemm())


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    """A process with a scripted CUPTI, in which CUDA is in use, and whose library's buffers are not known."""
    fake = FakeCupti()
    monkeypatch.setattr(recordbuffers, "of_library", lambda path: None)
    DEVICE.append(fake)
    monkeypatch.setattr(cupti, "_cuda_is_in_use", lambda: True)
    monkeypatch.setattr(cupti, "_wait_for_devices", lambda: None)
    monkeypatch.setattr(cuptitrial, "_small_kernel", fake.gemm)
    monkeypatch.setattr(libcupti, "incompatibility", lambda parts: None)
    monkeypatch.setattr(recording.HostClock, "install", lambda self: True)
    monkeypatch.setitem(sys.modules, "cupti.cupti", fake)
    return fake


def run(out: Path, **settings: Any) -> dict[str, Any]:
    """Profile the net, and return the run's run.json."""
    with xsp.profile("net", out=out, levels="M/L/G", samples=False, **settings) as prof:
        for _ in range(prof.schedule.steps_for(1)):
            with prof.step():
                NET(torch.ones(2))
    return json.loads((out / "run.json").read_text())


def test_it_holds_the_contract(device):
    seen = check_collector(CuptiActivities(), device.gemm)
    assert Counter((span.kind, span.name) for span in seen) == {
        ("call", "cublasGemmEx"): 1, ("launch", "cudaLaunchKernel"): 1, ("kernel", "gemm(float*, float*, int)"): 1,
    }  # fmt: skip
    assert (device.enabled, device.subscribed, device.threads) == (set(), False, 0)


def with_buffers(device: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> FakeLibcupti:
    """Make the scripted CUPTI deliver bytes in buffers."""
    device.library = FakeLibcupti()
    made = recordbuffers.of_loaded(device.library)
    monkeypatch.setattr(recordbuffers, "of_library", lambda path: made)
    return device.library


def test_it_holds_the_contract_with_buffers_too_and_no_object_is_made(device, monkeypatch):
    with_buffers(device, monkeypatch)
    monkeypatch.setattr(device, "activity_register_callbacks", None)
    collector = CuptiActivities()
    seen = check_collector(collector, device.gemm)
    assert [(span.kind, span.name) for span in seen] == [
        ("launch", "cudaLaunchKernel"), ("call", "cublasGemmEx"), ("kernel", "gemm(float*, float*, int)"),
    ]  # fmt: skip
    assert collector.details()["records"] == "CUPTI's buffers"


def test_if_the_trial_fails_with_buffers_then_records_are_the_bindings_objects(device, monkeypatch):
    library = with_buffers(device, monkeypatch)
    library.status = 1
    device.library = None
    collector = CuptiActivities()
    assert collector.trial() is None
    assert collector.details()["records"] == "objects of cupti-python"
    assert len(check_collector(collector, device.gemm)) == 3


@pytest.mark.slow
def test_a_run_has_layers_operators_library_calls_launches_and_kernels_in_one_tree(device, tmp_path):
    content = run(tmp_path / "run", kernels="cupti")
    assert (content["kernels"]["source"], "cupti" in content["collectors"]) == ("cupti", True)
    rows = xsp.load(tmp_path / "run").sql(
        "SELECT s.name, s.grade, p.name, o.name, l.name FROM spans s JOIN spans p ON p.span_id = s.parent_id "
        "JOIN spans o ON o.span_id = p.parent_id JOIN spans l ON l.span_id = o.parent_id WHERE s.kind = 'kernel'"
    )
    wanted = ("gemm(float*, float*, int)", "exact", "cublasGemmEx", "xsp_test::gemm")
    assert sorted(set(rows.fetchall())) == [(*wanted, "0"), (*wanted, "1")]


@pytest.mark.slow
def test_it_is_switched_on_after_kineto_which_registers_its_own_buffers_and_off_before(device, tmp_path, monkeypatch):
    order: list[str] = []
    for kind, verb in ((CuptiActivities, "start"), (CuptiActivities, "stop"), (TorchOps, "start"), (TorchOps, "stop")):
        plain, what = getattr(kind, verb), f"{kind.name} {verb}"
        told = lambda self, *args, p=plain, w=what, **named: order.append(w) or p(self, *args, **named)  # noqa: E731
        monkeypatch.setattr(kind, verb, told)
    run(tmp_path / "run", kernels="cupti")
    deepest = order[order.index("cupti start") - 1 :][:4]
    assert deepest == ["torchops start", "cupti start", "cupti stop", "torchops stop"]


@pytest.mark.parametrize(
    ("holder", "said"),
    [
        ("nsys", "CUPTI is held by nsys"),
        ("CUPTI", "another client, which gives no name"),
        ("CUPTI for <not provided>", "another client, which gives no name"),  # as libcupti 13.0 writes it
        ("CUPTI for somebody", "CUPTI is held by CUPTI for somebody"),
    ],
)
def test_cupti_that_is_taken_is_an_error_if_it_was_asked_for(device, tmp_path, monkeypatch, holder, said):
    device.holder = holder
    monkeypatch.setattr(claim, "_only_kineto_can_hold_it", lambda: False)
    with pytest.raises(PluginError, match=rf"kernels=cupti: .*{said}.*--kernels kineto"):
        run(tmp_path / "run", kernels="cupti")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_otherwise_device_work_comes_from_kineto_and_the_run_says_why(device, tmp_path, monkeypatch):
    device.holder = "nsys"
    monkeypatch.setattr(TorchOps, "trial", lambda self: None)
    content = run(tmp_path / "run")
    assert content["kernels"]["source"] == "kineto"
    (note,) = [note["text"] for note in content["notes"] if "not from cupti" in note["text"]]
    assert "CUPTI is held by nsys" in note


@pytest.mark.slow
def test_beside_a_kineto_that_keeps_its_subscription_records_are_taken_without_one(device, tmp_path, monkeypatch):
    def use() -> bool:
        device.holder = "CUPTI for somebody"
        return True

    monkeypatch.setattr(kinetouse, "use_once", use)
    monkeypatch.setattr(claim, "_kineto_names", {None})
    assert run(tmp_path / "run", kernels="cupti")["kernels"]["source"] == "cupti"
    kernels = xsp.load(tmp_path / "run").sql("SELECT name FROM spans WHERE kind = 'kernel'").fetchall()
    assert set(kernels) == {("gemm(float*, float*, int)",)}


def test_what_it_launches_before_a_step_and_waits_for_after_it_is_not_the_programs():
    """A launch takes CUPTI's first buffer and costs milliseconds: the step begins after it."""
    thread = threading.get_native_id()
    collector = CuptiActivities()
    collector._names = type(collector._names)(FakeCupti())
    collector._threads.has_native_ids = True
    collector._begun_ns, collector._stopped_ns = 20_000, 90_000
    collector._starting_thread = collector._stopping_thread = thread
    made = []
    for correlation, start in ((1, 10_000), (2, 30_000), (3, 95_000)):
        times = {"start": start, "end": start + 2000, "correlation_id": correlation}
        made += [record(RUNTIME, thread, cbid=211, **times), record(KERNEL, **{**times, "end": start + 5000})]
    made += [record(OVERHEAD, thread, start=5000, end=15_000), record(OVERHEAD, thread, start=25_000, end=26_000)]
    made.append(record(RUNTIME, thread + 1, start=12_000, end=13_000, cbid=211, correlation_id=4))
    collector._records.complete(made)
    seen = [(span.kind, span.start_ns) for span in collector.spans()]
    assert sorted(seen) == [("kernel", 30_000), ("launch", 12_000), ("launch", 30_000), ("overhead", 25_000)]


def test_a_clock_that_is_off_is_not_used(device):
    device.clock_off_ns = 250_000
    reason = CuptiActivities().trial()
    assert reason is not None
    assert "µs off the host's, more than 100 µs" in reason


def test_a_cupti_that_records_nothing_does_not_pass_the_trial(device, monkeypatch):
    monkeypatch.setattr(device, "activity_enable", lambda kind: None)
    assert "CUPTI did not record a trial kernel" in (CuptiActivities().trial() or "")
    assert device.subscribed is False


@pytest.mark.slow
def test_before_cuda_is_in_use_there_is_no_trial_and_it_comes_with_the_first_step_that_uses_it(
    device, tmp_path, monkeypatch
):
    used = []
    monkeypatch.setattr(cupti, "_cuda_is_in_use", lambda: bool(used))
    monkeypatch.setattr(Gemm, "forward", lambda self, x: used.append(1) or torch.ops.xsp_test.gemm(x))
    content = run(tmp_path / "run", kernels="cupti")
    assert content["kernels"]["details"]["clock_error_ns"] is not None
    assert "1 steps that began before CUDA was in use" in [note["text"] for note in content["notes"]]


@pytest.mark.slow
def test_if_the_trial_fails_then_kineto_takes_over(device, tmp_path, monkeypatch):
    used = []
    monkeypatch.setattr(cupti, "_cuda_is_in_use", lambda: bool(used))
    monkeypatch.setattr(Gemm, "forward", lambda self, x: used.append(1) or x)
    monkeypatch.setattr(TorchOps, "trial", lambda self: None)
    device.holder = "cuda-gdb"
    content = run(tmp_path / "run")
    assert content["kernels"]["source"] == "kineto"
    assert any("cupti gave up recording device work, which comes from kineto" in n["text"] for n in content["notes"])


@pytest.mark.slow
def test_if_cupti_cannot_be_switched_on_any_more_then_kineto_takes_over(device, tmp_path, monkeypatch):
    monkeypatch.setattr(TorchOps, "trial", lambda self: None)
    with xsp.profile("net", out=tmp_path / "run", levels="M/L/G", samples=False, kernels="cupti") as prof:
        monkeypatch.setattr(device, "activity_register_callbacks", lambda request, complete: 1 / 0)
        for _ in range(prof.schedule.steps_for(1)):
            with prof.step():
                NET(torch.ones(2))
    content = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (content["kernels"]["wanted"], content["kernels"]["source"]) == ("cupti", "kineto")
    assert "start failed: ZeroDivisionError" in content["kernels"]["reasons"]["cupti"]


def test_a_kind_of_record_that_cupti_refuses_is_said_and_the_others_are_recorded(device):
    device.unsupported = {MARKER}
    collector = CuptiActivities()
    collector.open()
    collector.start(Level.KERNEL, describe=False)
    device.gemm()
    collector.stop()
    assert {span.level for span in collector.spans()} == {Level.RUNTIME, Level.KERNEL}
    collector.close()
    assert "CUPTI does not record marker here" in list(collector.notes())


def test_records_that_cupti_dropped_are_counted(device):
    collector = CuptiActivities()
    collector.open()
    collector.start(Level.KERNEL, describe=False)
    device.dropped = 12
    collector.stop()
    collector.spans()
    collector.close()
    assert "12 records that CUPTI dropped because no buffer was free" in list(collector.notes())


def test_a_device_that_failed_is_said_and_what_was_recorded_until_then_is_kept(device, monkeypatch):
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(cupti, "_wait_for_devices", fail)
    collector = CuptiActivities()
    collector.open()
    collector.start(Level.KERNEL, describe=False)
    device.gemm()
    collector.stop()
    assert [span.kind for span in collector.spans()] == ["launch", "call", "kernel"]
    collector.close()
    assert any("the device had failed" in note for note in collector.notes())


def test_device_work_at_times_that_are_not_the_steps_is_counted_and_left_out(device):
    collector = CuptiActivities()
    collector.open()
    collector.start(Level.KERNEL, describe=False)
    device.emit(10, start=5000, end=9000, correlation_id=1, name="of another clock")
    collector.stop()
    assert list(collector.spans()) == []
    collector.close()
    assert "1 kernels or copies at times that are not the step's, which were left out" in list(collector.notes())


def test_at_the_library_rung_only_ranges_are_recorded(device):
    seen = check_collector(CuptiActivities(), device.gemm, rung=Level.LIBRARY)
    assert {span.kind for span in seen} == {"call"}


def test_a_forked_child_leaves_cupti_alone(device):
    collector = CuptiActivities()
    collector.open()
    collector.start(Level.KERNEL, describe=False)
    if (child := os.fork()) == 0:
        collector.stop()
        collector.close()
        os._exit(0 if device.enabled and device.subscribed else 1)
    assert os.waitpid(child, 0)[1] == 0
    collector.stop()
    collector.close()


def test_the_libraries_are_asked_to_name_their_calls_and_the_environment_is_restored(tmp_path, monkeypatch):
    monkeypatch.delenv(libraries.INJECTION, raising=False)
    monkeypatch.setenv("CUBLAS_NVTX_LEVEL", "2")
    asked = libraries.Injection(tmp_path / "libcupti.so.13")
    asked.install(is_too_late=False)
    assert os.environ[libraries.INJECTION] == str(tmp_path / "libcupti.so.13")
    assert (os.environ["CUBLAS_NVTX_LEVEL"], os.environ["CUDNN_NVTX_LEVEL"]) == ("2", "1")
    asked.remove()
    assert (libraries.INJECTION in os.environ, os.environ["CUBLAS_NVTX_LEVEL"]) == (False, "2")
    late = libraries.Injection(tmp_path / "libcupti.so.13")
    late.install(is_too_late=True)
    assert "CUDA was in use before the profile began" in next(late.notes(calls=0, kernels=3))


def test_the_clock_that_cupti_is_given_is_native_and_reads_nanoseconds_since_the_epoch():
    address = recording.now_address()
    if address is None:
        pytest.skip("there is no libstdc++ here")
    before = time.time_ns()
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(address)()
    assert before - 1000 <= read <= time.time_ns() + 1000


# --- bad worlds -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(libcupti.driver_version() is not None, reason="this machine has an NVIDIA driver")
def test_without_a_driver_it_says_so_and_a_run_that_asks_for_it_does_not_begin(tmp_path):
    reason = CuptiActivities().available() or ""
    assert "libcuda.so.1" in reason or "cupti-python is not installed" in reason
    with pytest.raises(PluginError, match="kernels=cupti: "):
        run(tmp_path / "run", kernels="cupti")
    content = run(tmp_path / "auto")
    assert (content["kernels"]["source"], "cupti" in content["absent"]) == (None, False)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((None, Path("x"), (13, 0, 85), (13, 0, 1)), "there is no NVIDIA driver"),
        (((12, 8), Path("x"), (13, 0, 85), (13, 0, 1)), "the driver supports CUDA 12.8, libcupti is of 13.0.85"),
        (((13, 0), Path("x"), (12, 8, 90), (13, 4, 0)), "pip install --no-deps 'cupti-python~=12.8.0'"),
        (((13, 0), None, None, (13, 0, 1)), "libcupti is not found"),
        (((13, 0), Path("x"), (13, 0, 85), None), "cupti-python is not installed"),
    ],
)
def test_parts_that_do_not_go_together_are_named(parts, said):
    assert said in (libcupti.incompatibility(libcupti.Parts(*parts)) or "")


def test_a_toolkit_whose_library_is_named_by_the_year_has_the_version_of_its_release(tmp_path):
    folder = tmp_path / "extras" / "CUPTI" / "lib64"
    folder.mkdir(parents=True)
    library = folder / "libcupti.so.2025.1.1"
    library.touch()
    assert libcupti._library_version(library) is None
    (folder / "libcupti.so.12").symlink_to(library.name)
    assert libcupti._library_version(library) == libcupti._library_version(folder / "libcupti.so.12") == (12,)
    parts = libcupti.Parts((13, 0), library, (12,), (12, 8, 0))
    assert (libcupti.incompatibility(parts), libcupti.mismatch(parts)) == (None, None)
    (tmp_path / "version.json").write_text('{"cuda_cupti": {"version": "12.8.90"}}')
    assert libcupti._library_version(library) == (12, 8, 90)
    (tmp_path / "version.json").write_text("[")
    assert libcupti._library_version(library) == (12,)


def test_a_library_in_any_folder_named_nvidia_is_not_of_nvidias_wheel(tmp_path):
    folder = tmp_path / "nvidia" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcupti.so.12").touch()
    assert libcupti._library_version(folder / "libcupti.so.12") == (12,)


def test_a_minor_version_apart_is_said_and_left_to_the_trial():
    apart = libcupti.Parts((13, 2), Path("x"), (13, 2, 86), (13, 0, 1))
    assert libcupti.incompatibility(apart) is None
    assert libcupti.mismatch(apart) == "cupti-python 13.0.1 reads the records of libcupti 13.2.86; a trial decides"


def test_a_tool_that_runs_the_program_is_named(device, monkeypatch):
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    assert "CUPTI is held by Nsight Systems (nsys)" in (CuptiActivities().available() or "")


@pytest.mark.parametrize(("setting", "value"), [("TEARDOWN_CUPTI", "1"), ("KINETO_USE_DAEMON", "1")])
def test_a_setting_of_kinetos_that_is_in_the_way_is_named(device, monkeypatch, setting, value):
    monkeypatch.setenv(setting, value)
    assert setting in (CuptiActivities().available() or "")


def test_a_source_that_does_not_exist_is_a_usage_error():
    with pytest.raises(UsageError, match="device work comes from auto, cupti, kineto"):
        xsp.profile("x", kernels="rocm")


def test_a_source_whose_collector_is_not_among_those_asked_for_cannot_be_had(tmp_path):
    with pytest.raises(PluginError, match="kernels=cupti: its collector is not among those that were asked for"):
        run(tmp_path / "run", kernels="cupti", collectors=["modules"])
