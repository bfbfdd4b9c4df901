"""C's `stdout`, diverted into a file in memory while a library prints lines for xsp there.

glibc documents the variable as assignable. Python's own output, which does not go through it, and the output of child
processes are unaffected; the program's own output through C is passed on.

When the diversion should end, another thread may still be in a library call that will print, because the call began
while printing was on. So `stdout` is restored at once only if no other thread runs Python. Otherwise it stays diverted
until each of these threads has moved to another position or is asleep; meanwhile a thread passes on the program's
output.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from xsp import processes

POLL_S = 0.02
"""Seconds between two checks of the threads; the program's output through C is delayed by up to that time."""

IDLE_S = 0.3
"""Seconds of sleep after which a thread counts as idle: threads at a barrier may sleep for a moment."""

CLOSE_TIMEOUT_S = 5.0
_KEEP_SIZE, _PUNCH_HOLE, _LINES = 1, 2, 1  # flags of fallocate; _IOLBF of setvbuf

_lock = threading.RLock()
_real_stdout: int | None = None
_active: CapturedStdout | None = None
"""The object that has `stdout` diverted; None while `stdout` is the real one, whose address was `_real_stdout`."""


class CapturedStdout:
    """C's `stdout`, diverted from `begin` to `end`; lines that begin with a prefix are kept, all others passed on."""

    def __init__(self, prefix: bytes, silence: Callable[[], object]) -> None:
        """Make the file in memory.

        Args:
            prefix: prefix of the lines that are not the program's own.
            silence: stops the printing of such lines; called in a child that is forked while they are printed.
        """
        self._prefix, self._silence = prefix, silence
        self._libc = _libc()
        self._stdout = ctypes.c_void_p.in_dll(self._libc, "stdout")
        self._descriptor = os.memfd_create("xsp-stdout")
        self._file = self._libc.fdopen(os.dup(self._descriptor), b"a")
        self._libc.setvbuf(self._file, None, _LINES, 0)  # line buffering: a forked child must not print a buffer again
        self._read_size, self._partial_line = 0, b""
        self._recording = self._watching = False
        self._busy_threads: dict[int, _Position] = {}
        """Threads that may still be in a call from before the end, by `ident`."""

        self.late_lines = 0
        """Number of lines that arrived after the end of the diversion that they belong to."""

        _register_fork_handler()

    @staticmethod
    def unavailable() -> str | None:
        """Return why C's stdout cannot be diverted here, or None."""
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return "capturing oneDNN's output needs Linux"
        try:
            ctypes.c_void_p.in_dll(_libc(), "stdout")
        except ValueError:
            return "capturing oneDNN's output needs glibc, whose stdout can be assigned"
        return None

    def begin(self) -> bool:
        """Divert `stdout`; return False if another object is recording."""
        global _real_stdout, _active
        with _lock:
            if _active is not None and _active._recording:
                return False
            if _active is None:
                _real_stdout = self._stdout.value
            else:
                _active._drop_late_lines()
                _active._busy_threads = {}  # its late lines arrive here now
            _active, self._recording = self, True
            self._stdout.value = self._file
            self._drop_late_lines()
        return True

    def end(self) -> list[bytes]:
        """End the recording, except for calls that are still running, and return the lines with the prefix."""
        with _lock:
            self._recording = False
            lines = self._read_lines()
            self._busy_threads = _other_positions(skip_cpu_times=True)
            if not self._busy_threads:
                self._restore()
            elif not self._watching:
                self._watching = True
                processes.start_thread(self._watch, "xsp passes on")
        return lines

    def close(self) -> bool:
        """Close the file once no thread can print to it; return False if that took too long and the file stays open."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while _active is self and time.monotonic() < deadline:
            time.sleep(POLL_S / 4)
        with _lock:
            is_free = _active is not self
            self._restore()
            self._drop_late_lines()
        if is_free:
            self._libc.fclose(self._file)
            os.close(self._descriptor)
        return is_free

    def restore_in_child(self) -> None:
        """Restore `stdout` in a forked child, which has no watching thread and shares the file with the parent."""
        if self._recording:
            self._silence()
        self._restore()
        self._recording, self._watching, self._busy_threads = False, False, {}

    def _watch(self) -> None:
        """Pass on the program's output until no thread can still be in a call from before the end."""
        while True:
            time.sleep(POLL_S)
            with _lock:
                if _active is not self or self._recording:
                    self._watching = False
                    return
                self._drop_late_lines()
                positions = _other_positions()
                self._busy_threads = {
                    ident: positions[ident].with_sleep_of(previous)
                    for ident, previous in self._busy_threads.items()
                    if _may_still_print(previous, positions, ident)
                }
                if not self._busy_threads:
                    self._restore()
                    self._drop_late_lines()
                    self._watching = False
                    return

    def _restore(self) -> None:
        global _active
        if _active is self:
            self._stdout.value, _active = _real_stdout, None

    def _drop_late_lines(self) -> None:
        """Count and discard late lines, and pass on the rest."""
        self.late_lines += len(self._read_lines())

    def _read_lines(self) -> list[bytes]:
        """Return the complete lines with the prefix, and pass on the program's own output."""
        self._libc.fflush(self._file)
        size = os.fstat(self._descriptor).st_size
        if size == self._read_size:
            return []
        text = self._partial_line + os.pread(self._descriptor, size - self._read_size, self._read_size)
        self._read_size = size
        # not truncated, because other threads write meanwhile; a hole frees the memory of what was read
        self._libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, size)
        lines, other_output = [], []
        self._partial_line = b""
        for line in text.splitlines(keepends=True):
            before, prefix, after = line.partition(self._prefix)
            other_output.append(before)
            if prefix and after.endswith(b"\n"):
                lines.append(prefix + after)
            elif prefix:
                self._partial_line = prefix + after
        if any(other_output):
            self._pass_on(b"".join(other_output))
        return lines

    def _pass_on(self, text: bytes) -> None:
        """Write to the real stdout, after the data that C had buffered there."""
        self._libc.fwrite(text, 1, len(text), _real_stdout)
        self._libc.fflush(_real_stdout)


_is_registered = False


def _register_fork_handler() -> None:
    global _is_registered
    if not _is_registered:
        os.register_at_fork(after_in_child=_restore_in_child)
        _is_registered = True


def _restore_in_child() -> None:
    global _lock
    _lock = threading.RLock()  # a thread of the parent may hold the old lock
    if _active is not None:
        _active.restore_in_child()


class _Position:
    """The position of a thread, and since when it has slept."""

    __slots__ = ("asleep_since", "cpu_ns", "frame_position")

    def __init__(self, frame_position: tuple[int, int], cpu_ns: int | None) -> None:
        self.frame_position, self.cpu_ns = frame_position, cpu_ns
        self.asleep_since = time.monotonic()

    def with_sleep_of(self, previous: _Position) -> _Position:
        """Return this position; its sleep began with that of `previous` if no processor time was used since."""
        if self.cpu_ns is not None and self.cpu_ns == previous.cpu_ns:
            self.asleep_since = previous.asleep_since
        return self


def _may_still_print(previous: _Position, positions: dict[int, _Position], ident: int) -> bool:
    """Return whether a thread may still be in the call in which it was at its previous position."""
    current = positions.get(ident)
    if current is None or current.frame_position != previous.frame_position:
        return False
    is_asleep = current.cpu_ns is not None and current.cpu_ns == previous.cpu_ns
    return not (is_asleep and time.monotonic() - previous.asleep_since > IDLE_S)


def _other_positions(skip_cpu_times: bool = False) -> dict[int, _Position]:
    """Return the positions of the other threads that run Python, except xsp's, and their processor times if needed."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    positions: dict[int, _Position] = {}
    unnamed_cpu_ns: tuple[int | None, ...] = ()
    frames = sys._current_frames()
    # own frame removed: a frame that refers to itself keeps all its callers alive until garbage collection
    del frames[threading.get_ident()]
    for ident, frame in frames.items():
        thread = threads.get(ident)
        if ident in processes.OWN_THREADS:
            continue
        if skip_cpu_times:
            cpu_ns = None
        elif thread is not None:
            cpu_ns = _cpu_ns(thread.native_id)
        else:
            unnamed_cpu_ns = unnamed_cpu_ns or (_cpu_ns_without(threads.values()),)
            cpu_ns = unnamed_cpu_ns[0]
        positions[ident] = _Position((id(frame), frame.f_lasti), cpu_ns)
    return positions


def _cpu_ns_without(threads: Iterable[threading.Thread]) -> int | None:
    """Return the total processor time of the process's threads that `threading` does not know, in nanoseconds.

    The native id of a thread that was started through `_thread` is unknown, so it counts as asleep only while all these
    threads sleep; None if any of them does not.
    """
    known_ids = {str(thread.native_id) for thread in threads}
    try:
        times = [_cpu_ns(int(number)) for number in os.listdir("/proc/self/task") if number not in known_ids]
    except OSError:
        return None
    return None if None in times else sum(filter(None, times))


def _cpu_ns(native_id: int | None) -> int | None:
    """Return the processor time of a thread in nanoseconds; None if the system does not report it, or it is awake."""
    try:
        with open(f"/proc/self/task/{native_id}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
        with open(f"/proc/self/task/{native_id}/schedstat", "rb") as file:
            return int(file.read().split()[0]) if state == b"S" else None
    except (OSError, ValueError, IndexError):
        return None


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
    libc.fflush.argtypes = [ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc
