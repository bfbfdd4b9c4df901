"""Calls of cuBLAS, cuBLASLt and cuDNN from their logs, for use where NVTX has no ranges.

Each library calls a function of this module with the text of its log. That runs Python in each call, and gives the
start of a call but not its duration: so the collector is on only if it is requested by name, and its spans are points
in time. A library is left alone if the user directed its log elsewhere by its environment variable.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from xsp.collector import Collector
from xsp.schema import Kind, Level, Span

LogCallback = Callable[[str, bytes], None]
"""A callback that takes the name of a library and a text of its log."""

_CALL_NAME = re.compile(r"function (?:[\w:<>*& ]+ )?(\w+)\(")
_VALUE = re.compile(r"i!\s+(\w+): type=[^;]*; val=(.+)")
_PAIR = re.compile(r"(\w+)=([^\s=]+)")
_ADDRESS = re.compile(r"^(POINTER|NULL|nil|0[xX])|\(nil\)")


class _Text(NamedTuple):
    library: str
    time_ns: int
    thread: int
    text: str


class LibraryLogs(Collector):
    """Calls of GPU libraries (LIBRARY), as points in time."""

    name = "cudalogs"
    levels = (Level.LIBRARY,)
    epoch = True
    on_request = True

    def __init__(self) -> None:
        self._texts: list[_Text] = []
        self._logs: list[_Log] = []
        self._on = False
        self._lost_texts = 0

    def available(self) -> str | None:
        """Return why no library's log is available, or None."""
        present_logs = [kind for kind in _LOGS if kind.find_loaded() is not None]
        if not present_logs:
            return "neither cuBLAS nor cuBLASLt nor cuDNN is loaded in this process: import torch built for CUDA first"
        if all(kind.is_redirected() for kind in present_logs):
            return f"the logs of {', '.join(kind.library for kind in present_logs)} are redirected by the environment"
        return None

    def open(self) -> None:
        """Find the loaded libraries whose logs the environment does not direct elsewhere."""
        self._logs = [
            kind(self._on_text) for kind in _LOGS if kind.find_loaded() is not None and not kind.is_redirected()
        ]

    def close(self) -> None:
        """Drop the libraries; each step has restored its changes."""
        self._logs = []

    def start(self, rung: Level, describe: bool) -> None:
        """Switch the libraries' logs on."""
        for log in self._logs:
            log.begin()
        self._on = True

    def stop(self) -> None:
        """Switch the libraries' logs off."""
        self._on = False  # switching the logs is logged, too
        for log in self._logs:
            log.end()

    def spans(self) -> Iterator[Span]:
        """Return the calls in the texts."""
        texts, self._texts = self._texts, []
        for library, time_ns, thread, name, parameters in _calls(texts):
            attributes: dict[str, Any] = {"library": library, "evidence": "logger"}
            if parameters:
                attributes["parameters"] = parameters
            yield Span(
                level=Level.LIBRARY,
                kind=Kind.CALL.value,
                name=name,
                start_ns=time_ns,
                thread=thread,
                collector=self.name,
                attributes=json.dumps(attributes),
            )

    def notes(self) -> Iterator[str]:
        """Yield a sentence on the number of lost texts."""
        if self._lost_texts:
            yield f"{self._lost_texts} messages of libraries' logs could not be read"
            self._lost_texts = 0

    def _on_text(self, library: str, text: bytes) -> None:
        """Keep a text. Called by a library, in the middle of a call."""
        if not self._on:
            return
        try:
            thread = threading.get_native_id()
            self._texts.append(_Text(library, time.time_ns(), thread, text.decode("utf-8", "replace")))
        except Exception:
            self._lost_texts += 1


def _calls(texts: list[_Text]) -> Iterator[tuple[str, int, int, str, dict[str, str]]]:
    """Yield library, time, thread, name and parameters of each call; parameters may be in separate texts."""
    last_calls: dict[tuple[str, int], tuple[str, int, int, str, dict[str, str]]] = {}
    calls = []
    for library, time_ns, thread, text in texts:
        match = _CALL_NAME.search(text)
        if match is not None:
            # a text without a name continues the call before it; cuBLASLt and cuDNN put values next to the name
            call = (library, time_ns, thread, match[1], _values(_PAIR.findall(text[match.end() :])))
            last_calls[library, thread] = call
            calls.append(call)
        elif (library, thread) in last_calls:
            last_calls[library, thread][4].update(_values(_VALUE.findall(text)))
    yield from calls


def _values(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return parameters without addresses, which have no meaning outside of the process."""
    return {name: value.strip() for name, value in pairs if not _ADDRESS.search(value)}


# --- the libraries ---------------------------------------------------------------------------------------


class _Log:
    """One library's log."""

    library = ""
    files: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()

    def __init__(self, on_text: LogCallback) -> None:
        self._handle = self.find_loaded()
        self._on_text = on_text

    @classmethod
    def find_loaded(cls) -> Any:
        """Return the library if it is in this process already, else None."""
        for file in cls.files:
            try:
                return ctypes.CDLL(file, mode=os.RTLD_NOLOAD)
            except OSError:
                continue
        return None

    @classmethod
    def is_redirected(cls) -> bool:
        """Return whether the user directed the log elsewhere."""
        return any(variable in os.environ for variable in cls.variables)

    def begin(self) -> None:
        """Direct the log to the callback."""

    def end(self) -> None:
        """Switch the log off, as it was before."""


class _CublasLt(_Log):
    library = "cuBLASLt"
    files = ("libcublasLt.so.13", "libcublasLt.so.12")
    variables = ("CUBLASLT_LOG_LEVEL", "CUBLASLT_LOG_MASK", "CUBLASLT_LOG_FILE")

    _ALL_CALLS = 5

    def __init__(self, on_text: LogCallback) -> None:
        super().__init__(on_text)
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p)
        self._callback = prototype(self._on_message)

    def begin(self) -> None:
        self._handle.cublasLtLoggerOpenFile(b"/dev/null")  # it also prints what it passes to the callback
        self._handle.cublasLtLoggerSetCallback(self._callback)
        self._handle.cublasLtLoggerSetLevel(self._ALL_CALLS)

    def end(self) -> None:
        self._handle.cublasLtLoggerSetLevel(0)
        self._handle.cublasLtLoggerSetCallback(None)
        self._handle.cublasLtLoggerSetFile(ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stdout"))

    def _on_message(self, level: int, function: bytes, message: bytes) -> None:
        if level == self._ALL_CALLS:
            self._on_text(self.library, b"function %s(%s" % (function, message))


class _Cublas(_Log):
    library = "cuBLAS"
    files = ("libcublas.so.13", "libcublas.so.12")
    variables = ("CUBLAS_LOGINFO_DBG", "CUBLAS_LOGDEST_DBG")

    def __init__(self, on_text: LogCallback) -> None:
        super().__init__(on_text)
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: self._on_text(self.library, text))
        self._previous = ctypes.c_void_p()

    def begin(self) -> None:
        self._handle.cublasGetLoggerCallback(ctypes.byref(self._previous))
        self._handle.cublasSetLoggerCallback(self._callback)
        self._handle.cublasLoggerConfigure(1, 0, 0, None)

    def end(self) -> None:
        self._handle.cublasLoggerConfigure(0, 0, 0, None)
        self._handle.cublasSetLoggerCallback(self._previous)


class _Cudnn(_Log):
    library = "cuDNN"
    files = ("libcudnn.so.9", "libcudnn.so.8")
    variables = ("CUDNN_LOGLEVEL_DBG", "CUDNN_LOGDEST_DBG", "CUDNN_LOGINFO_DBG")

    _INFO = 3

    def __init__(self, on_text: LogCallback) -> None:
        super().__init__(on_text)
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
        self._callback = prototype(lambda severity, userdata, debug, text: self._on_text(self.library, text))
        self._previous = (ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_void_p())

    def begin(self) -> None:
        self._handle.cudnnGetCallback(*map(ctypes.byref, self._previous))
        self._handle.cudnnSetCallback(1 << self._INFO, None, self._callback)

    def end(self) -> None:
        self._handle.cudnnSetCallback(*self._previous)


_LOGS: tuple[type[_Log], ...] = (_CublasLt, _Cublas, _Cudnn)
