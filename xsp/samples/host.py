"""Memory and CPU time of the measured process and of the machine, from /proc of Linux.

The kernel counts CPU time in ticks, usually 100 per second: at an interval of 500 ms, a process's use is known to a
fiftieth of a core; together with a device, which is read every 50 ms, to a fifth. The kernel counts a process's own
threads, not its children.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from xsp.processes import system_text
from xsp.samples.source import Reading, Source

_BUSY_FIELDS = (0, 1, 2, 5, 6)
"""Positions in the first line of /proc/stat of the times in which cores were busy: user, nice, system, irq, softirq.
Guest time is included in the first two; time stolen by the hypervisor belongs to other machines."""

_USER, _SYSTEM = 11, 12
"""Positions after the name in /proc/PID/stat of the ticks of the process in user and system mode."""


class Host(Source):
    """The measured process and the machine it is on."""

    name = "host"
    interval_ns = 500_000_000  # long, because sampling delays a program that computes on all cores

    def __init__(self, process: int, root: Path = Path("/")) -> None:
        """Prepare to read a process.

        Args:
            process: its process id here.
            root: the folder of `proc` and `sys`.
        """
        self._process = root / "proc" / str(process)
        self._proc = root / "proc"
        self._policies = root / "sys/devices/system/cpu/cpufreq"
        self._before: dict[str, tuple[int, int]] = {}

    def open(self) -> str | None:
        """Return None if the kernel reports on the process, else the reason why it does not."""
        if not (self._process / "statm").is_file():
            return "memory and use of the process are read from /proc, which this system does not have"
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        return None

    def read(self, include_slow: bool) -> Iterator[Reading]:
        """Yield resident memory and CPU use, and once a second the machine's available memory and core clocks."""
        pages = _words(self._process / "statm")
        if len(pages) > 1:
            yield Reading("process.memory.rss", "bytes", int(pages[1]) * self._page_bytes)
        text = system_text(self._process / "stat")
        # The name is in brackets and may itself contain brackets and blanks.
        words = text[text.rfind(")") + 1 :].split()
        for name, ticks in (
            ("process.cpu.use", int(words[_USER]) + int(words[_SYSTEM]) if len(words) > _SYSTEM else None),
            ("host.cpu.use", self._host_ticks()),
        ):
            cores = self._cores(name, ticks)
            if cores is not None:
                yield Reading(name, "cores", cores)
        if include_slow:
            yield from self._memory()
            yield from self._clocks()

    def _host_ticks(self) -> int | None:
        name, *words = system_text(self._proc / "stat").partition("\n")[0].split() or [""]
        return (
            sum(int(words[position]) for position in _BUSY_FIELDS)
            if name == "cpu" and len(words) > max(_BUSY_FIELDS)
            else None
        )

    def _cores(self, name: str, ticks: int | None) -> float | None:
        """Return how many cores were busy on average since the last reading; None for the first reading."""
        if ticks is None:
            return None
        now = time.monotonic_ns()
        previous = self._before.get(name)
        self._before[name] = (ticks, now)
        if previous is None or now <= previous[1]:
            return None
        return (ticks - previous[0]) / self._ticks_per_s / ((now - previous[1]) / 1e9)

    def _memory(self) -> Iterator[Reading]:
        for line in system_text(self._proc / "meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                yield Reading("host.memory.available", "bytes", int(line.split()[1]) * 1024)

    def _clocks(self) -> Iterator[Reading]:
        """Yield the mean and the highest clock of the cores, from cpufreq, else from /proc/cpuinfo."""
        readings = [_words(policy / "scaling_cur_freq") for policy in sorted(self._policies.glob("policy*"))]
        clocks = [int(fields[0]) / 1e3 for fields in readings if fields and fields[0].isdigit()]
        if not clocks:
            lines = system_text(self._proc / "cpuinfo").splitlines()
            clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        if clocks:
            yield Reading("host.cpu.clock", "MHz", sum(clocks) / len(clocks))
            yield Reading("host.cpu.clock.highest", "MHz", max(clocks))


def _words(path: Path) -> list[str]:
    return system_text(path).split()
