"""A predictor that is another program: it reads requests as lines of JSON and answers each with one line.

```
{"open": {"manifest": {…}, "level": ""}}        → {"opened": true, "takes": {"x": {"shape": [3], "dtype": "float32"}}}
{"predict": {"inputs": {"x": ARRAY}}}           → {"outputs": [ARRAY], "took_ns": 1250}
{"close": {}}                                   → {"closed": true}
anything                                        → {"error": "why not"}
ARRAY = {"shape": [1, 3], "dtype": "float32", "base64": "…"}     values in rows, little endian
```

`took_ns` is optional: a simulator, or a board with a clock of its own, reports its time, which then counts as the
latency. An accelerator therefore needs only these three lines, and no Python.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xsp import processes
from xsp.errors import ManifestError
from xsp.evaluate.datasets import InputSpec
from xsp.evaluate.manifest import Manifest
from xsp.evaluate.pipeline import Array
from xsp.evaluate.predictors import Answer, Batch

PATIENCE_S = 120.0
"""Seconds to wait for an answer."""

MOST_LINE_BYTES = 256 << 20

MOST_NS = 10**15
"""Limit of the time that a program reports for a batch: eleven days."""

DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@dataclass
class Open:
    """A program that has opened its model."""

    takes: Mapping[str, InputSpec]
    program: Program | None


class Command:
    """The predictor for any program that speaks this protocol."""

    def open(self, manifest: Manifest, folder: Path, level: str) -> Open:
        """Start the program and request that it opens the model."""
        program = Program(manifest.model.command, folder)
        try:
            reply = program.ask({"open": {"manifest": manifest.plain(), "level": level}})
            takes = {
                str(name): InputSpec(
                    _shape(spec["shape"]), _dtype(spec.get("dtype", "float32")), _high(spec.get("high"))
                )
                for name, spec in reply["takes"].items()
            }
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            program.end()
            raise ManifestError(f"model.command: its answer to open does not describe the inputs ({error})") from error
        except BaseException:
            program.end()
            raise
        return Open(takes, program)

    def predict(self, handle: Open, batches: Iterable[Batch]) -> Iterator[Answer]:
        """Yield the program's answers."""
        if handle.program is None:
            raise ManifestError("the model is closed")
        for batch in batches:
            reply = handle.program.ask({"predict": {"inputs": {name: encode(array) for name, array in batch.items()}}})
            try:
                outputs = tuple(decode(output) for output in reply["outputs"])
                took_ns = reply.get("took_ns")
                if took_ns is not None and (isinstance(took_ns, bool) or not 0 <= took_ns < MOST_NS):
                    raise ValueError(f"took_ns is {took_ns}")
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise ManifestError(f"model.command: its answer to predict is invalid ({error})") from error
            yield Answer(outputs, None if took_ns is None else round(took_ns))

    def close(self, handle: Open) -> None:
        """Request that the program closes the model, then end the program."""
        program, handle.program = handle.program, None
        if program is not None:
            try:
                program.ask({"close": {}}, 5.0)
            except ManifestError:
                pass
            finally:
                program.end()


class Program:
    """The subprocess; its stderr is discarded."""

    def __init__(self, command: list[str], folder: Path) -> None:
        local_path = shutil.which(str(folder.resolve() / command[0]))
        path = local_path if os.path.dirname(command[0]) else shutil.which(command[0]) or local_path
        if path is None:
            raise ManifestError(f"model.command: there is no program {command[0]!r}")
        try:
            self._process = subprocess.Popen(
                [path, *command[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                cwd=folder, env=processes.environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ManifestError(f"model.command: {command[0]} cannot be started ({error.strerror})") from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._buffer = bytearray()

    def ask(self, request: dict[str, Any], seconds: float = PATIENCE_S) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            ManifestError: the program reported an error, answered anything else, ended, or did not answer in time.
        """
        deadline = time.monotonic() + seconds
        try:
            self._send(json.dumps(request).encode() + b"\n", deadline)
        except OSError as error:
            raise ManifestError(f"model.command: it ended ({self._exit_text()})") from error
        line = self._line(deadline)
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"model.command: its answer is not JSON: {line[:60]!r}") from error
        if not isinstance(reply, dict) or "error" in reply:
            reason = reply.get("error") if isinstance(reply, dict) else reply
            raise ManifestError(f"model.command: it reports {str(reason)[:200]!r}")
        return reply

    def _send(self, message: bytes, deadline: float) -> None:
        """Write a request; raise an error if the program does not read it by the deadline."""
        assert self._process.stdin is not None
        descriptor, remaining = self._process.stdin.fileno(), memoryview(message)
        while remaining:
            _, writable, _ = select.select([], [descriptor], [], max(0.0, deadline - time.monotonic()))
            if not writable:
                raise ManifestError("model.command: it did not read its request in time")
            with contextlib.suppress(BlockingIOError):
                remaining = remaining[os.write(descriptor, remaining) :]

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            readable, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise ManifestError("model.command: it did not answer in time")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise ManifestError(f"model.command: it ended ({self._exit_text()})")
            self._buffer += chunk
            if len(self._buffer) > MOST_LINE_BYTES:
                raise ManifestError(f"model.command: it wrote a line of more than {MOST_LINE_BYTES >> 20} MiB")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _exit_text(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"exit code {self._process.wait(2.0)}"
        return "its pipes are closed"

    def end(self) -> None:
        """Close its pipes, then kill it with all processes that it started."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        with contextlib.suppress(OSError):  # a shell may have ended before the simulator that it started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def encode(value: Array) -> dict[str, Any]:
    """Return an array in its JSON form."""
    array = np.ascontiguousarray(value)
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return {"shape": list(array.shape), "dtype": array.dtype.name, "base64": base64.b64encode(data).decode()}


def decode(value: Any) -> Array:
    """Return the array of a JSON form.

    Raises:
        KeyError, TypeError, ValueError: it does not describe an array.
    """
    dtype = np.dtype(_dtype(value["dtype"])).newbyteorder("<")
    data = base64.b64decode(value["base64"], validate=True)
    return np.frombuffer(data, dtype).reshape(_shape(value["shape"])).astype(dtype.newbyteorder("="))


def _dtype(name: Any) -> str:
    if name not in DTYPES:
        raise ValueError(f"there is no type {name!r}; there are {', '.join(DTYPES)}")
    return str(name)


def _high(value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value < 1 << 63):
        raise ValueError(f"high is {value!r}, and not a number above 0")
    return value


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(int(size) for size in sizes)
    if any(size < 0 for size in shape) or len(shape) > 8:
        raise ValueError(f"{shape} is not a shape")
    return shape
