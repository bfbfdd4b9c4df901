"""A store that runs out of descriptors says so, and goes on; its clients have places, and a header takes memory."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sharing import StoreProcess
from test_share_store import file_of

from xsp import connections
from xsp.errors import ShareError
from xsp.share import client, serving, store, weights, wire
from xsp.share.store import WeightStore

MOST = 96
PLACES = (MOST - serving.RESERVED_DESCRIPTORS) // 3


@pytest.fixture
def poor(tmp_path: Path) -> Iterator[StoreProcess]:
    started = StoreProcess(tmp_path / "s", "1GiB", most_descriptors=MOST)
    yield started
    started.process.kill()
    started.process.wait()


@contextlib.contextmanager
def serving_here(folder: Path, capacity_bytes: int = 1 << 20) -> Iterator[WeightStore]:
    """Serve in a thread of this process."""
    here = WeightStore(folder, capacity_bytes)
    thread = threading.Thread(target=here.serve)
    thread.start()
    try:
        yield here
    finally:
        here.end()
        thread.join(60)


@pytest.mark.slow
def test_a_client_that_has_asked_once_may_stay_for_hours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_here(tmp_path / "s") as here, client.connect(here.folder) as connection:
        before = client.ask_large(connection, {"ask": "status"})
        time.sleep(serving.SWEEP_S)  # it has answered, and the connection is idle
        late_s = time.monotonic() + 86_400
        monkeypatch.setattr(connections.time, "monotonic", lambda: late_s)
        time.sleep(2 * serving.SWEEP_S)  # an open connection is looked at once a second
        assert client.ask_large(connection, {"ask": "status"})["connections"] == before["connections"] == 1


def test_a_client_that_stays_keeps_its_place_among_any_number(poor: StoreProcess) -> None:
    with client.connect(poor.folder) as staying, contextlib.ExitStack() as open_ones:
        client.ask(staying, {"ask": "stay"})
        for _ in range(5 * MOST):
            open_ones.enter_context(client.connect(poor.folder))
        assert client.ask_large(staying, {"ask": "status"})["connections"] <= PLACES


def test_clients_that_ask_nothing_give_way_and_attached_ones_keep_their_place(
    poor: StoreProcess, tmp_path: Path
) -> None:
    path = file_of(tmp_path, "a", 7)
    with contextlib.ExitStack() as open_ones:
        held = client.attach(path, poor.folder)
        for _ in range(5 * MOST):
            open_ones.enter_context(client.connect(poor.folder))
        state = client.status(poor.folder)
        assert state["connections"] <= PLACES
        assert [entry["attached"] for entry in state["objects"]] == [[os.getpid()]]
        del held
    assert poor.process.poll() is None


def test_attached_clients_beyond_the_descriptors_are_refused_and_the_store_goes_on(
    poor: StoreProcess, tmp_path: Path
) -> None:
    held = []
    for number in range(PLACES):
        held.append(client.attach(file_of(tmp_path, f"f{number}", number % 251, 512 + number), poor.folder))
    for _ in range(MOST):
        with pytest.raises(ShareError, match="place for more"):
            client.attach(file_of(tmp_path, "more", 7, 500), poor.folder)
    held.clear()
    assert client.status(poor.folder)["connections"] < PLACES
    for number in range(3 * MOST):  # each object has a descriptor: those that nobody uses give way
        client.attach(file_of(tmp_path, f"g{number}", number % 251, 600 + number), poor.folder)
    assert len(client.status(poor.folder)["objects"]) <= PLACES
    assert poor.process.poll() is None


def test_clients_that_have_left_make_place_before_the_next_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Lock()

    class ListenerFirst(selectors.DefaultSelector):
        """The system may name the listener before the connections that ended before it was asked for another one."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            super().select(timeout)
            with gate:
                return sorted(super().select(0), key=lambda each: each[0].data != here._accept)

    monkeypatch.setattr(selectors, "DefaultSelector", ListenerFirst)
    path = file_of(tmp_path, "f", 7)
    with serving_here(tmp_path / "s") as here:
        here._connections.limits = dataclasses.replace(here._connections.limits, connections=3)
        held = [client.attach(path, here.folder) for _ in range(3)]
        with pytest.raises(ShareError, match="place for more"):
            client.status(here.folder)
        with gate:
            held.clear()
            another = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            another.connect(str(here.folder / wire.SOCKET))
        with another:
            assert client.ask_large(another, {"ask": "status"})["connections"] == 1


@pytest.mark.parametrize("place", ["answer", "copy"])
def test_no_descriptor_is_one_error_and_the_next_request_is_answered(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    path, folder = file_of(tmp_path, "a", 7), tmp_path / "s"
    with serving_here(folder):
        with monkeypatch.context() as patched:
            patched.setattr(*((serving, "in_memory") if place == "answer" else (store.os, "memfd_create")), fails)
            with pytest.raises(ShareError, match="Too many open files"):
                client.status(folder) if place == "answer" else client.attach(path, folder)
        assert client.attach(path, folder).tensors[0].nbytes == 64 << 10
        assert client.status(folder)["copying_bytes"] == 0


def header_of(path: Path, tensors: int) -> Path:
    """Write weights of many empty tensors."""
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor{number:020d}": entry for number in range(tensors)}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_a_header_is_bounded_and_its_memory_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = header_of(tmp_path / "a", 15_000)
    size = path.stat().st_size
    assert weights.LARGE_HEADER < size < 2 * weights.LARGE_HEADER
    with serving_here(tmp_path / "s", size * weights.HEADER_MEMORY // 2):
        with pytest.raises(ShareError, match="do not fit"):
            client.attach(path, tmp_path / "s")
        assert client.status(tmp_path / "s")["copying_bytes"] == 0
    with serving_here(tmp_path / "s", size * weights.HEADER_MEMORY):
        assert len(client.attach(path, tmp_path / "s").tensors) == 15_000
        monkeypatch.setattr(weights, "MOST_HEADER", size - 9)
        with pytest.raises(ShareError, match="larger than"):
            client.attach(header_of(tmp_path / "b", 15_000), tmp_path / "s")
