"""A stand-in for an accelerator: it computes on the processor, and keeps clocks of its own, so its times are stated.

Each operator takes the host `ISSUE_NS`. The device takes `LAUNCH_NS` and a nanosecond for each `BYTES_PER_NS` of its
results, after all that was issued before in the same stream; the first operator after an overwritten cache takes twice
as long. A value that is read waits for the device. `XSP_STANDIN` holds, as JSON, how many devices there are, an
obstacle, the watts that it draws, and faults by operator: `memory`, `lost`, `hang`, `exit`, and `gone`, after which no
process finds the device. The faults begin after the first call of the operator `after`, if there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xsp.device.ceilings import Ceiling
from xsp.device.contract import Accelerator, Arguments, Elapsed, Fault
from xsp.graph.recorder import flat_tensors

VARIABLE = "XSP_STANDIN"
ISSUE_NS, LAUNCH_NS, BYTES_PER_NS = 5_000, 2_000, 1_000
CACHE_BYTES = 1 << 20
COUNTER_NS = 100_000
"""Time of the host between two updates of the energy counter."""
PRODUCT = "Stand-in 1"
READS = ("aten::_local_scalar_dense", "aten::nonzero")


def settings() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get(VARIABLE) or "{}")
    return found


class StandIn(Accelerator):
    """A device whose clocks advance with the operators that it is given."""

    kind = "standin"

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self._host = 0.0
        self._streams = {0: 0.0}
        self._stream = 0
        self._is_cold = self._is_lost = self._is_replaying = False
        self._called: set[str] = set()

    @classmethod
    def count(cls) -> int:
        return int(settings().get("count", 1))

    @classmethod
    def absence(cls) -> str:
        return "no stand-in was put in"

    def obstacle(self) -> str | None:
        if (gone := settings().get("gone")) and Path(gone).exists():
            return f"{self.id} does not answer"
        found: str | None = settings().get("obstacle")
        return found

    @property
    def name(self) -> str:
        return PRODUCT

    @property
    def torch_name(self) -> str:
        return "cpu"

    def synchronize(self) -> None:
        self._host = max(self._host, *self._streams.values())

    @contextlib.contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """Issue what follows to another stream."""
        before, self._stream = self._stream, number
        self._streams.setdefault(number, 0.0)
        try:
            yield
        finally:
            self._stream = before

    def beside(self, functions: Sequence[Callable[[], object]]) -> None:
        begin = self.mark()
        for number, function in enumerate(functions, 1):
            self._streams[number] = max(begin, self._streams.get(number, 0.0))
            with self.stream(number):
                function()
        self._streams[self._stream] = max(self._streams.values())

    # --- time -----------------------------------------------------------------------------------------------

    def host_ns(self) -> int:
        return round(self._host)

    def spin(self, ns: int) -> None:
        self._work(ns)

    def mark(self) -> float:
        return max(self._streams[self._stream], self._host)

    def between_ns(self, first: float, second: float) -> float:
        return second - first

    def timed(
        self, function: Callable[..., Any], arguments: Arguments, before: Callable[[], object] | None = None
    ) -> Elapsed:
        with _Clocked(self):
            return super().timed(function, arguments, before)

    def waited(self, function: Callable[[], object], calls: int = 1) -> Elapsed:
        with _Clocked(self):
            return super().waited(function, calls)

    def caches(self) -> list[tuple[int, int]]:
        return [(2, CACHE_BYTES)]

    def capture(self, function: Callable[[], object]) -> Callable[[], object]:
        with _Clocked(self):
            function()  # as libraries do: what is allocated once is not part of it
            self.synchronize()
            start = self.mark()
            self.spin(1 << 40)
            begin = self.mark()
            function()
            work_ns = self.mark() - begin
            self._streams[self._stream] = start
        if "capture" in settings().get("faults", {}):
            raise NotImplementedError("the step cannot be captured (it reads a value)")

        def replay() -> object:
            self._is_replaying = True
            try:
                result = function()
            finally:
                self._is_replaying = False
            self._host += ISSUE_NS
            self._work(work_ns)
            return result

        return replay

    def _work(self, ns: float) -> None:
        self._streams[self._stream] = max(self._streams[self._stream], self._host) + ns

    def ran(self, operator: str, results: Any) -> None:
        """Advance the clocks by an operator."""
        if self._is_replaying:
            return
        self._host += ISSUE_NS
        written = sum(tensor.nbytes for tensor in flat_tensors(results))
        ns = 0.0 if operator in _VIEWS else (LAUNCH_NS + written / BYTES_PER_NS) * (2 if self._is_cold else 1)
        self._is_cold = written >= CACHE_BYTES and operator == "aten::add_"
        self._work(ns)
        if operator in READS:
            self.synchronize()

    def check(self, operator: str) -> None:
        """Raise, wait or go as the settings say."""
        self._called.add(operator)
        may_fail = settings().get("after", operator) in self._called
        fault = settings().get("faults", {}).get(operator) if may_fail else None
        if self._is_lost or fault in ("lost", "gone"):
            self._is_lost = True
            if fault == "gone":
                Path(settings()["gone"]).touch()
            raise RuntimeError("stand-in error: an illegal address was used\nfurther lines")
        if fault == "memory":
            raise RuntimeError("stand-in out of memory: 3 GiB were asked for")
        if fault == "hang":
            time.sleep(600)
        if fault == "exit":
            os._exit(9)

    def launch(self) -> Callable[[], object]:
        def launched() -> None:
            self._host += ISSUE_NS
            self._work(LAUNCH_NS)

        return launched

    # --- memory, faults, identity ---------------------------------------------------------------------------

    def free_bytes(self) -> int | None:
        return int(settings().get("free_bytes", 1 << 30))

    def workspace_bytes(self, function: Callable[[], object]) -> int | None:
        return 512

    def pinned(self, tensor: Any) -> Any:
        return tensor.clone()

    def held_bytes(self) -> int | None:
        return int(settings().get("held_bytes", 0))

    def sharing_obstacle(self) -> str:
        return str(settings().get("sharing_obstacle", ""))  # its memory is the host's

    def energy_joules(self) -> float | None:
        watts = settings().get("watts")
        self.check("energy")
        updates = self._host // COUNTER_NS
        return None if watts is None else watts * updates * COUNTER_NS / 1e9

    def kernels(self, function: Callable[[], object]) -> tuple[str, ...]:
        names: list[str] = []
        with _Clocked(self, names):
            function()
        return tuple(name.replace("aten::", "standin_") for name in names if name not in _VIEWS)

    def fault(self, error: BaseException) -> Fault | None:
        if "stand-in out of memory" in str(error):
            return Fault.OUT_OF_MEMORY
        return Fault.LOST if "stand-in error" in str(error) else None

    def ceiling(self, may_measure: bool = False, again: bool = False) -> Ceiling | str:
        return Ceiling(self.name, {"fp32": 1e15, "fp64": 1e15}, {}, 4e12, "stated")

    def identity(self) -> dict[str, Any]:
        device = {"kind": self.kind, "name": self.name, "caches": [[2, CACHE_BYTES]], "driver": "1.0"}
        return {"device": device, "torch": torch.__version__}

    def disturbance(self) -> str:
        return str(settings().get("disturbance", ""))


_VIEWS = {f"aten::{name}" for name in "alias view reshape expand t transpose permute detach slice unbind".split()}


class _Clocked(TorchDispatchMode):
    """Reports operators to a device."""

    def __init__(self, device: StandIn, names: list[str] | None = None) -> None:
        super().__init__()
        self._device, self._names = device, names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func._schema.name
        self._device.check(operator)
        results = func(*args, **(kwargs or {}))
        self._device.ran(operator, results)
        if self._names is not None:
            self._names.append(operator)
        return results


def install(folder: Path, monkeypatch: Any, **values: Any) -> None:
    """Install the stand-in as a package of a third party would be, for this process and those that it starts."""
    (folder / "standin-1.dist-info").mkdir(parents=True, exist_ok=True)
    (folder / "standin-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: standin\nVersion: 1\n")
    (folder / "standin-1.dist-info" / "entry_points.txt").write_text("[xsp.devices]\nstandin = standin:StandIn\n")
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), here]))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv(VARIABLE, json.dumps(values))


def written_model(
    folder: Path,
    result: str = "torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6))), torch.ones(8 * batch, 64)",
) -> str:
    """Write a file with a function that returns a model and its input, and return its name for commands."""
    file = folder / "nets.py"
    file.write_text(f"import torch\n\ndef net(batch):\n    torch.manual_seed(0)\n    return {result}\n")
    return f"{file}:net"
