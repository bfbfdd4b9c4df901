"""Programs made at random as traces, with what an account of them must say: known because they were simulated.

Times are whole microseconds. The host runs phases of operators that launch work, waits for data, and reads values; each
device runs the work of its streams in the order of its launches.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from xsp.schema import Kind, Level, Span

LATENCY = 6
"""Microseconds from the start of a launch to the start of its work on an idle device."""


@dataclass
class Truth:
    """What the simulation did, in microseconds of all iterations together."""

    iterations: int
    wall: int = 0
    phases: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    waiting: int = 0
    """Waiting for a device in calls that synchronise."""

    busy: dict[int, int] = field(default_factory=dict)
    computing: dict[int, int] = field(default_factory=dict)
    earlier: int = 0
    """Work that was launched before the recording, within the recording, on device 0."""


class Program:
    """A program of one rank that is simulated step by step."""

    def __init__(self, seed: int, rank: int = 0) -> None:
        """Draw the program."""
        draw = self.draw = random.Random(seed)
        self.rank, self.devices, self.now, self.number = rank, draw.choice((1, 1, 2)), 1_000, 0
        self.spans: list[Span] = []
        self.work: list[tuple[int, int, int, str]] = []
        """Device, start, end and kind of all work."""

        self.free: dict[tuple[int, int], int] = defaultdict(int)
        self.truth = Truth(draw.randint(1, 5))
        self.step = 0

    def add(self, kind: Kind, name: str, start: int, end: int, level: Level, **columns: object) -> None:
        values: dict[str, object] = {"process": 1, "thread": 1, "step": self.step, "rank": self.rank, **columns}
        self.spans.append(
            Span(kind=kind.value, name=name, level=level, start_ns=start * 1000, dur_ns=(end - start) * 1000)._replace(
                **values  # type: ignore[arg-type]
            )
        )

    def launch(self, kind: str) -> None:
        """Issue work to a device: it begins when its stream is free."""
        self.number += 1
        device = self.draw.randrange(self.devices)
        stream = 7 if kind == "kernel" else {"copy": 8, "nccl": 9}[kind]
        took, length = self.draw.randint(2, 6), self.draw.randint(3, 300)
        name = "cudaMemcpyAsync" if kind == "copy" else "cudaLaunchKernel"
        self.add(Kind.LAUNCH, name, self.now, self.now + took, Level.RUNTIME, correlation_id=self.number)
        start = max(self.now + LATENCY, self.free[device, stream])
        self.run_work(device, stream, start, start + length, kind, self.number)
        self.now += took

    def run_work(self, device: int, stream: int, start: int, end: int, kind: str, number: int | None) -> None:
        names = {"kernel": "sgemm", "copy": "Memcpy DtoD", "nccl": "ncclDevKernel_AllReduce"}
        sort = Kind.COPY if kind == "copy" else Kind.KERNEL
        where = {"device": device, "stream": stream, "thread": None, "correlation_id": number}
        self.add(sort, names[kind], start, end, Level.KERNEL, **where)
        self.free[device, stream] = end
        self.work.append((device, start, end, "earlier" if number is None else kind))

    def read(self) -> None:
        """Wait until all work that was issued has ended."""
        begin = self.now
        end = max([begin + 2, *(end for _, _, end, _ in self.work)])
        self.add(Kind.SYNC, "cudaDeviceSynchronize", begin, end, Level.RUNTIME)
        self.truth.waiting += end - begin
        self.now = end

    def phase(self, kind: Kind, name: str) -> None:
        """Run some operators, each with Python before it, in a phase."""
        begin = self.now
        for _ in range(self.draw.randint(1, 4)):
            self.now += self.draw.randint(0, 40)
            start = self.now
            for _ in range(self.draw.randint(0, 3)):
                self.now += self.draw.randint(1, 30)
                self.launch(self.draw.choice(("kernel", "kernel", "kernel", "copy", "nccl")))
            self.now += self.draw.randint(1, 10)
            self.add(Kind.OP, f"aten::op{self.draw.randrange(3)}", start, self.now, Level.OP)
            if self.draw.random() < 0.2:
                self.now += 1
                self.read()
        self.now += self.draw.randint(1, 5)
        self.add(kind, name, begin, self.now, Level.MODEL)
        self.truth.phases[name] += self.now - begin

    def run(self) -> Program:
        """Simulate the program."""
        draw, begin = self.draw, self.now
        if draw.random() < 0.3:  # work of steps before the recording is still in the queue
            length = draw.randint(20, 500)
            self.run_work(0, 7, begin - 10, begin + length, "kernel", None)
        loads = draw.random() < 0.4
        names = [(Kind.FORWARD, "forward"), (Kind.BACKWARD, "backward"), (Kind.OPTIMIZER, "optimizer")]
        phases = names[: draw.randint(1, 3)]
        last_end = self.now
        for step in range(self.truth.iterations):
            self.step, start = step, self.now
            if loads:
                self.now += draw.randint(5, 400)
                self.add(Kind.DATA, "enumerate(DataLoader)", start, self.now, Level.MODEL)
                self.truth.phases["waiting for data"] += self.now - start
            step_start = self.now if loads and draw.random() < 0.5 and step else start
            self.now += draw.randint(0, 60)
            for kind, name in phases:
                self.phase(kind, name)
                self.now += draw.randint(0, 20)
            self.now += 1
            self.add(Kind.STEP, "train", step_start, self.now, Level.MODEL)
            last_end = self.now
            self.now += draw.randint(0, 50)
        self._count(begin, last_end)
        return self

    def _count(self, begin: int, last_end: int) -> None:
        """Count the truth microsecond by microsecond."""
        own = [work for work in self.work if work[3] != "earlier"]
        end = max([last_end, *(end for _, _, end, _ in own)])
        sets = {kind: {device: set() for device in range(self.devices)} for kind in ("any", "kernel", "earlier")}
        for device, start, stop, kind in self.work:
            moments = range(max(begin, start), min(end, stop))
            sets["earlier" if kind == "earlier" else "any"][device].update(moments)
            if kind == "kernel":
                sets["kernel"][device].update(moments)
        self.truth.busy = {device: len(moments) for device, moments in sets["any"].items() if moments}
        self.truth.computing = {device: len(moments) for device, moments in sets["kernel"].items()}
        self.truth.earlier = len(sets["earlier"][0] - sets["any"][0])
        self.truth.wall = end - begin
