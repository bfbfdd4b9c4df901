"""What every device answers: the processor, the stand-in that all machines have, and a GPU where there is one.

A device of your own runs here too: add it to `DEVICES`.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402

import xsp  # noqa: E402
from xsp import bench  # noqa: E402
from xsp.bench import rounds  # noqa: E402
from xsp.bench.environment import current_environment  # noqa: E402
from xsp.bench.spec import CacheState, Spec, Status, Timing  # noqa: E402
from xsp.device import devices, energy  # noqa: E402
from xsp.device.ceilings import Ceiling  # noqa: E402
from xsp.device.contract import Accelerator, Device, Elapsed, Fault  # noqa: E402
from xsp.device.processor import Processor  # noqa: E402
from xsp.errors import DeviceError, PluginError, ShareError  # noqa: E402

DEVICES = ["cpu", "standin:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    standin.install(tmp_path / "site", monkeypatch)
    if request.param.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    found = devices.of(request.param)
    if found.obstacle():
        pytest.skip(str(found.obstacle()))
    return found


def tensors(device: Device, *sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size, size, device=device.torch_name) for size in sizes]


def test_it_is_found_by_its_identifier_and_listed(device: Device) -> None:
    assert devices.of(device.id) == device
    assert device in devices.present()
    assert devices.is_id(device.id)
    assert device.count() > device.index
    assert device.name


def test_its_random_values_are_on_it_and_equal_for_equal_seeds(device: Device) -> None:
    first, second, other = (
        torch.randn(64, generator=device.generator(seed), device=device.torch_name) for seed in (1, 1, 2)
    )
    assert str(first.device) == device.torch_name
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_calls_are_timed_and_each_set_of_arguments_is_used(device: Device) -> None:
    (large,) = tensors(device, 256)
    seen: list[int] = []

    def product(number: int) -> torch.Tensor:
        seen.append(number)
        return torch.mm(large, large)

    few, many = (device.timed(product, [(number,) for number in range(count)]) for count in (1, 32))
    assert isinstance(few, Elapsed)
    assert 0 < few.ns < many.ns
    assert few.issue_ns > 0
    assert set(seen) == set(range(32))
    if device.is_host:
        assert few.ns == few.issue_ns


@pytest.mark.slow
def test_what_precedes_each_call_is_not_timed(device: Device) -> None:
    large, small = tensors(device, 1024, 2)
    calls: list[str] = []

    def before() -> None:
        calls.append("before")
        for _ in range(20):
            torch.mm(large, large)

    plain = device.timed(lambda: small.add(1), [()])
    apart = device.timed(lambda: calls.append("call") or small.add(1), [(), (), ()], before)
    device.synchronize()
    assert calls == ["before", "call"] * (len(calls) // 2)
    assert len(calls) >= 6
    long = device.timed(before, [()])
    assert apart.ns < long.ns or apart.ns < 100 * plain.ns


def test_what_evicts_its_caches_is_larger_than_they_are(device: Device) -> None:
    sizes = [size for _, size in device.caches()]
    assert sizes == sorted(sizes) or len(sizes) > 1
    assert device.rotated_bytes() >= min(max(sizes, default=0), device.most_rotated_bytes)
    buffer = device.eviction_buffer(1 << 20)
    assert (buffer.nbytes, str(buffer.device)) == (1 << 20, device.torch_name)


def test_a_captured_function_computes_the_same_or_it_says_why_it_cannot(device: Device) -> None:
    (value,) = tensors(device, 4)
    if device.is_host:
        with pytest.raises(NotImplementedError, match="no capture and replay"):
            device.capture(lambda: value.add_(1))
        return
    replay = device.capture(lambda: value.add_(1))
    device.synchronize()
    before = value.clone()
    replay()
    device.synchronize()
    assert torch.equal(value, before + 1)


def test_its_memory_is_known_or_said_to_be_unknown(device: Device) -> None:
    free = device.free_bytes()
    assert free is None or free > 1 << 20
    (value,) = tensors(device, 64)
    needed = device.workspace_bytes(lambda: torch.mm(value, value))
    assert needed is None or needed >= 0
    assert all(isinstance(name, str) for name in device.kernels(lambda: torch.mm(value, value)))


def test_what_is_issued_beside_has_been_done_when_what_follows_is(device: Device) -> None:
    if not isinstance(device, Accelerator):
        assert device.sharing_obstacle() == ""
        return
    values = tensors(device, 8, 8, 8)
    try:
        device.beside([lambda value=value: value.add_(1) for value in values])
    except NotImplementedError:
        return
    total = sum(values[1:], values[0])
    device.synchronize()
    assert torch.equal(total.cpu(), torch.full((8, 8), 6.0))
    assert device.waited(device.launch(), 3).ns > 0


def test_memory_of_the_host_is_pinned_and_read_in_place_or_it_is_said_why_not(device: Device) -> None:
    if device.is_host:
        return
    pinned = device.pinned(torch.ones(64))
    assert torch.equal(pinned, torch.ones(64))
    for ask in (lambda: device.seen(pinned), lambda: device.managed(1 << 20).tensor):
        with contextlib.suppress(NotImplementedError):
            assert str(ask().device) == device.torch_name
    assert isinstance(device.sharing_obstacle(), str)
    held = device.held_bytes()
    assert held is None or held >= 0


def test_its_energy_grows_or_it_has_no_counter(device: Device) -> None:
    before = device.energy_joules()
    (value,) = tensors(device, 64)
    device.waited(lambda: torch.mm(value, value))
    after = device.energy_joules()
    assert (before is None) == (after is None)
    assert before is None or (after or 0.0) >= before


def test_an_error_of_a_block_is_none_of_the_device(device: Device) -> None:
    left, right = tensors(device, 2, 3)
    with pytest.raises(RuntimeError) as caught:
        torch.mm(left, right)
    assert device.fault(caught.value) is None


def test_its_identity_is_plain_and_tells_it_from_others(device: Device) -> None:
    identity = device.identity()
    assert json.loads(json.dumps(identity)) == identity
    environment = current_environment(device)
    assert environment.hash == current_environment(device).hash
    assert json.dumps(device.circumstances()) is not None
    assert isinstance(device.disturbance(), str)
    if device.is_host:
        assert environment.device is None
    else:
        assert environment.device is not None
        assert (environment.device["kind"], environment.device["name"]) == (device.kind, device.name)
        assert environment.inner_cache_bytes == max((size for _, size in device.caches()), default=0)
        assert environment.hash != current_environment().hash
        assert environment.processor_note == ""


def test_what_runs_and_the_environment_of_the_processor_note_of_it_is_plain(device: Device) -> None:
    for facts in (device.properties(), device.described(), device.libraries(), dict(device.blocking_variables)):
        assert json.loads(json.dumps(facts)) == facts
    assert device.properties()["name"] == device.described()["name"] == device.name
    assert device.may_be_here()
    assert isinstance(device.is_used(), bool)
    assert isinstance(device.uuid, str)
    if not device.is_host:
        listed = Processor().identity()["devices"]
        assert device.described() in listed, "the processor's timings of transfers are of these devices"
    assert (device in devices.used()) == (device.is_used() and not device.is_host)


def test_its_own_operators_and_precisions_can_be_called(device: Device) -> None:
    for function, substitute in devices.operators(device.kind).items():
        assert callable(getattr(torch.nn.functional, function.__name__))
        assert callable(substitute)
    names = [name for name, product in device.own_products(64) if product() is not None]
    assert len(set(names)) == len(names)


def test_memory_that_processes_share_is_there_or_it_is_said_why_not(device: Device) -> None:
    if not device.shares:
        with pytest.raises(ShareError):
            device.sharing()
        return
    assert device.sharing().label == device.id


def test_its_ceiling_is_known_or_said_to_be_unknown(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = device.ceiling()
    assert isinstance(found, Ceiling) or "xsp doctor --measure" in found


@pytest.mark.parametrize("state", list(CacheState))
def test_a_sitting_times_blocks_on_it(device: Device, state: CacheState) -> None:
    graph = xsp.graph.of(torch.nn.Linear(64, 64), torch.zeros(8, 64))
    specs = [spec for spec, _ in bench.specs(graph, threads=1, state=state)]
    found: dict[int, Timing] = {}
    rounds.sit(
        specs, found.__setitem__, lambda place: None, seconds=20, rotated_bytes=device.rotated_bytes(),
        limit_bytes=1 << 28, device=device,
    )  # fmt: skip
    (timing,) = found.values()
    assert timing.status in bench.TIMED
    assert timing.trimmed_ns is not None
    assert (timing.device_ns is None, timing.cold_ns is None) == (device.is_host, device.is_host)
    if not device.is_host:
        assert timing.trimmed_ns == timing.device_ns
        assert (timing.host_ns or 0) > 0


def test_nothing_stays_behind_after_an_error(device: Device) -> None:
    def wrong() -> None:
        raise ValueError("no such shape")

    with pytest.raises(ValueError, match="no such shape"):
        device.timed(wrong, [()])
    device.synchronize()
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert device.timed(lambda: torch.ones(4, device=device.torch_name).add(1), [()]).ns > 0


# --- the clocks of the stand-in, which are stated ---------------------------------------------------------------


def test_the_time_of_a_device_has_no_part_of_the_host() -> None:
    device, value = standin.StandIn(), torch.ones(250)
    elapsed = device.timed(lambda: value.add(1), [()] * 8)
    assert elapsed == Elapsed(8 * (standin.LAUNCH_NS + 1), 8 * standin.ISSUE_NS)


def test_calls_that_take_the_host_longer_than_the_spin_are_issued_again_behind_a_longer_one() -> None:
    device, value, calls = standin.StandIn(), torch.ones(250), []
    elapsed = device.timed(lambda: calls.append(0) or value.add(1), [()] * 200)
    assert elapsed == Elapsed(200 * (standin.LAUNCH_NS + 1), 200 * standin.ISSUE_NS)
    assert len(calls) == 400


def test_a_call_that_reads_a_value_is_said_to_wait() -> None:
    device, value = standin.StandIn(), torch.ones(())
    assert device.timed(lambda: value.add(1).item(), [()]).waits


def test_streams_run_beside_each_other_and_all_are_waited_for() -> None:
    device = standin.StandIn()
    device.spin(1000)
    with device.stream(1):
        device.spin(3000)
    device.synchronize()
    assert device.host_ns() == 3000


def test_a_replay_takes_the_host_one_call() -> None:
    device, value = standin.StandIn(), torch.ones(250)
    replay = device.capture(lambda: [value.add(1) for _ in range(50)])
    assert device.timed(replay, [()]) == Elapsed(50 * (standin.LAUNCH_NS + 1), standin.ISSUE_NS)


def test_cold_caches_take_longer() -> None:
    device, value = standin.StandIn(), torch.ones(250)
    buffer = device.eviction_buffer(device.rotated_bytes())
    cold = device.timed(lambda: value.add(1), [()] * 3, lambda: buffer.add_(1))
    assert cold.ns == 6 * (standin.LAUNCH_NS + 1)


def test_the_energy_of_a_call_is_that_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device, value = standin.StandIn(), torch.ones(250)
    monkeypatch.setenv(standin.VARIABLE, json.dumps({"watts": 500}))
    monkeypatch.setattr(energy, "LEAST_UPDATES", 40)
    monkeypatch.setattr(energy, "POLL_NS", 50_000)
    call_ns = standin.ISSUE_NS + standin.LAUNCH_NS + 1
    joules = energy.joules_per_call(device, lambda calls: device.waited(lambda: value.add(1), calls))
    assert joules == pytest.approx(500 * call_ns / 1e9, rel=0.05)


def test_a_device_without_a_counter_or_with_one_that_stands_has_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    device, value = standin.StandIn(), torch.ones(250)
    monkeypatch.setattr(energy, "MOST_NS", 1_000_000)
    calls: list[int] = []

    def repeat(count: int) -> object:
        calls.append(count)
        return device.waited(lambda: value.add(1), min(count, 100))

    assert energy.joules_per_call(device, repeat) is None
    assert calls == []
    monkeypatch.setenv(standin.VARIABLE, json.dumps({"watts": 0}))
    assert energy.joules_per_call(device, repeat) is None
    assert calls != []


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["memory", "lost"])
def test_a_fault_marks_the_block_and_only_a_lost_device_ends_the_sitting(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standin.install(tmp_path, monkeypatch, faults={"aten::linear": fault})
    device = devices.of("standin")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    specs = [spec for spec, _ in bench.specs(xsp.graph.of(net, torch.zeros(2, 4)), threads=1)]
    found: dict[int, Timing] = {}
    options = {"seconds": 20, "rotated_bytes": 1 << 20, "limit_bytes": 1 << 28, "device": device}
    if fault == "lost":
        with pytest.raises(rounds.DeviceLost, match="illegal address"):
            rounds.sit(specs, found.__setitem__, lambda place: None, **options)
        assert [(timing.op, timing.status) for timing in found.values()] == [("aten::linear", Status.FAILED)]
        assert found[0].reason == "RuntimeError: stand-in error: an illegal address was used"
    else:
        rounds.sit(specs, found.__setitem__, lambda place: None, **options)
        assert {timing.op: timing.status for timing in found.values()} == {
            "aten::linear": Status.TOO_LARGE, "aten::relu": Status.OK,
        }  # fmt: skip


def test_what_is_not_here_is_one_error_that_names_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path, monkeypatch, count=2)
    known = r"here are cpu, .*standin:0, standin:1"
    for name, message in (
        ("standin:2", f"there is no device standin:2 here; {known}"),
        ("standinn", f"there is no device 'standinn'; did you mean standin\\?; {known}"),
        ("standin:x", "'standin:x' is not a device: write standin:0"),
        ("cpu:1", "'cpu:1' is not a device: write cpu"),
    ):
        with pytest.raises(DeviceError, match=message):
            devices.of(name)
    monkeypatch.setenv(standin.VARIABLE, '{"count": 0}')
    with pytest.raises(DeviceError, match=r"no device standin here \(no stand-in was put in\); here are cpu"):
        devices.of("standin")


def test_a_class_that_does_not_answer_all_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.install(tmp_path, monkeypatch)
    points = "[xsp.devices]\nhalf = half_device:Half\nother = half_device:Other\n"
    (tmp_path / "standin-1.dist-info" / "entry_points.txt").write_text(points)
    (tmp_path / "half_device.py").write_text(
        "from xsp.device.contract import Accelerator\n\n\nclass Half(Accelerator):\n    kind = 'half'\n\n\n"
        "class Other:\n    pass\n"
    )
    with pytest.raises(PluginError, match="it has no between_ns, caches, count"):
        devices.of("half")
    with pytest.raises(PluginError, match=r"is no subclass of xsp.device.contract.Device"):
        devices.of("other")
    assert "half:0" not in [device.id for device in devices.present()]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", Fault.OUT_OF_MEMORY),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", Fault.OUT_OF_MEMORY),
        ("CUDA error: an illegal memory access was encountered", Fault.LOST),
        ("CUDA error: device-side assert triggered", Fault.LOST),
        ("HIP error: the operation cannot be performed in the present state", Fault.LOST),
        ("mat1 and mat2 shapes cannot be multiplied (2x2 and 3x3)", None),
    ],
)
def test_errors_of_cuda_are_told_apart(message: str, fault: Fault | None) -> None:
    from xsp.device.cuda import Cuda

    assert Cuda().fault(RuntimeError(message)) is fault


def test_a_driver_that_is_too_old_is_one_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by …"

    def warned() -> bool:
        warnings.warn(f"CUDA initialization: {text}", stacklevel=2)
        return False

    def refused() -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch.cuda, "is_available", warned)
    monkeypatch.setattr(torch.cuda, "init", refused)
    said = r"no device cuda:0 here \(.*is too old \(found version 11040\): update it, or install a build of PyTorch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeviceError, match=said):
            devices.of("cuda:0")


def test_lowered_clocks_are_said_with_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp.device.cuda import Cuda

    for bits, text in ((0x0, ""), (0x1, ""), (0x4 | 0x20, "were lowered by the power limit and its temperature")):
        figures = {"clocks_throttle_reasons.active": float(bits)}
        monkeypatch.setattr(Cuda, "_smi", lambda self, more=(), figures=figures: figures)
        assert Cuda().disturbance() == (f"the clocks of cuda:0 {text}" if text else "")


def test_a_build_for_amd_has_no_device_of_nvidia_and_the_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    from xsp.device.cuda import Cuda, Hip

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for hip, counts in ((None, (3, 0)), ("6.4", (0, 3))):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert (Cuda.count(), Hip.count()) == counts


def test_a_spec_has_the_key_of_the_same_work_on_any_device() -> None:
    graph = xsp.graph.of(torch.nn.Linear(64, 64), torch.zeros(8, 64))
    ((spec, _),) = bench.specs(graph, threads=1)
    assert isinstance(spec, Spec)
    assert spec.key == bench.specs(graph, environment=current_environment(standin.StandIn()))[0][0].key
