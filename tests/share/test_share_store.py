"""The store and its clients: counts, eviction, kills."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
import sharing
from sharing import StoreProcess, running_store
from test_share_weights import written

from xsp.cli import main
from xsp.errors import ShareError, UsageError
from xsp.share import client, store, weights, wire
from xsp.share import shelf as shelf_of
from xsp.share.shelf import Eviction, Shelf
from xsp.share.store import WeightStore

KIB = 1 << 10


def file_of(folder: Path, name: str, fill: int, size: int = 64 * KIB) -> Path:
    """Write weights of one tensor, of which each byte is the same."""
    return written(
        folder / name, {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, bytes([fill]) * size
    )


def content(held: client.AttachedWeights) -> bytes:
    first = held.tensors[0]
    return bytes(memoryview(held.array)[first.offset : first.offset + first.nbytes])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def there(tmp_path: Path) -> StoreProcess:  # type: ignore[misc]
    with running_store(tmp_path / "s", "1MiB") as found:
        yield found


def test_the_first_copies_and_the_second_finds_it_there(there: StoreProcess, tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 7)
    first = client.attach(path, there.folder)
    assert not first.hit
    assert content(first) == b"\7" * 64 * KIB
    second = client.attach(f"sha256:{first.key[:12]}", there.folder)
    assert second.hit
    assert there.attached() == [os.getpid()] * 2
    del first
    there.wait_for([os.getpid()])
    assert content(second) == b"\7" * 64 * KIB


def test_equal_weights_of_two_files_are_one_object(there: StoreProcess, tmp_path: Path) -> None:
    held = [client.attach(file_of(tmp_path, name, 7), there.folder) for name in "ab"]
    assert held[0].key == held[1].key
    assert len(client.status(there.folder)["objects"]) == 1


def test_a_file_that_was_changed_is_another_object(there: StoreProcess, tmp_path: Path) -> None:
    before = client.attach(file_of(tmp_path, "a", 1), there.folder)
    after = client.attach(file_of(tmp_path, "a", 2), there.folder)
    assert (content(before)[0], content(after)[0]) == (1, 2)


@pytest.mark.slow
def test_what_was_used_longest_ago_is_evicted_and_never_what_is_attached(there: StoreProcess, tmp_path: Path) -> None:
    paths = [file_of(tmp_path, str(at), at, 300 * KIB) for at in range(5)]
    kept = client.attach(paths[0], there.folder)
    for path in paths[1:4]:
        client.attach(path, there.folder)
        gc.collect()
        there.wait_for([os.getpid()])
    sources = [Path(each["source"]).name for each in client.status(there.folder)["objects"]]
    assert sorted(sources) == ["0", "2", "3"]
    others = [client.attach(path, there.folder) for path in paths[2:4]]
    with pytest.raises(ShareError, match=r"do not fit: of 1 MiB, .* are attached"):
        client.attach(paths[4], there.folder)
    assert content(kept)[0] == 0
    assert [content(each)[0] for each in others] == [2, 3]
    assert client.status(there.folder)["copying_bytes"] == 0


def test_files_are_brought_one_after_the_other_where_there_is_room_for_one(
    there: StoreProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(file_of(tmp_path, str(at), at, 600 * KIB)) for at in range(3)]
    assert main(["share", "put", *paths, "--dir", str(there.folder)]) == 0
    assert capsys.readouterr().out.count("copied") == 3
    assert [each["source"] for each in client.status(there.folder)["objects"]] == paths[2:]


def test_what_is_attached_cannot_be_evicted_by_hand(there: StoreProcess, tmp_path: Path) -> None:
    held = client.attach(file_of(tmp_path, "a", 1), there.folder)
    with pytest.raises(ShareError, match="is attached"):
        client.evict(held.key[:16], there.folder)
    assert client.evict("*", there.folder) == {"evicted": 0, "attached": 1}
    key = held.key
    del held
    there.wait_for([])
    assert client.evict(key, there.folder) == {"evicted": 1, "attached": 0}
    with pytest.raises(ShareError, match="no such object"):
        client.attach(f"sha256:{key}", there.folder)


def test_what_is_no_weights_is_refused_and_the_store_goes_on(there: StoreProcess, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"PK\3\4 an archive")
    os.mkfifo(tmp_path / "pipe")
    for name, says in (("x", "pickle"), ("pipe", "not a regular file"), ("none", "No such file"), ("", "regular")):
        with pytest.raises(ShareError, match=says):
            client.attach(tmp_path / name, there.folder)
    before = there.descriptors()
    for sent in (b"", b"{", b"[]", b"[" * 60000, b'{"ask":"attach"}', b'{"ask":"attach","key":"0"}', b"x" * 70000):
        with client.connect(there.folder) as connection:
            connection.send(sent)
            if sent and len(sent) < weights.PAGE * 16:
                assert b"error" in connection.recv(4096)
    there.wait_for([])
    client.attach(file_of(tmp_path, "a", 1), there.folder)
    there.wait_for([])
    assert there.descriptors() == before + 1  # the object


def test_a_file_that_is_changed_meanwhile_or_does_not_end_gives_nothing(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 1)
    serving = WeightStore(tmp_path / "s", 1 << 20)
    file = os.open(path, os.O_RDONLY)
    version = store.version_of(os.fstat(file))
    os.truncate(path, 100)
    assert "truncated" in str(serving._copy(version, file, "a").error)
    os.close(file)
    file = os.open(file_of(tmp_path, "b", 1), os.O_RDONLY)
    assert "was changed while" in str(serving._copy((0,) * 5, file, "b").error)
    os.close(file)
    serving.end()
    serving.serve()


def test_nobody_else_can_reach_it(there: StoreProcess, tmp_path: Path) -> None:
    assert stat.S_IMODE(there.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((there.folder / wire.SOCKET).stat().st_mode) == 0o600
    with pytest.raises(ShareError, match="is served by another store already"):
        WeightStore(there.folder, 1)
    there.folder.chmod(0o755)
    for tries in (lambda: client.status(there.folder), lambda: WeightStore(there.folder, 1)):
        with pytest.raises(ShareError, match="without access for others"):
            tries()
    (tmp_path / "link").symlink_to(there.folder)
    with pytest.raises(ShareError, match="without access for others"):
        client.status(tmp_path / "link")
    with pytest.raises(ShareError, match="too long"):
        WeightStore(tmp_path / ("x" * 100), 1)
    with pytest.raises(UsageError, match="must be above 0"):
        WeightStore(tmp_path / "t", 0)


@pytest.mark.parametrize("what", ["a file", "a link", "a folder"])
def test_what_lies_in_the_place_of_its_socket_stays_there(what: str, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir(mode=0o700)
    place = tmp_path / "s" / wire.SOCKET
    if what == "a folder":
        place.mkdir()
    elif what == "a link":
        place.symlink_to(file_of(tmp_path, "a", 1))
    else:
        place.write_text("mine")
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(ShareError, match=r"store\.sock: is not a socket; move it away, or give another directory"):
            WeightStore(tmp_path / "s", 1 << 20)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert os.path.lexists(place)
    with pytest.raises(ShareError, match="no store runs there"):
        client.status(tmp_path / "s")


def test_its_memory_is_sealed(there: StoreProcess, tmp_path: Path) -> None:
    import fcntl
    import mmap

    with client.connect(there.folder) as connection:
        answer, sent = client._request_weights(connection, file_of(tmp_path, "a", 1))
        with pytest.raises(PermissionError):
            mmap.mmap(sent[0], answer["nbytes"], mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.pwrite(sent[0], b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(sent[0], 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(sent[0], fcntl.F_ADD_SEALS, 0)
        os.close(sent[0])


def test_many_clients_of_one_file_at_a_time_have_it_copied_once(there: StoreProcess, tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 3, 500 * KIB)
    time.sleep(0.1)  # until its times tell its state
    held: list[client.AttachedWeights] = []
    threads = [threading.Thread(target=lambda: held.append(client.attach(path, there.folder))) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(held) == 16
    assert there.attached() == [os.getpid()] * 16
    assert len(client.status(there.folder)["objects"]) == 1


@pytest.mark.slow
def test_a_fork_keeps_the_attachment_until_both_have_ended(there: StoreProcess, tmp_path: Path) -> None:
    held = client.attach(file_of(tmp_path, "a", 3), there.folder)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writes)
        os.read(reads, 1)
        os._exit(content(held)[0])
    del held
    gc.collect()
    assert there.attached() == [os.getpid()]
    os.close(writes)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    os.close(reads)
    there.wait_for([])


def killed_clients(there: StoreProcess, folder: Path, times: int, seed: int) -> None:
    """Kill clients at any moment, at most eight at a time; look at counts, memory and descriptors again and again."""
    drawn = random.Random(seed)
    paths = [file_of(folder, f"k{at}", at, 200 * KIB) for at in range(8)]  # more than there is room for
    living: list[int] = []
    before = 0
    for at in range(times):
        child = os.fork()
        if child == 0:
            try:
                held = client.attach(paths[drawn.randrange(8)], there.folder)
                assert len(set(content(held))) == 1
                time.sleep(60)
            except ShareError:  # no room while eight are attached
                os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        living.append(child)
        drawn.random()
        if drawn.random() < 0.5:
            time.sleep(drawn.random() * 0.004)
        sharing.kill_some(living, drawn, f"seed {seed}, kill {at}")
        if at % 50 == 49 or at == times - 1:
            sharing.kill_all(living)
            there.wait_for([])
            found = settled(there)
            assert found["connections"] == 1
            assert found["held_bytes"] <= found["capacity_bytes"]
            assert found["held_bytes"] == sum(each["nbytes"] for each in found["objects"])
            beside = there.descriptors() - len(found["objects"])
            before = before or beside
            until = time.monotonic() + sharing.WITHIN_S
            while beside > before and time.monotonic() < until:  # the answer about the status may still be open there
                beside = there.descriptors() - len(settled(there)["objects"])
            assert beside <= before, f"seed {seed}: {beside} descriptors beside the objects after {at + 1} kills"


def settled(there: StoreProcess) -> dict:  # type: ignore[type-arg]
    """Return the status once nothing is being copied and all connections but this one have ended."""
    until = time.monotonic() + sharing.WITHIN_S
    while True:
        found = client.status(there.folder)
        if (not found["pending_jobs"] and found["connections"] == 1) or time.monotonic() > until:
            return found
        time.sleep(0.002)


def memory_files() -> set[str]:
    return {each for each in os.listdir("/dev/shm") if "xsp" in each}


def killed_stores(there: StoreProcess, folder: Path, times: int, seed: int) -> None:
    """Kill the store at any moment: who is attached keeps its weights, and the next one begins empty."""
    drawn = random.Random(seed)
    held = []
    for at in range(times):
        path = file_of(folder, f"s{at}", at, 100 * KIB)
        held.append((at, client.attach(path, there.folder)))
        late = threading.Thread(target=_try, args=(file_of(folder, f"late{at}", 200, 300 * KIB), there.folder))
        late.start()
        time.sleep(drawn.random() * 0.005)
        assert there.end(signal.SIGKILL) == -signal.SIGKILL
        late.join()
        assert sharing.is_absent(there.folder)
        there.start()
        assert client.status(there.folder)["objects"] == []
        for number, each in held:
            assert set(content(each)) == {number}
    assert len({each.generation for _, each in held}) == times


def _try(path: Path, folder: Path) -> None:
    try:
        client.attach(path, folder)
    except ShareError:
        pass


@pytest.mark.slow
def test_killed_clients_leave_nothing(there: StoreProcess, tmp_path: Path) -> None:
    before = memory_files(), len(os.listdir("/proc/self/fd"))
    killed_clients(there, tmp_path, 60, 19)
    assert (memory_files(), len(os.listdir("/proc/self/fd"))) == before


def test_a_killed_store_takes_nothing_from_its_clients(there: StoreProcess, tmp_path: Path) -> None:
    before = memory_files()
    killed_stores(there, tmp_path, 2, 19)
    assert memory_files() == before


@pytest.mark.slow
def test_a_thousand_killed_clients_leave_nothing(there: StoreProcess, tmp_path: Path) -> None:
    before = memory_files(), len(os.listdir("/proc/self/fd"))
    killed_clients(there, tmp_path, 1000, int(os.environ.get("XSP_FAULT_SEED", "1")))
    assert (memory_files(), len(os.listdir("/proc/self/fd"))) == before
    assert there.end() == 0
    assert not (there.folder / wire.SOCKET).exists()


@pytest.mark.slow
def test_twenty_killed_stores_take_nothing_from_their_clients(there: StoreProcess, tmp_path: Path) -> None:
    before = memory_files(), len(os.listdir("/proc/self/fd"))
    killed_stores(there, tmp_path, 20, int(os.environ.get("XSP_FAULT_SEED", "1")))
    gc.collect()
    assert (memory_files(), len(os.listdir("/proc/self/fd"))) == before


def test_no_store_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(ShareError, match=r"no store runs there .*xsp share serve"):
        client.status(tmp_path / "none")
    (tmp_path / "s").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "s" / wire.SOCKET))  # of one that was killed
    with pytest.raises(ShareError, match="no store runs there"):
        client.status(tmp_path / "s")
    with running_store(tmp_path / "s") as there:
        assert there.attached() == []
        assert there.end(signal.SIGINT) == 0


def test_a_shelf_evicts_nothing_where_that_would_not_make_room() -> None:
    shelf = Shelf(100)
    for key in "ab":
        shelf.reserve(40, key)
        shelf.put(shelf_of.Object(key, os.open("/dev/null", os.O_RDONLY), 40, 1, key))
    holder = shelf_of.Client(socket.socket(), 1)
    shelf.attach(holder, shelf.objects["a"])
    with pytest.raises(ShareError, match="do not fit"):
        shelf.reserve(61, "c")
    assert sorted(shelf.objects) == ["a", "b"]
    assert shelf.reserve(60, "c") == 1
    assert (sorted(shelf.objects), shelf.reserved_bytes) == (["a"], 60)
    shelf.release(60)
    shelf.detach(holder)
    shelf.detach(holder)
    with shelf.lock:
        shelf.evict(shelf.objects["a"])
    assert shelf.stored_bytes == 0
    holder.connection.close()


def test_what_was_evicted_meanwhile_is_given_to_nobody_and_what_is_waited_for_is_not_evicted() -> None:
    shelf: Shelf[shelf_of.Object] = Shelf(100)
    holder = shelf_of.Client(socket.socket(), 1)
    shelf.reserve(60, "a")
    made = shelf.put(shelf_of.Object("a", os.open("/dev/null", os.O_RDONLY), 60, 1, "a"))
    shelf.reserve(60, "b")  # by the thread that copies, while the other one is about to give it
    assert not shelf.attach(holder, made)
    assert holder.object is None
    kept = shelf.put(shelf_of.Object("b", os.open("/dev/null", os.O_RDONLY), 60, 1, "b"), [holder])
    with pytest.raises(ShareError, match="do not fit"):
        shelf.reserve(60, "c")
    shelf.withdraw(kept)
    assert (shelf.objects, shelf.stored_bytes) == ({}, 60)
    shelf.detach(holder)
    assert (shelf.withdrawn_objects, shelf.stored_bytes) == ([], 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(kept.memory)
    holder.connection.close()


def shelved(eviction: Eviction, *objects: tuple[str, int, int, int]) -> Shelf:
    """Return a full shelf of objects: key, bytes, how often it was found there, and nanoseconds to copy."""
    shelf = Shelf(sum(nbytes for _, nbytes, _, _ in objects), eviction)
    for key, nbytes, hits, copy_ns in objects:
        shelf.reserve(nbytes, key)
        made = shelf.put(shelf_of.Object(key, os.open("/dev/null", os.O_RDONLY), nbytes, 1, key, copy_ns, hits=hits))
        shelf.touch(made)
    return shelf


def clear(shelf: Shelf) -> None:
    with shelf.lock:
        for each in list(shelf.objects.values()):
            shelf.evict(each)


@pytest.mark.parametrize(
    ("eviction", "first", "second"), [(Eviction.LRU, "a", "b"), (Eviction.LFU, "c", "b"), (Eviction.GDSF, "b", "c")]
)
def test_the_order_in_which_weights_are_evicted(eviction: Eviction, first: str, second: str) -> None:
    # a: oldest, often used; b: quickly copied for its size; c: never used again.
    shelf = shelved(eviction, ("a", 40, 9, 4_000), ("b", 40, 2, 100), ("c", 40, 0, 1_000))
    for gone in (first, second):
        assert shelf.reserve(40, "d") == 1
        assert gone not in shelf.objects
    clear(shelf)


def test_what_was_popular_once_grows_old() -> None:
    shelf = shelved(Eviction.GDSF, ("popular", 10, 5, 100), ("new", 10, 0, 100))
    for at in range(8):  # each takes the place of the one before, until their priority has reached that of "popular"
        shelf.reserve(10, str(at))
        shelf.touch(shelf.put(shelf_of.Object(str(at), os.open("/dev/null", os.O_RDONLY), 10, 1, "", 100)))
    assert "popular" not in shelf.objects
    clear(shelf)


def test_nothing_is_evicted_for_nothing() -> None:
    shelf = shelved(Eviction.LRU, ("small", 5, 0, 1), ("smaller", 3, 0, 1), ("large", 80, 0, 1), ("last", 12, 0, 1))
    assert shelf.reserve(82, "new") == 2
    assert sorted(shelf.objects) == ["last", "smaller"]  # the small and the large one are enough
    clear(shelf)


def answering(folder: Path, *answers: bytes | None) -> threading.Thread:
    """Listen where a store would, and answer the next connections so; None closes without an answer."""
    folder.mkdir(mode=0o700)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(folder / wire.SOCKET))
    listening.listen(8)

    def serve() -> None:
        with listening:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    for descriptor in wire.receive(connection)[1]:
                        os.close(descriptor)
                    if answer is not None:
                        connection.send(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_store_of_another_version_is_one_error(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 1)
    said = (b'{"key": "aa", "nbytes": 1}', b'{"protocol": 99, "error": "later"}', b"[]", b"\xff\x00")
    thread = answering(tmp_path / "s", *said)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in said:
        with pytest.raises(ShareError, match=r"another version of xsp; end it.*xsp share serve"):
            client.attach(path, tmp_path / "s")
    thread.join()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1  # what listened is closed


def test_a_client_of_another_version_is_told_so(there: StoreProcess) -> None:
    with client.connect(there.folder) as connection:
        connection.send(b'{"ask": "status"}')
        assert b"another version" in wire.receive(connection)[0]
    assert there.attached() == []


def test_a_store_that_ends_between_is_one_error(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 1)
    thread = answering(tmp_path / "s", None)
    with pytest.raises(ShareError, match=r"ended before it answered; start one \(xsp share serve\)"):
        client.attach(path, tmp_path / "s")
    thread.join()


def test_a_store_that_is_killed_while_it_copies_is_one_error(tmp_path: Path) -> None:
    path = file_of(tmp_path, "a", 1)
    with running_store(tmp_path / "s") as there:
        with client.connect(there.folder) as connection:
            there.process.send_signal(signal.SIGSTOP)  # it has accepted, or will never
            killer = threading.Timer(0.2, there.process.kill)
            killer.start()
            with pytest.raises(ShareError, match="ended before it answered"):
                client.ask(connection, {"ask": "status"})
            killer.join()
        there.process.wait(10)  # until then its socket still accepts
        with pytest.raises(ShareError, match="no store runs there"):
            client.attach(path, there.folder)


def test_a_store_that_hangs_is_one_error(there: StoreProcess, tmp_path: Path) -> None:
    there.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(ShareError, match="did not answer within 0 s"):
            client.attach(file_of(tmp_path, "a", 1), there.folder, patience_s=0.1)
    finally:
        there.process.send_signal(signal.SIGCONT)


def test_a_client_waits_where_more_clients_than_the_queue_holds_are_to_be_accepted(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, contextlib.ExitStack() as stack:
        tmp_path.chmod(0o700)
        listening.bind(str(tmp_path / wire.SOCKET))
        listening.listen(0)
        stack.enter_context(client.connect(tmp_path, 0.1))  # the one that a queue of none holds
        with pytest.raises(ShareError, match="the store there did not answer within"):
            client.connect(tmp_path, 0.1)
        later = threading.Timer(0.2, lambda: stack.enter_context(listening.accept()[0]))
        later.start()
        stack.enter_context(client.connect(tmp_path, 60))
        later.join()
