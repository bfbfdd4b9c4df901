"""User functions before and after the model, `f(context, data)`, each in a subprocess.

`context` is a dictionary that lives as long as the subprocess: it has the canonical manifest under `manifest`, and
keeps what calls store in it. `data` is one sample before the model (bytes of a file, text, or arrays by input name),
and one sample's first output after it. The function returns an array, or arrays by input name.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from xsp import processes
from xsp.errors import ManifestError, XspError, first_line
from xsp.evaluate.jsonlines import DTYPES, decode, encode
from xsp.evaluate.manifest import Function, Manifest

_CODE = processes.call_code("xsp.evaluate.userfunctions", "work")

STARTING_S = 60.0
"""Seconds for the subprocess to start and import the file."""


class UserFunction:
    """A function in a subprocess, called like the function: `f(data)`."""

    def __init__(self, side: str, function: Function, manifest: Manifest, folder: Path) -> None:
        """Start the subprocess and make it import the function.

        Args:
            side: `preprocess` or `postprocess`, for messages.
            function: the function and the time limit of a call.
            manifest: manifest for its `context`.
            folder: base of the file's path, and the subprocess's working directory.

        Raises:
            ManifestError: there is no such function, or its file cannot be imported.
        """
        self._label, self._seconds = f"model.{side}: {function.function}", function.seconds
        self._may_return_mapping = side == "preprocess"
        self._lock = threading.Lock()
        self._transfer_ns: list[int] = []
        file, _, name = function.function.rpartition(":")
        try:
            self._process: processes.WorkerProcess | None = processes.WorkerProcess(_CODE, str(os.getpid()))
        except OSError as error:
            raise ManifestError(f"{self._label}: its process cannot be started ({error})") from error
        request = {"file": str((folder / file).resolve()), "name": name, "folder": str(folder.resolve())}
        try:
            self._ask({**request, "context": {"manifest": manifest.plain()}}, STARTING_S)
        except BaseException:
            self.close()
            raise

    def __call__(self, data: Any) -> Any:
        """Return the function's result for one sample: an array, or arrays by name.

        Raises:
            ManifestError: it raises an error, exceeds its time limit, ends, or returns something else.
        """
        with self._lock:  # concurrent requests share the subprocess
            begin = time.perf_counter_ns()
            try:
                payload = _to_json(data)
            except TypeError as error:
                raise ManifestError(f"{self._label}: its input cannot be passed to it ({error})") from error
            reply = self._ask({"data": payload}, self._seconds)
            result = _from_json(reply["data"])
            self._transfer_ns.append(time.perf_counter_ns() - begin - int(reply["took_ns"]))
        if isinstance(result, np.ndarray) or (self._may_return_mapping and isinstance(result, dict)):
            return result
        raise ManifestError(f"{self._label}: it returns {type(result).__name__}, not an array")

    def _ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if self._process is None:
            raise ManifestError(f"{self._label}: its process has ended")
        self._process.ask(request)
        deadline = time.monotonic() + seconds
        line = self._process.answer(deadline)
        if not line:
            is_late = time.monotonic() >= deadline
            code = self.close(0.0 if is_late else 2.0)
            raise ManifestError(
                f"{self._label}: it did not answer within {seconds:g} s (the limit is `seconds` beside `function`)"
                if is_late
                else f"{self._label}: its process ended ({processes.exit_description(code)})"
            )
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ManifestError(f"{self._label}: {reply['error']}")
        return reply

    def notes(self) -> list[str]:
        """Return a note on latencies: the time of the round trip to the subprocess."""
        if not self._transfer_ns:
            return []
        delay_ms = statistics.median(self._transfer_ns) / 1e6
        return [
            f"{self._label} runs in a separate process: latencies include {delay_ms:.2g} ms of transfer to it and back"
        ]

    def close(self, patience_s: float = 0.0) -> int:
        """End the subprocess, and return its exit code; a second call does nothing."""
        process, self._process = self._process, None
        return process.end(patience_s) if process is not None else 0


@contextlib.contextmanager
def of(manifest: Manifest, folder: Path) -> Iterator[dict[str, UserFunction]]:
    """Yield the functions that a manifest names, by side (`preprocess`, `postprocess`); they end with the block.

    Raises:
        ManifestError: a function cannot be started.
    """
    functions: dict[str, UserFunction] = {}
    try:
        for side, spec in (("preprocess", manifest.model.preprocess), ("postprocess", manifest.model.postprocess)):
            if isinstance(spec, Function):
                functions[side] = UserFunction(side, spec, manifest, folder)
        yield functions
    finally:
        for function in functions.values():
            function.close()


def work(parent: int, answers: int) -> None:
    """Import the function named on stdin, and answer each call: the subprocess side of `UserFunction`.

    Args:
        parent: process ID of the requesting process; this one ends with it.
        answers: descriptor for lines of JSON.
    """
    processes.end_with_parent(parent)
    with processes.Questions(answers) as questions:
        request = next(iter(questions))
        file, context = Path(request["file"]), request["context"]
        sys.path.insert(0, str(file.parent))
        os.chdir(request["folder"])
        try:
            from xsp.models import function_of

            function = function_of(file, request["name"])
        except XspError as error:
            questions.answer({"error": str(error)})
            return
        questions.answer({"ready": True})
        for question in questions:
            data = _from_json(question["data"])
            begin = time.perf_counter_ns()
            try:
                result = function(context, data)
                took_ns = time.perf_counter_ns() - begin
                questions.answer({"data": _to_json(result), "took_ns": took_ns})
            except Exception as error:
                # an error's text, with the line of the innermost frame that is in the user's file
                lines = [
                    frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file
                ]
                location = f"line {lines[-1]}: " if lines else ""
                questions.answer({"error": f"{location}{type(error).__name__}: {first_line(error)[:200]}"})


def _to_json(data: Any) -> Any:
    """Return a sample in its JSON form.

    Raises:
        TypeError: it is not a sample.
    """
    if isinstance(data, (bytes, bytearray)):
        return {"bytes": base64.b64encode(data).decode()}
    if isinstance(data, str):
        return {"text": data}
    if isinstance(data, Mapping):
        return {"arrays": {str(name): _array(array) for name, array in data.items()}}
    return _array(data)


def _array(value: Any) -> dict[str, Any]:
    array = np.asarray(value.detach() if hasattr(value, "detach") else value)
    if array.dtype.name not in DTYPES:
        raise TypeError(f"an array of {array.dtype.name} cannot be passed; there are {', '.join(DTYPES)}")
    return encode(array)


def _from_json(value: Mapping[str, Any]) -> Any:
    """Return the sample of a JSON form."""
    if "bytes" in value:
        return base64.b64decode(value["bytes"])
    if "text" in value:
        return value["text"]
    if "arrays" in value:
        return {name: decode(form) for name, form in value["arrays"].items()}
    return decode(value)
