"""Primitives of oneDNN, the library under PyTorch's CPU operators, through its own verbose output.

oneDNN prints one line per primitive, with the time at which it began and how long it ran. The lines go to C's
`stdout`. For the length of a step that variable points to a file in memory (glibc documents it as
assignable), so Python's own output, which does not go through it, and that of child processes pass
untouched; what the program itself printed through C is passed on after the step.

oneDNN adds timestamps only if ONEDNN_VERBOSE_TIMESTAMP stood in the environment before it was first used;
`xsp run` and `xsp profile` see to that. What PyTorch hands to MKL or to its own kernels leaves no line: of
those operators the library is unknown, and xsp says so rather than guess.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from xsp.collector import Collector, Probe
from xsp.span import Kind, Level, Span

_PREFIX = b"onednn_verbose,"
_TIMESTAMP = "ONEDNN_VERBOSE_TIMESTAMP"
_FIELDS = (
    "operation,engine,primitive,implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time"
).split(",")


class OneDnnPrimitives(Collector):
    """Executed primitives (LIBRARY). They carry no thread id; oneDNN does not tell it."""

    name = "onednn"
    levels = (Level.LIBRARY,)
    epoch = True

    def __init__(self) -> None:
        self._output: _CapturedStdout | None = None
        self._environment: str | None = None
        self._lines: list[bytes] = []
        self._untimed = 0
        self._unread = 0

    def available(self) -> str | None:
        """Return what is missing: oneDNN in this torch, or glibc."""
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        if not hasattr(torch._C, "_verbose"):
            return "this torch cannot switch oneDNN's verbose output at run time"
        return _CapturedStdout.unavailable()

    def open(self) -> None:
        """Ask for timestamps, and make the file in memory."""
        self._environment = os.environ.get(_TIMESTAMP)
        os.environ[_TIMESTAMP] = "1"
        self._output = _CapturedStdout()

    def close(self) -> None:
        """Restore the environment, and give the file back."""
        if self._environment is None:
            os.environ.pop(_TIMESTAMP, None)
        if self._output is not None:
            self._output.close()
            self._output = None

    def start(self, rung: Level, describe: bool) -> None:
        """Let oneDNN speak, to us."""
        if self._output is not None:
            self._output.begin()
            torch._C._verbose.mkldnn_set_verbose(1)

    def stop(self) -> None:
        """Let it be silent again."""
        if self._output is not None:
            torch._C._verbose.mkldnn_set_verbose(0)
            self._lines += self._output.end()

    def spans(self) -> Iterator[Span]:
        """Return the executed primitives, and pass on what the program itself printed through C."""
        lines, self._lines = self._lines, []
        foreign = [line for line in lines if not line.startswith(_PREFIX)]
        if foreign and self._output is not None:
            self._output.pass_on(b"".join(foreign))
        for line in lines:
            if line.startswith(_PREFIX):
                span = self._primitive(line.decode("utf-8", "replace").rstrip("\n").split(","))
                if span is not None:
                    yield span._replace(collector=self.name)

    def notes(self) -> Iterator[str]:
        """Say which lines could not be used."""
        if self._untimed:
            yield (
                f"{self._untimed} oneDNN primitives have no timestamp and were left out, because oneDNN was "
                f"used before the profile began: start the program with `xsp run`, or set {_TIMESTAMP}=1"
            )
        if self._unread:
            yield f"{self._unread} lines of oneDNN's verbose output are in a form that xsp does not know"
        self._untimed = self._unread = 0

    def probe(self) -> Probe | None:
        """Return the smallest primitive, if PyTorch gives it to oneDNN on this machine."""
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        value = torch.zeros(64, 64, dtype=torch.bfloat16)

        def run() -> None:
            for _ in range(50):
                torch.mm(value, value)

        return Probe(run, spans=50)

    def _primitive(self, fields: list[str]) -> Span | None:
        """Read one line: prefix, version, [timestamp,] component, operation, … , execution time in ms."""
        try:
            begin = next(place for place, field in enumerate(fields) if field in ("primitive", "graph"))
            if fields[begin + 1] != "exec":
                return None  # a header, or the creation of a primitive
            if begin < 3:
                self._untimed += 1
                return None
            start_ns = round(float(fields[begin - 1]) * 1e6)
            dur_ns = round(float(fields[-1]) * 1e6)
        except StopIteration:
            return None  # lines on the library itself
        except (IndexError, ValueError):
            self._unread += 1
            return None
        details = dict(zip(_FIELDS, fields[begin + 1 :], strict=False)) if fields[begin] == "primitive" else {}
        kind = details.get("primitive", "graph")
        kept = {
            name: details[name]
            for name in ("implementation", "prop_kind", "memory_descriptors", "auxiliary", "problem_desc")
            if details.get(name)
        }
        return Span(
            level=Level.LIBRARY,
            kind=Kind.PRIMITIVE.value,
            name=f"oneDNN {kind} {details.get('implementation', '')}".rstrip(),
            type=kind,
            start_ns=start_ns,
            dur_ns=dur_ns,
            attributes=json.dumps({"library": "oneDNN", **kept}),
        )


class _CapturedStdout:
    """C's `stdout`, diverted into a file in memory between `begin` and `end`."""

    def __init__(self) -> None:
        self._libc = _libc()
        self._stdout = ctypes.c_void_p.in_dll(self._libc, "stdout")
        self._descriptor = os.memfd_create("xsp-stdout")
        self._file = self._libc.fdopen(os.dup(self._descriptor), b"w")
        self._before: int | None = None

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

    def begin(self) -> None:
        self._before = self._stdout.value
        self._stdout.value = self._file

    def end(self) -> list[bytes]:
        """Put `stdout` back and return what was written, a line an item."""
        self._libc.fflush(self._file)
        self._stdout.value = self._before
        size = os.fstat(self._descriptor).st_size
        text = os.pread(self._descriptor, size, 0)
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return text.splitlines(keepends=True)

    def pass_on(self, text: bytes) -> None:
        """Write to the real stdout, in order with what C buffered there before."""
        self._libc.fwrite(text, 1, len(text), self._stdout.value)
        self._libc.fflush(self._stdout.value)

    def close(self) -> None:
        self._libc.fclose(self._file)
        os.close(self._descriptor)


def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
    libc.fflush.argtypes = [ctypes.c_void_p]
    libc.fclose.argtypes = [ctypes.c_void_p]
    libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    return libc
