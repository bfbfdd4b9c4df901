"""Large pages of shared memory: where a mapping lies, and that memory without them is as good but for its time."""

from __future__ import annotations

import ctypes
import fcntl
import os
from pathlib import Path

import pytest
from test_share_store import content, file_of

from xsp.share import client, pages, shelf, store

MIB = 1 << 20


def maps() -> list[tuple[int, int, str]]:
    """Return the mappings of this process: begin, end, and the rest of the line."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [(*(int(each, 16) for each in line.split()[0].split("-")), line) for line in lines]  # type: ignore[misc]


@pytest.fixture
def memory() -> int:  # type: ignore[misc]
    descriptor = os.memfd_create("xsp-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("nbytes", [1, 4096, 2 * MIB - 1, 2 * MIB, 5 * MIB + 123, 8 * MIB])
def test_a_mapping_begins_at_a_large_page_and_leaves_nothing_beside_it(memory: int, nbytes: int) -> None:
    os.ftruncate(memory, nbytes)
    os.pwrite(memory, b"x", nbytes - 1)
    before = sum(end - begin for begin, end, line in maps() if " ---p " in line)
    address = pages.map_shared(memory, nbytes)
    ours = [(begin, end) for begin, end, line in maps() if "memfd:xsp-share" in line]
    assert ours == [(address, address + -(-nbytes // 4096) * 4096)]
    if pages.large_page_bytes() and nbytes >= pages.large_page_bytes():
        assert address % pages.large_page_bytes() == 0
    assert ctypes.string_at(address + nbytes - 1, 1) == b"x"
    after = sum(end - begin for begin, end, line in maps() if " ---p " in line)
    assert after == before  # nothing of what was reserved to find the place
    pages.unmap(address, nbytes)
    assert not [line for *_, line in maps() if "memfd:xsp-share" in line]


@pytest.mark.parametrize("nbytes", [1 * MIB, 2 * MIB, 7 * MIB + 4321])
def test_memory_with_large_pages_is_written_and_sealed_as_any(memory: int, nbytes: int) -> None:
    done = pages.enlarge(memory, nbytes, lambda: True)
    assert 0 <= done <= nbytes
    assert os.fstat(memory).st_size == nbytes
    wanted = os.urandom(nbytes)
    assert os.pwrite(memory, wanted, 0) == nbytes
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, store.SEALS)  # no mapping is left that could be written
    assert os.pread(memory, nbytes, 0) == wanted
    address = pages.map_shared(memory, nbytes)
    assert ctypes.string_at(address, nbytes) == wanted
    pages.unmap(address, nbytes)


def test_who_ends_it_gets_what_was_done(memory: int) -> None:
    asked = iter([True, False])
    assert pages.enlarge(memory, 64 * MIB, lambda: next(asked)) <= max(pages.large_page_bytes(), 1)


@pytest.mark.parametrize("without", ["large pages", "the call"])
def test_weights_are_the_same_where_the_system_gives_no_large_pages(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    if without == "large pages":
        monkeypatch.setattr(pages, "_SIZE_FILE", tmp_path / "nosuch")
        assert pages.large_page_bytes() == 0
    else:
        monkeypatch.setattr(pages, "_MADV_COLLAPSE", 0xBAD)  # no such advice: EINVAL, as before Linux 6.1
    serving = store.WeightStore(tmp_path / "s", 64 * MIB, shelf.Eviction.LRU)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        held = client.attach(file_of(tmp_path, "a", 7, 5 * MIB), tmp_path / "s")
        assert content(held) == b"\7" * 5 * MIB
        assert [each["large_bytes"] for each in client.status(tmp_path / "s")["objects"]] == [0]
        del held
    finally:
        serving.end()
        thread.join()


def test_what_has_large_pages_is_in_the_status(tmp_path: Path) -> None:
    import threading

    serving = store.WeightStore(tmp_path / "s", 64 * MIB, shelf.Eviction.LRU)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        held = client.attach(file_of(tmp_path, "a", 9, 5 * MIB), tmp_path / "s")
        (told,) = client.status(tmp_path / "s")["objects"]
        assert content(held) == b"\t" * 5 * MIB
        assert told["large_bytes"] in range(0, told["nbytes"] + 1, max(pages.large_page_bytes(), 1))
        del held
    finally:
        serving.end()
        thread.join()
