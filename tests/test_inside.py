"""Files of a directory of somebody else: what is opened, what is refused, and that nothing else opens them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import oddfiles
import pytest

from xsp import inside

SECRET = b"secret"


def linked(target: str) -> Callable[[Path, Path], None]:
    return lambda path, outside: path.symlink_to(target.format(outside=outside))


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "link to a file outside": linked("{outside}/file"),
    "relative link": linked("../outside/file"),
    "link to a link": lambda path, outside: (
        path.with_name("between").symlink_to(outside / "file"), path.symlink_to("between"))[0],
    "link to /proc": linked("/proc/self/environ"),
    "link to the root of this process": linked("/proc/self/root/etc/passwd"),
    "link to a device": linked("/dev/zero"),
    "link to a descriptor": linked("/dev/stdin"),
    "link in a circle": linked("file"),
    "link to the directory": linked("."),
    "pipe": lambda path, _: os.mkfifo(path),
    "socket": lambda path, _: oddfiles.socket_file(path),
    "folder": lambda path, _: path.mkdir(),
    "holes": lambda path, _: oddfiles.holes(path),
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(SECRET)
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_plain_file_inside_is_refused_at_once(root: Path, way: str) -> None:
    WAYS[way](root / "file", root.parent / "outside")
    with pytest.raises(OSError):  # noqa: PT011
        inside.read_bytes(root, root / "file", 1 << 20)
    assert not inside.is_file(root, root / "file") or way == "holes"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "holes"])
def test_it_is_also_recognised_without_opening_it(root: Path, way: str) -> None:
    WAYS[way](root / "file", root.parent / "outside")
    assert inside.find_problem(root, root / "file")


@pytest.mark.parametrize("name", ["../outside/file", "folder/../../outside/file", "folder/file", "", ".", "..", "a\0b"])
def test_no_path_leads_out(root: Path, name: str) -> None:
    (root / "folder").symlink_to(root.parent / "outside")
    for path in (root / name, root.parent / "outside" / "file"):
        with pytest.raises(OSError):  # noqa: PT011
            inside.read_bytes(root, path, 1 << 20)


def test_a_link_that_stays_inside_is_followed_and_the_directory_may_be_one(root: Path) -> None:
    (root / "folder").mkdir()
    (root / "folder" / "file").write_bytes(b"content")
    (root / "link").symlink_to("folder/file")
    (root.parent / "latest").symlink_to(root)
    assert inside.read_bytes(root.parent / "latest", root.parent / "latest" / "link", 100) == b"content"
    assert inside.find_problem(root.parent / "latest", root.parent / "latest" / "link") is None


def test_a_file_is_as_large_as_the_limit_at_most(root: Path) -> None:
    (root / "file").write_bytes(b"12345")
    assert inside.read_text(root, root / "file", 5) == "12345"
    with pytest.raises(OSError, match="larger"):
        inside.read_bytes(root, root / "file", 4)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"{", b"", b"\xef\xbb\xbf1", b"1" * 5000])
def test_json_is_read_or_is_one_error(root: Path, content: bytes) -> None:
    (root / "file").write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011
        inside.read_json(root, root / "file", 1 << 20)


@contextlib.contextmanager
def swapping(path: Path, targets: tuple[Path, Path]) -> Iterator[None]:
    """Replace a path by one link after the other, as fast as possible."""
    ended = threading.Event()

    def swap() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            spare = path.with_name(f"spare{number % 2}")
            spare.unlink(missing_ok=True)
            spare.symlink_to(targets[number % 2])
            os.replace(spare, path)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("swapped", ["file", "folder"])
def test_a_link_that_changes_between_check_and_opening_never_leads_out(root: Path, swapped: str) -> None:
    (root / "here").mkdir()
    (root / "here" / "file").write_bytes(b"content")
    outside = root.parent / "outside"
    if swapped == "folder":
        path, targets, file = root / "swapped", (root / "here", outside), root / "swapped" / "file"
    else:
        path, targets, file = root / "swapped", (root / "here" / "file", outside / "file"), root / "swapped"
    seen = set()
    with swapping(path, targets):
        for _ in range(2000):
            with contextlib.suppress(OSError):
                seen.add(inside.read_bytes(root, file, 100))
    assert seen <= {b"content"}
