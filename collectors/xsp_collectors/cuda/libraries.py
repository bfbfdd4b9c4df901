"""Calls of GPU libraries, from the NVTX ranges of the libraries themselves (LIBRARY).

Libraries such as cuBLAS, cuDNN and NCCL mark their calls with NVTX ranges in their own domains, and CUPTI records them
if it was injected into NVTX before the library's first call. A range in any other domain is the program's own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from xsp.schema import Kind, Level, Span
from xsp_collectors.cuda.activities import COLLECTOR, Marker, thread_of
from xsp_collectors.cuda.calls import ThreadLookup

INJECTION = "NVTX_INJECTION64_PATH"

SWITCHES = {"CUBLAS_NVTX_LEVEL": "1", "CUBLASLT_NVTX_LEVEL": "1", "CUDNN_NVTX_LEVEL": "1"}
"""The libraries' own switches for the detail of their ranges."""

LIBRARIES = {
    name.lower(): name
    for name in "cuBLAS cuBLASLt cuDNN cuSPARSE cuSOLVER cuSOLVERDn cuFFT NCCL NVSHMEM CUB Thrust CCCL".split()
}
"""Names of libraries, by the name of their domain in lower case."""

_INSTANT, _START, _END = 1, 2, 4
_NAME = re.compile(r"\s*([A-Za-z_][\w:.]*)\s*[(\[{,:]?\s*(.*?)[)\]}]?\s*$", re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_]\w*)\s*[=:]\s*([^\s,;]+)")


class LibraryRanges:
    """NVTX ranges, built from their starts and ends, which may be in different steps."""

    def __init__(self) -> None:
        self._open: dict[int, Marker] = {}
        self.unmatched_ends = 0
        """Number of ends of ranges that began before markers were recorded."""

        self.untimed_markers = 0
        """Number of markers without a time from CUPTI."""

    @property
    def open_count(self) -> int:
        """Number of ranges that have not ended yet."""
        return len(self._open)

    def close(self, markers: Iterable[Marker], find_thread: ThreadLookup) -> list[Span]:
        """Return the ranges that end with these markers, and the single points among them."""
        spans = []
        for marker in sorted(markers, key=lambda marker: marker.timestamp):
            if not marker.timestamp:
                self.untimed_markers += 1
            elif marker.flags_ & _START:
                self._open[marker.id] = marker
            elif marker.flags_ & _END:
                start = self._open.pop(marker.id, None)
                if start is None:
                    self.unmatched_ends += 1
                else:
                    spans.append(_span(start, marker, find_thread))
            elif marker.flags_ & _INSTANT:
                spans.append(_span(marker, marker, find_thread))
        return spans


def library_of(domain: str | None) -> str | None:
    """Return the library whose domain this is, or None for the program's own."""
    return LIBRARIES.get((domain or "").strip().lower())


def parse_message(message: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a call and its parameters, parsed from a range's message.

    >>> parse_message("cublasGemmEx(m=64, n=32)")
    ('cublasGemmEx', {'m': 64, 'n': 32})
    >>> parse_message("ncclAllReduce")
    ('ncclAllReduce', {})
    """
    match = _NAME.match(message)
    if match is None:
        return message, {}
    name, arguments = match[1].rstrip(":."), match[2]
    pairs: dict[str, Any] = {key: int(value) if value.isdigit() else value for key, value in _PAIR.findall(arguments)}
    return name, pairs or ({"message": arguments} if arguments else {})


def _span(start: Marker, end: Marker, find_thread: ThreadLookup) -> Span:
    library = library_of(start.domain)
    thread_number = thread_of(start)
    common: dict[str, Any] = {
        "collector": COLLECTOR,
        "start_ns": start.timestamp,
        "dur_ns": end.timestamp - start.timestamp,
        # no thread for a range that ends on another one: it may overlap other spans
        "thread": find_thread(thread_number) if thread_number is not None and thread_number == thread_of(end) else None,
    }
    if library is None:
        domain = json.dumps({"domain": start.domain}) if start.domain else None
        name = start.name or "range without a name"
        return Span(level=Level.APPLICATION, kind=Kind.USER.value, name=name, attributes=domain, **common)
    name, parameters = parse_message(start.name or library)
    attributes: dict[str, Any] = {"library": library, "evidence": "nvtx"}
    if parameters:
        attributes["parameters"] = parameters
    return Span(level=Level.LIBRARY, kind=Kind.CALL.value, name=name, attributes=json.dumps(attributes), **common)


class Injection:
    """The environment variables that NVTX and the libraries read once, before a library's first call."""

    def __init__(self, library: Path | None) -> None:
        self._library = library
        self._previous: dict[str, str | None] = {}
        self._is_too_late = False

    def variables(self) -> dict[str, str]:
        """Return the variables to set, except those that the user has set; none if another tool is injected."""
        if self._library is None or (INJECTION in os.environ and not self._is_set()):
            return {}
        settings = {INJECTION: str(self._library), **SWITCHES}
        return {name: value for name, value in settings.items() if name not in os.environ}

    def install(self, is_too_late: bool) -> None:
        """Set the variables in this process.

        Args:
            is_too_late: whether the libraries may have been used already, and no longer read variables.
        """
        self._is_too_late = is_too_late and not self._is_set()
        if is_too_late:
            return
        for name, value in self.variables().items():
            self._previous[name] = os.environ.get(name)
            os.environ[name] = value

    def remove(self) -> None:
        """Restore the environment."""
        for name, value in self._previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._previous = {}

    def state(self) -> str:
        """Return a short text on whether libraries will name their calls."""
        if self._library is None:
            return "no libcupti"
        if self._is_set():
            return "NVTX"
        return "another tool's NVTX" if INJECTION in os.environ else "NVTX, if set before the libraries are used"

    def notes(self, calls: int, kernels: int) -> Iterator[str]:
        """Yield why calls of libraries are missing, if they are.

        Args:
            calls: number of recorded library calls.
            kernels: number of recorded kernels.
        """
        if calls or not kernels:
            return
        if self._is_too_late:
            yield (
                "no library named its calls: CUDA was in use before the profile began; start the program with "
                "`xsp run`, or enter the block before the model is moved to the device"
            )
        elif INJECTION in os.environ and not self._is_set():
            yield f"no library named its calls: {INJECTION} names another tool's library"
        else:
            yield "no library named its calls: those in use mark none with NVTX, or read their settings earlier"

    def _is_set(self) -> bool:
        return self._library is not None and os.environ.get(INJECTION) == str(self._library)
