"""The clock of a program: when its loop began and ended, and how long its iterations took, on the system's clock.

The clock is monotonic and the same in all processes, so that the process that started the program knows how long it
took until its first iteration, and from its last one to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Iterator

WARM_UP = 8
"""Iterations that run before the clock is read: they load code and allocate memory."""

LEAST = 16
"""Minimum number of iterations that count, however long they take."""


class Clock:
    """Counts iterations and reads the clock at both ends of the loop, where it waits for the device."""

    def __init__(self, parser: argparse.ArgumentParser | None = None) -> None:
        parser = parser or argparse.ArgumentParser()
        parser.add_argument("--iterations", type=int, help="that count (default: as many as fit into --seconds)")
        parser.add_argument("--seconds", type=float, default=3.0)
        parser.add_argument("--device", default="cpu")
        parser.add_argument(
            "--turns", nargs=2, metavar="PIPE",
            help="wait for a byte from the first pipe before each iteration, and send one to the second after it; "
            "say the time of each iteration, and the processor time of its thread",
        )  # fmt: skip
        self.options = parser.parse_args()
        self.device = self.options.device
        self.laps: dict[str, list[float]] = {}
        self._number = 0
        self._first = self._begin = self._last = 0.0
        self._used = 0.0
        self._faults = 0
        self._steps: list[tuple[float, float]] = []
        # open to both directions, since opening for one waits for the other process
        self._pipes = [os.open(name, os.O_RDWR) for name in self.options.turns or ()]
        self._thread_s = 0.0

    def iterations(self) -> Iterator[int]:
        """Yield the numbers of iterations; each has to end with `lap`."""
        while self.runs():
            if self._pipes:
                os.read(self._pipes[0], 1)
                self._thread_s, self._last = time.thread_time(), time.monotonic()
            yield self._number

    def runs(self) -> bool:
        """Return whether there is another iteration, and read the clock before the first one that counts."""
        if not self._number:
            self._first = time.monotonic()
        if self._number < WARM_UP:
            return True
        if self._number == WARM_UP:
            if not self._begin:
                self._wait()
                self.laps.clear()
                self._used = time.process_time()
                self._faults = _faults()
                self._begin = self._last = time.monotonic()
            return True
        done = self._number - WARM_UP
        if self.options.iterations is not None:
            return done < int(self.options.iterations)
        return done < LEAST or time.monotonic() - self._begin < float(self.options.seconds)

    def lap(self, kind: str = "training") -> None:
        """End an iteration of a kind."""
        now = time.monotonic()
        self.laps.setdefault(kind, []).append(now - self._last)
        if self._pipes:
            self._steps.append((now - self._last, time.thread_time() - self._thread_s))
            os.write(self._pipes[1], b"x")
        self._last = now
        self._number += 1

    def say(self, **more: object) -> None:
        """End the loop, and print what it took in one line of JSON, after what the program computed."""
        used, faults = time.process_time(), _faults()
        end = self._last
        if self.device != "cpu":
            self._wait()
            end = time.monotonic()
        kinds = {kind: {"laps": len(laps), "s": sum(laps)} for kind, laps in self.laps.items()}
        said = {
            "iterations": self._number - WARM_UP,
            "first": self._first,
            "begin": self._begin,
            "end": end,
            "used_s": used - self._used,
            "faults": (faults - self._faults) / (self._number - WARM_UP),
            "clock_s": self._cost_s(),
            "kinds": kinds,
            **more,
        }
        if self._pipes:
            said["steps"] = self._steps
        sys.stdout.flush()
        print(json.dumps(said), flush=True)

    def _cost_s(self, times: int = 2000) -> float:
        """Return what the clock takes in an iteration."""
        others = Clock.__new__(Clock)
        others.__dict__.update(self.__dict__, laps={}, _pipes=[], _number=WARM_UP + 1)
        others.options = argparse.Namespace(iterations=times)
        begin = time.perf_counter()
        for _ in others.iterations():
            others.lap()
        return (time.perf_counter() - begin) / times

    def _wait(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
