"""Primitives of oneDNN, the library under PyTorch's CPU operators, through its own verbose output.

oneDNN prints one line per primitive, with its start and duration. The lines go to C's `stdout`, which is diverted
during a step, and afterwards for as long as a primitive of another thread that began in the step may still be running:
see `cstdout`.

oneDNN adds timestamps only if ONEDNN_VERBOSE_TIMESTAMP was set in the environment before its first use; `xsp run` and
`xsp profile` set it. Work that PyTorch gives to MKL or to its own kernels prints no line: the library of such operators
is reported as unknown.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import torch

from xsp.collector import Collector, Probe
from xsp.schema import Kind, Level, Span
from xsp_collectors.cstdout import CapturedStdout

_PREFIX = b"onednn_verbose,"
_TIMESTAMP = "ONEDNN_VERBOSE_TIMESTAMP"
_VERBOSE = ("ONEDNN_VERBOSE", "DNNL_VERBOSE")
"""Variables by which the program prints these lines itself; switching them off after a step would end that."""

_FIELDS = (
    "operation,engine,primitive,implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time"
).split(",")


class OneDnnPrimitives(Collector):
    """Executed primitives (LIBRARY). They have no thread id, because oneDNN does not report it."""

    name = "onednn"
    levels = (Level.LIBRARY,)
    epoch = True

    def __init__(self) -> None:
        self._output: CapturedStdout | None = None
        self._is_on = False
        self._previous_timestamp: str | None = None
        self._lines: list[bytes] = []
        self._untimed_primitives = 0
        self._unread_lines = self._late_primitives = self._busy_steps = 0

    def available(self) -> str | None:
        """Return what is missing: oneDNN in this torch, glibc, or verbose output that the program does not use."""
        variable = next((name for name in _VERBOSE if os.environ.get(name, "0") not in ("", "0", "none")), None)
        if variable is not None:
            return f"the program prints oneDNN's verbose output itself, because {variable} is set: unset it"
        if not torch.backends.mkldnn.is_available():
            return "this torch was built without oneDNN"
        if not hasattr(torch._C, "_verbose"):
            return "this torch cannot switch oneDNN's verbose output at run time"
        return CapturedStdout.unavailable()

    def open(self) -> None:
        """Request timestamps, and make the file in memory."""
        self._previous_timestamp = os.environ.get(_TIMESTAMP)
        os.environ[_TIMESTAMP] = "1"
        self._output = CapturedStdout(_PREFIX, _silence)

    def close(self) -> None:
        """Restore the environment, and close the file."""
        if self._previous_timestamp is None:
            os.environ.pop(_TIMESTAMP, None)
        else:
            os.environ[_TIMESTAMP] = self._previous_timestamp
        if self._output is not None:
            self._output.close()
            self._late_primitives += self._output.late_lines
            self._output = None

    def start(self, rung: Level, describe: bool) -> None:
        """Divert oneDNN's verbose output and switch it on."""
        if self._output is not None:
            self._is_on = self._output.begin()
            self._busy_steps += not self._is_on
            if self._is_on:
                torch._C._verbose.mkldnn_set_verbose(1)

    def stop(self) -> None:
        """Switch oneDNN's verbose output off, and take its lines."""
        if self._output is not None and self._is_on:
            self._is_on = False
            _silence()
            self._lines += self._output.end()

    def spans(self) -> Iterator[Span]:
        """Return the executed primitives."""
        lines, self._lines = self._lines, []
        for line in lines:
            span = self._primitive(line.decode("utf-8", "replace").rstrip("\n").split(","))
            if span is not None:
                yield span._replace(collector=self.name)

    def notes(self) -> Iterator[str]:
        """Yield sentences on lines that could not be used."""
        if self._untimed_primitives:
            yield (
                f"{self._untimed_primitives} oneDNN primitives have no timestamp and were left out, because oneDNN was "
                f"used before the profile began: start the program with `xsp run`, or set {_TIMESTAMP}=1"
            )
        if self._unread_lines:
            yield f"{self._unread_lines} lines of oneDNN's verbose output are in a form that xsp does not know"
        if self._busy_steps:
            yield f"in {self._busy_steps} steps oneDNN's output went to another profile of this process"
        if self._late_primitives:
            yield f"{self._late_primitives} oneDNN primitives of other threads ended after their step and are not in it"
        self._untimed_primitives = self._unread_lines = self._late_primitives = self._busy_steps = 0

    def probe(self) -> Probe | None:
        """Return a probe of small primitives, if PyTorch gives them to oneDNN on this machine."""
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        value = torch.zeros(64, 64, dtype=torch.bfloat16)

        def run() -> None:
            for _ in range(50):
                torch.mm(value, value)

        return Probe(run, spans=50)

    def _primitive(self, fields: list[str]) -> Span | None:
        """Parse one line: prefix, version, [timestamp,] component, operation, … , execution time in ms."""
        try:
            begin = next(index for index, field in enumerate(fields) if field in ("primitive", "graph"))
            if fields[begin + 1] != "exec":
                return None  # a header, or the creation of a primitive
            if begin < 3:
                self._untimed_primitives += 1
                return None
            start_ns = round(float(fields[begin - 1]) * 1e6)
            dur_ns = round(float(fields[-1]) * 1e6)
        except StopIteration:
            return None  # a line about the library itself
        except (IndexError, ValueError):
            self._unread_lines += 1
            return None
        details = dict(zip(_FIELDS, fields[begin + 1 :], strict=False)) if fields[begin] == "primitive" else {}
        kind = details.get("primitive", "graph")
        attributes = {
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
            attributes=json.dumps({"library": "oneDNN", **attributes}),
        )


def _silence() -> None:
    torch._C._verbose.mkldnn_set_verbose(0)
