"""C's `stdout`, diverted into a file in memory while something prints there that is not the program's own.

glibc documents the variable as assignable. Python's own output, which does not go through it, and that of child
processes pass untouched; what the program itself prints through C is passed on.

Who prints may be in the middle of it, on another thread, when the diversion is to end: it was asked to print before,
and will when its work is done. So `stdout` goes back at once only where no other thread runs Python. Else it stays
diverted until each of the threads has been seen elsewhere than it was, or asleep, and meanwhile a thread passes on what
the program prints.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

LOOK_S = 0.02
"""Between two looks at the threads; what the program prints through C meanwhile waits that long."""

ASLEEP_S = 0.3
"""A thread that slept as long used no processor, so it is not at work: some may sleep at a barrier for a moment."""

CLOSING_S = 5.0
_KEEP_SIZE, _PUNCH_HOLE, _LINES = 1, 2, 1  # of fallocate; _IOLBF

_changing = threading.RLock()
_real: int | None = None
_owner: CapturedStdout | None = None
"""Who has `stdout` diverted; None while it is the real one, whose address was `_real`."""


class CapturedStdout:
    """C's `stdout`, diverted from `begin` to `end`; lines that begin with a prefix are kept, all others passed on."""

    def __init__(self, prefix: bytes, silence: Callable[[], object]) -> None:
        """Make the file in memory.

        Args:
            prefix: of the lines that are not the program's own.
            silence: has no more of them printed; called in a child that is forked while they are.
        """
        self._prefix, self._silence = prefix, silence
        self._libc = _libc()
        self._stdout = ctypes.c_void_p.in_dll(self._libc, "stdout")
        self._descriptor = os.memfd_create("xsp-stdout")
        self._file = self._libc.fdopen(os.dup(self._descriptor), b"a")
        self._libc.setvbuf(self._file, None, _LINES, 0)  # a child that is forked must not print it a second time
        self._read_to, self._rest = 0, b""
        self._recording = self._watching = False
        self._doubtful: dict[int, _Seen] = {}
        """Threads that may be at work since before the end, by `ident`."""

        self.late = 0
        """Lines that came after the end of what they were asked for in."""

        _look_after_children()

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
        """Divert; False if another one is at it."""
        global _real, _owner
        with _changing:
            if _owner is not None and _owner._recording:
                return False
            if _owner is None:
                _real = self._stdout.value
            else:
                _owner._drop()
                _owner._doubtful = {}  # whose late lines come here now
            _owner, self._recording = self, True
            self._stdout.value = self._file
            self._drop()
        return True

    def end(self) -> list[bytes]:
        """Let no more be printed than what is under way, and return the lines with the prefix."""
        with _changing:
            self._recording = False
            lines = self._take()
            self._doubtful = _others(hot=True)
            if not self._doubtful:
                self._restore()
            elif not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="xsp passes on", daemon=True).start()
        return lines

    def close(self) -> bool:
        """Give the file back when nobody can print to it any more; False if that took too long, and it is kept."""
        end = time.monotonic() + CLOSING_S
        while _owner is self and time.monotonic() < end:
            time.sleep(LOOK_S / 4)
        with _changing:
            clear = _owner is not self
            self._restore()
            self._drop()
        if clear:
            self._libc.fclose(self._file)
            os.close(self._descriptor)
        return clear

    def forget(self) -> None:
        """Put `stdout` back in a forked child, where nobody watches and the file is the parent's."""
        if self._recording:
            self._silence()
        self._restore()
        self._recording, self._watching, self._doubtful = False, False, {}

    def _watch(self) -> None:
        """Pass on what the program prints, until no thread can be in the middle of it."""
        while True:
            time.sleep(LOOK_S)
            with _changing:
                if _owner is not self or self._recording:
                    self._watching = False
                    return
                self._drop()
                now = _others()
                self._doubtful = {
                    ident: now[ident].after(seen)
                    for ident, seen in self._doubtful.items()
                    if _may_be_at(seen, now, ident)
                }
                if not self._doubtful:
                    self._restore()
                    self._drop()
                    self._watching = False
                    return

    def _restore(self) -> None:
        global _owner
        if _owner is self:
            self._stdout.value, _owner = _real, None

    def _drop(self) -> None:
        """Forget late lines, and pass on the rest."""
        self.late += len(self._take())

    def _take(self) -> list[bytes]:
        """Return the lines with the prefix that are complete, and pass on what is not ours."""
        self._libc.fflush(self._file)
        size = os.fstat(self._descriptor).st_size
        if size == self._read_to:
            return []
        text = self._rest + os.pread(self._descriptor, size - self._read_to, self._read_to)
        self._read_to = size
        # others write meanwhile, so nothing is truncated: what was read gives its memory back
        self._libc.fallocate(self._descriptor, _KEEP_SIZE | _PUNCH_HOLE, 0, size)
        ours, foreign = [], []
        self._rest = b""
        for line in text.splitlines(keepends=True):
            before, prefix, after = line.partition(self._prefix)
            foreign.append(before)
            if prefix and after.endswith(b"\n"):
                ours.append(prefix + after)
            elif prefix:
                self._rest = prefix + after
        if any(foreign):
            self._pass_on(b"".join(foreign))
        return ours

    def _pass_on(self, text: bytes) -> None:
        """Write to the real stdout, in order with what C buffered there before."""
        self._libc.fwrite(text, 1, len(text), _real)
        self._libc.fflush(_real)


_looked_after = False


def _look_after_children() -> None:
    global _looked_after
    if not _looked_after:
        os.register_at_fork(after_in_child=_forget)
        _looked_after = True


def _forget() -> None:
    global _changing
    _changing = threading.RLock()  # a thread that stayed with the parent may hold the other one
    if _owner is not None:
        _owner.forget()


class _Seen:
    """Where a thread was, and since when it sleeps."""

    __slots__ = ("asleep_since", "at", "cpu_ns")

    def __init__(self, at: tuple[int, int], cpu_ns: int | None) -> None:
        self.at, self.cpu_ns = at, cpu_ns
        self.asleep_since = time.monotonic()

    def after(self, before: _Seen) -> _Seen:
        """Return this with the time since when it did nothing."""
        if self.cpu_ns is not None and self.cpu_ns == before.cpu_ns:
            self.asleep_since = before.asleep_since
        return self


def _may_be_at(seen: _Seen, now: dict[int, _Seen], ident: int) -> bool:
    """Return whether a thread may be in the same call as when it was seen."""
    here = now.get(ident)
    if here is None or here.at != seen.at:
        return False
    asleep = here.cpu_ns is not None and here.cpu_ns == seen.cpu_ns
    return not (asleep and time.monotonic() - seen.asleep_since > ASLEEP_S)


def _others(hot: bool = False) -> dict[int, _Seen]:
    """Return where the other threads that run Python are, but for xsp's own; if `hot`, without processor times."""
    threads = {each.ident: each for each in threading.enumerate()}
    found: dict[int, _Seen] = {}
    of_unnamed: tuple[int | None, ...] = ()
    frames = sys._current_frames()
    # a frame with itself among its variables stays, with all callers and what they hold, until garbage is collected
    del frames[threading.get_ident()]
    for ident, frame in frames.items():
        thread = threads.get(ident)
        if thread is not None and thread.name.startswith("xsp "):
            continue
        if hot:
            cpu_ns = None
        elif thread is not None:
            cpu_ns = _cpu_ns(thread.native_id)
        else:
            of_unnamed = of_unnamed or (_cpu_ns_without(threads.values()),)
            cpu_ns = of_unnamed[0]
        found[ident] = _Seen((id(frame), frame.f_lasti), cpu_ns)
    return found


def _cpu_ns_without(named: Iterable[threading.Thread]) -> int | None:
    """Return the processor time of all threads of the process that `threading` does not know.

    A thread that was started through `_thread` does not tell its number in the system, so it counts as asleep only
    while all of these sleep: None while one does not.
    """
    known = {str(each.native_id) for each in named}
    try:
        times = [_cpu_ns(int(number)) for number in os.listdir("/proc/self/task") if number not in known]
    except OSError:
        return None
    return None if None in times else sum(filter(None, times))


def _cpu_ns(native_id: int | None) -> int | None:
    """Return the processor time of a thread; None where the system does not tell, or it is not asleep."""
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
