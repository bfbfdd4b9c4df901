"""Weights on a device in modules, with a stand-in for the driver: its memory is the host's, and so are the tensors."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakecuda
import pytest
from depth import deep, first
from sharing import StoreProcess

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from test_share_modules import Odd, Small, in_shards, small, written  # noqa: E402

import xsp  # noqa: E402
from xsp import share  # noqa: E402
from xsp.device import cudasharing as driver  # noqa: E402
from xsp.errors import ShareError  # noqa: E402
from xsp.share import devices, modules  # noqa: E402

if torch.version.cuda is None:
    pytest.skip("this PyTorch is built without CUDA", allow_module_level=True)


def as_host(mapping: devices.DeviceMapping) -> Any:
    array: Any = type("Bytes", (ctypes.c_char * mapping.nbytes,), {}).from_address(mapping.address)
    array.mapping = mapping
    return torch.frombuffer(array, dtype=torch.uint8)


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> fakecuda.StandIn:
    return fakecuda.StandIn(fakecuda.build_library(tmp_path_factory.mktemp("standin")))


@pytest.fixture
def there(standing: fakecuda.StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreProcess]:
    monkeypatch.setattr(driver, "LIBRARY", str(standing.library))
    monkeypatch.setenv("STANDIN_LOG", str(standing.log))
    monkeypatch.setattr(modules, "bytes_on_device", as_host)
    with fakecuda.serving(standing, tmp_path / "s") as found:
        yield found


def attach(module: Any, source: Any, there: StoreProcess, **more: Any) -> Any:
    return share.attach(module, source, device="cuda:0", folder=there.folder, **more)


def test_a_module_on_a_device_is_the_same_to_the_last_bit(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    path = written(tmp_path, module.state_dict())
    with share.empty():
        other = Small()
    found = attach(other, path, there)
    assert (found.hit, found.shared) == (False, 5)
    assert torch.equal(other(x), module(x))
    assert other.head.weight is other.embed.weight
    assert all(modules.is_shared(each) for each in other.parameters())
    assert not any(modules.is_shared(each) for each in other.buffers())
    assert all(each.data_ptr() % 512 == 0 for each in other.parameters())
    assert fakecuda.attached_pids(there.folder) == [os.getpid()]
    third = small(3)
    assert attach(third, path, there).hit
    assert third.head.weight.data_ptr() == other.head.weight.data_ptr()
    for tries in (
        lambda: third.head.weight.add_(1),
        lambda: third.train(),
        lambda: third.requires_grad_(True),
    ):
        with pytest.raises(RuntimeError, match="shared by several processes"):
            tries()
    assert share.detach(third) == found.shared_bytes
    third.train()
    del other
    gc.collect()
    fakecuda.wait_for(lambda: fakecuda.attached_pids(there.folder) == [])


@pytest.mark.parametrize("kind", first(1, [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]))
def test_other_types_and_shapes_of_nothing_on_a_device(there: StoreProcess, tmp_path: Path, kind: Any) -> None:
    module, other = Odd(kind), Odd(kind)
    attach(other, written(tmp_path, module.state_dict()), there)
    for name, each in other.named_parameters():
        assert torch.equal(each, getattr(module, name))


@pytest.mark.slow
def test_shards_and_casts_on_a_device(there: StoreProcess, tmp_path: Path) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).eval()
    state = plain.state_dict()
    state["0.bias"] = state["0.bias"].half().float()
    plain.load_state_dict(state)
    index = in_shards(tmp_path / "c", {**state, "0.bias": state["0.bias"].half()})
    other = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
    found = attach(other, index, there, cast=True)
    assert found.private["0.bias"] == "float16 in the file, float32 here"
    assert found.key.count("sha256:") == 3
    given = torch.randn(5, 8)
    assert torch.equal(other(given), plain(given))
    assert len(fakecuda.status(there.folder)["objects"]) == 3


@pytest.mark.slow
def test_what_writes_below_python_is_found_and_harms_nobody_after(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    path = written(tmp_path, module.state_dict())
    other = small(2)
    attach(other, path, there)
    torch._foreach_add_([other.first.weight.detach()], 1.0)
    assert not torch.equal(other(x), module(x))
    (found,) = devices.check(there.folder)
    assert found["attached"] == [os.getpid()]
    assert "in first.weight" in found["corrupted"]
    attach(other, path, there)  # the same module again: its own memory is freed with it
    assert torch.equal(other(x), module(x))
    gc.collect()
    fakecuda.wait_for(lambda: len(fakecuda.status(there.folder)["objects"]) == 1)


@pytest.mark.slow
def test_each_tier_of_a_cold_start_is_in_the_trace(there: StoreProcess, tmp_path: Path) -> None:
    path = written(tmp_path, small(77).state_dict())
    with xsp.profile("cold", levels="M/L", warmup=0, settle=0, samples=False, out=tmp_path / "run") as prof:
        for _ in range(2):
            with prof.step():
                with share.empty():
                    module = Small()
                attach(module, path, there)
                module(torch.randn(2, 3, 8, 8))
    wanted = "span_id, parent_id, name, step, start_ns, start_ns + dur_ns"
    rows = xsp.load(tmp_path / "run").spans.filter("name LIKE 'share.%'").order("start_ns").project(wanted).fetchall()
    names = {identity: name for identity, _, name, *_ in rows}
    steps: dict[int, list[str]] = {}
    for _, _, name, step, *_ in rows:
        steps.setdefault(step, []).append(name)
    first, second = (steps[step] for step in sorted(steps))
    on_host, opened = ["share.map"], ["share.device.open", "share.assign"]
    assert first == [
        "share.attach", "share.miss", "share.copy", *on_host, "share.device.miss", "share.device.copy", *opened
    ]  # fmt: skip
    assert second == ["share.attach", "share.hit", *on_host, "share.device.hit", *opened]
    parents = {name: names.get(parent) for _, parent, name, *_ in rows}
    assert parents["share.device.copy"] == "share.device.miss"
    assert {parents[name] for name in ("share.device.miss", "share.device.hit", "share.device.open")} == {
        "share.attach"
    }


@pytest.mark.parametrize(
    ("device", "says"),
    [
        deep("cuda:7", "devices here is 1"),
        deep("nonsense", "Expected one of"),
        deep("meta", "on the host and on NVIDIA's devices"),
    ],
)
def test_devices_that_cannot_be_are_one_error(device: str, says: str, there: StoreProcess, tmp_path: Path) -> None:
    module = small()
    weight = module.head.weight
    with pytest.raises(ShareError, match=says):
        share.attach(module, written(tmp_path, module.state_dict()), device=device, folder=there.folder)
    assert module.head.weight is weight


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_no_device_is_one_error(device: str, tmp_path: Path) -> None:
    with pytest.raises(ShareError, match=r"driver|NVIDIA"):
        share.attach(small(), tmp_path / "no.safetensors", device=device, folder=tmp_path / "s")


@pytest.mark.slow
def test_the_host_is_a_device_too(there: StoreProcess, tmp_path: Path) -> None:
    module, x = small(), torch.randn(2, 3, 8, 8)
    other = small(2)
    share.attach(other, written(tmp_path, module.state_dict()), device="cpu", folder=there.folder)
    assert torch.equal(other(x), module(x))
    assert fakecuda.status(there.folder)["objects"] == []


def test_buffers_that_no_file_has_are_to_go_to_the_device() -> None:
    module = small()
    *_, volatile, others = modules._slots(module, torch.device("cuda:0"))
    assert (volatile, others) == ([], [(module, "scale")])
    assert modules._slots(module, torch.device("cpu"))[3] == []
