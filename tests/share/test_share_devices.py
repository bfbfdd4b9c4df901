"""Weights on a device, with a stand-in for its driver: see `fakecuda.c`. The real one is in `test_share_gpu.py`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakecuda
import pytest
from depth import deep
from devicekills import attach_weights, content
from fakecuda import StandIn, attached_pids, serving, wait_for
from sharing import StoreProcess
from test_share_store import KIB, file_of

from xsp import connections
from xsp.cli import main, share
from xsp.device import cudasharing as driver
from xsp.errors import ShareError
from xsp.share import client, devices, devicestore, wire
from xsp.share.serving import SWEEP_S

MIB = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakecuda.build_library(tmp_path_factory.mktemp("standin"))


@pytest.fixture
def standing(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Have this process find the stand-in, too."""
    found = StandIn(library)
    found.log = tmp_path / "violations.txt"
    monkeypatch.setattr(driver, "LIBRARY", str(library))
    monkeypatch.setenv("STANDIN_LOG", str(found.log))
    return found


@pytest.fixture
def there(standing: StandIn, tmp_path: Path) -> Iterator[StoreProcess]:
    with serving(standing, tmp_path / "s", "--device-capacity", "8MiB") as found:
        yield found


def test_the_stand_in_says_what_it_is(there: StoreProcess) -> None:
    assert fakecuda.status(there.folder)["device"] == {
        "ordinal": 0, "name": "stand-in 0, no GPU", "uuid": fakecuda.UUID
    }  # fmt: skip


@pytest.mark.slow
def test_a_device_without_clients_is_served_for_as_long_as_the_store_runs(there: StoreProcess) -> None:
    keeper = fakecuda.status(there.folder)["pid"]
    time.sleep(connections.ConnectionLimits().header_s + 2 * SWEEP_S)
    assert fakecuda.status(there.folder)["pid"] == keeper


@pytest.mark.slow
def test_the_first_copies_and_the_second_finds_it_on_the_device(there: StoreProcess, tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 7, 3 * MIB + 5)
    first = attach_weights(path, there.folder)
    assert not first.hit
    assert content(first) == b"\7" * (3 * MIB + 5)  # its last bytes, too: it was waited for
    second = attach_weights(path, there.folder)
    assert second.hit
    assert second.mapping.address == first.mapping.address  # a handle is open once a process
    assert attached_pids(there.folder) == [os.getpid()] * 2
    (told,) = fakecuda.status(there.folder)["objects"]
    assert (told["nbytes"], told["hits"], told["corrupted"]) == (4 * MIB, 1, None)
    del first
    gc.collect()
    wait_for(lambda: attached_pids(there.folder) == [os.getpid()])
    assert content(second)[:1] == b"\7"
    del second
    gc.collect()
    wait_for(lambda: attached_pids(there.folder) == [])
    assert fakecuda.status(there.folder)["objects"]  # it stays, for the next one


@pytest.mark.slow
def test_the_host_has_what_is_on_the_device_until_that_is_evicted(there: StoreProcess, tmp_path: Path) -> None:
    held = attach_weights(file_of(tmp_path, "a", 7), there.folder)
    keeper = fakecuda.status(there.folder)["pid"]
    there.wait_for([keeper])
    with pytest.raises(ShareError, match="is attached"):
        devices.evict(held.key[:12], there.folder)
    key = held.key
    del held
    wait_for(lambda: attached_pids(there.folder) == [])
    assert main(["share", "evict", key[:12], "--dir", str(there.folder)]) == 0
    assert fakecuda.status(there.folder)["objects"] == client.status(there.folder)["objects"] == []
    assert fakecuda.allocation_count(keeper) == 0


@pytest.mark.slow
def test_what_is_attached_on_the_device_is_never_evicted(there: StoreProcess, tmp_path: Path) -> None:
    paths = [file_of(tmp_path, str(at), at, 3 * MIB) for at in range(3)]
    kept = attach_weights(paths[0], there.folder)
    attach_weights(paths[1], there.folder)
    wait_for(lambda: attached_pids(there.folder) == [os.getpid()])
    other = attach_weights(paths[2], there.folder)  # in the place of the second
    assert len(fakecuda.status(there.folder)["objects"]) == 2
    with pytest.raises(ShareError, match=rf"do not fit: of 8 MiB, .*\(by process {os.getpid()}\).*device-capacity"):
        attach_weights(paths[1], there.folder)
    assert (content(kept)[:1], content(other)[:1]) == (b"\0", b"\2")
    del kept, other  # the frame of the test lives on in the error that was raised


@pytest.mark.slow
def test_memory_that_others_use_is_made_room_for_by_evicting(standing: StandIn, tmp_path: Path) -> None:
    words = ("--device-capacity", "64MiB")
    with serving(standing, tmp_path / "s", *words, STANDIN_TOTAL=str(8 * MIB)) as there:
        first = attach_weights(file_of(tmp_path, "a", 1, 3 * MIB), there.folder)
        attach_weights(file_of(tmp_path, "b", 2, 3 * MIB), there.folder)
        wait_for(lambda: attached_pids(there.folder) == [os.getpid()])
        third = attach_weights(file_of(tmp_path, "c", 3, 3 * MIB), there.folder)
        says = rf"no room for 4 MiB: 0 B of 8 MiB are free.*attached \(by process {os.getpid()}\).*nvidia-smi"
        with pytest.raises(ShareError, match=says):
            attach_weights(file_of(tmp_path, "d", 4, 3 * MIB), there.folder)
        assert (content(first)[:1], content(third)[:1]) == (b"\1", b"\3")
        assert fakecuda.status(there.folder)["copying_bytes"] == 0
        del first, third


@pytest.mark.parametrize("way", [deep("an attachment"), deep("a check")])
def test_what_was_written_is_found_and_renewed(
    way: str, there: StoreProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_of(tmp_path, "a", 7, 512 * KIB)
    first = attach_weights(path, there.folder)
    check = ["share", "check", "--dir", str(there.folder)]
    assert main(check) == 0
    at = first.tensors[0].offset + (0 if way == "an attachment" else 300 * KIB + 11)
    ctypes.memset(first.mapping.address + at, 8, 1)
    if way == "a check":
        assert main(check) == 1
        said = capsys.readouterr().out
        assert f"DIFFERS from the host at byte {at}, in w; end the processes" in said
        assert f"attached: {os.getpid()}" in said
    if way == "an attachment":  # the first block is always compared; the last is another's turn
        last = devicestore.sample_offsets(first.mapping.nbytes, 1)[-1]
        ctypes.memset(first.mapping.address + last, 8, 1)
    second = attach_weights(path, there.folder)
    assert not second.hit
    assert content(second) == b"\7" * 512 * KIB
    assert second.mapping.address != first.mapping.address
    told = {each["corrupted"] is None: each["attached"] for each in fakecuda.status(there.folder)["objects"]}
    assert told == {True: [os.getpid()], False: [os.getpid()]}
    assert main(["share", "status", "--dir", str(there.folder)]) == 0
    assert "corrupted (byte" in capsys.readouterr().out
    keeper = fakecuda.status(there.folder)["pid"]
    assert fakecuda.allocation_count(keeper) == 2
    del first
    gc.collect()
    wait_for(lambda: fakecuda.allocation_count(keeper) == 1)  # freed when those who had it let it go
    assert attach_weights(path, there.folder).hit
    assert main(check) == 0


def test_samples_have_both_ends_and_other_blocks_each_time() -> None:
    nbytes = 100 * MIB + 1
    drawn = [devicestore.sample_offsets(nbytes, draw) for draw in range(50)]
    assert {(each[0], each[-1]) for each in drawn} == {(0, 100 * MIB)}
    assert {len(each) for each in drawn} == {devicestore.SAMPLE_BLOCKS}
    assert len({at for each in drawn for at in each}) > 600
    assert devicestore.sample_offsets(nbytes, 3) == drawn[3]
    assert devicestore.sample_offsets(5, 1) == [0]
    assert devicestore.sample_offsets(4096 * 3, 1) == [0, 4096, 8192]


@pytest.mark.slow
def test_what_serves_the_device_outlives_the_store(standing: StandIn, there: StoreProcess, tmp_path: Path) -> None:
    held = attach_weights(file_of(tmp_path, "a", 7), there.folder)
    attach_weights(file_of(tmp_path, "b", 9), there.folder)
    wait_for(lambda: attached_pids(there.folder) == [os.getpid()])
    keeper = fakecuda.status(there.folder)["pid"]
    assert there.end(signal.SIGINT) == 0
    assert f"process {keeper} keeps the memory of cuda:0" in there.complaints()
    assert not fakecuda.has_ended(keeper)
    assert fakecuda.allocation_count(keeper) == 1  # what nobody is attached to went with the store
    assert content(held) == b"\7" * 64 * KIB
    with serving(standing, there.folder):  # the next store serves the same device beside it
        other = attach_weights(file_of(tmp_path, "a", 7), there.folder)
        assert not other.hit
        del other
    assert content(held) == b"\7" * 64 * KIB
    del held
    gc.collect()
    wait_for(lambda: fakecuda.has_ended(keeper))


@pytest.mark.slow
def test_a_killed_store_leaves_what_serves_the_device_until_its_clients_end(
    there: StoreProcess, tmp_path: Path
) -> None:
    held = attach_weights(file_of(tmp_path, "a", 7), there.folder)
    keeper = fakecuda.status(there.folder)["pid"]
    there.end(signal.SIGKILL)
    wait_for(lambda: not list(there.folder.glob("device-*.sock")))
    os.kill(keeper, signal.SIGTERM)  # it is told to end once more, and has a client
    assert not fakecuda.has_ended(keeper)
    assert content(held) == b"\7" * 64 * KIB
    del held
    gc.collect()
    wait_for(lambda: fakecuda.has_ended(keeper))


@pytest.mark.slow
def test_a_killed_keeper_is_one_error(standing: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(standing, tmp_path / "s") as there:
        path = file_of(tmp_path, "a", 7)
        os.kill(fakecuda.status(there.folder)["pid"], signal.SIGKILL)
        wait_for(lambda: "error" in fakecuda.status(there.folder))
        with pytest.raises(ShareError, match=r"does not serve cuda:0.*serve --device 0.*killed, also end"):
            attach_weights(path, there.folder)
        there.wait_for([])
        assert main(["share", "status", "--dir", str(there.folder)]) == 0
        assert "no store runs there" in capsys.readouterr().out
        assert main(["share", "evict", "--dir", str(there.folder), "--all"]) == 0
        said = capsys.readouterr()
        assert "1 evicted, 0 attached" in said.out
        assert "nothing was evicted at device-" in said.err
        assert main(["share", "check", "--dir", str(there.folder)]) != 0
        there.end()
    with serving(standing, tmp_path / "s") as there:  # in the place of the socket that was left
        assert not attach_weights(path, there.folder).hit


@pytest.mark.parametrize("place", ["an attachment", deep("a copy"), deep("a check")])
def test_a_device_that_goes_is_one_error_for_clients_and_the_host_is_served(
    place: str, standing: StandIn, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    with serving(standing, tmp_path / "s", STANDIN_GONE=str(gone)) as there:
        first, other = file_of(tmp_path, "a", 7), file_of(tmp_path, "b", 9)
        held = attach_weights(first, there.folder)
        keeper = fakecuda.status(there.folder)["pid"]
        gone.touch()
        says = r"cuda:0: \w+ failed \(CUDA_ERROR_719\); the device is lost for this process"
        if place == "a check":
            (entry,) = devices.check(there.folder)
            assert re.match(says, entry["error"])
        else:
            with pytest.raises(ShareError, match=says):
                attach_weights(first if place == "an attachment" else other, there.folder)
        wait_for(lambda: "lost with it" in there.complaints())
        said = there.complaints()
        assert "lost with it: w. The host's weights are served as before" in said
        assert f"end the attached processes ({os.getpid()}), then end the store" in said
        assert said.count("lost with it") == 1
        # the last: it took the connection just before it stopped to
        goes_on = "the host's store goes on: end it, and start it with the device: xsp share serve --device 0"
        with pytest.raises(
            ShareError,
            match=f"store of the device is ending; cuda:0 is lost to it, and {goes_on}|does not serve cuda:0"
            f"|store of the device ended before it answered; {goes_on}",
        ):
            attach_weights(other, there.folder)
        assert client.attach(other, there.folder).tensors, "the host's store goes on"
        assert wire.device_number(there.folder, wire.device_socket(fakecuda.UUID)) == "0"
        assert not fakecuda.has_ended(keeper), "it has a client"
        del held
        gc.collect()
        wait_for(lambda: fakecuda.has_ended(keeper))


def test_a_device_store_that_ends_as_a_client_connects_is_told_from_the_host_s(
    standing: StandIn, tmp_path: Path
) -> None:
    from sharing import running_store

    def ends(others: Callable[[], object]) -> None:
        with listening, listening.accept()[0] as connection:
            wire.receive(connection)
            others()

    def asked(ask: Callable[[], object], others: Callable[[], object] = lambda: None) -> str:
        thread = threading.Thread(target=ends, args=(others,))
        thread.start()
        try:
            with pytest.raises(ShareError) as raised:
                ask()
        finally:
            thread.join()
        return str(raised.value)

    path = file_of(tmp_path, "a", 7)
    alone = "the store of the device ended before it answered; the host's store goes on: end it, and start it with the "
    with running_store(tmp_path / "s") as there:
        listening = listening_at(there.folder)
        assert asked(lambda: attach_weights(path, there.folder)) == f"{alone}device: xsp share serve --device 0"
        for noted, named in (("", "0, or the device's other number (xsp doctor lists devices)"), ("3", "3")):
            (there.folder / wire.lock_of(wire.device_socket(fakecuda.UUID))).write_text(noted)
            listening = listening_at(there.folder)
            assert asked(lambda: devices.check(there.folder)) == f"{alone}device: xsp share serve --device {named}"
        listening = listening_at(there.folder)
        said = asked(lambda: attach_weights(path, there.folder), there.end)
        assert said == "the store ended before it answered; start one (xsp share serve) and attach again"


def listening_at(folder: Path) -> socket.socket:
    """Listen where the store of the first device would."""
    (folder / wire.device_socket(fakecuda.UUID)).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(folder / wire.device_socket(fakecuda.UUID)))
    listening.listen(1)
    return listening


def test_a_store_without_the_device_says_so(standing: StandIn, tmp_path: Path) -> None:
    from sharing import running_store

    with running_store(tmp_path / "s") as there:
        with pytest.raises(ShareError, match=r"does not serve cuda:0 \(No such file.*end it, and start it"):
            attach_weights(file_of(tmp_path, "a", 7), there.folder)
        there.wait_for([])
        assert main(["share", "check", "--dir", str(there.folder)]) == 0


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"STANDIN_DEVICES": "0"}, "cuInit failed (CUDA_ERROR_NO_DEVICE); there is no NVIDIA device"),
        deep({"STANDIN_REFUSES": "cuIpcGetMemHandle:801"}, "does not share memory between processes"),
        deep({"STANDIN_REFUSES": "cuDevicePrimaryCtxRetain:46"}, "reserved by another process"),
        deep({"STANDIN_TOTAL": "1000000"}, "memory comes in pieces of 2 MiB"),
        ({"LD_LIBRARY_PATH": ""}, "there is no NVIDIA driver here (libcuda.so.1 cannot be loaded)"),
    ],
)
def test_a_device_that_cannot_be_served_is_one_error(
    variables: dict[str, str], says: str, standing: StandIn, tmp_path: Path
) -> None:
    if "LD_LIBRARY_PATH" in variables and driver_is_there():
        pytest.skip("there is a driver here")
    words = ["share", "serve", "--dir", str(tmp_path / "s"), "--capacity", "1MiB", "--device", "cuda:0"]
    done = subprocess.run(
        [sys.executable, "-m", "xsp", *words],
        env={**os.environ, **standing.environment(**variables)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "s").glob("*.sock")) == []


def driver_is_there() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("name", ["cuda", "cuda:x", "tpu:0", "-1"])
def test_what_is_no_number_of_a_device_is_one_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["share", "serve", f"--device={name}"])
    assert f"{name!r}: write a number as PyTorch has it, 0 or cuda:0" in " ".join(capsys.readouterr().err.split())


def test_a_device_that_there_is_not_is_one_error(standing: StandIn) -> None:
    with pytest.raises(ShareError, match=r"cuda:3: there is no such device; the number of devices here is 1"):
        driver.device(3)


@pytest.mark.slow
def test_what_cannot_be_opened_stays_attached_to_nobody(
    there: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path, "a", 7)
    with monkeypatch.context() as patch:
        patch.setenv("STANDIN_REFUSES", "cuIpcOpenMemHandle_v2:205")
        with pytest.raises(ShareError, match=r"cuIpcOpenMemHandle_v2 failed .*same machine"):
            attach_weights(path, there.folder)
    wait_for(lambda: attached_pids(there.folder) == [])
    assert attach_weights(path, there.folder).hit


@pytest.mark.slow
def test_what_cannot_be_closed_stays_attached_until_the_process_ends(there: StoreProcess, tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from xsp.share import client, devices\n"
        "from xsp.device import cudasharing as driver\n"
        "folder = Path(sys.argv[2]); on_host = client.attach(sys.argv[1], folder)\n"
        "held = devices.attach(on_host, driver.device(0), 'w', folder)\n"
        "os.environ['STANDIN_REFUSES'] = 'cuIpcCloseMemHandle:999'; del held; print('closed', flush=True)\n"
        "sys.stdin.read()"
    )
    words = [sys.executable, "-c", code, str(file_of(tmp_path, "a", 7)), str(there.folder)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(driver.LIBRARY).parent)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"closed\n"
        assert attached_pids(there.folder) == [process.pid]
        process.kill()
    wait_for(lambda: attached_pids(there.folder) == [])


@pytest.mark.slow
def test_another_number_of_the_same_device_finds_it(there: StoreProcess, tmp_path: Path) -> None:
    assert wire.device_sockets(there.folder) == [wire.device_socket(fakecuda.UUID)]
    with (
        pytest.raises(ShareError, match="requests another device"),
        client.connect(there.folder, name=wire.device_socket(fakecuda.UUID)) as connection,
    ):
        client.ask(connection, {"ask": "attach", "key": "a" * 64, "device": "b" * 32})


# --- forks and kills, in processes that never used the device before --------------------------------------------------


def killing(standing: StandIn, folder: Path, *words: str) -> None:
    """Run a part of `devicekills.py`."""
    support = Path(fakecuda.__file__).parent
    paths = os.pathsep.join([str(support), str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")])
    done = subprocess.run(
        [sys.executable, str(support / "devicekills.py"), str(folder), *words],
        env={**os.environ, **standing.environment(PYTHONPATH=paths)}, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_forked_child_closes_nothing_and_holds_nothing(standing: StandIn, there: StoreProcess) -> None:
    killing(standing, there.folder, "fork")


@pytest.mark.slow
def test_killed_clients_leave_nothing_on_the_device(standing: StandIn, there: StoreProcess) -> None:
    killing(standing, there.folder, "kill", "60", "19")


@pytest.mark.slow
def test_hundreds_of_killed_clients_leave_nothing_on_the_device(standing: StandIn, there: StoreProcess) -> None:
    killing(standing, there.folder, "kill", "600", os.environ.get("XSP_FAULT_SEED", "1"))


# --- `xsp share status` and `xsp share check`: what each says of the same store, and what only one of them does -------


HELD = {"key": "9f86d081" * 8, "source": "a.safetensors", "nbytes": 4096, "tensors": 3, "hits": 1, "attached": [7]}
STORE = {"pid": 5, "held_bytes": 4096, "capacity_bytes": 8192, "copying_bytes": 0, "evictions": 0, "objects": [HELD]}
DEVICE = {"ordinal": 0, "name": "a device", "uuid": "00"}
COMPARED = {"device": DEVICE, "corrupted": None, "error": None, **HELD}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stand in for a store with a device, and return what a comparison finds; it is none until the test adds some."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "status", lambda folder: STORE)
    monkeypatch.setattr(devices, "status", lambda folder: [{**STORE, "device": DEVICE}])
    monkeypatch.setattr(devices, "check", lambda folder: found)
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["share", *words]) == code
    return capsys.readouterr().out


def test_status_compares_nothing_and_says_who_does(
    store: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "check", None)
    shown = said(capsys, "status")
    assert "attached: 7" in shown
    assert shown.splitlines()[-1].startswith("nothing was compared; xsp share check compares")
    monkeypatch.setattr(devices, "status", lambda folder: [])
    assert "xsp share check" not in said(capsys, "status")


def test_check_says_that_it_compared_and_how_many_are_equal(
    store: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    store.append(COMPARED)
    lines = said(capsys, "check").splitlines()
    assert lines[0] == "compared, block by block, with the memory of the store:"
    assert lines[-1] == "1 of 1 equal"
    store += [{**COMPARED, "corrupted": "byte 5, in w"}, {**COMPARED, "error": "it is gone"}]
    lines = said(capsys, "check", code=1).splitlines()
    assert lines[-1] == "1 of 3 equal, 1 differ, 1 not compared"
    assert [line.split(": ")[-1] for line in lines[1:-1]] == [
        "equal", "DIFFERS from the host at byte 5, in w; end the processes that are attached", "it is gone"
    ]  # fmt: skip


def test_check_without_a_device_is_json_where_json_is_asked_for(
    store: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "status", lambda folder: [])
    monkeypatch.setattr(devices, "check", None)
    assert json.loads(said(capsys, "check", "--format", "json")) == []
    assert "nothing to compare" in said(capsys, "check")


@pytest.mark.parametrize(("one", "other"), [(share.Status, "xsp share check"), (share.Check, "xsp share status")])
def test_each_help_names_the_other_command(one: Any, other: str) -> None:
    assert other in (one.__doc__ or "")
