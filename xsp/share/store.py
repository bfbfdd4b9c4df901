"""The store: a process that keeps one copy of weights per machine in sealed memory, and serves it over a Unix socket.

A client sends the descriptor of a file and gets the descriptor of memory that nobody can write any more (memfd with
`F_SEAL_WRITE`, which not even the store can undo). Its connection is its attachment. Attached processes keep their
memory when the store ends: it is freed with its last mapping, and a new store begins empty.

Objects are identified by the SHA-256 of their content, files by device, inode, size and times, so that a second client
of the same file does not wait for a digest.
"""

from __future__ import annotations

import fcntl
import functools
import os
import stat
import time
from pathlib import Path
from typing import Any

from xsp import clock
from xsp.errors import ShareError, UsageError
from xsp.scrub import plain
from xsp.share import pages, weights
from xsp.share.serving import CopyResult, Serving, error_text
from xsp.share.shelf import Client, Eviction, Object, Shelf, StoreSpan

SETTLED_NS = 50_000_000
"""A file changed less than this long ago may change again without a visible change of its times (which have ticks)."""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

Version = tuple[int, ...]
"""Device, inode, size, and times of modification and change of a file."""


class WeightStore(Serving[Object]):
    """Serves a directory until `end` is called."""

    def __init__(self, folder: Path, capacity_bytes: int, eviction: Eviction = Eviction.LRU) -> None:
        """Lock the directory and listen.

        Args:
            folder: directory for the socket; it is created, accessible to this user only.
            capacity_bytes: limit for all objects together.
            eviction: which objects are evicted first when there is no room.

        Raises:
            ShareError: another store serves the directory, or it is open to others.
            UsageError: the capacity is not above zero.
        """
        if capacity_bytes <= 0:
            raise UsageError("--capacity: must be above 0; give a size such as 4GiB")
        self._keys_by_version: dict[Version, str] = {}
        super().__init__(folder, Shelf(capacity_bytes, eviction))

    def _handle_attach(self, client: Client, request: dict[str, Any], descriptors: list[int]) -> None:
        if "key" in request:
            stored = self._find(str(request["key"]))
            if not self.shelf.attach(client, stored):
                raise ShareError(f"{stored.key[:16]}: has just been evicted; attach its file")
            self._hand_over(client, stored, True, [])
            return
        if not descriptors:
            raise ShareError("an attachment needs a file or a key")
        source = plain(str(request.get("source", "")))[:4096]
        file_stat = os.fstat(descriptors[0])
        if not stat.S_ISREG(file_stat.st_mode):
            raise ShareError(f"{source}: is not a regular file")
        version = version_of(file_stat)
        stored_version = self.shelf.objects.get(self._keys_by_version.get(version, ""))
        if stored_version is not None and self.shelf.attach(client, stored_version):
            self._hand_over(client, stored_version, True, [])
        elif not self._join_waiting(client, version):
            work = functools.partial(self._copy_and_close, version, descriptors.pop(0), source)
            self._queue_job(version, work, functools.partial(self._keep_result, version))

    def _handover(self, stored: Object) -> tuple[dict[str, Any], int | None]:
        return {"nbytes": stored.nbytes}, stored.memory

    def _status_entry(self, stored: Object) -> dict[str, Any]:
        return {**super()._status_entry(stored), "large_bytes": stored.large_bytes}

    def _copy_and_close(self, version: Version, file: int, source: str) -> tuple[CopyResult[Object], bool]:
        """Copy a file and close it; return the result, and whether the file's times would show another change."""
        is_settled = abs(time.time_ns() - max(version[-2:])) > SETTLED_NS
        try:
            return self._copy(version, file, source), is_settled
        finally:
            os.close(file)

    def _keep_result(self, version: Version, outcome: tuple[CopyResult[Object], bool], waiting: list[Client]) -> None:
        result, is_settled = outcome
        stored = self._keep_copy(result, waiting)
        if stored is not None and is_settled:
            self._keys_by_version = {
                version: key for version, key in self._keys_by_version.items() if key in self.shelf.objects
            }
            self._keys_by_version[version] = stored.key

    def _copy(self, version: Version, file: int, source: str) -> CopyResult[Object]:
        """Copy a file into sealed memory; an error becomes a message in the result."""
        spans: list[StoreSpan] = []
        reserved, memory = 0, -1
        start = clock.monotonic_ns()
        try:
            header_memory = weights.header_memory(file)
            self.shelf.reserve(header_memory, source)
            reserved = header_memory
            tensors = weights.read_header(file, source)
            layout = weights.memory_layout(tensors)
            self.shelf.release(reserved)
            reserved = 0
            evict_start = clock.monotonic_ns()
            evicted = self.shelf.reserve(layout.size, source)
            reserved = layout.size
            if evicted:
                spans.append(StoreSpan(f"share.evict {evicted}", evict_start, clock.monotonic_ns()))
            memory = os.memfd_create("xsp-share", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            large_bytes = pages.enlarge(memory, layout.size, lambda: self._is_running)
            key = weights.copy(file, tensors, layout, memory, source, lambda: self._is_running)
            if version_of(os.fstat(file)) != version:
                raise ShareError(f"{source}: it was changed while it was read; attach again")
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, SEALS)
            spans.append(StoreSpan("share.copy", start, clock.monotonic_ns()))
            copy_ns = clock.monotonic_ns() - start
            stored = Object(key, memory, layout.size, len(tensors), source, copy_ns=copy_ns, large_bytes=large_bytes)
            return CopyResult(stored, reserved, spans, None)
        except Exception as error:
            if memory >= 0:
                os.close(memory)
            return CopyResult(None, reserved, spans, error_text(error, source))


def version_of(file_stat: os.stat_result) -> Version:
    """Return the fields that distinguish a version of a file from others."""
    return file_stat.st_dev, file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns
